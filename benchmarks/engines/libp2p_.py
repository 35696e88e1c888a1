"""py-libp2p: streams over TCP with noise and yamux (its defaults), and its Kademlia provider records.

    python libp2p_.py bulk --size 32000000

It wants protobuf below 7, so give it an environment of its own: pip install libp2p psutil cryptography
"""

import argparse
import statistics
import time
from pathlib import Path

import common

NAME = "/benchmark/1"


def new_host(port: int = 0):
    from libp2p import new_host as make
    from libp2p.crypto.ed25519 import create_new_key_pair
    from multiaddr import Multiaddr

    address = Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")
    return make(key_pair=create_new_key_pair(), listen_addrs=[address]), address


async def serve(args) -> None:
    import trio

    host, address = new_host()

    async def answer(stream) -> None:
        if args.refuse:  # the list would hold peer ids; here nobody is on it
            await stream.reset()
            return
        first = int.from_bytes(await stream.read(8), "big")
        with args.file.open("rb", buffering=0) as file:
            file.seek(first)
            while piece := file.read(64 * 1024):
                await stream.write(piece)
        await stream.close()

    async with host.run(listen_addrs=[address]):
        host.set_stream_handler(NAME, answer)
        common.emit({"at": next(str(a) for a in host.get_addrs() if "127.0.0.1" in str(a))})
        await trio.sleep_forever()


async def receive(args) -> None:
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr

    host, address = new_host()
    async with host.run(listen_addrs=[address]):
        began, cpu = time.perf_counter(), common.own_cpu()
        done, received = 0, []
        with args.file.open("wb", buffering=0) as out:
            for provider in args.providers:
                got = 0
                try:
                    peer = info_from_p2p_addr(Multiaddr(provider))
                    await host.connect(peer)
                    stream = await host.new_stream(peer.peer_id, [NAME])
                    await stream.write(done.to_bytes(8, "big"))
                    while done + got < args.size:
                        piece = await stream.read(64 * 1024)
                        if not piece:
                            break
                        out.write(piece)
                        got += len(piece)
                except Exception as error:
                    common.emit({"broke": type(error).__name__})
                received.append(got)
                done += got
                if done == args.size:
                    break
        common.emit({"seconds": time.perf_counter() - began, "cpu": common.own_cpu() - cpu, "bytes": received})


def finish(receiver) -> dict:
    while "seconds" not in (record := receiver.line()):
        pass
    return record


def bulk(args) -> dict:
    data = common.dataset(args.dir, args.size)
    out = args.dir / "libp2p-out.bin"
    with common.children(("_serve", "--file", data)) as (sender,):
        address = sender.line()["at"]
        before = sender.cpu()
        with common.children(("_receive", "--file", out, "--size", args.size, "--providers", address)) as (receiver,):
            got = finish(receiver)
        spent = sender.cpu() - before
    intact = common.same(data, out)
    out.unlink()
    return common.bulk_record(args.size, got["seconds"], spent, got["cpu"], intact)


def kill(args) -> dict:
    data = common.dataset(args.dir, args.size)
    out = args.dir / "libp2p-out.bin"
    out.unlink(missing_ok=True)
    with common.children(("_serve", "--file", data), ("_serve", "--file", data)) as (first, second):
        addresses = [first.line()["at"], second.line()["at"]]
        with common.children(("_receive", "--file", out, "--size", args.size, "--providers", *addresses)) as (
            receiver,
        ):
            bytes_at_kill = common.wait_for_size(out, args.size * 4 // 10)
            first.kill()
            got = finish(receiver)
    finished = common.same(data, out)
    out.unlink()
    return {
        "held_at_kill": round(bytes_at_kill / args.size, 3),
        "kept": round(got["bytes"][0] / args.size, 3),
        "downloaded": round(sum(got["bytes"]) / args.size, 3),
        "finished": finished,
    }


def strangers(args) -> dict:
    data = common.dataset(args.dir, args.size)
    out = args.dir / "libp2p-out.bin"
    with common.children(("_serve", "--file", data, "--refuse")) as (sender,):
        address = sender.line()["at"]
        with common.children(("_receive", "--file", out, "--size", args.size, "--providers", address)) as (receiver,):
            return {"unlisted key (list checked by our code)": finish(receiver)["bytes"][0]}


async def dht(args) -> dict:
    """Twenty nodes in one process; provide on one, find_providers on another."""
    import contextlib
    import hashlib

    import trio
    from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from libp2p.tools.anyio_service.context import background_trio_service
    from multiaddr import Multiaddr

    count, provide_ms, find_ms, missing = 20, [], [], 0
    async with contextlib.AsyncExitStack() as stack:
        hosts, tables = [], []
        for _ in range(count):
            host, address = new_host()
            await stack.enter_async_context(host.run(listen_addrs=[address]))
            if hosts:
                peer_address = next(str(a) for a in hosts[0].get_addrs() if "127.0.0.1" in str(a))
                await host.connect(info_from_p2p_addr(Multiaddr(peer_address)))
            table = KadDHT(host, DHTMode.SERVER, protocol_prefix="/benchmark")
            for other in hosts:
                with contextlib.suppress(Exception):
                    peer_address = next(str(a) for a in other.get_addrs() if "127.0.0.1" in str(a))
                    peer = info_from_p2p_addr(Multiaddr(peer_address))
                    host.get_peerstore().add_addrs(peer.peer_id, peer.addrs, 3600)
                    await table.routing_table.add_peer(peer.peer_id)
            await stack.enter_async_context(background_trio_service(table))
            hosts.append(host)
            tables.append(table)
        await trio.sleep(2)
        for number in range(5):
            key = "1220" + hashlib.sha256(f"network/name-{number}".encode()).hexdigest()
            began = time.perf_counter()
            await tables[(number + 9) % count].provide(key)
            provide_ms.append((time.perf_counter() - began) * 1000)
            began = time.perf_counter()
            providers = await tables[(number + 15) % count].find_providers(key)
            find_ms.append((time.perf_counter() - began) * 1000)
            missing += hosts[(number + 9) % count].get_id() not in {p.peer_id for p in providers}
        common.emit(
            {
                "nodes": count,
                "provide, median / max ms": f"{statistics.median(provide_ms):.0f} / {max(provide_ms):.0f}",
                "find_providers, median / max ms": f"{statistics.median(find_ms):.0f} / {max(find_ms):.0f}",
                "not found, of 5": missing,
                "life of a provider record": "a constant in the engine, 48 h; republished each 22 h",
            }
        )
        import os

        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["bulk", "kill", "strangers", "dht", "_serve", "_receive"])
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm/engines"))
    parser.add_argument("--size", type=int, default=32_000_000)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--refuse", action="store_true")
    parser.add_argument("--providers", nargs="+")
    args = parser.parse_args()
    common.need("libp2p", "'libp2p' psutil cryptography, apart from the others")
    steps = {"_serve": serve, "_receive": receive, "dht": dht}
    if args.what in steps:
        import trio

        trio.run(steps[args.what], args)
    else:
        common.emit(globals()[args.what](args))


if __name__ == "__main__":
    main()
