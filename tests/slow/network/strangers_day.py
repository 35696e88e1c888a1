"""A job of real processes beside a member that attacks: `python -m tests.slow.network.strangers_day [--minutes 2]`.

Two organisations; a data node, a scheduler and one that stands by, six workers, each a command of `forebay` over mutual
TLS. The workers' program sleeps, as a device that computes leaves the processor free, so that an undisturbed job takes
`--minutes`. At half time the scheduler is killed with SIGKILL and the other goes on. The attacker has the valid
certificate of a worker, in the organisation of half of the workers; it repeats every attack of ATTACKS for as long as
the job lasts, holds leases that it does not use, and sends wrong bytes. A stranger without a certificate begins
handshakes, and announces false addresses in the DHT. Both have low priority (nice 10).

Required: the ledger proves that each sample was used once, every process but the killed one ends with 0, and no server
ever has more than 300 MB. The command runs the job alone first; beside the attacker it may take 1.25 times as long.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import libtorrent

sys.path.append(str(Path(__file__).parents[2]))

from forebay.dataset.reader import open_dataset
from forebay.ledger.chain import Used, receipt_message
from forebay.network.dht import LibtorrentDht
from forebay.network.discovery import record_key
from forebay.network.peer import Scope
from forebay.network.pki.files import read_issuer
from forebay.network.pki.identity import Identity, create_network, create_organisation, join
from forebay.network.pki.revocation import sign_crl
from forebay.storage.hosts import parse_address
from support import attackers, rude_peer, wire
from support.attackers import answers, request
from support.nodes import HOST, NAME, PACED_READER, make_dataset
from support.ports import free_port
from support.processes import Process, forebay
from support.wire import connect

SLICE_S, STEPS = 3.0, 64  # seconds and steps that a slice takes one worker
SEQ_LEN, BATCH = 2048, 8
SLICE_TOKENS = SEQ_LEN * BATCH * STEPS
MAX_PEAK_MB = 300.0
MAX_TIME_RATIO = 1.25
HOLD_S = 4.0  # for which an attack keeps what it took
Message = tuple[str, str, str, Any]  # address, method, path, JSON


class Attacker:
    """A member's certificate, what it knows of the others, and how often each attack got which answer."""

    def __init__(self, settings: dict):
        self.me, self.folder = Identity.load(settings["node"]), Path(settings["folder"])
        self.scheduler = settings["scheduler"]
        self.data, self.dht = settings["data"], settings["dht"]
        self.both = self.data, self.scheduler
        self.others = settings["others"]  # peer ids
        dataset = open_dataset(settings["dataset"])
        self.dataset_id, self.num_slices = dataset.id, dataset.num_slices
        self.hashes = [dataset.table.row(i).sha256 for i in range(dataset.num_slices)]
        self.everything = f"0-{self.num_slices - 1}"
        self.counts = {}
        self.stop = threading.Event()
        self.traps = [socket.create_server((HOST, 0)) for _ in range(16)]  # accept, and say nothing
        self._lock, self._attack = threading.Lock(), threading.local()

    def count(self, answer: object, number: int = 1):
        """Count an answer to the attack that this thread runs."""
        with self._lock:
            self.counts.setdefault(self._attack.name, Counter())[str(answer)] += number

    def run(self, name: str, attack: Callable[[Attacker], Any]):
        """Run an attack once; send the messages that it returns."""
        self._attack.name = name
        try:
            for message in attack(self) or ():
                self.ask(*message)
            self.count("rounds")
        except (OSError, http.client.HTTPException) as error:
            self.count(type(error).__name__)

    def ask(self, address: str, method: str, path: str, body: Any) -> Any:
        """Send a request on a connection of its own; return the answer if it has status 200."""
        try:
            status, answer = attackers.ask(self.me, address, method, path, body)
        except (OSError, http.client.HTTPException) as error:
            self.count(type(error).__name__)
            return None
        self.count(status)
        return answer if status == 200 else None

    def exchange(self, **body: Any) -> Message:
        return self.scheduler, "POST", "/v2/exchange", body

    def swarm(self, **body: Any) -> Message:
        return self.data, "POST", f"/v1/swarm/{self.dataset_id}", body

    def leases(self, session: str, want: int = 4) -> list[dict]:
        return (self.ask(*self.exchange(session=session, want=want)) or {"leases": []})["leases"]

    def send(self, address: str, *requests: bytes):
        """Send requests on one connection, one after the other."""
        with connect(self.me, address) as sock:
            for answer in answers(sock, *requests):
                self.count(answer.status)

    def hold(self, address: str, number: int, first: bytes, drip: bytes = b""):
        """Open connections that send something and read nothing; send `drip` on each every half second."""
        with contextlib.ExitStack() as stack:
            opened = []
            for _ in range(number):
                with contextlib.suppress(OSError):
                    opened.append(stack.enter_context(connect(self.me, address)))
                    opened[-1].sendall(first)
            until = time.monotonic() + HOLD_S
            while time.monotonic() < until and not self.stop.wait(0.5):
                for sock in opened:
                    with contextlib.suppress(OSError):
                        sock.sendall(drip)
            self.count("connections held", len(opened))

    def stranger(self) -> tuple[Path, Identity]:
        """A network of its own, and a member of it."""
        own, home = self.folder / "own-network", self.folder / "stranger"
        with self._lock:
            if not own.exists():
                create_network(own, "own")
                join(own, home, "stranger")
        return own, Identity.load(home)


