"""Verifies every sample of a shard by its id, in threads, while the shard is received piece by piece.

Pieces with wrong samples are fetched again. Samples that are wrong in the same way three times are wrong at the origin;
if they differ each time, they were damaged in transfer.

Cost: 1 GB/s a processor for samples of 4 KiB (8-byte BLAKE2b, without the interpreter's lock); the ids stay mapped.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import DatasetError, IntegrityError
from forebay.formats.external import map_file
from forebay.formats.vectors import NO_SAMPLE, NPY_MAGIC, Vector, vector_in
from forebay.storage.transfers import PIECE_BYTES

_BLOCK_BYTES = 1 << 20
_MAX_SAME = 2  # Retries that give the same wrong bytes.
_MAX_RETRIES = 10
_MIN_SAMPLES = 64  # If all of so many are wrong, the ids are another shard's.
MAX_HEADER_BYTES = 12 << 10


class SampleCheck:
    """A `forebay.storage.part_file.Check` of one shard's tokens; `piece_bytes` is the unit that is fetched again.

    Args:
        index: Of the shard, for messages.
        ids: The complete file of ids, raw u64 or .npy.
        num_bytes: Of the tokens' file.
        seq_len: Tokens of a sample; 0: from the sizes, as the ids verify it.
        dtype: Of the tokens, checked against the header; None: from the header or the sizes.
    """

    def __init__(self, index: int, ids: Path, num_bytes: int, seq_len: int, dtype: np.dtype[Any] | None = None) -> None:
        self.index = index
        self.seq_len = seq_len
        self.ids = read_ids(ids)  # U64 [N], a view of the mapped file.
        self.num_bytes = num_bytes
        self.piece_bytes = PIECE_BYTES
        self.path: Path | None = None  # Of the tokens, once the header is here; `vector` is its layout.
        self.vector: Vector | None = None
        self._dtype = dtype
        self._ids_path = ids
        self._bytes: NDArray[np.uint8] | None = None
        self._num_checked = 0
        self._wrong: dict[int, int] = {}  # Sample to the id that its bytes have.
        self._last_wrong: dict[int, int] = {}
        self._num_same = self._num_retries = 0
        self._pending: list[tuple[int, int]] = []  # Samples that are fetched again.

    def advance(self, path: Path, start: int, stop: int) -> None:
        """See Check."""
        if stop < min(self.num_bytes, MAX_HEADER_BYTES):
            return
        if self.vector is None:
            self.path, self.vector = path, self._read_header(path)
            self._bytes = map_file(path)[: self.num_bytes]
        width = self.seq_len * self.vector.kind.itemsize
        end = max(0, stop - self.vector.offset) // width
        ranges = [range(a, min(b, end)) for a, b in self._pending if a < end]
        self._pending = [(max(a, end), b) for a, b in self._pending if b > end]
        if self._num_checked < end:
            ranges.append(range(self._num_checked, end))
            self._num_checked = end
        step = max(1, _BLOCK_BYTES // width)
        blocks = [range(r.start + k, min(r.start + k + step, r.stop)) for r in ranges for k in range(0, len(r), step)]
        for wrong in self._check_blocks(blocks):
            self._wrong |= wrong
        if len(self._wrong) == self._num_checked >= min(_MIN_SAMPLES, len(self.ids)):
            raise self._error()  # Not damage in transfer.

    def wrong(self) -> list[tuple[int, int]]:
        """See Check. Raises IntegrityError if the same wrong bytes are received repeatedly."""
        if not self._wrong:
            return []
        self._num_same = self._num_same + 1 if self._wrong == self._last_wrong else 0
        self._last_wrong = self._wrong
        if self._num_retries == _MAX_RETRIES or self._num_same == _MAX_SAME:
            raise self._error()
        self._num_retries += 1
        assert self.vector is not None
        width, offset = self.seq_len * self.vector.kind.itemsize, self.vector.offset
        starts = np.array(sorted(self._wrong), np.int64) * width + offset
        size = self.piece_bytes
        pieces = sorted({*(starts // size).tolist(), *((starts + width - 1) // size).tolist()})
        ranges = [(p * size, min((p + 1) * size, self.num_bytes)) for p in pieces]
        self._wrong = {}
        self._pending = [
            (max(0, a - offset) // width, min(len(self.ids), -(-(b - offset) // width))) for a, b in ranges
        ]
        return ranges

    def finish(self, path: Path) -> None:
        """Verify a complete local file. Raises IntegrityError or DatasetError."""
        size = path.stat().st_size
        if size != self.num_bytes:
            raise DatasetError(f"{path}: expected {self.num_bytes} bytes, got {size}. Fetch it again.")
        self.advance(path, 0, size)
        if self._wrong:
            raise self._error()

    def close(self) -> None:
        """Unmap the files."""
        self._bytes = None
        self.ids = self.ids[:0].copy()

    def _read_header(self, path: Path) -> Vector:
        count = len(self.ids)
        dtype: Any = self._dtype
        with path.open("rb") as file:
            is_raw = file.read(len(NPY_MAGIC)) != NPY_MAGIC
        if is_raw and dtype is None:
            width = self.num_bytes // max(1, count * self.seq_len) if self.seq_len else 2
            dtype = {2: "<u2", 4: "<u4"}.get(width)
            if dtype is None:
                raise self._size_error(f"{self.num_bytes} bytes")
        vector = vector_in(path, self.num_bytes, dtype)
        if vector.kind not in ([self._dtype] if self._dtype is not None else [np.dtype("<u2"), np.dtype("<u4")]):
            raise DatasetError(
                f"shard {self.index}: expected tokens of {self._dtype or 'uint16 or uint32'}, got {vector.kind} "
                f"({path}). Set token_dtype to the type of the shards."
            )
        self.seq_len = self.seq_len or vector.count // count
        if vector.count != count * self.seq_len or not self.seq_len:
            raise self._size_error(f"{vector.count} tokens")
        return vector

    def _size_error(self, actual: str) -> DatasetError:
        count = len(self.ids)
        return DatasetError(
            f"shard {self.index}: expected {count * self.seq_len} tokens, {self.seq_len} for each of {count} ids "
            f"({self._ids_path}), got {actual}. One of the two is truncated, of another shard, or of another "
            "sequence_length; fetch both again, or set sequence_length."
        )

    def _check_blocks(self, blocks: list[range]) -> Iterator[dict[int, int]]:
        if len(blocks) < 2:
            return map(self._check_block, blocks)
        with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
            return iter(list(pool.map(self._check_block, blocks)))

    def _check_block(self, samples: range) -> dict[int, int]:
        """The wrong samples of a block, and the ids that their bytes have."""
        assert self.vector is not None and self._bytes is not None
        width = self.seq_len * self.vector.kind.itemsize
        first = self.vector.offset + samples.start * width
        data = self._bytes[first : first + len(samples) * width].data
        digests = (hashlib.blake2b(data[i : i + width], digest_size=8).digest() for i in range(0, len(data), width))
        ids = np.frombuffer(b"".join(digests), "<u8")
        wrong = np.flatnonzero(ids != self.ids[samples.start : samples.stop])
        return {samples.start + int(i): int(ids[i]) for i in wrong}

    def _error(self) -> IntegrityError:
        first, count = min(self._wrong), len(self._wrong)
        assert self.vector is not None
        reason = ""
        if int(self.ids[first]) == NO_SAMPLE:  # A known writer gave it to every sample of the second half.
            reason = "Its id is that of no bytes at all, a known fault of one writer. "
        return IntegrityError(
            f"shard {self.index}: expected each sample to have its id, got {count} of {len(self.ids)} that have not, "
            f"the first sample {first} at byte {self.vector.offset + first * self.seq_len * self.vector.kind.itemsize} "
            f"({self.path}). {reason}Training on it would use other data. Have the shard published again, or leave it "
            f"out: remap={{{self.index}: ANOTHER}}."
        )


def read_ids(path: Path) -> NDArray[np.uint64]:
    """The ids of a file, U64 [N], a view of the mapped file. Raises DatasetError if it has no ids."""
    memory = map_file(path)
    vector = vector_in(path, len(memory), "<u8")
    if vector.kind != np.dtype("<u8") or not vector.count:
        raise DatasetError(f"{path}: expected sample ids of uint64, got {vector.count} {vector.kind}. Fetch it again.")
    return memory[vector.offset :].view("<u8")
