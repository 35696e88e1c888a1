"""LitData's optimised datasets: index.json and chunks, of which one leaf is tokens.

A chunk is a block (see `formats.blocks`). An item for its TokensLoader is bare tokens; for its usual loader u32 sizes
of all leaves, then the leaves. A leaf: the values alone (`no_header_numpy:5`), or u32 type, dimensions and sizes before
them (`numpy`; `tensor`, big endian); nested lists come as an Arrow table at the chunk's end. zstd of whole chunks, of
frames of items, or of each.
Source: litdata 0.2.76, litdata/streaming/writer.py and framed_zstd.py.

Hides: how tokens are found, and the making of one stream of them. One item is one document; one chunk one slice. A raw
chunk for the TokensLoader of 2- or 4-byte tokens is a view of the map; any other is copied when its slice opens.
Opening reads the offsets and sizes of every item (4 bytes each) unless the index counts the tokens; compressed chunks
are decompressed for that.
"""

import json
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

from forebay.dataset.slices import Slice
from forebay.errors import DatasetError, UsageError
from forebay.formats import blocks
from forebay.formats.base import Format
from forebay.formats.blocks import (
    I64,
    INDEX_FILE,
    Block,
    build_block,
    check_offsets,
    damaged,
    inflate,
    is_size,
    read_offsets,
    sized,
)
from forebay.formats.conversion import ConvertOptions, TokenSource, Written
from forebay.formats.external import (
    TOKEN_COLUMNS,
    U64,
    Bytes8,
    ExternalDataset,
    ExternalSlice,
    as_tokens,
    common_dtype,
    file_size,
    fingerprints,
    map_file,
    shown_name,
)
from forebay.formats.report import Report, add_slice, choose_slices
from forebay.formats.token_stream import TokenStream, build_stream, shards_of
from forebay.storage.compression import bounded_unpack, check_unpacked, limit_large_blocks, max_unpacked

_LEVEL = 4
_FORMATS = {"U16": "no_header_numpy:5", "U32": "no_header_tensor:16"}  # uint16; int32.
_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
_LOADERS = ("PyTreeLoader", "TokensLoader")

