"""Deduplicate a corpus of signed splits: plan the tasks, map them over an engine, and read the result.

Methods compare documents in order: of a component only the best document goes on to the next method, and the pairs of
all make the clusters. Lines come last, over the documents that stay. Every task is named by a hash of
the signatures and settings, and skipped when its file exists; `STEM.result` is written last.

Disk while it runs: 8 bytes a column of keys (224 bytes a document by default) and 8 for the components; what stays is
a byte a document, one a line, and the clusters.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.errors import PrepareError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.prepare.dedup.clusters import ComponentsTask, MarkTask, find_components, mark_units
from forebay.prepare.dedup.kernels import cut_texts
from forebay.prepare.dedup.methods import Dedup
from forebay.prepare.dedup.pairs import (
    SORT_FACTOR,
    Keys,
    MergeTask,
    RowRange,
    SortTask,
    merge_runs,
    read_flags,
    sort_run,
)
from forebay.prepare.dedup.signer import Signed, read_signed
from forebay.prepare.documents import text_column

VERSION = 2
"""Changed when the same signatures would give another result, so that old ones are not used."""
_RUN_RECORDS = 1 << 21
"""At most this many records a run: about 1 s of work, so that small corpora use several processes too."""
_UNITS = Keys("units", 2, 2)

Mapper = Callable[[Callable[[Any, int], Any], Sequence[Any]], list[Any]]
"""Calls `run(task, scale)` for each task and returns the results in the order of the tasks."""
Step = Callable[[str, Callable[[Any, int], Any], Sequence[Any]], list[str]]
OnProgress = Callable[[str, int, int], None]
"""(step, steps done, steps in all)."""


@dataclass(frozen=True)
class SignedSplit:
    """The signatures of one split of the corpus, by prefix, and how many documents it has."""

    prefix: str
    documents: int


@dataclass(frozen=True)
class Flags:
    """A byte for each of `count` documents (or lines) of a split, from byte `start` of a file."""

    path: str
    start: int
    count: int

    def load(self) -> NDArray[np.uint8]:
        """uint8 [count]."""
        return read_flags(self.path, self.start, self.count)


@dataclass(frozen=True)
class DedupResult:
    """The result of a deduplication; numbers are of the corpus.

    Args:
        dropped: How many documents each method dropped.
        drop: For each split a byte a document: 0 kept, else 1 + the index of the method in `Dedup.methods`.
        cut: For each split a byte a line that is long enough, 1 to be cut; empty if none are compared.
        clusters: Parquet: cluster (number of the kept document), part, document, kept, near.
        sizes: How many clusters there are of each size: [[2, 120], [3, 41]].
    """

    documents: int
    dropped: tuple[int, ...]
    units: int
    units_cut: int
    clusters: str
    drop: tuple[Flags, ...]
    cut: tuple[Flags, ...]
    sizes: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class _Corpus:
    config: Dedup
    splits: tuple[SignedSplit, ...]
    signed: tuple[Signed, ...]
    folder: str
    stem: str
    memory_bytes: int

    def rows(self, ending: str = "") -> list[int]:
        return [s.units if ending in ("units", "cut") else s.documents for s in self.signed]

    def path(self, ending: str) -> str:
        return f"{self.folder}/{self.stem}.{ending}"


def deduplicate(
    splits: Sequence[SignedSplit],
    config: Dedup,
    folder: Path,
    map: Mapper,
    on_progress: OnProgress | None = None,
    memory_bytes: int = 256 << 20,
) -> DedupResult:
    """Find the documents and lines of the corpus that are copies. Depends on signatures and their order alone.

    A killed call resumes when it is called again. `splits` are in corpus order, signed with the same settings;
    `folder` is of one call at a time; a task may take about `memory_bytes`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    corpus = _open(splits, config, folder, memory_bytes)
    result = Path(corpus.path("result"))
    if result.exists():
        return _load(corpus, json.loads(result.read_bytes()))
    remove_stale(folder)
    numbers = _run(corpus, map, on_progress or (lambda step, done, total: None))
    atomic_write(result, json.dumps(numbers).encode())
    for used in folder.glob(f"{corpus.stem}-*"):
        used.unlink()
    return _load(corpus, numbers)


def _open(splits: Sequence[SignedSplit], config: Dedup, folder: Path, memory_bytes: int) -> _Corpus:
    signed = [read_signed(split.prefix, config) for split in splits]
    for split, description in zip(splits, signed):
        if split.documents != description.documents:
            raise UsageError(
                f"{split.prefix}: expected {description.documents} documents as signed, got {split.documents}"
            )
    settings = [VERSION, config.signature(), config.keep]
    contents = [[s.sha256, s.documents, s.units] for s in signed]
    stem = "dedup-" + hashlib.sha256(json.dumps([settings, contents]).encode()).hexdigest()[:32]
    return _Corpus(config, tuple(splits), tuple(signed), str(folder), stem, memory_bytes)


