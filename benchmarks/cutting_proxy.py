"""Small jobs behind a proxy that cuts connections, with processes killed and disks full.

Each seed is a job of real processes over mutual TLS: a data node, a scheduler and two or three workers. The workers
reach both servers through a proxy that cuts a share of the connections once a request has passed it: half of the time
amid the answer, else before it. By the seed a worker or the scheduler is killed with SIGKILL and started again on what
it left, and a worker's or the scheduler's disk is full for a while (`RLIMIT_FSIZE` 0: every write of a file fails).
Then the ledger must prove that every sample was used once, every worker must end with 0, and none of it may take
longer than DEADLINE undisturbed jobs. A seed decides what is done and when; which request meets a cut depends on time.

`python -m benchmarks.cutting_proxy` runs 200 seeds. `--tasks` is the second part: each background task that
`SupervisedThread`, or a server's loop, keeps alive raises once, at its start and while it runs; 10 s and one and a half
undisturbed jobs later the job has to be done.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
import json
import logging
import multiprocessing
import os
import random
import re
import resource
import select
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from benchmarks.swarm import HOST, NAME, FixedDiscovery, make_dataset
from forebay.data_node import DataNode
from forebay.dataset.reader import open_dataset
from forebay.ledger.verify import verify_ledger
from forebay.load.loader import Loader
from forebay.load.options import NetworkOptions
from forebay.network.addresses import parse_address
from forebay.network.client import Client
from forebay.network.dht import LibtorrentDht
from forebay.network.discovery import Discovery
from forebay.network.pki.identity import Identity, create_network, join, verify
from forebay.network.server import Server
from forebay.scheduler.server import SchedulerService
from forebay.storage.origins import open_remote
from forebay.threads import SupervisedThread
from support.chunk_checks import check_chunks

DEADLINE = 10.0  # undisturbed jobs that a disturbed one may take
SEQ_LEN, SLICES, SLICE_BYTES, BATCH = 256, 12, 64 << 10, 4
PAUSE_S, EPOCHS = 0.006, 2  # of a step; of a job
LEASE_S = 1.0
TASK_S = 10.0  # by which a task that raised may delay a job
CALIBRATED_FOR = 20  # seeds
WHENS = ("start", "running")
TAKES = (
    "hash"  # takes work from a queue: what is raised between that and its handler loses the work, and nothing real is
)
_has_worked = threading.Event()  # in a process of a job: it worked once
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["forebay.lease.session", "forebay.scheduler.server", "forebay.data_node", __name__])


# The proxy.


class CuttingProxy:
    """Passes connections on to an address, and cuts some of them within an answer or right before it.

    It sees TLS only. Servers here send nothing between the handshake and the first answer, so bytes from the server
    after the client has spoken twice are an answer.

    Args:
        rate: Share of the answers that are cut.
    """

    def __init__(self, target: str, chance: random.Random, rate: float) -> None:
        self.cuts: Counter[str] = Counter()
        self.answers = 0
        self._target = parse_address(target)
        self._chance, self._rate = chance, rate
        self._listener = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(self._target, 5) as far:
            turns, from_client = 0, False
            while True:
                for source in select.select([near, far], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if from_client is not (source is near):
                        from_client = source is near
                        turns += 1  # 1: hello, 2: the server's, 3: the client's certificate and request, 4: an answer
                        kind = self._draw() if turns >= 4 and not from_client else ""
                        if kind:
                            self._cut(kind, near, far, data)
                            return
                    (far if from_client else near).sendall(data)

    def _draw(self) -> str:
        self.answers += 1
        if self._chance.random() >= self._rate:
            return ""
        return "amid the answer" if self._chance.random() < 0.5 else "before the answer"

    def _cut(self, kind: str, near: socket.socket, far: socket.socket, data: bytes) -> None:
        self.cuts[kind] += 1
        if kind == "amid the answer":
            near.sendall(data[: self._chance.randrange(1, max(2, len(data)))])
        for sock in (near, far):
            if self._chance.random() < 0.5:  # a reset, not an end
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


# Processes.


class InjectedError(Exception):
    """What a background task is made to raise."""


@dataclass
class Injection:
    """Has one background task of a process raise once; `entered` counts how often each began.

    Args:
        task: Its name without digits; "" only counts.
        when: start or running.
    """

    task: str = ""
    when: str = ""
    entered: Counter[str] = field(default_factory=Counter)
    raised: bool = False

    def install(self) -> None:
        begin, supervise = SupervisedThread.__init__, Server._supervise

        def init(thread: SupervisedThread, target: Callable[[], object], name: str, **options: Any) -> None:
            begin(thread, lambda: self._run(target, name), name, **options)

        async def supervised(server: Server, name: str, body: Callable[[], Awaitable[None]]) -> None:
            await supervise(server, name, lambda: self._await(body, f"task {name}"))

        SupervisedThread.__init__, Server._supervise = init, supervised  # type: ignore[method-assign,assignment]

    def _is_due(self, name: str) -> bool:
        kind = re.sub(r"[\s-]*\d+$", "", name)
        self.entered[kind] += 1
        if kind != self.task or self.raised:
            return False
        self.raised = True
        return True

    def _run(self, target: Callable[[], object], name: str) -> object:
        if self._is_due(name):
            if self.when == "start":
                raise InjectedError(name)
            thread_id = ctypes.c_ulong(threading.get_ident())
            raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
            threading.Timer(0.5, raise_in_thread, (thread_id, ctypes.py_object(InjectedError))).start()
        return target()

    async def _await(self, body: Callable[[], Awaitable[None]], name: str) -> None:
        if not self._is_due(name):
            await body()
            return
        if self.when == "running":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.ensure_future(body()), 0.5)
        raise InjectedError(name)


def _child(role: Callable[..., Any], log: Path, injection: Injection | None, pipe: Connection, **settings: Any) -> None:
    """A process of its own: its log, its signals, what it reports at its end."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(name)s %(message)s", force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if injection is not None:
        injection.install()
    try:
        report = role(pipe=pipe, stop=stop, **settings)
    except BaseException:
        pipe.send({"error": traceback.format_exc(), "has_worked": _has_worked.is_set()})  # the log's disk may be full
        os._exit(1)
    pipe.send({"report": report, "entered": dict(injection.entered) if injection else {}})
    os._exit(0)  # without the interpreter's end: threads of libraries


