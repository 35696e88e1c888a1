"""LitData's optimised datasets: index.json and chunks, of which one leaf is tokens.

A chunk is a block (see `formats.blocks`), compressed as a whole by zstd or not at all. An item for its TokensLoader is
bare tokens; for its usual loader u32 sizes of all leaves, then the leaves. Read are vectors of integers
(`no_header_numpy:5`, `no_header_tensor:16`): lists, arrays of several dimensions and compressed items are refused.
Source: litdata 0.2.76, litdata/streaming/writer.py.

One item is one document; one chunk one slice. A raw
chunk for the TokensLoader of 2- or 4-byte tokens is a view of the map; any other is copied when its slice opens.
Opening reads the offsets and sizes of every item (4 bytes each) unless the index counts the tokens; compressed chunks
are decompressed for that.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from forebay.errors import DatasetError
from forebay.formats import blocks
from forebay.formats.base import Format
from forebay.formats.blocks import (
    I64,
    INDEX_FILE,
    Block,
    damaged,
    inflate,
    is_size,
    read_offsets,
)
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
from forebay.formats.report import Report, check_external
from forebay.storage.compression import limit_large_blocks

_FORMATS = {"U16": "no_header_numpy:5", "U32": "no_header_tensor:16"}  # uint16; int32.
_LOADERS = ("PyTreeLoader", "TokensLoader")

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
    def kind(self) -> np.dtype[Any]:
        """Type of a token."""
        kind = kind_of(self.formats[self.leaf])
        assert kind is not None  # `_leaf` chose one of integers.
        return kind


@dataclass(frozen=True)
class LitDataChunk:
    """One entry of the index."""

    path: Path
    num_bytes: int  # Of the chunk, decompressed.
    items: int  # In it.
    num_tokens: int | None  # Where the index says.
    is_compressed: bool


class LitData(Format):
    """Directories of LitData chunks."""

    name = "litdata"

    def is_dataset(self, folder: Path) -> bool:
        return any(blocks.is_index(folder, b'"chunks"', key) for key in (b'"chunk_bytes"', b'"data_format"'))

    def open_tokens(self, path: Path, dtype: Any = None, column: str | None = None) -> ExternalDataset:
        return LitDataset(path, column)

    def check(self, path: Path, report: Report) -> None:
        try:
            check_external(report, LitDataset(path))
        except DatasetError as error:
            report.add_finding("index-mismatch", INDEX_FILE, str(error))


class LitDataset(ExternalDataset):
    """The chunks of one directory, in the index's order."""

    def __init__(self, path: Path, column: str | None = None) -> None:
        self._layout, self._chunks = read_index(path, column)
        with ThreadPoolExecutor(4) as pool:
            counts = list(pool.map(self._count, self._chunks))
        parts = [
            ExternalSlice(i, shown_name(path, chunk.path), 0, count, chunk.items, file_size(chunk.path))
            for i, (chunk, count) in enumerate(zip(self._chunks, counts))
        ]
        files = [chunk.path for chunk in self._chunks]
        settings = {"column": self._layout.column, "leaf": self._layout.formats[self._layout.leaf]}
        super().__init__(
            path,
            "litdata",
            common_dtype(path, [self._layout.kind]),
            files,
            fingerprints(files),
            parts,
            settings,
        )

    def _count(self, chunk: LitDataChunk) -> int:
        kind, size = self._layout.kind, file_size(chunk.path)
        if not chunk.is_compressed and size != chunk.num_bytes:
            raise DatasetError(f"{chunk.path}: expected {chunk.num_bytes} bytes, got {size}. Fetch it again.")
        if chunk.num_tokens is not None:
            if 4 * (chunk.items + 2) + chunk.num_tokens * kind.itemsize != chunk.num_bytes:
                raise DatasetError(
                    f"{chunk.path}: expected {chunk.num_tokens} tokens {kind} in {chunk.items} items, got "
                    f"{chunk.num_bytes} bytes. Its index does not fit it; fetch both again."
                )
            return chunk.num_tokens
        with limit_large_blocks(chunk.num_bytes if chunk.is_compressed else 0):
            _, begins, stops = self._locate(chunk, map_file(chunk.path))
            return int((stops - begins).sum()) // kind.itemsize

    def _read(self, part: ExternalSlice) -> tuple[NDArray[Any], U64]:
        chunk, kind = self._chunks[part.file], self._layout.kind
        block, begins, stops = self._locate(chunk, self._map(chunk.path, part.num_bytes))
        documents = np.cumsum((stops - begins) // kind.itemsize).astype(np.uint64)
        return as_tokens(block.values(begins, stops).view(kind), chunk.path), documents

    def _locate(self, chunk: LitDataChunk, memory: Bytes8) -> tuple[Block, I64, I64]:
        layout = self._layout
        if chunk.is_compressed:
            memory = np.frombuffer(inflate(chunk.path, memory.data, "zstd", chunk.num_bytes), np.uint8)
        block = Block(chunk.path, memory, read_offsets(chunk.path, memory, chunk.items, len(memory)))
        begins, stops = block.offsets[:-1], block.offsets[1:]
        if layout.has_sizes:
            sizes = [None] * len(layout.formats)
            if (block.column(len(sizes) - 1, sizes, "of the last leaf")[1] != stops).any():
                raise damaged(chunk.path, "items as large as their leaves", "others")
            begins, stops = block.column(layout.leaf, sizes, layout.column)
        if ((stops - begins) % layout.kind.itemsize).any():
            raise damaged(chunk.path, f"whole tokens {layout.kind} in every item", "others")
        return block, begins, stops


def read_index(folder: Path, column: str | None = None) -> tuple[Layout, list[LitDataChunk]]:
    """Return the layout of the items and the chunks of an index. Raises DatasetError if no leaf is tokens."""
    path, index = folder / INDEX_FILE, blocks.read_index(folder)
    try:
        config, listed = index["config"], index["chunks"]
        formats, spec = tuple(config["data_format"]), config.get("data_spec")
        names = list(_leaves(orjson.loads(spec)[1], "")) if spec else [""] * len(formats)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DatasetError(f"{path}: expected LitData's index, got {error!r}. Fetch it again.") from error
    loader = config.get("item_loader") or ("TokensLoader" if listed and listed[0].get("dim") else "PyTreeLoader")
    compression = config.get("compression_level") if config.get("compression") else None
    settings = (loader, config.get("encryption"), compression)
    is_read = loader in _LOADERS and not settings[1] and compression in (None, "chunk")
    if not is_read or not all(isinstance(form, str) for form in formats):
        raise DatasetError(
            f"{path}: expected items for {' or '.join(_LOADERS)}, not encrypted, in chunks that are compressed as a "
            f"whole or not at all, got {str(settings)[:200]}. Write it again so."
        )
    if len(names) != len(formats):
        raise DatasetError(f"{path}: expected a name for each of {len(formats)} leaves, got {len(names)}.")
    leaf = _leaf(path, names, formats, column)
    chunks = [_chunk(path, i, entry, bool(config.get("compression")), loader) for i, entry in enumerate(listed)]
    return Layout(names[leaf], leaf, formats, loader == "PyTreeLoader"), chunks


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
    candidates = [i for i, form in enumerate(formats) if kind_of(form) is not None]
    named = [i for name in ([column] if column is not None else TOKEN_COLUMNS) for i in candidates if names[i] == name]
    if named:
        return named[0]
    if column is None and len(candidates) == 1:
        return candidates[0]
    raise DatasetError(
        f"{path}: expected a leaf that is a vector of tokens ({column or ' or '.join(TOKEN_COLUMNS)}), got "
        f"{', '.join(f'{n}: {f}' for n, f in zip(names, formats))[:500]}. Say column=…, or tokenize text first with "
        "`forebay prepare`."
    )


def _chunk(path: Path, i: int, entry: Any, is_compressed: bool, loader: str) -> LitDataChunk:
    entry = entry if isinstance(entry, dict) else {}
    num_bytes, items, dim = (entry.get(key) for key in ("chunk_bytes", "chunk_size", "dim"))
    file = blocks.path_inside(path.parent, entry.get("filename"))
    if file is None or not all(is_size(n) for n in (num_bytes, items, 0 if dim is None else dim)):
        raise DatasetError(
            f"{path}: expected filename (inside the directory), chunk_bytes and chunk_size of chunk {i}, got "
            f"{str(entry)[:200]}. Fetch it again."
        )
    num_tokens = int(dim) if dim is not None and loader == "TokensLoader" else None
    return LitDataChunk(file, int(num_bytes or 0), int(items or 0), num_tokens, is_compressed)


def kind_of(form: str) -> np.dtype[Any] | None:
    """Return the type of the integers of a leaf, by its format; None if it is none of integers."""
    name, _, code = form.partition(":")
    table = {"no_header_numpy": _NUMPY, "no_header_tensor": _TORCH}.get(name, {})
    return np.dtype(table[int(code)]) if code.isdigit() and int(code) in table else None
