"""Pairs of documents with an equal key: an external sort of signatures in runs, and their merge, in bounded memory.

A run is sorted by key and divided into `num_ranges` equal ranges of keys, one for each merge task. Of a range it has
columns of u64 after each other: the key (two columns for 128 bits), then the number that has it; so that a merge reads
one piece of each run. Where a key occurs often, a run keeps the first number and pairs the others with it, so that a
key costs a merge one record a run. A pair is two u64: the later number, the earlier one. The bytes are the same at any
scale: a range of keys is cut into 4^scale ranges that are sorted one by one.

From pairs to decisions: the connected components of documents, and which document of each stays.

Union-find over a memory-mapped file: each document has 8 bytes, 0 without a pair, else one more than the document above
it. The better document (greater weight, then first) is always above, so that a component's root is the one that stays,
whatever the order of the pairs. Pages leave memory every `_PAIRS` pairs: memory does not grow with the documents.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

import numpy as np

from forebay.arrays import BOOL, I64, U8, U64, Array
from forebay.prepare.compiled import jit
from forebay.prepare.documents import read_items
from forebay.storage.store import Store

_CHUNK_ROWS = 1 << 14
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""An odd factor: keys that were chosen for being small, as anchors are, lie in all ranges afterwards."""
SORT_FACTOR = 5
"""Bytes of memory that sorting takes for each byte of records: they, the permutation, a sorted copy, the pairs."""


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of a split's signature file: documents, or the rows of a unit.

    `base` is the number in the corpus of the split's row 0, and `document` that of its first document.
    """

    prefix: str
    base: int
    start: int
    stop: int
    document: int


@dataclass(frozen=True)
class Keys:
    """The keys of signature files `.ENDING`: `columns` words a row, each `key_columns` in turn a key.

    A document has a row, or as many as its u32 in `.COUNTS` says.
    """

    ending: str
    columns: int
    key_columns: int
    counts: str = ""


@dataclass(frozen=True)
class SortTask:
    """Signatures to a sorted run, `NAME.run` and `NAME.starts` (u64 [num_ranges + 1], in records), and pairs within
    it, `NAME.pairs`. A run that is not merged, of `num_ranges` 0, leaves pairs alone.

    `drop`: a byte a document of the corpus: the rows of a document whose byte is not 0 are left out.
    """

    name: str
    store: Store
    keys: Keys
    ranges: tuple[RowRange, ...]
    num_ranges: int
    drop: str


@dataclass(frozen=True)
class MergeTask:
    """Range number `index` of `num_ranges` equal ranges of keys, over `runs` runs named `STEM-N`, to `NAME.pairs`."""

    name: str
    store: Store
    key_columns: int
    stem: str
    runs: int
    index: int
    num_ranges: int


def reserve(file: BinaryIO, size: int) -> None:
    """Allocate a file of zeros on the disk: writing to a sparse map on a full disk would end the process."""
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.truncate(size)


def sort_run(task: SortTask, scale: int) -> str:
    """Run a SortTask. Returns its name."""
    width = task.keys.key_columns + 1
    with task.store.scratch() as folder, ExitStack() as stack:
        pairs = stack.enter_context(task.store.open(f"{task.name}.pairs"))
        files = [stack.enter_context((folder / str(column)).open("w+b")) for column in range(width)]
        for low, high in _ranges(0, 1 << 64, 4**scale):
            for file, values in zip(files, _group(_select(task, low, high), pairs)):
                file.write(values.data)
        if task.num_ranges:
            _write_run(task, files)
    return task.name


def _write_run(task: SortTask, files: Sequence[BinaryIO]) -> None:
    for file in files:
        file.flush()
    columns = [_mapped(file) for file in files]
    edges = np.array([low for low, _ in _ranges(0, 1 << 64, task.num_ranges)][1:], np.uint64)
    starts = np.concatenate([[0], np.searchsorted(columns[0], edges), [len(columns[0])]]).astype("<u8")
    with task.store.open(f"{task.name}.run") as run:
        for start, stop in pairwise(starts.tolist()):
            for column in columns:
                run.write(column[start:stop].data)
    task.store.write(f"{task.name}.starts", starts.tobytes())


def _mapped(file: BinaryIO) -> U64:
    size = os.fstat(file.fileno()).st_size
    return np.memmap(file, "<u8", "r") if size else np.empty(0, np.uint64)


def merge_runs(task: MergeTask, scale: int) -> str:
    """Run a MergeTask. Returns its name."""
    low, high = list(_ranges(0, 1 << 64, task.num_ranges))[task.index]
    with task.store.open(f"{task.name}.pairs") as pairs:
        for lower, upper in _ranges(low, high, 4**scale):
            parts = [_read_run(task, f"{task.stem}-{run}", lower, upper) for run in range(task.runs)]
            _group([np.concatenate(column) for column in zip(*parts)], pairs)
    return task.name


def _ranges(low: int, high: int, count: int) -> Iterator[tuple[int, int]]:
    step = -(-(high - low) // count)
    for start in range(low, high, step):
        yield start, min(start + step, high)


def _records(task: SortTask) -> Iterator[list[U64]]:
    """Columns of keys, the first spread, then of numbers; without keys of zeros and those of dropped documents."""
    keys, width = task.keys, task.keys.key_columns
    per_row = keys.columns // width
    for rows in task.ranges:
        unit_ends: U64 | None = None
        if keys.counts and task.drop:
            unit_ends = np.cumsum(task.store.read_array(f"{rows.prefix}.{keys.counts}", "<u4"), dtype=np.uint64)
        for start in range(rows.start, rows.stop, _CHUNK_ROWS):
            stop = min(start + _CHUNK_ROWS, rows.stop)
            name, size = f"{rows.prefix}.{keys.ending}", keys.columns
            words = read_items(task.store, name, "<u8", (stop - start) * size, start * size)
            present = words.reshape(-1, width).any(axis=1)
            if task.drop:
                present &= np.repeat(_is_kept(task, rows, start, stop, unit_ends), per_row)
            numbers = np.repeat(np.arange(rows.base + start, rows.base + stop, dtype=np.uint64), per_row)
            columns = [words[column::width][present] for column in range(width)]
            yield [columns[0] * _SPREAD, *columns[1:], numbers[present]]


def _is_kept(task: SortTask, rows: RowRange, start: int, stop: int, unit_ends: U64 | None) -> BOOL:
    if unit_ends is None:
        return np.asarray(task.store.read_array(task.drop, np.uint8, stop - start, rows.document + start) == 0)
    if start == stop:
        return np.empty(0, np.bool_)
    documents = np.searchsorted(unit_ends, np.arange(start, stop, dtype=np.uint64), side="right")
    first, last = int(documents[0]), int(documents[-1])
    flags = task.store.read_array(task.drop, np.uint8, last - first + 1, rows.document + first)
    return np.asarray(flags[documents - first] == 0)


def _select(task: SortTask, low: int, high: int) -> list[U64]:
    chunks: list[list[U64]] = [[np.empty(0, np.uint64)] for _ in range(task.keys.key_columns + 1)]
    for columns in _records(task):
        inside = (columns[0] >= np.uint64(low)) & (columns[0] <= np.uint64(high - 1))
        for chunk, column in zip(chunks, columns):
            chunk.append(column[inside])
    return [np.concatenate(chunk) for chunk in chunks]


def _group(columns: list[U64], pairs: BinaryIO) -> list[U64]:
    """Sort records by key; pair all numbers of a key with its first, and return the first record of each.

    The columns are ordered by number, and the sort is stable.
    """
    if not len(columns[0]):
        return columns
    order = np.lexsort(columns[-2::-1])
    columns = [column[order] for column in columns]
    del order
    new = np.zeros(len(columns[0]), np.bool_)
    new[0] = True
    for key in columns[:-1]:
        new[1:] |= key[1:] != key[:-1]
    firsts = np.flatnonzero(new)
    numbers, later = columns[-1], np.flatnonzero(~new)
    earlier = firsts[np.searchsorted(firsts, later) - 1]
    pairs.write(np.stack([numbers[later], numbers[earlier]], axis=1).data)
    return [column[firsts] for column in columns]


def _read_run(task: MergeTask, name: str, low: int, high: int) -> list[U64]:
    """The records of a run in the task's range of keys of which the key is in [low, high)."""
    width = task.key_columns + 1
    start, stop = read_items(task.store, f"{name}.starts", "<u8", 2, task.index).tolist()
    columns = read_items(task.store, f"{name}.run", "<u8", (stop - start) * width, start * width).reshape(width, -1)
    first = int(np.searchsorted(columns[0], np.uint64(low)))
    last = int(np.searchsorted(columns[0], np.uint64(high - 1), "right"))
    return list(columns[:, first:last])


