"""Tables: arrays as columns, the values of columns whatever their types, column types by inference, and parts on disk.

Hides: how an array of rows becomes a column without a copy; the size of a batch (16 MiB, or one row); that types are
inferred from the first 64 MiB; and where a part ends: `out` with a suffix is one file, otherwise a directory of
`part-00000.parquet` and so on, a new one once the one before holds `slice_bytes`.
"""

import gzip
import hashlib
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import zstandard

from forebay.arrays import I64, Array, DType
from forebay.base import Json
from forebay.errors import DatasetError, UsageError, listed
from forebay.formats.conversion import ConvertOptions, OutputFile, TableSource, Written
from forebay.formats.detect import detect
from forebay.formats.external import read_head
from forebay.formats.inputs import InputFile, ReadOptions, open_input
from forebay.formats.records import batched
from forebay.formats.report import Report
from forebay.storage.compression import sniff_compression
from forebay.storage.remote_path import RemotePath

Rows: TypeAlias = list[Json]
BATCH_BYTES = 16 << 20
BATCH_ROWS = 4096  # Of a batch that is made of rows as Python has them.
DTYPE_KEY = b"forebay.dtype"  # Of a field's metadata: the type that bits in the column are of, as `BF16`.
_BITS = ("BF16", "F8_E4M3", "F8_E5M2")
INFERRED_BYTES = 64 << 20
_MAX_UNPACKED_RATIO = 2000
_CHECK_RATIO = 100_000  # A file of zeros is to be reported, not refused.
_STEP_ROWS = 1024  # A part is looked at after so many rows, or fewer if they weigh more than an eighth of it.
_GROUP_ROWS = 1 << 16
_VALUES_AT_ONCE = 1 << 18  # As eight bytes each, and a few copies, they stay in the cache.


def open_unpacked(path: Path, max_unpacked_ratio: int = _MAX_UNPACKED_RATIO) -> BinaryIO:
    """Open a file's bytes, unpacked if it is compressed, as UTF-8 if it is text; for errors see `open_input`."""
    detection = detect(path)
    file = replace(input_of(path), compression=detection.compression, encoding=detection.encoding)
    return open_input(file, ReadOptions(max_unpacked_ratio=max_unpacked_ratio))


def input_of(path: Path, format: str = "") -> InputFile:
    """Return the file at a path, or at the URL of a RemotePath, as an input."""
    file = InputFile(str(path), path.name, format, "", path.stat().st_size, "")
    return replace(file, version=path.version, extent=path.extent) if isinstance(path, RemotePath) else file


@contextmanager
def open_for_check(path: Path, report: Report) -> Iterator[BinaryIO]:
    """Open a file that is checked from its front; its compression is added to the report."""
    if compression := sniff_compression(read_head(path, 16)):
        report.metadata["compression"] = compression
    with closing(open_unpacked(path, _CHECK_RATIO)) as file:
        yield file