def _discovery(identity: Identity, address: str) -> Discovery:
    return FixedDiscovery(address) if address else LibtorrentDht(HOST, 0, list(identity.bootstrap))


def _wait(stop: threading.Event) -> None:
    """Until told to stop, or left alone."""
    parent = os.getppid()
    while not stop.wait(0.2) and os.getppid() == parent:
        pass


def _serve(pipe: Connection, stop: threading.Event, node: str, data: str, data_address: str) -> dict[str, Any]:
    identity = Identity.load(node)
    with DataNode(identity, [open_dataset(data)], HOST, 0, _discovery(identity, data_address), ttl_s=3.0) as served:
        pipe.send(served.address)
        _wait(stop)
        return {"bytes_sent": served.status()["bytes_sent"]}


def _schedule(
    pipe: Connection, stop: threading.Event, node: str, state: str, data_address: str, port: int, epochs: int
) -> dict[str, Any]:
    identity = Identity.load(node)
    service = SchedulerService(
        identity, NAME, _discovery(identity, data_address), Client(identity), state, HOST, port, seq_len=SEQ_LEN,
        epochs=epochs, lease_s=LEASE_S, steal_s=0.2, rediscover_s=0.5,
    )  # fmt: skip
    service.start()
    _has_worked.set()
    pipe.send(service.address)
    _wait(stop)
    is_done = service.is_done()
    service.stop()
    return {"done": is_done}


