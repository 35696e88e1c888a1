"""What a scheduler costs that ten thousand workers hold a connection to, over real TLS on loopback.

The scheduler is a process of its own, so that its memory and its processor time are its own; the workers are raw TLS
sockets in this one. Each uses a slice up a minute, says so under its signature and is leased the next.
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
from forebay.ledger.chain import Used, receipt_message
from forebay.network.app import JsonResponse, Request, Response, make_app
from forebay.network.client import Client
from forebay.network.dht import LibtorrentDht
from forebay.network.limits import ServerLimits
from forebay.network.pki.identity import Identity, create_network, join
from forebay.network.server import Server
from forebay.scheduler.messages import prove
from forebay.scheduler.server import SchedulerService

MINUTE_S = 60.0


def raise_descriptors(num: int) -> None:
    """Allows this process so many open files, if the machine does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(num, hard), hard))


def _serve_bare(node: str, workers: int, door: Connection) -> None:
    raise_descriptors(workers + 1000)

    app, most = make_app("benchmark"), workers + 8

    @app.get("/v1/job")
    async def answer(request: Request) -> Response:
        return JsonResponse({"path": request.url.path})

    limits = ServerLimits(connections=most, connections_per_peer=most, handshakes_per_address=most, idle_s=300.0)
    with Server(app, Identity.load(node), "127.0.0.1", 0, limits=limits) as server:
        door.send(server.port)
        door.recv()


def connect(identity: Identity, port: int, num: int) -> list[ssl.SSLSocket]:
    """So many connections, their handshakes done."""
    context = identity.client_context()
    made = []
    for _ in range(num):
        plain = socket.create_connection(("127.0.0.1", port), 60)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.append(context.wrap_socket(plain))
    return made


def ask(tls: ssl.SSLSocket, request: bytes) -> bytes:
    """One request and its whole answer's body."""
    tls.sendall(request)
    return hear(tls)


def hear(tls: ssl.SSLSocket) -> bytes:
    """The body of the answer to a request that was sent."""
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        piece = tls.recv(65536)
        if not piece:
            raise ConnectionResetError("the server closed")
        data += piece
    head = data[:end].lower()
    at = head.index(b"content-length:") + 15
    length = int(head[at:].split(b"\r\n", 1)[0])
    while len(data) < end + 4 + length:
        data += tls.recv(65536)
    if b" 200 " not in data[:20]:
        raise RuntimeError(f"refused: {data[:300]!r}")
    return data[end + 4 :]


def paced(pid: int, num: int, seconds: float, act: Callable[[int], object]) -> tuple[int, float]:
    """Calls `act` at the rate of one a worker and minute. Returns how often, and the process's CPU seconds."""
    every_s = MINUTE_S / num
    before, began, done = process_cpu_s(pid), time.perf_counter(), 0
    while (now := time.perf_counter()) < began + seconds:
        if now < began + done * every_s:
            time.sleep(began + done * every_s - now)
        act(done)
        done += 1
    return done, process_cpu_s(pid) - before


def measure_idle(workers: int, seconds: float) -> list[Figure]:
    """Memory and CPU of connections that rest, and of a bare request a minute on each."""
    raise_descriptors(workers + 1000)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_network(folder / "network", "bench")
        server, client = (join(folder / "network", folder / who, who) for who in ("server", "client"))
        here, there = spawn.Pipe()
        process = spawn.Process(target=_serve_bare, args=(str(server.node_dir), workers, there), daemon=True)
        process.start()
        port = here.recv()
        assert process.pid is not None
        seen = psutil.Process(process.pid)
        ask(connect(client, port, 1)[0], b"GET /v1/job HTTP/1.1\r\nHost: x\r\n\r\n")
        before, cpu, began = seen.memory_info().rss, process_cpu_s(process.pid), time.perf_counter()
        held = connect(client, port, workers)
        shaken = time.perf_counter() - began, process_cpu_s(process.pid) - cpu
        rss = seen.memory_info().rss
        cpu = process_cpu_s(process.pid)
        time.sleep(seconds)
        idle_cpu = process_cpu_s(process.pid) - cpu
        threads = seen.num_threads()
        request = b"GET /v1/job HTTP/1.1\r\nHost: x\r\n\r\n"
        done, busy_cpu = paced(process.pid, workers, seconds, lambda i: ask(held[i % workers], request))
        here.send("stop")
        process.join(60)
    return [
        Figure("idle connections", workers, "TLS", f"{threads} threads"),
        Figure("memory", rss / 1e6, "MB", f"{(rss - before) / workers / 1e3:.1f} kB each"),
        Figure("handshake", shaken[1] / workers * 1e3, "ms CPU", f"{workers / shaken[0]:.0f} a second, one client"),
        Figure("idle", 100 * idle_cpu / seconds, "% core"),
        Figure("bare request", busy_cpu / done * 1e6, "us CPU", f"{100 * busy_cpu / seconds:.2f} % core at 1/min each"),
    ]


