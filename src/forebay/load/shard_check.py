"""Every sample of a shard against its id, while the shard comes, in threads.

Hides: that bytes arrive piece by piece, and which sample is right so far. What is wrong is asked for again, as
whole pieces; what is wrong in the same way three times is wrong at the origin, what differs was damaged on its way.

Cost: 1 GB/s a processor for samples of 4 KiB (8-byte BLAKE2b, without the interpreter's lock); the ids stay a map.
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
_TRIES = 2  # after the first, with the same wrong bytes
_MOST_TRIES = 10
_LEAST_SAMPLES = 64  # none right of so many: ids of another shard
LEAST_HEAD = 12 << 10  # bytes that hold any header


class SampleCheck:
    """The judge of one shard: a `forebay.storage.part_file.Check` whose `piece_bytes` are fetched again at once.

    Args:
        index: Of the shard, for messages.
        ids: The whole file of ids, raw u64 or .npy.
        num_bytes: Of the tokens' file.
        seq_len: Tokens of a sample; 0: as many as the sizes tell. The ids are of bytes, so that these judge as well.
        kind: Type of the tokens, checked against the header; None: as the header says, or as the sizes tell.
    """

    def __init__(self, index: int, ids: Path, num_bytes: int, seq_len: int, kind: np.dtype[Any] | None = None) -> None:
        self.index = index
        self.seq_len = seq_len
        self.ids = read_ids(ids)  # U64 [N], a view of the file's map.
        self.num_bytes = num_bytes
        self.piece_bytes = PIECE_BYTES
        self.path: Path | None = None  # Where the tokens lie, once some do; `vector` says how.
        self.vector: Vector | None = None
        self._kind = kind
        self._ids_path = ids
        self._bytes: NDArray[np.uint8] | None = None
        self._next = 0
        self._bad: dict[int, int] = {}  # sample: the id that its bytes have
        self._was: dict[int, int] = {}  # what was bad before, and how often it was the same
        self._same = 0
        self._again: list[tuple[int, int]] = []
        self._tries = 0

    def advance(self, path: Path, start: int, stop: int) -> None:
        """See Check."""
        if stop < min(self.num_bytes, LEAST_HEAD):
            return
        if self.vector is None:
            self.path, self.vector = path, self._header(path)
            self._bytes = map_file(path)[: self.num_bytes]
        width = self.seq_len * self.vector.kind.itemsize
        upto = max(0, stop - self.vector.offset) // width
        todo = [range(a, min(b, upto)) for a, b in self._again if a < upto]
        self._again = [(max(a, upto), b) for a, b in self._again if b > upto]
        if self._next < upto:
            todo.append(range(self._next, upto))
            self._next = upto
        step = max(1, _BLOCK_BYTES // width)
        blocks = [range(r.start + k, min(r.start + k + step, r.stop)) for r in todo for k in range(0, len(r), step)]
        for bad in self._map(blocks):
            self._bad |= bad
        if len(self._bad) == self._next >= min(_LEAST_SAMPLES, len(self.ids)):
            raise self._error()  # No damage on the way is like this.

    def wrong(self) -> list[tuple[int, int]]:
        """See Check. Raises IntegrityError where the same wrong bytes come again and again."""
        if not self._bad:
            return []
        self._same = self._same + 1 if self._bad == self._was else 0
        self._was = self._bad
        if self._tries == _MOST_TRIES or self._same == _TRIES:
            raise self._error()
        self._tries += 1
        assert self.vector is not None
        width, offset = self.seq_len * self.vector.kind.itemsize, self.vector.offset
        starts = np.array(sorted(self._bad), np.int64) * width + offset
        size = self.piece_bytes
        pieces = sorted({*(starts // size).tolist(), *((starts + width - 1) // size).tolist()})
        ranges = [(p * size, min((p + 1) * size, self.num_bytes)) for p in pieces]
        self._bad = {}
        self._again = [(max(0, a - offset) // width, min(len(self.ids), -(-(b - offset) // width))) for a, b in ranges]
        return ranges

    def finish(self, path: Path) -> None:
        """Judge a whole local file. Raises IntegrityError or DatasetError."""
        size = path.stat().st_size
        if size != self.num_bytes:
            raise DatasetError(f"{path}: expected {self.num_bytes} bytes, got {size}. Fetch it again.")
        self.advance(path, 0, size)
        if self._bad:
            raise self._error()

    def close(self) -> None:
        """All is judged: drop the maps, however long the transfer that it was made for is remembered."""
        self._bytes = None
        self.ids = self.ids[:0].copy()

    def _header(self, path: Path) -> Vector:
        count = len(self.ids)
        kind: Any = self._kind
        with path.open("rb") as file:
            raw = file.read(len(NPY_MAGIC)) != NPY_MAGIC
        if raw and kind is None:
            widths = {2: "<u2", 4: "<u4"}
            kind = widths.get(self.num_bytes // max(1, count * self.seq_len) if self.seq_len else 2)
        if raw and kind is None:
            raise self._misfit(f"{self.num_bytes} bytes")
        vector = vector_in(path, self.num_bytes, kind)
        if vector.kind not in ([self._kind] if self._kind is not None else [np.dtype("<u2"), np.dtype("<u4")]):
            raise DatasetError(
                f"shard {self.index}: expected tokens of {self._kind or 'uint16 or uint32'}, got {vector.kind} "
                f"({path}). Every sample would be another. Set token_dtype to what the shards hold."
            )
        self.seq_len = self.seq_len or vector.count // count
        if vector.count != count * self.seq_len or not self.seq_len:
            raise self._misfit(f"{vector.count} tokens")
        return vector

    def _misfit(self, got: str) -> DatasetError:
        count = len(self.ids)
        return DatasetError(
            f"shard {self.index}: expected {count * self.seq_len} tokens, {self.seq_len} for each of {count} ids "
            f"({self._ids_path}), got {got}. One of the two is truncated, of another shard, or of another "
            "sequence_length; fetch both again, or set sequence_length."
        )

    def _map(self, blocks: list[range]) -> Iterator[dict[int, int]]:
        if len(blocks) < 2:
            return iter([self._check(block) for block in blocks])
        with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
            return iter(list(pool.map(self._check, blocks)))

    def _check(self, samples: range) -> dict[int, int]:
        """Which of these are wrong, and the ids that they have."""
        assert self.vector is not None and self._bytes is not None
        width = self.seq_len * self.vector.kind.itemsize
        first = self.vector.offset + samples.start * width
        data = self._bytes[first : first + len(samples) * width].data
        got = b"".join(
            hashlib.blake2b(data[at : at + width], digest_size=8).digest() for at in range(0, len(data), width)
        )
        found = np.frombuffer(got, "<u8")
        differ = np.flatnonzero(found != self.ids[samples.start : samples.stop])
        return {samples.start + int(i): int(found[i]) for i in differ}

    def _error(self) -> IntegrityError:
        first, count = min(self._bad), len(self._bad)
        assert self.vector is not None
        why = ""
        if int(self.ids[first]) == NO_SAMPLE:  # One writer gave it to every sample of the second half.
            why = "Its id is that of no bytes at all, a known fault of one writer. "
        return IntegrityError(
            f"shard {self.index}: expected each sample to have its id, got {count} of {len(self.ids)} that have not, "
            f"the first sample {first} at byte {self.vector.offset + first * self.seq_len * self.vector.kind.itemsize} "
            f"({self.path}). {why}Whoever trained on it would train on other data. Have the shard published again, "
            f"or leave it out: remap={{{self.index}: ANOTHER}}."
        )


def read_ids(path: Path) -> NDArray[np.uint64]:
    """The ids of a file, U64 [N], a view of its map."""
    memory = map_file(path)
    vector = vector_in(path, len(memory), "<u8")
    if vector.kind != np.dtype("<u8") or not vector.count:
        raise DatasetError(f"{path}: expected sample ids of uint64, got {vector.count} {vector.kind}. Fetch it again.")
    return memory[vector.offset :].view("<u8")
