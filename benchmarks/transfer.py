"""A slice over forebay.network against a plain Python ssl file transfer, both on loopback.

The yardstick is the least that TLS 1.3 with two certificates costs in Python: one connection, `sendall` of 1 MiB
pieces from a file, `recv_into` one buffer, written to a file. Each server is a process of its own, so that both
sides' CPU counts; figures are medians of interleaved rounds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

from benchmarks.measure import Figure, cpu_s, median, process_cpu_s, show
from forebay.network.app import Request, Response, file_response, make_app
from forebay.network.client import Client
from forebay.network.limits import ServerLimits
from forebay.network.peer_source import PeerSource
from forebay.network.pki.identity import Identity, create_network, join
from forebay.network.server import Server

NUM_BYTES = 200 << 20
CROWD_BYTES = 32 << 20  # for each of many clients
PIECE = 1 << 20
SPAWN = multiprocessing.get_context("spawn")


def serve_forebay(node: str, path: str, pipe: Connection) -> None:
    app = make_app("benchmark")

    @app.get("/v1/slices/{sha256}")
    async def answer(request: Request, sha256: str) -> Response:
        return file_response(request, Path(path), NUM_BYTES)

    server = Server(app, Identity.load(node), "127.0.0.1", 0, limits=ServerLimits(connections_per_peer=256))
    server.start()
    pipe.send(server.port)
    pipe.recv()


def serve_plain(node: str, path: str, pipe: Connection) -> None:
    context = Identity.load(node).server_context()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        while True:
            accepted, _ = listener.accept()
            with context.wrap_socket(accepted, server_side=True) as tls, Path(path).open("rb") as file:
                buffer = memoryview(bytearray(PIECE))
                while count := file.readinto(buffer):
                    tls.sendall(buffer[:count])


def receive_plain(identity: Identity, port: int, out: Path) -> None:
    raw = socket.create_connection(("127.0.0.1", port))
    with identity.client_context().wrap_socket(raw) as tls, out.open("wb") as file:
        buffer = memoryview(bytearray(PIECE))
        while count := tls.recv_into(buffer):
            file.write(buffer[:count])


def receive_forebay(client: Client, port: int, out: Path, num_bytes: int) -> None:
    with out.open("wb") as file:
        for piece in PeerSource(client, None, f"127.0.0.1:{port}", str, 600).read("x.safetensors", 0, num_bytes):
            file.write(piece)


@contextlib.contextmanager
def child(function: Callable[..., None], *arguments: object) -> Iterator[tuple[int, Connection]]:
    """A process, killed in the end: its id, and a pipe to the connection that its function gets last."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=function, args=(*arguments, theirs), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield process.pid, ours
    finally:
        process.kill()
        process.join()


def download(node: str, port: int, out: str, pipe: Connection) -> None:
    """A client: downloads when told, and says how long it took."""
    with Client(Identity.load(node)) as client:
        pipe.send("ready")
        pipe.recv()
        started = time.perf_counter()
        receive_forebay(client, port, Path(out), CROWD_BYTES)
        pipe.send(time.perf_counter() - started)
        pipe.recv()


def time_crowd(folder: Path, nodes: list[Path], port: int, num: int) -> float:
    """Wall seconds until `num` clients, a process each, have the file."""
    with contextlib.ExitStack() as stack:
        pipes = []
        for i in range(num):
            arguments = (str(nodes[i % len(nodes)]), port, str(folder / f"out{i}"))
            pipes.append(stack.enter_context(child(download, *arguments))[1])
        for pipe in pipes:
            pipe.recv()
        started = time.perf_counter()
        for pipe in pipes:
            pipe.send("go")
        for pipe in pipes:
            pipe.recv()
        return time.perf_counter() - started


def measure_crowd(num: int = 16, num_stuck: int = 64) -> list[Figure]:
    """Many clients at one data node; its memory with `num_stuck` that request and do not read."""
    with files() as (folder, nodes), child(serve_forebay, str(nodes[0]), str(folder / "slice")) as (pid, pipe):
        port, server = pipe.recv(), psutil.Process(pid)
        alone = CROWD_BYTES / time_crowd(folder, nodes[1:], port, 1) / 1e6
        crowd = num * CROWD_BYTES / time_crowd(folder, nodes[1:], port, num) / 1e6
        connections = []
        context = Identity.load(nodes[1]).client_context()
        for _ in range(num_stuck):
            connections.append(context.wrap_socket(socket.create_connection(("127.0.0.1", port))))
            request = f"GET /v1/slices/x HTTP/1.1\r\nRange: bytes=0-{NUM_BYTES - 1}\r\n\r\n"
            connections[-1].sendall(request.encode())
        time.sleep(1.0)  # All of them are being sent to, and read nothing.
        rss, threads = server.memory_info().rss, server.num_threads()
        for connection in connections:
            connection.close()
    return [
        Figure("one client", alone, "MB/s"),
        Figure(f"{num} clients together", crowd, "MB/s", f"{crowd / alone:.2f} of one client's"),
        Figure(f"memory with {num_stuck} stuck", rss / 1e6, "MB", f"{threads} threads"),
    ]


@contextlib.contextmanager
def files() -> Iterator[tuple[Path, list[Path]]]:
    """A folder with the file `slice`, and the nodes of a network."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_network(folder / "network", "bench")
        nodes = [folder / f"node{i}" for i in range(5)]
        for node in nodes:
            join(folder / "network", node, node.name)
        (folder / "slice").write_bytes(np.random.default_rng(0).bytes(NUM_BYTES))
        yield folder, nodes


def measure(rounds: int = 5) -> list[Figure]:
    """The figures. Takes about ten seconds; needs 400 MB of disk."""
    with contextlib.ExitStack() as stack:
        folder, nodes = stack.enter_context(files())
        out, taker = folder / "out", Identity.load(nodes[1])
        servers = []
        for serve in (serve_plain, serve_forebay):
            pid, pipe = stack.enter_context(child(serve, str(nodes[0]), str(folder / "slice")))
            servers.append((pid, pipe.recv()))
        client = stack.enter_context(Client(taker))
        transfers = (
            lambda port: receive_plain(taker, port, out),
            lambda port: receive_forebay(client, port, out, NUM_BYTES),
        )
        costs: list[list[tuple[float, float]]] = [[], []]
        for _ in range(rounds + 1):
            for own_costs, (pid, port), transfer in zip(costs, servers, transfers):
                wall, cpu = time.perf_counter(), cpu_s() + process_cpu_s(pid)
                transfer(port)
                own_costs.append((time.perf_counter() - wall, cpu_s() + process_cpu_s(pid) - cpu))
                assert out.stat().st_size == NUM_BYTES
    (plain_s, plain_cpu_s), (ours_s, ours_cpu_s) = ([median(column) for column in zip(*row[1:])] for row in costs)
    return [
        Figure("plain ssl", NUM_BYTES / plain_s / 1e6, "MB/s", f"{plain_cpu_s:.2f} CPU s both sides"),
        Figure("forebay transfer", NUM_BYTES / ours_s / 1e6, "MB/s", f"{ours_cpu_s:.2f} CPU s both sides"),
        Figure("transfer/plain ssl", plain_s / ours_s, "x speed"),
        Figure("transfer/plain ssl CPU", ours_cpu_s / plain_cpu_s, "x CPU"),
        Figure("CPU a GB, both sides", ours_cpu_s / NUM_BYTES * 1e9, "s"),
    ]


if __name__ == "__main__":
    show("transfer", [*measure(), *measure_crowd()])