def _run(corpus: _Corpus, map: Mapper, on_progress: OnProgress) -> dict[str, Any]:
    methods, stem = corpus.config.methods, corpus.stem
    total = 3 * max(len(methods), 1) - 2 * (not methods) + 3 * bool(corpus.config.unit)
    done = 0

    def step(name: str, run: Callable[[Any, int], Any], tasks: Sequence[Any]) -> list[str]:
        nonlocal done
        on_progress(name, done, total)
        names: list[str] = map(run, tasks) if tasks else []
        done += 1
        return names

    near = tuple(code for code, method in enumerate(methods, 1) if method.near)
    pairs: list[str] = []
    base = ""
    for code, method in enumerate(methods or (None,), 1):
        if method is not None:
            keys = Keys(method.name, method.columns, method.key_columns)
            pairs += _find_pairs(corpus, keys, f"{corpus.folder}/{base}.drop" if base else "", step)
        is_last = code >= len(methods)
        task = ComponentsTask(
            name=stem if is_last or method is None else f"{stem}-{method.name}",
            folder=corpus.folder,
            pairs=tuple(pairs),
            splits=tuple((split.prefix, split.documents) for split in corpus.splits),
            weighted=corpus.config.keep != "first",
            code=code,
            num_codes=max(len(methods), 1),
            base=base,
            near=near,
            clusters=is_last,
        )
        (base,) = step("clusters", find_components, [task])
    sizes = json.loads(Path(corpus.path("json")).read_bytes())["sizes"]
    numbers: dict[str, Any] = {"sizes": sizes, "counts": _count(corpus, "drop"), "units_cut": 0}
    if corpus.config.unit:
        units = _find_pairs(corpus, _UNITS, corpus.path("drop"), step)
        step("cut", mark_units, [MarkTask(stem, corpus.folder, tuple(units), sum(corpus.rows("units")))])
        numbers["units_cut"] = _count(corpus, "cut")[1]
    on_progress("done", total, total)
    return numbers


def _find_pairs(corpus: _Corpus, keys: Keys, drop: str, step: Step) -> list[str]:
    per_row = keys.columns // keys.key_columns
    record = keys.record_bytes * SORT_FACTOR
    limit = max(min(corpus.memory_bytes // record, _RUN_RECORDS) // per_row, 1)
    stem = f"{corpus.stem}-{keys.ending}-{limit}"
    runs = [
        SortTask(f"{stem}-{i}", corpus.folder, keys, ranges, drop)
        for i, ranges in enumerate(_row_ranges(corpus, keys.ending, limit))
    ]
    names = step(f"sort {keys.ending}", sort_run, runs)
    count = -(-sum(corpus.rows(keys.ending)) * per_row * record // corpus.memory_bytes)
    merges = [
        MergeTask(f"{stem}-{count}-{i}", corpus.folder, keys.key_columns, stem, len(runs), i, count)
        for i in range(count if len(runs) > 1 else 0)
    ]
    return names + step(f"merge {keys.ending}", merge_runs, merges)


def _row_ranges(corpus: _Corpus, ending: str, limit: int) -> Iterator[tuple[RowRange, ...]]:
    group: list[RowRange] = []
    size = base = document = 0
    for split, rows in zip(corpus.splits, corpus.rows(ending)):
        start = 0
        while start < rows:
            stop = min(rows, start + limit - size)
            group.append(RowRange(split.prefix, base, start, stop, document))
            size += stop - start
            start = stop
            if size == limit:
                yield tuple(group)
                group, size = [], 0
        base += rows
        document += split.documents
    if group:
        yield tuple(group)


def _count(corpus: _Corpus, ending: str) -> list[int]:
    rows = corpus.rows(ending)
    counts = np.zeros(max(len(corpus.config.methods), 1) + 1, np.int64)
    start, stop = 0, sum(rows)
    while start < stop:
        flags = read_flags(corpus.path(ending), start, min(1 << 20, stop - start))
        counts += np.bincount(flags, minlength=len(counts))
        start += len(flags)
    return [int(n) for n in counts]


def _load(corpus: _Corpus, numbers: dict[str, Any]) -> DedupResult:
    def flags(ending: str) -> tuple[Flags, ...]:
        rows = corpus.rows(ending)
        starts = np.cumsum([0, *rows]).tolist()
        return tuple(Flags(corpus.path(ending), starts[i], rows[i]) for i in range(len(rows)))

    return DedupResult(
        documents=sum(numbers["counts"]),
        dropped=tuple(numbers["counts"][1 : len(corpus.config.methods) + 1]),
        units=sum(corpus.rows("units")),
        units_cut=numbers["units_cut"],
        clusters=corpus.path("parquet"),
        drop=flags("drop"),
        cut=flags("cut") if corpus.config.unit else (),
        sizes=numbers["sizes"],
    )


class Cutter:
    """Cuts marked lines out of a split's texts, given in the order in which they were signed. Picklable.

    `flags` is `DedupResult.cut` of the split. Documents that are dropped are given too: drop them after this.
    """

    def __init__(self, flags: Flags, config: Dedup) -> None:
        self._flags, self._config = flags, config
        self._marks = np.empty(0, np.uint8)
        self._used = 0

    def cut(self, texts: pa.LargeStringArray, first_row: int) -> pa.LargeStringArray:
        """The texts of the split's rows from `first_row` without what is marked; one that is empty then is ""."""
        if first_row == 0:
            self._marks, self._used = self._flags.load(), 0
        unit = self._config.unit
        offsets, data, used = cut_texts(
            texts, unit, self._config.normalise_of(unit), self._config.min_characters, self._marks[self._used :]
        )
        self._used += used
        if self._used > len(self._marks):
            raise PrepareError(
                f"{self._flags.path}: expected the {len(self._marks)} lines that were signed, got more. "
                "The documents have changed since: run the task that signed them again."
            )
        return text_column(offsets, data)
