"""LitData's optimised datasets: index.json and chunks, tokens or rows.

A chunk is a block of samples (see `blocks`), compressed as a whole by zstd or not at all. A sample for its TokensLoader
is bare tokens; for its usual loader, PyTreeLoader, u32 sizes of all leaves of a dict, then the leaves. Rows that
LitData stores as Arrow behind a chunk, and encrypted or framed chunks, are refused.
Source: litdata 0.2.76, litdata/streaming/writer.py.

One sample is one document; one chunk one slice. A raw chunk for the TokensLoader of 2- or 4-byte tokens is a view of
the map; any other is copied when its slice opens. Opening reads the offsets and sizes of every sample unless the index
counts the tokens; compressed chunks are decompressed for that.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import orjson
import pyarrow as pa
from pydantic import BaseModel, Field

from forebay.arrays import I64, U8, Array
from forebay.base import Json
from forebay.errors import DatasetError
from forebay.files import path_below
from forebay.formats import blocks, external, layout
from forebay.formats.blocks import INDEX_FILE, Encoding, damaged
from forebay.formats.conversion import ConvertOptions, TableSource, TokenSource, Written
from forebay.formats.token_stream import build_stream, documents

_EXPECTED = "LitData's index of chunks neither encrypted nor framed (compression_level='chunk')"
_NUMPY = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
_NUMPY_NUMBERS = {np.dtype(kind).name: number for number, kind in enumerate(_NUMPY)}
_TORCH = {0: "f4", 1: "f4", 2: "f8", 3: "f8", 8: "f2", 9: "f2", 11: "u1", 12: "i1", 13: "i2", 14: "i2", 15: "i4"}
_TORCH |= {16: "i4", 17: "i8", 18: "i8", 19: "?", 20: "u2"}
_TOKENS = {"U16": "no_header_numpy:5", "U32": "no_header_tensor:16"}  # uint16; int32.


class Chunk(BaseModel, strict=True, defer_build=True):
    """One entry of the index; `chunk_bytes` is its size once decompressed, `dim` counts its tokens."""

    filename: blocks.FileName
    chunk_bytes: blocks.NumBytes
    chunk_size: blocks.NumSamples
    dim: Annotated[int, Field(ge=0)] | None = None


class ChunkConfig(BaseModel, strict=True, defer_build=True):
    """The index's `config`: what is not listed is not read."""

    data_format: Annotated[list[str], Field(min_length=1)]
    data_spec: str | None = None
    item_loader: Literal["PyTreeLoader", "TokensLoader"] = "PyTreeLoader"
    compression: str | None = None
    compression_level: Literal["chunk"] | None = None
    encryption: None = None


class LitDataIndex(BaseModel, strict=True, defer_build=True):
    """index.json."""

    chunks: list[Chunk]
    config: ChunkConfig

    @property
    def has_sizes(self) -> bool:
        """Whether each sample begins with the sizes of its leaves."""
        return self.config.item_loader == "PyTreeLoader"


class LitData(layout.ColumnDirectory):
    """Directories of LitData's chunks."""

    name = "litdata"
    token_codecs = ("zstd",)

    def is_dataset(self, folder: Path) -> bool:
        """By the first 4 KiB of index.json, or the last 64."""
        head, tail = external.index_edges(folder)
        return b'"data_format"' in tail or b'"chunk_bytes"' in head

    def open_tokens(self, path: Path, dtype: Any = None, column: str | None = None) -> external.ExternalDataset:
        return LitDataset(path, column)

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        """Every leaf of samples that are dicts, or `tokens`."""
        folder = paths[0]
        index, names = _read_index(folder)
        columns = [
            blocks.StoredColumn(name, None, _decoder(folder, name, leaf))
            for name, leaf in zip(names, index.config.data_format)
        ]
        counts = [chunk.chunk_size for chunk in index.chunks]
        return blocks.open_blocks(
            self.name, folder, columns, counts, lambda i: _find_block(folder, index, i), has_sizes=index.has_sizes
        )

    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        """Chunks for the TokensLoader; U32 as int32. `compress`: zstd or nothing."""
        stream = build_stream(source, options, "rows", signed=True)
        samples = (tokens.tobytes() for tokens in documents(stream.parts()))
        itemsize = 2 if stream.dtype == "U16" else 4
        config = {"data_format": [_TOKENS[stream.dtype]], "data_spec": _spec(None), "item_loader": "TokensLoader"}
        files = _write_chunks(samples, out, options, config, itemsize, lambda: stream.digest.tokens)
        return stream.written(files, stream.digest.num_documents)

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """Chunks of dicts with all columns; `compress`: zstd or nothing."""
        encodings, samples, digest = blocks.encode_table(source, "LitData", _encoding, options)
        leaves = [encoding.name for encoding in encodings.values()]
        config = {"data_format": leaves, "data_spec": _spec(list(encodings)), "item_loader": "PyTreeLoader"}
        return blocks.written_rows(_write_chunks(samples, out, options, config, 0, digest.text), digest)

    def schema(self, folder: Path) -> pa.Schema:
        index, names = _read_index(folder)
        return pa.schema([pa.field(name, _leaf_type(leaf)) for name, leaf in zip(names, index.config.data_format)])


