"""LitData's optimised datasets: index.json and chunks, of which one leaf is tokens.

A chunk, little endian: u32 n items, u32 offsets [n + 1] from the file's first byte, the items. An item for its
TokensLoader is bare tokens; for its usual loader u32 sizes of all leaves, then the leaves. A leaf: the values alone
(`no_header_numpy:5`), or u32 type, dimensions and sizes before them (`numpy`; `tensor`, big endian); nested lists come
as an Arrow table at the chunk's end. zstd of whole chunks, of frames of items, or of each.
Source: litdata 0.2.76, litdata/streaming/writer.py and framed_zstd.py.

Hides: how tokens are found, and the making of one stream of them. One item is one document; one chunk one slice. A raw
chunk for the TokensLoader of 2- or 4-byte tokens is a view of the map; any other is copied when its slice opens.
Opening reads the offsets and sizes of every item (4 bytes each) unless the index counts the tokens; compressed chunks
are decompressed for that. Every offset and size is checked against the file before anything is read by it.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.ipc
import zstandard
from numpy.typing import NDArray

from forebay.errors import DatasetError
from forebay.formats.compression import bounded_unpack, check_unpacked, max_unpacked, one_large
from forebay.formats.foreign import (
    TOKEN_COLUMNS,
    U64,
    Bytes8,
    ForeignDataset,
    Part,
    as_tokens,
    fingerprints,
    head_of,
    map_file,
    relative,
    size_of,
    stored_as,
)

INDEX_FILE = "index.json"
_MOST_INDEX_BYTES = 1 << 30
_MOST_CHUNK_BYTES = (1 << 32) - 1
_LOADERS = ("PyTreeLoader", "TokensLoader")
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


class LitDataset(ForeignDataset):
    """The chunks of one directory, in the index's order."""

    def __init__(self, path: Path, column: str | None = None) -> None:
        layout, self._chunks = read_index(path, column)
        assert layout is not None  # Tokens are needed by default.
        self._layout = layout
        with ThreadPoolExecutor(4) as pool:
            counts = list(pool.map(self._count, self._chunks))
        kinds = {stored_as(kind) for kind, _ in counts}
        if len(kinds) != 1:
            raise DatasetError(f"{path}: expected chunks of one type of token, got {sorted(kinds) or 'no chunk'}.")
        parts = [
            Part(i, relative(path, chunk.path), 0, count, chunk.items, size_of(chunk.path))
            for i, (chunk, (_, count)) in enumerate(zip(self._chunks, counts))
        ]
        files = [chunk.path for chunk in self._chunks]
        facts = {"column": self._layout.column, "leaf": self._layout.formats[self._layout.leaf]}
        super().__init__(path, "litdata", kinds.pop(), files, fingerprints(files), parts, facts)

    def _count(self, chunk: Chunk) -> tuple[np.dtype[Any], int]:
        kind, size = self._layout.kind, size_of(chunk.path)
        if chunk.wrap != "chunk" and size != chunk.num_bytes:
            raise DatasetError(f"{chunk.path}: expected {chunk.num_bytes} bytes, got {size}. Fetch it again.")
        if kind is not None and chunk.num_tokens is not None:
            if 4 * (chunk.items + 2) + chunk.num_tokens * kind.itemsize != chunk.num_bytes:
                raise DatasetError(
                    f"{chunk.path}: expected {chunk.num_tokens} tokens {kind} in {chunk.items} items, got "
                    f"{chunk.num_bytes} bytes. Its index does not fit it; fetch both again."
                )
            return kind, chunk.num_tokens
        with one_large(chunk.num_bytes if chunk.wrap else 0):
            memory = unwrap(chunk, map_file(chunk.path))
            table = footer_of(chunk, memory, self._layout.column)
            if table is not None:
                return table[0].dtype, len(table[0])
            kind, begins, ends = places(chunk, self._layout, body_of(chunk, memory))
            return kind, int((ends - begins).sum()) // kind.itemsize

    def _read(self, part: Part) -> tuple[NDArray[Any], U64]:
        chunk = self._chunks[part.file]
        return tokens_of(chunk, self._layout, self._map(chunk.path, part.num_bytes))


