"""Tar files as WebDataset writes them, as rows: members with one name up to the first dot are a sample.

A member's column is what stands between that dot and the last: `0001.depth.npy` is a row of `depth`. A suffix alone
has the name that is usual: `txt` is `text`, `cls` is `label`, an image is `image`, the fields of `json` are columns of
their own, any other suffix is the column's name. `__key__` is the sample's name.

Written, text is `<column>.txt`, an image or other bytes `<column>.jpg` and the like by what it begins with (else
`.bin`), lists and tensors of numbers `<column>.npy`, a `label` is `cls`, all else stands in `json`. Columns `text` and
`image` are `txt` and `jpg` alone. The sample's name is that of column `__key__`, else the row's number.
"""

from __future__ import annotations

import io
import itertools
import math
import tarfile
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa

from forebay.convert.content import Options, TableSource, Written
from forebay.convert.images import bare_images
from forebay.convert.table import (
    BATCH_BYTES,
    BATCH_ROWS,
    Array,
    Rows,
    column_of,
    field_of,
    inferred,
    list_column,
    open_bytes,
    refuse_columns,
    rows_batch,
    write_parts,
)
from forebay.convert.values import contains, flatten, is_beyond_json, is_number, split, tensor_shape
from forebay.errors import DatasetError, UsageError
from forebay.formats.npy import read_header
from forebay.prepare.documents import batched
from forebay.prepare.read.base import ReadOptions
from forebay.prepare.read.opening import Damaged
from forebay.prepare.read.tar import Member, Members

KEY = "__key__"
IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "ppm", "pgm", "tif", "tiff")
_TEXTS = ("txt", "text", "transcript")
_NUMBERS = ("cls", "cls2", "index", "inx", "id")
_KINDS = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"RIFF", "webp"))
_MEMBERS_IN_ALL = 2  # Of the largest size, in one sample.


def open_samples(paths: Sequence[Path], max_member_bytes: int) -> TableSource:
    """Tar files, one after another; a member larger than that, unpacked if it is compressed, is an error."""
    arrays: dict[str, set[tuple[str, tuple[int, ...]]]] = {}

    def without_arrays() -> Iterator[tuple[str, Rows, int]]:
        for where, rows, size in _batches(paths, max_member_bytes):
            for name, value in itertools.chain.from_iterable(row.items() for row in rows):
                if isinstance(value, np.ndarray):
                    arrays.setdefault(name, set()).add((value.dtype.str, value.shape))
            yield where, [_plain(row) for row in rows], size

    plain = inferred(without_arrays())
    if plain is None:
        raise DatasetError(f"{paths[0]}: expected samples, got none.")
    known = pa.schema([one for one in plain if one.name not in arrays])
    tensors = [_array_field(name, kinds, paths[0]) for name, kinds in sorted(arrays.items())]
    return TableSource(
        "webdataset", pa.schema([*known, *tensors]), None, lambda: _read(paths, max_member_bytes, known, tensors)
    )


def _plain(row: dict[str, Any], arrays: Container[str] = ()) -> dict[str, Any]:
    """What is no array, nor missing where others have one."""
    return {name: value for name, value in row.items() if not isinstance(value, np.ndarray) and name not in arrays}


def _array_field(name: str, kinds: set[tuple[str, tuple[int, ...]]], path: Path) -> pa.Field:
    types, shapes = {kind for kind, _ in kinds}, {shape for _, shape in kinds}
    if len(types) == 1 and len(shapes) == 1:
        return field_of(name, np.dtype(types.pop()).newbyteorder("="), shapes.pop())
    if len(types) == 1 and all(len(shape) == 1 for shape in shapes):
        return pa.field(name, pa.list_(pa.from_numpy_dtype(np.dtype(types.pop()).newbyteorder("="))))
    raise DatasetError(f"{path}: expected arrays {name!r} of one type and shape, got {str(sorted(kinds))[:200]}.")


def _read(
    paths: Sequence[Path], max_member_bytes: int, plain: pa.Schema, tensors: list[pa.Field]
) -> Iterator[pa.RecordBatch]:
    schema = pa.schema([*plain, *tensors])
    for where, rows, _ in _batches(paths, max_member_bytes):
        names = {field.name for field in tensors}
        first = rows_batch([_plain(row, names) for row in rows], plain, where)
        extra = {name for row in rows for name, value in row.items() if isinstance(value, np.ndarray)} - names
        if extra:
            raise DatasetError(f"{where} and after: expected columns {schema.names}, got arrays {sorted(extra)}.")
        columns = [_array_column([row.get(field.name) for row in rows], field, where) for field in tensors]
        yield pa.record_batch([*first.columns, *columns], schema=schema)


def _array_column(values: list[Any], field: pa.Field, where: str) -> pa.Array:
    if any(value is None for value in values) and not pa.types.is_list(field.type):
        raise DatasetError(f"{where} and after: expected an array {field.name!r} in every sample, got none in some.")
    try:
        if not pa.types.is_list(field.type):
            found = np.stack(values)
            if field_of(field.name, found.dtype.newbyteorder("="), found.shape[1:]).type != field.type:
                raise ValueError(f"{found.dtype} {list(found.shape[1:])}")
            return column_of(found.astype(found.dtype.newbyteorder("="), copy=False), field)
        return list_column(values, field.type)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DatasetError(
            f"{where} and after: expected arrays {field.name!r} of {field.type}, got: {error}."
        ) from error


