"""TFRecord files of tf.train.Example and SequenceExample, without TensorFlow.

A damaged record is skipped; a damaged length ends the file, since nothing tells where the next begins. As a table each
feature is a column: a number, text or bytes if it has one value in every record of the first 64 MiB, else a flat list.
Written: text and bytes as BytesList, integers and booleans as Int64List, floats as FloatList (F64 must fit F32).
Source: tensorflow/core/lib/io/record_writer, core/example/{example,feature}.proto, core/lib/hash/crc32c (the mask).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa

from forebay.arrays import I64, Array
from forebay.errors import CorruptInputError, DatasetError, PrepareError, listed, package_for
from forebay.formats import tables
from forebay.formats.base import Format
from forebay.formats.cast import cast
from forebay.formats.conversion import ConvertOptions, TableSource, Written
from forebay.formats.external import TOKEN_COLUMNS
from forebay.formats.images import unwrap_images
from forebay.formats.inputs import InputSplit, ReadOptions, open_input, skip_to
from forebay.formats.records import Record, batched, malformed, to_record
from forebay.formats.report import Report

_STEP = 1 << 20
_MASK = 0xA282EAD8
_MAX_RECORD_BYTES = 1 << 30
_BYTES, _FLOATS, _INTEGERS = 1, 2, 3
Value = bytes | int
Values: TypeAlias = list[bytes] | Array
_Row: TypeAlias = dict[str, tuple[int, Values]]


class NotExampleError(Exception):
    """The bytes are no message of the kind expected."""


class TFRecord(Format):
    """Files of Examples."""

    name = "tfrecord"
    suffixes = (".tfrecord", ".tfrecords", ".tfrec")

    def sniff(self, head: bytes) -> bool:
        """By the checksum of the first length, if the package for it is installed."""
        if len(head) < 16 or int.from_bytes(head[:8], "little") >= 1 << 40 or not any(head[:12]):
            return False
        try:
            return masked(crc32c()(head[:8])) == int.from_bytes(head[8:12], "little")
        except PrepareError:
            return False

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        with open_input(split.files[0], options) as file:
            for index, (offset, data, problem) in enumerate(frames(file, options.max_document_bytes, split.start)):
                location = f"byte {offset}"
                if not problem:
                    try:
                        yield to_record(index, parse_example(data), options, location, offset)
                        continue
                    except NotExampleError as error:
                        problem = f"not a tf.train.Example: {error}"
                yield malformed(index, data, problem, location, offset)

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        kinds: dict[str, int] = {}
        lists = set(TOKEN_COLUMNS)  # Also where each document has one token.
        binary = set()
        size = 0
        for location, row, num_bytes in _records(paths):
            for name, (kind, values) in row.items():
                if kinds.setdefault(name, kind) != kind:
                    raise DatasetError(
                        f"{location}: expected feature {name!r} of kind {kinds[name]}, as before, got {kind}. Write it "
                        "again."
                    )
                if len(values) != 1:
                    lists.add(name)
                if kind == _BYTES and name not in binary and not all(map(_is_text, values)):
                    binary.add(name)
            size += num_bytes
            if size >= tables.INFERRED_BYTES:
                break
        if not kinds:
            raise DatasetError(f"{paths[0]}: expected Examples with features, got none.")
        schema = pa.schema([(name, _type(kinds[name], name in lists, name in binary)) for name in sorted(kinds)])
        return TableSource(self.name, schema, None, lambda: _read_batches(paths, schema, kinds))

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """`compress`: gzip, zstd or nothing, or as the suffix of `out` says; TensorFlow reads gzip."""
        source = unwrap_images(source)
        tables.refuse_columns(
            source.schema,
            lambda kind: not tables.is_number(leaf := tables.leaf_type(kind)) and not _is_blob(leaf),
            "TFRecord",
            "Write --to parquet, or leave the column out.",
        )
        part = partial(tables.Encoded, encode=partial(_encoded, checksum=crc32c()))
        return tables.write_parts(source, out, options, ".tfrecord", part, packs=True)

    def check(self, path: Path, report: Report) -> None:
        """Compare the checksums of every record, or of as many as the options allow."""
        num_records = 0
        with tables.open_for_check(path, report) as file:
            for offset, data, problem in frames(file, _MAX_RECORD_BYTES, 0):
                if problem:
                    report.add_finding("truncated" if "file ends" in problem else "damaged", f"byte {offset}", problem)
                    continue
                num_records += 1
                report.read_bytes = offset + 16 + len(data)
                if report.is_enough(report.read_bytes):
                    break
        report.add_count("records", num_records)


def crc32c() -> Callable[[bytes], int]:
    """Return the function that computes CRC-32C. Raises MissingPackageError."""
    with package_for("TFRecord"):
        import google_crc32c
    value: Callable[[bytes], int] = google_crc32c.value
    return value


def masked(crc: int) -> int:
    """Return a checksum as it is stored."""
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


def frames(file: BinaryIO, limit: int, start: int) -> Iterator[tuple[int, bytes, str]]:
    """Yield the offset of each record, its data, and what is wrong with it."""
    crc = crc32c()
    offset = start
    skip_to(file, start)
    try:
        while head := _read_upto(file, 12):
            length = int.from_bytes(head[:8], "little")
            if len(head) < 12:
                yield offset, b"", "the file ends within a record's length"
                return
            if masked(crc(head[:8])) != int.from_bytes(head[8:], "little"):
                yield offset, b"", "the checksum of a record's length does not match; what follows cannot be found"
                return
            data, problem, remaining = b"", "", length + 4
            if length > limit:
                problem = f"a record of {length} bytes is larger than max_document_bytes, {limit}"
                while remaining and (skipped := len(_read_upto(file, min(remaining, _STEP)))):
                    remaining -= skipped
                if remaining:
                    problem = "the file ends within a record"
            else:
                data = _read_upto(file, remaining)
                remaining -= len(data)
                if remaining:
                    problem = f"the file ends {len(data)} bytes into a record of {length}"
                elif masked(crc(data[:-4])) != int.from_bytes(data[-4:], "little"):
                    problem = "the checksum of the record does not match"
            yield offset, data[:length], problem
            if remaining:
                return
            offset += 12 + length + 4
    except CorruptInputError as error:
        yield offset, b"", str(error)


def _read_upto(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    while len(data) < size and (more := file.read(size - len(data))):
        data += more
    return data


def parse_example(data: bytes) -> dict[str, object]:
    """Return the features of an Example for `to_record`: text, bytes, or a number, the first of several."""
    row: dict[str, object] = {}
    for name, (kind, values) in parse_features(data).items():
        if kind == _BYTES:
            text = b"\n".join(values)
            row[name] = text.decode() if _is_text(text) else text
        elif len(values):
            row[name] = int(values[0]) if kind == _INTEGERS else float(values[0])
    return row


def message(value: Value) -> bytes:
    """Return a field's bytes. Raises NotExampleError if it is a number."""
    if not isinstance(value, bytes):
        raise NotExampleError("a number where a message should be")
    return value


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yield field numbers and values of a protobuf message: numbers, or bytes. Raises NotExampleError."""
    offset = 0
    while offset < len(data):
        tag, offset = _read_varint(data, offset)
        kind = tag & 7
        if kind == 0:
            number, offset = _read_varint(data, offset)
            yield tag >> 3, number
            continue
        if kind == 2:
            size, offset = _read_varint(data, offset)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise NotExampleError(f"unknown wire type {kind}")
        if offset + size > len(data):
            raise NotExampleError("a field that is longer than the message")
        yield tag >> 3, data[offset : offset + size]
        offset += size


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while offset < len(data) and shift < 70:
        value |= (data[offset] & 127) << shift
        offset += 1
        if data[offset - 1] < 128:
            return value, offset
        shift += 7
    raise NotExampleError("a number without an end")


def parse_features(data: bytes) -> _Row:
    """Return the features of an Example or SequenceExample: kind and values by name, the steps of a list joined.

    Raises NotExampleError.
    """
    row = {}
    for number, entries in fields(data):
        if number not in (1, 2):
            raise NotExampleError(f"field {number}, where features are expected")
        for _, entry in fields(message(entries)):
            pair = dict(fields(message(entry)))
            name, feature = message(pair.get(1, b"")).decode("utf-8", "replace"), message(pair.get(2, b""))
            steps = [feature] if number == 1 else [message(step) for _, step in fields(feature)]
            parts = [(kind, _values(kind, message(values))) for step in steps for kind, values in fields(step)]
            if parts:
                row[name] = parts[0] if len(parts) == 1 else _join(parts)
    return row


def _join(parts: list[tuple[int, Values]]) -> tuple[int, Values]:
    kind = parts[0][0]
    if any(other != kind for other, _ in parts):
        raise NotExampleError("a list of features of different kinds")
    if kind == _BYTES:
        return kind, [value for _, values in parts for value in values]
    return kind, np.concatenate([values for _, values in parts])


def _values(kind: int, data: bytes) -> Values:
    decoded = [value for _, value in fields(data)]
    if kind == _BYTES:
        return [message(value) for value in decoded]
    # Packed, in one run of bytes or several; or each value by itself.
    packed = [value if isinstance(value, bytes) else _varint(value) for value in decoded]
    joined = b"".join(packed)
    if kind == _FLOATS:
        return np.frombuffer(joined, "<f4")
    return integers(joined)


def integers(data: bytes) -> I64:
    """Return varints, one after another, as int64. Raises NotExampleError if the last has no end."""
    raw = np.frombuffer(data, np.uint8)
    stops = np.flatnonzero(raw < 128)
    if len(raw) and (not len(stops) or stops[-1] != len(raw) - 1):
        raise NotExampleError("a number without an end")
    starts = np.concatenate([[0], stops[:-1] + 1]) if len(stops) else stops
    lengths = stops - starts + 1
    if len(lengths) and int(lengths.max()) > 10:
        raise NotExampleError("a number of more than 10 bytes")
    out = np.zeros(len(stops), np.uint64)
    for index in range(int(lengths.max()) if len(lengths) else 0):
        is_longer = lengths > index
        bits = (raw[starts[is_longer] + index] & 127).astype(np.uint64) << np.uint64(7 * index)
        out[is_longer] |= bits
    return out.view(np.int64)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _records(paths: Sequence[Path]) -> Iterator[tuple[str, _Row, int]]:
    for path in paths:
        with closing(tables.open_unpacked(path)) as file:
            for offset, data, problem in frames(file, _MAX_RECORD_BYTES, 0):
                location = f"{path}, byte {offset}"
                if problem:
                    raise DatasetError(f"{location}: expected a record, got: {problem}. Fetch the file again.")
                try:
                    yield location, parse_features(data), len(data)
                except NotExampleError as error:
                    raise DatasetError(f"{location}: expected a tf.train.Example, got: {error}.") from error


def _type(kind: int, is_list: bool, is_binary: bool) -> Any:
    text = pa.binary() if is_binary else pa.string()
    value = {_BYTES: text, _FLOATS: pa.float32(), _INTEGERS: pa.int64()}.get(kind)
    if value is None:
        raise DatasetError(f"tf.train.Feature: expected bytes, floats or integers, got a list of kind {kind}.")
    return pa.list_(value) if is_list else value


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _read_batches(paths: Sequence[Path], schema: pa.Schema, kinds: dict[str, int]) -> Iterator[pa.RecordBatch]:
    for records in batched(_records(paths), lambda record: record[2], tables.BATCH_BYTES, tables.BATCH_ROWS):
        for location, row, _ in records:
            for name, (kind, values) in row.items():
                if kinds.get(name) != kind or (len(values) != 1 and not pa.types.is_list(schema.field(name).type)):
                    raise DatasetError(
                        f"{location}: expected features {listed(schema.names)} as the first 64 MiB have them, "
                        f"got {name!r} with {len(values)} values of kind {kind}. Put such a record first."
                    )
        rows = [row for _, row, _ in records]
        with tables.expecting("text", records[0][0]):
            batch = pa.record_batch([_column(rows, field) for field in schema], schema=schema)
        yield batch


def _column(rows: list[_Row], field: pa.Field) -> pa.Array:
    features = [row[field.name][1] if field.name in row else None for row in rows]
    if pa.types.is_list(field.type):
        return tables.list_column(features, field.type)
    values = [None if feature is None else feature[0] for feature in features]
    return pa.array(values, field.type if tables.is_number(field.type) else pa.binary()).cast(field.type)


def _encoded(batch: pa.RecordBatch, first_row: int, checksum: Callable[[bytes], int]) -> bytes:
    columns = [
        [(_field(1, name.encode()), feature) for feature in _features(name, column, first_row)]
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


def _is_blob(kind: Any) -> bool:
    return kind in (pa.binary(), pa.large_binary(), pa.string(), pa.large_string())


def _features(name: str, column: pa.Array, first_row: int) -> list[bytes | None]:
    counts, leaves = tables.flatten(column)
    if leaves.null_count:
        raise DatasetError(f"TFRecord: expected no gaps in lists of {name!r}, got some (row {first_row} or after).")
    kind = leaves.type
    if _is_blob(kind):
        rows = tables.split_values(leaves.cast(pa.large_binary()).to_pylist(), counts)
        return [None if row is None else _field(1, b"".join(_field(1, blob) for blob in row)) for row in rows]
    values = leaves.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(kind):
        rows = tables.split_values(_singles(values, name, first_row).astype("<f4"), counts)
        return [None if row is None else _field(2, _packed(row.tobytes())) for row in rows]
    data, stops = varints(cast(values, "I64", name, first_row=first_row)[name])
    edges = np.concatenate([[0], stops])
    stops = np.cumsum(np.maximum(counts, 0))
    sizes = np.where(counts < 0, -1, edges[stops] - edges[stops - np.maximum(counts, 0)])
    return [None if row is None else _field(3, _packed(row)) for row in tables.split_values(data, sizes)]


def _singles(values: Array, name: str, first_row: int) -> Array:
    with np.errstate(all="ignore"):
        singles = values.astype(np.float32)
    is_same = (singles == values) | np.isnan(values)
    if not is_same.all():
        index = int(np.flatnonzero(~is_same)[0])
        raise DatasetError(
            f"TFRecord: expected floats that fit F32, got {values[index]} ({name}, value {index} from row {first_row} "
            "on)."
        )
    return singles


def varints(values: I64) -> tuple[bytes, I64]:
    """Return integers as varints, one after another, and the end of each."""
    bits = values.astype("<i8").view(np.uint64)
    lengths = np.ones(len(bits), np.int64)
    for index in range(1, 10):
        lengths += bits >= np.uint64(1) << np.uint64(7 * index)
    stops = np.cumsum(lengths)
    out = np.empty(int(stops[-1]) if len(stops) else 0, np.uint8)
    starts = stops - lengths
    for index in range(int(lengths.max()) if len(lengths) else 0):
        is_longer = lengths > index
        piece = (bits[is_longer] >> np.uint64(7 * index) & np.uint64(127)).astype(np.uint8)
        out[starts[is_longer] + index] = piece | ((lengths[is_longer] > index + 1).astype(np.uint8) << 7)
    return out.tobytes(), stops


def _packed(data: bytes) -> bytes:
    return _field(1, data) if data else b""


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data
