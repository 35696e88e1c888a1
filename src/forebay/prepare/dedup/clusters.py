"""From pairs to decisions: the connected components of documents, and which document of each stays.

Union-find over a memory-mapped file: each document has 8 bytes, 0 without a pair, else one more than the document above
it. The better document (greater weight, then first) is always above, so that a component's root is the one that stays,
whatever the order of the pairs. Pages leave memory every `_PAIRS` pairs: memory does not grow with the documents.
"""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from forebay.arrays import I64, U8, Array
from forebay.prepare.compiled import jit
from forebay.prepare.dedup.pairs import reserve
from forebay.storage.store import Store

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
    base: str = ""


@dataclass(frozen=True)
class MarkTask:
    """Pairs to `NAME`: a byte for each of `rows` rows of a unit, 1 if it stood in the corpus before.

    With `both`: 1 also for the first of several.
    """

    name: str
    store: Store
    pairs: tuple[str, ...]
    rows: int
    both: bool = False


@contextmanager
def _mapped(store: Store, dtype: str, rows: int) -> Iterator[Array]:
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
    with _mapped(task.store, "<i8", rows) as parent, _weights(task, rows) as weights:
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
    with _mapped(task.store, "<f8", rows) as weights:
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
