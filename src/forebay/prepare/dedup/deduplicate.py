"""Sign the documents of splits, and deduplicate the corpus: plan the tasks, map them over an engine, read the result.

A `Signer` writes, with a prefix `P`, little-endian, one row a document: `P.NAME` u64 [documents, columns] of each
method; `P.weight` f64 [documents]: the greatest stays (only if not the first copy does); `P.counts` u32 [documents] and
`P.units` u64 [sum of counts, 2]: the lines that are long enough; `P.signatures`: JSON, written last. That is 16 + 8
bands bytes a document (128 by default), and 16 a line.

Methods compare documents in order: of a component only the best document goes on to the next method. Lines come last,
over the documents that stay. Every task is named by a hash of the signatures and settings, and skipped when its file
exists; `STEM.result` is written last. Disk while it runs: 8 bytes a column of keys (224 bytes a document by default)
and 8 for the components; what stays is a byte a document and one a line.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from forebay.errors import PrepareError
from forebay.files import atomic_write, open_atomic, remove_stale
from forebay.prepare.dedup import pairs
from forebay.prepare.dedup.clusters import ComponentsTask, MarkTask, find_components, mark_units
from forebay.prepare.dedup.kernels import cut_texts, hash_texts
from forebay.prepare.dedup.methods import Dedup
from forebay.prepare.documents import text_column

VERSION = 3  # Changed when the same signatures would give another result, so that old ones are not used.
_RUN_RECORDS = 1 << 21
"""At most this many records a run: about 1 s of work, so that small corpora use several processes too."""
_UNITS = pairs.Keys("units", 2, 2)

Mapper = Callable[[Callable[[Any, int], Any], Sequence[Any]], list[Any]]
"""Calls `run(task, scale)` for each task and returns the results in the order of the tasks."""
Step = Callable[[str, Callable[[Any, int], Any], Sequence[Any]], list[Any]]
OnProgress = Callable[[str, int, int], None]  # (step, steps done, steps in all).


class Signer:
    """Writes the signatures of a split, `prefix` and an ending. A context manager; an exception leaves no file."""

    def __init__(self, prefix: Path, config: Dedup) -> None:
        self._prefix, self._config = prefix, config
        self._documents = self._units = 0
        self._files: dict[str, tuple[BinaryIO, Any]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Signer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            self._stack.__exit__(kind, *error)
            return
        for ending in [*self._config.signature(), *(["counts"] if self._config.unit else [])]:
            self._write(ending, np.empty(0, np.uint8))  # there may have been no documents
        self._stack.close()
        hashes = [[ending, hash_.hexdigest()] for ending, (_, hash_) in sorted(self._files.items())]
        sha256 = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
        signed = {"documents": self._documents, "units": self._units, "sha256": sha256}
        atomic_write(Path(f"{self._prefix}.signatures"), json.dumps(signed).encode())

    def add(self, batch: pa.RecordBatch) -> None:
        """Sign the next documents."""
        config, texts = self._config, batch.column("text")
        self._documents += batch.num_rows
        for method in config.methods:
            keys = np.ascontiguousarray(method.sign(batch), "<u8")
            expected = (batch.num_rows, method.columns)
            if keys.shape != expected:
                raise PrepareError(f"dedup method {method.name}: expected keys of shape {expected}, got {keys.shape}.")
            self._write(method.name, keys)
        if config.unit:
            hashes, counts = hash_texts(texts, config.unit, config.normalise_of(config.unit), config.min_characters)
            self._units += len(hashes)
            self._write("units", hashes)
            self._write("counts", counts.astype("<u4"))
        if config.keep != "first":
            self._write("weight", np.asarray(pc.binary_length(texts), np.float64))

    def _write(self, ending: str, array: NDArray[Any]) -> None:
        if ending not in self._files:
            file = self._stack.enter_context(open_atomic(f"{self._prefix}.{ending}"))
            self._files[ending] = file, hashlib.sha256()
        file, sha256 = self._files[ending]
        file.write(array.data)
        sha256.update(array.data)


@dataclass(frozen=True)
class Flags:
    """A byte for each of `count` documents (or lines) of a split, from byte `start` of a file."""

    path: str
    start: int
    count: int

    def load(self) -> NDArray[np.uint8]:
        """uint8 [count]."""
        return pairs.read_flags(self.path, self.start, self.count)


@dataclass(frozen=True)
class DedupResult:
    """The result of a deduplication; numbers are of the corpus.

    Args:
        dropped: How many documents each method dropped.
        drop: For each split a byte a document: 0 kept, else 1 + the index of the method in `Dedup.methods`.
        cut: For each split a byte a line that is long enough, 1 to be cut; empty if none are compared.
        name: A hash of the signatures and settings, on which all else depends.
    """

    documents: int
    dropped: tuple[int, ...]
    units_cut: int
    drop: tuple[Flags, ...]
    cut: tuple[Flags, ...]
    name: str


@dataclass(frozen=True)
class _Corpus:
    config: Dedup
    prefixes: Sequence[str]
    documents: Sequence[int]
    units: Sequence[int]
    folder: str
    stem: str
    memory_bytes: int

    def path(self, ending: str) -> str:
        return f"{self.folder}/{self.stem}.{ending}"


def deduplicate(
    prefixes: Sequence[str],
    config: Dedup,
    folder: Path,
    map: Mapper,
    on_progress: OnProgress = lambda step, done, total: None,
    memory_bytes: int = 256 << 20,
) -> DedupResult:
    """Find the documents and lines of the corpus that are copies. Depends on signatures and their order alone.

    A killed call resumes when it is called again. `prefixes` are those of the splits' signatures in corpus order,
    signed with the same settings; `folder` is of one call at a time; a task may take about `memory_bytes`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    corpus = _open(prefixes, config, folder, memory_bytes)
    path = Path(corpus.path("result"))
    if not path.exists():
        remove_stale(folder)
        atomic_write(path, json.dumps(_run(corpus, map, on_progress)).encode())
        for used in folder.glob(f"{corpus.stem}-*"):
            used.unlink()
    counts, units_cut = json.loads(path.read_bytes())

    def flags(ending: str, rows: Sequence[int]) -> tuple[Flags, ...]:
        starts = np.cumsum([0, *rows]).tolist()
        return tuple(Flags(corpus.path(ending), start, count) for start, count in zip(starts, rows))

    dropped = tuple(counts[1 : len(config.methods) + 1])
    cut = flags("cut", corpus.units) if config.unit else ()
    return DedupResult(sum(counts), dropped, units_cut, flags("drop", corpus.documents), cut, corpus.stem)


