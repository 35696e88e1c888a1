"""A run of `prepare_dataset`: its settings and store, how tasks are mapped, its progress and its result."""

import errno
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from forebay import html
from forebay.base import Json
from forebay.dataset.manifest import SliceInfo
from forebay.dataset.reader import Dataset, open_dataset
from forebay.errors import ForebayError, PrepareError, UsageError
from forebay.machine import num_cores
from forebay.prepare.engines.base import Engine, OnDone
from forebay.prepare.inputs import find_inputs, split_files
from forebay.prepare.progress import (
    RUN_FILE,
    Failure,
    ProgressRecord,
    name_of,
    read_failures,
    running_files,
    write_failure,
)
from forebay.prepare.recipe import Recipe
from forebay.prepare.results import Committing, TaskOutput
from forebay.prepare.sampling import Sampling
from forebay.prepare.stats import Usage
from forebay.storage.listing import count_reasons
from forebay.storage.store import BUCKET_WRITE_S, Store
from forebay.units import numbered

_POLL_S = 1.0
_UNFINISHED = "an unfinished run"
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class PrepareResult:
    """The result of `prepare_dataset`.

    Args:
        path: The output directory; the URL of one in a bucket.
        dataset: The dataset's name.
        dropped: Documents dropped, by reason.
        documents_in, documents_out, tokens, slices: Of this run; a dataset that it extends is not counted.
        already_exists: The directory held this output before.
        skipped: Inputs that were left out or could not be read, by reason; `skipped.jsonl` names them.
        failed: Of these the `inputs` that failed, wholly or in part, the `bytes` of them that are missing, and their
            `share` of the input's bytes.
    """

    path: Path | str
    dataset: str
    id: str
    documents_in: int
    documents_out: int
    tokens: int
    slices: int
    dropped: dict[str, int] = field(default_factory=dict)
    already_exists: bool = False
    skipped: dict[str, int] = field(default_factory=dict)
    failed: dict[str, float] = field(default_factory=dict)

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        """What was written, and why documents were dropped."""
        fields = {name: getattr(self, name) for name in ("path", "id", "documents_in", "documents_out", "tokens")}
        return html.card(self.dataset, {**fields, **{f"dropped: {k}": f"{n:,}" for k, n in self.dropped.items()}})

    def open(self) -> Dataset:
        """The dataset that was written to a directory."""
        return open_dataset(self.path)

    @cached_property
    def report(self) -> Json:
        """The contents of `report.html`: the funnel, distributions, samples of kept and dropped documents."""
        from forebay.prepare.report import load_report

        return load_report(self.path)

    def to_json(self) -> Json:
        """The output of `forebay prepare --json`: the same for the same inputs and recipe."""
        names = ("dataset", "id", "documents_in", "documents_out", "tokens", "slices", "dropped", "skipped", "failed")
        return {name: getattr(self, name) for name in names}


class TasksFinishedError(Exception):
    """All tasks of a run are finished; another process writes the output."""


@dataclass(frozen=True)
class PrepareRun:
    """One call of `prepare_dataset`."""

    store: Store
    recipe: Recipe
    engine: Engine
    write_ids: Path | None
    document_ids: bool
    progress: ProgressRecord
    on_message: Callable[[str], None]
    parent: Dataset | None  # The dataset that is extended.
    recorded: Mapping[str, Any]  # What made the scores that the input has.
    is_shared: bool  # Other processes may run the same tasks, in the same store, at the same time.
    is_member: bool  # Another call writes the output when all tasks are finished.
    usage: Usage = field(default_factory=Usage)  # Of the tasks that ran in this call, without their stages.

    @cached_property
    def work(self) -> Store:
        """What only an unfinished run needs."""
        return self.store.child(".work")

    @property
    def path(self) -> Path | str:
        """The output, as results name it."""
        return self.store.folder or self.store.url

    def count_tasks(self, stage: str, total: int, unit: str) -> Callable[[int, object], None]:
        """An `on_result` of `map` that reports each result as one more of `total`."""
        self.progress.begin(stage, {"": total}, unit, total)
        return lambda *_: self.progress.advance(1)

    def count_documents(
        self, stage: str, sizes: Sequence[int], kinds: Sequence[str] | None = None
    ) -> Callable[[int, Any], None]:
        """An `on_result` of `map` that reports the bytes of each task, and documents read and kept.

        A byte of one kind of task may take longer than a byte of another.
        """
        kinds, remaining = kinds or [""] * len(sizes), Counter[str]()
        for kind, size in zip(kinds, sizes):
            remaining[kind] += size
        self.progress.begin(stage, remaining, "B", len(sizes))

        def add(index: int, result: Any) -> None:
            counts = result.documents_in, result.documents_out, getattr(result, "bytes_out", 0)
            self.progress.advance(sizes[index], kinds[index], *counts)

        return add

    def end_of_tasks(self) -> None:
        """Called by outputs after their last task, before they write what completes them."""
        if self.is_member:
            raise TasksFinishedError

    def has_slice(self) -> Callable[[SliceInfo], bool]:
        """Whether the file of a slice that an earlier run wrote is still there."""
        sizes = self.store.sizes("slices/")
        return lambda info: sizes.get(info.name) == info.bytes

    def map(
        self,
        run: Callable[[T, int], R],
        tasks: Sequence[T],
        on_result: Callable[[int, R], None] = lambda *_: None,
        weights: Sequence[int] | None = None,
        is_valid: Callable[[R], bool] = lambda _: True,
    ) -> list[R]:
        """The results in the order of the tasks. Finished tasks are not run, and tasks of one name run once.

        A task's `name` is a hash of all that its result depends on. Results whose `is_valid` is false are made again.
        """
        committing = Committing(self.work, run)
        names = [name_of(task) for task in tasks]
        finished = {name: result for name, result in committing.load_all(names).items() if is_valid(result)}
        if (unfinished := self.progress.unfinished) and (finished or unfinished != _UNFINISHED):
            self.on_message(
                f"{self.store.url} has {unfinished}; what is the same is kept: {len(finished):,} of "
                f"{numbered(len(set(names)), 'task')} that read text"
            )
        self.progress.unfinished, self.progress.result_of = "", "earlier"
        for index, name in enumerate(names):
            if name in finished:
                on_result(index, finished[name])
        todo: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            if name not in finished:
                todo.setdefault(name, []).append(index)
        firsts = [indices[0] for indices in todo.values()]

        def done(position: int, output: TaskOutput) -> None:
            self.usage.add(output.usage)
            self.progress.add(output.usage, output.counts, output.seconds)
            self.progress.result_of = "task" if output.seconds is not None else "other"
            name = names[firsts[position]]
            finished[name] = output.result
            for index in todo[name]:
                on_result(index, output.result)

        todo_weights = [weights[index] for index in firsts] if weights is not None else None
        self._map_tasks(committing, [tasks[index] for index in firsts], done, todo_weights)
        if firsts:
            committing.save_all(names, finished)
        return [finished[name] for name in names]

    def _map_tasks(
        self, committing: Committing[Any], tasks: Sequence[Any], done: OnDone, weights: Sequence[int] | None
    ) -> None:
        """Map over the engine, with what the record wants to know; an error of a task names the command for its log."""

        def add_failure(task: Any, failure: Failure) -> None:
            self.progress.add_failure(failure)
            if failure.kind != "memory":  # whose process has written it
                write_failure(self.work, committing.step, name_of(task), task, failure)

        self.engine.on_failure = add_failure
        self.progress.step = committing.step
        try:
            self.engine.map(committing, tasks, done, weights)
        except Exception as error:
            failures = read_failures(self.work)
            for failure in (Failure(**entry) for entry in failures if entry["kind"] == "error"):
                self.progress.add_failure(failure)
            if failures:
                advice = f"`forebay report {self.store.url}` prints the log of the task."
                if isinstance(error, ForebayError):
                    error.args = (f"{error} {advice}",)
                else:
                    error.add_note(advice)
            raise
        finally:
            self.progress.result_of, self.progress.task_s = "task", 0.0


