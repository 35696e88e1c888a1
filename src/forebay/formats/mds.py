"""MosaicML's MDS, version 2: index.json and shards, raw or compressed: tokens in one column, or rows.

A shard is a block of samples (see `blocks`), with its settings in JSON before them. A column of tokens is `bytes`, or
an `ndarray` whose encoding names its type: u8 (dimensions << 2 | log2 of a size's bytes) and the sizes unless named,
the values. Source: mosaicml-streaming 0.13, streaming/base/format/mds.
One sample is one document; one shard one slice. A raw shard whose only column is an `ndarray` of fixed type and shape
is a view of the map; any other is copied, and its hash checked. Every offset and size is checked before it is used.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import orjson
import pyarrow as pa
from pydantic import BaseModel, Field

from forebay.arrays import I64, U8, Array, DType
from forebay.base import Json
from forebay.errors import DatasetError, UsageError
from forebay.files import path_below
from forebay.formats import blocks, external, layout
from forebay.formats.blocks import INDEX_FILE, damaged, read_offsets
from forebay.formats.conversion import ConvertOptions, TableSource, TokenSource, Written
from forebay.formats.token_stream import build_stream, documents

_KINDS = ("f2", "f4", "f8", *(f"{sign}{width}" for sign in "iu" for width in (1, 2, 4, 8)))
_TYPES = {np.dtype(kind).name: f"<{kind}" for kind in _KINDS}
_ARRAY = re.compile(rf"ndarray:({'|'.join(_TYPES)})(:|$)")
_DECODERS: dict[str, blocks.Decode] = {
    **{name: blocks.decode_number(kind) for name, kind in _TYPES.items()},
    **dict.fromkeys(("bytes", "jpeg", "png"), bytes),
    "str": bytes.decode,
    "json": orjson.loads,
    "int": blocks.decode_number("<i8"),
    "str_int": int,
    "str_float": float,
}


class ShardFile(BaseModel, strict=True, defer_build=True):
    """A shard's file, raw or compressed, as the index lists it."""

    basename: blocks.FileName
    bytes: blocks.NumBytes
    hashes: dict[str, str] | None = None

    @property
    def hash_name(self) -> str:
        """The first of its hashes that hashlib has, or ""."""
        available = hashlib.algorithms_guaranteed
        return next((name for name in self.hashes or () if name in available and "shake" not in name), "")


class MdsShard(BaseModel, strict=True, defer_build=True):
    """One entry of the index."""

    format: Literal["mds"]
    version: Literal[2]
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[blocks.NumBytes | None]
    samples: blocks.NumSamples
    raw_data: ShardFile
    zip_data: ShardFile | None = None
    compression: str | None = None

    @property
    def files(self) -> list[ShardFile]:
        """Its files, of which one is enough."""
        return [self.raw_data, *([self.zip_data] if self.zip_data is not None else [])]


class MdsIndex(BaseModel, strict=True, defer_build=True):
    """index.json."""

    version: Literal[2]
    shards: Annotated[list[MdsShard], Field(min_length=1)]


class Mds(layout.ColumnDirectory):
    """Directories of MDS shards."""

    name = "mds"
    token_codecs = ("zstd",)

    def is_dataset(self, folder: Path) -> bool:
        """By the first 4 KiB and the last 64 of index.json."""
        head, tail = external.index_edges(folder)
        return head.lstrip()[:1] == b"{" and b'"shards"' in head + tail

    def open_tokens(self, path: Path, dtype: Any = None, column: str | None = None) -> external.ExternalDataset:
        return MdsDataset(path, dtype, column)

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        """Every column but pickled ones; images as their bytes, tokens that are bytes as numbers of `input_dtype`."""
        folder, index = paths[0], paths[0] / INDEX_FILE
        shards = _read_index(index)
        first, columns = shards[0], []
        for name, encoding, size in zip(first.column_names, first.column_encodings, first.column_sizes):
            decode: blocks.Decode
            if encoding == "bytes" and name in (*external.TOKEN_COLUMNS, options.column):
                decode = partial(np.frombuffer, dtype=_bytes_type(index, name, options.input_dtype))
            elif _ARRAY.match(encoding):
                decode = partial(_decode_array, *_array_type(index, encoding))
            elif encoding in _DECODERS:
                decode = _DECODERS[encoding]
            else:
                raise DatasetError(
                    f"{index}: expected columns that are read without running code, got {name}: {encoding!r}. Write "
                    "them with MosaicML's library as JSON or arrays."
                )
            columns.append(blocks.StoredColumn(name, size or None, decode))
        counts = [shard.samples for shard in shards]
        return blocks.open_blocks(self.name, folder, columns, counts, lambda i: _find_block(folder, shards[i]))

    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        """Shards of a column `tokens`, or the one that the options name; `compress`: zstd or nothing."""
        stream = build_stream(source, options, "rows")
        name, kind = options.column or "tokens", "uint16" if stream.dtype == "U16" else "uint32"
        values = (_shape_header(tokens.shape) + tokens.tobytes() for tokens in documents(stream.parts()))
        samples = (len(value).to_bytes(4, "little") + value for value in values)
        files = _write_shards(samples, out, options, {name: blocks.Encoding(f"ndarray:{kind}", list)})
        return stream.written(files, stream.digest.num_documents)

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """Shards of all columns; `compress`: zstd or nothing."""
        encodings, samples, digest = blocks.encode_table(source, "MDS", _encoding, options)
        return blocks.written_rows(_write_shards(samples, out, options, encodings), digest)

    def schema(self, folder: Path) -> pa.Schema:
        return _schema(_read_index(folder / INDEX_FILE)[0])


