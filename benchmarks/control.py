"""CPU and memory of a scheduler with ten thousand connected workers, over TLS on loopback.

The scheduler runs in a process of its own, so that its memory and CPU are measured alone; the workers are HTTPS
connections of this one. Each finishes a slice a minute, sends a signed receipt and gets the next lease.
`python -m benchmarks.control [WORKERS] [SECONDS]`.
"""

from __future__ import annotations

import heapq
import json
import multiprocessing
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPSConnection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.data import make_dataset
from benchmarks.measure import Figure, process_cpu_s, show
from forebay.data_node import DataNode
from forebay.dataset.reader import open_dataset
from forebay.lease.messages import prove
from forebay.ledger.chain import Used, receipt_message
from forebay.network.client import Client
from forebay.network.dht import LibtorrentDht
from forebay.network.pki.identity import Identity, create_network, join
from forebay.scheduler.server import SchedulerService

MINUTE_S = 60.0


def raise_file_limit(num: int) -> None:
    """Raise this process's limit of open files to `num`, or to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(num, hard), hard))


def connect(identity: Identity, port: int, num: int) -> list[HTTPSConnection]:
    """`num` connections after their handshakes."""
    context = identity.client_context()
    connections = [HTTPSConnection("127.0.0.1", port, timeout=60, context=context) for _ in range(num)]
    for connection in connections:
        connection.connect()
    return connections


def send(connection: HTTPSConnection, body: dict[str, object]) -> None:
    connection.request("POST", "/v2/exchange", json.dumps(body))


def receive(connection: HTTPSConnection) -> dict[str, Any]:
    response = connection.getresponse()
    data = response.read()
    if response.status != 200:
        raise RuntimeError(f"refused: {response.status} {data[:300]!r}")
    reply: dict[str, Any] = json.loads(data)
    return reply


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

    def __init__(self, number: int, identity: Identity, connection: HTTPSConnection, data: Path) -> None:
        self.number, self.identity, self.connection, self.data = number, identity, connection, data
        self.leases: list[dict[str, object]] = []

    def send(self, job_id: str, want: int) -> None:
        """Send an exchange: the receipt of all leases, and a request of `want` others."""
        body: dict[str, object] = {"session": f"s{self.number}", "want": want, "known_leases": []}
        if self.leases:
            keys = ("epoch", "slice", "start", "stop")
            uses = []
            for lease in self.leases:
                lease_id, path = str(lease["lease_id"]), self.data / f"slices/{lease['slice']:06d}.safetensors"
                proof = prove(lease_id, self.identity.peer_id, path, int(str(lease["bytes"])))
                uses.append({key: lease[key] for key in ("lease_id", *keys)} | {"step": 1, "proof": proof})
            used = [Used(*(use[key] for key in ("lease_id", *keys, "step"))) for use in uses]  # type: ignore[arg-type]
            signature = self.identity.sign(receipt_message(job_id, used)).hex()
            lease_ids = [use["lease_id"] for use in uses]
            body |= {"job_id": job_id, "uses": uses, "signature": signature, "known_leases": lease_ids}
        send(self.connection, body)

    def receive(self) -> None:
        """Read the reply of the exchange that was sent."""
        reply = receive(self.connection)
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


@contextmanager
def open_network(folder: Path, peers: int, num_slices: int) -> Iterator[list[Identity]]:
    """A network with a data node of `num_slices` tiny slices: identities of a scheduler and of `peers` others."""
    dht = LibtorrentDht("127.0.0.1", 0, [])
    create_network(folder / "network", "bench", bootstrap=[("127.0.0.1", dht.port)])
    nodes = [join(folder / "network", folder / f"node{i}", f"node{i}") for i in range(peers + 2)]
    make_dataset(folder / "data", NAME, num_slices, SAMPLES * SEQ_LEN + 1)
    with DataNode(nodes[0], [open_dataset(folder / "data")], "127.0.0.1", 0, dht):
        yield nodes[1:]
    dht.close()


def measure_exchanges(workers: int, seconds: float) -> list[Figure]:
    """CPU of a scheduler process for workers that each finish a slice a minute."""
    raise_file_limit(workers + 1000)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, peers = Path(name), -(-workers * max(WANTS) // PEER_LEASES) + 1
        num_slices = sum(want * workers + int(workers * seconds / MINUTE_S) for want in (*WANTS, 3)) + 100
        ours, theirs = spawn.Pipe()
        with open_network(folder, peers, num_slices) as nodes:
            arguments = (str(nodes[0].node_dir), str(folder / "state"), workers, theirs)
            process = spawn.Process(target=_schedule, args=arguments, daemon=True)
            process.start()
            address = ours.recv()
            with Client(nodes[1]) as client:
                job_id = client.request_json(address, "GET", "/v1/job")[0]["job_id"]
            port, sessions, each = int(address.rpartition(":")[2]), [], -(-workers // peers)
            for identity in nodes[1:]:
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
        with open_network(folder, peers, 8) as nodes:
            command = [sys.executable, "-m", "forebay", "scheduler", NAME, "--identity", str(nodes[0].node_dir)]
            command += ["--state", str(folder / "state"), "--seq-len", str(SEQ_LEN), "--lease-timeout", "600", "--json"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
            assert process.stdout is not None
            port = int(json.loads(process.stdout.readline())["address"].rpartition(":")[2])
            server = psutil.Process(process.pid)
            rss_before, due = server.memory_info().rss, list[tuple[float, int]]()
            connections: list[HTTPSConnection] = []

            def exchange(number: int) -> float:
                send(connections[number], {"session": f"s{number}", "want": 1, "known_leases": []})
                return float(receive(connections[number])["wait_s"])

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
                connections += connect(nodes[1 + number // 250], port, 1)
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
    return [
        Figure("waiting workers", workers - leased, "TLS", f"{exchanges / seconds:.0f} exchanges/s, {threads} threads"),
        Figure("waiting, scheduler", 100 * cpu / seconds, "% core", f"{cpu / max(1, exchanges) * 1e6:.0f} us/exchange"),
        Figure("waiting, memory", rss / 1e6, "MB", f"{(rss - rss_before) / workers / 1e3:.1f} kB a worker"),
    ]


def measure(workers: int = 10_000, seconds: float = 20.0) -> list[Figure]:
    """The figures. Takes some five minutes with ten thousand workers."""
    return [*measure_exchanges(workers, seconds), *measure_waiting(workers, seconds)]


if __name__ == "__main__":
    numbers = [float(text) for text in sys.argv[1:]]
    show("control", measure(*map(int, numbers[:1]), *numbers[1:]))
