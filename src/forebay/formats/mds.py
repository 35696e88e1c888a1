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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import orjson
import pyarrow as pa
import zstandard
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, Field

from forebay.errors import DatasetError, UsageError
from forebay.formats import blocks, external, layout, tables
from forebay.formats.blocks import I64, INDEX_FILE, damaged, read_offsets
from forebay.formats.conversion import ConvertOptions, TableSource, TokenSource, Written
from forebay.formats.token_stream import build_stream, documents
from forebay.storage.compression import bounded_unpack, check_unpacked, limit_large_blocks

_LEVEL = 3
_KINDS = ("f2", "f4", "f8", *(f"{sign}{width}" for sign in "iu" for width in (1, 2, 4, 8)))
_TYPES = {np.dtype(kind).name: f"<{kind}" for kind in _KINDS}
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **{name: blocks.decode_number(kind) for name, kind in _TYPES.items()},
    **dict.fromkeys(("bytes", "jpeg", "png"), bytes),
    "str": bytes.decode,
    "json": orjson.loads,
    "int": blocks.decode_number("<i8"),
    "str_int": int,
    "str_float": float,
}


def inside_directory(name: str) -> str:
    """Return the name of a file of an index. Raises ValueError if it leads out of the directory."""
    if "\\" in name or not name.isprintable() or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"a file inside the directory, not {name!r}")
    return name