NAME, SEQ_LEN, SAMPLES = "bench", 8, 4
WANTS = (1, 4)  # leases an exchange
PEER_LEASES = 32  # what the scheduler leases to a certificate that used nothing yet


def _schedule(node: str, state: str, workers: int, door: Connection) -> None:
    raise_descriptors(workers + 1000)
    identity = Identity.load(node)
    dht = LibtorrentDht("127.0.0.1", 0, list(identity.bootstrap))
    service = SchedulerService(
        identity, NAME, dht, Client(identity), state, seq_len=SEQ_LEN, epochs=100, lease_s=600.0, steal_s=1e6
    )
    service.start()
    door.send(service.address)
    door.recv()
    service.stop()
    dht.close()


class _Worker:
    """One session: its connection, and the leases it holds."""

    def __init__(self, number: int, identity: Identity, tls: ssl.SSLSocket, data: Path) -> None:
        self.number, self.identity, self.tls, self.data = number, identity, tls, data
        self.leases: list[dict[str, object]] = []

    def ask(self, job_id: str, want: int) -> None:
        """Say what was used, ask for the next leases."""
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
            held = [use["lease_id"] for use in uses]
            body |= {"job_id": job_id, "uses": uses, "signature": signature, "known_leases": held}
        data = json.dumps(body).encode()
        lead = f"POST /v2/exchange HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        self.tls.sendall(lead.encode() + data)

    def hear(self) -> None:
        """The answer to what was asked."""
        answer = json.loads(hear(self.tls))
        if answer.get("refused") or not answer.get("leases"):
            raise RuntimeError(f"refused, or nothing left: {answer}")
        self.leases = answer["leases"]


IN_FLIGHT = 64  # questions that wait for their answers


def _exchange_all(pid: int, held: list[_Worker], job_id: str, want: int, num: int, per_s: float) -> tuple[float, float]:
    """So many exchanges at a rate, whether or not the ones before were answered. CPU and wall seconds."""
    before, began = process_cpu_s(pid), time.perf_counter()
    waiting: deque[tuple[float, _Worker]] = deque()
    for done in range(num):
        due = began + done / per_s
        while (now := time.perf_counter()) < due:
            time.sleep(due - now)
        worker = held[done % len(held)]
        while waiting and (len(waiting) >= IN_FLIGHT or waiting[0][0] < now - 0.25 or waiting[0][1] is worker):
            waiting.popleft()[1].hear()
        worker.ask(job_id, want)
        waiting.append((now, worker))
    while waiting:
        waiting.popleft()[1].hear()
    return process_cpu_s(pid) - before, time.perf_counter() - began


def _make_dataset(folder: Path, num_slices: int) -> None:
    (folder / "slices").mkdir(parents=True)
    length = SAMPLES * SEQ_LEN + 1
    for index in range(num_slices):
        ids = np.full(length, index % 60, np.uint16)
        write_token_slice(folder / "slices" / f"{index:06d}.safetensors", ids, np.array([length], np.uint64))
    import_slices(folder, NAME)


