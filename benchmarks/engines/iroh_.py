"""iroh: QUIC streams between keys. The Python binding has streams only, so ranges and lists are ours.

python iroh_.py bulk --size 1000000000
"""

import argparse
import asyncio
import time
from pathlib import Path

import common

NAME = b"benchmark/1"


async def endpoint(iroh):
    options = iroh.EndpointOptions(
        preset=iroh.preset_minimal(),
        bind_addr="127.0.0.1:0",
        alpns=[NAME],
        relay_mode=iroh.RelayMode.disabled(),
    )
    return await iroh.Endpoint.bind(options)


async def serve(args) -> None:
    iroh = common.need("iroh", "iroh")
    node = await endpoint(iroh)
    addresses = [address for address in node.bound_sockets() if address.startswith("127.")]
    common.emit({"key": node.id().to_bytes().hex(), "at": addresses})

    async def answer(incoming) -> None:
        try:
            connection = await (await incoming.accept()).connect()
            if args.allow and connection.remote_id().to_bytes().hex() != args.allow:
                connection.close(403, b"not on the list")
                return
            stream = await connection.accept_bi()
            first = int.from_bytes(await stream.recv().read_exact(8), "big")
            out = stream.send()
            with args.file.open("rb", buffering=0) as file:
                file.seek(first)
                while piece := file.read(common.CHUNK):
                    await out.write_all(piece)
            await out.finish()
            await connection.closed()
        except iroh.IrohError:
            pass

    running = set()
    while incoming := await node.accept_next():
        running.add(asyncio.create_task(answer(incoming)))


async def receive(args) -> None:
    """From each provider in turn, going on where the last one broke."""
    iroh = common.need("iroh", "iroh")
    node = await endpoint(iroh)
    began, cpu = time.perf_counter(), common.own_cpu()
    done, received, broke_s = 0, [], None
    with args.file.open("wb", buffering=0) as out:
        for provider in args.providers:
            key, address = provider.split("@")
            endpoint_address = iroh.EndpointAddr(iroh.EndpointId.from_bytes(bytes.fromhex(key)), None, [address])
            got, last = 0, time.perf_counter()
            try:
                connection = await node.connect(endpoint_address, NAME)
                stream = await connection.open_bi()
                await stream.send().write_all(done.to_bytes(8, "big"))
                incoming = stream.recv()
                while done + got < args.size:
                    piece = await incoming.read(common.CHUNK)
                    if not piece:
                        break
                    out.write(piece)
                    got += len(piece)
                    last = time.perf_counter()
                connection.close(0, b"done")
            except iroh.IrohError:
                broke_s = round(time.perf_counter() - last, 1)
            received.append(got)
            done += got
            if done == args.size:
                break
    seconds = time.perf_counter() - began
    common.emit({"seconds": seconds, "cpu": common.own_cpu() - cpu, "bytes": received, "noticed_s": broke_s})


def provider_of(ready: dict) -> str:
    return f"{ready['key']}@{ready['at'][0]}"


def bulk(args) -> dict:
    data = common.dataset(args.dir, args.size)
    out = args.dir / "iroh-out.bin"
    with common.children(("_serve", "--file", data)) as (sender,):
        ready = sender.line()
        before = sender.cpu()
        with common.children(("_receive", "--file", out, "--size", args.size, "--providers", provider_of(ready))) as (
            receiver,
        ):
            got = receiver.line()
        spent = sender.cpu() - before
    intact = common.same(data, out)
    out.unlink()
    return common.bulk_record(args.size, got["seconds"], spent, got["cpu"], intact)


def kill(args) -> dict:
    data = common.dataset(args.dir, args.size)
    out = args.dir / "iroh-out.bin"
    out.unlink(missing_ok=True)
    with common.children(("_serve", "--file", data), ("_serve", "--file", data)) as (first, second):
        providers = [provider_of(first.line()), provider_of(second.line())]
        with common.children(("_receive", "--file", out, "--size", args.size, "--providers", *providers)) as (
            receiver,
        ):
            bytes_at_kill = common.wait_for_size(out, args.size * 4 // 10)
            first.kill()
            got = receiver.line()
    finished = common.same(data, out)
    out.unlink()
    return {
        "held_at_kill": round(bytes_at_kill / args.size, 3),
        "kept": round(got["bytes"][0] / args.size, 3),
        "downloaded": round(sum(got["bytes"]) / args.size, 3),
        "noticed_after_s": got["noticed_s"],
        "finished": finished,
    }


def strangers(args) -> dict:
    """A provider that lists one key; a fresh key asks."""
    data = common.dataset(args.dir, args.size)
    out = args.dir / "iroh-out.bin"
    with common.children(("_serve", "--file", data, "--allow", "00" * 32)) as (sender,):
        arguments = ("_receive", "--file", out, "--size", args.size, "--providers", provider_of(sender.line()))
        with common.children(arguments) as (receiver,):
            return {"unlisted key (list checked by our code)": receiver.line()["bytes"][0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["bulk", "kill", "strangers", "_serve", "_receive"])
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm/engines"))
    parser.add_argument("--size", type=int, default=1_000_000_000)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--allow")
    parser.add_argument("--providers", nargs="+")
    args = parser.parse_args()
    common.need("iroh", "iroh")
    steps = {"_serve": serve, "_receive": receive}
    if args.what in steps:
        asyncio.run(steps[args.what](args))
    else:
        common.emit(globals()[args.what](args))


if __name__ == "__main__":
    main()