def addresses(a: Attacker) -> Iterator[Message]:
    """Addresses that accept and say nothing, of others, of this machine, of a cloud's metadata."""
    inside = [*a.both, "169.254.169.254:80", "0.0.0.0:22", "localhost:22", "[::1]:22", "nowhere:1"]
    for address in [*(f"{HOST}:{trap.getsockname()[1]}" for trap in a.traps), *inside]:
        yield a.swarm(address=address, want=a.everything, num=2)
        yield a.exchange(session="s4", address=address)


def inventions(a: Attacker) -> Iterator[Message]:
    """Failures of members that do not exist, swarms and slices of datasets that are not there, too many slices."""
    yield a.swarm(failed=[{"index": 0, "member": f"{i}{'x' * 290}", "wrong": i % 2 == 0} for i in range(1024)])
    yield a.exchange(session="s4", cached={f"{i:064x}": "0-999999999" for i in range(64)})
    yield a.exchange(session="s4", cached={a.dataset_id: "0-999999999"})
    for i in range(8):
        yield a.data, "POST", f"/v1/swarm/{i:064x}", {}


def ranges_without_end(a: Attacker) -> Iterator[Message]:
    """Ranges that cost more than their bytes."""
    for text in (",".join(str(i) for i in range(0, 300_000, 2)), "0," * 200_000 + "0"):
        yield a.swarm(have=text)
        yield a.exchange(cached={a.dataset_id: text})


def sessions(a: Attacker) -> Iterator[Message]:
    """More processes of one certificate than it may have, which have everything and leave."""
    for i in range(200):
        yield a.swarm(session=f"{i:08x}", have=a.everything)
        yield a.exchange(session=f"s{i}", cached={a.dataset_id: a.everything})
    yield a.swarm(session="00000001", leave=True)


def accusations(a: Attacker) -> Iterator[Message]:
    """Everybody is accused of wrong bytes, again and again."""
    for peer_id in [*a.others, *(f"unknown{i}" for i in range(64))]:
        yield a.swarm(failed=[{"index": i, "member": peer_id, "wrong": True} for i in range(min(64, a.num_slices))])
    reports = [{"peer_id": peer_id, "sha256": a.hashes[0], "reason": "r" * 300} for peer_id in a.others]
    yield a.exchange(session="s5", reports=reports, known_leases=[lease["lease_id"] for lease in a.leases("s5", 2)])