def rows_at_once(row_bytes: float) -> int:
    """Rows of a batch, where a row takes so many bytes."""
    return max(1, min(1 << 16, int(BATCH_BYTES // max(1.0, row_bytes))))


def arrow_field(name: str, dtype: DType, shape: tuple[int, ...], kind: str = "") -> pa.Field:
    """The column that holds rows of an array: `shape` is a row's, `kind` the type, of which it may have the bits."""
    value = pa.from_numpy_dtype(dtype)
    metadata = {DTYPE_KEY: kind.encode()} if kind in _BITS else None
    return pa.field(name, pa.fixed_shape_tensor(value, shape) if shape else value, metadata=metadata)


def column_of(rows: Array, field: pa.Field) -> pa.Array:
    """Rows [N, …] as a column; no copy if they lie one behind another. Booleans are packed to bits."""
    flat, kind = np.ascontiguousarray(rows).reshape(-1), leaf_type(field.type)
    is_packed = flat.dtype == np.bool_
    values = pa.array(flat) if is_packed else pa.Array.from_buffers(kind, len(flat), [None, pa.py_buffer(flat)])
    if pa.types.is_list(field.type):
        offsets = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(math.prod(rows.shape[1:]))
        return pa.ListArray.from_arrays(pa.array(offsets), values, type=field.type)
    if not isinstance(field.type, pa.FixedShapeTensorType):
        return values
    lists = pa.FixedSizeListArray.from_arrays(values, max(1, math.prod(field.type.shape)))
    return pa.ExtensionArray.from_storage(field.type, lists)


def batch_of(arrays: Mapping[str, Array], schema: pa.Schema) -> pa.RecordBatch:
    """Rows of several arrays, in the schema's order."""
    return pa.record_batch([column_of(arrays[field.name], field) for field in schema], schema=schema)


def num_bytes(column: pa.Array) -> int:
    """Bytes of a column's values; of a dictionary of text those that its rows stand for."""
    if not isinstance(column, pa.DictionaryArray):
        return int(column.nbytes)
    size, kind = int(column.indices.nbytes), column.dictionary.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_string(kind):
        size += pc.sum(pc.binary_length(column.dictionary).take(column.indices)).as_py() or 0
    return size


def list_column(vectors: Sequence[Any], kind: Any) -> pa.Array:
    """Vectors of numbers or lists of bytes, None where one is missing, as a column of lists."""
    offsets = pa.array(np.cumsum([0, *(0 if vector is None else len(vector) for vector in vectors)], dtype=np.int32))
    present = [vector for vector in vectors if vector is not None]
    if is_number(kind.value_type):
        leaves = pa.array(np.concatenate([np.empty(0, kind.value_type.to_pandas_dtype()), *present]))
    else:
        leaves = pa.array([value for vector in present for value in vector], pa.binary()).cast(kind.value_type)
    mask = pa.array([vector is None for vector in vectors]) if len(present) < len(vectors) else None
    return pa.ListArray.from_arrays(offsets, leaves, type=kind, mask=mask)


def flatten(column: pa.Array) -> tuple[I64, pa.Array]:
    """How many values each row has, -1 if it is missing, int64 [N]; and all values, one after another.

    Lists in lists are one list. Of plain columns every row has one.
    """
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if not is_list(column.type):
        counts = np.ones(len(column), np.int64)
        if column.null_count:
            counts[np.asarray(column.is_null())] = -1
        return counts, column.drop_null()
    missing = np.asarray(column.is_null())
    if pa.types.is_fixed_size_list(column.type):
        lengths = np.where(missing, 0, column.type.list_size).astype(np.int64)
    else:
        lengths = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    inner = column.flatten()
    if is_list(inner.type) or isinstance(inner, pa.ExtensionArray):
        counts, leaves = flatten(inner)
        edges = np.concatenate([[0], np.cumsum(np.maximum(counts, 0))])
        stops = np.cumsum(lengths)
        lengths = edges[stops] - edges[stops - lengths]
    else:
        leaves = inner
    return np.where(missing, -1, lengths), leaves


def split_values(values: Any, counts: I64) -> list[Any]:
    """The values of each row, None for -1 of them."""
    stops = np.cumsum(np.maximum(counts, 0)).tolist()
    return [None if n < 0 else values[stop - n : stop] for n, stop in zip(counts.tolist(), stops)]


def tensor_shape(kind: Any) -> tuple[int, ...] | None:
    """The shape of every row of a column of this type, if the type fixes it: of tensors, and of lists of fixed size."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return tuple(kind.shape)
    if not pa.types.is_fixed_size_list(kind):
        return None
    if not pa.types.is_nested(kind.value_type):
        return (kind.list_size,)
    inner = tensor_shape(kind.value_type)
    return None if inner is None else (kind.list_size, *inner)


def leaf_type(kind: Any) -> Any:
    """The type of the values in lists and tensors; of plain columns their own."""
    while is_list(kind) or isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind.value_type
    return kind


def is_list(kind: Any) -> bool:
    """Return whether a type is of lists, of any or a fixed length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_vector(kind: Any) -> bool:
    """Return whether a type is of vectors: lists, or tensors of one dimension, whose values are not nested."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return len(kind.shape) == 1
    return (
        is_list(kind)
        and not pa.types.is_nested(kind.value_type)
        and not isinstance(kind.value_type, pa.BaseExtensionType)
    )


def is_number(kind: Any) -> bool:
    """Whether a type is of booleans, integers or floats."""
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def is_bytes(kind: Any) -> bool:
    """Whether a type is of bytes that are no text."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def is_beyond_json(kind: Any) -> bool:
    """Whether JSON has no values of this type (bytes apart)."""
    return bool(pa.types.is_temporal(kind) or pa.types.is_decimal(kind) or pa.types.is_map(kind))


def contains(kind: Any, test: Callable[[Any], bool]) -> bool:
    """Whether a type, or one that it is made of, is such."""
    if test(kind):
        return True
    if isinstance(kind, pa.BaseExtensionType):
        return contains(kind.storage_type, test)
    return any(contains(kind.field(i).type, test) for i in range(kind.num_fields))


def infer_schema(batches: Iterable[tuple[str, Rows, int]]) -> pa.Schema | None:
    """The columns of (place, rows, bytes) up to the first 64 MiB, of types that hold all values; None of none."""
    schema = None
    seen = 0
    for location, rows, size in batches:
        columns = _infer(rows, location)
        schema = columns if schema is None else _merge(schema, columns, location)
        seen += size
        if seen >= INFERRED_BYTES:
            break
    return schema


def rows_batch(rows: Rows, schema: pa.Schema, location: str) -> pa.RecordBatch:
    """Rows in these columns. Raises DatasetError if they have others, or do not fit."""
    columns = _infer(rows, location)
    if columns != schema and _merge(schema, columns, location) != schema:
        names = {field.name: field.type for field in schema}
        raise DatasetError(
            f"{location} and after: expected columns {listed(names)}, as in the first 64 MiB, got "
            f"{listed(field for field in columns if names.get(field.name) != field.type)}. "
            "Put a line with such values first, or make the types alike."
        )
    with expecting(schema.names, location):
        return pa.RecordBatch.from_struct_array(pa.array(rows, pa.struct(list(schema))))


def _infer(rows: Rows, location: str) -> pa.Schema:
    with expecting("fields of one type each", location):
        return pa.schema(pa.array(rows).type.fields)


def _merge(first: pa.Schema, second: pa.Schema, location: str) -> pa.Schema:
    with expecting("fields of the types before", location):
        return pa.unify_schemas([first, second], promote_options="permissive")


@contextmanager
def expecting(what: object, location: str) -> Iterator[None]:
    """Raise DatasetError where rows from a place on do not fit."""
    try:
        yield
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise DatasetError(f"{location} and after: expected {what}, got: {error}.") from error


def open_samples(name: str, batches: Callable[[], Iterator[tuple[str, Rows, int]]], path: Path) -> TableSource:
    """Return the table of (place, rows, bytes) whose values may be NumPy arrays; reads the first 64 MiB for its types.

    Arrays `name` of one type and shape are a column of tensors, vectors of one type a column of lists.
    """
    arrays: dict[str, set[tuple[str, tuple[int, ...]]]] = {}

    def plain_batches() -> Iterator[tuple[str, Rows, int]]:
        for location, rows, size in batches():
            for column, value in itertools.chain.from_iterable(row.items() for row in rows):
                if isinstance(value, np.ndarray):
                    arrays.setdefault(column, set()).add((value.dtype.str, value.shape))
            yield location, [_without_arrays(row) for row in rows], size

    plain = infer_schema(plain_batches())
    if plain is None:
        raise DatasetError(f"{path}: expected samples, got none.")
    columns = pa.schema([field for field in plain if field.name not in arrays])
    tensors = [_array_field(column, kinds, path) for column, kinds in sorted(arrays.items())]
    schema = pa.schema([*columns, *tensors])

    def read() -> Iterator[pa.RecordBatch]:
        for location, rows, _ in batches():
            extra = {name for row in rows for name, value in row.items() if isinstance(value, np.ndarray)}
            if extra := extra - arrays.keys():
                raise DatasetError(
                    f"{location} and after: expected columns {schema.names}, got arrays {sorted(extra)}."
                )
            values = [_array_column([row.get(field.name) for row in rows], field, location) for field in tensors]
            if columns.names:
                first = rows_batch([_without_arrays(row, arrays) for row in rows], columns, location)
                values = [*first.columns, *values]
            yield pa.record_batch(values, schema=schema)

    return TableSource(name, schema, None, read)


def _without_arrays(row: Json, arrays: Container[str] = ()) -> Json:
    return {name: value for name, value in row.items() if not isinstance(value, np.ndarray) and name not in arrays}


def _array_field(name: str, kinds: set[tuple[str, tuple[int, ...]]], path: Path) -> pa.Field:
    types, shapes = {kind for kind, _ in kinds}, {shape for _, shape in kinds}
    if len(types) == 1 and len(shapes) == 1:
        return arrow_field(name, np.dtype(types.pop()).newbyteorder("="), shapes.pop())
    if len(types) == 1 and all(len(shape) == 1 for shape in shapes):
        return pa.field(name, pa.list_(pa.from_numpy_dtype(np.dtype(types.pop()).newbyteorder("="))))
    raise DatasetError(f"{path}: expected arrays {name!r} of one type and shape, got {str(sorted(kinds))[:200]}.")


def _array_column(values: list[Any], field: pa.Field, location: str) -> pa.Array:
    if any(value is None for value in values) and not pa.types.is_list(field.type):
        raise DatasetError(f"{location} and after: expected an array {field.name!r} in every sample, got none in some.")
    with expecting(f"arrays {field.name!r} of {field.type}", location):
        if pa.types.is_list(field.type):
            return list_column(values, field.type)
        stacked = np.stack(values)
        stacked = stacked.astype(stacked.dtype.newbyteorder("="), copy=False)
        if arrow_field(field.name, stacked.dtype, stacked.shape[1:]).type != field.type:
            raise ValueError(f"{stacked.dtype} {list(stacked.shape[1:])}")
        return column_of(stacked, field)


@dataclass(eq=False)
class Encoded:
    """A part to which a function turns batches, given the place of their first row in the whole table."""

    file: BinaryIO
    first_row: int  # Of the next batch.
    encode: Callable[[pa.RecordBatch, int], bytes]

    def write(self, table: pa.Table) -> None:
        for batch in table.to_batches():
            self.file.write(self.encode(batch, self.first_row))
            self.first_row += batch.num_rows

    def close(self) -> None:
        pass


def _choose_compressor(out: Path, options: ConvertOptions, what: str) -> tuple[Callable[[BinaryIO], Any], str]:
    """Return what packs a file, by the options or the suffix of `out`, and the suffix that parts get."""
    name = options.compress or {".gz": "gzip", ".zst": "zstd"}.get(out.suffix, "none")
    if name == "gzip":
        return lambda file: gzip.GzipFile("", "wb", 6, file, mtime=0), ".gz"
    if name == "zstd":
        return lambda file: zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False), ".zst"
    if name == "none":
        return nullcontext, ""
    raise UsageError(f"--set compress: expected zstd, gzip or none for {what}, got {name!r}.")


def write_parts(
    source: TableSource,
    out: Path,
    options: ConvertOptions,
    suffix: str,
    open_part: Callable[[Any, int], Any],
    *,
    packs: bool = False,
    group_bytes: int = 0,
) -> Written:
    """Write a table to `out`: one file, or a directory of parts with this suffix.

    `open_part` returns what has `write(table)` and `close()`, given a file and the number of its first row. `packs`:
    files are compressed as the options or the suffix of `out` say. About `group_bytes`, or 65536 rows, are written at
    once.
    """
    compressor, packed_suffix = _choose_compressor(out, options, suffix) if packs else (nullcontext, "")
    sink = options.sink
    digest, files = TableDigest(), list(sink.committed)
    num_rows = sum(file.count for file in files)
    pieces = _pieces(source, options.slice_bytes, group_bytes, sink.num_skipped_rows)
    pending = next(pieces, None)  # A part is begun only for rows that are there.
    single = bool(out.suffix)
    if not single:
        out.mkdir()
    while pending is not None or not files:  # An empty table is one empty part.
        path, first_row = out if single else out / f"part-{len(files):05d}{suffix}{packed_suffix}", num_rows
        digest = TableDigest() if sink.is_remote else digest
        with path.open("xb") as file, compressor(file) as packed:
            part = open_part(packed, num_rows)
            try:
                while pending is not None and (single or file.tell() < options.slice_bytes):
                    part.write(pending)
                    for batch in pending.to_batches():
                        digest.add(batch)
                    num_rows += pending.num_rows
                    options.on_progress(pending.num_rows)
                    pending = next(pieces, None)
            finally:
                part.close()  # Also after an error: a writer that is deleted would write on.
        name, own_digest = "." if single else path.name, digest.text() if sink.is_remote else ""
        entry = OutputFile(name, path.stat().st_size, "", num_rows - first_row, digest=own_digest)
        files.append(sink.commit(entry, path))
    return Written(tuple(Path(file.name) for file in files), None, num_rows, 0, digest.text())


def _pieces(source: TableSource, slice_bytes: int, group_bytes: int, num_skipped: int) -> Iterator[pa.Table]:
    def slices() -> Iterator[pa.RecordBatch]:
        skip = num_skipped
        for batch in source.batches():
            row_bytes = batch.nbytes / max(1, batch.num_rows)
            step = max(1, min(_STEP_ROWS, int(slice_bytes // 8 // max(1.0, row_bytes))))
            for start in range(0, batch.num_rows, step):
                piece = batch.slice(start, step)
                if skip:  # A part ends between two pieces.
                    skip -= piece.num_rows
                else:
                    yield piece

    for group in batched(slices(), lambda batch: int(batch.nbytes), group_bytes, _GROUP_ROWS // _STEP_ROWS):
        yield pa.Table.from_batches(group, source.schema)


def refuse_columns(schema: pa.Schema, refused: Callable[[Any], bool], what: str, advice: str) -> None:
    """Raise UsageError if a column is, or is made of, a type that a format does not hold."""
    if unsuitable := listed(field for field in schema if contains(field.type, refused)):
        raise UsageError(f"{what}: expected columns that it can hold, got {unsuitable}. {advice}")


class TableDigest:
    """Grows with each batch of a table. A column without any value is as good as none: some formats do not hold it."""

    def __init__(self) -> None:
        self._columns: defaultdict[str, Any] = defaultdict(hashlib.sha256)
        self._reached = Counter[str]()
        self._valued: set[str] = set()
        self.num_rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """The next rows."""
        self.num_rows += batch.num_rows
        for name, column in zip(batch.schema.names, batch.columns):
            self._column(name, column)

    def columns(self) -> dict[str, str]:
        """Hex by column that has a value; fields of a struct are columns of their own, `column.field`."""
        valued = {name: digest for name, digest in self._columns.items() if name.rstrip("#?") in self._valued}
        return {name: digest.hexdigest()[:32] for name, digest in sorted(valued.items())}

    def text(self) -> str:
        """`columns` as JSON: what `Written.digest` holds."""
        return json.dumps(self.columns())

    def _column(self, name: str, column: pa.Array) -> None:
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_struct(column.type):
            for part, values in zip(column.type, column.flatten()):
                self._column(f"{name}.{part.name}", values)
            return
        digest = self._columns[name]
        counts, leaves = flatten(column)
        if (counts >= 0).any():
            self._valued.add(name.rstrip("#?"))
        # Lengths, gaps and values go into hashes of their own, so that batches may be cut anywhere.
        self._columns[f"{name}#"].update(counts.astype("<i8").data)
        if leaves.null_count and is_number(leaves.type):
            places = np.flatnonzero(np.asarray(leaves.is_null())) + self._reached[name]
            self._columns[f"{name}?"].update(places.astype("<i8").data)
        self._reached[name] += len(leaves)
        for start in range(0, len(leaves), _VALUES_AT_ONCE):
            digest.update(_canonical(leaves.slice(start, _VALUES_AT_ONCE)))


def _canonical(leaves: pa.Array) -> Any:
    kind = leaves.type
    if pa.types.is_null(kind):
        return b""
    if is_number(kind):
        return _numbers(leaves.drop_null().to_numpy(zero_copy_only=False)).data
    if pa.types.is_nested(kind):
        return b"".join(repr(value).encode() for value in leaves.to_pylist())
    if not is_bytes(kind):
        leaves = leaves.cast(pa.large_string())
    blobs = leaves.cast(pa.large_binary()).to_pylist()
    return b"".join(b"-" if blob is None else len(blob).to_bytes(8, "little") + blob for blob in blobs)


def _numbers(values: Array) -> Array:
    if values.dtype.kind != "f":
        return values.astype("<u8" if values.dtype.kind == "u" else "<i8")
    with np.errstate(invalid="ignore"):  # A signalling NaN is a NaN.
        floats = values.astype(np.float64)
        is_integer = (np.abs(floats) < 2.0**63) & (floats == np.trunc(floats))
    bits = floats.view("<i8").copy()
    bits[is_integer] = floats[is_integer].astype("<i8")
    bits[np.isnan(floats)] = 0x7FF8 << 48
    return bits
