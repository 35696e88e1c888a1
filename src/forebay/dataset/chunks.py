"""The chunks of a slice: its id is the root of a Merkle tree over them, so that any range is verified by itself.

The leaves are the SHA-256 of chunks of `chunk_bytes` (the last may be shorter), a node is the SHA-256 of its two
children, and the last node of an odd level moves up unchanged. A slice of one chunk has the SHA-256 of its file as its
id. Table and manifest fix the sizes, so the tree's shape is known and a node cannot pass for a leaf. `chunks.sha256`
has the leaves of all slices, in their order.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from forebay.arrays import I64

CHUNKS_FILE = "chunks.sha256"
HASH_BYTES = 32
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1 << 12, 1 << 16
_CHUNKS_PER_SLICE = 256
_READ_BYTES = 1 << 20


def chunk_size(slice_bytes: int) -> int:
    """The chunk size of a dataset whose largest slices have so many bytes: a power of two, 4 KiB to 64 KiB.

    A smaller chunk costs more to hash (4 KiB a half more than 64 KiB), a larger one more bytes where only a part of it
    is read: at the edges of what a rank reads.
    """
    power = 1 << max(0, (slice_bytes // _CHUNKS_PER_SLICE).bit_length() - 1)
    return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, power))


def num_chunks(num_bytes: int, chunk_bytes: int) -> int:
    """Chunks of a slice of `num_bytes`; at least one."""
    return max(1, -(-num_bytes // chunk_bytes))


def first_chunks(sizes: I64, chunk_bytes: int) -> I64:
    """The number of each slice's first chunk among those of all slices, and their total: int64 [S + 1]."""
    counts = np.maximum(1, -(-sizes // chunk_bytes))
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def consecutive_runs(chunks: I64) -> list[I64]:
    """Rising numbers, split where one is left out."""
    return np.split(chunks, np.flatnonzero(np.diff(chunks) > 1) + 1)


def root_of(leaves: bytes) -> str:
    """The id, in hex, of the slice with these leaves: 32 bytes each."""
    level = [leaves[i : i + HASH_BYTES] for i in range(0, len(leaves), HASH_BYTES)]
    while len(level) > 1:
        pairs = [hashlib.sha256(a + b).digest() for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[-1:] if len(level) % 2 else pairs
    return level[0].hex()


class ChunkHasher:
    """The leaves of a slice whose bytes come one after another."""

    def __init__(self, chunk_bytes: int) -> None:
        self.num_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._digest = hashlib.sha256()
        self._space = chunk_bytes
        self._leaves: list[bytes] = []

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        self.num_bytes += len(view)
        while len(view):
            if not self._space:
                self._end_chunk()
            part, view = view[: self._space], view[self._space :]
            self._digest.update(part)
            self._space -= len(part)

    def leaves(self) -> bytes:
        """The leaves of all bytes so far. Call it once, at the end."""
        self._end_chunk()
        return b"".join(self._leaves)

    def _end_chunk(self) -> None:
        self._leaves.append(self._digest.digest())
        self._digest, self._space = hashlib.sha256(), self._chunk_bytes


class HashedPieces:
    """The pieces of a file, which pass through; `num_bytes` and `sha256` are of those so far."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.num_bytes, self._pieces, self._digest = 0, pieces, hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self.num_bytes += len(piece)
            self._digest.update(piece)
            yield piece


def hash_slice(path: Path | str, chunk_bytes: int) -> tuple[str, bytes]:
    """The id of a slice's file, in hex, and the leaves of its tree. Raises OSError."""
    hasher, buffer = ChunkHasher(chunk_bytes), memoryview(bytearray(_READ_BYTES))
    with Path(path).open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    leaves = hasher.leaves()
    return root_of(leaves), leaves


def wrong_chunks(data: memoryview, leaves: bytes, chunk_bytes: int) -> Sequence[int]:
    """Indexes of the chunks of `data`, which begins with the first of `leaves`, that have another hash."""
    return [
        i
        for i, start in enumerate(range(0, max(1, len(data)), chunk_bytes))
        if hashlib.sha256(data[start : start + chunk_bytes]).digest() != leaves[i * HASH_BYTES : (i + 1) * HASH_BYTES]
    ]


def read_leaves(file: BinaryIO, first: int, count: int) -> bytes:
    """The leaves [first, first + count) of `chunks.sha256`. Raises OSError; fewer bytes if the file is shorter."""
    file.seek(first * HASH_BYTES)
    return file.read(count * HASH_BYTES)
