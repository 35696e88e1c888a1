"""TFRecord: each row a tf.train.Example, with its checksums.

Text and bytes become a BytesList, integers and booleans an Int64List, floats a FloatList (so F64 must fit F32, or be
told to be rounded); lists and tensors are flat there. What is missing is no feature at all.

Source: tensorflow/core/lib/io/record_writer and core/example/{example,feature}.proto.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.convert.content import Options, TableSource, Written
from forebay.convert.images import bare_images
from forebay.convert.narrow import narrow
from forebay.convert.table_digest import flatten, is_number, leaf_type
from forebay.convert.table_sinks.base import refuse_columns, write_parts
from forebay.errors import DatasetError
from forebay.prepare.read.tfrecord import crc32c, masked


class _Part:
    def __init__(self, file: BinaryIO, lossy: bool) -> None:
        self._file = file
        self._lossy = lossy
        self._crc = crc32c()

    def write(self, batch: pa.RecordBatch, first_row: int) -> None:
        columns = [
            [(_field(1, name.encode()), feature) for feature in _features(name, column, first_row, self._lossy)]
            for name, column in zip(batch.schema.names, batch.columns)
        ]
        for row in zip(*columns):
            entries = [_field(1, name + _field(2, feature)) for name, feature in row if feature is not None]
            self._record(_field(1, b"".join(entries)))

    def finish(self) -> None:
        pass

    def _record(self, data: bytes) -> None:
        length = len(data).to_bytes(8, "little")
        self._file.write(length + self._sum(length) + data + self._sum(data))

    def _sum(self, data: bytes) -> bytes:
        return masked(self._crc(data)).to_bytes(4, "little")


def write_tfrecord(source: TableSource, out: Path, options: Options) -> Written:
    """Files of Examples.

    Raises:
        UsageError: If a column is of structs, times or the like.
        DatasetError: If a number fits neither int64 nor F32.
    """
    source = bare_images(source)
    refuse_columns(source.schema, _fits, "TFRecord", "Write --to parquet, or leave the column out.")
    return write_parts(source, out, options, ".tfrecord", lambda file, _: _Part(file, options.lossy))


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
    stops = np.cumsum(np.maximum(counts, 0)).tolist()
    sizes = counts.tolist()
    kind = leaves.type
    if _is_blob(kind):
        blobs = leaves.cast(pa.large_binary()).to_pylist()
        return [
            None if size < 0 else _field(1, b"".join(_field(1, blob) for blob in blobs[stop - size : stop]))
            for size, stop in zip(sizes, stops)
        ]
    values = leaves.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(kind):
        floats = _singles(values, name, first_row, lossy).astype("<f4")
        parts = [floats[stop - max(size, 0) : stop].tobytes() for size, stop in zip(sizes, stops)]
        return [None if size < 0 else _field(2, _packed(part)) for size, part in zip(sizes, parts)]
    whole = narrow(values, "I64", name, first_row=first_row).tensors[name]
    data, ends = varints(whole)
    edges = np.concatenate([[0], ends])
    spans = [(int(edges[stop - max(size, 0)]), int(edges[stop])) for size, stop in zip(sizes, stops)]
    return [None if size < 0 else _field(3, _packed(data[a:b])) for size, (a, b) in zip(sizes, spans)]


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
    size = len(data)
    head = bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    head.append(size)
    return bytes(head) + data
