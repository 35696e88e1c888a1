"""The Ray engine: the same tasks over a cluster, or over a small one started here. The only importer of ray.

Hides: Ray. What a task, a retry and an error are is `engines.py`'s, so that both engines do the same with a failure;
Ray's own retries are off. A task travels by its pickle, its result as a short one: the data lies in files, on a file
system that all nodes share. A local cluster takes 2 to 10 s to start; on one machine `local_engine` is the quicker.
"""

import contextlib
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from forebay.errors import PrepareError, UsageError, install_command
from forebay.prepare.engines.local.local import Attempts, Engine, Trouble
from forebay.prepare.engines.local.sandbox import Outcome, attempt, result_of, use_one_core

_OBJECT_STORE_BYTES = 80 << 20
"""Of a local cluster; Ray's least is 75 MiB, and results are far smaller."""
_NODE_LOSSES = 3
"""How often a task is given to another node because its own went away, which says nothing of the task."""
_SEEN_S = 30.0
"""How long a file may take to be seen by another node: NFS keeps its attributes for up to 60 s, new names for less."""
_STOP_S = 10.0
_CPUS_S = 5.0
"""How often the cluster is asked for its size: nodes come and go."""


def ray_engine(
    address: str | None = None,
    workers: int | None = None,
    *,
    shared: Path | None = None,
    on_trouble: Trouble | None = None,
) -> Engine:
    """Tasks over a Ray cluster, which is found, or started, when the first map begins.

    Args:
        address: `auto`, `host:6379` or `ray://host:10001`; None starts a cluster of this machine alone, ended with
            the engine. A Ray that the caller has initialised is used as it is, and left running.
        workers: None for as many as the cluster has CPUs.
        shared: A folder that every node must see under the same path: each is asked to read and write in it first.
            Not needed on this machine alone.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"workers: expected at least 1, got {workers}.")
    return _RayEngine(_import_ray(), address, workers, shared, on_trouble)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its new default, which it warns about
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
    except ImportError as error:
        raise UsageError(
            f"engine ray: Ray is not installed. Install it ({install_command('ray')}), or use the local engine."
        ) from error
    return ray


def _attempt(run: bytes, task: bytes, scale: int) -> Outcome:
    """What a Ray worker runs; pickles go in so that one that cannot be read here is an error like any other."""
    use_one_core()
    return attempt(_unpickled_run, (run, task), scale)


def _unpickled_run(pair: tuple[bytes, bytes], scale: int) -> Any:
    return pickle.loads(pair[0])(pickle.loads(pair[1]), scale)


def _answer_probe(folder: str, name: str, token: str) -> str:
    """Read the file that the driver wrote, and write one for it to read; what is wrong, or nothing."""
    until = time.monotonic() + _SEEN_S
    while True:
        try:
            if (Path(folder) / name).read_text() == token:
                (Path(folder) / f"{name}.{token}").write_text(token)
                return ""
            trouble = "another file lies there"
        except OSError as error:
            trouble = str(error)
        if time.monotonic() > until:
            return trouble
        time.sleep(0.5)


class _RayEngine(Engine):
    def __init__(
        self, ray: Any, address: str | None, workers: int | None, shared: Path | None, on_trouble: Trouble | None
    ) -> None:
        super().__init__(on_trouble)
        self._ray = ray
        self._address = address
        self._workers = workers
        self._shared = shared
        self._ours = False
        self._remote: Any = None

    def close(self) -> None:
        if self._ours:
            self._ray.shutdown()
        self._ours, self._remote = False, None

    def _map(self, run: Any, tasks: Sequence[Any], on_done: Callable[[int, Any], None], attempts: Attempts) -> None:
        if not tasks:
            return
        running: dict[Any, tuple[int, int]] = {}
        try:
            self._begin()
            self._map_over(run, tasks, on_done, attempts, running)
        except BaseException as error:
            self._stop(running)
            if isinstance(error, self._ray.exceptions.RayError):
                raise PrepareError(f"engine ray: {type(error).__name__}: {error} Finished work is kept.") from error
            if not isinstance(error, Exception):
                self.close()
            raise

    def _stop(self, running: Iterable[Any]) -> None:
        """End the attempts under way, and wait for their end."""
        references = list(running)
        with contextlib.suppress(Exception):  # the cluster may be gone; the first error is the one to tell
            for reference in references:
                self._ray.cancel(reference, force=True)
            if references:
                self._ray.wait(references, num_returns=len(references), timeout=_STOP_S)

    def _map_over(
        self,
        run: Any,
        tasks: Sequence[Any],
        on_done: Callable[[int, Any], None],
        attempts: Attempts,
        running: dict[Any, tuple[int, int]],
    ) -> None:
        function = pickle.dumps(run, pickle.HIGHEST_PROTOCOL)
        losses: dict[int, int] = {}
        limit, asked_at = 0, -_CPUS_S
        while True:
            if time.monotonic() - asked_at >= _CPUS_S:
                # A task waits at each CPU, so that none has to wait for us.
                cpus = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
                limit, asked_at = self._workers or 2 * cpus, time.monotonic()
            while len(running) < limit and (pair := attempts.next(len(running))) is not None:
                task = pickle.dumps(tasks[pair[0]], pickle.HIGHEST_PROTOCOL)
                running[self._remote.remote(function, task, pair[1])] = pair
            if not running:
                return
            ready, _ = self._ray.wait(list(running), num_returns=1)
            for reference in ready:
                index, scale = running.pop(reference)
                outcome, how, lost = self._outcome(reference)
                if outcome is not None:
                    on_done(index, result_of(outcome))
                elif lost and losses.get(index, 0) < _NODE_LOSSES:
                    losses[index] = losses.get(index, 0) + 1
                    self._on_trouble(f"task {index} {how}: given to another")
                    attempts.repeat(index, scale)
                else:
                    attempts.died(index, scale, how)

    def _outcome(self, reference: Any) -> tuple[Outcome | None, str, bool]:
        """What an attempt sent; or how it died, and whether its node did."""
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(reference)
        except errors.OutOfMemoryError:
            return None, "was ended by Ray for memory", False
        except errors.WorkerCrashedError:
            return None, "died with its worker (out of memory?)", False
        except (errors.NodeDiedError, errors.ObjectLostError, errors.LocalRayletDiedError) as error:
            return None, f"lost its node ({type(error).__name__})", True
        return (None, "ran out of memory", False) if outcome[0] == "memory" else (outcome, "", False)

    def _begin(self) -> None:
        """Find or start the cluster, once."""
        if self._remote is not None:
            return
        if not self._ray.is_initialized():
            self._ours = True
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._ray.init(**self._options())
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                where = self._address or "a cluster of this machine"
                raise PrepareError(
                    f"engine ray: {where} cannot be reached or started: {str(error).rstrip('.')}. Look at it with "
                    "`ray status`. Ray and Python must be of the same versions on all nodes; a cluster that asks for "
                    "a token needs RAY_AUTH_MODE=token here, too."
                ) from error
        # Ray's own retries would repeat an attempt that ran out of memory as it was.
        self._remote = self._ray.remote(max_retries=0, num_cpus=1)(_attempt)
        if self._shared is not None:
            self._probe(self._shared)

    def _options(self) -> dict[str, Any]:
        quiet = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
        if self._address is None:
            local = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
            return quiet | local | {"address": "local", "num_cpus": self._workers or os.cpu_count() or 1}
        # The driver's own forebay goes with the job; what it depends on must be installed on the nodes.
        package = str(Path(__file__).parents[1])
        return quiet | {"address": self._address, "runtime_env": {"py_modules": [package]}}

    def _probe(self, folder: Path) -> None:
        """Check that every node that takes tasks reads and writes the same folder as we do."""
        token = os.urandom(8).hex()
        name = f".probe-{token}"
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / name
        reply = folder / f"{name}.{token}"
        affinity = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        asked = self._ray.remote(max_retries=0, num_cpus=0)(_answer_probe)
        try:
            probe.write_text(token)
            for node in nodes:
                remote = asked.options(scheduling_strategy=affinity(node["NodeID"], soft=False))
                trouble = self._ray.get(remote.remote(str(folder.resolve()), name, token))
                if not trouble and not _seen(reply):
                    trouble = "what it writes there is not seen here"
                if trouble:
                    raise PrepareError(
                        f"engine ray: {folder} is not shared with node {node['NodeManagerHostname']}: {trouble}. "
                        "Put the output (and the inputs) on a file system that all nodes mount under the same path."
                    )
                reply.unlink(missing_ok=True)
        finally:
            probe.unlink(missing_ok=True)
            reply.unlink(missing_ok=True)


def _seen(path: Path) -> bool:
    until = time.monotonic() + _SEEN_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True
