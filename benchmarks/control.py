"""CPU and memory of a scheduler with ten thousand connected workers, over TLS on loopback.

The scheduler runs in a process of its own, so that its memory and CPU are measured alone; the workers are raw TLS
sockets in this one. Each finishes a slice a minute, sends a signed receipt and gets the next lease.
`python -m benchmarks.control [WORKERS] [SECONDS]`.
"""

from __future__ import annotations

import heapq
import json
import multiprocessing
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

from benchmarks.measure import Figure, process_cpu_s, show
from forebay.data_node import DataNode
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import open_dataset
from forebay.dataset.slices import write_token_slice
from forebay.lease.messages import prove
from forebay.ledger.chain import Used, receipt_message
from forebay.network.app import JsonResponse, Request, Response, make_app
from forebay.network.client import Client
from forebay.network.dht import LibtorrentDht
from forebay.network.limits import ServerLimits
from forebay.network.pki.identity import Identity, create_network, join
from forebay.network.server import Server
from forebay.scheduler.server import SchedulerService

MINUTE_S = 60.0


def raise_file_limit(num: int) -> None:
    """Raise this process's limit of open files to `num`, or to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(num, hard), hard))


def _serve_bare(node: str, workers: int, pipe: Connection) -> None:
    raise_file_limit(workers + 1000)

    app, capacity = make_app("benchmark"), workers + 8

    @app.get("/v1/job")
    async def answer(request: Request) -> Response:
        return JsonResponse({"path": request.url.path})

    limits = ServerLimits(
        connections=capacity, connections_per_peer=capacity, handshakes_per_address=capacity, idle_s=300.0
    )
    with Server(app, Identity.load(node), "127.0.0.1", 0, limits=limits) as server:
        pipe.send(server.port)
        pipe.recv()


def connect(identity: Identity, port: int, num: int) -> list[ssl.SSLSocket]:
    """`num` TLS connections after their handshakes."""
    context = identity.client_context()
    connections = []
    for _ in range(num):
        plain = socket.create_connection(("127.0.0.1", port), 60)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections.append(context.wrap_socket(plain))
    return connections


def fetch(tls: ssl.SSLSocket, request: bytes) -> bytes:
    """Send a request; the response's body."""
    tls.sendall(request)
    return read_body(tls)


def read_body(tls: ssl.SSLSocket) -> bytes:
    """Read one response; its body."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        piece = tls.recv(65536)
        if not piece:
            raise ConnectionResetError("the server closed")
        data += piece
    head = data[:end].lower()
    length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
    while len(data) < end + 4 + length:
        data += tls.recv(65536)
    if b" 200 " not in data[:20]:
        raise RuntimeError(f"refused: {data[:300]!r}")
    return data[end + 4 :]


def paced(pid: int, num: int, seconds: float, act: Callable[[int], object]) -> tuple[int, float]:
    """Call `act` once a minute for each of `num` workers: the number of calls, and the process's CPU seconds."""
    every_s = MINUTE_S / num
    cpu_before, started, calls = process_cpu_s(pid), time.perf_counter(), 0
    while (now := time.perf_counter()) < started + seconds:
        if now < started + calls * every_s:
            time.sleep(started + calls * every_s - now)
        act(calls)
        calls += 1
    return calls, process_cpu_s(pid) - cpu_before


