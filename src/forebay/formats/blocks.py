"""Samples behind a table of offsets, which MDS calls shards and LitData chunks: how rows become blocks and back.

A block, little endian: u32 n samples, u32 offsets [n + 1] from its first byte, perhaps settings, the samples. A sample:
u32 size of each column that has no fixed size, then the columns. A column without gaps has the encoding of its type;
one with gaps, or of nested values, is JSON. Whether a column has gaps is found by reading the table once before it is
written, unless its fields are declared as not nullable. Every offset and size is checked before it is used. Memory is
two blocks.
"""

import hashlib
import struct
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np
import orjson
import pyarrow as pa
import zstandard
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from forebay.arrays import I64, U8, U64, Array, DType
from forebay.base import Json
from forebay.errors import DatasetError, UsageError
from forebay.formats import external, tables
from forebay.formats.conversion import ConvertOptions, TableSource, Written
from forebay.formats.jsonl import json_values
from forebay.formats.records import batched
from forebay.storage.compression import bounded_unpack, limit_large_blocks

INDEX_FILE = "index.json"
MAX_BLOCK_BYTES = (1 << 32) - 1  # Offsets are u32.
_MAX_INDEX_BYTES = 1 << 30
LEVEL = 3  # The level at which zstd compresses.
_Index = TypeVar("_Index", bound=BaseModel)
_ARROW_MAGIC = b"LDARW01\0"  # Behind rows that LitData stores as Arrow.
_MAX_SAMPLES = 1 << 20  # A compressed block of few bytes may claim no more samples than this.
Encode: TypeAlias = Callable[[pa.Array], list[bytes]]
Decode: TypeAlias = Callable[[bytes], Any]
_FILE_NAMES = ("basename", "filename")  # Keys of MDS and LitData.


def _inside_directory(name: str) -> str:
    if "\\" in name or not name.isprintable() or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"a file inside the directory, not {name!r}")
    return name