FRAMED_MAGIC = b"LDFZ01\x00\x00"
_FOOTER_MAGIC = b"LDARW01\x00"
_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("at", "<u8"), ("bytes", "<u4"), ("raw_bytes", "<u4")])
_NUMPY = {0: "i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "u1", 5: "<u2", 6: "<u4", 7: "<u8"}
_TORCH = {11: "u1", 12: "i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"}


@dataclass(frozen=True)
class Layout:
    """How an item is made of leaves, and which of them is tokens."""

    column: str  # The leaf's name; empty where an item is nothing else.
    leaf: int  # Its index.
    formats: tuple[str, ...]  # Of all leaves, as the writer names them.
    has_sizes: bool  # Whether each item begins with the sizes of its leaves.

    @property
    def kind(self) -> np.dtype[Any] | None:
        """Type of a token; None where each item says its own."""
        return kind_of(self.formats[self.leaf])


@dataclass(frozen=True)
class Chunk:
    """One entry of the index."""

    path: Path
    num_bytes: int  # Of the chunk, decompressed where `wrap` is `chunk`.
    items: int  # In it.
    num_tokens: int | None  # Where the index says.
    wrap: str  # What is compressed: nothing (empty), the whole `chunk`, frames of items (`batch`), or each (`sample`).


class LitData(Format):
    """Directories of LitData chunks."""

    name = "litdata"

    def is_dataset(self, folder: Path) -> bool:
        return any(blocks.is_index(folder, b'"chunks"', key) for key in (b'"chunk_bytes"', b'"data_format"'))

    def open_tokens(self, path: Path, dtype: Any = None, column: str | None = None) -> ExternalDataset:
        return LitDataset(path, column)

    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        """Chunks of at most `slice_bytes`, or of `shard_tokens`; compressed whole where `compress` says."""
        stream = build_stream(source, options, "rows", signed=True)
        items = options.more.get("items", "tokens")
        if items not in ("tokens", "dict", "tuple"):
            raise UsageError(f"litdata: expected items 'tokens', 'dict' or 'tuple', got {items!r}.")
        out.mkdir()
        chunks: list[dict[str, Any]] = []
        names: list[Path] = []
        for group in shards_of(stream, options.slice_bytes - 8, 8, options.shard_tokens):
            values = [tokens.tobytes() for tokens in group]
            raw = build_block("litdata", values if items == "tokens" else list(map(sized, values)))
            name = f"chunk-0-{len(chunks)}.{'zstd.' if options.compress else ''}bin"
            stored = zstandard.ZstdCompressor(level=_LEVEL).compress(raw) if options.compress else raw
            (out / name).write_bytes(stored)
            names.append(Path(name))
            dim = sum(map(len, group)) if items == "tokens" else None
            chunks.append({"chunk_bytes": len(raw), "chunk_size": len(group), "dim": dim, "filename": name})
        index = {
            "chunks": chunks,
            "config": _config(stream, options, items),
            # Readers keep their caches by it: a number made of what was written.
            "updated_at": str(int(stream.digest.tokens[:12], 16)),
        }
        (out / "index.json").write_text(json.dumps(index, sort_keys=True))
        return stream.written([*names, Path("index.json")], stream.num_documents)

    def check(self, path: Path, report: Report) -> None:
        """Every chunk against the index: it exists, and its items and tokens are as many; compressed ones too."""
        try:
            layout, chunks = read_index(path, needs_tokens=False)
        except DatasetError as error:
            report.add_finding("index-mismatch", INDEX_FILE, str(error))
            return
        report.metadata.update(chunks=len(chunks), items=sum(chunk.items for chunk in chunks))
        report.depth = "structure" if layout is None else "all"
        report.metadata["format"] = ", ".join(layout.formats) if layout is not None else "no tokens"
        if not chunks:
            report.add_finding("empty", INDEX_FILE, "expected chunks, got none")
        sizes = {chunk: chunk.path.stat().st_size for chunk in chunks if chunk.path.is_file()}
        for chunk in chunks:
            if chunk not in sizes:
                report.add_finding("index-mismatch", chunk.path.name, "expected it beside the index, got none")
            elif chunk.wrap != "chunk" and sizes[chunk] != chunk.num_bytes:
                evidence = f"expected {chunk.num_bytes} bytes, as the index says, got {sizes.pop(chunk)}"
                report.add_finding("index-mismatch", chunk.path.name, evidence)
        report.total_bytes = sum(sizes.values())
        existing = list(sizes)
        for index in choose_slices(len(existing), report.total_bytes, report.options):
            report.read_bytes += sizes[existing[index]]
            _check_chunk(report, existing[index], layout)
        listed = {chunk.path.name for chunk in chunks}
        for extra in sorted(p.name for p in path.glob("chunk-*.bin*") if p.name not in listed):
            report.add_finding("index-mismatch", extra, "a chunk that the index does not list")


class LitDataset(ExternalDataset):
    """The chunks of one directory, in the index's order."""

    def __init__(self, path: Path, column: str | None = None) -> None:
        layout, self._chunks = read_index(path, column)
        assert layout is not None  # Tokens are needed by default.
        self._layout = layout
        with ThreadPoolExecutor(4) as pool:
            counts = list(pool.map(self._count, self._chunks))
        parts = [
            ExternalSlice(i, shown_name(path, chunk.path), 0, count, chunk.items, file_size(chunk.path))
            for i, (chunk, (_, count)) in enumerate(zip(self._chunks, counts))
        ]
        files = [chunk.path for chunk in self._chunks]
        facts = {"column": self._layout.column, "leaf": self._layout.formats[self._layout.leaf]}
        super().__init__(
            path, "litdata", common_dtype(path, (kind for kind, _ in counts)), files, fingerprints(files), parts, facts
        )

    def _count(self, chunk: Chunk) -> tuple[np.dtype[Any], int]:
        kind, size = self._layout.kind, file_size(chunk.path)
        if chunk.wrap != "chunk" and size != chunk.num_bytes:
            raise DatasetError(f"{chunk.path}: expected {chunk.num_bytes} bytes, got {size}. Fetch it again.")
        if kind is not None and chunk.num_tokens is not None:
            if 4 * (chunk.items + 2) + chunk.num_tokens * kind.itemsize != chunk.num_bytes:
                raise DatasetError(
                    f"{chunk.path}: expected {chunk.num_tokens} tokens {kind} in {chunk.items} items, got "
                    f"{chunk.num_bytes} bytes. Its index does not fit it; fetch both again."
                )
            return kind, chunk.num_tokens
        with limit_large_blocks(chunk.num_bytes if chunk.wrap else 0):
            memory = unwrap(chunk, map_file(chunk.path))
            table = footer_of(chunk, memory, self._layout.column)
            if table is not None:
                return table[0].dtype, len(table[0])
            kind, begins, ends = places(chunk, self._layout, body_of(chunk, memory))
            return kind, int((ends - begins).sum()) // kind.itemsize

    def _read(self, part: ExternalSlice) -> tuple[NDArray[Any], U64]:
        chunk = self._chunks[part.file]
        return tokens_of(chunk, self._layout, self._map(chunk.path, part.num_bytes))


def tokens_of(chunk: Chunk, layout: Layout, memory: Bytes8) -> tuple[NDArray[Any], U64]:
    """The tokens of a chunk, U16 or U32 [T], and where each item ends, given the bytes of its file."""
    memory = unwrap(chunk, memory)
    table = footer_of(chunk, memory, layout.column)
    if table is not None:
        return as_tokens(np.array(table[0]), chunk.path), table[1].astype(np.uint64)
    body = body_of(chunk, memory)
    kind, begins, ends = places(chunk, layout, body)
    documents = np.cumsum((ends - begins) // kind.itemsize).astype(np.uint64)
    return as_tokens(body.values(begins, ends).view(kind), chunk.path), documents


def _check_chunk(report: Report, chunk: Chunk, layout: Layout | None) -> None:
    try:
        if layout is None:
            body_of(chunk, unwrap(chunk, map_file(chunk.path)))
            return
        tokens, ends = tokens_of(chunk, layout, map_file(chunk.path))
    except DatasetError as error:
        report.add_finding("index-mismatch", chunk.path.name, str(error))
        return
    dtypes = {"tokens": f"U{8 * tokens.itemsize}", "document_ends": "U64"}
    add_slice(report, Slice(chunk.path, {"tokens": tokens, "document_ends": ends}, dtypes), has_ends=False)


def read_index(
    folder: Path, column: str | None = None, *, needs_tokens: bool = True
) -> tuple[Layout | None, list[Chunk]]:
    """Layout of the items and chunks that index.json lists. Without `needs_tokens`, None where no leaf is tokens."""
    path, index = folder / INDEX_FILE, blocks.read_index(folder)
    try:
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
    entry = entry if isinstance(entry, dict) else {}
    num_bytes, items, dim = (entry.get(key) for key in ("chunk_bytes", "chunk_size", "dim"))
    file = blocks.path_inside(path.parent, entry.get("filename"))
    if file is None or not all(is_size(n) for n in (num_bytes, items, 0 if dim is None else dim)):
        raise DatasetError(
            f"{path}: expected filename (inside the directory), chunk_bytes and chunk_size of chunk {i}, got "
            f"{str(entry)[:200]}. Fetch it again."
        )
    known = int(dim) if dim is not None and loader == "TokensLoader" else None
    return Chunk(file, int(num_bytes or 0), int(items or 0), known, wrap)


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
    return np.frombuffer(inflate(chunk.path, memory.data, "zstd", chunk.num_bytes), np.uint8)


def body_of(chunk: Chunk, memory: Bytes8) -> Block:
    """Its items, given its bytes."""
    if chunk.wrap == "batch":
        return _framed(chunk, memory)
    offsets = read_offsets(chunk.path, memory, chunk.items, len(memory))
    if chunk.wrap != "sample":
        return Block(chunk.path, memory, offsets)
    pieces = _inflate_items(chunk, memory, offsets)
    whole = np.frombuffer(b"".join(pieces), np.uint8)
    return Block(chunk.path, whole, np.cumsum([0, *map(len, pieces)], dtype=np.int64))


def places(chunk: Chunk, layout: Layout, body: Block) -> tuple[np.dtype[Any], I64, I64]:
    """The type of the tokens, and where those of each item begin and end."""
    begins, ends = body.offsets[:-1], body.offsets[1:]
    if layout.has_sizes:
        sizes = [None] * len(layout.formats)
        if (body.column(len(sizes) - 1, sizes, "of the last leaf")[1] != ends).any():
            raise damaged(chunk.path, "items as large as their leaves", "others")
        begins, ends = body.column(layout.leaf, sizes, layout.column)
    name = layout.formats[layout.leaf].partition(":")[0]
    kind = layout.kind
    if kind is None:
        if name == "json":
            kind, begins = _list_of_integers(body, begins, ends)
        else:
            kind, begins = _without_header(body, begins, ends, name)
    if ((ends - begins) % kind.itemsize).any():
        raise damaged(chunk.path, f"whole tokens {kind} in every item", "others")
    return kind, begins, ends


def footer_of(chunk: Chunk, memory: Bytes8, column: str) -> tuple[NDArray[Any], I64] | None:
    """(values, end of each row) of a column of the Arrow table at a chunk's end; None where there is no table."""
    tail = memory[-12:].tobytes()
    if tail[4:] != _FOOTER_MAGIC:
        return None
    start = len(memory) - 12 - int.from_bytes(tail[:4], "little")
    if start < 4 * (chunk.items + 2):
        raise damaged(chunk.path, "a table after its offsets", f"one from byte {start}")
    try:
        source = pa.py_buffer(memory[start:-12])
        is_file = memory[start : start + 6].tobytes() == b"ARROW1"
        with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as reader:
            lists = reader.read_all().column(column).combine_chunks()
        lists.validate(full=True)
        if lists.null_count or not pa.types.is_integer(lists.type.value_type) or len(lists) != chunk.items:
            raise damaged(chunk.path, f"a list of integers in each of {chunk.items} rows of {column}", f"{lists.type}")
        values = lists.flatten().to_numpy(zero_copy_only=False)
        lengths = np.diff(lists.offsets.to_numpy(zero_copy_only=False).astype(np.int64))
    except (pa.ArrowException, KeyError, ValueError, AttributeError) as error:
        raise damaged(chunk.path, f"an Arrow table with lists in {column}", str(error)) from error
    return values, np.cumsum(lengths)


def _framed(chunk: Chunk, memory: Bytes8) -> Block:
    head = memory[:24].tobytes()
    if head[:8] != FRAMED_MAGIC or head[8:10] != b"\x01\x00":
        raise damaged(chunk.path, "frames of zstd, version 1", repr(head[:12]))
    items, _, frames = (int.from_bytes(head[at : at + 4], "little") for at in (12, 16, 20))
    table = 24 + 4 * (items + 1)
    if items != chunk.items or table + _FRAME.itemsize * frames > len(memory):
        raise damaged(chunk.path, f"{chunk.items} items in frames within {len(memory)} bytes", f"{items} in {frames}")
    offsets = memory[24:table].view("<u4").astype(np.int64)
    pieces, reached, total = [], 0, 0
    for one in memory[table : table + _FRAME.itemsize * frames].view(_FRAME).tolist():
        first, count, at, num_bytes, raw_bytes = one
        if first != reached or at + num_bytes > len(memory):
            raise damaged(chunk.path, f"a frame from item {reached} within the file", f"one from {first} at byte {at}")
        total += raw_bytes
        check_unpacked(chunk.path, len(memory), total)
        pieces.append(inflate(chunk.path, memory[at : at + num_bytes].data, "zstd", raw_bytes))
        reached += count
    whole = np.frombuffer(b"".join(pieces), np.uint8)
    if reached != items:
        raise damaged(chunk.path, f"frames of {items} items", str(reached))
    return Block(chunk.path, whole, check_offsets(chunk.path, offsets, 0, len(whole)))


def _without_header(body: Block, begins: I64, ends: I64, name: str) -> tuple[np.dtype[Any], I64]:
    """The type that every array says, and where its values begin: after u32 type, dimensions and sizes."""
    order, table = ("<", _NUMPY) if name == "numpy" else (">", _TORCH)
    codes, ranks = (body.numbers(begins + at, 4, ends, order) for at in (0, 4))
    found = sorted({table.get(code, "?") for code in np.unique(codes).tolist()})
    if len(found) > 1 or "?" in found:
        raise damaged(body.path, "tokens of one integer type", f"types {found}")
    kind = np.dtype(found[0] if found else "<u2")
    values = begins + 8 + 4 * ranks
    sizes = np.ones(len(begins), np.int64)
    largest = np.zeros(len(begins), np.int64)
    for axis in range(int(ranks.max(initial=0))):
        has = ranks > axis
        size = body.numbers(begins[has] + 8 + 4 * axis, 4, ends[has], order)
        largest[has] = np.maximum(largest[has], size)
        sizes[has] *= np.minimum(size, 1 << 31)
        if axis > 3:
            raise damaged(body.path, "vectors of tokens", f"{axis + 1} dimensions")
    if (sizes != largest).any() or (values + sizes * kind.itemsize != ends).any():
        raise damaged(body.path, "vectors of tokens as large as they say", "others")
    return kind, values


def _list_of_integers(body: Block, begins: I64, ends: I64) -> tuple[np.dtype[Any], I64]:
    """The same of lists, which LitData writes as a byte of type, u32 count and int64 values where it has no pyarrow."""
    counts = body.numbers(begins + 1, 4, ends)
    if ((body.memory[begins] != 2) & (counts > 0)).any() or (begins + 5 + 8 * counts != ends).any():
        raise damaged(body.path, "lists of integers", "others")
    return np.dtype("<i8"), begins + 5


def _inflate_items(chunk: Chunk, memory: Bytes8, offsets: I64) -> list[bytes]:
    """Items that are compressed one by one, and say no size; together within the bounds of the whole chunk."""
    pieces, left = [], max_unpacked(len(memory))
    for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        data = memory[start:stop].tobytes()
        try:
            known = zstandard.frame_content_size(data)
        except zstandard.ZstdError as error:
            raise damaged(chunk.path, "zstd", str(error)) from error
        pieces.append(bounded_unpack(data, "zstd", min(left, known if known >= 0 else left) + 1, chunk.path))
        left -= len(pieces[-1])
        if left < 0:
            raise damaged(chunk.path, f"at most {max_unpacked(len(memory))} bytes once decompressed", "more")
    return pieces


def _config(stream: TokenStream, options: ConvertOptions, items: str) -> dict[str, Any]:
    spec: dict[str, Any] = _LEAF
    if items != "tokens":
        keys = json.dumps([options.column or "input_ids"]) if items == "dict" else "null"
        spec = {"type": f"builtins.{items}", "context": keys, "children_spec": [_LEAF]}
    return {
        "chunk_bytes": None if options.shard_tokens else options.slice_bytes,
        "chunk_size": options.shard_tokens,
        "compression": "zstd" if options.compress else None,
        "data_format": [_FORMATS[stream.dtype]],
        "data_spec": json.dumps([1, spec]),
        "encryption": None,
        "item_loader": "TokensLoader" if items == "tokens" else "PyTreeLoader",
    }