RETAINED = 0  # The drop code of a document that stays; others are 1 + the index of the method that dropped it.
_PAIRS = 1 << 15
"""Pairs between two clearings of mapped pages: 2 documents each and the path above them, 4 KiB a page at worst."""
_CHUNK = 1 << 20
_FLAT_BYTES = 64 << 20  # Maps smaller than this stay in memory.


@dataclass(frozen=True)
class ComponentsTask:
    """Pairs to `NAME.drop`: a byte for each document of the corpus, KEPT or `code`.

    Args:
        splits: (prefix, documents) in corpus order.
        weighted: They have `.weight` files.
        base: An earlier task, the codes of whose `.drop` stay.
    """

    name: str
    store: Store
    pairs: tuple[str, ...]
    splits: tuple[tuple[str, int], ...]
    weighted: bool
    code: int
    num_codes: int
    base: str


@dataclass(frozen=True)
class MarkTask:
    """Pairs to `NAME`: a byte for each of `rows` rows of a unit, 1 if it stood in the corpus before.

    With `both`: 1 also for the first of several.
    """

    name: str
    store: Store
    pairs: tuple[str, ...]
    rows: int
    both: bool


@contextmanager
def _map_rows(store: Store, dtype: str, rows: int) -> Iterator[Array]:
    with store.scratch() as folder:
        with (folder / "map").open("xb") as file:
            reserve(file, max(rows, 1) * np.dtype(dtype).itemsize)
        yield np.memmap(folder / "map", dtype, "r+", shape=(max(rows, 1),))


