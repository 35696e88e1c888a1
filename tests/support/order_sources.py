"""The order sources of a Loader for the contract suite, with nodes in this process or in processes of their own."""

import contextlib
import io
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from forebay.cli import main
from forebay.data_node import DataNode
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import open_dataset
from forebay.dataset.slices import write_rows_slice, write_token_slice
from forebay.network.client import Client
from forebay.network.pki.identity import Identity
from forebay.scheduler.server import SchedulerService
from support.calibration import scaled
from support.forks import Forks, Process
from support.local_discovery import LocalDiscovery
from support.nodes import HOST, Bootstrap, make_network
from support.order_worker import describe, open_loader
from support.reference_samples import Slices
from support.waiting import until

SEQ_LEN, GLOBAL_BATCH, WORKERS = 16, 8, 3
SAMPLES_PER_WORKER = 3  # Of a step: the largest share of the global batch.
Line = dict


def make_slices(num_slices: int, first: int) -> Slices:
    """Documents of 1 to 60 tokens, some over two slices; every token of all slices is another number."""
    chance = np.random.default_rng(first)
    slices, token = [], first
    for index in range(num_slices):
        stops = np.cumsum(chance.integers(1, 60, 7)).tolist()
        size = stops[-1] + (int(chance.integers(1, 30)) if index % 2 and index < num_slices - 1 else 0)
        slices.append((list(range(token, token + size)), stops))
        token += size
    return slices


def make_rows(num_slices: int) -> list[dict]:
    chance = np.random.default_rng(4)
    return [
        {"image": chance.integers(0, 255, (count, 2, 3)).astype(np.uint8), "label": chance.integers(0, 9, count)}
        for count in chance.integers(3, 12, num_slices).tolist()
    ]


class Datasets:
    """Datasets of these slices in a directory, and the directories of a network's members."""

    def __init__(
        self, directory: Path, stack: contextlib.ExitStack, tokens: Mapping[str, Slices],
        rows: Sequence[dict] = (),
    ) -> None:  # fmt: skip
        self.directory, self._numbers = directory, itertools.count()
        self.tokens, self.rows = tokens, rows
        for name, slices in self.tokens.items():
            for index, (numbers, stops) in enumerate(slices):
                path = self._slice_path(name, index)
                write_token_slice(path, np.array(numbers, np.uint16), np.array(stops, np.uint64))
        for index, tensors in enumerate(self.rows):
            write_rows_slice(self._slice_path("rows", index), tensors)
        self.datasets = {name: str(directory / name) for name in (*tokens, *(["rows"] if rows else []))}
        for name, path in self.datasets.items():
            import_slices(path, name)
        nodes = ["data", "liar", "scheduler", *(f"worker-{i}" for i in range(8))]
        self.homes = make_network(directory, nodes, self.start_bootstrap(stack))
        self.start_data_node(stack)

    def start_bootstrap(self, stack: contextlib.ExitStack) -> list[tuple[str, int]]:
        return []

    def start_data_node(self, stack: contextlib.ExitStack) -> None:
        raise NotImplementedError

    def _slice_path(self, name, index):
        path = self.directory / name / "slices" / f"{index:03d}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def new_directory(self) -> Path:
        path = self.directory / f"run-{next(self._numbers)}"
        path.mkdir()
        return path


class LocalCluster(Datasets):
    """All nodes in this process. Leases last an hour, so that no stop of the machine ends one."""

    def start_data_node(self, stack: contextlib.ExitStack) -> None:
        self._stack, self._discovery = stack, LocalDiscovery()
        datasets = list(map(open_dataset, self.datasets.values()))
        node = DataNode(Identity.load(self.homes["data"]), datasets, HOST, 0, self._discovery, ttl_s=600)
        stack.enter_context(node)

    def lease_s(self, term_s: float) -> float:
        return 3600.0

    def scheduler(self, name: str, state: Path, job: Mapping[str, Any], **settings: Any) -> tuple[object, str]:
        identity = Identity.load(self.homes["scheduler"])
        client = self._stack.enter_context(Client(identity))
        service = SchedulerService(identity, name, self._discovery, client, state, HOST, 0, **settings, **dict(job))
        service.start()
        self._stack.callback(service.stop)
        return service, service.address


class Cluster(Datasets):
    """Each node is a `forebay` process; closed with `stack`."""

    def start_bootstrap(self, stack: contextlib.ExitStack) -> list[tuple[str, int]]:
        self.forks = Forks()
        stack.callback(self.forks.close)
        self.bootstrap = Bootstrap(3)
        stack.callback(self.bootstrap.close)
        return self.bootstrap.addresses

    def start_data_node(self, stack: contextlib.ExitStack) -> None:
        self.node("serve", "data", *self.datasets.values())

    def lease_s(self, term_s: float) -> float:
        return round(scaled(term_s), 2)

    def scheduler(
        self, name: str, state: Path, job: Sequence[str], lease_s: float, seq_len: int | None = None,
        listen: str = f"{HOST}:0",
    ) -> tuple[Process, str]:  # fmt: skip
        size = [] if seq_len is None else ["--seq-len", seq_len]
        words = [name, "--state", state, "--lease-timeout", lease_s, *size, *job]
        return self.node("scheduler", "scheduler", *words, listen=listen)

    def start(self, *argv: object) -> Process:
        path = self.directory / f"{next(self._numbers)}.log"
        for log in (path, path.with_name(f"{path.name}.err")):
            log.touch()
        return self.forks.start("", [str(word) for word in argv], path)

    def node(self, verb: str, name: str, *argv: object, listen: str = f"{HOST}:0") -> tuple[Process, str]:
        """Start a node of the command line; return it, once it is ready, and its address."""
        process = self.start(verb, *argv, *f"--identity {self.homes[name]} --listen {listen} --json".split())
        return process, process.ready()["address"]


