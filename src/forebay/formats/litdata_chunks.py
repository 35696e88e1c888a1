"""The bytes of one LitData chunk: where its items and their tokens are, raw or compressed.

Hides: the layout (see `litdata`). Every offset and size is checked against the file before anything is read by it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import zstandard
from numpy.typing import NDArray

from forebay.errors import DatasetError
from forebay.formats.compression import bounded_unpack, check_unpacked, max_unpacked
from forebay.formats.foreign import Bytes8

I64 = NDArray[np.int64]

FRAMED_MAGIC = b"LDFZ01\x00\x00"
_FOOTER_MAGIC = b"LDARW01\x00"
_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("at", "<u8"), ("bytes", "<u4"), ("raw_bytes", "<u4")])
_NUMPY = {0: "i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "u1", 5: "<u2", 6: "<u4", 7: "<u8"}
_TORCH = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}


@dataclass(frozen=True)
class Layout:
    """How an item is made of leaves, and which of them is tokens.

    Attributes:
        column: The leaf's name; empty where an item is nothing else.
        leaf: Its index.
        formats: Of all leaves, as the writer names them.
        has_sizes: Whether each item begins with the sizes of its leaves.
    """

    column: str
    leaf: int
    formats: tuple[str, ...]
    has_sizes: bool

    @property
    def kind(self) -> np.dtype[Any] | None:
        """Type of a token; None where each item says its own."""
        return kind_of(self.formats[self.leaf])


@dataclass(frozen=True)
class Chunk:
    """One entry of the index.

    Attributes:
        path: The file.
        num_bytes: Of the chunk, decompressed where `wrap` is `chunk`.
        items: In it.
        num_tokens: Where the index says.
        wrap: What is compressed: nothing (empty), the whole `chunk`, frames of items (`batch`), or each (`sample`).
    """

    path: Path
    num_bytes: int
    items: int
    num_tokens: int | None
    wrap: str


@dataclass(frozen=True)
class Body:
    """A chunk's items, decompressed: item i is `memory[offsets[i]:offsets[i + 1]]`."""

    memory: Bytes8
    offsets: I64


def is_tokens(form: str) -> bool:
    """Whether a leaf of this format may be tokens."""
    name = form.partition(":")[0]
    return name in ("numpy", "tensor", "json") or kind_of(form) is not None


def kind_of(form: str) -> np.dtype[Any] | None:
    name, _, code = form.partition(":")
    table = {"no_header_numpy": _NUMPY, "no_header_tensor": _TORCH}.get(name, {})
    return np.dtype(table[int(code)]) if code.isdigit() and int(code) in table else None


def unwrap(chunk: Chunk, memory: Bytes8) -> Bytes8:
    """The chunk's bytes as they were before the whole was compressed. Raises DatasetError."""
    if chunk.wrap != "chunk":
        return memory
    raw = _inflate(chunk, memory, chunk.num_bytes)
    return np.frombuffer(raw, np.uint8)


def body_of(chunk: Chunk, memory: Bytes8) -> Body:
    """Its items, given its bytes.

    Raises:
        DatasetError: If a count, offset or size does not fit the file.
    """
    if chunk.wrap == "batch":
        return _framed(chunk, memory)
    begin = 4 * (chunk.items + 2)
    if len(memory) < begin:
        raise _bad(chunk, f"offsets of {chunk.items} items", f"{len(memory)} bytes")
    head = memory[:begin].view("<u4").astype(np.int64)
    if head[0] != chunk.items:
        raise _bad(chunk, f"{chunk.items} items, as its index says", str(head[0]))
    offsets = _check_offsets(chunk, head[1:], begin, len(memory))
    if chunk.wrap != "sample":
        return Body(memory, offsets)
    pieces = _inflate_items(chunk, memory, offsets)
    whole = np.frombuffer(b"".join(pieces), np.uint8)
    return Body(whole, np.cumsum([0, *map(len, pieces)], dtype=np.int64))


