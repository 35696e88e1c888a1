"""Small jobs behind a proxy that cuts connections, with processes killed and disks full.

Each job has real processes over mutual TLS: a data node, a scheduler and two or three workers. All reach the servers
through a proxy that cuts a share of the connections once a request has passed it, half of them amid the answer. The
data node, the scheduler or a worker is killed with SIGKILL and started again on what it left; a worker's or the
scheduler's disk is full for a while (`RLIMIT_FSIZE` 0: every write to a file fails). Then the ledger must prove that
every sample was used once, every worker must end with 0, and every cache must have right bytes. A seed decides what is
done and when; which request is cut depends on time.

`python -m tests.slow.network.cutting_proxy` runs 200 seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import multiprocessing
import os
import random
import resource
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from forebay.data_node import DataNode
from forebay.dataset.reader import open_dataset
from forebay.load.loader import Loader
from forebay.load.options import NetworkOptions
from forebay.network.client import Client
from forebay.network.pki.identity import Identity
from forebay.scheduler.server import SchedulerService
from forebay.storage.hosts import parse_address
from support.chunk_checks import check_chunks
from support.ledgers import certified
from support.local_discovery import LocalDiscovery
from support.nodes import HOST, NAME, make_dataset, make_network

DEADLINE_S = 120.0  # of a job that takes some seconds undisturbed
SEQ_LEN, SLICES, TOKENS, BATCH, EPOCHS = 256, 13, 32 << 10, 4, 2
SAMPLES = (SLICES - 1) * TOKENS // SEQ_LEN
PAUSE_S = 0.015  # of a step
NODES = ("data", "scheduler", "worker0", "worker1", "worker2")
FAULTS = ("kill data", "kill scheduler", "kill worker0", "fill scheduler", "fill worker1")
_has_worked = threading.Event()  # this process did what it is for
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["forebay.lease.session", "forebay.scheduler.server", "forebay.data_node"])


class CuttingProxy:
    """Passes connections on, and cuts some of them within an answer or right before it.

    It sees TLS only. Servers here send nothing between the handshake and the first answer, so bytes from the server
    after the client has spoken twice are an answer.

    Attributes:
        carried: Bytes of both directions.

    Args:
        rate: Share of the answers that are cut.
    """

    def __init__(self, chance: random.Random, rate: float):
        self.cuts = Counter()
        self.target, self.carried, self.connections = "", 0, 0
        self._chance, self._rate = chance, rate
        self._listener = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near):
        with near, contextlib.suppress(OSError), socket.create_connection(parse_address(self.target), 5) as far:
            turns, from_client = 0, False
            while True:
                for source in select.select([near, far], [], [])[0]:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    self.carried += len(data)
                    if from_client is not (source is near):
                        from_client = source is near
                        turns += 1  # 1: hello, 2: the server's, 3: the client's certificate and request, 4: an answer
                        if turns >= 4 and not from_client and self._chance.random() < self._rate:
                            return self._cut(near, far, data)
                    (far if from_client else near).sendall(data)

    def _cut(self, near, far, data):
        is_amid = self._chance.random() < 0.5
        self.cuts["amid the answer" if is_amid else "before the answer"] += 1
        if is_amid:
            near.sendall(data[: self._chance.randrange(1, max(2, len(data)))])
        for sock in (near, far):
            if self._chance.random() < 0.5:  # a reset, not an end
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


# Processes.


def _child(role, log, pipe, **settings):
    """Run one process: its log, its signals, its report over the pipe, as its disk may be full."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(name)s %(message)s", force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        report = role(pipe=pipe, stop=stop, **settings)
    except BaseException:  # noqa: BLE001  # reported over the pipe
        pipe.send({"error": traceback.format_exc(), "has_worked": _has_worked.is_set()})
        os._exit(1)
    pipe.send({"report": report})
    os._exit(0)  # without the interpreter's end: threads of libraries


def _serve(pipe, stop, node, data, port):
    with DataNode(Identity.load(node), [open_dataset(data)], HOST, port, LocalDiscovery(), ttl_s=3.0) as served:
        return _wait(pipe, stop, served.address)


def _schedule(pipe, stop, node, state, data_address, port):
    identity = Identity.load(node)
    service = SchedulerService(
        identity, NAME, LocalDiscovery(addresses=[parse_address(data_address)]), Client(identity), state, HOST, port,
        seq_len=SEQ_LEN, epochs=EPOCHS, lease_s=1.0, steal_s=0.2, rediscover_s=0.5,
    )  # fmt: skip
    service.start()
    _wait(pipe, stop, service.address)
    is_done = service.is_done()
    service.stop()
    return is_done


