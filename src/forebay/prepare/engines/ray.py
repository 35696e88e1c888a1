"""The Ray engine: the same tasks over a cluster, or over a small one started here. The only importer of ray.

Retries and errors are those of `engines.base`; Ray's own retries are off. A task travels as its pickle and its result
as a short one: the data is in the store, a bucket or a directory that all nodes share. A local cluster takes 2 to 10 s
to start.
"""

import contextlib
import json
import os
import pickle
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from forebay.base import Json
from forebay.errors import ForebayError, PrepareError, package_for
from forebay.machine import num_cores
from forebay.prepare.engines import base
from forebay.prepare.engines.base import Attempts, Engine, Notify, OnDone, Outcome
from forebay.prepare.progress import name_of, read_all
from forebay.prepare.results import Committing
from forebay.storage.store import Store

_OBJECT_STORE_BYTES = 80 << 20  # Of a local cluster; Ray accepts 75 MiB and up, and results are far smaller.
_STOP_S = 10.0
_STARTS = 3  # Of a cluster of this machine: Ray allows its processes 15 s, which a busy machine may exceed.
_CRASHES = 2  # Of workers under a task before it runs with smaller batches.
_CPUS_S = 5.0  # How often the cluster is asked for its number of CPUs, as nodes come and go.
_RUNNING = "running/"  # In the work of a run: for each Ray worker which task it has, as Ray does not tell the driver.


def _attempt(run: bytes, task: bytes, scale: int) -> Outcome:
    """Run a task in a Ray worker. As the arguments are pickles, one that cannot be read is its error."""
    base.use_one_core()
    return base.attempt(
        lambda pair, scale: _run(pickle.loads(pair[0]), pickle.loads(pair[1]), scale), (run, task), scale
    )


def _run(run: Any, task: Any, scale: int) -> Any:
    if isinstance(run, Committing):
        import ray

        library: Any = ray
        node = library.util.get_node_ip_address()
        state = base.state_of(task) | {"node": node, "step": run.step}
        with contextlib.suppress(OSError, ForebayError):  # a full disk, which the task reports
            run.store.write(f"{_RUNNING}{node}-{os.getpid()}.json", json.dumps(state).encode())
    return run(task, scale)


def _lost(errors: Any) -> tuple[type[Exception], ...]:
    """The errors of tasks whose node is gone, or the objects that lay there."""
    return errors.NodeDiedError, errors.ObjectLostError, errors.LocalRayletDiedError, errors.RaySystemError