def _batches(paths: Sequence[Path], max_member_bytes: int) -> Iterator[tuple[str, Rows, int]]:
    """The place of the first sample, rows, bytes."""
    for path in paths:
        for some in batched(_samples(path, max_member_bytes), lambda one: one[2], BATCH_BYTES, BATCH_ROWS):
            yield some[0][0], [row for _, row, _ in some], sum(size for _, _, size in some)


def _samples(path: Path, max_member_bytes: int) -> Iterator[tuple[str, dict[str, Any], int]]:
    with open_bytes(path) as file:
        archive = Members(file, ReadOptions(max_document_bytes=max_member_bytes), kinds=None)
        for key, group in itertools.groupby(archive.all(), lambda member: member.key):
            sample: list[Member] = []
            held = 0
            for member in group:
                sample.append(member)
                held += len(member.data)
                if held > _MEMBERS_IN_ALL * max_member_bytes:
                    raise DatasetError(
                        f"{path}, sample {key}: expected at most {_MEMBERS_IN_ALL * max_member_bytes} bytes in a "
                        "sample, got more. Allow more with --max-member-bytes if you trust it."
                    )
            yield f"{path}, sample {key}", _row(key, sample, path), held
        if not archive.has_end:
            raise DatasetError(
                f"{path}: expected blocks of zeros at the archive's end, got none: it is cut. Fetch it again; or "
                "if its writer leaves them out, append 1024 bytes of zero."
            )


def leaves_folder(name: str) -> bool:
    """Whether a member's name leads out of the folder in which somebody unpacks it."""
    return name.startswith("/") or ".." in name.split("/") or "\\" in name or not name.isprintable()


def _row(key: str, members: list[Member], path: Path) -> dict[str, Any]:
    if leaves_folder(key):
        raise DatasetError(
            f"{path}, sample {key[:200]!r}: expected a name of a place inside a folder. Do not unpack this archive: "
            "it would write outside of where you unpack it."
        )
    row: dict[str, Any] = {KEY: key}
    for member in members:
        if member.problem:
            problem = member.problem.replace("max_document_bytes", "--max-member-bytes")
            raise DatasetError(f"{path}, byte {member.position}: expected a member, got: {problem}.")
        suffixes = member.name.rpartition("/")[2].partition(".")[2]
        name, _, suffix = suffixes.rpartition(".")
        try:
            for column, value in _decoded(name, suffix.lower(), member.data):
                if column in row:
                    column = f"{column}.{suffix}"
                row[column] = value
        except (ValueError, Damaged) as error:
            raise DatasetError(f"{path}, {member.name}: expected {suffix}, got: {error}. Mend or remove it.") from error
    return row


def _decoded(name: str, suffix: str, data: bytes) -> Iterator[tuple[str, Any]]:
    if suffix == "json":
        value = orjson.loads(data)
        yield from value.items() if isinstance(value, dict) and not name else [(name or "json", value)]
    elif suffix in _TEXTS:
        yield name or "text", data.decode()
    elif suffix in _NUMBERS and data.strip().lstrip(b"-").isdigit():
        yield name or ("label" if suffix == "cls" else suffix), int(data)
    elif suffix == "npy":
        yield name or "npy", _array(data)
    else:
        yield name or ("image" if suffix in IMAGES else suffix or "data"), data


def _array(data: bytes) -> Array:
    """An array in NumPy's format, of exactly the size that its header says; a view."""
    file = io.BytesIO(data)
    shape, fortran, dtype = read_header(file)
    there = len(data) - file.tell()
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != there:
        raise ValueError(f"a header that says {dtype} {list(shape)} before {there} bytes")
    return np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


class _Part:
    def __init__(self, file: BinaryIO, first_row: int) -> None:
        self._row = first_row
        self._tar = tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20)  # noqa: SIM115

    def write(self, table: pa.Table) -> None:
        for batch in table.to_batches():
            self._write(batch, self._row)
            self._row += batch.num_rows

    def _write(self, batch: pa.RecordBatch, first_row: int) -> None:
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

    def close(self) -> None:
        self._tar.close()

    def _add(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        self._tar.addfile(info, io.BytesIO(data))


def write_webdataset(source: TableSource, out: Path, options: Options) -> Written:
    """Tar files of samples."""
    source = bare_images(source)
    bad = [name for name in source.schema.names if "/" in name or not name.isprintable() or name == "json"]
    if bad:
        raise UsageError(f"WebDataset: expected names of columns that can be in a file's name, got {bad}. Rename them.")
    refuse_columns(
        source.schema, lambda kind: not contains(kind, is_beyond_json), "WebDataset", "Write --to parquet instead."
    )
    return write_parts(source, out, options, ".tar", _Part)


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
        rows = split(leaves.to_numpy(zero_copy_only=False), counts)
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
