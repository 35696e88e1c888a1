"""A slice over forebay.network against a plain Python ssl file transfer, both on loopback.

The yardstick is the least that TLS 1.3 with two certificates costs in Python: one connection, `sendall` of 1 MiB
pieces from a file, `recv_into` one buffer, written to a file. Each server is a process of its own, so that both
sides' CPU counts; figures are medians of interleaved rounds.
"""

from __future__ import annotations

import io
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

from benchmarks.measure import Figure, cpu_s, median, process_cpu_s, show
from forebay.errors import NetworkError
from forebay.network.app import Request, Response, file_response, make_app
from forebay.network.client import Client
from forebay.network.http import CHUNK_BYTES
from forebay.network.limits import ServerLimits
from forebay.network.pki.identity import Identity, create_network, join
from forebay.network.server import Server
from forebay.storage.peer_source import PeerSource

NUM_BYTES = 200 << 20
CROWD_BYTES = 32 << 20  # for each of many clients
PIECE = 1 << 20


def _serve_forebay(node: str, path: str, pipe: Connection) -> None:
    app = make_app("benchmark")

    @app.get("/v1/slices/{sha256}")
    async def answer(request: Request, sha256: str) -> Response:
        return file_response(request, Path(path), NUM_BYTES)

    server = Server(app, Identity.load(node), "127.0.0.1", 0, limits=ServerLimits(connections_per_peer=256))
    server.start()
    pipe.send(server.port)
    pipe.recv()
    server.close()


def _serve_plain(node: str, path: str, pipe: Connection) -> None:
    context = Identity.load(node).server_context()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
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


def _download(node: str, port: int, out: str, pace_s: float, pipe: Connection) -> None:
    """A client in a process of its own: downloads when told, says how long it took; with `pace_s` it reads slowly."""

    class Slow(io.RawIOBase):
        def write(self, piece: object) -> int:
            time.sleep(pace_s)
            return len(memoryview(piece))  # type: ignore[arg-type]

    identity = Identity.load(node)
    with Client(identity) as client, Path(out).open("wb") as file:
        pipe.send("ready")
        while pipe.recv() == "go":
            started = time.perf_counter()
            file.seek(0)
            into = Slow() if pace_s else file
            try:
                for piece in PeerSource(client, None, f"127.0.0.1:{port}", str, 600).read("x", 0, CROWD_BYTES):
                    for offset in range(0, len(piece), CHUNK_BYTES):
                        into.write(piece[offset : offset + CHUNK_BYTES])
            except NetworkError:  # the slow one is cut when all others are done
                pipe.send(0.0)
                return
            pipe.send(time.perf_counter() - started)


def _together(folder: Path, nodes: list[Path], port: int, num: int, slow: bool = False) -> tuple[float, float]:
    """Wall seconds until `num` clients, a process each, have the file; and the slowest reader's effect beside them."""
    spawn = multiprocessing.get_context("spawn")
    clients = []
    for i in range(num + slow):
        ours, theirs = spawn.Pipe()
        arguments = (str(nodes[i % len(nodes)]), port, str(folder / "void" / str(i)), 0.5 * (i == num), theirs)
        process = spawn.Process(target=_download, args=arguments, daemon=True)
        process.start()
        clients.append((process, ours))
    for _, ours in clients:
        ours.recv()
    for _, ours in reversed(clients):
        ours.send("go")
    started = time.perf_counter()
    each = [ours.recv() for _, ours in clients[:num]]
    wall_s = time.perf_counter() - started
    for process, ours in clients[:num]:
        ours.send("stop")
        process.join(20)
    for process, _ in clients[num:]:
        process.kill()
    return wall_s, median(each)


def measure_crowd(num: int = 16, num_stuck: int = 64) -> list[Figure]:
    """Many clients at one data node, a slow one among them; its memory with `most` of them."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "void").mkdir()
        create_network(folder / "network", "bench")
        nodes = [folder / f"node{i}" for i in range(5)]
        for node in nodes:
            join(folder / "network", node, node.name)
        source = folder / "slice"
        source.write_bytes(np.random.default_rng(0).bytes(NUM_BYTES))
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve_forebay, args=(str(nodes[0]), str(source), theirs), daemon=True)
        process.start()
        port, server = ours.recv(), psutil.Process(process.pid)
        alone, _ = _together(folder, nodes[1:], port, 1)
        crowd, _ = _together(folder, nodes[1:], port, num)
        beside, _ = _together(folder, nodes[1:], port, num, slow=True)
        connections = []
        taker = Identity.load(nodes[1])
        for i in range(num_stuck):
            tls = Identity.load(nodes[1 + i % 4]).client_context() if i < 4 else taker.client_context()
            sock = tls.wrap_socket(socket.create_connection(("127.0.0.1", port)))
            sock.sendall(f"GET /v1/slices/x HTTP/1.1\r\nRange: bytes=0-{NUM_BYTES - 1}\r\n\r\n".encode())
            connections.append(sock)
        time.sleep(1.0)  # all of them are being sent to, and read nothing
        rss, threads = server.memory_info().rss, server.num_threads()
        for sock in connections:
            sock.close()
        ours.send("stop")
        process.join(20)
    rate = num * CROWD_BYTES / crowd / 1e6
    return [
        Figure("one client", CROWD_BYTES / alone / 1e6, "MB/s"),
        Figure(f"{num} clients together", rate, "MB/s", f"{rate / (CROWD_BYTES / alone / 1e6):.2f} of one client's"),
        Figure("slow reader beside them", crowd / beside, "x speed", "of the others, with it"),
        Figure(f"memory with {num_stuck} stuck", rss / 1e6, "MB", f"{threads} threads"),
    ]


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
        for serve in (_serve_forebay, _serve_plain):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(str(nodes[0]), str(source), theirs), daemon=True)
            process.start()
            servers.append((process, ours, ours.recv()))

        def ours() -> None:
            with out.open("wb") as file:
                for piece in PeerSource(client, None, f"127.0.0.1:{servers[0][2]}", str, 20).read("x", 0, NUM_BYTES):
                    file.write(piece)

        def plain() -> None:
            _receive_plain(taker, servers[1][2], out)

        def timed(index: int, transfer: Callable[[], None]) -> tuple[float, float]:
            pid = servers[index][0].pid
            assert pid is not None
            began = time.perf_counter(), cpu_s() + process_cpu_s(pid)
            transfer()
            costs = time.perf_counter() - began[0], cpu_s() + process_cpu_s(pid) - began[1]
            assert out.stat().st_size == NUM_BYTES
            return costs

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
        Figure("forebay transfer", NUM_BYTES / wall[0] / 1e6, "MB/s", f"{cpu[0]:.2f} CPU s both sides"),
        Figure("transfer/plain ssl", wall[1] / wall[0], "x speed"),
        Figure("transfer/plain ssl CPU", cpu[0] / cpu[1], "x CPU"),
        Figure("CPU a GB, both sides", cpu[0] / NUM_BYTES * 1e9, "s"),
    ]


if __name__ == "__main__":
    show("transfer", [*measure(), *measure_crowd()])
