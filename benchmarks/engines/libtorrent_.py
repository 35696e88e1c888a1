"""libtorrent: BitTorrent v2 swarms, plain and under a private root (SSL torrents), and its Kademlia DHT.

python libtorrent_.py bulk --variant ssl --size 1000000000
"""

import argparse
import hashlib
import os
import statistics
import sys
import time
from pathlib import Path

import common

DH = """-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
"""


def make_torrent(lt, data: Path, root: Path | None) -> Path:
    """A v2 torrent with 1 MiB pieces; with a root certificate it is an SSL torrent."""
    path = data.with_name("ssl.torrent" if root else "plain.torrent")
    if not path.exists():
        files = lt.file_storage()
        lt.add_files(files, str(data))
        torrent = lt.create_torrent(files, common.MIB, lt.create_torrent.v2_only)
        torrent.set_priv(True)
        if root:
            torrent.set_root_cert(root.read_text())
        lt.set_piece_hashes(torrent, str(data.parent))
        path.write_bytes(lt.bencode(torrent.generate()))
    return path


def open_session(lt, secure: bool):
    # uTP off and every address let in: the fastest that loopback gives.
    return lt.session(
        {
            "listen_interfaces": "127.0.0.1:0s" if secure else "127.0.0.1:0",
            "enable_dht": False,
            "enable_lsd": False,
            "enable_upnp": False,
            "enable_natpmp": False,
            "enable_outgoing_utp": False,
            "enable_incoming_utp": False,
            "allow_multiple_connections_per_ip": True,
            "alert_mask": lt.alert.category_t.status_notification | lt.alert.category_t.error_notification,
        }
    )


def add(lt, session, args, folder: Path, who: str):
    parameters = lt.add_torrent_params()
    parameters.ti = lt.torrent_info(str(args.torrent))
    parameters.save_path = str(folder)
    parameters.flags &= ~lt.torrent_flags.auto_managed
    parameters.flags |= lt.torrent_flags.paused
    handle = session.add_torrent(parameters)
    if args.variant == "ssl" and who != "none":
        home = common.certificates(args.dir)
        (home / "dh.pem").write_text(DH)
        handle.set_ssl_certificate(str(home / f"{who}.crt"), str(home / f"{who}.key"), str(home / "dh.pem"), "")
    handle.resume()
    return handle


def listen_port(session, secure: bool) -> int:
    for _ in range(500):
        port = session.ssl_listen_port() if secure else session.listen_port()
        if port:
            return port
        time.sleep(0.01)
    raise TimeoutError("no listening port")


def seed(args) -> None:
    lt = common.need("libtorrent", "libtorrent")
    session = open_session(lt, args.variant == "ssl")
    handle = add(lt, session, args, args.file.parent, args.who)
    while not handle.status().is_seeding:
        time.sleep(0.02)
    if args.super:
        handle.set_flags(lt.torrent_flags.super_seeding)
    common.emit({"port": listen_port(session, args.variant == "ssl")})
    for _ in sys.stdin:
        common.emit({"sent": handle.status().total_payload_upload})


def leech(args) -> None:
    """Ready, then told which ports to speak to; done when every piece has passed its hash."""
    import json

    lt = common.need("libtorrent", "libtorrent")
    session = open_session(lt, args.variant == "ssl")
    args.folder.mkdir(parents=True, exist_ok=True)
    handle = add(lt, session, args, args.folder, args.who)
    while handle.status().state in (lt.torrent_status.checking_files, lt.torrent_status.checking_resume_data):
        time.sleep(0.02)
    common.emit({"port": listen_port(session, args.variant == "ssl")})
    ports = json.loads(sys.stdin.readline())["ports"]
    began, cpu = time.perf_counter(), common.own_cpu()
    asked, reported = 0.0, False
    while not (status := handle.status()).is_seeding and time.perf_counter() - began < args.limit:
        if time.perf_counter() - asked > 1:
            # Asked again, as a private swarm learns of peers from nobody else.
            asked = time.perf_counter()
            for port in ports:
                handle.connect_peer(("127.0.0.1", port))
        if args.report and not reported and status.total_wanted_done >= args.size * 4 // 10:
            common.emit({"held": status.total_wanted_done})
            reported = True
        time.sleep(0.005)
    status = handle.status()
    errors = sorted({a.message() for a in session.pop_alerts() if "ssl" in a.message().lower()})
    common.emit(
        {
            "seconds": time.perf_counter() - began,
            "cpu": common.own_cpu() - cpu,
            "finished": status.is_seeding,
            "downloaded": status.total_payload_download,
            "errors": errors[:2],
        }
    )
    for _ in sys.stdin:  # stay in the swarm until told to go
        pass


def prepare(args) -> Path:
    import libtorrent as lt

    data = common.dataset(args.dir, args.size)
    home = common.certificates(args.dir)
    args.torrent = make_torrent(lt, data, home / "root.crt" if args.variant == "ssl" else None)
    return data