def tokens_of(chunk: Chunk, layout: Layout, memory: Bytes8) -> tuple[NDArray[Any], U64]:
    """The tokens of a chunk, U16 or U32 [T], and where each item ends, given the bytes of its file.

    Raises:
        DatasetError: If a count, offset, size or type in it does not fit.
    """
    memory = unwrap(chunk, memory)
    table = footer_of(chunk, memory, layout.column)
    if table is not None:
        return as_tokens(np.array(table[0]), chunk.path), table[1].astype(np.uint64)
    body = body_of(chunk, memory)
    kind, begins, ends = places(chunk, layout, body)
    documents = np.cumsum((ends - begins) // kind.itemsize).astype(np.uint64)
    return as_tokens(_joined(body.memory, begins, ends).view(kind), chunk.path), documents


def is_index(path: Path) -> bool:
    """Whether a directory's index.json may be LitData's, by its first 4 KiB and last 64."""
    index = path / INDEX_FILE
    if not index.is_file():
        return False
    head = head_of(index, 4096).lstrip()
    tail = head_of(index, 1 << 16, max(0, size_of(index) - (1 << 16)))
    names = (b'"data_format"', b'"chunk_bytes"')
    return head[:1] == b"{" and b'"chunks"' in head + tail and any(name in head + tail for name in names)


def read_index(
    folder: Path, column: str | None = None, *, needs_tokens: bool = True
) -> tuple[Layout | None, list[Chunk]]:
    """What index.json says of the items, and the chunks it lists. Without `needs_tokens`, None where no leaf is tokens.

    Raises:
        DatasetError: If it is no such index, names files outside its directory, or no leaf is tokens.
    """
    path = folder / INDEX_FILE
    if size_of(path) > _MOST_INDEX_BYTES:
        raise DatasetError(f"{path}: expected at most {_MOST_INDEX_BYTES} bytes, got {size_of(path)}.")
    try:
        index = orjson.loads(head_of(path, _MOST_INDEX_BYTES))
        config, listed = index["config"], index["chunks"]
        formats, spec = tuple(config["data_format"]), config.get("data_spec")
        names = list(_leaves(orjson.loads(spec)[1], "")) if spec else [""] * len(formats)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DatasetError(f"{path}: expected LitData's index, got {error!r}. Fetch it again.") from error
    loader = config.get("item_loader") or ("TokensLoader" if listed and listed[0].get("dim") else "PyTreeLoader")
    if config.get("encryption") or loader not in _LOADERS or not all(isinstance(one, str) for one in formats):
        raise DatasetError(
            f"{path}: expected items for {' or '.join(_LOADERS)}, not encrypted, got {loader} "
            f"{str(config.get('encryption'))[:100]}. Write it again without."
        )
    if len(names) != len(formats):
        raise DatasetError(f"{path}: expected a name for each of {len(formats)} leaves, got {len(names)}.")
    wrap = (config.get("compression_level") or "chunk") if config.get("compression") else ""
    leaf = _leaf(path, names, formats, column) if needs_tokens or any(map(is_tokens, formats)) else None
    chunks = [_chunk(path, i, entry, str(wrap), loader) for i, entry in enumerate(listed)]
    return None if leaf is None else Layout(names[leaf], leaf, formats, loader == "PyTreeLoader"), chunks


def _leaves(spec: Any, name: str) -> Iterator[str]:
    """The names of a tree's leaves: keys and indexes, joined by dots."""
    if not spec["children_spec"]:
        yield name
        return
    context = spec["context"]
    keys = orjson.loads(context) if isinstance(context, str) else context
    if not isinstance(keys, list) or len(keys) != len(spec["children_spec"]):
        keys = range(len(spec["children_spec"]))
    for key, child in zip(keys, spec["children_spec"]):
        yield from _leaves(child, f"{name}.{key}" if name else str(key))


def _leaf(path: Path, names: list[str], formats: tuple[str, ...], column: str | None) -> int:
    found = [i for i, form in enumerate(formats) if is_tokens(form)]
    named = [i for wanted in ([column] if column is not None else TOKEN_COLUMNS) for i in found if names[i] == wanted]
    if named:
        return named[0]
    if column is None and len(found) == 1:
        return found[0]
    raise DatasetError(
        f"{path}: expected a leaf of tokens ({column or ' or '.join(TOKEN_COLUMNS)}), got "
        f"{', '.join(f'{n}: {f}' for n, f in zip(names, formats))[:500]}. Say column=…, or tokenize text first with "
        "`forebay prepare`."
    )


def _chunk(path: Path, i: int, entry: Any, wrap: str, loader: str) -> Chunk:
    name, num_bytes, items = (
        (entry.get(key) for key in ("filename", "chunk_bytes", "chunk_size")) if isinstance(entry, dict) else [None] * 3
    )
    dim = entry.get("dim") if isinstance(entry, dict) else None
    is_name = isinstance(name, str) and name.isprintable() and "\\" not in name
    is_name = is_name and not any(part in ("", ".", "..") for part in str(name).split("/"))
    counts = [num_bytes, items, 0 if dim is None else dim]
    if not is_name or not all(type(n) is int and 0 <= n <= _MOST_CHUNK_BYTES for n in counts):
        raise DatasetError(
            f"{path}: expected filename (inside the directory), chunk_bytes and chunk_size of chunk {i}, got "
            f"{str(entry)[:200]}. Fetch it again."
        )
    known = int(dim) if dim is not None and loader == "TokensLoader" else None
    return Chunk(path.parent.joinpath(*str(name).split("/")), int(num_bytes or 0), int(items or 0), known, wrap)


def _joined(memory: Bytes8, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Bytes8:
    """A view where the values follow one another, else a copy."""
    if not len(begins):
        return memory[:0]
    if (begins[1:] == ends[:-1]).all():
        return memory[int(begins[0]) : int(ends[-1])]
    return np.concatenate([memory[a:b] for a, b in zip(begins.tolist(), ends.tolist())])


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
