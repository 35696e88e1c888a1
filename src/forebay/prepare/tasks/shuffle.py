"""SHUFFLE tasks: documents in the order of keyed hashes, over all parts, in bounded memory.

A document's key is a word of our counter-based generator under (seed, its part's name, its row). ENCODE sorts each part
by key; a SHUFFLE task merges one range of keys of all parts. Ties are in the order of the parts, then of the rows.
Costs: the tokens are written and read twice more; memory is 3 x 64 MiB by default; each part is opened once a bucket,
so that 1 TiB of tokens in parts of 64 MiB is 10**8 reads of about 8 KiB, some tens of minutes over all processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.errors import PrepareError
from forebay.files import atomic_write
from forebay.order.bijection import derive_key, random_words
from forebay.prepare.tasks.keys import hash_json

TASK_VERSION = 2
BUCKET_BYTES = 64 << 20
KINDS = ("tokens", "ends", "ids", "id_ends", "keys")
_MEMORY_BYTES = 256 << 20
_WRITE_BYTES = 8 << 20


@dataclass(frozen=True)
class Shuffle:
    """The seed, and which of several parts of the same name this is (0 for the first), so that their keys differ."""

    seed: int
    occurrence: int = 0


@dataclass(frozen=True)
class EncodedPart:
    """Documents as tokens in files `folder/stem.KIND`, which ENCODE and SHUFFLE write and slicing reads.

    `tokens` (of `dtype`), `ends` (U64 [documents], exclusive); with ids `ids` (a JSON line a document) and `id_ends`
    (U64); in the order of keys, `keys` (U64, rising).
    """

    folder: str
    stem: str
    documents: int
    tokens: int
    dtype: str
    with_keys: bool = False
    with_ids: bool = False

    def file(self, kind: str) -> Path:
        """The path of its `tokens`, `ends`, `ids`, `id_ends` or `keys`."""
        return Path(self.folder) / f"{self.stem}.{kind}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The files that it has."""
        present = {"ids": self.with_ids, "id_ends": self.with_ids, "keys": self.with_keys}
        return tuple(kind for kind in KINDS if present.get(kind, True))

    @property
    def itemsize(self) -> int:
        return TOKEN_DTYPES[self.dtype].itemsize