class MdsDataset(blocks.BlockDataset):
    """The shards of one directory, in the index's order."""

    def __init__(self, path: Path, dtype: Any, column: str | None) -> None:
        index = path / INDEX_FILE
        self._folder, self._shards = path, _read_index(index)
        shard = self._shards[0]
        name, self.left_out = layout.layout_of_tokens(path, _schema(shard, column), column, external.REMEDY)
        number = shard.column_names.index(name)
        encoding, size = shard.column_encodings[number], shard.column_sizes[number]
        if encoding == "bytes":
            kind, length = _bytes_type(index, name, dtype), None
        else:
            kind, shape = _array_type(index, encoding)
            length = None if shape is None else math.prod(shape)
        if length is not None and size != length * kind.itemsize:
            raise DatasetError(f"{index}: expected {length * kind.itemsize} bytes of column {name}, got {size}.")
        # The reference takes a size of 0 for none.
        self._has_header = encoding != "bytes" and length is None
        tokens = blocks.TokenColumn(name, kind, number, [size or None for size in shard.column_sizes], length)
        names = [shard.raw_data.basename for shard in self._shards]
        super().__init__(path, "mds", tokens, names, {"column": name, "encodings": [encoding]})

    def _block(self, file: int) -> blocks.Block:
        return _find_block(self._folder, self._shards[file])

    def _exists(self, file: int) -> bool:
        return any((self._folder / stored.basename).is_file() for stored in self._shards[file].files)

    def _hash_checks(self) -> tuple[str, ...]:
        names = {self._block(file).hash_name for file in range(len(self.files)) if self._exists(file)}
        return (f"{' and '.join(sorted(names))} of every shard",) if names and all(names) else ()

    def _count(self, file: int) -> int:
        block, column = self._block(file), self._column
        external.check_size(block.path, block.stored_bytes)
        if column.length is not None:
            return block.num_samples * column.length
        if block.codec or [i for i, size in enumerate(column.sizes) if size is None] != [column.index]:
            return super()._count(file)
        width = column.kind.itemsize
        head = external.read_head(block.path, 4 * (block.num_samples + 2))
        offsets = read_offsets(block.path, head, block.num_samples, block.num_bytes)
        values = np.diff(offsets) - 4 - sum(size or 0 for size in column.sizes)
        if self._has_header:
            values = _without_header(values, width)
        if len(values) and (int(values.min()) < 0 or bool((values % width).any())):
            raise damaged(block.path, f"whole tokens {column.kind} in every sample", "others")
        return int(values.sum()) // width

    def _bounds(self, block: blocks.Block, memory: U8, offsets: I64) -> tuple[I64, I64]:
        begins, stops = super()._bounds(block, memory, offsets)
        if self._has_header and len(begins):
            if (begins >= stops).any():
                raise damaged(block.path, "a shape before the tokens of every sample", "none")
            shapes = memory[begins].astype(np.int64)
            if (shapes >> 2 != 1).any():
                raise damaged(block.path, "vectors of tokens", f"{int(shapes.max()) >> 2} dimensions")
            begins = begins + 1 + (1 << (shapes & 3))
        return begins, stops


def _encoding(kind: blocks.ColumnKind) -> blocks.Encoding:
    match kind.name:
        case "text":
            return blocks.Encoding("str", blocks.encode_bytes)
        case "bytes":
            return blocks.Encoding("bytes", blocks.encode_bytes)
        case "number" if kind.dtype in _TYPES:
            name = "int" if kind.dtype == "int64" else kind.dtype
            return blocks.Encoding(name, blocks.encode_numbers(_TYPES[kind.dtype]), np.dtype(kind.dtype).itemsize)
        case "vector" if kind.dtype in _TYPES and kind.shape is not None and all(kind.shape):
            name = f"ndarray:{kind.dtype}:{','.join(map(str, kind.shape))}"
            size = math.prod(kind.shape) * np.dtype(kind.dtype).itemsize
            return blocks.Encoding(name, blocks.encode_vectors(lambda shape: b""), size)
        case "vector" if kind.dtype in _TYPES:
            return blocks.Encoding(f"ndarray:{kind.dtype}", blocks.encode_vectors(_shape_header))
    return blocks.Encoding("json", blocks.encode_json)


def _shape_header(shape: tuple[int, ...]) -> bytes:
    code = int(np.searchsorted([1 << 8, 1 << 16, 1 << 32], max(shape), "right"))
    return bytes([len(shape) << 2 | code]) + b"".join(n.to_bytes(1 << code, "little") for n in shape)