def _wait(pipe, stop, address):
    """Wait to be stopped, or left alone."""
    _has_worked.set()
    pipe.send({"address": address})
    parent = os.getppid()
    while not stop.wait(0.2) and os.getppid() == parent:
        pass
    return True


def _work(pipe, stop, node, data_address, cache, scheduler, share):
    network = NetworkOptions(
        Identity.load(node), receipt_s=0.2, patience_s=DEADLINE_S, listen=f"{HOST}:0" if share else None,
        discovery=LocalDiscovery(addresses=[parse_address(data_address)]),
    )  # fmt: skip
    with Loader(
        f"forebay://test/{NAME}", seq_len=SEQ_LEN, batch_size=BATCH, scheduler=scheduler, cache_dir=cache,
        cache_bytes=8 * TOKENS, network=network,
    ) as loader:  # fmt: skip
        for _ in loader:
            _has_worked.set()
            time.sleep(PAUSE_S)
    return bool(loader.stats()["done"])


class Node:
    """A process of a job, and what it reported."""

    def __init__(self, role: Callable, log: Path, **settings: Any):
        self.role, self.log, self.settings = role, log, settings
        self._pipe, theirs = _processes.Pipe(duplex=False)
        self._messages = {}
        self.process = _processes.Process(target=_child, args=(role, log, theirs), kwargs=settings, daemon=True)
        self.process.start()
        theirs.close()

    @property
    def code(self) -> int | None:
        return self.process.exitcode

    def receive(self, key: str) -> Any:
        """Return what it reports under a key; RuntimeError if it ends before, or reports nothing."""
        with contextlib.suppress(EOFError):
            while key not in self._messages and self._pipe.poll(DEADLINE_S):
                self._messages |= self._pipe.recv()
        if key not in self._messages:
            raise RuntimeError(f"{self.log.name}: expected its {key}, got {self._messages} (code {self.code})")
        return self._messages[key]

    def kill(self):
        self.process.kill()
        self.process.join()

    def again(self) -> Node:
        """Start the same on what it left."""
        return Node(self.role, self.log, **self.settings)

    def fill_disk(self, is_full: bool):
        """From now on let every write to a file fail, or none."""
        hard = resource.RLIM_INFINITY
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (0 if is_full else hard, hard))


# Jobs.


