"""Megatron's indexed dataset: NAME.idx says where each sequence of NAME.bin lies.

The index, little endian, without gaps: `MMIDIDX` and two zero bytes, u64 version 1, u8 type of token, u64 S sequences,
u64 D document bounds; then i32 lengths [S] in tokens, i64 pointers [S] in bytes, i64 bounds [D] in sequences (document
d is sequences [bounds[d], bounds[d + 1])), and for multimodal data i8 modes [S], which are not read.
Source: megatron-core 0.16, megatron/core/datasets/indexed_dataset.py.

Hides: that every number of the index is checked against the file before it is believed (one pass: 0.14 s for 10
million sequences, 0.3 s with the hash of the index), and how a .bin of any size becomes slices: cut at the last
document end within 64 Mi tokens, inside a document only where it is longer. Where sequences follow one another, as
every builder of Megatron writes them, tokens of 2 and 4 bytes are views of the map; otherwise slices are put together
sequence by sequence.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.slices import hash_file
from forebay.errors import DatasetError
from forebay.formats.detect import MEGATRON_MAGIC
from forebay.formats.foreign import (
    MOST_COPIED_TOKENS,
    MOST_TOKENS,
    U64,
    Bytes8,
    ForeignDataset,
    Part,
    as_tokens,
    fingerprint,
    head_of,
    map_file,
    one_kind,
    reading,
    relative,
    size_of,
)

_HEADER_BYTES = 34
_KINDS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Index:
    """One .idx, checked against its .bin."""

    idx: Path
    data: Path
    data_bytes: int  # Of the .bin.
    kind: np.dtype[Any]  # Type of a token in it.
    lengths: NDArray[np.int32]  # [S], of the index's map, not aligned; so are the next two.
    pointers: NDArray[np.int64]  # [S].
    bounds: NDArray[np.int64]  # [D].
    # First token of each sequence, and the total: [S + 1]. None where `pointers` tell it, as the sequences follow one
    # another from byte 0 to the end.
    starts: NDArray[np.int64] | None
    num_tokens: int  # In all sequences.

    @property
    def num_documents(self) -> int:
        """Documents; every sequence is one where the index bounds none."""
        return len(self.bounds) - 1 if len(self.bounds) > 1 else len(self.lengths)

    def ends(self, first: int, last: int) -> NDArray[np.int64]:
        """The ends of documents [first, last), in tokens from the file's first: [last - first]."""
        if len(self.bounds) > 1:
            return self._starts_of(self.bounds[first + 1 : last + 1])
        return self._starts_of(np.arange(first + 1, last + 1))

    def end(self, document: int) -> int:
        """The end of one document, as `ends`; quick for one."""
        sequence = int(self.bounds[document + 1]) if len(self.bounds) > 1 else document + 1
        if self.starts is not None:
            return int(self.starts[sequence])
        if sequence == len(self.lengths):
            return self.num_tokens
        return int(self.pointers[sequence]) // self.kind.itemsize

    def _starts_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.starts is not None:
            return self.starts[sequences]
        inside = sequences < len(self.lengths)
        found = np.full(len(sequences), self.num_tokens, np.int64)
        found[inside] = self.pointers[sequences[inside]] // self.kind.itemsize
        return found


class MegatronDataset(ForeignDataset):
    """Pairs of .idx and .bin as one dataset, in the order of their names."""

    def __init__(self, path: Path, pairs: Sequence[tuple[Path, Path]]) -> None:
        self._indexes = [read_index(idx, data) for idx, data in pairs]
        dtype = one_kind(path, (one.kind for one in self._indexes))
        # The first document that ends in each slice: a slice's documents are those up to the next slice's.
        self._first: dict[tuple[int, int], int] = {}
        parts: list[Part] = []
        for file, one in enumerate(self._indexes):
            name = relative(path, one.data)
            for k, (start, stop, first, last) in enumerate(_cut(one)):
                self._first[file, start] = first
                num_bytes = (stop - start) * one.kind.itemsize
                parts.append(Part(file, f"{name}#{k:05d}", start, stop - start, last - first, num_bytes))
        marks = [self._mark(file) for file in range(len(pairs))]
        super().__init__(path, "megatron", dtype, [one.data for one in self._indexes], marks, parts)

    def _mark(self, file: int) -> bytes:
        one = self._indexes[file]
        with reading(one.idx):
            return fingerprint(one.data, len(self._indexes)) + bytes.fromhex(hash_file(one.idx))

    def _read(self, part: Part) -> tuple[NDArray[Any], U64]:
        one = self._indexes[part.file]
        memory = self._map(one.data, one.data_bytes)
        stop, width = part.start + part.count, one.kind.itemsize
        if one.starts is None:
            raw = memory[part.start * width : stop * width]
        else:
            raw = _put_together(one, memory, part.start, stop)
        first = self._first[part.file, part.start]
        ends = one.ends(first, first + part.documents) - part.start
        return as_tokens(raw.view(one.kind), one.data), ends.astype(np.uint64)


def pair_of(path: Path) -> tuple[Path, Path] | None:
    """(.idx, .bin) if `path` is one of the two, or what is left of their names without it; else None.

    The index is known by its first bytes; its data by the index's name.
    """
    candidates = [path, path.with_suffix(".idx"), path.with_name(path.name + ".idx")]
    for idx in candidates:
        if idx.is_file() and is_index(idx):
            data = idx.with_suffix(".bin")
            if not data.is_file():
                raise DatasetError(f"{idx}: expected its data in {data.name} beside it, got none. Fetch it too.")
            return idx, data
    return None


def is_index(path: Path) -> bool:
    """Whether a file begins as Megatron's index. Raises DatasetError if it cannot be read."""
    return head_of(path, len(MEGATRON_MAGIC)) == MEGATRON_MAGIC