def measure_idle(workers: int, seconds: float) -> list[Figure]:
    """Memory and CPU of idle connections, and of a bare request a minute on each."""
    raise_file_limit(workers + 1000)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_network(folder / "network", "bench")
        server, client = (join(folder / "network", folder / name, name) for name in ("server", "client"))
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve_bare, args=(str(server.node_dir), workers, theirs), daemon=True)
        process.start()
        port = ours.recv()
        assert process.pid is not None
        server_process = psutil.Process(process.pid)
        fetch(connect(client, port, 1)[0], b"GET /v1/job HTTP/1.1\r\nHost: x\r\n\r\n")
        rss_before, cpu, started = server_process.memory_info().rss, process_cpu_s(process.pid), time.perf_counter()
        connections = connect(client, port, workers)
        handshakes = time.perf_counter() - started, process_cpu_s(process.pid) - cpu
        rss = server_process.memory_info().rss
        cpu = process_cpu_s(process.pid)
        time.sleep(seconds)
        idle_cpu = process_cpu_s(process.pid) - cpu
        threads = server_process.num_threads()
        http = b"GET /v1/job HTTP/1.1\r\nHost: x\r\n\r\n"
        requests, busy_cpu = paced(process.pid, workers, seconds, lambda i: fetch(connections[i % workers], http))
        ours.send("stop")
        process.join(60)
    return [
        Figure("idle connections", workers, "TLS", f"{threads} threads"),
        Figure("memory", rss / 1e6, "MB", f"{(rss - rss_before) / workers / 1e3:.1f} kB each"),
        Figure("handshake", handshakes[1] / workers * 1e3, "ms CPU", f"{workers / handshakes[0]:.0f}/s, one client"),
        Figure("idle", 100 * idle_cpu / seconds, "% core"),
        Figure(
            "bare request", busy_cpu / requests * 1e6, "us CPU", f"{100 * busy_cpu / seconds:.2f} % core, 1/min each"
        ),
    ]


NAME, SEQ_LEN, SAMPLES = "bench", 8, 4
WANTS = (1, 4)  # leases an exchange
PEER_LEASES = 32  # the scheduler's limit for a certificate without receipts


def _schedule(node: str, state: str, workers: int, pipe: Connection) -> None:
    raise_file_limit(workers + 1000)
    identity = Identity.load(node)
    dht = LibtorrentDht("127.0.0.1", 0, list(identity.bootstrap))
    service = SchedulerService(
        identity, NAME, dht, Client(identity), state, seq_len=SEQ_LEN, epochs=100, lease_s=600.0, steal_s=1e6
    )
    service.start()
    pipe.send(service.address)
    pipe.recv()
    service.stop()
    dht.close()


class _Worker:
    """One session: its connection and its leases."""

    def __init__(self, number: int, identity: Identity, tls: ssl.SSLSocket, data: Path) -> None:
        self.number, self.identity, self.tls, self.data = number, identity, tls, data
        self.leases: list[dict[str, object]] = []

    def send(self, job_id: str, want: int) -> None:
        """Send an exchange: the receipt of all leases, and a request of `want` others."""
        body: dict[str, object] = {"session": f"s{self.number}", "want": want, "known_leases": []}
        if self.leases:
            keys = ("epoch", "slice", "start", "stop")
            uses = [
                {"lease_id": lease["lease_id"], **{key: lease[key] for key in keys}, "step": 1,
                 "proof": prove(str(lease["lease_id"]), self.identity.peer_id, self.data / str(lease["name"]),
                                int(str(lease["bytes"])))}
                for lease in self.leases
            ]  # fmt: skip
            used = [Used(*(use[key] for key in ("lease_id", *keys, "step"))) for use in uses]  # type: ignore[arg-type]
            signature = self.identity.sign(receipt_message(job_id, used)).hex()
            lease_ids = [use["lease_id"] for use in uses]
            body |= {"job_id": job_id, "uses": uses, "signature": signature, "known_leases": lease_ids}
        data = json.dumps(body).encode()
        lead = f"POST /v2/exchange HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        self.tls.sendall(lead.encode() + data)

    def receive(self) -> None:
        """Read the reply of the exchange that was sent."""
        reply = json.loads(read_body(self.tls))
        if reply.get("refused") or not reply.get("leases"):
            raise RuntimeError(f"exchange: expected leases, got {reply}")
        self.leases = reply["leases"]


IN_FLIGHT = 64  # exchanges without a reply