def leases_given_back(a: Attacker) -> Iterator[Message]:
    """Leases are taken and given back as broken."""
    failed = [{"lease_id": lease["lease_id"], "reason": "broken"} for lease in a.leases("s6")]
    yield a.exchange(session="s6", failed=failed)


def receipts(a: Attacker) -> Iterator[Message]:
    """Uses without proof, with a false one, of others' leases, with others' signatures; each again."""
    leased = a.leases("s7", 2)
    for lease in [*leased, *({**other, "lease_id": "1"} for other in leased)]:
        span = {"epoch": lease["epoch"], "slice": lease["slice"], "start": lease["start"], "stop": lease["start"] + 8}
        good = a.me.sign(receipt_message(lease["job_id"], [Used(lease["lease_id"], *span.values(), 1)])).hex()
        for proof, signature in (("", good), ("00" * 6, "00" * 64), ("00" * 6, good), ("00" * 6, good)):
            use = {"lease_id": lease["lease_id"], **span, "step": 1, "proof": proof}
            yield a.exchange(session="s7", job_id=lease["job_id"], uses=[use], signature=signature)


def powers_of_others(a: Attacker) -> Iterator[Message]:
    """Reads and acts that only administrators may."""
    for address in a.both:
        for path in ("/metrics", "/v1/status", "/openapi.json", "/v1/crls/" + "a" * 32):
            yield address, "GET", path, None
    for verb in ("pause", "resume", "readmit"):
        yield a.scheduler, "POST", f"/v1/job/{verb}", {}


def slow_readers(a: Attacker):
    """All connections of a certificate ask for slices and small files, and read nothing."""
    table = request("GET", f"/v1/datasets/{a.dataset_id}/slices.parquet") * 16
    a.hold(a.data, 64, table + b"".join(request("GET", f"/v1/slices/{sha256}") for sha256 in a.hashes[:8]))


def idle_connections(a: Attacker):
    """As many connections as it gets rest."""
    a.hold(a.data, 70, b"")
    a.hold(a.scheduler, 200, b"")


