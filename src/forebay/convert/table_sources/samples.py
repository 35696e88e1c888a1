"""Tar files as WebDataset writes them, as rows: members with one name up to the first dot are a sample.

A member's column is what stands between that dot and the last: `0001.depth.npy` is a row of `depth`. A suffix alone
has the name that is usual: `txt` is `text`, `cls` is `label`, an image is `image`, the fields of `json` are columns of
their own, any other suffix is the column's name. `__key__` is the sample's name.

Types of columns are inferred from the first 64 MiB, as for lines.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson
import pyarrow as pa

from forebay.convert.table_sources.base import BATCH_BYTES, Array, TableSource, column_of, field_of, open_bytes
from forebay.convert.table_sources.lines import infer, merge, rows_batch
from forebay.errors import DatasetError
from forebay.formats.npy import read_header
from forebay.prepare.read.base import ReadOptions
from forebay.prepare.read.opening import Damaged
from forebay.prepare.read.tar import Member, Members

KEY = "__key__"
IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "ppm", "pgm", "tif", "tiff")
_TEXTS = ("txt", "text", "transcript")
_NUMBERS = ("cls", "cls2", "index", "inx", "id")
_INFERRED_BYTES = 64 << 20
_BATCH_ROWS = 4096
_MEMBERS_IN_ALL = 2  # Of the largest size, in one sample.
_Row: TypeAlias = dict[str, Any]


def open_samples(paths: Sequence[Path], max_member_bytes: int) -> TableSource:
    """Tar files, one after another.

    Args:
        max_member_bytes: A member that is larger, unpacked if it is compressed, is an error.

    Raises:
        DatasetError: If one is damaged, or a member is too large or not what it is called.
    """
    plain: pa.Schema | None = None
    arrays: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    seen = 0
    for where, rows, size in _batches(paths, max_member_bytes):
        for row in rows:
            for name, value in row.items():
                if isinstance(value, np.ndarray):
                    arrays.setdefault(name, set()).add((value.dtype.str, value.shape))
        found = infer([_plain(row) for row in rows], where)
        plain = found if plain is None else merge(plain, found, where)
        seen += size
        if seen >= _INFERRED_BYTES:
            break
    if plain is None:
        raise DatasetError(f"{paths[0]}: expected samples, got none.")
    known = pa.schema([one for one in plain if one.name not in arrays])
    tensors = [_array_field(name, kinds, paths[0]) for name, kinds in sorted(arrays.items())]
    return TableSource(
        "webdataset", pa.schema([*known, *tensors]), None, lambda: _read(paths, max_member_bytes, known, tensors)
    )


def _plain(row: _Row, arrays: Container[str] = ()) -> _Row:
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
    missing = np.array([value is None for value in values])
    if missing.any() and not pa.types.is_list(field.type):
        raise DatasetError(f"{where} and after: expected an array {field.name!r} in every sample, got none in some.")
    try:
        if not pa.types.is_list(field.type):
            found = np.stack(values)
            if field_of(field.name, found.dtype.newbyteorder("="), found.shape[1:]).type != field.type:
                raise ValueError(f"{found.dtype} {list(found.shape[1:])}")
            return column_of(found.astype(found.dtype.newbyteorder("="), copy=False), field)
        there = [value for value in values if value is not None]
        offsets = pa.array(np.cumsum([0, *(0 if value is None else len(value) for value in values)], dtype=np.int32))
        leaves = pa.array(np.concatenate([np.empty(0, field.type.value_type.to_pandas_dtype()), *there]))
        mask = pa.array(missing) if missing.any() else None
        return pa.ListArray.from_arrays(offsets, leaves, type=field.type, mask=mask)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DatasetError(
            f"{where} and after: expected arrays {field.name!r} of {field.type}, got: {error}."
        ) from error


def _batches(paths: Sequence[Path], max_member_bytes: int) -> Iterator[tuple[str, list[_Row], int]]:
    options = ReadOptions(max_document_bytes=max_member_bytes)
    for path in paths:
        with open_bytes(path) as file:
            archive = Members(file, options, kinds=None)
            members = itertools.groupby(archive.all(), lambda member: member.key)
            rows: list[_Row] = []
            size, where = 0, ""
            for key, group in members:
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
                rows.append(_row(key, sample, path))
                where = where or f"{path}, sample {key}"
                size += held
                if size >= BATCH_BYTES or len(rows) >= _BATCH_ROWS:
                    yield where, rows, size
                    rows, size, where = [], 0, ""
            if not archive.has_end:
                raise DatasetError(
                    f"{path}: expected blocks of zeros at the archive's end, got none: it is cut. Fetch it again; or "
                    "if its writer leaves them out, append 1024 bytes of zero."
                )
            if rows:
                yield where, rows, size


def leaves_folder(name: str) -> bool:
    """Whether a member's name leads out of the folder in which somebody unpacks it."""
    return name.startswith("/") or ".." in name.split("/") or "\\" in name or not name.isprintable()


def _row(key: str, members: list[Member], path: Path) -> _Row:
    if leaves_folder(key):
        raise DatasetError(
            f"{path}, sample {key[:200]!r}: expected a name of a place inside a folder. Do not unpack this archive: "
            "it would write outside of where you unpack it."
        )
    row: _Row = {KEY: key}
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
