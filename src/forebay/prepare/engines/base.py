"""The `Engine` protocol, and what its implementations share: attempts, retries with smaller batches, errors.

A task is tried once. If its worker dies or runs out of memory, it is tried again alone, at scale 1 to `MAX_SCALE`; if
its machine is lost, as it was.
"""

import contextlib
import mmap
import os
import pickle
import signal
import time
import traceback
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from forebay.base import Json
from forebay.errors import ForebayError, PrepareError, unknown_name
from forebay.files import HOST
from forebay.plugins import load_plugin, plugins
from forebay.prepare.progress import Failure, label, name_of
from forebay.storage.store import Store

MAX_SCALE = 3  # The last scale: a task takes about 1/64 of the memory of scale 0.
MAX_LOSSES = 20  # Of machines under one task.
ENGINES = {"local": "forebay.prepare.engines.local:LocalEngine", "ray": "forebay.prepare.engines.ray:RayEngine"}

TICK_S = 1.0
Notify = Callable[[str], None]
TaskFunction = Callable[[Any, int], Any]  # (task, scale) -> result
OnDone = Callable[[int, Any], None]  # (index of the task, result)
Weights = Sequence[int] | None
Kind: TypeAlias = Literal["memory", "died", "lost"]
OnFailure = Callable[[Any, Failure], None]  # (task, the attempt that is repeated, or was the last)
Outcome = tuple[Literal["done", "error", "memory"], bytes]


class Engine(Protocol):
    """Maps functions over tasks. A context manager; its end closes it."""

    on_tick: Callable[[], None] = staticmethod(lambda: None)
    """Called about once a second while tasks run, in the thread of `map`; the run sets it."""
    on_failure: OnFailure = staticmethod(lambda task, failure: None)
    """Called for an attempt whose process died, ran out of memory or is lost; the run sets it."""

    @property
    def num_workers(self) -> int:
        """How many processes the engine has for tasks, a core each; 0 if that is not known."""
        return 0

    @abstractmethod
    def map(self, run: TaskFunction, tasks: Sequence[Any], on_done: OnDone, weights: Weights = None) -> None:
        """Call `run(task, scale)` for every task, and `on_done(index, result)` in this process, in any order.

        An error that `run` raises ends the map and is raised here with its type; `on_done` may raise, too. `run` must
        be importable by a new process and tasks must be picklable. Their `label` or `name` stands in messages.

        Args:
            weights: The heaviest tasks start first.
        """

    def running(self) -> list[Json]:
        """The processes that have a task now: `host`, `pid`, the `task` in words and its `name`, `started_at`.

        [] if that is not known.
        """
        return []

    def close(self) -> None:
        """Stop what the engine started. May be called twice."""

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_engine(engine: str | Engine, workers: int | None, store: Store, on_message: Notify) -> Engine:
    """The engine itself, or one by name: `local`, `ray`, an entry point of `forebay.engines` or `module:function`.

    It is called with `workers`, `store` (in which tasks read and write) and `on_message`.
    """
    if not isinstance(engine, str):
        return engine
    if ":" not in engine and engine not in {**ENGINES, **plugins("forebay.engines")}:
        raise unknown_name("engine", [*ENGINES, *plugins("forebay.engines")], engine)
    make = load_plugin("forebay.engines", engine, ENGINES, allow_code=True)
    opened: Engine = make(workers=workers, store=store, on_message=on_message)
    return opened