def slow_heads(a: Attacker):
    """Heads and bodies come a byte at a time."""
    a.hold(a.data, 30, b"GET /v1/claims HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"x")
    a.hold(a.scheduler, 60, b"POST /v2/exchange HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", b" ")


def half_closed(a: Attacker):
    """Requests end halfway."""
    for address in a.both * 8:
        with connect(a.me, address) as sock, contextlib.suppress(OSError):
            sock.sendall(b"GET /v1/claims HTTP/1.1\r\nHost: x\r\n")
            socket.socket.shutdown(sock, socket.SHUT_WR)
            a.count(len(sock.recv(100)) > 0)


def endless(a: Attacker):
    """Blank lines, heads, bodies, extensions of chunks and trailers without end."""
    chunked = b"POST /v2/exchange HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = chunked, b"3e8\r\n" + b"x" * 1000 + b"\r\n"
    heads = b"GET / HTTP/1.1\r\n", b"X-A: " + b"b" * 1000 + b"\r\n"
    lines = [(chunked + start, b"a" * 1000) for start in (b"1;", b"2\r\n{}\r\n0\r\nA: ", b"0\r\n")]
    for address in a.both:
        for first, more in ((b"", b"\r\n" * 1000), heads, chunks, *lines):
            with connect(a.me, address) as sock, contextlib.suppress(OSError):
                sock.sendall(first)
                for _ in range(6000):  # more than a server reads on before it closes
                    sock.sendall(more)
                a.count("took all")
        a.send(address, b"POST /v2/exchange HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")


def hashes_on_request(a: Attacker):
    """The hashes of a slice in chunks of sizes that it has not."""
    paths = [f"/v1/slices/{a.hashes[0]}/chunks?chunk_bytes={size}" for size in range(4096, 65_536, 997)]
    a.send(a.data, *(request("GET", path) for path in paths))


def hang_ups(a: Attacker):
    """Slices are asked for, and the connection ends."""
    for sha256 in a.hashes[:32]:
        with connect(a.me, a.data) as sock:
            sock.sendall(request("GET", f"/v1/slices/{sha256}"))
    a.count("asked", 32)


def garbage(a: Attacker):
    """Line ends in paths and keys; a megabyte of JSON of the wrong form; CRLs of no issuer and of another network."""
    injected = "manifest.json%0d%0aX-Evil:%201%0d%0a%0d%0a"
    paths = (f"/v1/datasets/{a.dataset_id}/{injected}", f"/v1/slices/{injected}", "/../../etc/passwd", "/v1/..%2f")
    crl = sign_crl(read_issuer(a.stranger()[0]), range(1, 15_000), 9)
    bodies = [("/v1/crls", body) for body in (b"a list", b"x" * 1_000_000, crl, crl)]
    texts = (b"[" * 1_000_000, b'{"known_leases": [' + b'"a",' * 240_000 + b'"a"]}', b"x" * 1_100_000)
    bodies += [("/v2/exchange", body) for body in texts]
    for address in a.both:
        for path in paths:
            a.send(address, request("GET", path, Idempotency_Key=injected))
        for path, body in bodies:
            a.send(address, f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def keys_of_others(a: Attacker):
    """Idempotency-Keys that others may have used, and more of them than are kept."""
    keys = ["k", "0" * 16, "1", "x" * 65, *(f"{i:016x}" for i in range(200))]
    for address, _, path, _ in (a.exchange(), a.swarm()):
        a.send(address, *(request("POST", path, {}, Idempotency_Key=key) for key in keys))


def flood(a: Attacker):
    """As many requests as go over one connection, sixteen at a time."""
    with connect(a.me, a.scheduler) as sock:
        for _ in range(200):
            sock.sendall(request("GET", "/v1/job") * 16)
            for answer in wire.read_answers(sock, 16):
                a.count(answer.status)


def strangers(a: Attacker):
    """No TLS, TLS 1.2, and the certificate of another network."""
    old = a.me.client_context()
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    for address in a.both:
        for context in (None, old, a.stranger()[1].client_context()):
            with contextlib.suppress(OSError, ValueError):
                plain = socket.create_connection(parse_address(address), 20)
                with context.wrap_socket(plain) if context else plain as sock:
                    sock.sendall(request("GET", "/v1/status"))
                    assert b"HTTP" not in sock.recv(1000)


def hoard(a: Attacker):
    """Half of the leases that it gets are held, declared up to their ends and not used: none may be cut."""
    stops = {}
    while not a.stop.wait(1.0):
        if answer := a.ask(*a.exchange(session="s0", want=16, known_leases=list(stops), declared_until=stops)):
            stops = {lease: stops[lease] for lease in answer["active"] if lease in stops}
            stops |= {lease["lease_id"]: lease["stop"] for lease in answer["leases"]}


def false_provider(a: Attacker):
    """A sharer announces all slices, and sends wrong bytes, half answers, redirects, or nothing."""
    chance, size = random.Random(0), 2 * SLICE_TOKENS

    def answer(received):
        first, _, last = received.headers.get("range", "bytes=0-99").removeprefix("bytes=").partition("-")
        part = bytes(min(size, int(last or size) - int(first) + 1))
        lies = [
            rude_peer.http(200, bytes(size)),
            rude_peer.http(206, part, Content_Range=f"bytes {first}-{last}/{size}"),
            b"HTTP/1.1 206 X\r\nContent-Length: 1000000\r\n\r\n" + bytes(1000),
            rude_peer.http(307, b"", Location=f"https://{a.scheduler}/v1/job"),
            None,
        ]
        return chance.choice(lies)

    with rude_peer.RudePeer(a.me, answer, lambda received: True) as peer:
        while not a.stop.wait(2.0):
            a.ask(*a.exchange(session="s8", address=peer.address, cached={a.dataset_id: a.everything}))
            a.ask(*a.swarm(address=peer.address, have=a.everything))


def handshakes(a: Attacker):
    """A stranger begins handshakes and goes, some hundred a second."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    hello = outgoing.read()
    while not a.stop.wait(0.02):
        for address in a.both * 4:
            with contextlib.suppress(OSError), socket.create_connection(parse_address(address), 5) as sock:
                sock.sendall(hello)
        a.count("handshakes", 8)


def announcements(a: Attacker):
    """A stranger announces false addresses under the keys by which nodes find each other."""
    lt, names = libtorrent, [("dataset", NAME), ("scheduler", NAME), ("revocations", "")]
    keys = [record_key(a.me.network_id, *name) for name in names]
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.connect(tuple(a.dht))
        sock.settimeout(2.0)

        def query(name, **arguments):
            sock.send(lt.bencode({"t": "aa", "y": "q", "q": name, "a": {"id": "some-stranger-000000", **arguments}}))

        while not a.stop.wait(0.1):
            for key in keys:
                with contextlib.suppress(OSError, KeyError, RuntimeError):
                    query("get_peers", info_hash=key)
                    token = lt.bdecode(sock.recv(65_536))[b"r"][b"token"]
                    for trap in a.traps:
                        query("announce_peer", info_hash=key, port=trap.getsockname()[1], token=token)
            a.count("announced", len(keys) * len(a.traps))


ATTACKS = [
    accusations, leases_given_back, receipts,  # first, while it still gets leases
    addresses, endless, flood, garbage, half_closed, hang_ups, hashes_on_request, idle_connections, inventions,
    keys_of_others, powers_of_others, ranges_without_end, sessions, slow_heads, slow_readers, strangers,
]  # fmt: skip


def attack(settings: dict):
    """Attack until standard input ends, then print what was answered."""
    os.nice(10)
    a, turns, lock = Attacker(settings), 0, threading.Lock()

    def walk():
        nonlocal turns
        while not a.stop.is_set():
            with lock:
                each, turns = ATTACKS[turns % len(ATTACKS)], turns + 1
            a.run(each.__name__, each)

    always = [
        lambda each=each: a.run(each.__name__, each) for each in (hoard, false_provider, handshakes, announcements)
    ]
    for target in (walk, walk, walk, walk, *always):
        threading.Thread(target=target, daemon=True).start()
    sys.stdin.read()
    a.stop.set()
    print(json.dumps({"attacks": {name: dict(counts) for name, counts in sorted(a.counts.items())}}), flush=True)
    os._exit(0)


def run_day(folder: Path, minutes: float, *, workers: int = 6, is_attacked: bool = True) -> SimpleNamespace:
    """Run the job in an empty folder; return its outcome: `peaks_mb` by process, `wait_share` by worker."""
    day, nodes = SimpleNamespace(seconds=0.0, peaks_mb={}, wait_share={}, attacks={}, faults=[]), {}
    num_slices = round(min(1.0, minutes) * 60.0 * workers / SLICE_S)
    with contextlib.ExitStack() as stack:
        homes = _make_members(folder, workers, stack)
        make_dataset(folder / "dataset", num_slices + 1, SLICE_TOKENS, 60_000)
        scheduler = f"{HOST}:{free_port()}"

        def start(name, *argv, member=""):
            words = [*argv[:2], *f"--identity {homes[member or name].node_dir} --json".split(), *argv[2:]]
            nodes[name] = forebay(*words, FOREBAY_EXIT_ON_STDIN_CLOSE="1")
            stack.callback(nodes[name].end)
            return nodes[name]

        schedule = f"scheduler {NAME} --listen {scheduler} --state {folder}/state --seq-len {SEQ_LEN}".split()
        schedule += f"--epochs {max(1, round(minutes))} --lease-timeout 5 --idle-timeout 10".split()
        data = start("data", "serve", folder / "dataset").ready()["address"]
        start("scheduler", *schedule).ready()
        start("standby", *schedule, "--standby", member="scheduler").ready()
        if is_attacked:
            settings = {"node": homes["attacker"].node_dir, "folder": folder, "dataset": folder / "dataset"}
            others = [member.peer_id for name, member in homes.items() if name != "attacker"]
            settings |= {"scheduler": scheduler, "data": data, "others": others}
            settings["dht"] = homes["attacker"].bootstrap[0]
            attacker = Process(__file__, "--attack", json.dumps(settings, default=str))
            stack.callback(attacker.end)
        began = time.monotonic()
        for name in [f"worker{i}" for i in range(workers)]:
            words = f"worker {NAME} --scheduler {scheduler} --batch-size {BATCH} --cache-dir {folder}/{name}".split()
            words += ["--cache-bytes", 32 * SLICE_TOKENS]
            start(name, *words, "--", *PACED_READER, SLICE_S / STEPS)
        half = num_slices * STEPS * BATCH * max(1, round(minutes)) / 2
        running = [node for name, node in nodes.items() if name.startswith("worker")]
        while any(node.popen.poll() is None for node in running):
            day.peaks_mb |= {
                name: _peak_mb(node.popen.pid) for name, node in nodes.items() if node.popen.poll() is None
            }
            used = sum(max((line.get("samples", 0) for line in node.lines), default=0) for node in running)
            if used >= half and nodes["scheduler"].popen.poll() is None:
                nodes["scheduler"].end()
            time.sleep(0.25)
        day.seconds = time.monotonic() - began
        if is_attacked:
            attacker.popen.stdin.close()
            attacker.wait()
            day.attacks = attacker.lines[-1]["attacks"]
        for name, node in nodes.items():
            expected = -signal.SIGKILL if name == "scheduler" else 0
            if (code := node.end(signal.SIGTERM)) != expected:
                day.faults.append(f"{name} ended with {code}: {node.errors[-500:]}")
            elif node in running:
                day.wait_share[name] = node.lines[-1]["report"]["wait_share"]
            elif day.peaks_mb[name] >= MAX_PEAK_MB:
                day.faults.append(f"{name}: peak of {day.peaks_mb[name]:.0f} MB")
    verify = [sys.executable, *f"-m forebay ledger verify {folder}/state/ledger.jsonl --json".split()]
    proof = subprocess.run(verify, capture_output=True, text=True)
    if proof.returncode or '"missing": 0, "repeated": 0' not in proof.stdout:
        day.faults.append(f"forebay ledger verify: {proof.stdout[-500:]} {proof.stderr[-500:]}")
    return day


def _make_members(folder, workers, stack):
    """A network of two organisations and its members."""
    dht = LibtorrentDht(HOST, 0, [])
    stack.callback(dht.close)
    create_network(folder / "network", "day", bootstrap=[(HOST, dht.port)])
    for name in ("acme", "globex"):
        create_organisation(folder / "network", folder / name, name)
    members = {"data": ("acme", "data"), "scheduler": ("globex", "scheduler"), "attacker": ("globex", "worker")}
    members |= {f"worker{i}": (("acme", "globex")[i % 2], "worker") for i in range(workers)}
    return {
        name: join(folder / organisation, folder / "nodes" / name, name, scope=Scope(frozenset({role})))
        for name, (organisation, role) in members.items()
    }


def _peak_mb(pid):
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) * 1024 / 1e6 if match else 0.0


def main() -> int:
    """Run the job alone and beside the attacker; print both, and return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="that an undisturbed job takes, about (2)")
    parser.add_argument("--attack", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        attack(args.attack)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[-1], os.environ.get("PYTHONPATH")]))
    days = []
    for is_attacked in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            days.append(run_day(Path(folder), args.minutes, is_attacked=is_attacked))
            print(json.dumps({"is_attacked": is_attacked, **vars(days[-1])}), flush=True)
    ratio = days[1].seconds / days[0].seconds
    print(json.dumps({"time_ratio": round(ratio, 3)}), flush=True)
    return int(any(day.faults for day in days) or ratio > MAX_TIME_RATIO)


if __name__ == "__main__":
    sys.exit(main())