def places(chunk: Chunk, layout: Layout, body: Body) -> tuple[np.dtype[Any], I64, I64]:
    """The type of the tokens, and where those of each item begin and end.

    Raises:
        DatasetError: If a leaf reaches beyond its item, is no vector of integers, or its type differs.
    """
    begins, ends = body.offsets[:-1], body.offsets[1:]
    if layout.has_sizes:
        leaves = len(layout.formats)
        sizes = [_numbers(chunk, body, begins + 4 * k, ends) for k in range(leaves)]
        if (begins + 4 * leaves + sum(sizes) != ends).any():
            raise _bad(chunk, "items as large as their leaves", "others")
        begins = begins + 4 * leaves + sum(sizes[: layout.leaf])
        ends = begins + sizes[layout.leaf]
    name = layout.formats[layout.leaf].partition(":")[0]
    kind = layout.kind
    if kind is None:
        if name == "json":
            kind, begins = _list_of_integers(chunk, body, begins, ends)
        else:
            kind, begins = _without_header(chunk, body, begins, ends, name)
    if ((ends - begins) % kind.itemsize).any():
        raise _bad(chunk, f"whole tokens {kind} in every item", "others")
    return kind, begins, ends


def footer_of(chunk: Chunk, memory: Bytes8, column: str) -> tuple[NDArray[Any], I64] | None:
    """(values, end of each row) of a column of the Arrow table at a chunk's end; None where there is no table."""
    tail = memory[-12:].tobytes()
    if tail[4:] != _FOOTER_MAGIC:
        return None
    start = len(memory) - 12 - int.from_bytes(tail[:4], "little")
    if start < 4 * (chunk.items + 2):
        raise _bad(chunk, "a table after its offsets", f"one from byte {start}")
    try:
        source = pa.py_buffer(memory[start:-12])
        is_file = memory[start : start + 6].tobytes() == b"ARROW1"
        with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as reader:
            lists = reader.read_all().column(column).combine_chunks()
        lists.validate(full=True)
        if lists.null_count or not pa.types.is_integer(lists.type.value_type) or len(lists) != chunk.items:
            raise _bad(chunk, f"a list of integers in each of {chunk.items} rows of {column}", f"{lists.type}")
        values = lists.flatten().to_numpy(zero_copy_only=False)
        lengths = np.diff(lists.offsets.to_numpy(zero_copy_only=False).astype(np.int64))
    except (pa.ArrowException, KeyError, ValueError, AttributeError) as error:
        raise _bad(chunk, f"an Arrow table with lists in {column}", str(error)) from error
    return values, np.cumsum(lengths)


def _framed(chunk: Chunk, memory: Bytes8) -> Body:
    head = memory[:24].tobytes()
    if head[:8] != FRAMED_MAGIC or head[8:10] != b"\x01\x00":
        raise _bad(chunk, "frames of zstd, version 1", repr(head[:12]))
    items, _, frames = (int.from_bytes(head[at : at + 4], "little") for at in (12, 16, 20))
    table = 24 + 4 * (items + 1)
    if items != chunk.items or table + _FRAME.itemsize * frames > len(memory):
        raise _bad(chunk, f"{chunk.items} items in frames within {len(memory)} bytes", f"{items} in {frames}")
    offsets = memory[24:table].view("<u4").astype(np.int64)
    pieces, reached, total = [], 0, 0
    for one in memory[table : table + _FRAME.itemsize * frames].view(_FRAME).tolist():
        first, count, at, num_bytes, raw_bytes = one
        if first != reached or at + num_bytes > len(memory):
            raise _bad(chunk, f"a frame from item {reached} within the file", f"one from {first} at byte {at}")
        total += raw_bytes
        check_unpacked(chunk.path, len(memory), total)
        pieces.append(_inflate(chunk, memory[at : at + num_bytes], raw_bytes))
        reached += count
    whole = np.frombuffer(b"".join(pieces), np.uint8)
    if reached != items:
        raise _bad(chunk, f"frames of {items} items", str(reached))
    return Body(whole, _check_offsets(chunk, offsets, 0, len(whole)))


