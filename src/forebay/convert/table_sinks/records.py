"""Rows one by one: TFRecord, each a tf.train.Example with its checksums, and WebDataset, each a sample of a tar file.

TFRecord: text and bytes become a BytesList, integers and booleans an Int64List, floats a FloatList (so F64 must fit
F32, or be told to be rounded); lists and tensors are flat there. What is missing is no feature at all.
Source: tensorflow/core/lib/io/record_writer and core/example/{example,feature}.proto.

WebDataset: columns are members. Text is `<column>.txt`, an image or other bytes `<column>.jpg` and the like by what it
begins with (else `.bin`), lists and tensors of numbers `<column>.npy`, a `label` is `cls`, all else stands in `json`.
Columns `text` and `image` are `txt` and `jpg` alone, as is usual. The sample's name is that of column `__key__`, else
the row's number.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from forebay.convert.content import Options, Written
from forebay.convert.images import bare_images
from forebay.convert.narrow import narrow
from forebay.convert.table_digest import flatten, is_number, leaf_type, tensor_shape
from forebay.convert.table_sinks.base import contains, is_beyond_json, refuse_columns, write_parts
from forebay.convert.table_sources.base import TableSource
from forebay.convert.table_sources.samples import KEY, leaves_folder
from forebay.errors import DatasetError, UsageError
from forebay.prepare.read.tfrecord import crc32c, masked

_KINDS = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"RIFF", "webp"))


class _Records:
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
    return write_parts(source, out, options, ".tfrecord", lambda file, _: _Records(file, options.lossy))


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
        rows = _split(leaves.cast(pa.large_binary()).to_pylist(), counts)
        return [None if row is None else _field(1, b"".join(_field(1, blob) for blob in row)) for row in rows]
    values = leaves.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(kind):
        rows = _split(_singles(values, name, first_row, lossy).astype("<f4"), counts)
        return [None if row is None else _field(2, _packed(row.tobytes())) for row in rows]
    data, ends = varints(narrow(values, "I64", name, first_row=first_row).tensors[name])
    edges = np.concatenate([[0], ends])
    stops = np.cumsum(np.maximum(counts, 0))
    sizes = np.where(counts < 0, -1, edges[stops] - edges[stops - np.maximum(counts, 0)])
    return [None if row is None else _field(3, _packed(row)) for row in _split(data, sizes)]


def _split(values: Any, counts: NDArray[np.int64]) -> list[Any]:
    """The values of each row, None for -1 of them."""
    stops = np.cumsum(np.maximum(counts, 0)).tolist()
    return [None if n < 0 else values[stop - n : stop] for n, stop in zip(counts.tolist(), stops)]


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


class _Samples:
    def __init__(self, file: BinaryIO) -> None:
        self._tar = tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20)  # noqa: SIM115

    def write(self, batch: pa.RecordBatch, first_row: int) -> None:
        columns = {name: _values(name, column, first_row) for name, column in zip(batch.schema.names, batch.columns)}
        keys = columns.pop(KEY, None) or [f"{first_row + i:09d}" for i in range(batch.num_rows)]
        for i, key in enumerate(keys):
            told: dict[str, Any] = {}
            for name, values in columns.items():
                member = _member(name, values[i])
                if member is None:
                    told[name] = values[i]
                else:
                    self._add(f"{key}.{member[0]}", member[1])
            if told or not columns:
                self._add(f"{key}.json", orjson.dumps(told))

    def finish(self) -> None:
        self._tar.close()

    def _add(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._tar.addfile(info, io.BytesIO(data))


def write_webdataset(source: TableSource, out: Path, options: Options) -> Written:
    """Tar files of samples.

    Raises:
        UsageError: If a column's name cannot be part of a file's, or its type is none of JSON's.
        DatasetError: If a key has a dot in its last part, arrays have gaps, or a number is not finite.
    """
    source = bare_images(source)
    bad = [name for name in source.schema.names if "/" in name or not name.isprintable() or name == "json"]
    if bad:
        raise UsageError(f"WebDataset: expected names of columns that can be in a file's name, got {bad}. Rename them.")
    refuse_columns(
        source.schema, lambda kind: not contains(kind, is_beyond_json), "WebDataset", "Write --to parquet instead."
    )
    return write_parts(source, out, options, ".tar", lambda file, _: _Samples(file))


def _member(name: str, value: Any) -> tuple[str, bytes] | None:
    """Suffixes and data; None for what stands in the JSON."""
    match value:
        case str():
            return "txt" if name == "text" else f"{name}.txt", value.encode()
        case bytes():
            kind = next((kind for magic, kind in _KINDS if value.startswith(magic)), "bin")
            return kind if name == "image" and kind != "bin" else f"{name}.{kind}", value
        case np.ndarray():
            file = io.BytesIO()
            np.lib.format.write_array(file, value, allow_pickle=False)
            return f"{name}.npy", file.getvalue()
        case int() if name == "label" and not isinstance(value, bool):
            return "cls", str(value).encode()
    return None


def _values(name: str, column: pa.Array, first_row: int) -> list[Any]:
    """Lists and tensors of numbers as arrays; all else as Python has it."""
    counts, leaves = flatten(column)
    kind = leaves.type
    shape = tensor_shape(column.type)
    inner = getattr(column.type, "value_type", None)
    if is_number(kind) and (shape is not None or (inner is not None and inner == kind)):
        if leaves.null_count:
            raise DatasetError(f"WebDataset: expected no gaps in {name!r}, got some (row {first_row} or after).")
        rows = _split(leaves.to_numpy(zero_copy_only=False), counts)
        return [row if row is None or shape is None else row.reshape(shape) for row in rows]
    found: list[Any] = (column.cast(pa.float32()) if pa.types.is_float16(column.type) else column).to_pylist()
    if pa.types.is_floating(kind) and not np.isfinite(leaves.drop_null().to_numpy(zero_copy_only=False)).all():
        raise DatasetError(
            f"WebDataset: expected finite numbers in {name!r}, which stands in JSON, got others (row {first_row} or "
            "after). Write --to parquet, or leave the column out."
        )
    if name == KEY:
        for key in found:
            if not isinstance(key, str) or not key or "." in key.rpartition("/")[2] or leaves_folder(key):
                raise DatasetError(
                    f"WebDataset: expected keys without a dot in their last part, and that lead to no place outside a "
                    f"folder, got {key!r}. Leave out column {KEY}."
                )
    return found