def _open(prefixes: Sequence[str], config: Dedup, folder: Path, memory_bytes: int) -> _Corpus:
    documents, units, sha256s = [], [], []
    for prefix in prefixes:
        try:
            signed = json.loads(Path(f"{prefix}.signatures").read_bytes())
            documents.append(int(signed["documents"]))
            units.append(int(signed["units"]))
            sha256s.append(signed["sha256"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PrepareError(
                f"{prefix}.signatures: expected finished signatures, got {error}. Sign the documents again."
            ) from error
    settings = [VERSION, config.signature(), config.keep]
    name = hashlib.sha256(json.dumps([settings, list(zip(sha256s, documents, units))]).encode()).hexdigest()[:32]
    return _Corpus(config, prefixes, documents, units, str(folder), f"dedup-{name}", memory_bytes)


def _run(corpus: _Corpus, map: Mapper, on_progress: OnProgress) -> tuple[list[int], int]:
    """Documents by drop code, and how many lines are cut."""
    config, stem = corpus.config, corpus.stem
    methods = config.methods
    total = (3 * len(methods) or 1) + 3 * bool(config.unit)
    done = 0

    def step(name: str, run: Callable[[Any, int], Any], tasks: Sequence[Any]) -> list[Any]:
        nonlocal done
        on_progress(name, done, total)
        results = map(run, tasks) if tasks else []
        done += 1
        return results

    files: list[str] = []
    base, counts = "", [0]
    for code, method in enumerate(methods or (None,), 1):
        if method is not None:
            keys = pairs.Keys(method.name, method.columns, method.key_columns)
            files += _find_pairs(corpus, keys, f"{corpus.folder}/{base}.drop" if base else "", step)
        name = f"{stem}-{method.name}" if method is not None and code < len(methods) else stem
        splits = tuple(zip(corpus.prefixes, corpus.documents))
        weighted = config.keep != "first"
        task = ComponentsTask(name, corpus.folder, tuple(files), splits, weighted, code, max(len(methods), 1), base)
        (counts,) = step("clusters", find_components, [task])
        base = name
    units_cut = 0
    if config.unit:
        units = _find_pairs(corpus, _UNITS, corpus.path("drop"), step)
        (units_cut,) = step("cut", mark_units, [MarkTask(stem, corpus.folder, tuple(units), sum(corpus.units))])
    on_progress("done", total, total)
    return counts, units_cut


def _find_pairs(corpus: _Corpus, keys: pairs.Keys, drop: str, step: Step) -> list[str]:
    rows = corpus.units if keys is _UNITS else corpus.documents
    per_row = keys.columns // keys.key_columns
    record = keys.record_bytes * pairs.SORT_FACTOR
    limit = max(min(corpus.memory_bytes // record, _RUN_RECORDS) // per_row, 1)
    stem = f"{corpus.stem}-{keys.ending}-{limit}"
    ranges = enumerate(_row_ranges(corpus, rows, limit))
    runs = [pairs.SortTask(f"{stem}-{i}", corpus.folder, keys, group, drop) for i, group in ranges]
    names = step(f"sort {keys.ending}", pairs.sort_run, runs)
    count = -(-sum(rows) * per_row * record // corpus.memory_bytes)
    merges = [
        pairs.MergeTask(f"{stem}-{count}-{i}", corpus.folder, keys.key_columns, stem, len(runs), i, count)
        for i in range(count if len(runs) > 1 else 0)
    ]
    return names + step(f"merge {keys.ending}", pairs.merge_runs, merges)


def _row_ranges(corpus: _Corpus, rows_of: Sequence[int], limit: int) -> Iterator[tuple[pairs.RowRange, ...]]:
    group: list[pairs.RowRange] = []
    size = base = document = 0
    for prefix, rows, documents in zip(corpus.prefixes, rows_of, corpus.documents):
        start = 0
        while start < rows:
            stop = min(rows, start + limit - size)
            group.append(pairs.RowRange(prefix, base, start, stop, document))
            size += stop - start
            start = stop
            if size == limit:
                yield tuple(group)
                group, size = [], 0
        base += rows
        document += documents
    if group:
        yield tuple(group)


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
        config, marks = self._config, self._marks[self._used :]
        normalise = config.normalise_of(config.unit)
        offsets, data, used = cut_texts(texts, config.unit, normalise, config.min_characters, marks)
        self._used += used
        if self._used > len(self._marks):
            raise PrepareError(
                f"{self._flags.path}: expected the {len(self._marks)} lines that were signed, got more. "
                "The documents have changed since: run the task that signed them again."
            )
        return text_column(offsets, data)