def plan(
    inputs: Sequence[str | Path], recipe: Recipe, *, workers: int | None = None, follow_links: bool = False
) -> Json:
    """What `prepare_dataset` would do: files and bytes by format, reasons why others are left out, tasks, the recipe.

    Reads the first bytes of each file.
    """
    sources = find_inputs(inputs or recipe.inputs, recipe.read, follow_links=follow_links, sample=recipe.sample)
    splits = Sampling.of(split_files(sources.files, recipe.read), sources.sample, sources.scale).splits
    by_format: dict[str, dict[str, int]] = {}
    for source in sources.files:
        counts = by_format.setdefault(source.format, {"files": 0, "bytes": 0})
        counts["files"] += 1
        counts["bytes"] += source.bytes
    return {
        "inputs": by_format,
        "skipped": count_reasons((*sources.skipped, *sources.textless)),
        "tasks": len(splits),
        "bytes": int(sum(counts["bytes"] for counts in by_format.values()) * sources.sample),
        "workers": workers or num_cores(),
        "recipe": recipe.to_json(),
    }


def reserve(store: Store, key: str, on_message: Callable[[str], None], *, exclusive: bool) -> str:
    """Take an output for runs of a key, and return what is there: "" is nothing.

    Raises UsageError if a run of another key is alive there.

    `exclusive`: The caller has a lock that no other run has.
    """
    data = json.dumps({"key": key}).encode()
    if store.create(RUN_FILE, data):
        return ""
    if store.read(RUN_FILE) == data:
        return _UNFINISHED
    unfinished = f"{_UNFINISHED} of other inputs or settings"
    if not exclusive:
        on_message(f"{store.url} has {unfinished}: waiting {3 * BUCKET_WRITE_S:.0f} s to see whether it is alive")
        first, deadline = _records(store), time.monotonic() + 3 * BUCKET_WRITE_S
        while first and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            if _records(store) != first:
                raise UsageError(
                    f"prepare: another prepare, of other inputs or settings, writes to {store.url}. Wait for it, or "
                    "choose another."
                )
    store.write(RUN_FILE, data)
    return unfinished


def _records(store: Store) -> dict[str, bytes]:
    """The records of processes that may be alive; none of those that say that they ended."""
    with suppress(ValueError):
        return {name: r for name, r in running_files(store).items() if json.loads(r).get("state") == "running"}
    return {}


@contextmanager
def disk_errors(store: Store) -> Iterator[None]:
    """Raise PrepareError in place of an OSError."""
    try:
        yield
    except OSError as error:
        path = str(error.filename or "")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            if path and not path.startswith(store.url):
                raise PrepareError(
                    f"{path}: no space left on the device. Finished work is kept: make room there (compiled kernels "
                    "are below the home directory, files of tasks below TMPDIR), then run the same command again."
                ) from error
            raise PrepareError(
                f"{store.url}: no space left on the device. Finished work is kept. Make room for the kept text and "
                "three times its tokens (if the output is in a bucket: in TMPDIR), then run the same command again."
            ) from error
        raise PrepareError(
            f"{error.filename or store.url}: cannot write the dataset: {error.strerror or error}."
            f"{' Raise the limit (ulimit -f); finished work is kept.' * (error.errno == errno.EFBIG)}"
        ) from error
