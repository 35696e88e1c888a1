"""Samples behind a table of offsets, which MDS calls shards and LitData chunks, and the index.json that lists them.

A block, little endian: u32 n samples, u32 offsets [n + 1] from its first byte, perhaps settings, the samples. A sample:
u32 size of each column that has no fixed size, then the columns.

Every offset and size is checked against the block before it is used, and an index cannot name files outside its
directory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from forebay.errors import DatasetError
from forebay.formats.external import Bytes8, file_size, read_head
from forebay.storage.compression import bounded_unpack

INDEX_FILE = "index.json"
MAX_BLOCK_BYTES = (1 << 32) - 1  # Offsets are u32.
_MAX_INDEX_BYTES = 1 << 30
_TAIL_BYTES = 1 << 16
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """The samples of a file, decompressed: sample i is `memory[offsets[i]:offsets[i + 1]]`."""

    path: Path
    memory: Bytes8
    offsets: I64

    def numbers(self, positions: I64, width: int, stops: I64, order: str = "<") -> I64:
        """Return the unsigned number of `width` bytes at each position, which must end by `stops`."""
        if (positions + width > stops).any():
            raise damaged(self.path, f"{width} bytes more in a sample", "its end")
        shifts = range(width) if order == "<" else range(width - 1, -1, -1)
        return np.asarray(
            sum(self.memory[positions + k].astype(np.int64) << 8 * shift for k, shift in enumerate(shifts))
        )

    def column(self, index: int, sizes: Sequence[int | None], name: str) -> tuple[I64, I64]:
        """Return where a column of each sample begins and ends; a size of None is stored in each sample."""
        variable = [i for i, size in enumerate(sizes) if size is None]
        begins, limits = self.offsets[:-1] + 4 * len(variable), self.offsets[1:]
        stops = begins
        for i in range(index + 1):
            fixed, begins = sizes[i], stops
            positions = self.offsets[:-1] + 4 * (variable.index(i) if fixed is None else 0)
            stops = begins + (fixed if fixed is not None else self.numbers(positions, 4, limits))
        if (stops > limits).any():
            raise damaged(self.path, f"column {name} inside its sample", "one beyond")
        return begins, stops

    def values(self, begins: I64, stops: I64) -> Bytes8:
        """Return the bytes from each `begins` to its `stops`: a view where they follow one another, else a copy."""
        if not len(begins):
            return self.memory[:0]
        if (begins[1:] == stops[:-1]).all():
            return self.memory[int(begins[0]) : int(stops[-1])]
        return np.concatenate([self.memory[a:b] for a, b in zip(begins.tolist(), stops.tolist())])


def read_offsets(path: Path, head: Any, samples: int, num_bytes: int, *, has_settings: bool = False) -> I64:
    """Return where each sample of a block begins, and the end: int64 [n + 1]."""
    begin = 4 * (samples + 2)
    if len(head) < begin:
        raise damaged(path, f"offsets of {samples} items", f"{len(head)} bytes")
    numbers = np.frombuffer(head, "<u4", samples + 2).astype(np.int64)
    if numbers[0] != samples:
        raise damaged(path, f"{samples} items, as its index says", str(numbers[0]))
    return check_offsets(path, numbers[1:], max(begin, int(numbers[1])) if has_settings else begin, num_bytes)


def check_offsets(path: Path, offsets: I64, begin: int, stop: int) -> I64:
    """Return offsets that rise from `begin` to `stop`. Raises DatasetError if they do not."""
    if offsets[0] != begin or offsets[-1] != stop or (np.diff(offsets) < 0).any():
        raise damaged(path, f"items from byte {begin} to {stop}", f"{offsets[0]} to {offsets[-1]}")
    return offsets


def inflate(path: Path, data: Any, compression: str, expected: int) -> bytes:
    """Return data decompressed: exactly `wanted` bytes. Raises DatasetError."""
    raw = bounded_unpack(data, compression, expected + 1, path)
    if len(raw) != expected:
        raise damaged(path, f"{expected} bytes once decompressed", f"{len(raw)} or more")
    return raw


def damaged(path: Path, expected: str, got: str) -> DatasetError:
    """Return the error for a block that contradicts itself or its index."""
    return DatasetError(f"{path}: expected {expected}, got {got[:200]}. It is damaged; fetch it again.")


def is_index(folder: Path, *names: bytes) -> bool:
    """Return whether a directory's index.json may have these keys, by its first 4 KiB and last 64."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return False
    head = read_head(index, 4096).lstrip()
    some = head + read_head(index, _TAIL_BYTES, max(0, file_size(index) - _TAIL_BYTES))
    return head[:1] == b"{" and all(name in some for name in names)


def read_index(folder: Path) -> Any:
    """Return the object in index.json. Raises DatasetError if it is no JSON object."""
    path = folder / INDEX_FILE
    if file_size(path) > _MAX_INDEX_BYTES:
        raise DatasetError(f"{path}: expected at most {_MAX_INDEX_BYTES} bytes, got {file_size(path)}.")
    try:
        index = orjson.loads(read_head(path, _MAX_INDEX_BYTES))
    except ValueError as error:
        raise DatasetError(f"{path}: expected JSON, got {error}. Fetch it again.") from error
    if not isinstance(index, dict):
        raise DatasetError(f"{path}: expected an index, got {str(index)[:100]}. Fetch it again.")
    return index


def path_inside(folder: Path, name: object) -> Path | None:
    """Return the file of this name below a directory; None if the name leads elsewhere."""
    if not isinstance(name, str) or "\\" in name or not name.isprintable():
        return None
    parts = name.split("/")
    return None if any(part in ("", ".", "..") for part in parts) else folder.joinpath(*parts)


def is_size(value: object, limit: int = MAX_BLOCK_BYTES) -> bool:
    """Return whether a value of an index is an integer from 0 to `limit`."""
    return type(value) is int and 0 <= value <= limit
