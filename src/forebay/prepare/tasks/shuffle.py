"""SHUFFLE tasks: documents in the order of keyed hashes, over all parts, in bounded memory.

A document's key is a word of our counter-based generator under (seed, its part's name, its row). ENCODE sorts each part
by key; a SHUFFLE task merges one range of keys of at most 256 parts. Ties are in the order of the parts, then of the
rows. Of more parts, each group of 256 is merged to at most 256 ranges first, then the groups' parts of each range, and
so on: n parts take ceil(log256(n)) levels, and 768 reads a task of 64 MiB. Costs: the tokens are written and read once
more a level; memory is 3 x 64 MiB by default. As keys are uniform within the range of a part, where a bucket begins in
it is guessed, and the keys near there are read.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from forebay.arrays import I64, U64, Array, DType
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.order.bijection import derive_key, random_words
from forebay.prepare.documents import Map, read_items
from forebay.prepare.tasks.keys import hash_json
from forebay.storage.store import Store

TASK_VERSION = 4
BUCKET_BYTES = 64 << 20
KINDS = ("tokens", "ends", "ids", "id_ends", "keys")
_MEMORY_BYTES = 256 << 20
_WRITE_BYTES = 8 << 20
_FAN_IN = 256  # Parts that a task merges, at most.
_KEYS = (0, 1 << 64)


@dataclass(frozen=True)
class Shuffle:
    """The seed, and which of several parts of the same name this is (0 for the first), so that their keys differ."""

    seed: int
    occurrence: int = 0


@dataclass(frozen=True)
class EncodedPart:
    """Documents as tokens in objects `STEM.KIND`, which ENCODE and SHUFFLE write and slicing reads.

    `tokens` (of `dtype`), `ends` (U64 [documents], exclusive); with ids `ids` (a JSON line a document) and `id_ends`
    (U64); in the order of keys, `keys` (U64, rising).
    """

    stem: str
    documents: int
    tokens: int
    dtype: str
    with_keys: bool = False
    with_ids: bool = False

    def object(self, kind: str) -> str:
        """The name of its `tokens`, `ends`, `ids`, `id_ends` or `keys`."""
        return f"{self.stem}.{kind}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The objects that it has."""
        present = {"ids": self.with_ids, "id_ends": self.with_ids, "keys": self.with_keys}
        return tuple(kind for kind in KINDS if present.get(kind, True))

    @property
    def itemsize(self) -> int:
        return TOKEN_DTYPES[self.dtype].itemsize


def count_all(parts: Iterable[EncodedPart]) -> tuple[int, int]:
    """The documents of all parts, and their tokens."""
    counts = [(part.documents, part.tokens) for part in parts]
    return sum(documents for documents, _ in counts), sum(tokens for _, tokens in counts)


def document_keys(shuffle: Shuffle, part_name: str, rows: I64) -> U64:
    """The keys of these rows of a part; uint64, uniform."""
    key = derive_key(shuffle.seed, "shuffle", part_name, shuffle.occurrence)
    return random_words(key, rows.astype(np.uint64))


@dataclass(frozen=True)
class ShuffleTask:
    """All documents with keys in [first_key, last_key] of the parts that `plan` lists, to one part.

    All keys of these parts are in [low, high), uniformly.
    """

    plan: str
    first_key: int
    last_key: int
    store: Store
    low: int
    high: int

    @property
    def name(self) -> str:
        """A hash of the parts and the range of keys."""
        return hash_json([TASK_VERSION, self.plan, self.first_key, self.last_key])