class LitDataset(blocks.BlockDataset):
    """The chunks of one directory, in the index's order."""

    def __init__(self, path: Path, column: str | None) -> None:
        self._folder, (self._index, names) = path, _read_index(path)
        leaves = self._index.config.data_format
        name, self.left_out = layout.layout_of_tokens(path, LitData().schema(path), column, external.REMEDY)
        number = names.index(name)
        tokens = blocks.TokenColumn("of tokens", np.dtype(_number_type(leaves[number])), number, [None] * len(leaves))
        files = [chunk.filename for chunk in self._index.chunks]
        super().__init__(path, "litdata", tokens, files, {"column": name, "leaf": leaves[number]})

    def _block(self, file: int) -> blocks.Block:
        return _find_block(self._folder, self._index, file)

    def _count(self, file: int) -> int:
        chunk, index, kind = self._index.chunks[file], self._index, self._column.kind
        if chunk.dim is None or index.has_sizes or index.config.compression:
            return super()._count(file)
        path = self._folder / chunk.filename
        if 4 * (chunk.chunk_size + 2) + chunk.dim * kind.itemsize != chunk.chunk_bytes:
            raise damaged(path, f"{chunk.dim} tokens {kind}, as its index says", f"{chunk.chunk_bytes} bytes")
        external.check_size(path, chunk.chunk_bytes)
        return chunk.dim

    def _bounds(self, block: blocks.Block, memory: U8, offsets: I64) -> tuple[I64, I64]:
        if not self._index.has_sizes:
            return offsets[:-1], offsets[1:]
        sizes = self._column.sizes
        last = blocks.column_bounds(block.path, memory, offsets, sizes, len(sizes) - 1, "of the last leaf")
        if (last[1] != offsets[1:]).any():
            raise damaged(block.path, "samples as large as their leaves", "others")
        return super()._bounds(block, memory, offsets)


def _encoding(kind: blocks.ColumnKind) -> Encoding:
    dtype = np.dtype(kind.dtype or "u1")
    match kind.name:
        case "text" | "bytes":
            return Encoding("str" if kind.name == "text" else "bytes", blocks.encode_bytes)
        case "number" if dtype.kind == "b":
            return Encoding("bool", blocks.encode_numbers("?"))
        case "number" if dtype.kind == "f":
            return Encoding("float", blocks.encode_numbers("<f8"))
        case "number" if dtype.name != "uint64":
            return Encoding("int", blocks.encode_numbers("<i8"))
        case "vector" if dtype.name in _NUMPY_NUMBERS:
            number = _NUMPY_NUMBERS[dtype.name]
            if kind.shape is None or len(kind.shape) == 1:
                return Encoding(f"no_header_numpy:{number}", blocks.encode_vectors(lambda shape: b""))
            return Encoding(
                "numpy", blocks.encode_vectors(lambda shape: np.array([number, len(shape), *shape], "<u4").tobytes())
            )
    return Encoding("json", blocks.encode_json)


def _spec(names: list[str] | None) -> str:
    """LitData's spelling of a dict of leaves, or of one leaf."""
    leaf: Json = {"type": None, "context": None, "children_spec": []}
    if names is None:
        return orjson.dumps([1, leaf]).decode()
    context, children = orjson.dumps(names).decode(), [leaf] * len(names)
    return orjson.dumps([1, {"type": "builtins.dict", "context": context, "children_spec": children}]).decode()