def _exchange_all(
    pid: int, workers: list[_Worker], job_id: str, want: int, num: int, per_s: float
) -> tuple[float, float]:
    """Send `num` exchanges at a rate, also before earlier ones were answered. CPU and wall seconds."""
    cpu_before, started = process_cpu_s(pid), time.perf_counter()
    in_flight: deque[tuple[float, _Worker]] = deque()
    for done in range(num):
        due = started + done / per_s
        while (now := time.perf_counter()) < due:
            time.sleep(due - now)
        worker = workers[done % len(workers)]
        while in_flight and (len(in_flight) >= IN_FLIGHT or in_flight[0][0] < now - 0.25 or in_flight[0][1] is worker):
            in_flight.popleft()[1].receive()
        worker.send(job_id, want)
        in_flight.append((now, worker))
    while in_flight:
        in_flight.popleft()[1].receive()
    return process_cpu_s(pid) - cpu_before, time.perf_counter() - started


def _make_dataset(folder: Path, num_slices: int) -> None:
    (folder / "slices").mkdir(parents=True)
    length = SAMPLES * SEQ_LEN + 1
    for index in range(num_slices):
        ids = np.full(length, index % 60, np.uint16)
        write_token_slice(folder / "slices" / f"{index:06d}.safetensors", ids, np.array([length], np.uint64))
    import_slices(folder, NAME)