class ShardFile(BaseModel, strict=True, defer_build=True):
    """A shard's file, raw or compressed, as the index lists it."""

    basename: Annotated[str, AfterValidator(inside_directory)]
    bytes: Annotated[int, Field(ge=0, le=blocks.MAX_BLOCK_BYTES)]
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
    column_sizes: list[Annotated[int, Field(ge=0, le=blocks.MAX_BLOCK_BYTES)] | None]
    samples: Annotated[int, Field(ge=0, le=blocks.MAX_BLOCK_BYTES // 4)]
    raw_data: ShardFile
    zip_data: ShardFile | None = None
    compression: str | None = None


class MdsIndex(BaseModel, strict=True, defer_build=True):
    """index.json."""

    version: Literal[2]
    shards: Annotated[list[MdsShard], Field(min_length=1)]


@dataclass(frozen=True)
class TokenColumn:
    """Where the tokens stand in a sample."""

    name: str
    encoding: str  # As the writer's.
    kind: np.dtype[Any]  # Type of a token.
    length: int | None  # Tokens in a sample, where fixed.
    index: int  # Among all columns.
    sizes: list[int | None]  # Bytes of each column, None where each sample says it.

    @property
    def has_header(self) -> bool:
        """Whether each value begins with its type or shape."""
        return self.encoding.startswith("ndarray") and self.length is None


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
        folder = paths[0]
        shards = _read_index(folder / INDEX_FILE)
        columns = [_stored_column(folder / INDEX_FILE, shards, i, options) for i in range(len(shards[0].column_names))]
        counts = [shard.samples for shard in shards]
        return blocks.open_blocks(self.name, folder, columns, counts, lambda i: _open_shard(folder, shards[i]))

    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        """Shards of a column `tokens`, or the one that the options name; `compress`: zstd or nothing."""
        stream = build_stream(source, options, "rows")
        name, kind = options.column or "tokens", "uint16" if stream.dtype == "U16" else "uint32"
        values = (_shape_header(tokens.shape) + tokens.tobytes() for tokens in documents(stream.parts()))
        samples = (len(value).to_bytes(4, "little") + value for value in values)
        files = _write_shards(samples, out, options, {name: blocks.Encoding(f"ndarray:{kind}", None, list)})
        return stream.written(list(map(Path, files)), stream.digest.num_documents)

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """Shards of all columns; `compress`: zstd or nothing."""
        encodings = {name: _encoding(kind) for name, kind in blocks.kinds_of(source, "MDS").items()}
        digest = tables.TableDigest()
        samples = blocks.encode_rows(source, list(encodings.values()), options, digest)
        return blocks.written_rows(_write_shards(samples, out, options, encodings), digest)

    def schema(self, folder: Path) -> pa.Schema:
        return _schema(_read_index(folder / INDEX_FILE)[0])


class MdsDataset(external.ExternalDataset):
    """The shards of one directory, in the index's order."""

    def __init__(self, path: Path, dtype: Any = None, column: str | None = None) -> None:
        self._folder, self._shards = path, _read_index(path / INDEX_FILE)
        self._column, self.left_out = _find_column(path / INDEX_FILE, self._shards, dtype, column)
        with ThreadPoolExecutor(16) as pool:
            counts = list(pool.map(self._count, self._shards))
            stored = list(pool.map(partial(_stored_file, path), self._shards))
        marks = external.fingerprints([file for file, _ in stored])
        files = [path / shard.raw_data.basename for shard in self._shards]
        parts = [
            external.ExternalSlice(i, external.shown_name(path, file), 0, count, shard.samples, stored[i][1].bytes)
            for i, (file, shard, count) in enumerate(zip(files, self._shards, counts))
        ]
        settings = {"column": self._column.name, "encodings": [self._column.encoding]}
        super().__init__(path, "mds", external.stored_dtype(self._column.kind), files, marks, parts, settings)

    def _exists(self, file: int) -> bool:
        shard = self._shards[file]
        return any(f is not None and (self._folder / f.basename).is_file() for f in (shard.raw_data, shard.zip_data))

    def _mark(self, file: int) -> bytes:
        path, stored = _stored_file(self._folder, self._shards[file])
        _check_hash(path, stored)
        return external.fingerprint(path, len(self.files))

    def _hash_checks(self) -> tuple[str, ...]:
        names = [
            _stored_file(self._folder, shard)[1].hash_name for i, shard in enumerate(self._shards) if self._exists(i)
        ]
        return (f"{' and '.join(sorted(set(names)))} of every shard",) if names and all(names) else ()

    def _read(self, part: external.ExternalSlice) -> tuple[NDArray[Any], external.U64]:
        shard, column = self._shards[part.file], self._column
        path, stored = _stored_file(self._folder, shard)
        is_raw = stored is shard.raw_data
        memory = self._map(path, stored.bytes) if is_raw else _decompress(path, shard)
        begins, stops = self._locate(path, shard, memory)
        if not is_raw or len(column.sizes) > 1 or column.length is None:
            _check_hash(path, stored)
        values = blocks.join_values(memory, begins, stops)
        document_ends = np.cumsum((stops - begins) // column.kind.itemsize).astype(np.uint64)
        return external.as_tokens(values.view(column.kind), path), document_ends

    def _count(self, shard: MdsShard) -> int:
        column, (path, stored) = self._column, _stored_file(self._folder, shard)
        external.check_size(path, stored.bytes, external.file_size(path))
        if column.length is not None:
            return shard.samples * column.length
        width, is_raw = column.kind.itemsize, stored is shard.raw_data
        if not is_raw or [i for i, size in enumerate(column.sizes) if size is None] != [column.index]:
            with limit_large_blocks(0 if is_raw else shard.raw_data.bytes):
                begins, stops = self._locate(
                    path, shard, external.map_file(path) if is_raw else _decompress(path, shard)
                )
                return int((stops - begins).sum()) // width
        head = external.read_head(path, 4 * (shard.samples + 2))
        values = (
            np.diff(read_offsets(path, head, shard.samples, stored.bytes)) - 4 - sum(size or 0 for size in column.sizes)
        )
        if column.has_header:
            values = _without_header(values, width)
        if len(values) and (int(values.min()) < 0 or bool((values % width).any())):
            raise damaged(path, f"whole tokens {column.kind} in every sample", "others")
        return int(values.sum()) // width

    def _locate(self, path: Path, shard: MdsShard, memory: external.Bytes8) -> tuple[I64, I64]:
        column = self._column
        offsets = read_offsets(path, memory, shard.samples, len(memory))
        begins, stops = blocks.column_bounds(path, memory, offsets, column.sizes, column.index, column.name)
        if column.has_header and len(begins):
            if (begins >= stops).any():
                raise damaged(path, "a shape before the tokens of every sample", "none")
            shapes = memory[begins].astype(np.int64)
            if (shapes >> 2 != 1).any():
                raise damaged(path, "vectors of tokens", f"{int(shapes.max()) >> 2} dimensions")
            begins = begins + 1 + (1 << (shapes & 3))
        if (begins > stops).any() or ((stops - begins) % column.kind.itemsize).any():
            raise damaged(path, f"whole tokens {column.kind} in every sample", "others")
        return begins, stops


def _encoding(kind: blocks.ColumnKind) -> blocks.Encoding:
    match kind.name:
        case "text":
            return blocks.Encoding("str", None, blocks.encode_bytes)
        case "bytes":
            return blocks.Encoding("bytes", None, blocks.encode_bytes)
        case "number" if kind.dtype in _TYPES:
            name = "int" if kind.dtype == "int64" else kind.dtype
            return blocks.Encoding(name, np.dtype(kind.dtype).itemsize, blocks.encode_numbers(_TYPES[kind.dtype]))
        case "vector" if kind.dtype in _TYPES and kind.shape is not None and all(kind.shape):
            name = f"ndarray:{kind.dtype}:{','.join(map(str, kind.shape))}"
            size = math.prod(kind.shape) * np.dtype(kind.dtype).itemsize
            return blocks.Encoding(name, size, blocks.encode_vectors(lambda shape: b""))
        case "vector" if kind.dtype in _TYPES:
            return blocks.Encoding(f"ndarray:{kind.dtype}", None, blocks.encode_vectors(_shape_header))
    return blocks.Encoding("json", None, blocks.encode_json)


def _shape_header(shape: tuple[int, ...]) -> bytes:
    code = int(np.searchsorted([1 << 8, 1 << 16, 1 << 32], max(shape), "right"))
    return bytes([len(shape) << 2 | code]) + b"".join(n.to_bytes(1 << code, "little") for n in shape)


def _write_shards(
    samples: Iterable[bytes], out: Path, options: ConvertOptions, encodings: dict[str, blocks.Encoding]
) -> list[str]:
    is_packed = blocks.uses_zstd(options, "MDS")
    settings: dict[str, Any] = {
        "column_encodings": [encoding.name for encoding in encodings.values()],
        "column_names": list(encodings),
        "column_sizes": [encoding.size for encoding in encodings.values()],
        "compression": f"zstd:{_LEVEL}" if is_packed else None,
        "format": "mds",
        "hashes": ["sha256"],
        "size_limit": options.slice_bytes,
        "version": 2,
    }
    out.mkdir()
    shards, files = list[dict[str, Any]](), list[str]()
    for num_samples, raw in blocks.build_blocks(
        samples, options.slice_bytes, json.dumps(settings, sort_keys=True).encode()
    ):
        name = f"shard.{len(shards):05d}.mds"
        raw_data, zip_data, stored = _described(name, raw), None, raw
        if is_packed:
            name, stored = f"{name}.zstd", zstandard.ZstdCompressor(level=_LEVEL).compress(raw)
            zip_data = _described(name, stored)
        (out / name).write_bytes(stored)
        files.append(name)
        shards.append({**settings, "samples": num_samples, "raw_data": raw_data, "zip_data": zip_data})
    (out / INDEX_FILE).write_text(json.dumps({"shards": shards, "version": 2}, sort_keys=True))
    return [*files, INDEX_FILE]


def _described(name: str, data: bytes) -> dict[str, Any]:
    return {"basename": name, "bytes": len(data), "hashes": {"sha256": hashlib.sha256(data).hexdigest()}}


def _open_shard(folder: Path, shard: MdsShard) -> tuple[Path, external.Bytes8]:
    path, stored = _stored_file(folder, shard)
    external.check_size(path, stored.bytes, external.file_size(path))
    _check_hash(path, stored)
    return path, external.map_file(path) if stored is shard.raw_data else _decompress(path, shard)


def _stored_file(folder: Path, shard: MdsShard) -> tuple[Path, ShardFile]:
    for file in (shard.raw_data, shard.zip_data):
        if file is not None and (path := folder / file.basename).is_file():
            return path, file
    path = folder / shard.raw_data.basename
    raise DatasetError(f"{path}: expected it, or its compressed form, got neither. Fetch it again.")


def _stored_column(path: Path, shards: list[MdsShard], index: int, options: ConvertOptions) -> blocks.StoredColumn:
    name, encoding = shards[0].column_names[index], shards[0].column_encodings[index]
    size = shards[0].column_sizes[index] or None
    if encoding == "bytes" and name in (*external.TOKEN_COLUMNS, options.column):
        return blocks.StoredColumn(
            name, size, partial(np.frombuffer, dtype=_bytes_type(path, name, options.input_dtype))
        )
    kind, _, rest = encoding.partition(":")
    if kind == "ndarray" and rest.partition(":")[0] in _TYPES:
        dtype, _, dims = rest.partition(":")
        shape = tuple(map(int, dims.split(","))) if re.fullmatch(r"\d{1,9}(,\d{1,9})*", dims) else None
        if shape is not None or not dims:
            return blocks.StoredColumn(name, size, partial(_decode_array, np.dtype(_TYPES[dtype]), shape))
    if rest or kind not in _DECODERS:
        raise DatasetError(
            f"{path}: expected columns that are read without running code, got {name}: {encoding!r}. Write them with "
            "MosaicML's library as JSON or arrays."
        )
    return blocks.StoredColumn(name, size, _DECODERS[kind])


def _decode_array(dtype: np.dtype[Any], shape: tuple[int, ...] | None, data: bytes) -> NDArray[Any]:
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
        is_tokens = re.match("ndarray:u?int", encoding) or (encoding == "bytes" and name in candidates)
        kinds[name] = layout.TOKENS if is_tokens else pa.string() if encoding == "str" else pa.binary()
    return pa.schema(kinds)


def _find_column(
    path: Path, shards: list[MdsShard], dtype: Any, column: str | None
) -> tuple[TokenColumn, tuple[str, ...]]:
    names, encodings, sizes = shards[0].column_names, shards[0].column_encodings, shards[0].column_sizes
    chosen, left_out = layout.layout_of_tokens(path.parent, _schema(shards[0], column), column, external.REMEDY)
    index = names.index(chosen)
    kind, length = _parse_encoding(path, chosen, encodings[index], dtype)
    if length is not None and sizes[index] != length * kind.itemsize:
        raise DatasetError(f"{path}: expected {length * kind.itemsize} bytes of column {chosen}, got {sizes[index]}.")
    # The reference takes a size of 0 for none.
    return TokenColumn(chosen, encodings[index], kind, length, index, [size or None for size in sizes]), left_out


def _parse_encoding(path: Path, name: str, encoding: str, dtype: Any) -> tuple[np.dtype[Any], int | None]:
    what, *rest = encoding.split(":")
    if what == "bytes":
        return _bytes_type(path, name, dtype), None
    kind = np.dtype(rest[0]).newbyteorder("<")
    if len(rest) < 2:
        return kind, None
    shape = rest[1].split(",")
    if not all(n.isascii() and n.isdigit() and 0 < len(n) < 10 for n in shape):
        raise DatasetError(f"{path}: expected a shape of numbers in {encoding!r}.")
    return kind, math.prod(map(int, shape))


def _bytes_type(path: Path, name: str, dtype: Any) -> np.dtype[Any]:
    if dtype is None:
        raise UsageError(
            f"{path}: column {name} is bytes, of no known type. Say it: open_external(PATH, dtype='int64') (LLM "
            "Foundry's), 'uint16' …, or --set input_dtype=int64 of forebay convert."
        )
    return external.token_dtype(dtype)


def _decompress(path: Path, shard: MdsShard) -> external.Bytes8:
    assert shard.zip_data is not None
    packed, size = shard.zip_data.bytes, shard.raw_data.bytes
    check_unpacked(path, packed, size + 1)
    if shard.samples > max(blocks.MAX_SAMPLES, packed):  # Empty ones: each costs memory here.
        raise DatasetError(f"{path}: expected at most {blocks.MAX_SAMPLES} samples, got {shard.samples}.")
    data = external.read_head(path, packed + 1)
    external.check_size(path, packed, len(data))
    raw = bounded_unpack(data, (shard.compression or "").partition(":")[0], size + 1, path)
    if len(raw) != size:
        raise damaged(path, f"{size} bytes once decompressed", f"{len(raw)} or more")
    return np.frombuffer(raw, np.uint8)


def _check_hash(path: Path, stored: ShardFile) -> None:
    if name := stored.hash_name:
        with external.reading(path), path.open("rb") as file:
            digest = hashlib.file_digest(file, name).hexdigest()
        if digest != (stored.hashes or {})[name]:
            raise DatasetError(f"{path}: expected {name} {(stored.hashes or {})[name]}, got {digest}. Fetch it again.")


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