def shuffle_parts(
    parts: Sequence[EncodedPart],
    store: Store,
    map: Map,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[EncodedPart]:
    """Parts that have, one after the other, the documents of all parts in the order of their keys.

    All parts have keys, one dtype, ids all or none. `map` runs the tasks of a level, and gives their results.
    """
    ranges: list[tuple[int, int, Sequence[EncodedPart]]] = [(*_KEYS, parts)]
    while True:
        planned = [_plan_range(*keys_and_parts, store, bucket_bytes) for keys_and_parts in ranges]
        results = iter(map(shuffle, [task for groups in planned for tasks in groups for task in tasks]))
        merged, is_last = [], True
        for groups in planned:
            by_group = [[(task, next(results)) for task in tasks] for tasks in groups]
            is_last &= len(groups) <= 1
            for pieces in zip(*by_group):
                first = pieces[0][0]
                merged.append((first.first_key, first.last_key + 1, [part for _, part in pieces if part.documents]))
        ranges = [entry for entry in merged if entry[2]]
        if is_last:
            return [part for _, _, of_range in ranges for part in of_range]


def _plan_range(
    low: int, high: int, parts: Sequence[EncodedPart], store: Store, bucket_bytes: int
) -> list[list[ShuffleTask]]:
    """For each group of parts the tasks of the same ranges of keys, in order. Writes a list of parts a group."""
    groups = max(1, -(-len(parts) // _FAN_IN))
    size = sum(part.tokens * part.itemsize + 32 * part.documents for part in parts)
    count = max(1, -(-size // (groups * bucket_bytes)))
    count = min(count, _FAN_IN) if groups > 1 else count
    edges = [low + (high - low) * index // count for index in range(count + 1)]
    plans = [
        write_parts(store, "plans/shuffle", parts[start : start + _FAN_IN], [low, high])
        for start in range(0, len(parts), _FAN_IN)
    ]
    return [[ShuffleTask(plan, first, stop - 1, store, low, high) for first, stop in pairwise(edges)] for plan in plans]


def write_parts(store: Store, stem: str, parts: Sequence[EncodedPart], settings: Any = None) -> str:
    """Write a list of parts to an object whose name, which is returned, is a hash of it and of the settings."""
    data = json.dumps([asdict(part) for part in parts]).encode()
    name = f"{stem}-{hash_json([hashlib.sha256(data).hexdigest(), settings])}"
    store.create(name, data)
    return name


@lru_cache(maxsize=2)
def read_parts(store: Store, name: str) -> tuple[EncodedPart, ...]:
    """A list of parts that `write_parts` wrote."""
    return tuple(EncodedPart(**plain) for plain in json.loads(store.read(name)))


def shuffle(task: ShuffleTask, scale: int = 0) -> EncodedPart:
    """Run the task. At scale 1 and up no bucket is in memory at once."""
    parts = read_parts(task.store, task.plan)
    runs = task.store.each(lambda part: _Run.of(task.store, part, task), parts)
    sources = [run for run in runs if len(run.keys)]
    keys = np.concatenate([np.empty(0, np.uint64), *[source.keys for source in sources]])
    order = np.argsort(keys, kind="stable")  # Parts stand in their order, rows in theirs: ties keep it.
    first = parts[0]
    tokens = sum(int(source.token_edges[-1] - source.token_edges[0]) for source in sources)
    result = EncodedPart(f"tokens/{task.name}", len(keys), tokens, first.dtype, True, first.with_ids)
    _write_sorted(task.store, result, sources, keys[order], order, in_memory=scale == 0)
    return result


def sort_part(part: EncodedPart, source: Store, store: Store) -> None:
    """Write the documents of a part, as ENCODE appended them to files, to the store, in the order of their keys."""
    run = _Run.of(source, part)
    order = np.argsort(run.keys, kind="stable")
    _write_sorted(store, part, [run], run.keys[order], order, in_memory=True)


@dataclass(frozen=True)
class _Run:
    """Consecutive documents of a part: their keys, and where each begins and ends in its `tokens` and `ids`."""

    store: Store
    part: EncodedPart
    keys: U64
    token_edges: I64
    id_edges: I64

    @classmethod
    def of(cls, store: Store, part: EncodedPart, task: ShuffleTask | None = None) -> "_Run":
        """The documents of a task; without one all, of a part that is not sorted."""
        if task is not None:
            start, keys = _keys_within(store, part, task)
        else:
            start, keys = 0, read_items(store, part.object("keys"), "<u8", part.documents)
        stop = start + len(keys)
        id_edges = np.zeros(len(keys) + 1, np.int64)
        if part.with_ids:
            id_edges = _edges(store, part.object("id_ends"), start, stop)
        return cls(store, part, keys, _edges(store, part.object("ends"), start, stop), id_edges)

    def edges(self, kind: str) -> I64:
        return self.id_edges if kind == "ids" else self.token_edges

    def read(self, kind: str, item: DType, count: int, start: int) -> Array:
        """Items of `tokens` or `ids`."""
        return read_items(self.store, self.part.object(kind), item, count, start)


def _keys_within(store: Store, part: EncodedPart, task: ShuffleTask) -> tuple[int, U64]:
    """The rising keys of a part in the task's range, and the row of the first of them.

    Of n uniform keys the row of a key is about n times its share of all, give or take the square root of n.
    """
    documents, first, last, span = part.documents, task.first_key, task.last_key, task.high - task.low
    around = 4 * math.isqrt(documents) + 8
    while True:
        start = max(0, documents * (first - task.low) // span - around)
        stop = min(documents, documents * (last + 1 - task.low) // span + around)
        keys = read_items(store, part.object("keys"), "<u8", stop - start, start)
        reaches_first = start == 0 or (len(keys) and int(keys[0]) < first)
        reaches_last = stop == documents or (len(keys) and int(keys[-1]) > last)
        if reaches_first and reaches_last:
            low, high = np.searchsorted(keys, np.array([first, last], np.uint64), "left").tolist()
            high += int(np.count_nonzero(keys[high:] == np.uint64(last)))
            return start + low, keys[low:high]
        around *= 4


def _edges(store: Store, name: str, start: int, stop: int) -> I64:
    first = max(start - 1, 0)
    stops = read_items(store, name, "<u8", stop - first, first).astype(np.int64)
    return stops if start else np.insert(stops, 0, 0)


def _write_sorted(
    store: Store, result: EncodedPart, sources: list[_Run], keys: U64, order: I64, *,
    in_memory: bool,
) -> None:  # fmt: skip
    store.write(result.object("keys"), keys.astype("<u8").tobytes())
    owner = np.repeat(np.arange(len(sources)), [len(source.keys) for source in sources])[order]
    for kind, ends_kind in (("tokens", "ends"), ("ids", "id_ends")):
        if kind not in result.kinds:
            continue
        item = np.dtype(np.uint8) if kind == "ids" else TOKEN_DTYPES[result.dtype]
        edges = [source.edges(kind) for source in sources]
        none = np.empty(0, np.int64)
        starts = np.concatenate([none, *[run_edges[:-1] for run_edges in edges]])[order]
        lengths = np.concatenate([none, *[np.diff(run_edges) for run_edges in edges]])[order]
        store.write(result.object(ends_kind), np.cumsum(lengths).astype("<u8").tobytes())
        total = int(lengths.sum()) * item.itemsize
        copy = _from_memory if in_memory and total <= _MEMORY_BYTES else _from_files
        with store.open(result.object(kind)) as file:
            file.writelines(copy(sources, kind, item, owner, starts, lengths))


def _from_memory(sources: list[_Run], kind: str, item: DType, owner: Any, starts: Any, lengths: Any) -> Iterator[bytes]:
    def read(source: _Run) -> Array:
        edges = source.edges(kind)
        return source.read(kind, item, int(edges[-1] - edges[0]), int(edges[0]))

    parts = list(sources[0].store.each(read, sources)) if sources else []
    first = np.array([int(source.edges(kind)[0]) for source in sources], np.int64)
    pending: list[Array] = []
    size = 0
    relative = starts - first[owner] if len(sources) else starts
    for which, start, length in zip(owner.tolist(), relative.tolist(), lengths.tolist()):
        pending.append(parts[which][start : start + length])
        size += length * item.itemsize
        if size >= _WRITE_BYTES:
            yield np.concatenate(pending).tobytes()
            pending, size = [], 0
    if pending:
        yield np.concatenate(pending).tobytes()


def _from_files(sources: list[_Run], kind: str, item: DType, owner: Any, starts: Any, lengths: Any) -> Iterator[bytes]:
    for index, start, length in zip(owner.tolist(), starts.tolist(), lengths.tolist()):
        source, step = sources[index], _WRITE_BYTES // item.itemsize
        for first in range(start, start + length, step):
            count = min(step, start + length - first)
            yield source.read(kind, item, count, first).tobytes()
