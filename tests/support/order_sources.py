"""The order sources of the Loader, each with real processes: what `tests/contract` runs on all of them."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.cli import main
from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_rows_slice, write_token_slice
from support.calibration import scaled
from support.forks import Forks, Process
from support.nodes import HOST, Bootstrap, make_network
from support.reference_samples import Slices

SEQ_LEN, GLOBAL_BATCH, WORKERS = 16, 8, 3
SAMPLES_PER_WORKER = 3  # Of a step: the largest share of the global batch.
Line = dict[str, Any]


def make_slices(num_slices: int, first: int) -> Slices:
    """Documents of 1 to 60 tokens, some over two slices; every token of all slices is another number."""
    chance = np.random.default_rng(first)
    slices, token = [], first
    for index in range(num_slices):
        ends = np.cumsum(chance.integers(1, 60, 7)).tolist()
        size = ends[-1] + (int(chance.integers(1, 30)) if index % 2 and index < num_slices - 1 else 0)
        slices.append((list(range(token, token + size)), ends))
        token += size
    return slices


def make_rows(num_slices: int) -> list[dict[str, Any]]:
    chance = np.random.default_rng(4)
    return [
        {"image": chance.integers(0, 255, (count, 2, 3)).astype(np.uint8), "label": chance.integers(0, 9, count)}
        for count in chance.integers(3, 12, num_slices).tolist()
    ]


class Cluster:
    """Datasets, a data node and whatever is started, each node a `forebay` process; closed with `stack`."""

    def __init__(
        self, directory: Path, stack: contextlib.ExitStack, tokens: Mapping[str, Slices],
        rows: Sequence[dict[str, Any]] = (),
    ) -> None:  # fmt: skip
        self.directory, self.forks = directory, Forks()
        stack.callback(self.forks.close)
        self._numbers = itertools.count()
        self.tokens, self.rows = tokens, rows
        for name, slices in self.tokens.items():
            for index, (numbers, ends) in enumerate(slices):
                path = self._slice_path(name, index)
                write_token_slice(path, np.array(numbers, np.uint16), np.array(ends, np.uint64))
        for index, tensors in enumerate(self.rows):
            write_rows_slice(self._slice_path("rows", index), tensors)
        self.datasets = {name: str(directory / name) for name in (*tokens, *(["rows"] if rows else []))}
        for name, path in self.datasets.items():
            import_slices(path, name)
        self.bootstrap = Bootstrap(3)
        stack.callback(self.bootstrap.close)
        nodes = ["data", "liar", "scheduler", *(f"worker-{i}" for i in range(8))]
        self.homes = make_network(directory, nodes, self.bootstrap.at)
        self.node("serve", "data", *self.datasets.values())

    def _slice_path(self, name: str, index: int) -> Path:
        path = self.directory / name / "slices" / f"{index:03d}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def start(self, *argv: object) -> Process:
        path = self.directory / f"{next(self._numbers)}.log"
        for log in (path, path.with_name(f"{path.name}.err")):
            log.touch()
        return self.forks.start("", [str(word) for word in argv], path)

    def node(self, verb: str, name: str, *argv: object, listen: str = f"{HOST}:0") -> tuple[Process, str]:
        """A node of the command line, once it is ready, and its address."""
        process = self.start(verb, *argv, "--identity", self.homes[name], "--listen", listen, "--json")
        return process, process.ready()["address"]

    def worker(self, **settings: Any) -> Process:
        return self.start("module", "support.order_worker", json.dumps(settings))

    def new_directory(self) -> Path:
        path = self.directory / f"run-{next(self._numbers)}"
        path.mkdir()
        return path


def batches_of(process: Process) -> list[Line]:
    return [line for line in process.lines() if "step" in line]


def wait_for(processes: Iterable[Process]) -> None:
    deadline = time.monotonic() + scaled(60.0)
    for process in processes:
        code = process.wait(max(0.0, deadline - time.monotonic()))
        assert code == 0, (code, process.errors()[-4000:], process.lines()[-1:])


class Source:
    """Workers of one run. `spec` has the Loader's arguments that all sources share, as `order_worker` reads them."""

    name = ""
    seq_len = SEQ_LEN
    is_lockstep = True  # All ranks have the same steps.
    is_elastic = True
    is_global = True  # The global batch of a step is that of a Loader alone.

    def __init__(self, cluster: Cluster, spec: dict[str, Any], job: Sequence[str] = ()) -> None:
        self.cluster, self.directory = cluster, cluster.new_directory()
        self.job = job
        self.num_workers = WORKERS
        self.spec = self.with_datasets(spec)
        self.processes: list[Process] = []

    def with_datasets(self, spec: dict[str, Any]) -> dict[str, Any]:
        names = spec["dataset"]
        paths = self.cluster.datasets
        dataset = {name: paths[name] for name in names} if isinstance(names, list) else paths[names]
        return {"seq_len": None if names == "rows" else self.seq_len, **spec, "dataset": dataset}

    def loader(self, index: int) -> dict[str, Any]:
        """The arguments of a worker's Loader."""
        return {"global_batch_size": GLOBAL_BATCH, **self.spec, "rank": index, "world_size": self.num_workers}

    def settings(self, index: int, **more: Any) -> dict[str, Any]:
        return {"loader": self.loader(index), **more}

    def start(self, index: int, **more: Any) -> Process:
        process = self.cluster.worker(**self.settings(index, **more))
        self.processes.append(process)
        return process

    def run(self, **more: Any) -> list[list[Line]]:
        """The batches of each worker, over one epoch or all steps."""
        workers = [self.start(index, **more) for index in range(self.num_workers)]
        wait_for(workers)
        return [batches_of(worker) for worker in workers]


