"""Slices: SafeTensors files, written atomically and read as views of their memory map.

Slices are untrusted: a header is used only after its length, types, shapes and offsets were checked against the file.
Opening costs one small read and one mmap (about 50 µs) for any size; arrays are read-only views and stay valid while
referenced.
"""

import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from forebay.arrays import U8, U16, U32, U64, Array, DType
from forebay.base import Json
from forebay.dataset.chunks import MAX_CHUNK_BYTES, ChunkHasher, root_of
from forebay.errors import DatasetError, UsageError
from forebay.files import open_atomic
from forebay.maps import map_file

MAX_HEADER_BYTES = 100_000_000  # The bound of the reference implementation.
_PIECE = 1 << 20

# BF16 and the 8-bit floats have no NumPy type: they are read as their bits.
_CODES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F8_E5M2": "u1", "U16": "<u2", "I16": "<i2", "F16": "<f2",
    "BF16": "<u2", "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip
DTYPES: dict[str, DType] = {name: np.dtype(code) for name, code in _CODES.items()}
_NAME_OF = {dtype: name for name, dtype in DTYPES.items() if name not in ("F8_E4M3", "F8_E5M2", "BF16")}


@dataclass(frozen=True)
class Slice:
    """An open slice."""

    path: Path
    tensors: dict[str, Array]  # read-only views of the map, by name; never copied
    dtypes: dict[str, str]  # the container's own type names (`U16`, `BF16` …), by name

    @property
    def layout(self) -> str:
        """`tokens` if there are tensors `tokens` and `document_ends`, else `rows`."""
        return "tokens" if {"tokens", "document_ends"} <= self.tensors.keys() else "rows"

    @property
    def tokens(self) -> Array:
        """U16 or U32 [T]. Raises DatasetError if it is missing or has another type or shape."""
        return self._vector("tokens", ("U16", "U32"))

    @property
    def document_ends(self) -> U64:
        """U64 [D], exclusive ends within the slice. Raises DatasetError as `tokens` does."""
        return self._vector("document_ends", ("U64",))

    @property
    def num_rows(self) -> int:
        """The first dimension of all tensors. Raises DatasetError if they differ."""
        sizes = {array.shape[0] if array.ndim else -1 for array in self.tensors.values()}
        if len(sizes) != 1 or -1 in sizes:
            shapes = {name: array.shape for name, array in self.tensors.items()}
            raise DatasetError(f"{self.path}: expected tensors that share their first dimension, got {shapes}.")
        return int(sizes.pop())

    def _vector(self, name: str, kinds: tuple[str, ...]) -> Array:
        array = self.tensors.get(name)
        if array is None or array.ndim != 1 or self.dtypes[name] not in kinds:
            raise DatasetError(
                f"{self.path}: expected a tensor {name!r} of {' or '.join(kinds)} [n], got "
                f"{'none' if array is None else f'{self.dtypes[name]} {list(array.shape)}'}."
            )
        return array


def open_slice(path: Path | str) -> Slice:
    """Map a SafeTensors file. Only the header is read, and checked against the file's size.

    Raises:
        DatasetError: If the file is missing or not valid SafeTensors.
    """
    path = Path(os.fspath(path))  # A path of a file elsewhere refuses.
    try:
        with path.open("rb") as file:
            memory = map_file(file)
    except OSError as error:
        raise DatasetError(
            f"{path}: cannot open slice: {error.strerror or error}. Fetch or prepare it again."
        ) from error
    return view_slice(memory, path)


def view_slice(memory: U8, path: Path) -> Slice:
    """The slice in these bytes; only its header is read. Raises DatasetError if it is not valid SafeTensors."""
    try:
        entries, base = _read_header(memory)
    except _HeaderError as error:
        raise DatasetError(f"{path}: {error}. The file is no slice or is damaged; fetch it again.") from error
    tensors = {
        name: memory[base + start : base + stop].view(DTYPES[kind]).reshape(shape)
        for name, kind, shape, start, stop in entries
    }
    return Slice(path, tensors, {name: kind for name, kind, *_ in entries})


