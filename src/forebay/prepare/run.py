"""A run of `prepare_dataset`: its settings and folders, how tasks are mapped, its progress and its result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from forebay import html
from forebay.dataset.reader import Dataset, open_dataset
from forebay.prepare.engines.base import Engine
from forebay.prepare.engines.local import cores
from forebay.prepare.inputs import find_inputs, split_files
from forebay.prepare.progress import Progress, ProgressRecord, TaskCounts
from forebay.prepare.recipe import Recipe
from forebay.prepare.sampling import Sampling
from forebay.prepare.stats import Usage, timed
from forebay.storage.listing import count_reasons

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class PrepareResult:
    """The result of `prepare_dataset`.

    Args:
        path: The output directory.
        dataset: The dataset's name.
        dropped: Documents dropped, by reason.
        documents_in, documents_out, tokens, slices: Of this run; a dataset that it extends is not counted.
        already_exists: The directory held this output before.
        skipped: Inputs that were left out or could not be read, by reason; `skipped.jsonl` names them.
    """

    path: Path
    dataset: str
    id: str
    documents_in: int
    documents_out: int
    tokens: int
    slices: int
    dropped: dict[str, int] = field(default_factory=dict)
    already_exists: bool = False
    skipped: dict[str, int] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """What was written, and why documents were dropped."""
        fields = {name: getattr(self, name) for name in ("path", "id", "documents_in", "documents_out", "tokens")}
        return html.card(self.dataset, {**fields, **{f"dropped: {k}": f"{n:,}" for k, n in self.dropped.items()}})

    def open(self) -> Dataset:
        """The dataset that was written."""
        return open_dataset(self.path)

    @cached_property
    def report(self) -> dict[str, Any]:
        """The contents of `report.html`: the funnel, distributions, samples of kept and dropped documents."""
        from forebay.prepare.report import load_report

        return load_report(self.path)

    def to_json(self) -> dict[str, Any]:
        """The output of `forebay prepare --json`: the same for the same inputs and recipe."""
        names = ("dataset", "id", "documents_in", "documents_out", "tokens", "slices", "dropped", "skipped")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class PrepareRun:
    """One call of `prepare_dataset`."""

    out: Path
    recipe: Recipe
    engine: Engine
    write_ids: Path | None
    document_ids: bool
    progress: ProgressRecord
    on_message: Callable[[str], None]
    parent: Dataset | None = None  # The dataset that is extended.
    recorded: Mapping[str, Any] = field(default_factory=dict)  # What made the scores that the input has.
    usage: Usage = field(default_factory=Usage)  # Of the tasks that ran in this call, without their stages.

    @property
    def work(self) -> Path:
        """The folder that only an unfinished run needs."""
        return self.out / ".work"

    @property
    def tasks(self) -> Path:
        """The folder of the tasks' output."""
        return self.work / "tasks"

    def count_tasks(self, stage: str, total: int, unit: str) -> Callable[[int, object], None]:
        """An `on_result` of `map` that reports each result as one more of `total`."""
        done = itertools.count(1)
        return lambda *_: self.progress.update(Progress(stage, next(done), total, unit))

    def count_documents(self, stage: str, sizes: Sequence[int]) -> Callable[[int, Any], None]:
        """An `on_result` of `map` that reports the bytes of each task, and documents read and kept so far."""
        done = documents = retained = 0

        def add(index: int, result: Any) -> None:
            nonlocal done, documents, retained
            done += sizes[index]
            documents += result.documents_in
            retained += result.documents_out
            self.progress.update(Progress(stage, done, sum(sizes), "B", documents, retained, done))

        self.progress.update(Progress(stage, 0, sum(sizes), "B"))
        return add

    def map(
        self,
        run: Callable[[T, int], R],
        tasks: Sequence[T],
        finished: Callable[[T], R | None] = lambda _: None,
        on_result: Callable[[int, R], None] = lambda *_: None,
        weights: Sequence[int] | None = None,
    ) -> list[R]:
        """The results in the order of the tasks. Finished tasks are not run, and tasks of one name run once."""
        results: list[R | None] = [finished(task) for task in tasks]
        first: dict[str, int] = {}
        self.progress.is_replay = True
        for index, task in enumerate(tasks):
            if (result := results[index]) is not None:
                on_result(index, result)
            else:
                first.setdefault(str(getattr(task, "name", index)), index)
        self.progress.is_replay = False
        todo = list(first.values())

        def done(position: int, output: tuple[R, Usage, TaskCounts | None]) -> None:
            result, usage, counts = output
            self.usage.add(usage)
            self.progress.add(usage, counts)
            results[todo[position]] = result
            on_result(todo[position], result)

        todo_weights = [weights[index] for index in todo] if weights is not None else None
        self.engine.map(partial(timed, run), [tasks[index] for index in todo], done, todo_weights)
        complete: list[R] = []
        for index, task in enumerate(tasks):
            result = results[index]
            if result is None:
                result = results[first[str(getattr(task, "name", index))]]
                assert result is not None
                on_result(index, result)
            complete.append(result)
        return complete


def plan(
    inputs: Sequence[str | Path], recipe: Recipe, *, workers: int | None = None, follow_links: bool = False
) -> dict[str, Any]:
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
        "skipped": count_reasons(sources.skipped),
        "tasks": len(splits),
        "bytes": int(sum(counts["bytes"] for counts in by_format.values()) * sources.sample),
        "workers": workers or cores(),
        "recipe": recipe.to_json(),
    }