class Attempts:
    """Which task to try next, and at which scale: the policy that all engines share."""

    def __init__(
        self, tasks: Sequence[Any], weights: Weights, on_message: Notify,
        may_start: Callable[[Any], bool] = lambda task: True, on_failure: OnFailure = lambda task, failure: None,
    ) -> None:  # fmt: skip
        order = range(len(tasks)) if weights is None else sorted(range(len(tasks)), key=lambda i: -weights[i])
        self.tasks = tasks
        self._queue = deque((index, 0) for index in order)
        self._retries: deque[tuple[int, int]] = deque()
        self._alone = False
        self._losses: Counter[int] = Counter()
        self._on_message, self._may_start, self._on_failure = on_message, may_start, on_failure

    def __len__(self) -> int:
        return len(self._queue) + len(self._retries)

    @property
    def startable(self) -> int:
        """How many may be started at once, at most."""
        return 1 if self._retries else 0 if self._alone else len(self._queue)

    def next(self, running: int) -> tuple[int, int] | None:
        """The (index, scale) to start now; None if there is none, or it has to wait until nothing is running."""
        if running and (self._retries or self._alone):
            return None
        self._alone = bool(self._retries)
        if self._retries:
            return self._retries.popleft()
        while self._queue:
            index, scale = self._queue.popleft()
            if index in self._losses or self._may_start(self.tasks[index]):
                return index, scale
        return None

    def died(self, index: int, scale: int, how: str, kind: Kind = "died", **process: Any) -> None:
        """Schedule the next smaller scale of a task whose worker died. Raises PrepareError after the last one.

        `process` has fields of a Failure: which process it was, and its last output.
        """
        name = self._report_failure(index, scale, kind, how, process)
        if scale >= MAX_SCALE:
            raise PrepareError(
                f"{name} {how}, also alone and with the smallest batches. Finished work is kept: give the machine more "
                "memory, or take this input out, and run the same command again."
            )
        self._on_message(f"{name} {how}: retried alone with smaller batches (scale {scale + 1} of {MAX_SCALE})")
        self._retries.append((index, scale + 1))

    def lost(self, index: int, scale: int, how: str, **process: Any) -> None:
        """Schedule a task again whose machine went away. Raises PrepareError after `MAX_LOSSES`."""
        name = self._report_failure(index, scale, "lost", how, process)
        self._losses[index] += 1
        if self._losses[index] > MAX_LOSSES:
            raise PrepareError(
                f"{name} {how}, {MAX_LOSSES + 1} times. Finished work is kept: look at the machines, and run the same "
                "command again."
            )
        self._on_message(f"{name} {how}: it runs again (loss {self._losses[index]} of {MAX_LOSSES})")
        (self._retries if scale else self._queue).appendleft((index, scale))

    def _report_failure(self, index: int, scale: int, kind: Kind, how: str, process: Mapping[str, Any]) -> str:
        """Report an attempt that failed; return the task's name for messages."""
        task = self.tasks[index]
        attempt = 1 + scale + self._losses[index]
        self._on_failure(task, Failure(kind, label(task), how, attempt=attempt, **process))
        return f"task {index} ({label(task)})"


def state_of(task: Any, pid: int | None = None) -> Json:
    """Return what `Engine.running` says of a task that starts now, by default in this process."""
    state = {"host": HOST, "pid": pid or os.getpid(), "task": label(task), "name": name_of(task)}
    return {**state, "started_at": time.time(), "input": getattr(task, "position", ("", 0))}


def dumps(value: Any) -> bytes:
    """Return a pickle for another process; what a script or notebook cell defines is in it by value."""
    try:
        if b"__main__" not in (data := pickle.dumps(value, pickle.HIGHEST_PROTOCOL)):
            return data
    except (pickle.PicklingError, AttributeError, TypeError):  # a function inside another one
        pass
    from numba.cloudpickle import dumps as dumps_by_value

    return bytes(dumps_by_value(value))


def attempt(run: TaskFunction, task: Any, scale: int) -> Outcome:
    """Run a task where its errors cannot be raised: the kind of the outcome, and the pickled result or error."""
    try:
        return "done", pickle.dumps(run(task, scale), pickle.HIGHEST_PROTOCOL)
    except MemoryError as error:
        return "memory", pickle.dumps(str(error))
    except BaseException as error:  # noqa: BLE001 - all of them cross to the caller, who raises them
        return "error", pickled_error(error, f"In {label(task)}:\n{traceback.format_exc()}")


def result_of(outcome: Outcome) -> Any:
    """The result of an attempt; raises its error."""
    kind, data = outcome
    value = pickle.loads(data)
    if kind == "error":
        raise value
    return value


def pickled_error(error: BaseException, context: str) -> bytes:
    """An error for another process, with where it was raised; one that cannot be pickled becomes a PrepareError."""
    if not isinstance(error, ForebayError):
        error.add_note(context)
    try:
        data = pickle.dumps(error)
        if type(pickle.loads(data)) is type(error):
            return data
    except Exception:  # noqa: BLE001, S110 - a class that cannot be copied: its text crosses
        pass
    return pickle.dumps(PrepareError(f"{type(error).__name__}: {error}\n{context}"))


def exit_name(code: int) -> str:
    """`SIGSEGV`, or `exit code 3`."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"exit code {code}"


def use_one_core() -> None:
    """Keep the libraries of this process from starting threads: each other core has a process of its own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"


def resident_bytes(pid: int | Literal["self"] = "self") -> int:
    """Resident bytes of a process; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0