def measure_exchanges(workers: int, seconds: float) -> list[Figure]:
    """CPU of a scheduler process for workers that each finish a slice a minute."""
    raise_descriptors(workers + 1000)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, peers = Path(name), -(-workers * max(WANTS) // PEER_LEASES) + 1
        dht = LibtorrentDht("127.0.0.1", 0, [])
        create_network(folder / "network", "bench", bootstrap=[("127.0.0.1", dht.port)])
        members = [join(folder / "network", folder / f"node{i}", f"node{i}") for i in range(peers + 2)]
        _make_dataset(
            folder / "data", sum(want * workers + int(workers * seconds / MINUTE_S) for want in (*WANTS, 3)) + 100
        )
        here, there = spawn.Pipe()
        with DataNode(members[0], [open_dataset(folder / "data")], "127.0.0.1", 0, dht):
            arguments = (str(members[1].node_dir), str(folder / "state"), workers, there)
            process = spawn.Process(target=_schedule, args=arguments, daemon=True)
            process.start()
            address = here.recv()
            with Client(members[2]) as client:
                job_id = client.request_json(address, "GET", "/v1/job")[0]["job_id"]
            port, held, each = int(address.rpartition(":")[2]), [], -(-workers // peers)
            for identity in members[2:]:
                num = min(each, workers - len(held))
                socks = connect(identity, port, num)
                held += [_Worker(len(held) + i, identity, tls, folder / "data") for i, tls in enumerate(socks)]
            assert process.pid is not None
            per_s, shares, at_once = workers / MINUTE_S, {}, {}
            for _ in range(3):  # the first leases, and those of each certificate whose use is always checked
                _exchange_all(process.pid, held, job_id, 1, workers, 1e9)
            for want in WANTS:
                # Every worker's next leases of this many, as fast as it goes; then at the workers' rate.
                cpu, _ = _exchange_all(process.pid, held, job_id, want, workers, 1e9)
                at_once[want] = cpu / workers
                num = max(1, int(per_s * seconds))
                cpu, wall = _exchange_all(process.pid, held, job_id, want, num // want, per_s / want)
                shares[want] = cpu / wall
            rss = psutil.Process(process.pid).memory_info().rss
            here.send("stop")
            process.join(60)
        dht.close()
    figures = []
    for want in WANTS:
        note = f"{workers} workers, {want} lease(s) an exchange, an exchange each {want} min"
        figures += [
            Figure(f"scheduler x{want}", 100 * shares[want], "% core", note),
            Figure(f"exchange x{want}", shares[want] / per_s * want * 1e6, "us CPU", "TLS, core, journal, ledger"),
            Figure(f"exchange x{want} at full speed", at_once[want] * 1e6, "us CPU", "the same, never idle"),
        ]
    return [*figures, Figure("scheduler memory", rss / 1e6, "MB", f"{workers} connections and leases")]


def measure_waiting(workers: int, seconds: float) -> list[Figure]:
    """CPU and memory of a scheduler for workers that wait for a lease, each asking when it was told to."""
    raise_descriptors(workers + 1000)
    with tempfile.TemporaryDirectory() as name:
        folder, peers = Path(name), -(-workers // 250)
        dht = LibtorrentDht("127.0.0.1", 0, [])
        create_network(folder / "network", "bench", bootstrap=[("127.0.0.1", dht.port)])
        members = [join(folder / "network", folder / f"node{i}", f"node{i}") for i in range(peers + 2)]
        _make_dataset(folder / "data", 8)
        with DataNode(members[0], [open_dataset(folder / "data")], "127.0.0.1", 0, dht):
            command = [sys.executable, "-m", "forebay", "scheduler", NAME, "--identity", str(members[1].node_dir)]
            command += ["--state", str(folder / "state"), "--seq-len", str(SEQ_LEN), "--lease-timeout", "600", "--json"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
            assert process.stdout is not None
            port = int(json.loads(process.stdout.readline())["address"].rpartition(":")[2])
            seen = psutil.Process(process.pid)
            before, due = seen.memory_info().rss, list[tuple[float, int]]()
            socks: list[ssl.SSLSocket] = []

            def say(number: int) -> float:
                body = json.dumps({"session": f"s{number}", "want": 1, "known_leases": []}).encode()
                head = f"POST /v2/exchange HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                return float(json.loads(ask(socks[number], head.encode() + body))["wait_s"])

            def say_due() -> int:
                """Those whose time has come ask; how many."""
                asks = 0
                while due and due[0][0] <= time.perf_counter():
                    number = due[0][1]
                    heapq.heapreplace(due, (time.perf_counter() + say(number), number))
                    asks += 1
                return asks

            leased = 0  # the first get all there is
            for number in range(workers):
                say_due()
                socks += connect(members[2 + number // 250], port, 1)
                wait_s = say(number)
                leased += wait_s == 0.0
                if wait_s > 0:
                    heapq.heappush(due, (time.perf_counter() + wait_s, number))
            for _ in range(3):  # twice until those who came early know how many wait
                cpu, began, asks = process_cpu_s(process.pid), time.perf_counter(), 0
                while time.perf_counter() < began + seconds:
                    asks += say_due()
                    time.sleep(min(max(due[0][0] - time.perf_counter(), 0.0), 0.05))
            cpu, rss, threads = process_cpu_s(process.pid) - cpu, seen.memory_info().rss, seen.num_threads()
            process.terminate()
            process.wait(60)
        dht.close()
    return [
        Figure("workers that wait", workers - leased, "TLS", f"{asks / seconds:.0f} asks a second, {threads} threads"),
        Figure("scheduler that waits", 100 * cpu / seconds, "% core", f"{cpu / max(1, asks) * 1e6:.0f} us an ask"),
        Figure("its memory", rss / 1e6, "MB", f"{(rss - before) / workers / 1e3:.1f} kB a worker"),
    ]


def measure(workers: int = 10_000, seconds: float = 20.0) -> list[Figure]:
    """The figures. Takes some five minutes with ten thousand workers."""
    return [*measure_exchanges(workers, seconds), *measure_idle(workers, seconds), *measure_waiting(workers, seconds)]


if __name__ == "__main__":
    given = [float(text) for text in sys.argv[1:]]
    show("control", measure(int(given[0]) if given else 10_000, given[1] if len(given) > 1 else 20.0))