_Entry = tuple[str, str, tuple[int, ...], int, int]  # Name, type, shape, and bytes [start, stop) of the data.


class _HeaderError(ValueError):
    """An invalid header; `view_slice` adds the path."""


def _read_header(memory: U8) -> tuple[list[_Entry], int]:
    """The tensors of a SafeTensors file, and where their data begin. Raises _HeaderError."""
    size = len(memory)
    if size < 8:
        raise _HeaderError(f"expected at least 8 bytes of SafeTensors, got {size}")
    base = 8 + int.from_bytes(memory[:8].tobytes(), "little")
    if base > min(MAX_HEADER_BYTES, size - 8) + 8:
        raise _HeaderError(f"expected a header of at most {min(MAX_HEADER_BYTES, size - 8)} bytes, got {base - 8}")
    raw = memory[8:base].tobytes()
    if raw[:1] != b"{":
        raise _HeaderError(f"expected a header that begins with '{{', got {raw[:1]!r}")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except _HeaderError:
        raise
    except (ValueError, RecursionError) as error:
        raise _HeaderError(f"expected a header of JSON, got {error}") from error
    return _check_header(header, size - base), base


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise _HeaderError("expected each key of the header once, got one twice")
    return plain


def _check_header(header: Json, body_bytes: int) -> list[_Entry]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _HeaderError("expected __metadata__ from strings to strings")
    entries = sorted((_check_entry(name, entry) for name, entry in header.items()), key=lambda e: (e[3], e[4]))
    reached = 0
    for name, _, _, first, last in entries:
        if first != reached:
            raise _HeaderError(f"expected tensor {name!r} to begin at byte {reached} of the data, got {first}")
        reached = last
    if reached != body_bytes:
        raise _HeaderError(f"expected {reached} bytes of data, as the header says, got {body_bytes}")
    return entries