def _write_shards(
    samples: Iterable[bytes], out: Path, options: ConvertOptions, encodings: dict[str, blocks.Encoding]
) -> list[Path]:
    settings = {
        "column_encodings": [encoding.name for encoding in encodings.values()],
        "column_names": list(encodings),
        "column_sizes": [encoding.size for encoding in encodings.values()],
        "compression": f"zstd:{blocks.LEVEL}" if options.compress == "zstd" else None,
        "format": "mds",
        "hashes": ["sha256"],
        "size_limit": options.slice_bytes,
        "version": 2,
    }
    out.mkdir()
    shards, files = list[Json](), list[Path]()
    head = json.dumps(settings, sort_keys=True).encode()
    for num_samples, raw, packed in blocks.build_blocks(samples, options, "MDS", head):
        name = f"shard.{len(shards):05d}.mds"
        raw_data, zip_data = _described(name, raw), None
        if packed is not None:
            name += ".zstd"
            zip_data = _described(name, packed)
        (out / name).write_bytes(raw if packed is None else packed)
        files.append(Path(name))
        shards.append({**settings, "samples": num_samples, "raw_data": raw_data, "zip_data": zip_data})
    (out / INDEX_FILE).write_text(json.dumps({"shards": shards, "version": 2}, sort_keys=True))
    return [*files, Path(INDEX_FILE)]


def _described(name: str, data: bytes) -> Json:
    return {"basename": name, "bytes": len(data), "hashes": {"sha256": hashlib.sha256(data).hexdigest()}}


def _find_block(folder: Path, shard: MdsShard) -> blocks.Block:
    for file in shard.files:
        if (folder / file.basename).is_file():
            codec = "" if file is shard.raw_data else (shard.compression or "none").partition(":")[0]
            hashes, name = file.hashes or {}, file.hash_name
            num_bytes = shard.raw_data.bytes
            path = path_below(folder, file.basename)
            return blocks.Block(path, shard.samples, num_bytes, file.bytes, codec, name, hashes.get(name, ""))
    path = folder / shard.raw_data.basename
    raise DatasetError(f"{path}: it is missing, and so is its compressed form. Fetch it again.")


def _decode_array(dtype: DType, shape: tuple[int, ...] | None, data: bytes) -> Array:
    start = 0
    if shape is None:
        dims, width = data[0] >> 2, 1 << (data[0] & 3)
        start = 1 + dims * width
        shape = tuple(int.from_bytes(data[1 + i * width : 1 + (i + 1) * width], "little") for i in range(dims))
    if len(data) != start + math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array {list(shape)[:8]} of {dtype} in {len(data)} bytes")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def _read_index(path: Path) -> list[MdsShard]:
    shards = blocks.read_index(path, MdsIndex, "MosaicML's index of version 2").shards
    columns = [(shard.column_names, shard.column_encodings, shard.column_sizes) for shard in shards]
    if len({len(values) for values in columns[0]}) > 1 or any(of_shard != columns[0] for of_shard in columns):
        raise DatasetError(f"{path}: expected the same columns, with an encoding and size each, in every shard.")
    return shards


def _schema(shard: MdsShard, column: str | None = None) -> pa.Schema:
    candidates = (*external.TOKEN_COLUMNS, column)
    kinds = {}
    for name, encoding in zip(shard.column_names, shard.column_encodings):
        array = _ARRAY.match(encoding)
        is_tokens = "int" in array[1] if array else encoding == "bytes" and name in candidates
        kinds[name] = layout.TOKENS if is_tokens else pa.string() if encoding == "str" else pa.binary()
    return pa.schema(kinds)


def _array_type(path: Path, encoding: str) -> tuple[DType, tuple[int, ...] | None]:
    """The type of an array, and its shape where it is fixed."""
    kind, _, shape = encoding.removeprefix("ndarray:").partition(":")
    if shape and not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", shape):
        raise DatasetError(f"{path}: expected a shape of numbers in {encoding!r}.")
    return np.dtype(_TYPES[kind]), tuple(map(int, shape.split(","))) if shape else None


def _bytes_type(path: Path, name: str, dtype: Any) -> DType:
    if dtype is None:
        raise UsageError(
            f"{path}: column {name} is bytes, of no known type. Say it: open_external(PATH, dtype='int64') (LLM "
            "Foundry's), 'uint16' …, or --set input_dtype=int64 of forebay convert."
        )
    return external.token_dtype(dtype)


def _without_header(values: I64, width: int) -> I64:
    """Bytes of the values, given those with the shape before them: 1 byte and 1, 2, 4 or 8, the fewest; or -1."""
    sizes = np.full(len(values), -1, np.int64)
    for size_bytes in (1, 2, 4, 8):
        remaining = values - 1 - size_bytes
        count = remaining // width
        fits = (remaining >= 0) & (remaining % width == 0) & (count < 1 << min(8 * size_bytes, 62))
        fits &= (count >= 1 << 4 * size_bytes) | (size_bytes == 1)
        sizes[fits & (sizes < 0)] = remaining[fits & (sizes < 0)]
    return sizes