class Static(Source):
    name = "static"


class Owned(Source):
    name = "owned"
    is_elastic = is_global = False

    def loader(self, index: int) -> dict[str, Any]:
        names = [f"rack-{i}" for i in range(self.num_workers)]
        return {**super().loader(index), "order": {"assignment": "owned", "worker_names": names}}


class Coordinated(Source):
    """Ranks of a coordinator's generations, which read the Loader that their rank and world size give."""

    name = "coordinator"

    def __init__(self, cluster: Cluster, spec: dict[str, Any], job: Sequence[str] = ()) -> None:
        super().__init__(cluster, spec, job)
        self.coordinator, self.address = self.start_coordinator(f"{HOST}:0")

    def start_coordinator(self, listen: str) -> tuple[Process, str]:
        words = ["--min-workers", self.num_workers, "--disconnect-timeout", 0.2, "--state", self.directory / "state"]
        process = self.cluster.start("coordinator", "--listen", listen, "--json", *words)
        return process, process.ready()["address"]

    def loader(self, index: int) -> dict[str, Any]:
        return {"global_batch_size": GLOBAL_BATCH, **self.spec}

    def settings(self, index: int, **more: Any) -> dict[str, Any]:
        shared = str(self.directory / "ranks")
        return super().settings(index, coordinator=self.address, name=f"worker-{index}", shared=shared, **more)


class Leased(Source):
    name = "lease"
    is_lockstep = is_global = False
    term_s = 30.0  # Of a lease. Shorter, a machine that stands still loses some, and their samples come again.

    def with_datasets(self, spec: dict[str, Any]) -> dict[str, Any]:
        names = spec["dataset"]
        jobs, self.lease_s = names if isinstance(names, list) else [names], round(scaled(self.term_s), 2)
        self.states = {name: self.directory / f"state-{name}" for name in jobs}
        self.schedulers = {name: self.start_scheduler(name) for name in jobs}
        addresses = {name: address for name, (_, address) in self.schedulers.items()}
        urls = {name: f"forebay://test/{name}" for name in jobs}
        where: Any = (urls, addresses) if isinstance(names, list) else (urls[names], addresses[names])
        size = None if names == "rows" else self.seq_len
        of_loader = {name: value for name, value in spec.items() if name != "epochs"}  # The job decides this.
        return {"seq_len": size, **of_loader, "dataset": where[0], "scheduler": where[1]}

    def start_scheduler(self, name: str, listen: str = f"{HOST}:0") -> tuple[Process, str]:
        size = [] if name == "rows" else ["--seq-len", self.seq_len]
        words = [name, "--state", self.states[name], "--lease-timeout", self.lease_s, *size, *self.job]
        return self.cluster.node("scheduler", "scheduler", *words, listen=listen)

    def loader(self, index: int) -> dict[str, Any]:
        network = {"identity": str(self.cluster.homes[f"worker-{index}"]), "receipt_s": 0.2, "patience_s": 30.0}
        cache = {"cache_dir": str(self.directory / f"cache-{index}"), "cache_bytes": 1 << 20}
        return {**self.spec, "batch_size": SAMPLES_PER_WORKER, "network": network, **cache}

    def verify(self, name: str) -> dict[str, Any]:
        """What `forebay ledger verify` prints."""
        return ledger("verify", self.states[name] / "ledger.jsonl", "--samples")

    def uses(self, name: str) -> list[dict[str, Any]]:
        """The table that `forebay ledger export` writes."""
        out = self.directory / f"{name}.jsonl"
        ledger("export", self.states[name] / "ledger.jsonl", "--out", out, "--sample-ids")
        return [json.loads(line) for line in out.read_text().splitlines()]


def ledger(*argv: object) -> dict[str, Any]:
    """The output of a command of `forebay ledger`, as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        main(["ledger", *(str(word) for word in argv), "--json"])
    result: dict[str, Any] = json.loads(text.getvalue())
    return result


SOURCES = {kind.name: kind for kind in (Static, Owned, Coordinated, Leased)}
