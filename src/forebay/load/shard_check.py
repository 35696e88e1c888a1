"""Verifies every sample of a shard by its id, in threads, while the shard is received piece by piece.

Pieces with wrong samples are fetched again. Samples that are wrong in the same way three times are wrong at the origin;
if they differ each time, they were damaged in transfer.

Cost: 1 GB/s a processor for samples of 4 KiB (8-byte BLAKE2b, without the interpreter's lock).
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forebay.errors import DatasetError, IntegrityError
from forebay.formats.external import map_file
from forebay.formats.vectors import NO_SAMPLE, NPY_MAGIC, Vector, vector_in
from forebay.storage.part_file import Check
from forebay.storage.transfers import PIECE_BYTES

_BLOCK_BYTES = 1 << 20
_MAX_SAME = 2  # Retries that give the same wrong bytes.
_MAX_RETRIES = 10
_MIN_SAMPLES = 64  # If all of so many are wrong, the ids are another shard's.
MAX_HEADER_BYTES = 12 << 10


class SampleCheck(Check):
    """Checks one shard's tokens, a file of `num_bytes`, by the ids in the complete file `ids`.

    `seq_len` 0: from the sizes, as the ids verify it. `piece_bytes` is the unit that is fetched again.
    """

    def __init__(self, index: int, ids: Path, num_bytes: int, seq_len: int = 0, piece_bytes: int = PIECE_BYTES) -> None:
        self._index, self._ids = index, ids
        self._num_bytes, self._seq_len, self._piece_bytes = num_bytes, seq_len, piece_bytes
        self._num_samples = len(read_ids(ids))
        self._path = Path()  # Of the tokens.
        self._vector: Vector | None = None  # Their layout, once the header is received.
        self._num_checked = 0
        self._wrong: dict[int, int] = {}  # Sample to the id that its bytes have.
        self._last_wrong: dict[int, int] = {}
        self._num_same = self._num_retries = 0

    def advance(self, path: Path, start: int, stop: int) -> None:
        """See Check."""
        if stop < min(self._num_bytes, MAX_HEADER_BYTES):
            return
        if self._vector is None:
            self._path, self._vector = path, self._read_header(path)
        offset, width = self._layout()
        first = min(self._num_checked, max(0, start - offset) // width)
        end = max(0, stop - offset) // width
        step = max(1, _BLOCK_BYTES // width)
        blocks = [range(i, min(i + step, end)) for i in range(first, end, step)]
        check_block = partial(self._check_block, map_file(path), read_ids(self._ids))
        with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
            for wrong in pool.map(check_block, blocks):
                self._wrong |= wrong
        self._num_checked = end
        if len(self._wrong) == end >= min(_MIN_SAMPLES, self._num_samples):
            raise self._error()  # Not damage in transfer.

    def wrong(self) -> list[tuple[int, int]]:
        """See Check. Raises IntegrityError if the same wrong bytes are received repeatedly."""
        if not self._wrong:
            return []
        self._num_same = self._num_same + 1 if self._wrong == self._last_wrong else 0
        if self._num_retries == _MAX_RETRIES or self._num_same == _MAX_SAME:
            raise self._error()
        self._num_retries += 1
        self._last_wrong, self._wrong = self._wrong, {}
        (offset, width), size = self._layout(), self._piece_bytes
        starts = np.array(sorted(self._last_wrong), np.int64) * width + offset
        pieces = np.unique(np.concatenate([starts, starts + width - 1]) // size).tolist()
        return [(piece * size, min((piece + 1) * size, self._num_bytes)) for piece in pieces]

    def finish(self, path: Path) -> None:
        """Verify a complete local file. Raises IntegrityError or DatasetError."""
        size = path.stat().st_size
        if size != self._num_bytes:
            raise DatasetError(f"{path}: expected {self._num_bytes} bytes, got {size}. Fetch it again.")
        self.advance(path, 0, size)
        if self._wrong:
            raise self._error()

    def _layout(self) -> tuple[int, int]:
        """The offset of sample 0 in the file, and the bytes of a sample."""
        assert self._vector is not None
        return self._vector.offset, self._seq_len * self._vector.kind.itemsize

    def _read_header(self, path: Path) -> Vector:
        count, dtype = self._num_samples, None
        with path.open("rb") as file:
            is_raw = file.read(len(NPY_MAGIC)) != NPY_MAGIC
        if is_raw:
            width = self._num_bytes // max(1, count * self._seq_len) if self._seq_len else 2
            dtype = {2: "<u2", 4: "<u4"}.get(width)
            if dtype is None:
                raise self._size_error(f"{self._num_bytes} bytes")
        vector = vector_in(path, self._num_bytes, dtype)
        if vector.kind not in (np.dtype("<u2"), np.dtype("<u4")):
            raise DatasetError(f"shard {self._index}: expected tokens of uint16 or uint32, got {vector.kind} ({path}).")
        self._seq_len = self._seq_len or vector.count // count
        if vector.count != count * self._seq_len or not self._seq_len:
            raise self._size_error(f"{vector.count} tokens")
        return vector

    def _size_error(self, actual: str) -> DatasetError:
        count = self._num_samples
        return DatasetError(
            f"shard {self._index}: expected {count * self._seq_len} tokens, {self._seq_len} for each of {count} ids "
            f"({self._ids}), got {actual}. One of the two is truncated, of another shard, or of another "
            "sequence_length; fetch both again, or set sequence_length."
        )

    def _check_block(self, tokens: NDArray[np.uint8], ids: NDArray[np.uint64], samples: range) -> dict[int, int]:
        """The wrong samples of a block, and the ids that their bytes have."""
        offset, width = self._layout()
        data = tokens[offset + samples.start * width : offset + samples.stop * width].data
        digests = (hashlib.blake2b(data[i : i + width], digest_size=8).digest() for i in range(0, len(data), width))
        got = np.frombuffer(b"".join(digests), "<u8")
        wrong = np.flatnonzero(got != ids[samples.start : samples.stop])
        return {samples.start + int(i): int(got[i]) for i in wrong}

    def _error(self) -> IntegrityError:
        first, (offset, width) = min(self._wrong), self._layout()
        reason = ""
        if int(read_ids(self._ids)[first]) == NO_SAMPLE:  # A known writer gave it to each sample of the second half.
            reason = "Its id is that of no bytes at all, a known fault of one writer. "
        return IntegrityError(
            f"shard {self._index}: expected each sample to have its id, got {len(self._wrong)} of {self._num_samples} "
            f"that have not, the first sample {first} at byte {offset + first * width} ({self._path}). {reason}Have "
            f"the shard published again, or leave it out: remap={{{self._index}: ANOTHER}}."
        )


def read_ids(path: Path) -> NDArray[np.uint64]:
    """The ids of a file, U64 [N], a view of the mapped file. Raises DatasetError if it has no ids."""
    memory = map_file(path)
    vector = vector_in(path, len(memory), "<u8")
    if vector.kind != np.dtype("<u8") or not vector.count:
        raise DatasetError(f"{path}: expected sample ids of uint64, got {vector.count} {vector.kind}. Fetch it again.")
    return memory[vector.offset :].view("<u8")