def _release(array: Array) -> None:
    if isinstance(array, np.memmap) and array.nbytes > _FLAT_BYTES:
        array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


@jit()
def find(parent, i):  # type: ignore[no-untyped-def]
    """The root above a document; halves the path to it."""
    while True:
        above = parent[i]
        if above == 0 or above == i + 1:
            return i
        higher = parent[above - 1]
        if higher != 0:
            parent[i] = higher
            i = higher - 1
        else:
            i = above - 1


@jit()
def join(parent, weights, pairs):  # type: ignore[no-untyped-def]
    """Union the ends of pairs int64 [*, 2]; of two roots the one of greater weight, then the first, goes above."""
    for k in range(len(pairs)):
        a = find(parent, pairs[k, 0])
        b = find(parent, pairs[k, 1])
        if a == b:
            continue
        if len(weights) and weights[a] != weights[b]:
            better = a if weights[a] > weights[b] else b
        else:
            better = min(a, b)
        worse = a + b - better
        parent[worse] = better + 1
        parent[better] = better + 1


@jit()
def roots(parent, members, out):  # type: ignore[no-untyped-def]
    """The root of each of the members."""
    for k in range(len(members)):
        out[k] = find(parent, members[k])


def find_components(task: ComponentsTask, scale: int) -> list[int]:
    """Run a ComponentsTask. Returns the documents of each code."""
    rows = sum(documents for _, documents in task.splits)
    with _map_rows(task.store, "<i8", rows) as parent, _weights(task, rows) as weights:
        for pairs in _read_pairs(task.store, task.pairs, _PAIRS >> (2 * scale)):
            join(parent, weights, pairs)
            _release(parent)
            _release(weights)
        counts = np.zeros(task.num_codes + 1, np.int64)
        with task.store.open(f"{task.name}.drop") as drop:
            for start in range(0, rows, _CHUNK):
                codes = _codes(task, parent, start, min(start + _CHUNK, rows))
                counts += np.bincount(codes, minlength=len(counts))
                drop.write(codes.data)
    return [int(count) for count in counts]


@contextmanager
def _weights(task: ComponentsTask, rows: int) -> Iterator[Array]:
    if not task.weighted:
        yield np.empty(0)
        return
    with _map_rows(task.store, "<f8", rows) as weights:
        start = 0
        for prefix, documents in task.splits:
            weights[start : start + documents] = task.store.read_array(f"{prefix}.weight", "<f8", documents)
            start += documents
            _release(weights)
        yield weights


def _read_pairs(store: Store, names: Sequence[str], step: int) -> Iterator[I64]:
    for name in names:
        with store.local(f"{name}.pairs") as path, path.open("rb") as file:
            while len(words := np.fromfile(file, "<i8", 2 * step)):
                yield words.reshape(-1, 2)


def _codes(task: ComponentsTask, parent: Array, start: int, stop: int) -> U8:
    codes = np.zeros(stop - start, np.uint8)
    if task.base:
        codes = task.store.read_array(f"{task.base}.drop", np.uint8, stop - start, start)
    members = np.flatnonzero(parent[start:stop]) + start
    _release(parent)
    above = np.empty(len(members), np.int64)
    for k in range(0, len(members), _PAIRS):
        roots(parent, members[k : k + _PAIRS], above[k : k + _PAIRS])
        _release(parent)
    later = members[members != above] - start
    codes[later[codes[later] == RETAINED]] = task.code
    return codes


def mark_units(task: MarkTask, scale: int) -> int:
    """Run a MarkTask. Returns how many rows are marked."""
    with task.store.open(task.name) as file:
        reserve(file, task.rows)
        if not task.rows:
            return 0
        cut = np.memmap(file, np.uint8, "r+", shape=(task.rows,))
        for pairs in _read_pairs(task.store, task.pairs, _CHUNK >> (2 * scale)):
            cut[pairs if task.both else pairs[:, 0]] = 1
            cut.flush()
            _release(cut)
        return sum(int(cut[start : start + _CHUNK].sum()) for start in range(0, task.rows, _CHUNK))
