"""The bytes of one MDS shard: where its samples and their tokens are, raw or compressed.

Hides: the layout (see `mds`). Every offset and size is checked against the file before anything is read by it.
"""

import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import DatasetError
from forebay.formats.compression import bounded_unpack, check_unpacked, one_large
from forebay.formats.foreign import Bytes8, head_of, map_file, size_of

_VALUE_CODES = {8: "u1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
I64 = NDArray[np.int64]
_MOST_SAMPLES = 1 << 20  # Of a compressed shard of few bytes.


@dataclass(frozen=True)
class Stored:
    """A shard's file: raw or compressed."""

    path: Path
    num_bytes: int
    hashes: dict[str, str]


@dataclass(frozen=True)
class Column:
    """Where the tokens stand in a sample.

    Attributes:
        name, encoding: As the writer's.
        kind: Type of a token; None where each sample says its own.
        length: Tokens in a sample, where fixed.
        index: Among all columns.
        sizes: Bytes of each column, None where each sample says it.
    """

    name: str
    encoding: str
    kind: np.dtype[Any] | None
    length: int | None
    index: int
    sizes: tuple[int | None, ...]

    @property
    def has_header(self) -> bool:
        """Whether each value begins with its type or shape."""
        return self.encoding.startswith("ndarray") and self.length is None


@dataclass(frozen=True)
class Shard:
    """One entry of the index, checked."""

    samples: int
    raw: Stored
    zipped: Stored | None
    compression: str
    column: Column


def decompress(shard: Shard) -> bytes:
    """The raw bytes of a compressed shard, of exactly the index's size.

    Raises:
        DatasetError: If they are damaged, or of another size.
    """
    assert shard.zipped is not None
    check_unpacked(shard.zipped.path, shard.zipped.num_bytes, shard.raw.num_bytes + 1)
    if shard.samples > max(_MOST_SAMPLES, shard.zipped.num_bytes):  # Empty ones: each costs memory here.
        raise DatasetError(f"{shard.zipped.path}: expected at most {_MOST_SAMPLES} samples, got {shard.samples}.")
    data = head_of(shard.zipped.path, shard.zipped.num_bytes + 1)
    if len(data) != shard.zipped.num_bytes:
        raise DatasetError(
            f"{shard.zipped.path}: expected {shard.zipped.num_bytes} bytes, got {len(data)}. Fetch it again."
        )
    raw = _unpack(shard, data, shard.raw.num_bytes + 1)
    if len(raw) != shard.raw.num_bytes:
        raise DatasetError(
            f"{shard.zipped.path}: expected {shard.raw.num_bytes} bytes once decompressed, got {len(raw)} or more. "
            "Fetch it again."
        )
    return raw


def check_hashes(stored: Stored, hash_all: bool = False) -> None:
    """Compare a file with the hashes that the index has of it; with the first that can be computed unless `hash_all`.

    Raises:
        DatasetError: If one differs.
    """
    for name, wanted in stored.hashes.items():
        digest = _hasher(name)
        if digest is None:
            continue
        try:
            with stored.path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
        except OSError as error:
            raise DatasetError(f"{stored.path}: cannot be read: {error.strerror or error}.") from error
        if digest.hexdigest() != wanted:
            raise DatasetError(f"{stored.path}: expected {name} {wanted}, got {digest.hexdigest()}. Fetch it again.")
        if not hash_all:
            return


def can_hash(name: str) -> bool:
    """Whether a hash of this name can be computed here."""
    return _hasher(name) is not None


def _hasher(name: str) -> Any:
    if name in hashlib.algorithms_available and not name.startswith("shake"):
        return hashlib.new(name)
    if name in ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"):
        try:
            return getattr(importlib.import_module("xxhash"), name)()
        except ImportError:
            return None
    return None


def file_of(shard: Shard) -> Stored | None:
    if shard.raw.path.is_file():
        return shard.raw
    return shard.zipped if shard.zipped is not None and shard.zipped.path.is_file() else None


def count_tokens(shard: Shard) -> tuple[np.dtype[Any], int]:
    """The type of a shard's tokens and how many they are, from its offsets where these tell, else from its samples."""
    column, stored = shard.column, file_of(shard)
    if stored is None:
        raise DatasetError(f"{shard.raw.path}: expected it, or its compressed form, got neither. Fetch it again.")
    if size_of(stored.path) != stored.num_bytes:
        raise DatasetError(
            f"{stored.path}: expected {stored.num_bytes} bytes, got {size_of(stored.path)}. Fetch it again."
        )
    if column.kind is not None and column.length is not None:
        return column.kind, shard.samples * column.length
    open_sizes = [i for i, size in enumerate(column.sizes) if size is None]
    if column.kind is None or open_sizes != [column.index]:
        with one_large(0 if stored is shard.raw else shard.raw.num_bytes):
            memory = map_file(stored.path) if stored is shard.raw else np.frombuffer(decompress(shard), np.uint8)
            offsets = offsets_of(shard, memory.data, len(memory))
            kind = column.kind or _kind_said(shard, memory, offsets)
            begins, ends = places(shard, memory, offsets, kind)
            return kind, int((ends - begins).sum()) // kind.itemsize
    head_bytes = 4 * (shard.samples + 2)
    if stored is shard.raw:
        head = head_of(stored.path, head_bytes)
    else:
        head = _unpack(shard, head_of(stored.path, stored.num_bytes), head_bytes)
    offsets = offsets_of(shard, head, shard.raw.num_bytes)
    values = np.diff(offsets) - 4 - sum(size or 0 for size in column.sizes)
    if column.has_header:
        values = _without_header(values, column.kind.itemsize)
    if len(values) and (int(values.min()) < 0 or bool((values % column.kind.itemsize).any())):
        raise DatasetError(f"{stored.path}: expected whole tokens {column.kind} in every sample, got others.")
    return column.kind, int(values.sum()) // column.kind.itemsize


def _without_header(values: I64, width: int) -> I64:
    """Bytes of the values of one-dimensional arrays, given those with the shape before them; -1 where none fits.

    The byte of dimensions, and 1, 2, 4 or 8 of the size, the fewest that hold it: so one of the four fits.
    """
    found = np.full(len(values), -1, np.int64)
    for size_bytes in (1, 2, 4, 8):
        left = values - 1 - size_bytes
        count = left // width
        fits = (left >= 0) & (left % width == 0) & (count < 1 << min(8 * size_bytes, 62))
        fits &= (count >= 1 << 4 * size_bytes) | (size_bytes == 1)
        found[fits & (found < 0)] = left[fits & (found < 0)]
    return found


def offsets_of(shard: Shard, head: Any, num_bytes: int) -> I64:
    """Where each sample begins, and the end: int64 [n + 1], checked against the shard's size."""
    count = shard.samples
    if len(head) < 4 * (count + 2):
        raise DatasetError(
            f"{shard.raw.path}: expected offsets of {count} samples, got {len(head)} bytes. Fetch it again."
        )
    numbers = np.frombuffer(head, "<u4", count + 2).astype(np.int64)
    offsets = numbers[1:]
    if numbers[0] != count or offsets[0] < 4 * (count + 2) or offsets[-1] != num_bytes or (np.diff(offsets) < 0).any():
        raise DatasetError(
            f"{shard.raw.path}: expected {count} samples within its {num_bytes} bytes, got {numbers[0]} from byte "
            f"{offsets[0]} to {offsets[-1]}. It is damaged; fetch it again."
        )
    return offsets


def _values(shard: Shard, memory: Bytes8, offsets: I64) -> tuple[I64, I64]:
    """Where the token column of each sample begins and ends, both within the sample."""
    column = shard.column
    open_sizes = [i for i, size in enumerate(column.sizes) if size is None]
    begins, sizes = offsets[:-1] + 4 * len(open_sizes), np.zeros(len(offsets) - 1, np.int64)
    for i in range(column.index + 1):
        begins = begins + sizes
        fixed = column.sizes[i]
        if fixed is not None:
            sizes = np.full(len(sizes), fixed, np.int64)
        else:
            sizes = _numbers(shard, memory, offsets[:-1] + 4 * open_sizes.index(i), 4, offsets[1:])
    ends = begins + sizes
    if (ends > offsets[1:]).any():
        raise DatasetError(
            f"{shard.raw.path}: expected column {column.name} inside its sample, got one beyond. Fetch it again."
        )
    return begins, ends


def places(shard: Shard, memory: Bytes8, offsets: I64, kind: np.dtype[Any]) -> tuple[I64, I64]:
    """Where the tokens of each sample begin and end."""
    column = shard.column
    begins, ends = _values(shard, memory, offsets)
    if column.encoding.startswith("ndarray"):
        if column.kind is None:
            codes = _numbers(shard, memory, begins, 1, ends)
            if any(np.dtype(_VALUE_CODES.get(code, "?")) != kind for code in np.unique(codes).tolist()):
                raise DatasetError(f"{shard.raw.path}: expected tokens {kind} in every sample, got another type.")
            begins = begins + 1
        if column.length is None:
            shapes = _numbers(shard, memory, begins, 1, ends)
            if (shapes >> 2 != 1).any():
                raise DatasetError(
                    f"{shard.raw.path}: expected vectors of tokens, got {int(shapes.max()) >> 2} dimensions."
                )
            begins = begins + 1 + (1 << (shapes & 3))
    if (begins > ends).any() or ((ends - begins) % kind.itemsize).any():
        raise DatasetError(f"{shard.raw.path}: expected whole tokens {kind} in every sample, got others.")
    return begins, ends


def _kind_said(shard: Shard, memory: Bytes8, offsets: I64) -> np.dtype[Any]:
    """The type that the first sample says; every other must say the same."""
    begins, ends = _values(shard, memory, offsets)
    if not len(begins):
        return np.dtype("<u2")
    code = int(_numbers(shard, memory, begins[:1], 1, ends[:1])[0])
    if code not in _VALUE_CODES:
        raise DatasetError(f"{shard.raw.path}: expected tokens of an integer type, got type {code} of ndarray.")
    return np.dtype(_VALUE_CODES[code])


def _numbers(shard: Shard, memory: Bytes8, at: I64, width: int, ends: I64) -> I64:
    """The unsigned number of `width` bytes at each place, which must end by `ends`."""
    if (at + width > ends).any():
        raise DatasetError(f"{shard.raw.path}: expected {width} bytes more in a sample, got its end. Fetch it again.")
    return np.asarray(sum(memory[at + k].astype(np.int64) << 8 * k for k in range(width)))


def _unpack(shard: Shard, data: bytes, most: int) -> bytes:
    """At most `most` bytes of a compressed shard, from its start."""
    assert shard.zipped is not None
    return bounded_unpack(data, shard.compression, most, shard.zipped.path)