def _check_entry(name: str, entry: Any) -> _Entry:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _HeaderError(f"expected dtype, shape and data_offsets of tensor {name!r}")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise _HeaderError(f"expected a dtype of tensor {name!r} in {sorted(DTYPES)}, got {kind!r}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            raise _HeaderError(f"expected {what} of tensor {name!r} as whole numbers, got {str(numbers)[:100]}")
    if len(offsets) != 2 or len(shape) > 32:
        raise _HeaderError(f"expected two offsets and at most 32 dimensions of tensor {name!r}")
    expected_bytes = math.prod(shape) * DTYPES[kind].itemsize
    if offsets[1] - offsets[0] != expected_bytes:
        raise _HeaderError(f"expected {expected_bytes} bytes of tensor {name!r}, got {offsets[1] - offsets[0]}")
    return name, kind, tuple(shape), offsets[0], offsets[1]


TOKEN_HEADER_BYTES = 256  # An upper bound of the bytes of a token slice beside tokens and document ends (8 bytes each).


class WrittenSlice(NamedTuple):
    """The size of a slice's file, its id, in hex, and the leaves of its tree (`chunks`)."""

    size: int
    sha256: str
    leaves: bytes


def write_token_slice(
    path: Path | BinaryIO, tokens: U16 | U32, document_ends: U64,
    chunk_bytes: int = MAX_CHUNK_BYTES,
) -> WrittenSlice:  # fmt: skip
    """Write a slice of layout `tokens`: to a path atomically, or to an open file.

    `tokens` are U16 or U32 [T]; `document_ends` U64 [D], exclusive, rising, none above T.
    """
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        raise UsageError(f"tokens of a slice: expected uint16 or uint32 [T], got {tokens.dtype} {tokens.shape}")
    problem = check_document_ends(document_ends, len(tokens))
    if problem:
        raise UsageError(f"document_ends of a slice: {problem}")
    return _write(path, {"document_ends": document_ends, "tokens": tokens}, chunk_bytes)


def check_document_ends(document_ends: Array, num_tokens: int) -> str:
    """The problem with the document ends of a slice of `num_tokens`; empty if they are valid."""
    if document_ends.ndim != 1 or document_ends.dtype != np.uint64:
        return f"expected uint64 [D], got {document_ends.dtype} {document_ends.shape}"
    last = int(document_ends[-1]) if len(document_ends) else 0
    if last > num_tokens or bool((document_ends[1:] < document_ends[:-1]).any()):
        return f"expected rising ends of at most {num_tokens}, got {last} as the last or a falling one"
    return ""


def write_rows_slice(
    path: Path | BinaryIO, tensors: Mapping[str, Array], dtypes: Mapping[str, str] | None = None,
    chunk_bytes: int = MAX_CHUNK_BYTES,
) -> WrittenSlice:  # fmt: skip
    """Write a slice of layout `rows`: to a path atomically, or to an open file.

    All tensors share their first dimension N >= 0; any NumPy type with a SafeTensors name. `dtypes` are the
    container's type names of tensors whose arrays hold only bits: `BF16` for uint16.
    """
    shapes = {name: array.shape for name, array in tensors.items()}
    if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values() or "__metadata__" in shapes:
        raise UsageError(f"rows slice: expected tensors that share their first dimension, got {shapes}")
    return _write(path, tensors, chunk_bytes, dtypes)


def _write(
    path: Path | BinaryIO, tensors: Mapping[str, Array], chunk_bytes: int,
    dtypes: Mapping[str, str] | None = None,
) -> WrittenSlice:  # fmt: skip
    # Wide types first, then by name, and a header padded to 8 bytes: as the reference does, so all is aligned.
    header: Json = {}
    arrays, offset = [], 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        array = np.ascontiguousarray(tensors[name])
        kind = (dtypes or {}).get(name) or _NAME_OF.get(array.dtype.newbyteorder("<"))
        if kind is None or DTYPES.get(kind) != array.dtype.newbyteorder("<"):
            raise UsageError(
                f"tensor {name!r} of a slice: expected a type in {sorted(_NAME_OF.values())}, got {array.dtype}"
            )
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        arrays.append(array)
        offset += array.nbytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    hasher = ChunkHasher(chunk_bytes)

    def pieces_of() -> Iterator[memoryview | bytes]:
        pieces: list[Any] = [len(raw).to_bytes(8, "little") + raw]
        pieces += [memoryview(array.reshape(-1).view(np.uint8).data) for array in arrays if array.nbytes]
        for piece in pieces:
            for start in range(0, len(piece), _PIECE):
                part = piece[start : start + _PIECE]
                hasher.update(part)
                yield part

    with open_atomic(path) if isinstance(path, Path) else nullcontext(path) as file:
        file.writelines(pieces_of())
    leaves = hasher.leaves()
    return WrittenSlice(hasher.num_bytes, root_of(leaves), leaves)


def hash_file(path: Path | str | BinaryIO) -> str:
    """The sha256 of a file, or of an open one from its start, in hex, read by pieces. Raises OSError."""
    with Path(path).open("rb") if isinstance(path, Path | str) else nullcontext(path) as file:
        file.seek(0)
        return hashlib.file_digest(cast("io.BufferedReader", file), "sha256").hexdigest()


def next_cut(document_ends: Array, start: int, total: int, itemsize: int, slice_bytes: int) -> tuple[int, int]:
    """Where the slice that begins at token `start` stops: as late as header, tokens and ends fit in `slice_bytes`.

    And the index after the last document end in (start, stop]. `document_ends`: integers [D], the
    exclusive ends of documents after `start` in the stream of `total` tokens, rising.
    """
    budget = slice_bytes - TOKEN_HEADER_BYTES
    low, high = start + 1, min(total, start + budget // itemsize)
    # All ends that can matter, so that each probe searches a short run.
    near = document_ends[: budget // 8 + 1]
    while low < high:
        middle = (low + high + 1) // 2
        inside = int(np.searchsorted(near, near.dtype.type(middle), "right"))
        if (middle - start) * itemsize + 8 * inside <= budget:
            low = middle
        else:
            high = middle - 1
    return low, int(np.searchsorted(near, near.dtype.type(low), "right"))