def _work(
    pipe: Connection, stop: threading.Event, node: str, data_address: str, cache: str, scheduler: str, share: bool,
    patience_s: float,
) -> dict[str, Any]:  # fmt: skip
    identity = Identity.load(node)

    network = NetworkOptions(
        identity, receipt_s=0.2, patience_s=patience_s, listen=f"{HOST}:0" if share else None,
        discovery=None if data_address else _discovery(identity, data_address),
    )  # fmt: skip
    with Loader(
        f"forebay://bench/{NAME}", seq_len=SEQ_LEN, batch_size=BATCH, scheduler=scheduler or "auto", cache_dir=cache,
        cache_bytes=4 * SLICE_BYTES, network=network,
    ) as loader:  # fmt: skip
        for _ in loader:
            _has_worked.set()
            time.sleep(PAUSE_S)
            if stop.is_set():
                break
    return loader.stats()


def _read(
    pipe: Connection, stop: threading.Event, node: str, data_address: str, data: str, cache: str
) -> dict[str, Any]:
    """A loader over two epochs, by the network with a swarm; or, without a cache, of files that are here."""
    identity = Identity.load(node)
    dataset = open_remote(f"forebay://bench/{NAME}", identity=node, discovery=_discovery(identity, data_address))
    ids: Counter[int] = Counter()
    settings = {"cache_dir": cache, "network": NetworkOptions(listen="auto")} if cache else {}
    with Loader(
        dataset if cache else data,
        seq_len=SEQ_LEN,
        global_batch_size=16,
        epochs=EPOCHS,
        rank=0,
        world_size=1,
        **settings,
    ) as loader:
        for batch in loader:
            ids.update(batch.sample_ids.tolist())
            time.sleep(PAUSE_S)
    return {"done": len(ids) * EPOCHS == ids.total() and set(ids.values()) == {EPOCHS}, "samples": len(ids)}


class Node:
    """A process of a job, and what it said."""

    def __init__(self, role: Callable[..., Any], log: Path, injection: Injection | None, **settings: Any) -> None:
        self.role, self.log, self.injection, self.settings = role, log, injection, settings
        self.is_second = False
        self._pipe, theirs = _processes.Pipe(duplex=False)
        self.process: ForkServerProcess = _processes.Process(
            target=_child, args=(role, log, injection, theirs), kwargs=settings, daemon=True
        )
        self.process.start()
        theirs.close()

    def receive(self, timeout_s: float) -> Any:
        """What it says next; RuntimeError if it ends before, or says nothing."""
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except EOFError:
            pass
        raise RuntimeError(f"{self.log.name}: expected a word within {timeout_s:.0f} s, got none")

    def last_words(self) -> dict[str, Any]:
        """Why it ended with 1, and whether it ever worked."""
        message = self.receive(5.0)
        return dict(message if isinstance(message, dict) else self.receive(5.0))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def again(self) -> Node:
        """The same on what it left."""
        node = Node(self.role, self.log, None, **self.settings)
        node.is_second = True
        return node

    def fill_disk(self, is_full: bool) -> None:
        """From now on every write to a file fails, or none."""
        assert self.process.pid is not None
        hard = resource.RLIM_INFINITY
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (0 if is_full else hard, hard))

    def end(self) -> dict[str, Any]:
        """Has a server stop: what it reports."""
        self.process.terminate()
        message = self.receive(30.0)
        self.process.join(10.0)
        return dict(message)


# Jobs.


@dataclass(frozen=True)
class Plan:
    """What happens to a job; moments are shares of an undisturbed job's time, None for never."""

    workers: int = 2
    share: bool = True
    cut_rate: float = 0.0
    data_cut_rate: float = 0.0
    kill_worker: float | None = None
    kill_scheduler: float | None = None
    full_cache: float | None = None
    full_journal: float | None = None
    away_s: float = 0.1  # until what was killed is started again
    full_s: float = 0.5

    @classmethod
    def of(cls, seed: int) -> Plan:
        """A seed's."""
        chance = random.Random(seed)

        def moment(share: float) -> float | None:
            return chance.uniform(0.05, 0.95) if chance.random() < share else None

        return cls(
            workers=chance.choice([2, 3]), share=chance.random() < 0.5, cut_rate=chance.choice([0.05, 0.15, 0.3]),
            data_cut_rate=chance.choice([0.0, 0.1, 0.3]), kill_worker=moment(0.5), kill_scheduler=moment(0.4),
            full_cache=moment(0.3), full_journal=moment(0.3), away_s=chance.uniform(0.0, 0.6),
            full_s=chance.uniform(0.1, 1.5),
        )  # fmt: skip