def batches_of(process: Process) -> list[Line]:
    return [line for line in process.lines() if "step" in line]


def wait_for(processes: Iterable[Process]) -> None:
    for process in processes:
        until(lambda: process.wait(1.0) is not None)  # noqa: B023
        assert process.wait(0.0) == 0, (process.wait(0.0), process.errors()[-4000:], process.lines()[-1:])


def read(spec: dict) -> list[Line]:
    """Return all batches of a Loader in this process, with contents."""
    with open_loader(spec) as loader:
        return [describe(batch, True) for batch in loader]


class Source:
    """Workers of one run. `spec` has the Loader's arguments that all sources share, as `order_worker` reads them."""

    name = ""
    seq_len = SEQ_LEN
    is_lockstep = True  # All ranks have the same steps.
    is_global = True  # The global batch of a step is that of a Loader alone.

    def __init__(self, cluster: Any, spec: dict, job: Any = ()) -> None:
        self.cluster, self.directory = cluster, cluster.new_directory()
        self.job = job  # Arguments of its scheduler.
        self.num_workers = WORKERS
        self.spec = self.with_datasets(spec)

    def with_datasets(self, spec: dict) -> dict:
        names = spec["dataset"]
        paths = self.cluster.datasets
        dataset = {name: paths[name] for name in names} if isinstance(names, list) else paths[names]
        return {"seq_len": None if names == "rows" else self.seq_len, **spec, "dataset": dataset}

    def loader(self, index: int) -> dict:
        """The arguments of a worker's Loader."""
        return {"global_batch_size": GLOBAL_BATCH, **self.spec, "rank": index, "world_size": self.num_workers}

    def start(self, index: int, pause_s: float) -> Process:
        settings = {"loader": self.loader(index), "pause_s": pause_s}
        return self.cluster.start("module", "support.order_worker", json.dumps(settings))

    def run(self) -> list[list[Line]]:
        """Return the batches of each worker, all threads of this process, over one epoch or all steps."""
        with ThreadPoolExecutor(self.num_workers) as pool:
            return list(pool.map(read, map(self.loader, range(self.num_workers))))


class Static(Source):
    name = "static"


class Owned(Source):
    name = "owned"
    is_global = False

    def loader(self, index: int) -> dict:
        names = [f"rack-{i}" for i in range(self.num_workers)]
        return {**super().loader(index), "order": {"assignment": "owned", "worker_names": names}}


class Leased(Source):
    name = "lease"
    is_lockstep = is_global = False
    term_s = 30.0  # Of a lease.

    def with_datasets(self, spec: dict) -> dict:
        names = spec["dataset"]
        jobs, self.lease_s = names if isinstance(names, list) else [names], self.cluster.lease_s(self.term_s)
        self.states = {name: self.directory / f"state-{name}" for name in jobs}
        self.schedulers = {name: self.start_scheduler(name) for name in jobs}
        addresses = {name: address for name, (_, address) in self.schedulers.items()}
        urls = {name: f"forebay://test/{name}" for name in jobs}
        locations = (urls, addresses) if isinstance(names, list) else (urls[names], addresses[names])
        size = None if names == "rows" else self.seq_len
        of_loader = {name: value for name, value in spec.items() if name != "epochs"}  # The job decides this.
        return {"seq_len": size, **of_loader, "dataset": locations[0], "scheduler": locations[1]}

    def start_scheduler(self, name: str, **more: Any) -> tuple[Any, str]:
        size = {} if name == "rows" else {"seq_len": self.seq_len}
        return self.cluster.scheduler(name, self.states[name], self.job, lease_s=self.lease_s, **size, **more)

    def loader(self, index: int) -> dict:
        network = {"identity": str(self.cluster.homes[f"worker-{index}"]), "receipt_s": 0.2, "patience_s": 600.0}
        cache = {"cache_dir": str(self.directory / f"cache-{index}"), "cache_bytes": 1 << 20}
        return {**self.spec, "batch_size": SAMPLES_PER_WORKER, "network": network, **cache}

    def verify(self, name: str) -> dict:
        """Return what `forebay ledger verify` prints."""
        return ledger(*f"verify {self.states[name]}/ledger.jsonl --samples".split())

    def uses(self, name: str) -> list[dict]:
        """Return the table that `forebay ledger export` writes."""
        out = self.directory / f"{name}.jsonl"
        ledger(*f"export {self.states[name]}/ledger.jsonl --out {out} --sample-ids".split())
        return [json.loads(line) for line in out.read_text().splitlines()]


def ledger(*argv: object) -> dict:
    """The output of a command of `forebay ledger`, as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        main(["ledger", *(str(word) for word in argv), "--json"])
    return json.loads(text.getvalue())


SOURCES = {kind.name: kind for kind in (Static, Owned, Leased)}
