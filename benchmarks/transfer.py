"""A slice over millrace.network against a plain Python ssl file transfer, both on loopback.

The yardstick is the least that TLS 1.3 with two certificates costs in Python: one connection, `sendall` of 1 MiB
pieces from a file, `recv_into` one buffer, written to a file. Each server is a process of its own, so that both
sides' CPU counts; figures are medians of interleaved rounds.
"""

from __future__ import annotations

import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.measure import Figure, cpu_s, median, process_cpu_s, show
from millrace.network.client import Client
from millrace.network.https import FileRange, Request, Response, Server
from millrace.network.identity import Identity, create_network, join

NUM_BYTES = 200 << 20
PIECE = 1 << 20


def _serve_millrace(node: str, path: str, door: Connection) -> None:
    def answer(request: Request) -> Response:
        first, _, last = request.headers["Range"].removeprefix("bytes=").partition("-")
        start, stop = int(first), int(last) + 1
        head = {"Content-Range": f"bytes {start}-{stop - 1}/{NUM_BYTES}"}
        return Response(206, FileRange(Path(path), start, stop), "application/octet-stream", head)

    server = Server(Identity.load(node), "127.0.0.1", 0, answer)
    server.start()
    door.send(server.port)
    door.recv()
    server.close()


def _serve_plain(node: str, path: str, door: Connection) -> None:
    context = Identity.load(node).server_context()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        door.send(listener.getsockname()[1])
        while True:
            accepted, _ = listener.accept()
            with context.wrap_socket(accepted, server_side=True) as tls, Path(path).open("rb") as file:
                if tls.recv(1) != b"g":
                    return
                buffer = memoryview(bytearray(PIECE))
                while count := file.readinto(buffer):
                    tls.sendall(buffer[:count])


def _receive_plain(identity: Identity, port: int, out: Path, order: bytes = b"g") -> None:
    raw = socket.create_connection(("127.0.0.1", port))
    with identity.client_context().wrap_socket(raw) as tls, out.open("wb") as file:
        tls.sendall(order)
        buffer = memoryview(bytearray(PIECE))
        while count := tls.recv_into(buffer):
            file.write(buffer[:count])


def measure(rounds: int = 5) -> list[Figure]:
    """The figures. Takes about ten seconds; needs 400 MB of disk."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_network(folder / "network", "bench")
        nodes = [folder / node for node in ("giver", "taker")]
        taker = [join(folder / "network", node, node.name) for node in nodes][1]
        source, out = folder / "slice", folder / "out"
        source.write_bytes(np.random.default_rng(0).bytes(NUM_BYTES))
        servers = []
        for serve in (_serve_millrace, _serve_plain):
            here, there = spawn.Pipe()
            process = spawn.Process(target=serve, args=(str(nodes[0]), str(source), there), daemon=True)
            process.start()
            servers.append((process, here, here.recv()))

        def ours() -> None:
            with out.open("wb") as file:
                client.download(f"127.0.0.1:{servers[0][2]}", "/v1/slices/x", file, 0, NUM_BYTES)

        def plain() -> None:
            _receive_plain(taker, servers[1][2], out)

        def timed(index: int, transfer: Callable[[], None]) -> tuple[float, float]:
            pid = servers[index][0].pid
            assert pid is not None
            began = time.perf_counter(), cpu_s() + process_cpu_s(pid)
            transfer()
            taken = time.perf_counter() - began[0], cpu_s() + process_cpu_s(pid) - began[1]
            assert out.stat().st_size == NUM_BYTES
            return taken

        with Client(taker) as client:
            pairs = [(timed(0, ours), timed(1, plain)) for _ in range(rounds + 1)][1:]
        servers[0][1].send("stop")
        _receive_plain(taker, servers[1][2], out, b"q")
        for process, _, _ in servers:
            process.join(20)
    wall = [median([pair[i][0] for pair in pairs]) for i in (0, 1)]
    cpu = [median([pair[i][1] for pair in pairs]) for i in (0, 1)]
    return [
        Figure("plain ssl", NUM_BYTES / wall[1] / 1e6, "MB/s", f"{cpu[1]:.2f} CPU s both sides"),
        Figure("millrace transfer", NUM_BYTES / wall[0] / 1e6, "MB/s", f"{cpu[0]:.2f} CPU s both sides"),
        Figure("transfer/plain ssl", wall[1] / wall[0], "x speed"),
        Figure("transfer/plain ssl CPU", cpu[0] / cpu[1], "x CPU"),
    ]


if __name__ == "__main__":
    show("transfer", measure())