def measure_exchanges(workers: int, seconds: float) -> list[Figure]:
    """CPU of a scheduler process for workers that each finish a slice a minute."""
    raise_file_limit(workers + 1000)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, peers = Path(name), -(-workers * max(WANTS) // PEER_LEASES) + 1
        dht = LibtorrentDht("127.0.0.1", 0, [])
        create_network(folder / "network", "bench", bootstrap=[("127.0.0.1", dht.port)])
        nodes = [join(folder / "network", folder / f"node{i}", f"node{i}") for i in range(peers + 2)]
        _make_dataset(
            folder / "data", sum(want * workers + int(workers * seconds / MINUTE_S) for want in (*WANTS, 3)) + 100
        )
        ours, theirs = spawn.Pipe()
        with DataNode(nodes[0], [open_dataset(folder / "data")], "127.0.0.1", 0, dht):
            arguments = (str(nodes[1].node_dir), str(folder / "state"), workers, theirs)
            process = spawn.Process(target=_schedule, args=arguments, daemon=True)
            process.start()
            address = ours.recv()
            with Client(nodes[2]) as client:
                job_id = client.request_json(address, "GET", "/v1/job")[0]["job_id"]
            port, sessions, each = int(address.rpartition(":")[2]), [], -(-workers // peers)
            for identity in nodes[2:]:
                num = min(each, workers - len(sessions))
                opened = connect(identity, port, num)
                sessions += [_Worker(len(sessions) + i, identity, tls, folder / "data") for i, tls in enumerate(opened)]
            assert process.pid is not None
            per_s, cpu_shares, full_speed = workers / MINUTE_S, {}, {}
            for _ in range(3):  # the first leases, and those of each certificate whose receipts are always checked
                _exchange_all(process.pid, sessions, job_id, 1, workers, 1e9)
            for want in WANTS:
                # One exchange of each worker at full speed; then exchanges at the workers' rate.
                cpu, _ = _exchange_all(process.pid, sessions, job_id, want, workers, 1e9)
                full_speed[want] = cpu / workers
                num = max(1, int(per_s * seconds))
                cpu, wall = _exchange_all(process.pid, sessions, job_id, want, num // want, per_s / want)
                cpu_shares[want] = cpu / wall
            rss = psutil.Process(process.pid).memory_info().rss
            ours.send("stop")
            process.join(60)
        dht.close()
    figures = []
    for want in WANTS:
        detail = f"{workers} workers, {want} lease(s) an exchange, an exchange each {want} min"
        figures += [
            Figure(f"scheduler x{want}", 100 * cpu_shares[want], "% core", detail),
            Figure(f"exchange x{want}", cpu_shares[want] / per_s * want * 1e6, "us CPU", "TLS, core, journal, ledger"),
            Figure(f"exchange x{want} at full speed", full_speed[want] * 1e6, "us CPU", "the same, never idle"),
        ]
    return [*figures, Figure("scheduler memory", rss / 1e6, "MB", f"{workers} connections and leases")]


def measure_waiting(workers: int, seconds: float) -> list[Figure]:
    """CPU and memory of a scheduler for workers that wait for a lease and repeat after the `wait_s` of its reply."""
    raise_file_limit(workers + 1000)
    with tempfile.TemporaryDirectory() as name:
        folder, peers = Path(name), -(-workers // 250)
        dht = LibtorrentDht("127.0.0.1", 0, [])
        create_network(folder / "network", "bench", bootstrap=[("127.0.0.1", dht.port)])
        nodes = [join(folder / "network", folder / f"node{i}", f"node{i}") for i in range(peers + 2)]
        _make_dataset(folder / "data", 8)
        with DataNode(nodes[0], [open_dataset(folder / "data")], "127.0.0.1", 0, dht):
            command = [sys.executable, "-m", "forebay", "scheduler", NAME, "--identity", str(nodes[1].node_dir)]
            command += ["--state", str(folder / "state"), "--seq-len", str(SEQ_LEN), "--lease-timeout", "600", "--json"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
            assert process.stdout is not None
            port = int(json.loads(process.stdout.readline())["address"].rpartition(":")[2])
            server = psutil.Process(process.pid)
            rss_before, due = server.memory_info().rss, list[tuple[float, int]]()
            connections: list[ssl.SSLSocket] = []

            def exchange(number: int) -> float:
                body = json.dumps({"session": f"s{number}", "want": 1, "known_leases": []}).encode()
                head = f"POST /v2/exchange HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                return float(json.loads(fetch(connections[number], head.encode() + body))["wait_s"])

            def exchange_due() -> int:
                """Send the exchanges that are due; their number."""
                exchanges = 0
                while due and due[0][0] <= time.perf_counter():
                    number = due[0][1]
                    heapq.heapreplace(due, (time.perf_counter() + exchange(number), number))
                    exchanges += 1
                return exchanges

            leased = 0  # the first workers get all slices
            for number in range(workers):
                exchange_due()
                connections += connect(nodes[2 + number // 250], port, 1)
                wait_s = exchange(number)
                leased += wait_s == 0.0
                if wait_s > 0:
                    heapq.heappush(due, (time.perf_counter() + wait_s, number))
            for _ in range(3):  # the first two rounds let the waiting times adapt to the number of waiting workers
                cpu, started, exchanges = process_cpu_s(process.pid), time.perf_counter(), 0
                while time.perf_counter() < started + seconds:
                    exchanges += exchange_due()
                    time.sleep(min(max(due[0][0] - time.perf_counter(), 0.0), 0.05))
            cpu, rss, threads = process_cpu_s(process.pid) - cpu, server.memory_info().rss, server.num_threads()
            process.terminate()
            process.wait(60)
        dht.close()
    return [
        Figure("waiting workers", workers - leased, "TLS", f"{exchanges / seconds:.0f} exchanges/s, {threads} threads"),
        Figure("waiting, scheduler", 100 * cpu / seconds, "% core", f"{cpu / max(1, exchanges) * 1e6:.0f} us/exchange"),
        Figure("waiting, memory", rss / 1e6, "MB", f"{(rss - rss_before) / workers / 1e3:.1f} kB a worker"),
    ]


def measure(workers: int = 10_000, seconds: float = 20.0) -> list[Figure]:
    """The figures. Takes some five minutes with ten thousand workers."""
    return [*measure_exchanges(workers, seconds), *measure_idle(workers, seconds), *measure_waiting(workers, seconds)]


if __name__ == "__main__":
    numbers = [float(text) for text in sys.argv[1:]]
    show("control", measure(*map(int, numbers[:1]), *numbers[1:]))
