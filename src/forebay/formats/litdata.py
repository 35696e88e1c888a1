"""LitData's optimised datasets: index.json and chunks, of which one leaf is tokens.

A chunk, little endian: u32 n items, u32 offsets [n + 1] from the file's first byte, the items. An item for its
TokensLoader is bare tokens; for its usual loader u32 sizes of all leaves, then the leaves. A leaf: the values alone
(`no_header_numpy:5`), or u32 type, dimensions and sizes before them (`numpy`; `tensor`, big endian); nested lists come
as an Arrow table at the chunk's end. zstd of whole chunks, of frames of items, or of each.
Source: litdata 0.2.76, litdata/streaming/writer.py and framed_zstd.py.

Hides: how tokens are found, and the making of one stream of them. One item is one document; one chunk one slice. A raw
chunk for the TokensLoader of 2- or 4-byte tokens is a view of the map; any other is copied when its slice opens.
Opening reads the offsets and sizes of every item (4 bytes each) unless the index counts the tokens; compressed chunks
are decompressed for that.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from forebay.errors import DatasetError
from forebay.formats.compression import one_large
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
from forebay.formats.litdata_chunks import Chunk, Layout, body_of, footer_of, is_tokens, places, unwrap

INDEX_FILE = "index.json"
_MOST_INDEX_BYTES = 1 << 30
_MOST_CHUNK_BYTES = (1 << 32) - 1
_LOADERS = ("PyTreeLoader", "TokensLoader")


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