FileName: TypeAlias = Annotated[str, AfterValidator(_inside_directory)]
"""The name of a file in an index; one that leads out of the directory is refused."""
NumBytes: TypeAlias = Annotated[int, Field(ge=0, le=MAX_BLOCK_BYTES)]
NumSamples: TypeAlias = Annotated[int, Field(ge=0, le=MAX_BLOCK_BYTES // 4)]


@dataclass(frozen=True)
class ColumnKind:
    """What a column holds: `text`, `bytes`, a `number`, a `vector` of numbers (`shape` None if of any length), `json`.

    `dtype` is NumPy's name of the type of the numbers.
    """

    name: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Encoding:
    """How a format stores a column: its name there, the encoder, and the bytes of every value (None if they differ)."""

    name: str
    encode: Encode
    size: int | None = None


def _kinds(source: TableSource, what: str) -> dict[str, ColumnKind]:
    """Return what each column of a table holds. Raises UsageError for columns that a format of blocks cannot hold."""
    advice = "Write --to parquet, or leave the column out."
    tables.refuse_columns(source.schema, tables.is_beyond_json, what, advice)
    if not source.schema.names:
        raise UsageError(f"{what}: expected a table with columns, got none.")
    unknown = {field.name for field in source.schema if field.nullable}
    gaps: set[str] = set()
    for batch in source.batches() if unknown else ():
        for name in unknown - gaps:
            column = batch.column(name)
            if column.null_count or (tables.is_list(column.type) and tables.flatten(column)[1].null_count):
                gaps.add(name)
    kinds = {field.name: _kind(field.type, field.name in gaps) for field in source.schema}
    for name, kind in kinds.items():
        if kind.name == "json" and tables.contains(source.schema.field(name).type, tables.is_bytes):
            raise UsageError(f"{what}: expected bytes in every row of {name!r}, got gaps or nested bytes. {advice}")
    return kinds


def _kind(kind: Any, has_gaps: bool) -> ColumnKind:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if has_gaps:
        return ColumnKind("json")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return ColumnKind("text")
    if tables.is_bytes(kind):
        return ColumnKind("bytes")
    if tables.is_number(kind):
        return ColumnKind("number", np.dtype(kind.to_pandas_dtype()).name)
    leaf, shape = tables.leaf_type(kind), tables.tensor_shape(kind)
    if tables.is_number(leaf) and (shape is not None or (tables.is_list(kind) and kind.value_type == leaf)):
        return ColumnKind("vector", np.dtype(leaf.to_pandas_dtype()).name, shape)
    return ColumnKind("json")


def encode_bytes(column: pa.Array) -> list[bytes]:
    """Return the values of a column of text or bytes."""
    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    binary = column if tables.is_bytes(column.type) else column.cast(pa.large_string()).cast(pa.large_binary())
    values: list[bytes] = _without_gaps(binary).to_pylist()
    return values


def encode_numbers(dtype: str) -> Encode:
    """Return the encoder of numbers as one type."""
    width = np.dtype(dtype).itemsize

    def encode(column: pa.Array) -> list[bytes]:
        data = _without_gaps(column).to_numpy(zero_copy_only=False).astype(dtype).tobytes()
        return [data[i : i + width] for i in range(0, len(data), width)]

    return encode


def encode_vectors(header: Callable[[tuple[int, ...]], bytes]) -> Encode:
    """Return the encoder of vectors and tensors: a header made of the shape, then the numbers."""

    def encode(column: pa.Array) -> list[bytes]:
        counts, leaves = tables.flatten(_without_gaps(column))
        shape = tables.tensor_shape(column.type)
        values = _without_gaps(leaves).to_numpy(zero_copy_only=False)
        numbers = values.astype(values.dtype.newbyteorder("<"), copy=False)
        return [header(shape or (len(v),)) + v.tobytes() for v in tables.split_values(numbers, counts)]

    return encode


def encode_json(column: pa.Array) -> list[bytes]:
    """Return the values of any column as JSON."""
    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    return [orjson.dumps(value) for value in json_values("a column", column, 0)]


def _without_gaps(column: pa.Array) -> pa.Array:
    if column.null_count:
        raise DatasetError("expected a value in every row of a column declared as not nullable, got none in some.")
    return column


def encode_table(
    source: TableSource, what: str, encoding: Callable[[ColumnKind], Encoding], options: ConvertOptions
) -> tuple[dict[str, Encoding], Iterator[bytes], tables.TableDigest]:
    """Return the encoding of each column, each row as a sample, and the digest, which grows with them."""
    encodings, digest = {name: encoding(kind) for name, kind in _kinds(source, what).items()}, tables.TableDigest()
    variable = [i for i, column in enumerate(encodings.values()) if column.size is None]
    head = struct.Struct(f"<{len(variable)}I")

    def samples() -> Iterator[bytes]:
        for batch in source.batches():
            columns = [column.encode(values) for column, values in zip(encodings.values(), batch.columns)]
            for row in zip(*columns):
                try:
                    yield head.pack(*(len(row[i]) for i in variable)) + b"".join(row)
                except struct.error as error:
                    raise DatasetError(f"{source.format}: expected values below 4 GiB, got a larger one.") from error
            digest.add(batch)
            options.on_progress(batch.num_rows)

    return encodings, samples(), digest


def written_rows(files: Sequence[Path], digest: tables.TableDigest) -> Written:
    """Return the result of writing a table as the files of a directory."""
    return Written(tuple(files), None, digest.num_rows, 0, digest.text())


def build_blocks(
    samples: Iterable[bytes], options: ConvertOptions, what: str, settings: bytes = b""
) -> Iterator[tuple[int, bytes, bytes | None]]:
    """Yield blocks of at most `slice_bytes` (or one sample): number of samples, block, and compressed if it is to be.

    At least one block. Raises UsageError for another compression than zstd.
    """
    if options.compress not in ("", "none", "zstd"):
        raise UsageError(f"--set compress: expected zstd or none for {what}, got {options.compress!r}.")

    def built(waiting: list[bytes]) -> tuple[int, bytes, bytes | None]:
        block, is_packed = _block(waiting, settings), options.compress == "zstd"
        return len(waiting), block, zstandard.ZstdCompressor(level=LEVEL).compress(block) if is_packed else None

    waiting: list[bytes] = []
    size = num_blocks = 0
    for sample in samples:
        if waiting and 8 + len(settings) + size + len(sample) + 4 > options.slice_bytes:
            yield built(waiting)
            waiting, size, num_blocks = [], 0, num_blocks + 1
        waiting.append(sample)
        size += len(sample) + 4
    if waiting or not num_blocks:
        yield built(waiting)


def _block(samples: list[bytes], settings: bytes) -> bytes:
    offsets = np.cumsum([4 * (len(samples) + 2) + len(settings), *map(len, samples)])
    if int(offsets[-1]) > MAX_BLOCK_BYTES:
        raise DatasetError(f"expected samples below 4 GiB, got one of {len(samples[-1])} bytes. Leave it out.")
    return b"".join([struct.pack("<I", len(samples)), offsets.astype("<u4").tobytes(), settings, *samples])


def merge_indexes(parts: Mapping[str, Json]) -> bytes:
    """Return the index.json of one dataset made of directories, given what begins the names of their files in it.

    The parts, values of their index.json in this order, were written with the same schema, without gaps, each by
    `write_rows` or `write_tokens` of MDS or LitData.
    """
    first = next(iter(parts.values()))
    key = "shards" if "shards" in first else "chunks"
    entries = []
    for prefix, index in parts.items():
        if _settings(index) != _settings(first):
            raise DatasetError(f"{prefix}: its columns are not those of {next(iter(parts))}. Write them alike.")
        entries += [_with_prefix(entry, prefix) for entry in index[key]]
    merged = {**first, key: entries}
    if "updated_at" in first:
        merged["updated_at"] = number_of("".join(index["updated_at"] for index in parts.values()))
    return orjson.dumps(merged, option=orjson.OPT_SORT_KEYS)


def _with_prefix(entry: Any, prefix: str) -> Any:
    """An entry of an index with other names of files, which are in it or in the objects in it."""
    if not isinstance(entry, dict):
        return entry
    return {
        name: prefix + value if name in _FILE_NAMES else _with_prefix(value, prefix) for name, value in entry.items()
    }


def number_of(text: str) -> str:
    """Return a number made of a text, for LitData's `updated_at`, by which readers keep their caches."""
    return str(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16))


def _settings(index: Json) -> Any:
    shards = index.get("shards") or [{}]
    return index.get("config") or [shards[0].get(f"column_{name}") for name in ("names", "encodings", "sizes")]


def read_index(path: Path, model: type[_Index], expected: str) -> _Index:
    """Return an index.json. Raises DatasetError if it is too large, or not what is expected."""
    if (size := external.file_size(path)) > _MAX_INDEX_BYTES:
        raise damaged(path, f"at most {_MAX_INDEX_BYTES} bytes", str(size))
    try:
        return model.model_validate_json(external.read_head(path, size))
    except ValidationError as error:
        fault = error.errors()[0]
        raise damaged(path, expected, f"{'.'.join(map(str, fault['loc'])) or 'it'}: {fault['msg']}") from error


def read_offsets(path: Path, head: Any, samples: int, num_bytes: int) -> I64:
    """Return where each sample of a block begins, and the end: int64 [n + 1], rising from after the offsets."""
    begin = 4 * (samples + 2)
    if len(head) < begin:
        raise damaged(path, f"offsets of {samples} samples", f"{len(head)} bytes")
    numbers = np.frombuffer(head, "<u4", samples + 2).astype(np.int64)
    offsets = numbers[1:]
    if numbers[0] != samples:
        raise damaged(path, f"{samples} samples, as its index says", str(numbers[0]))
    if offsets[0] < begin or offsets[-1] != num_bytes or (np.diff(offsets) < 0).any():
        raise damaged(path, f"samples from byte {begin} to {num_bytes}", f"{offsets[0]} to {offsets[-1]}")
    return offsets


def column_bounds(
    path: Path, memory: U8, offsets: I64, sizes: Sequence[int | None], index: int, name: str
) -> tuple[I64, I64]:
    """Return where a column of each sample begins and ends; a size of None is stored in each sample."""
    size_at, limits = offsets[:-1], offsets[1:]
    begins = stops = size_at + 4 * list(sizes).count(None)
    for size in sizes[: index + 1]:
        begins = stops
        if size is None:
            if (size_at + 4 > limits).any():
                raise damaged(path, "the sizes of its columns in every sample", "fewer bytes")
            own = sum(memory[size_at + k].astype(np.int64) << 8 * k for k in range(4))
            size_at, stops = size_at + 4, begins + own
        else:
            stops = begins + size
    if (stops > limits).any():
        raise damaged(path, f"column {name} inside its sample", "one beyond")
    return begins, stops


def join_values(memory: U8, begins: I64, stops: I64) -> U8:
    """Return the bytes from each begin to its stop: a view where they follow one another, else a copy."""
    if not len(begins):
        return memory[:0]
    if (begins[1:] == stops[:-1]).all():
        return memory[int(begins[0]) : int(stops[-1])]
    return np.concatenate([memory[a:b] for a, b in zip(begins.tolist(), stops.tolist())])


@dataclass(frozen=True)
class Block:
    """A file of samples as its index describes it."""

    path: Path
    num_samples: int
    num_bytes: int  # Once decompressed.
    stored_bytes: int
    codec: str = ""  # "" where it is not compressed.
    hash_name: str = ""  # hashlib's; "" where the index has none.
    digest: str = ""  # The hash of the file.

    def read(self) -> U8:
        """Return its bytes, decompressed; a map where it is not compressed. Raises DatasetError."""
        external.check_size(self.path, self.stored_bytes)
        memory = external.map_file(self.path)
        if self.codec:
            memory = self._unpacked(memory)
        if memory[-8:].tobytes() == _ARROW_MAGIC:
            raise DatasetError(
                f"{self.path}: expected samples, got rows that LitData stores as Arrow. Read them with its library, "
                "and write them as Parquet."
            )
        return memory

    def _unpacked(self, packed: U8) -> U8:
        if self.num_samples > max(_MAX_SAMPLES, self.stored_bytes):  # Empty ones: each costs memory here.
            raise DatasetError(f"{self.path}: expected at most {_MAX_SAMPLES} samples, got {self.num_samples}.")
        raw = bounded_unpack(packed.data, self.codec, self.num_bytes + 1, self.path)
        if len(raw) != self.num_bytes:
            raise damaged(self.path, f"{self.num_bytes} bytes once decompressed", f"{len(raw)} or more")
        return np.frombuffer(raw, np.uint8)

    def check_hash(self) -> None:
        """Raise DatasetError if the file has another hash than its index says."""
        if self.hash_name:
            with external.reading(self.path), self.path.open("rb") as file:
                digest = hashlib.file_digest(file, self.hash_name).hexdigest()
            if digest != self.digest:
                raise DatasetError(
                    f"{self.path}: expected {self.hash_name} {self.digest}, got {digest}. Fetch it again."
                )


@dataclass(frozen=True)
class TokenColumn:
    """Where the tokens are in a sample."""

    name: str
    kind: DType  # Type of a token.
    index: int  # Among all columns.
    sizes: Sequence[int | None]  # Bytes of each column, None where each sample says it.
    length: int | None = None  # Tokens in a sample, where fixed.


class BlockDataset(external.ExternalDataset):
    """The blocks of one directory, in the index's order: one sample is one document, one block one slice."""

    def __init__(self, path: Path, kind: str, column: TokenColumn, names: Sequence[str], settings: Any) -> None:
        self._column = column
        with ThreadPoolExecutor(16) as pool:
            counts = list(pool.map(self._count, range(len(names))))
            blocks = list(pool.map(self._block, range(len(names))))
        parts = [
            external.ExternalSlice(i, name, 0, count, block.num_samples, block.stored_bytes)
            for i, (name, count, block) in enumerate(zip(names, counts, blocks))
        ]
        marks = external.fingerprints([block.path for block in blocks])
        files = [path / name for name in names]
        super().__init__(path, kind, external.stored_dtype(column.kind), files, marks, parts, settings)

    @abstractmethod
    def _block(self, file: int) -> Block:
        """Return a block as it is stored now. Raises DatasetError if it is missing."""

    def _count(self, file: int) -> int:
        block = self._block(file)
        with limit_large_blocks(block.num_bytes if block.codec else 0):
            begins, stops = self._locate(block, block.read())
        return int((stops - begins).sum()) // self._column.kind.itemsize

    def _bounds(self, block: Block, memory: U8, offsets: I64) -> tuple[I64, I64]:
        """Return where the tokens of each sample begin and end."""
        return column_bounds(block.path, memory, offsets, self._column.sizes, self._column.index, self._column.name)

    def _locate(self, block: Block, memory: U8) -> tuple[I64, I64]:
        offsets = read_offsets(block.path, memory, block.num_samples, len(memory))
        begins, stops = self._bounds(block, memory, offsets)
        if (begins > stops).any() or ((stops - begins) % self._column.kind.itemsize).any():
            raise damaged(block.path, f"whole tokens {self._column.kind} in every sample", "others")
        return begins, stops

    def _mark(self, file: int) -> bytes:
        block = self._block(file)
        block.check_hash()
        return external.fingerprint(block.path, len(self.files))

    def _read(self, part: external.ExternalSlice) -> tuple[Array, U64]:
        block, column = self._block(part.file), self._column
        memory = block.read() if block.codec else self._map(block.path, block.num_bytes)
        begins, stops = self._locate(block, memory)
        if block.codec or len(column.sizes) > 1 or column.length is None:
            block.check_hash()
        document_ends = np.cumsum((stops - begins) // column.kind.itemsize).astype(np.uint64)
        return external.as_tokens(join_values(memory, begins, stops).view(column.kind), block.path), document_ends


@dataclass(frozen=True)
class StoredColumn:
    """A column as it is read: its name, the bytes of every value (None if each sample says them), and the decoder."""

    name: str
    size: int | None
    decode: Decode


def open_blocks(
    name: str, folder: Path, columns: Sequence[StoredColumn], counts: Sequence[int],
    find_block: Callable[[int], Block], *, has_sizes: bool = True,
) -> TableSource:  # fmt: skip
    """Return the samples of blocks as rows; block i has `counts[i]` samples.

    Args:
        find_block: Returns a block by its number.
        has_sizes: Whether each sample says the sizes of its columns; else the one column is all of it.
    """
    if not any(counts):
        return TableSource(name, pa.schema([]), 0, lambda: iter(()))

    def read() -> Iterator[tuple[str, tables.Rows, int]]:
        for index, count in enumerate(counts):
            block = find_block(index)
            block.check_hash()
            path, memory = block.path, block.read()
            rows = _read_rows(path, memory, read_offsets(path, memory, count, len(memory)), columns, has_sizes)
            for batch in batched(rows, _weight, tables.BATCH_BYTES, tables.BATCH_ROWS):
                yield str(path), batch, sum(map(_weight, batch))

    return tables.open_samples(name, read, folder)


def _read_rows(
    path: Path, memory: Any, offsets: I64, columns: Sequence[StoredColumn], has_sizes: bool
) -> Iterator[Json]:
    """Yield the samples of a block as rows. Raises DatasetError where a value is not what its column says."""
    head = struct.Struct(f"<{sum(column.size is None for column in columns) if has_sizes else 0}I")
    data = memoryview(memory)
    for number, (start, stop) in enumerate(pairwise(offsets.tolist())):
        if stop - start < head.size:
            raise damaged(path, "the sizes of its columns in every sample", "fewer bytes")
        own, position = iter(head.unpack_from(data, start) or [stop - start]), start + head.size
        row = {}
        for column in columns:
            begin, position = position, position + (next(own) if column.size is None else column.size)
            if position > stop:
                raise damaged(path, f"column {column.name} inside its sample", "one beyond")
            try:
                row[column.name] = column.decode(bytes(data[begin:position]))
            except (ValueError, IndexError, struct.error) as error:
                raise damaged(path, f"a value of column {column.name} in sample {number}", str(error)) from error
        if position != stop:
            raise damaged(path, "samples as large as their columns", "others")
        yield row


def _weight(row: Json) -> int:
    return sum(len(value) if isinstance(value, (str, bytes)) else getattr(value, "nbytes", 8) for value in row.values())


def decode_number(dtype: str) -> Decode:
    """Return the decoder of numbers of a type."""
    return lambda data: np.frombuffer(data, dtype)[0]


def damaged(path: Path, expected: str, got: str) -> DatasetError:
    """Return the error for a block that contradicts itself or its index."""
    return DatasetError(f"{path}: expected {expected}, got {got[:200]}. It is damaged; fetch it again.")