class RayEngine(Engine):
    """An engine over a Ray cluster, which is found, or started, when the first map begins.

    Args:
        workers: None for as many as the cluster has CPUs.
        store: Every node must see a directory under the same path: each is asked for it first.

    RAY_ADDRESS is `auto`, `host:6379` or `ray://host:10001`. Without one a cluster of this machine is started and ended
    with the engine. A Ray that the caller has initialised is used and left.
    """

    def __init__(
        self, workers: int | None, *, store: Store | None = None, on_message: Notify = lambda message: None
    ) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its new default, which it warns about
        with package_for("engine ray", ", or use the local engine."), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
        self._ray: Any = ray
        self._address = os.environ.get("RAY_ADDRESS") or None
        self._workers, self._store, self._on_message = workers, store, on_message
        self._owns_cluster = False
        self._remote: Any = None
        self._cpus = 0
        self._running_names: set[str] = set()  # Of the tasks that Ray has.

    @property
    def num_workers(self) -> int:
        return self._workers or self._cpus

    def running(self) -> list[Json]:
        return list(self._states().values())

    def _states(self) -> dict[str, Json]:
        """What workers have written of the tasks that Ray has, by the name of the task."""
        states: dict[str, Json] = {}
        if self._store is not None:
            with contextlib.suppress(OSError, ForebayError, ValueError):
                states = {
                    s["name"]: s for s in map(json.loads, read_all(self._store.child(".work"), _RUNNING).values())
                }
        return {name: state for name, state in states.items() if name in self._running_names}

    def _process(self, task: Any) -> Json:
        """Fields of a Failure of a task: where it ran."""
        state = self._states().get(name_of(task), {})
        return {name: state[name] for name in ("host", "node", "pid") if name in state}

    def close(self) -> None:
        if self._owns_cluster:
            self._ray.shutdown()
        self._owns_cluster, self._remote = False, None

    def map(self, run: base.TaskFunction, tasks: Sequence[Any], on_done: OnDone, weights: base.Weights = None) -> None:
        attempts = Attempts(tasks, weights, self._on_message, on_failure=self.on_failure)
        if not tasks:
            return
        running: dict[Any, tuple[int, int]] = {}
        try:
            self._connect()
            self._map_over_cluster(run, tasks, on_done, attempts, running)
        except BaseException as error:
            self._stop(running)
            if isinstance(error, self._ray.exceptions.RayError):
                raise PrepareError(f"engine ray: {type(error).__name__}: {error} Finished work is kept.") from error
            if not isinstance(error, Exception):
                self.close()
            raise

    def _stop(self, running: Iterable[Any]) -> None:
        references = list(running)
        with contextlib.suppress(Exception):  # the cluster may be gone; the first error is the one to report
            for reference in references:
                self._ray.cancel(reference, force=True)
            if references:
                self._ray.wait(references, num_returns=len(references), timeout=_STOP_S)

    def _map_over_cluster(
        self, run: Any, tasks: Sequence[Any], on_done: OnDone, attempts: Attempts, running: dict[Any, tuple[int, int]]
    ) -> None:
        function = base.dumps(run)
        limit, asked_at = 0, -_CPUS_S
        crashes: Counter[int] = Counter()
        while True:
            if time.monotonic() - asked_at >= _CPUS_S:
                # Twice the CPUs, so that the next task waits at each of them.
                self._cpus = max(1, cpus := int(self._ray.cluster_resources().get("CPU", 0)))
                if not cpus:
                    self._on_message("engine ray: the cluster has no CPUs. The tasks wait for a machine to join it.")
                limit, asked_at = self._workers or 2 * self._cpus, time.monotonic()
            while len(running) < limit and (pair := attempts.next(len(running))) is not None:
                task = base.dumps(tasks[pair[0]])
                running[self._remote.remote(function, task, pair[1])] = pair
            self._running_names = {name_of(tasks[index]) for index, _ in running.values()}
            if not running:
                return
            ready, _ = self._ray.wait(list(running), num_returns=1, timeout=base.TICK_S)
            self.on_tick()
            for reference in ready:
                index, scale = running.pop(reference)
                self._receive(reference, index, scale, tasks[index], attempts, crashes, on_done)

    def _receive(
        self, reference: Any, index: int, scale: int, task: Any, attempts: Attempts, crashes: Counter[int],
        on_done: OnDone,
    ) -> None:  # fmt: skip
        try:
            outcome: Outcome = self._ray.get(reference)
        except self._ray.exceptions.OutOfMemoryError:
            attempts.died(index, scale, "was ended by Ray for memory", **self._process(task))
        except self._ray.exceptions.WorkerCrashedError:
            # Of a node that is lost, the worker may be missed first.
            crashes[index] += 1
            again = attempts.lost if crashes[index] <= _CRASHES else attempts.died
            again(index, scale, "died with its worker", **self._process(task))
        except _lost(self._ray.exceptions) as error:
            attempts.lost(index, scale, f"lost its node ({type(error).__name__})", **self._process(task))
        else:
            if outcome[0] == "memory":
                attempts.died(index, scale, "ran out of memory", "memory", **self._process(task))
            else:
                on_done(index, base.result_of(outcome))

    def _connect(self) -> None:
        if self._remote is not None:
            return
        if not self._ray.is_initialized():
            self._owns_cluster = True
            self._start()
        # Ray's own retries would repeat an attempt that ran out of memory as it was.
        self._remote = self._ray.remote(max_retries=0, num_cpus=1)(_attempt)
        if self._store is not None and self._store.folder is not None:
            self._probe(self._store.folder)

    def _start(self) -> None:
        for start in range(1, _STARTS + 1):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._ray.init(**self._options())
                return
            except Exception as error:  # Ray raises a plain one when its own limits of time are over.
                reason = str(error).rstrip(".")
                if self._address is not None or start == _STARTS:
                    raise PrepareError(
                        f"engine ray: {self._address or 'a cluster of this machine'} cannot be reached or started: "
                        f"{reason}. Look at it with `ray status`. Ray and Python must be of the same versions on all "
                        "nodes; a cluster that asks for a token needs RAY_AUTH_MODE=token here, too."
                    ) from error
                self._on_message(f"engine ray: a cluster of this machine did not start: {reason}. It is started again.")
                self._ray.shutdown()

    def _options(self) -> Json:
        quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
        if self._address is None:
            local = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
            return quiet | local | {"address": "local", "num_cpus": self._workers or num_cores()}
        # The driver's own forebay goes with the job; its dependencies must be installed on the nodes.
        package = str(Path(__file__).parents[2])
        return quiet | {"address": self._address, "runtime_env": {"py_modules": [package]}}

    def _probe(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.urandom(8).hex()}"
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        exists = self._ray.remote(max_retries=0, num_cpus=0)(lambda path: Path(path).exists())
        try:
            probe.touch()
            for node in nodes:
                remote = exists.options(scheduling_strategy=affinity(node["NodeID"], soft=False))
                if not self._ray.get(remote.remote(str(probe.resolve()))):
                    raise PrepareError(
                        f"engine ray: {folder} is not shared with node {node['NodeManagerHostname']}. Put the output "
                        "(and the inputs) in a bucket, or on a file system that all nodes mount under the same path."
                    )
        finally:
            probe.unlink(missing_ok=True)
