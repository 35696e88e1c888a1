"""TFRecord files of tf.train.Example as rows: each feature a column.

Hides: the messages. A feature that has one value in every record of the first 64 MiB is a number (or text, or bytes),
any other a list; lists have no shape there, so a tensor comes back flat. Numbers of a list are decoded at once, about
2 ns a byte. Written: text and bytes become a BytesList, integers and booleans an Int64List, floats a FloatList (so F64
must fit F32, or be told to be rounded). What is missing is no feature at all.

Source: tensorflow/core/lib/io/record_writer and core/example/{example,feature}.proto.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.convert.content import Options, TableSource, Written
from forebay.convert.images import bare_images
from forebay.convert.narrow import narrow
from forebay.convert.table import (
    BATCH_BYTES,
    BATCH_ROWS,
    INFERRED_BYTES,
    Encoded,
    list_column,
    open_bytes,
    refuse_columns,
    write_parts,
)
from forebay.convert.values import flatten, is_number, leaf_type, split
from forebay.errors import DatasetError
from forebay.prepare.documents import batched
from forebay.prepare.read.tfrecord import NotExampleError, crc32c, features, fields, frames, masked, message

_MOST_RECORD_BYTES = 1 << 30
_BYTES, _FLOATS, _INTEGERS = 1, 2, 3
Values: TypeAlias = list[bytes] | NDArray[Any]
_Row: TypeAlias = dict[str, tuple[int, Values]]


def open_tfrecord(paths: Sequence[Path]) -> TableSource:
    """Files of Examples, one after another. Raises DatasetError where a record or checksum is damaged."""
    kinds: dict[str, int] = {}
    many: set[str] = set()
    binary: set[str] = set()
    seen = 0
    for where, row, size in _records(paths):
        for name, (kind, values) in row.items():
            if kinds.setdefault(name, kind) != kind:
                raise DatasetError(f"{where}: expected feature {name!r} of one type, got another. Write it again.")
            if len(values) != 1:
                many.add(name)
            if kind == _BYTES and name not in binary and not all(map(_is_text, values)):
                binary.add(name)
        seen += size
        if seen >= INFERRED_BYTES:
            break
    if not kinds:
        raise DatasetError(f"{paths[0]}: expected Examples with features, got none.")
    schema = pa.schema([(name, _type(kinds[name], name in many, name in binary)) for name in sorted(kinds)])
    return TableSource("tfrecord", schema, None, lambda: _read(paths, schema, kinds))


def parse_features(data: bytes) -> _Row:
    """The features of an Example: kind and values by name. Raises NotExampleError."""
    row: _Row = {}
    for number, name, feature in features(data):
        if number != 1:
            raise NotExampleError(f"field {number}, where features are expected")
        for kind, values in fields(feature):
            row[name] = kind, _values(kind, message(values))
    return row


def _values(kind: int, data: bytes) -> Values:
    found = [value for _, value in fields(data)]
    if kind == _BYTES:
        return [message(value) for value in found]
    # Packed, in one run of bytes or several; or each value by itself.
    packed = [value if isinstance(value, bytes) else _varint(value) for value in found]
    whole = b"".join(packed)
    if kind == _FLOATS:
        return np.frombuffer(whole, "<f4")
    return integers(whole)


def integers(data: bytes) -> NDArray[np.int64]:
    """Varints, one after another, as int64. Raises NotExampleError if the last has no end."""
    raw = np.frombuffer(data, np.uint8)
    stops = np.flatnonzero(raw < 128)
    if len(raw) and (not len(stops) or stops[-1] != len(raw) - 1):
        raise NotExampleError("a number without an end")
    starts = np.concatenate([[0], stops[:-1] + 1]) if len(stops) else stops
    lengths = stops - starts + 1
    if len(lengths) and int(lengths.max()) > 10:
        raise NotExampleError("a number of more than 10 bytes")
    out = np.zeros(len(stops), np.uint64)
    for place in range(int(lengths.max()) if len(lengths) else 0):
        there = lengths > place
        bits = (raw[starts[there] + place] & 127).astype(np.uint64) << np.uint64(7 * place)
        out[there] |= bits
    return out.view(np.int64)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _records(paths: Sequence[Path]) -> Iterator[tuple[str, _Row, int]]:
    for path in paths:
        with open_bytes(path) as file:
            for position, data, problem in frames(file, _MOST_RECORD_BYTES, 0):
                where = f"{path}, byte {position}"
                if problem:
                    raise DatasetError(f"{where}: expected a record, got: {problem}. Fetch the file again.")
                try:
                    yield where, parse_features(data), len(data)
                except NotExampleError as error:
                    raise DatasetError(f"{where}: expected a tf.train.Example, got: {error}.") from error


def _type(kind: int, many: bool, binary: bool) -> Any:
    text = pa.binary() if binary else pa.string()
    value = {_BYTES: text, _FLOATS: pa.float32(), _INTEGERS: pa.int64()}.get(kind)
    if value is None:
        raise DatasetError(f"tf.train.Feature: expected bytes, floats or integers, got a list of kind {kind}.")
    return pa.list_(value) if many else value


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _read(paths: Sequence[Path], schema: pa.Schema, kinds: dict[str, int]) -> Iterator[pa.RecordBatch]:
    for some in batched(_records(paths), lambda one: one[2], BATCH_BYTES, BATCH_ROWS):
        for where, row, _ in some:
            for name, (kind, values) in row.items():
                if kinds.get(name) != kind or (len(values) != 1 and not pa.types.is_list(schema.field(name).type)):
                    raise DatasetError(
                        f"{where}: expected features {', '.join(schema.names)[:300]} as the first 64 MiB have them, "
                        f"got {name!r} with {len(values)} values of kind {kind}. Put such a record first."
                    )
        yield _batch([row for _, row, _ in some], schema, some[0][0])


def _batch(rows: list[_Row], schema: pa.Schema, where: str) -> pa.RecordBatch:
    try:
        return pa.record_batch([_column(rows, field) for field in schema], schema=schema)
    except pa.ArrowException as error:
        raise DatasetError(f"{where} and after: expected text, got bytes that are none: {error}.") from error


def _column(rows: list[_Row], field: pa.Field) -> pa.Array:
    found = [row[field.name][1] if field.name in row else None for row in rows]
    if pa.types.is_list(field.type):
        return list_column(found, field.type)
    values = [None if one is None else one[0] for one in found]
    return pa.array(values, field.type if is_number(field.type) else pa.binary()).cast(field.type)


def write_tfrecord(source: TableSource, out: Path, options: Options) -> Written:
    """Files of Examples."""
    source = bare_images(source)
    refuse_columns(source.schema, _fits, "TFRecord", "Write --to parquet, or leave the column out.")
    encode = partial(_encoded, lossy=options.lossy, checksum=crc32c())
    return write_parts(source, out, options, ".tfrecord", lambda file, row: Encoded(file, encode, row))


def _encoded(batch: pa.RecordBatch, first_row: int, lossy: bool, checksum: Callable[[bytes], int]) -> bytes:
    """The records of a batch, each with its length and the checksums of both."""
    columns = [
        [(_field(1, name.encode()), feature) for feature in _features(name, column, first_row, lossy)]
        for name, column in zip(batch.schema.names, batch.columns)
    ]
    out = []
    for row in zip(*columns):
        entries = [_field(1, name + _field(2, feature)) for name, feature in row if feature is not None]
        data = _field(1, b"".join(entries))
        length = len(data).to_bytes(8, "little")
        for part in (length, data):
            out += [part, masked(checksum(part)).to_bytes(4, "little")]
    return b"".join(out)


def _fits(kind: Any) -> bool:
    return is_number(leaf := leaf_type(kind)) or _is_blob(leaf)


def _is_blob(kind: Any) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
    return any(test(kind) for test in tests)


def _features(name: str, column: pa.Array, first_row: int, lossy: bool) -> list[bytes | None]:
    """The message of each row; None where it is missing."""
    counts, leaves = flatten(column)
    if leaves.null_count:
        raise DatasetError(f"TFRecord: expected no gaps in lists of {name!r}, got some (row {first_row} or after).")
    kind = leaves.type
    if _is_blob(kind):
        rows = split(leaves.cast(pa.large_binary()).to_pylist(), counts)
        return [None if row is None else _field(1, b"".join(_field(1, blob) for blob in row)) for row in rows]
    values = leaves.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(kind):
        rows = split(_singles(values, name, first_row, lossy).astype("<f4"), counts)
        return [None if row is None else _field(2, _packed(row.tobytes())) for row in rows]
    data, ends = varints(narrow(values, "I64", name, first_row=first_row)[name])
    edges = np.concatenate([[0], ends])
    stops = np.cumsum(np.maximum(counts, 0))
    sizes = np.where(counts < 0, -1, edges[stops] - edges[stops - np.maximum(counts, 0)])
    return [None if row is None else _field(3, _packed(row)) for row in split(data, sizes)]


def _singles(values: NDArray[Any], name: str, first_row: int, lossy: bool) -> NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        singles = values.astype(np.float32)
    kept = (singles == values) | np.isnan(values)
    if not lossy and not kept.all():
        place = int(np.flatnonzero(~kept)[0])
        raise DatasetError(
            f"TFRecord: expected floats that fit F32, got {values[place]} ({name}, value {place} from row {first_row} "
            "on). --lossy rounds them."
        )
    return singles


def varints(values: NDArray[np.int64]) -> tuple[bytes, NDArray[np.int64]]:
    """Integers as varints, one after another, and where each ends."""
    bits = values.astype("<i8").view(np.uint64)
    lengths = np.ones(len(bits), np.int64)
    for place in range(1, 10):
        lengths += bits >= np.uint64(1) << np.uint64(7 * place)
    ends = np.cumsum(lengths)
    out = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    starts = ends - lengths
    for place in range(int(lengths.max()) if len(lengths) else 0):
        there = lengths > place
        piece = (bits[there] >> np.uint64(7 * place) & np.uint64(127)).astype(np.uint8)
        out[starts[there] + place] = piece | ((lengths[there] > place + 1).astype(np.uint8) << 7)
    return out.tobytes(), ends


def _packed(data: bytes) -> bytes:
    return _field(1, data) if data else b""


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data
