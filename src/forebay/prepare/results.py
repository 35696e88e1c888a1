"""The results of tasks in a store: a JSON object each, by the function and the name of the task.

A result is committed by the worker that ran the task, after all that the task wrote, by one put that fails where there
is a result: of several machines that run a task, one result stands. What is finished is one listing, late or not: a
task that runs again has the same result. All results of a map are also in one object, which its driver writes last.
"""

import hashlib
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import unwrap
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from forebay.errors import PrepareError
from forebay.prepare.progress import failure_of, label, name_of, write_failure
from forebay.prepare.stats import Usage, timed
from forebay.storage.store import Store

_MIN_TASKS = 16  # Of maps whose results are in one object, too.
R = TypeVar("R")


class TaskOutput(NamedTuple):
    """The result of a task and, if it ran for this call, what it used, its counts for the record, and its time."""

    result: Any
    usage: Usage = Usage()
    counts: Any = None
    seconds: float | None = None


@dataclass(frozen=True)
class Committing(Generic[R]):
    """A function of tasks, for an engine, that commits what it returns and also returns what it used.

    A result that was committed before, by another machine, is returned in its place. The function's annotation says
    what the results are.
    """

    store: Store
    run: Callable[[Any, int], R]

    @property
    def folder(self) -> str:
        """Of the results in the store."""
        return f"done/{self.step}"

    @property
    def step(self) -> str:
        """The function's name: its tasks are of one kind."""
        return str(unwrap(self.run).__name__).lstrip("_")

    def load(self, names: Collection[str]) -> dict[str, R]:
        """The results that are there, by name."""
        listed = self.store.sizes(f"{self.folder}/") if names else {}
        present = [name for name in names if f"{self.folder}/{name}.json" in listed]
        return dict(zip(present, self.store.each(self.result, present)))

    def result(self, name: str) -> R:
        """The result of a task."""
        path = f"{self.folder}/{name}.json"
        try:
            result: R = _adapters(self.run)[0].validate_json(self.store.read(path))
        except ValidationError as error:
            raise PrepareError(
                f"{self.store.url}/{path}: expected the result of an earlier run, got something else. Remove .work and "
                "run again."
            ) from error
        return result

    def __call__(self, task: Any, scale: int) -> TaskOutput:
        started = perf_counter()
        name = name_of(task)
        try:
            result, usage, counts = timed(self.run, task, scale)
            if not self.store.create(f"{self.folder}/{name}.json", _adapters(self.run)[0].dump_json(result)):
                result = self.result(name)
        except Exception as error:
            write_failure(self.store, self.step, name, task, failure_of(error, label(task)))
            raise
        return TaskOutput(result, usage, counts, perf_counter() - started)

    def load_all(self, names: Sequence[str]) -> dict[str, R]:
        """The results of earlier runs of these tasks, by name."""
        if len(names) >= _MIN_TASKS:
            try:
                packed = zlib.decompress(self.store.read(self._all(names)))
                return dict(zip(names, _adapters(self.run)[1].validate_json(packed), strict=True))
            except (FileNotFoundError, zlib.error, ValueError):
                pass
        return self.load(dict.fromkeys(names))

    def save_all(self, names: Sequence[str], results: Mapping[str, R]) -> None:
        """Write the results of all tasks of a map."""
        if len(names) >= _MIN_TASKS:
            data = _adapters(self.run)[1].dump_json([results[name] for name in names])
            self.store.write(self._all(names), zlib.compress(data, 1))

    def _all(self, names: Sequence[str]) -> str:
        return f"{self.folder}-all/{hashlib.sha256(repr(list(names)).encode()).hexdigest()[:32]}"


@cache
def _adapters(run: Callable[[Any, int], Any]) -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """What reads and writes a result of a function, and a list of them."""
    function = unwrap(run)
    annotation = function.__annotations__["return"]
    kind: Any = eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation
    return TypeAdapter(kind), TypeAdapter(list[kind])