@dataclass(frozen=True)
class Plan:
    """The faults of a job.

    Args:
        moments: Of FAULTS, in seconds from the start of the workers.
        away_s, full_s: Until what was killed is started again; for which a disk is full.
    """

    workers: int = 2
    share: bool = True
    cut_rate: float = 0.0
    data_cut_rate: float = 0.0
    moments: dict[str, float] = field(default_factory=dict)
    away_s: float = 0.1
    full_s: float = 0.5

    @classmethod
    def draw(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        return cls(
            chance.choice([2, 3]), chance.random() < 0.5, chance.choice([0.05, 0.15, 0.3]),
            chance.choice([0.0, 0.1, 0.3]),
            {fault: chance.uniform(0.1, 4.0) for fault in FAULTS if chance.random() < 0.4},
            chance.uniform(0.0, 0.6), chance.uniform(0.1, 1.5),
        )  # fmt: skip


class Job:
    """A job in an empty folder, from its first process to the proof of its ledger.

    Attributes:
        faults: What was wrong at its end.
    """

    def __init__(self, folder: Path, plan: Plan, seed: int = 0):
        self.folder, self.plan = folder, plan
        self.cuts, self.faults, self.restarts = Counter(), [], 0
        self._chance = random.Random(f"cuts {seed}")
        self._nodes = {}
        self._full, self._filled = set(), set()  # disks that are full now, that were
        self._homes = make_network(folder, list(NODES), [])
        make_dataset(folder / "dataset", SLICES, TOKENS)

    @property
    def _workers(self):
        return [node for name, node in self._nodes.items() if name.startswith("worker")]

    def run(self) -> Job:
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: [node.kill() for node in self._nodes.values()])
            proxies = [CuttingProxy(self._chance, rate) for rate in (self.plan.data_cut_rate, self.plan.cut_rate)]
            self._start(proxies, stack)
            self._watch()
            self._end()
            self.cuts = sum((proxy.cuts for proxy in proxies), Counter())
        self._prove()
        return self

    def _start(self, proxies, stack):
        data, scheduler = (proxy.address for proxy in proxies)
        servers = [
            ("data", _serve, {"data": self.folder / "dataset"}),
            ("scheduler", _schedule, {"state": self.folder / "state", "data_address": data}),
        ]
        for (name, role, settings), proxy in zip(servers, proxies):
            stack.callback(proxy.close)
            node = self._add(name, role, port=0, **settings)
            proxy.target = node.receive("address")
            node.settings["port"] = parse_address(proxy.target)[1]
        for name in NODES[2 : 2 + self.plan.workers]:
            cache = self.folder / f"cache-{name}"
            self._add(name, _work, data_address=data, scheduler=scheduler, cache=cache, share=self.plan.share)

    def _add(self, name, role, **settings):
        self._nodes[name] = Node(role, self.folder / f"{name}.log", node=self._homes[name], **settings)
        return self._nodes[name]

    def _watch(self):
        """Do what is planned until all workers have ended."""
        events = []
        for fault, at_s in self.plan.moments.items():
            verb, name = fault.split()
            begin, end, for_s = {
                "kill": (self._kill, self._start_again, self.plan.away_s),
                "fill": (self._fill, self._empty, self.plan.full_s),
            }[verb]
            events += [(at_s, begin, name), (at_s + for_s, end, name)]
        events.sort(key=lambda event: event[0])
        began = time.monotonic()
        while (passed_s := time.monotonic() - began) < DEADLINE_S:
            while events and events[0][0] <= passed_s:
                _, act, name = events.pop(0)
                act(name)
            self._restart()
            if all(node.code not in (None, -signal.SIGKILL) for node in self._workers):
                break
            time.sleep(0.01)
        for _, act, name in events:  # the job was quicker: whoever is away comes back, and has room
            act(name)

    def _restart(self):
        """Start again, as a service manager does, who could not begin on a full disk."""
        for name in self._filled:
            node = self._nodes[name]
            if node.code == 1 and not node.receive("has_worked"):
                time.sleep(0.2)
                self._replace(name)
                self.restarts += 1

    def _replace(self, name):
        self._nodes[name] = self._nodes[name].again()
        if name in self._full:
            self._nodes[name].fill_disk(True)

    def _kill(self, name):
        if self._nodes[name].code is None:
            self._nodes[name].kill()

    def _start_again(self, name):
        if self._nodes[name].code == -signal.SIGKILL:
            self._replace(name)

    def _fill(self, name):
        self._full.add(name)
        self._filled.add(name)
        self._nodes[name].fill_disk(True)

    def _empty(self, name):
        self._full.discard(name)
        self._nodes[name].fill_disk(False)

    def _end(self):
        """Note how all processes ended; those that hang write where to their logs."""
        for name, node in reversed(self._nodes.items()):
            if node.code is None and node in self._workers:
                os.kill(node.process.pid or 0, signal.SIGUSR1)
                self.faults.append(f"{name} had not ended after {DEADLINE_S:.0f} s")
                time.sleep(0.2)
                continue
            try:
                if node not in self._workers:
                    node.receive("address")
                    node.process.terminate()
                if not node.receive("report"):
                    self.faults.append(f"{name} ended before the job was done")
            except (RuntimeError, OSError) as error:
                self.faults.append(f"{name}: {error}")

    def _prove(self):
        report = certified(self.folder / "state" / "ledger.jsonl", self._homes[NODES[0]])
        counts = [(epoch["epoch"], epoch["samples"], epoch["missing"], epoch["repeated"]) for epoch in report.epochs]
        if not report.ok or counts != [(epoch, SAMPLES, 0, 0) for epoch in range(EPOCHS)]:
            self.faults.append(f"ledger: {report}"[:2000])
        for directory in self.folder.glob("cache*"):
            self.faults += [f"cache: {problem}" for problem in check_chunks(directory)[1]]


def run_seed(folder: Path, seed: int) -> list[str]:
    """Run the job of a seed; return what was wrong."""
    return Job(folder, Plan.draw(seed), seed=seed).run().faults


def main() -> int:
    """Run jobs; print a line for each, and return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="how many (200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    args = parser.parse_args()
    failed = {}
    with tempfile.TemporaryDirectory() as root:
        for seed in range(args.first, args.first + args.seeds):
            began, folder = time.monotonic(), Path(root, str(seed))
            folder.mkdir()
            if faults := run_seed(folder, seed):
                failed[seed] = faults
            print(f"{seed:6} {time.monotonic() - began:6.2f} s  {'; '.join(faults) or 'ok'}", flush=True)
    print(json.dumps({"runs": args.seeds, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
