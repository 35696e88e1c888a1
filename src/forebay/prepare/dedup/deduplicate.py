"""Sign the documents of splits, and deduplicate the corpus: plan the tasks, map them over an engine, read the result.

A `Signer` writes, with a prefix `P`, little-endian, one row a document: `P.NAME` u64 [documents, columns] of each
method; `P.weight` f64 [documents]: the greatest stays (only if not the first copy does). Of each kind of unit
`P.ENDING` u64 [rows, 2] and `P.COUNTS` u32 [documents]; of substrings `P.anchors` u64 and `P.anchor_counts`, of
`overlap` `P.ngrams` and `P.ngram_counts`. That is 16 + 8 bands bytes a document (144 by default), 16 a line or
sentence, 0.6 a word for substrings, and 8 for `overlap`.

Methods compare documents in order: of a component only the best document goes on to the next method. Units come last,
over the documents that stay, each kind by itself; what any of them cuts goes. Substrings read `P.arrow` again, and so
does `max_cut_share`. Every task is named by a hash of the signatures and settings; `STEM.result` is written last. Disk
while it runs: 8 bytes a column of keys (256 bytes a document by default) and 8 for the components; what stays is a byte
a document, one a line or span, and 9 a word of repeated substrings.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.arrays import F64, Array
from forebay.errors import PrepareError, listed
from forebay.prepare.dedup import pairs
from forebay.prepare.dedup.cutting import Cut, Flags, ShareTask, drop_mostly_cut, hash_units
from forebay.prepare.dedup.methods import Dedup, Overlap, Signed, Substring, Unit
from forebay.prepare.dedup.pairs import ComponentsTask, MarkTask, find_components, mark_units
from forebay.prepare.dedup.word_runs import WindowsTask, sign_anchors, sign_ngrams, sign_windows
from forebay.prepare.documents import Map
from forebay.storage.store import Store

VERSION = 6  # Changed when the same signatures would give another result, so that old ones are not used.
_RUN_RECORDS = 1 << 21
"""At most this many records a run: about 1 s of work, so that small corpora use several processes too."""

Step = Callable[[str, Callable[[Any, int], Any], Sequence[Any]], list[Any]]
OnProgress = Callable[[str, int, int], None]  # (step, steps done, steps in all).


_SIGN: dict[Any, Any] = {Unit: hash_units, Overlap: sign_ngrams, Substring: sign_anchors}


class Signer:
    """Writes the signatures of a split, `prefix` and an ending. A context manager; an exception leaves no object."""

    signed: Signed  # After the block.

    def __init__(self, store: Store, prefix: str, config: Dedup) -> None:
        self._store, self._prefix, self._config = store, prefix, config
        self._documents = 0
        self._rows: Counter[str] = Counter()
        self._files: dict[str, tuple[BinaryIO, Any]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Signer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            self._stack.__exit__(kind, *error)
            return
        for ending in [*self._config.signature(), *(cut.counts for cut in self._config.cuts)]:
            self._write(ending, np.empty(0, np.uint8))  # there may have been no documents
        self._stack.close()
        hashes = [[ending, hash_.hexdigest()] for ending, (_, hash_) in sorted(self._files.items())]
        sha256 = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
        self.signed = Signed(self._prefix, self._documents, dict(self._rows), sha256)

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
        for cut in config.cuts:
            rows, counts = _SIGN[type(cut)](texts, cut)
            self._rows[cut.ending] += len(rows)
            self._write(cut.ending, rows)
            self._write(cut.counts, counts.astype("<u4"))
        if config.keep == "longest":
            self._write("weight", np.asarray(pc.binary_length(texts), np.float64))
        elif config.keep == "best":
            self._write("weight", _scores(batch, config.score))

    def _write(self, ending: str, array: Array) -> None:
        if ending not in self._files:
            file = self._stack.enter_context(self._store.open(f"{self._prefix}.{ending}"))
            self._files[ending] = file, hashlib.sha256()
        file, sha256 = self._files[ending]
        file.write(array.data)
        sha256.update(array.data)


def _scores(batch: pa.RecordBatch, name: str) -> F64:
    """The column as numbers; one that is missing or NaN is the worst."""
    column = batch.column(name) if name in batch.schema.names else None
    numeric = column is not None and (pa.types.is_floating(column.type) or pa.types.is_integer(column.type))
    if column is None or not numeric:
        raise PrepareError(
            f"dedup.score: expected a column of numbers {name!r}, got columns {listed(batch.schema)}. A stage makes "
            "it, or [read.columns] with "
            f'{name} = "number" reads it.'
        )
    scores = column.cast(pa.float64()).fill_null(-np.inf).to_numpy(zero_copy_only=False)
    return np.where(np.isnan(scores), -np.inf, scores)


@dataclass(frozen=True)
class DedupResult:
    """The result of a deduplication; numbers are of the corpus.

    Args:
        dropped: How many documents each method dropped, and after them `max_cut_share`.
        units_cut: How many lines or spans are cut, by the label of the report.
        drop: For each split a byte a document: 0 kept, else 1 + the index in `Dedup.reasons`.
        cut: For each split what is cut, by kind of unit; empty if none are compared.
        name: A hash of the signatures and settings, on which all else depends.
        signed: The signatures of all splits; those that were only compared with come first.
    """

    documents: int
    dropped: tuple[int, ...]
    units_cut: dict[str, int]
    drop: tuple[Flags, ...]
    cut: tuple[tuple[Cut, ...], ...]
    name: str
    signed: tuple[Signed, ...]


@dataclass(frozen=True)
class _Corpus:
    config: Dedup
    splits: Sequence[Signed]
    store: Store
    stem: str
    memory_bytes: int

    @property
    def documents(self) -> list[int]:
        return [split.documents for split in self.splits]

    def flags(self, name: str, counts: Sequence[int]) -> tuple[Flags, ...]:
        """The parts of an object of flags that belong to each split."""
        starts = np.cumsum([0, *counts]).tolist()
        return tuple(Flags(self.store, name, start, count) for start, count in zip(starts, counts))

    def row_counts(self, ending: str) -> list[int]:
        return [split.rows.get(ending, 0) for split in self.splits]


def deduplicate(
    splits: Sequence[Signed],
    config: Dedup,
    store: Store,
    map: Map,
    on_progress: OnProgress = lambda step, done, total: None,
    memory_bytes: int = 256 << 20,
    first: int = 0,
    keep_used: bool = False,
) -> DedupResult:
    """Find the documents, lines and spans of the corpus that are copies. Depends on signatures and their order alone.

    A call resumes another that was killed, if `map` does not run finished tasks again. `splits` are in corpus order,
    signed with the same settings, in `store`; a task may take about `memory_bytes`, and one that reads documents 20
    times the largest of them. The result is of the splits from `first` on; those before it are only compared with.
    With `keep_used`, for stores that other processes use, what only this call needs stays.
    """
    corpus = _Corpus(config, splits, store, f"dedup/{_name(splits, config)}", memory_bytes)
    try:
        result = store.read(f"{corpus.stem}.result")
    except FileNotFoundError:
        result = json.dumps(_run(corpus, map, on_progress)).encode()
        store.write(f"{corpus.stem}.result", result)
        if not keep_used:
            written = store.sizes(corpus.stem)
            store.remove(n for n in written if n.startswith(f"{corpus.stem}-") or n.endswith(".windows"))
    counts, units_cut, windows = json.loads(result)
    drop, cuts = corpus.flags(f"{corpus.stem}.drop", corpus.documents), _cuts(corpus, windows)
    for flags in drop[:first]:
        counts = (np.array(counts) - np.bincount(flags.load(), minlength=len(counts))).tolist()
    for split in cuts[:first]:
        units_cut = {label: rows - int(cut.flags.load().sum()) for (label, rows), cut in zip(units_cut.items(), split)}
    dropped = tuple(counts[1 : len(config.reasons) + 1])
    return DedupResult(sum(counts), dropped, units_cut, drop[first:], cuts[first:], corpus.stem, tuple(splits))


def _cuts(corpus: _Corpus, windows: Sequence[int]) -> tuple[tuple[Cut, ...], ...]:
    kinds, stem = [], corpus.stem
    for cut in corpus.config.cuts:
        ending, counts = cut.ending, corpus.row_counts(cut.ending)
        if isinstance(cut, Substring):
            ending, counts = "windows", list(windows)
        flags = corpus.flags(f"{stem}.cut-{ending}", counts)
        kinds.append([Cut(part, cut, f"{stem}.windows{i}") for i, part in enumerate(flags)])
    return tuple(zip(*kinds))


def _name(splits: Sequence[Signed], config: Dedup) -> str:
    """A hash of the signatures and settings, on which all else depends."""
    settings = [VERSION, config.signature(), config.keep]
    settings += [config.max_cut_share] if config.drops_cut else []
    signed = [[split.sha256, split.documents, split.rows] for split in splits]
    return hashlib.sha256(json.dumps([settings, signed]).encode()).hexdigest()[:32]


def _run(corpus: _Corpus, map: Map, on_progress: OnProgress) -> tuple[list[int], dict[str, int], list[int]]:
    """Documents by drop code, how many rows of each unit are cut, and the windows of each split."""
    config, stem = corpus.config, corpus.stem
    methods, limited = config.methods, config.drops_cut
    total = (3 * len(methods) or 1) + 3 * len(config.cuts) + 4 * config.substring + limited
    done = 0

    def step(name: str, run: Callable[[Any, int], Any], tasks: Sequence[Any]) -> list[Any]:
        nonlocal done
        on_progress(name, done, total)
        results = map(run, tasks) if tasks else []
        done += 1
        return results

    files: list[str] = []
    base, counts = "", [0]
    documents = [(split.prefix, split.documents, split.documents) for split in corpus.splits]
    for code, method in enumerate(methods or (None,), 1):
        drop = f"{base}.drop" if base else ""
        if method is not None:
            keys = pairs.Keys(method.name, method.columns, method.key_columns)
            files += _find_pairs(corpus, keys, documents, drop, step)
        is_last = code >= len(methods) and not limited
        name = stem if is_last else f"{stem}-{method.name if method is not None else 'all'}"
        splits = tuple((split.prefix, split.documents) for split in corpus.splits)
        weighted = config.keep != "first"
        task = ComponentsTask(name, corpus.store, tuple(files), splits, weighted, code, max(len(methods), 1), base)
        (counts,) = step("clusters", find_components, [task])
        base = name
    units_cut, windows = _find_units(corpus, f"{base}.drop", step)
    if limited:
        cuts = _cuts(corpus, windows)
        parts = corpus.flags(f"{base}.drop", corpus.documents)
        shares = [
            ShareTask(f"{stem}-share{i}", split.prefix, cuts[i], flags, config.max_cut_share, len(methods) + 1)
            for i, (split, flags) in enumerate(zip(corpus.splits, parts))
        ]
        counted = step("cut share", drop_mostly_cut, shares)
        corpus.store.write(f"{stem}.drop", (corpus.store.read(task.name) for task in shares))
        counts = [sum(column) for column in zip(*counted)]
    on_progress("done", total, total)
    return counts, units_cut, windows


def _find_units(corpus: _Corpus, drop: str, step: Step) -> tuple[dict[str, int], list[int]]:
    """How many rows of each unit are cut, by label, and the windows of each split."""
    config, stem = corpus.config, corpus.stem

    def mark(keys: pairs.Keys, name: str, both: bool = False, sources: Sequence[tuple[str, int, int]] = ()) -> int:
        sources = sources or [(s.prefix, s.rows.get(keys.ending, 0), s.documents) for s in corpus.splits]
        files = _find_pairs(corpus, keys, sources, drop if keys.counts else "", step)
        rows = sum(rows for _, rows, _ in sources)
        (count,) = step("cut", mark_units, [MarkTask(name, corpus.store, tuple(files), rows, both)])
        return int(count)

    units_cut: dict[str, int] = {}
    windows: list[int] = []
    for cut in config.cuts:
        columns = 2 if isinstance(cut, Unit) else 1
        keys, sources = pairs.Keys(cut.ending, columns, columns, cut.counts), list[tuple[str, int, int]]()
        if isinstance(cut, Substring):
            mark(keys, f"{stem}-anchors", both=True)
            counts = corpus.row_counts(cut.ending)
            places = zip(corpus.splits, np.cumsum([0, *counts]).tolist(), np.cumsum([0, *corpus.documents]).tolist())
            tasks = [
                WindowsTask(f"{stem}.windows{i}", corpus.store, split.prefix, f"{stem}-anchors", start, drop, first,
                            split.documents, cut.min_words)
                for i, (split, start, first) in enumerate(places)
            ]  # fmt: skip
            windows = step("windows", sign_windows, tasks)
            keys, sources = pairs.Keys("windows", 2, 2), [(t.name, n, 0) for t, n in zip(tasks, windows)]
        units_cut[cut.label] = mark(keys, f"{stem}.cut-{keys.ending}", sources=sources)
    return units_cut, windows


def _find_pairs(
    corpus: _Corpus, keys: pairs.Keys, sources: Sequence[tuple[str, int, int]], drop: str, step: Step
) -> list[str]:
    """The files of pairs of equal keys; `sources` are (prefix, rows, documents)."""
    per_row = keys.columns // keys.key_columns
    record = 8 * (keys.key_columns + 1) * pairs.SORT_FACTOR  # A key with its number.
    limit = max(min(corpus.memory_bytes // record, _RUN_RECORDS) // per_row, 1)
    stem = f"{corpus.stem}-{keys.ending}-{limit}"
    groups = list(_row_ranges(sources, limit))
    count = -(-sum(rows for _, rows, _ in sources) * per_row * record // corpus.memory_bytes)
    count = count if len(groups) > 1 else 0
    stem = f"{stem}-{count}"
    runs = [pairs.SortTask(f"{stem}-{i}", corpus.store, keys, group, count, drop) for i, group in enumerate(groups)]
    names = step(f"sort {keys.ending}", pairs.sort_run, runs)
    merges = [
        pairs.MergeTask(f"{stem}-merge{i}", corpus.store, keys.key_columns, stem, len(runs), i, count)
        for i in range(count)
    ]
    return names + step(f"merge {keys.ending}", pairs.merge_runs, merges)


def _row_ranges(sources: Sequence[tuple[str, int, int]], limit: int) -> Iterator[tuple[pairs.RowRange, ...]]:
    group: list[pairs.RowRange] = []
    size = base = document = 0
    for prefix, rows, documents in sources:
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