def read_index(idx: Path, data: Path) -> Index:
    """Read an index and check every number in it."""
    data_bytes, memory = size_of(data), map_file(idx)
    kind, sequences, bounds = _header(idx, memory)
    edges = np.cumsum([_HEADER_BYTES, 4 * sequences, 8 * sequences, 8 * bounds]).tolist()
    columns = zip(pairwise(edges), ("<i4", "<i8", "<i8"))
    lengths, pointers, documents = (memory[start:stop].view(kind) for (start, stop), kind in columns)
    total, straight = _check_sequences(idx, data, data_bytes, kind, lengths, pointers)
    _check_bounds(idx, documents, sequences)
    starts = None
    if not straight:
        starts = np.zeros(sequences + 1, np.int64)
        np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    elif total * kind.itemsize != data_bytes:
        raise DatasetError(
            f"{data}: expected {total * kind.itemsize} bytes, as {idx.name} says, got {data_bytes}. "
            "One of the two is of another run, or is truncated; fetch both again."
        )
    return Index(idx, data, data_bytes, kind, lengths, pointers, documents, starts, total)


def _header(idx: Path, memory: Bytes8) -> tuple[np.dtype[Any], int, int]:
    head = memory[:_HEADER_BYTES].tobytes()
    if len(head) < _HEADER_BYTES or head[:9] != MEGATRON_MAGIC:
        raise DatasetError(f"{idx}: expected Megatron's index, got {head[:9]!r} in {len(memory)} bytes.")
    version, code = int.from_bytes(head[9:17], "little"), head[17]
    if version != 1:
        raise DatasetError(f"{idx}: expected version 1 of Megatron's index, got {version}.")
    if code not in _KINDS:
        raise DatasetError(
            f"{idx}: expected an integer type of token ({', '.join(f'{c}: {k}' for c, k in _KINDS.items())}), got "
            f"{code}. Write it again."
        )
    sequences, bounds = int.from_bytes(head[18:26], "little"), int.from_bytes(head[26:34], "little")
    wanted = _HEADER_BYTES + 12 * sequences + 8 * bounds
    if len(memory) not in (wanted, wanted + sequences):  # With modes.
        raise DatasetError(
            f"{idx}: expected {wanted} bytes for {sequences} sequences and {bounds} document bounds, got "
            f"{len(memory)}. It is truncated or damaged; fetch it again."
        )
    return _KINDS[code], sequences, bounds


def _check_sequences(
    idx: Path,
    data: Path,
    data_bytes: int,
    kind: np.dtype[Any],
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
) -> tuple[int, bool]:
    """Tokens in all, and whether the sequences follow one another without gaps from byte 0."""
    total, straight = 0, True
    for a in range(0, len(lengths), _CHUNK):
        sizes = lengths[a : a + _CHUNK].astype(np.int64)
        places = pointers[a : a + _CHUNK].astype(np.int64)
        # In this order: nothing wraps once a pointer is known to be at most the file's size.
        bad = (sizes < 0) | (places < 0) | (places > data_bytes)
        bad |= sizes * kind.itemsize > data_bytes - np.where(bad, 0, places)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise DatasetError(
                f"{idx}: expected sequence {a + i} inside the {data_bytes} bytes of {data.name}, got {sizes[i]} tokens "
                f"at byte {places[i]}. The index is damaged, or {data.name} is truncated; fetch both again."
            )
        after = np.cumsum(sizes) + total
        straight = straight and bool((places == (after - sizes) * kind.itemsize).all())
        total = int(after[-1])
        if total >> 56:
            raise DatasetError(f"{idx}: expected fewer than 2**56 tokens, got sequences that repeat the data's bytes.")
    return total, straight


def _check_bounds(idx: Path, bounds: NDArray[np.int64], sequences: int) -> None:
    before = 0
    for a in range(0, len(bounds), _CHUNK):
        some = bounds[a : a + _CHUNK].astype(np.int64)
        rising = bool((some[1:] >= some[:-1]).all()) and int(some[0]) >= before and int(some[-1]) <= sequences
        if not rising or (a == 0 and some[0] != 0):
            raise DatasetError(
                f"{idx}: expected document bounds that rise from 0 to at most {sequences}, got others. "
                "The index is damaged; fetch it again."
            )
        before = int(some[-1])


def _cut(one: Index) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, first document, last document) of each slice, in tokens and documents that end in it."""
    most = MOST_TOKENS if one.starts is None and one.kind.itemsize in (2, 4) else MOST_COPIED_TOKENS
    start, document, documents = 0, 0, one.num_documents
    while start < one.num_tokens:
        limit = start + most
        last = documents if limit >= one.num_tokens else bisect_right(range(documents), limit, document, key=one.end)
        stop = min(limit, one.num_tokens)
        if stop < one.num_tokens and last > document and one.end(last - 1) > start:
            stop = one.end(last - 1)
        yield start, stop, document, last
        start, document = stop, last


def _put_together(one: Index, memory: Bytes8, start: int, stop: int) -> Bytes8:
    """The bytes of tokens [start, stop), sequence by sequence, in a new array."""
    assert one.starts is not None
    width = one.kind.itemsize
    first = int(np.searchsorted(one.starts, start, "right")) - 1
    last = int(np.searchsorted(one.starts, stop, "left"))
    begins = one.starts[first:last]
    skips = np.maximum(start - begins, 0)
    stops = np.minimum(one.starts[first + 1 : last + 1], stop) - begins
    places = one.pointers[first:last]
    pieces = [memory[a:b] for a, b in zip((places + skips * width).tolist(), (places + stops * width).tolist())]
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