def document_keys(shuffle: Shuffle, part_name: str, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The keys of these rows of a part; uint64, uniform."""
    key = derive_key(shuffle.seed, "shuffle", part_name, shuffle.occurrence)
    return random_words(key, rows.astype(np.uint64))


@dataclass(frozen=True)
class ShuffleTask:
    """All documents of `parts` with keys in [first_key, last_key], to one part. The parts are in the file `plan`."""

    plan: str
    index: int
    first_key: int
    last_key: int
    folder: str

    @property
    def name(self) -> str:
        """A hash of the parts and the range of keys."""
        return hash_json([TASK_VERSION, Path(self.plan).stem, self.first_key, self.last_key])


def plan_shuffle(
    parts: Sequence[EncodedPart], folder: Path | str, bucket_bytes: int = BUCKET_BYTES
) -> list[ShuffleTask]:
    """Tasks whose results, in this order, are the documents of all parts in the order of their keys.

    Writes one small file, the list of the parts, into `folder`. All parts have keys, one dtype, ids all or none.
    """
    if not parts:
        return []
    # The name is without the folder, which may be moved between runs.
    name = hash_json([{**asdict(part), "folder": ""} for part in parts])
    path = Path(folder) / f"shuffle-{name}.plan"
    data = json.dumps([asdict(part) for part in parts]).encode()
    if not path.exists() or path.read_bytes() != data:
        atomic_write(path, data)
    size = sum(part.tokens * part.itemsize + 32 * part.documents for part in parts)
    count = max(1, -(-size // bucket_bytes))
    edges = [(index << 64) // count for index in range(count + 1)]
    return [ShuffleTask(str(path), i, edges[i], edges[i + 1] - 1, str(folder)) for i in range(count)]


def shuffle(task: ShuffleTask, scale: int = 0) -> EncodedPart:
    """Run the task unless it is finished. At scale 1 and up no bucket is in memory at once."""
    if (done := finished_shuffle(task)) is not None:
        return done
    parts = [EncodedPart(**plain) for plain in json.loads(Path(task.plan).read_bytes())]
    sources = [run for part in parts if len((run := _Run.of(part, task.first_key, task.last_key)).keys)]
    keys = np.concatenate([np.empty(0, np.uint64), *[source.keys for source in sources]])
    order = np.argsort(keys, kind="stable")  # Parts stand in their order, rows in theirs: ties keep it.
    first = parts[0]
    tokens = sum(int(source.token_edges[-1] - source.token_edges[0]) for source in sources)
    result = EncodedPart(task.folder, task.name, len(keys), tokens, first.dtype, True, first.with_ids)
    _write_sorted(result, sources, keys[order], order, in_memory=scale == 0)
    atomic_write(result.file("json"), json.dumps({**asdict(result), "folder": ""}).encode())
    return result


def finished_shuffle(task: ShuffleTask) -> EncodedPart | None:
    """The result of a task that an earlier run committed; None if there is none."""
    try:
        plain = json.loads((Path(task.folder) / f"{task.name}.json").read_bytes())
        return EncodedPart(**{**plain, "folder": task.folder})
    except (OSError, ValueError, TypeError):
        return None


def sort_part(part: EncodedPart, result: EncodedPart) -> None:
    """Write the documents of a part, as ENCODE appended them, to the files of `result`, in the order of their keys."""
    source = _Run.of(part, 0, (1 << 64) - 1, is_sorted=False)
    order = np.argsort(source.keys, kind="stable")
    _write_sorted(result, [source], source.keys[order], order, in_memory=True)


@dataclass(frozen=True)
class _Run:
    """Consecutive documents of a part: their keys, and where each begins and ends in its `tokens` and `ids`."""

    part: EncodedPart
    keys: NDArray[np.uint64]
    token_edges: NDArray[np.int64]
    id_edges: NDArray[np.int64]

    @classmethod
    def of(cls, part: EncodedPart, first_key: int, last_key: int, *, is_sorted: bool = True) -> _Run:
        start, stop = 0, part.documents
        if is_sorted:
            with part.file("keys").open("rb") as file:
                start = _bisect(file, part.documents, first_key)
                stop = _bisect(file, part.documents, last_key + 1)
        keys = np.fromfile(part.file("keys"), "<u8", count=stop - start, offset=8 * start)
        id_edges = np.zeros(stop - start + 1, np.int64)
        if part.with_ids:
            id_edges = _edges(part.file("id_ends"), start, stop)
        edges = _edges(part.file("ends"), start, stop)
        if len(keys) != stop - start or len(edges) != len(keys) + 1 or len(id_edges) != len(edges):
            raise PrepareError(f"{part.file('keys')}: expected the documents of an earlier run, got fewer. "
                               "Remove .work and run again.")  # fmt: skip
        return cls(part, keys, edges, id_edges)

    def edges(self, kind: str) -> NDArray[np.int64]:
        return self.id_edges if kind == "ids" else self.token_edges


def _bisect(file: BinaryIO, documents: int, key: int) -> int:
    """How many of the rising keys in a file are below `key`: 8 bytes at a time, about 20 reads."""
    low, high = 0, documents
    while low < high:
        middle = (low + high) // 2
        if int.from_bytes(os.pread(file.fileno(), 8, 8 * middle), "little") < key:
            low = middle + 1
        else:
            high = middle
    return low


def _edges(path: Path, start: int, stop: int) -> NDArray[np.int64]:
    if start == 0:
        return np.concatenate([[0], np.fromfile(path, "<u8", count=stop)]).astype(np.int64)
    return np.fromfile(path, "<u8", count=stop - start + 1, offset=8 * (start - 1)).astype(np.int64)


def _write_sorted(
    result: EncodedPart, sources: list[_Run], keys: NDArray[np.uint64], order: NDArray[np.int64], *, in_memory: bool
) -> None:
    atomic_write(result.file("keys"), keys.astype("<u8").tobytes())
    owner = np.repeat(np.arange(len(sources)), [len(source.keys) for source in sources])[order]
    for kind, ends_kind in (("tokens", "ends"), ("ids", "id_ends")):
        if kind not in result.kinds:
            continue
        item = np.dtype(np.uint8) if kind == "ids" else TOKEN_DTYPES[result.dtype]
        edges = [source.edges(kind) for source in sources]
        none = np.empty(0, np.int64)
        starts = np.concatenate([none, *[run_edges[:-1] for run_edges in edges]])[order]
        lengths = np.concatenate([none, *[np.diff(run_edges) for run_edges in edges]])[order]
        atomic_write(result.file(ends_kind), np.cumsum(lengths).astype("<u8").tobytes())
        total = int(lengths.sum()) * item.itemsize
        copy = _from_memory if in_memory and total <= _MEMORY_BYTES else _from_files
        atomic_write(result.file(kind), copy(sources, kind, item, owner, starts, lengths))


def _from_memory(
    sources: list[_Run], kind: str, item: np.dtype[Any], owner: Any, starts: Any, lengths: Any
) -> Iterator[bytes]:
    parts = []
    for source in sources:
        edges = source.edges(kind)
        count = int(edges[-1] - edges[0])
        data = np.fromfile(source.part.file(kind), item, count=count, offset=int(edges[0]) * item.itemsize)
        if len(data) != count:
            raise PrepareError(f"{source.part.file(kind)}: expected {count} more items, got {len(data)}. Run again.")
        parts.append(data)
    first = np.array([int(source.edges(kind)[0]) for source in sources], np.int64)
    pending: list[NDArray[Any]] = []
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


def _from_files(
    sources: list[_Run], kind: str, item: np.dtype[Any], owner: Any, starts: Any, lengths: Any
) -> Iterator[bytes]:
    opened, opened_index = None, -1
    try:
        for index, start, length in zip(owner.tolist(), starts.tolist(), lengths.tolist()):
            if opened is None or index != opened_index:
                if opened is not None:
                    opened.close()
                opened, opened_index = sources[index].part.file(kind).open("rb", buffering=0), index
            opened.seek(start * item.itemsize)
            remaining = length * item.itemsize
            while remaining:
                chunk = opened.read(min(remaining, _WRITE_BYTES))
                if not chunk:
                    raise PrepareError(f"{opened.name}: expected {remaining} more bytes of an earlier run. Run again.")
                remaining -= len(chunk)
                yield chunk
    finally:
        if opened is not None:
            opened.close()