def arguments_for(args, *more) -> tuple:
    fixed = ("--dir", args.dir, "--variant", args.variant, "--torrent", args.torrent, "--size", args.size)
    return (*fixed, *more)


def clean(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def bulk(args) -> dict:
    data = prepare(args)
    folder = args.dir / "lt-out"
    clean(folder)
    sender = ("_seed", *arguments_for(args, "--file", data, "--who", "a"))
    receiver = ("_leech", *arguments_for(args, "--folder", folder, "--who", "d"))
    with common.children(sender, receiver) as (seeder, leecher):
        port = seeder.line()["port"]
        leecher.line()
        before = seeder.cpu()
        leecher.send({"ports": [port]})
        got = leecher.line()
        spent = seeder.cpu() - before
        intact = got["finished"] and common.same(data, folder / data.name)
    clean(folder)
    return common.bulk_record(args.size, got["seconds"], spent, got["cpu"], intact)


def kill(args) -> dict:
    """Two providers are connected; one dies when the receiver holds 40 %."""
    data = prepare(args)
    folder = args.dir / "lt-out"
    clean(folder)
    seeders = [("_seed", *arguments_for(args, "--file", data, "--who", who)) for who in ("a", "b")]
    receiver = ("_leech", *arguments_for(args, "--folder", folder, "--who", "d", "--report"))
    with common.children(*seeders, receiver) as (first, second, leecher):
        ports = [first.line()["port"], second.line()["port"]]
        leecher.line()
        leecher.send({"ports": ports})
        bytes_at_kill = leecher.line()["held"]
        first.kill()
        got = leecher.line()
        finished = got["finished"] and common.same(data, folder / data.name)
    clean(folder)
    return {
        "held_at_kill": round(bytes_at_kill / args.size, 3),
        "downloaded": round(got["downloaded"] / args.size, 3),
        "seconds": round(got["seconds"], 2),
        "finished": finished,
    }


def fanout(args) -> dict:
    """One origin, three receivers that start together; free, then super-seeding."""
    data = prepare(args)
    result = {}
    for mode in ("free", "super"):
        folders = [args.dir / f"lt-out-{name}" for name in "bcd"]
        for folder in folders:
            clean(folder)
        more = ("--super",) if mode == "super" else ()
        sender = ("_seed", *arguments_for(args, "--file", data, "--who", "a", *more))
        receivers = [
            ("_leech", *arguments_for(args, "--folder", folder, "--who", who, "--limit", args.limit))
            for folder, who in zip(folders, "bcd")
        ]
        with common.children(sender, *receivers) as (seeder, *leechers):
            port = seeder.line()["port"]
            ports = [leecher.line()["port"] for leecher in leechers]
            for own, leecher in zip(ports, leechers):
                leecher.send({"ports": [port, *(other for other in ports if other != own)]})
            records = [leecher.line() for leecher in leechers]
            seeder.send({})
            sent = seeder.line()["sent"]
        result[mode] = round(sent / args.size, 3)
        result[f"{mode}_s"] = round(max(record["seconds"] for record in records), 2)
        result[f"{mode}_finished"] = sum(record["finished"] for record in records)
        for folder in folders:
            clean(folder)
    return result


def strangers(args) -> dict:
    """Bytes each outsider gets from an SSL torrent in eight seconds."""
    args.variant = "ssl"
    data = prepare(args)
    folder = args.dir / "lt-out"
    cases = {"member": "d", "no certificate": "none", "another root": "stranger", "unlisted key": "unlisted"}
    result = {}
    sender = ("_seed", *arguments_for(args, "--file", data, "--who", "a"))
    with common.children(sender) as (seeder,):
        port = seeder.line()["port"]
        for case, who in cases.items():
            clean(folder)
            with common.children(("_leech", *arguments_for(args, "--folder", folder, "--who", who, "--limit", 8))) as (
                leecher,
            ):
                leecher.line()
                leecher.send({"ports": [port]})
                got = leecher.line()
            result[case] = f"{got['downloaded']} {got['errors']}" if got["errors"] else got["downloaded"]
    clean(folder)
    return result


def dht(args) -> dict:
    """Twenty nodes in one process: provider records (BEP 5) and signed items (BEP 44)."""
    lt = common.need("libtorrent", "libtorrent")
    count = 20

    def node(index: int, first: str | None):
        return lt.session(
            {
                "listen_interfaces": f"127.0.1.{index + 1}:{args.port + index}",
                "enable_dht": True,
                "enable_lsd": False,
                "enable_upnp": False,
                "enable_natpmp": False,
                "dht_bootstrap_nodes": first or "",
                "dht_restrict_routing_ips": False,
                "dht_restrict_search_ips": False,
                "dht_enforce_node_id": False,
                "dht_ignore_dark_internet": False,
                "dht_block_ratelimit": 10000,
                "dht_upload_rate_limit": 10_000_000,
                "alert_mask": lt.alert.category_t.dht_notification | lt.alert.category_t.dht_operation_notification,
            }
        )

    def wait(session, kind, right, limit: float = 15.0):
        end = time.perf_counter() + limit
        while time.perf_counter() < end:
            session.wait_for_alert(50)
            for alert in session.pop_alerts():
                if isinstance(alert, kind) and (value := right(alert)):
                    return value
        return None

    first = f"127.0.1.1:{args.port}"
    nodes = [node(index, first if index else None) for index in range(count)]
    time.sleep(8)

    def drain():
        for session in nodes:
            session.pop_alerts()

    def figures(values: list[float]) -> str:
        found_ms = [value * 1000 for value in values if value is not None]
        missing = len(values) - len(found_ms)
        text = f"{statistics.median(found_ms):.1f} / {max(found_ms):.1f}" if found_ms else "none"
        return text + (f", {missing} of {len(values)} not found" if missing else "")

    # Provider records: three providers a name, asked for by a node that announced nothing.
    seen, looked, providers_seen = [], [], []
    for number in range(10):
        key = lt.sha1_hash(hashlib.sha1(f"network/name-{number}/{os.urandom(4)}".encode()).digest())
        drain()
        began = time.perf_counter()
        providers = [nodes[(number + step) % count] for step in (1, 4, 7)]
        for step, session in enumerate(providers):
            session.dht_announce(key, 20000 + number * 10 + step, 0)
        asker = nodes[(number + 11) % count]
        peers, first_reply_s = set(), None
        while len(peers) < 3 and time.perf_counter() - began < 15:
            asked = time.perf_counter()
            asker.dht_get_peers(key)
            reply = wait(asker, lt.dht_get_peers_reply_alert, lambda a, key=key: a.peers(), 0.5)
            if reply:
                first_reply_s = time.perf_counter() - asked
                peers.update(map(tuple, reply))
        seen.append(time.perf_counter() - began if len(peers) == 3 else None)
        looked.append(first_reply_s)
        providers_seen.append(len(peers))

    # The same address with three ports: are they three providers?
    key = lt.sha1_hash(os.urandom(20))
    for step in range(3):
        nodes[2].dht_announce(key, 30000 + step, 0)
        time.sleep(0.3)
    drain()
    ports: set = set()
    for _ in range(6):
        nodes[13].dht_get_peers(key)
        ports.update(map(tuple, wait(nodes[13], lt.dht_get_peers_reply_alert, lambda a: a.peers(), 0.5) or []))

    # Signed items. The private key is libtorrent's expanded form.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    puts, gets = [], []
    for number in range(10):
        secret = Ed25519PrivateKey.generate()
        expanded = bytearray(hashlib.sha512(secret.private_bytes_raw()).digest())
        expanded[0] &= 248
        expanded[31] = expanded[31] & 63 | 64
        public = secret.public_key().public_bytes_raw()
        drain()
        began = time.perf_counter()
        nodes[number].dht_put_mutable_item(bytes(expanded), public, b"address and manifest hash", b"name")
        stored = wait(nodes[number], lt.dht_put_alert, lambda a: a.num_success)
        puts.append(time.perf_counter() - began if stored else None)
        asker = nodes[(number + 11) % count]
        asker.pop_alerts()
        began = time.perf_counter()
        asker.dht_get_mutable_item(public, b"name")
        value = wait(asker, lt.dht_mutable_item_alert, lambda a: a.item)
        gets.append(time.perf_counter() - began if value else None)
    return {
        "nodes": count,
        "announce until 3 of 3 providers seen, median / max ms": figures(seen),
        "get_peers first reply, median / max ms": figures(looked),
        "providers found of 3, worst": min(providers_seen),
        "ports kept for one address, of 3": len(ports),
        "signed put, median / max ms": figures(puts),
        "signed get, median / max ms": figures(gets),
        "life of a provider record": "fixed in the engine; no setting (items: dht_item_lifetime)",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["bulk", "fanout", "kill", "strangers", "dht", "_seed", "_leech"])
    parser.add_argument("--variant", default="plain", choices=["plain", "ssl"])
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm/engines"))
    parser.add_argument("--size", type=int, default=1_000_000_000)
    parser.add_argument("--limit", type=float, default=150)
    parser.add_argument("--port", type=int, default=21000)
    for name in ("--file", "--folder", "--torrent"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--who", default="a")
    parser.add_argument("--super", action="store_true")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    common.need("libtorrent", "libtorrent")
    steps = {"_seed": seed, "_leech": leech}
    if args.what in steps:
        steps[args.what](args)
    else:
        common.emit(globals()[args.what](args))
        os._exit(0)  # twenty sessions take a while to say goodbye


if __name__ == "__main__":
    main()