def _check_offsets(chunk: Chunk, offsets: I64, begin: int, stop: int) -> I64:
    if offsets[0] != begin or offsets[-1] != stop or (np.diff(offsets) < 0).any():
        raise _bad(chunk, f"items from byte {begin} to {stop}", f"{offsets[0]} to {offsets[-1]}")
    return offsets


def _without_header(chunk: Chunk, body: Body, begins: I64, ends: I64, name: str) -> tuple[np.dtype[Any], I64]:
    """The type that every array says, and where its values begin: after u32 type, dimensions and sizes."""
    order, table = ("<", _NUMPY) if name == "numpy" else (">", _TORCH)
    codes, ranks = (_numbers(chunk, body, begins + at, ends, order) for at in (0, 4))
    found = sorted({table.get(code, "?") for code in np.unique(codes).tolist()})
    if len(found) > 1 or "?" in found:
        raise _bad(chunk, "tokens of one integer type", f"types {found}")
    kind = np.dtype(found[0] if found else "<u2")
    values = begins + 8 + 4 * ranks
    sizes = np.ones(len(begins), np.int64)
    largest = np.zeros(len(begins), np.int64)
    for axis in range(int(ranks.max(initial=0))):
        has = ranks > axis
        size = _numbers(chunk, body, begins[has] + 8 + 4 * axis, ends[has], order)
        largest[has] = np.maximum(largest[has], size)
        sizes[has] *= np.minimum(size, 1 << 31)
        if axis > 3:
            raise _bad(chunk, "vectors of tokens", f"{axis + 1} dimensions")
    if (sizes != largest).any() or (values + sizes * kind.itemsize != ends).any():
        raise _bad(chunk, "vectors of tokens as large as they say", "others")
    return kind, values


def _list_of_integers(chunk: Chunk, body: Body, begins: I64, ends: I64) -> tuple[np.dtype[Any], I64]:
    """The same of lists, which LitData writes as a byte of type, u32 count and int64 values where it has no pyarrow."""
    counts = _numbers(chunk, body, begins + 1, ends)
    if ((body.memory[begins] != 2) & (counts > 0)).any() or (begins + 5 + 8 * counts != ends).any():
        raise _bad(chunk, "lists of integers", "others")
    return np.dtype("<i8"), begins + 5


def _numbers(chunk: Chunk, body: Body, at: I64, ends: I64, order: str = "<") -> I64:
    """The u32 at each place, which must end by `ends`."""
    if (at + 4 > ends).any():
        raise _bad(chunk, "4 bytes more in an item", "its end")
    shifts = (0, 8, 16, 24) if order == "<" else (24, 16, 8, 0)
    total: I64 = np.zeros(len(at), np.int64)
    for k, shift in enumerate(shifts):
        total |= body.memory[at + k].astype(np.int64) << shift
    return total


def _inflate(chunk: Chunk, data: Bytes8, wanted: int) -> bytes:
    """Decompressed: of exactly `wanted` bytes."""
    raw = bounded_unpack(data.data, "zstd", wanted + 1, chunk.path)
    if len(raw) != wanted:
        raise _bad(chunk, f"{wanted} bytes once decompressed", f"{len(raw)} or more")
    return raw


def _inflate_items(chunk: Chunk, memory: Bytes8, offsets: I64) -> list[bytes]:
    """Items that are compressed one by one, and say no size; together within the bounds of the whole chunk."""
    pieces, left = [], max_unpacked(len(memory))
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        data = memory[start:stop].tobytes()
        try:
            known = zstandard.frame_content_size(data)
        except zstandard.ZstdError as error:
            raise _bad(chunk, "zstd", str(error)) from error
        pieces.append(bounded_unpack(data, "zstd", min(left, known if known >= 0 else left) + 1, chunk.path))
        left -= len(pieces[-1])
        if left < 0:
            raise _bad(chunk, f"at most {max_unpacked(len(memory))} bytes once decompressed", "more")
    return pieces


def _bad(chunk: Chunk, expected: str, got: str) -> DatasetError:
    return DatasetError(f"{chunk.path}: expected {expected}, got {got[:200]}. It is damaged; fetch it again.")