def _write_chunks(
    samples: Iterable[bytes], out: Path, options: ConvertOptions, config: Json, itemsize: int,
    digest: Callable[[], str],
) -> list[Path]:  # fmt: skip
    out.mkdir()
    chunks: list[Json] = []
    for num_samples, raw, packed in blocks.build_blocks(samples, options, "LitData"):
        name = f"chunk-0-{len(chunks)}.{'zstd.' if packed is not None else ''}bin"
        (out / name).write_bytes(raw if packed is None else packed)
        dim = (len(raw) - 4 * (num_samples + 2)) // itemsize if itemsize else None
        chunks.append({"chunk_bytes": len(raw), "chunk_size": num_samples, "dim": dim, "filename": name})
    is_packed = options.compress == "zstd"
    settings = {"chunk_bytes": options.slice_bytes, "chunk_size": None, "encryption": None}
    compression = {"compression": "zstd" if is_packed else None, "compression_level": "chunk" if is_packed else None}
    updated_at = blocks.number_of(digest())
    index = {"chunks": chunks, "config": {**settings, **compression, **config}, "updated_at": updated_at}
    (out / INDEX_FILE).write_bytes(orjson.dumps(index, option=orjson.OPT_SORT_KEYS))
    return [Path(name) for name in (*(chunk["filename"] for chunk in chunks), INDEX_FILE)]


def _read_index(folder: Path) -> tuple[LitDataIndex, list[str]]:
    """The index, and the name of each leaf: keys joined by dots, `tokens` where a sample is one leaf."""
    path = folder / INDEX_FILE
    index = blocks.read_index(path, LitDataIndex, _EXPECTED)
    try:
        spec, leaves = index.config.data_spec, index.config.data_format
        names = list(_leaf_names(orjson.loads(spec)[1], "")) if spec else [""] * len(leaves)
        names = ["tokens"] if names == [""] else names
        if len(names) != len(leaves) or len(set(names)) != len(names):
            raise ValueError(f"config.data_spec: a name of its own for each of {len(leaves)} leaves expected")
        if not index.has_sizes and (len(leaves) != 1 or not _number_type(leaves[0])):
            raise ValueError("config.data_format: one vector for the TokensLoader expected")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, _EXPECTED, str(error)) from error
    return index, names


def _leaf_names(spec: Any, name: str) -> Iterator[str]:
    children, context = spec["children_spec"], spec["context"]
    if not children:
        yield name
        return
    keys = orjson.loads(context) if isinstance(context, str) else context
    if not isinstance(keys, list) or len(keys) != len(children):
        keys = range(len(children))
    for key, child in zip(keys, children):
        yield from _leaf_names(child, f"{name}.{key}" if name else str(key))


def _leaf_type(leaf: str) -> Any:
    if _number_type(leaf)[1:2] in ("i", "u"):
        return layout.TOKENS
    return pa.string() if leaf in ("str", "text") else pa.binary()


def _number_type(leaf: str) -> str:
    """NumPy's type of the numbers of a leaf that is a vector; "" if it is none."""
    name, _, code = leaf.partition(":")
    number = int(code) if code.isascii() and code.isdigit() and len(code) < 4 else -1
    if name == "no_header_numpy" and 0 <= number < len(_NUMPY):
        return f"<{_NUMPY[number]}"
    return f"<{_TORCH[number]}" if name == "no_header_tensor" and number in _TORCH else ""


def _decoder(folder: Path, name: str, leaf: str) -> blocks.Decode:
    decoders: dict[str, blocks.Decode] = {
        "str": bytes.decode, "text": bytes.decode, "json": _decode_json, "numpy": _decode_array,
        "int": blocks.decode_number("<i8"), "float": blocks.decode_number("<f8"), "bool": blocks.decode_number("?"),
    }  # fmt: skip
    if kind := _number_type(leaf):
        return lambda data: np.frombuffer(data, kind)
    if leaf not in decoders and leaf.partition(":")[0] not in ("bytes", "jpeg", "file", "image"):
        raise DatasetError(
            f"{folder}: expected leaves that are read without running code, got {name}: {leaf!r}. Write them with "
            "LitData as text, numbers or arrays."
        )
    return decoders.get(leaf, bytes)


def _decode_json(data: bytes) -> Any:
    if data[:1] <= b"\x20":
        raise ValueError("LitData's own encoding of nested values, which only its library reads")
    return orjson.loads(data)


def _decode_array(data: bytes) -> Array:
    number, ndim = (int(n) for n in np.frombuffer(data, "<u4", 2))
    shape = np.frombuffer(data, "<u4", ndim, offset=8).tolist()
    return np.frombuffer(data, f"<{_NUMPY[number]}", offset=8 + 4 * ndim).reshape(shape)


def _find_block(folder: Path, index: LitDataIndex, number: int) -> blocks.Block:
    chunk, codec = index.chunks[number], (index.config.compression or "").partition(":")[0]
    path = path_below(folder, chunk.filename)
    stored = external.file_size(path) if codec else chunk.chunk_bytes
    return blocks.Block(path, chunk.chunk_size, chunk.chunk_bytes, stored, codec)