@dataclass
class Outcome:
    """What came of a job."""

    seconds: float = 0.0
    cuts: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    wasted: int = 0
    restarts: int = 0
    entered: dict[str, dict[str, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Bench:
    """A network, its dataset and a data node, on which jobs are run one after the other.

    Args:
        with_dht: Nodes find each other by a DHT and not by addresses given; there is no proxy then.
    """

    def __init__(self, folder: Path, with_dht: bool = False) -> None:
        self.folder = folder
        self._dht = [LibtorrentDht(HOST, 0, [])] if with_dht else []
        bootstrap = [(HOST, node.port) for node in self._dht]
        self._dht += [LibtorrentDht(HOST, 0, bootstrap) for _ in range(5 * len(self._dht))]  # that stay, as others end
        create_network(folder / "network", "bench", bootstrap=bootstrap)
        self.homes = {name: folder / name for name in ("data", "scheduler", "worker0", "worker1", "worker2")}
        for name, home in self.homes.items():
            join(folder / "network", home, name)
        make_dataset(folder / "dataset", SLICES, SLICE_BYTES)
        self.samples = SLICES * (SLICE_BYTES // 2 // SEQ_LEN)
        self._fixed_address = "" if with_dht else f"{HOST}:1"
        self._data: Node | None = None
        self._data_at = ""

    def close(self) -> None:
        """End the data node."""
        if self._data is not None:
            self._data.kill()
        for node in self._dht:
            node.close()

    def serve(self, injection: Injection | None = None) -> Node:
        """A data node, in place of the one before."""
        if self._data is not None:
            self._data.kill()
        self._data = Node(
            _serve, self.folder / "data.log", injection, node=str(self.homes["data"]),
            data=str(self.folder / "dataset"), data_address=self._fixed_address,
        )  # fmt: skip
        self._data_at = self._data.receive(30.0)
        return self._data

    def read(self, injection: Injection, deadline_s: float, cache: str) -> Outcome:
        """A loader in place of a job."""
        if self._data is None:
            self.serve()
        folder, outcome, began = self.folder / "reading", Outcome(), time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        node = Node(
            _read, self.folder / "reader.log", injection, node=str(self.homes["worker0"]), data_address=self._data_at,
            data=str(self.folder / "dataset"), cache=cache and str(folder),
        )  # fmt: skip
        try:
            message = node.receive(deadline_s)
            outcome.entered["reader"] = message.get("entered", {})
            if "error" in message or not message["report"]["done"] or message["report"]["samples"] != self.samples:
                outcome.faults.append(f"reader: {message}"[-2000:])
        except RuntimeError as error:
            outcome.faults.append(str(error))
        outcome.seconds = time.monotonic() - began
        node.kill()
        return outcome

    def run(
        self, seed: int, plan: Plan, deadline_s: float, calm_s: float = 1.0, epochs: int = EPOCHS,
        injections: dict[str, Injection] | None = None,
    ) -> Outcome:  # fmt: skip
        """A job from its first process to the proof of its ledger; its folder stays where it was wrong or slow."""
        folder, chance, outcome = self.folder / f"job-{seed}", random.Random(f"cuts {seed}"), Outcome()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        injections = injections or {}
        if self._data is None or "data" in injections:
            self.serve(injections.get("data"))
        with contextlib.ExitStack() as stack:
            job = _Job(self, folder, plan, chance, deadline_s, injections, stack, epochs)
            outcome.seconds = job.run(calm_s, outcome)
        _prove(folder, self.samples, epochs, outcome)
        if "data" in injections and self._data is not None:
            outcome.entered["data"] = self._data.end()["entered"]
            self._data = None
        if not outcome.faults and (outcome.seconds < 3 * calm_s or plan == Plan()):
            shutil.rmtree(folder)
        return outcome


class _Job:
    def __init__(
        self, bench: Bench, folder: Path, plan: Plan, chance: random.Random, deadline_s: float,
        injections: dict[str, Injection], stack: contextlib.ExitStack, epochs: int,
    ) -> None:  # fmt: skip
        self.plan, self.folder, self.deadline_s = plan, folder, deadline_s
        self.proxies: list[CuttingProxy] = []
        data_address, scheduler_address, self.nodes = "", "", dict[str, Node]()

        def proxy(target: str, rate: float) -> str:
            self.proxies.append(CuttingProxy(target, chance, rate))
            stack.callback(self.proxies[-1].close)
            return self.proxies[-1].address

        stack.callback(lambda: [node.kill() for node in self.nodes.values() if node.process.is_alive()])
        if bench._fixed_address:
            data_address = proxy(bench._data_at, plan.data_cut_rate)
        self.nodes["scheduler"] = scheduler = Node(
            _schedule, folder / "scheduler.log", injections.get("scheduler"), node=str(bench.homes["scheduler"]),
            state=str(folder / "state"), data_address=data_address, port=0, epochs=epochs,
        )  # fmt: skip
        self.began = time.monotonic()
        address = scheduler.receive(deadline_s)
        scheduler.settings["port"] = parse_address(address)[1]
        if bench._fixed_address:
            scheduler_address = proxy(address, plan.cut_rate)
        for i in range(plan.workers):
            self.nodes[f"worker{i}"] = Node(
                _work, folder / f"worker{i}.log", injections.get(f"worker{i}"), node=str(bench.homes[f"worker{i}"]),
                data_address=data_address, cache=str(folder / f"cache{i}"), scheduler=scheduler_address,
                share=plan.share, patience_s=deadline_s,
            )  # fmt: skip

    def run(self, calm_s: float, outcome: Outcome) -> float:
        """Until all workers have ended, or the deadline; seconds that it took."""
        plan, events = self.plan, list[tuple[float, Callable[[], object]]]()

        def add(share: float | None, first: Callable[[], object], after_s: float, then: Callable[[], object]) -> None:
            if share is not None:
                time_s = self.began + share * calm_s
                events.extend([(time_s, first), (time_s + after_s, then)])

        add(plan.kill_worker, lambda: self._kill("worker0"), plan.away_s, lambda: self._start("worker0"))
        add(plan.kill_scheduler, lambda: self._kill("scheduler"), plan.away_s, lambda: self._start("scheduler"))
        add(plan.full_cache, lambda: self._fill("worker1", True), plan.full_s, lambda: self._fill("worker1", False))
        add(plan.full_journal, lambda: self._fill("scheduler", True), plan.full_s,
            lambda: self._fill("scheduler", False))  # fmt: skip
        events.sort(key=lambda event: event[0])
        self.full, self.full_once = set[str](), set[str]()
        self.errors, self.restarts = dict[str, str](), 0
        until = self.began + self.deadline_s
        while time.monotonic() < until:
            while events and events[0][0] <= time.monotonic():
                events.pop(0)[1]()
            self._restart()
            workers = [node for name, node in self.nodes.items() if name != "scheduler"]
            if all(node.process.exitcode not in (None, -signal.SIGKILL) for node in workers):
                break
            time.sleep(0.01)
        seconds = time.monotonic() - self.began
        for _, act in events:  # the job was quicker: whoever is away comes back, and has room
            act()
        self._close(outcome)
        return seconds

    def _restart(self) -> None:
        """What a supervisor of services does: who could not begin, as its disk was full, is started again."""
        for name in self.full_once:
            if self.nodes[name].process.exitcode == 1 and name not in self.errors:
                message = self.nodes[name].last_words()
                if message["has_worked"]:
                    self.errors[name] = message["error"]
                    continue
                time.sleep(0.2)
                self.nodes[name] = self.nodes[name].again()
                self.restarts += 1
                if name in self.full:
                    self.nodes[name].fill_disk(True)

    def _kill(self, name: str) -> None:
        if self.nodes[name].process.exitcode is None:
            self.nodes[name].kill()

    def _start(self, name: str) -> None:
        if self.nodes[name].process.exitcode == -signal.SIGKILL:
            self.nodes[name] = self.nodes[name].again()
            if name in self.full:
                self.nodes[name].fill_disk(True)

    def _fill(self, name: str, is_full: bool) -> None:
        self.full_once.add(name)
        (self.full.add if is_full else self.full.discard)(name)
        if self.nodes[name].process.exitcode is None:
            self.nodes[name].fill_disk(is_full)

    def _close(self, outcome: Outcome) -> None:
        """Ends of all processes; those that hang say where."""
        for name, node in self.nodes.items():
            if name == "scheduler":
                continue
            code = node.process.exitcode
            if code is None:
                assert node.process.pid is not None
                os.kill(node.process.pid, signal.SIGUSR1)
                outcome.faults.append(f"{name} had not ended after {self.deadline_s:.1f} s")
                time.sleep(0.2)
                continue
            if code != 0:
                error = self.errors.get(name) or (node.last_words()["error"] if code == 1 else "")
                (self.folder / f"{name}.error").write_text(error)
                outcome.faults.append(f"{name} ended with {code}: {error.strip().rpartition(chr(10))[2]}")
                continue
            message = node.receive(5.0)
            outcome.entered[name] = message["entered"]
            outcome.wasted += message["report"]["wasted_samples"]
            if not message["report"]["done"]:
                outcome.faults.append(f"{name} ended before the job was done")
        for proxy in self.proxies:
            outcome.cuts += proxy.cuts
            outcome.answers += proxy.answers
        self._restart()
        scheduler, outcome.restarts = self.nodes["scheduler"], self.restarts
        try:
            if scheduler.is_second:
                scheduler.receive(20.0)
            message = scheduler.end()
            outcome.entered["scheduler"] = message["entered"]
            if not message["report"]["done"]:
                outcome.faults.append("the scheduler says that the job is not done")
        except (RuntimeError, OSError) as error:
            outcome.faults.append(f"scheduler: {error}")


def _prove(folder: Path, samples: int, epochs: int, outcome: Outcome) -> None:
    """The ledger has every sample of every epoch once; a cache has right bytes only."""
    report = verify_ledger(folder / "state" / "ledger.jsonl", verify=verify)
    epoch_counts = [(epoch["epoch"], epoch["samples"], epoch["missing"], epoch["repeated"]) for epoch in report.epochs]
    if not report.ok or epoch_counts != [(epoch, samples, 0, 0) for epoch in range(epochs)]:
        outcome.faults.append(f"ledger: {report}"[:2000])
    for directory in folder.glob("cache*"):
        outcome.faults += [f"cache: {problem}" for problem in check_chunks(directory)[1]]


def run_seeds(folder: Path, seeds: range, log: Callable[[str], object] = print) -> dict[str, Any]:
    """Part one: figures over all seeds, and the faults of each that had any."""
    bench, ratios, calm_s = Bench(folder), list[float](), 0.0
    cuts, faults, counts = Counter[str](), dict[int, list[str]](), Counter[str]()
    try:
        for number, seed in enumerate(seeds):
            if number % CALIBRATED_FOR == 0:
                calm_jobs = [bench.run(-1 - i, Plan(), 120.0) for i in range(2)]
                if wrong := [fault for job in calm_jobs for fault in job.faults]:
                    raise RuntimeError(f"an undisturbed job failed: {wrong}")
                calm_s = statistics.median(job.seconds for job in calm_jobs)
            plan = Plan.of(seed)
            done = bench.run(seed, plan, DEADLINE * calm_s, calm_s)
            ratios.append(done.seconds / calm_s)
            cuts += done.cuts
            counts["answers"] += done.answers
            counts["wasted samples"] += done.wasted
            counts["starts on a full disk"] += done.restarts
            for name in ("kill_worker", "kill_scheduler", "full_cache", "full_journal"):
                counts[name] += getattr(plan, name) is not None
            if done.faults:
                faults[seed] = done.faults
            log(f"seed {seed:4d}  {done.seconds:6.2f} s ({ratios[-1]:4.1f} x)  {sum(done.cuts.values()):4d} cuts  "
                f"{'; '.join(done.faults) or 'ok'}")  # fmt: skip
    finally:
        bench.close()
    return {
        "seeds": len(ratios), "failed": faults, "calm_s": round(calm_s, 2),
        "median_ratio": round(statistics.median(ratios), 2), "max_ratio": round(max(ratios), 2), "cuts": dict(cuts),
        **counts,
    }  # fmt: skip


# Part two.


def run_tasks(folder: Path, only: str = "", log: Callable[[str], object] = print) -> dict[str, Any]:
    """Part two: each background task of each process raises once, at its start and while it runs."""
    bench, faults, rows = Bench(folder, with_dht=True), dict[str, list[str]](), 0
    roles = ("data", "scheduler", "worker0")

    def calm() -> Outcome:
        """A job in which nothing raises: what the machine needs for one now."""
        done = bench.run(-1, Plan(), 240.0, epochs=2 * EPOCHS, injections={role: Injection() for role in roles})
        if done.faults:
            raise RuntimeError(f"an undisturbed job failed: {done.faults}")
        return done

    def disturbed(number: int, role: str, injection: Injection, calm_s: float) -> Outcome:
        try:
            limit_s = 1.5 * calm_s + TASK_S
            done = bench.run(number, Plan(), limit_s, epochs=2 * EPOCHS, injections={role: injection})
        except RuntimeError as error:
            return Outcome(faults=[str(error)])
        if injection.when == "start" and not done.faults and done.entered[role].get(injection.task, 0) < 2:
            done.faults.append(f"it began {done.entered[role].get(injection.task, 0)} times")
        return done

    try:
        first = calm()
        tasks = [(role, task, when) for role in roles for task in sorted(first.entered[role]) for when in WHENS]
        tasks = [task for task in tasks if task[1:] != (TAKES, "running")]
        for number, (role, task, when) in enumerate(tasks):
            what = f"{role}: {task} ({when})"
            if only not in what:
                continue
            rows += 1
            done = disturbed(number, role, Injection(task, when), first.seconds)
            if done.faults:  # once more, by what the machine needs now: it may have become busy
                done = disturbed(number, role, Injection(task, when), calm().seconds)
            if done.faults:
                faults[what] = done.faults
            log(f"{what:44} {done.seconds:6.2f} s  {'; '.join(done.faults) or 'ok'}")
        for cache in () if only.partition(":")[0] in roles else ("cache", ""):
            still = bench.read(Injection(), 120.0, cache)
            for task, when in [(task, when) for task in sorted(still.entered["reader"]) for when in WHENS]:
                if (task, when) == (TAKES, "running"):
                    continue
                what = f"reader{' of files' * (not cache)}: {task} ({when})"
                if only in what:
                    rows += 1
                    done = bench.read(Injection(task, when), 1.5 * still.seconds + TASK_S, cache)
                    if done.faults:
                        faults[what] = done.faults
                    log(f"{what:44} {done.seconds:6.2f} s  {'; '.join(done.faults) or 'ok'}")
    finally:
        bench.close()
    return {"tasks": rows, "calm_s": round(first.seconds, 2), "failed": faults}


def main() -> int:
    """One part or both; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="how many (200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--tasks", action="store_true", help="the second part instead")
    parser.add_argument("--only", default="", help="with --tasks: those whose name contains this")
    parser.add_argument("--keep", type=Path, help="an empty folder for the jobs; those that failed stay there")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        if args.tasks:
            figures = run_tasks(folder, args.only)
        else:
            figures = run_seeds(folder, range(args.first, args.first + args.seeds))
    for name, value in figures.items():
        print(f"  {name:16} {value}")
    print(json.dumps(figures))
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
