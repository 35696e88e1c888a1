"""Arrays whose first dimension counts rows: .npy, .npz, SafeTensors, and the idx files of MNIST, plain or compressed.

Hides: the headers; that several arrays go side by side; and that archives are read as a stream: no array is in memory
whole. Pickled objects are never loaded. Images of one channel, [N, H, W] in idx, become [N, 1, H, W]. Batches of
SafeTensors are views of the maps.

Source: idx as Y. LeCun's page on MNIST lays it out: two zero bytes, a type, the number of dimensions, each dimension
in 4 bytes, values, all big-endian.
"""

from __future__ import annotations

import functools
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from forebay.convert.content import TableSource
from forebay.convert.table import (
    BATCH_BYTES,
    DTYPE_KEY,
    Array,
    batch_of,
    column_of,
    field_of,
    open_bytes,
    rows_at_once,
)
from forebay.dataset.slices import Slice, open_slice
from forebay.errors import DatasetError, UsageError
from forebay.formats.compression import check_unpacked
from forebay.formats.detect import IDX_TYPES, is_idx
from forebay.formats.npy import read_header

_BITS = ("BF16", "F8_E4M3", "F8_E5M2")
_IDX_NAMES = {1: "labels", 2: "values"}


@dataclass(frozen=True)
class _Stack:
    """An array in a file: where its values begin, and how they are read on."""

    name: str
    path: Path
    open: Callable[[], AbstractContextManager[Any]]
    start: int
    dtype: np.dtype[Any]
    rows: int
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def open_idx(paths: Sequence[Path]) -> TableSource:
    """Idx files that belong together: images and their labels."""
    return _table("idx", [_idx(path) for path in paths])


def open_npy(paths: Sequence[Path], columns: str | None) -> TableSource:
    """Arrays of rows, each a column by its file's name; `columns` chooses some: `x_train,y_train`."""
    stacks = [_npy(path, path.stem, lambda path=path: path.open("rb"), path.stat().st_size) for path in paths]  # type: ignore[misc]
    return _table("npy", _chosen(stacks, columns))


def open_npz(paths: Sequence[Path], columns: str | None) -> TableSource:
    """The arrays of one archive; `columns` chooses some."""
    path, *others = paths
    if others:
        raise UsageError(f"{path.parent}: expected one .npz, got {len(paths)}. Name one of them.")
    try:
        with zipfile.ZipFile(path) as archive:
            members = [one for one in archive.infolist() if one.filename.endswith(".npy")]
    except (zipfile.BadZipFile, OSError) as error:
        raise DatasetError(f"{path}: expected a .npz archive, got: {error}. Fetch it again.") from error
    stacks = []
    for one in members:
        check_unpacked(f"{path}, {one.filename}", one.compress_size, one.file_size)
        name = one.filename.removesuffix(".npy")
        stacks.append(_npy(path, name, functools.partial(_member, path, one.filename), one.file_size))
    return _table("npz", _chosen(stacks, columns))


def _member(path: Path, name: str) -> Any:
    with zipfile.ZipFile(path) as archive:
        return archive.open(name)  # Keeps the file open until it is closed itself.


def _npy(path: Path, name: str, opener: Callable[[], AbstractContextManager[Any]], num_bytes: int) -> _Stack:
    where = path if path.suffix == ".npy" else f"{path}, {name}"
    with opener() as file:
        try:
            shape, fortran, dtype = read_header(file)
            start = file.tell()
        except (ValueError, OSError, zlib.error, zipfile.BadZipFile) as error:
            raise DatasetError(f"{where}: expected an array, got: {error}. Fetch it again.") from error
    if dtype.hasobject or dtype.kind not in "biuf" or not shape or (fortran and len(shape) > 1):
        order = " in Fortran's order" if fortran else ""
        raise DatasetError(
            f"{where}: expected rows of numbers in C order, got {dtype} {list(shape)}{order}. Save it again with "
            "numpy.ascontiguousarray."
        )
    claimed = start + math.prod(shape) * dtype.itemsize
    if claimed != num_bytes:
        raise DatasetError(
            f"{where}: expected {num_bytes} bytes, as it has, got a header that says {claimed}: {dtype} {list(shape)}. "
            "It is cut or damaged: fetch it again."
        )
    return _Stack(name, path, opener, start, dtype, shape[0], shape[1:])


def _idx(path: Path) -> _Stack:
    with open_bytes(path) as file:
        head = file.read(4)
        if not is_idx(head + b"\0" * 4):
            raise DatasetError(f"{path}: expected an idx file, got one that begins with {head.hex(' ')}.")
        dimensions = [int(n) for n in np.frombuffer(file.read(4 * head[3]), ">u4")]
    if len(dimensions) < head[3]:
        raise DatasetError(f"{path}: expected {head[3]} dimensions, got {len(dimensions)}: it is cut. Fetch it again.")
    rows, *shape = dimensions
    name = _IDX_NAMES.get(len(dimensions), "images")
    shape = [1, *shape] if len(shape) == 2 else shape
    return _Stack(
        name, path, lambda: open_bytes(path), 4 + 4 * head[3], np.dtype(IDX_TYPES[head[2]]), rows, tuple(shape)
    )


def _chosen(stacks: list[_Stack], columns: str | None) -> list[_Stack]:
    names = [name for name in (columns or "").split(",") if name]
    missing = set(names) - {one.name for one in stacks}
    if missing:
        raise UsageError(f"--column: expected some of {[one.name for one in stacks]}, got {sorted(missing)}.")
    return [one for one in stacks if not names or one.name in names]


def _table(kind: str, stacks: list[_Stack]) -> TableSource:
    sizes = {one.name: one.rows for one in stacks}
    if not stacks or len(sizes) < len(stacks) or len(set(sizes.values())) > 1:
        told = ", ".join(f"{one.name} {one.rows} ({one.path.name})" for one in stacks)[:500]
        raise UsageError(
            f"{stacks[0].path.parent if stacks else 'arrays'}: expected arrays of other names and as many rows, got "
            f"{told or 'none'}. Name those that belong together: --column x_train,y_train, or a pattern of files."
        )
    schema = pa.schema([field_of(one.name, one.dtype.newbyteorder("="), one.shape) for one in stacks])
    return TableSource(kind, schema, stacks[0].rows, lambda: _read(stacks, schema))


def _read(stacks: Sequence[_Stack], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    step = rows_at_once(sum(one.row_bytes for one in stacks))
    with ExitStack() as opened:
        files = [opened.enter_context(one.open()) for one in stacks]
        for one, file in zip(stacks, files):
            _take(file, one.start, one)
        for start in range(0, stacks[0].rows, step):
            count = min(step, stacks[0].rows - start)
            yield batch_of({one.name: _rows(one, file, count) for one, file in zip(stacks, files)}, schema)


def _rows(one: _Stack, file: BinaryIO, count: int) -> Array:
    data = _take(file, count * one.row_bytes, one)
    found = np.frombuffer(data, one.dtype).reshape(count, *one.shape)
    return found.astype(one.dtype.newbyteorder("="), copy=False)


def _take(file: BinaryIO, size: int, one: _Stack) -> bytes:
    pieces = []
    left = size
    while left and (piece := file.read(min(left, BATCH_BYTES))):  # Reading more would allocate it all first.
        pieces.append(piece)
        left -= len(piece)
    if left:
        raise DatasetError(
            f"{one.path}: expected {one.rows} rows of {one.name}, {one.row_bytes} bytes each, got {left} bytes fewer. "
            "The file is cut: fetch it again."
        )
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def open_rows(paths: Sequence[Path], facts: Mapping[str, Any] | None = None) -> TableSource:
    """SafeTensors files whose tensors share their first dimension, one after another; of a dataset, or of others.

    Vectors of integers that differ in length between files become a column of lists.
    """
    fields: dict[str, pa.Field] = {}
    rows = 0
    for path in paths:
        one = open_slice(path)
        if one.layout == "tokens":
            raise DatasetError(
                f"{path}: expected rows, or tokens with a manifest, got tokens alone. Give their directory a manifest "
                "first: forebay adopt DIR."
            )
        rows += one.num_rows
        found = {name: _slice_field(one, name) for name in sorted(one.tensors)}
        fields = fields or found
        for name in sorted(fields.keys() | found.keys()):
            fields[name] = _joined(fields.get(name), found.get(name), name, path, paths[0])
    schema = pa.schema(list(fields.values()))
    return TableSource("safetensors", schema, rows, lambda: _read_slices(paths, schema), facts or {})


def _slice_field(one: Slice, name: str) -> pa.Field:
    array, kind = one.tensors[name], one.dtypes[name]
    found = field_of(name, array.dtype, array.shape[1:])
    return found.with_metadata({DTYPE_KEY: kind.encode()}) if kind in _BITS else found


def _joined(first: pa.Field | None, second: pa.Field | None, name: str, path: Path, before: Path) -> pa.Field:
    if first == second and first is not None:
        return first
    if first is not None and second is not None:
        values = [f.type.value_type if not pa.types.is_integer(f.type) else f.type for f in (first, second)]
        vectors = all(pa.types.is_list(f.type) or len(getattr(f.type, "shape", ())) == 1 for f in (first, second))
        if vectors and values[0] == values[1] and pa.types.is_integer(values[0]):
            return pa.field(name, pa.list_(values[0]))
    told = [f.type if f is not None else "none" for f in (first, second)]
    raise DatasetError(
        f"{path}: expected tensor {name!r} as {told[0]}, as in {before}, got {told[1]}. Convert them as two tables."
    )


def _read_slices(paths: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path in paths:
        one = open_slice(path)
        size = sum(array.nbytes for array in one.tensors.values())
        step = rows_at_once(size / max(1, one.num_rows))
        for start in range(0, one.num_rows, step):
            rows = {name: array[start : start + step] for name, array in one.tensors.items()}
            yield pa.record_batch([_slice_column(rows[field.name], field) for field in schema], schema=schema)


def _slice_column(rows: Array, field: pa.Field) -> pa.Array:
    if not pa.types.is_list(field.type):
        return column_of(rows, field)
    width = math.prod(rows.shape[1:])
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(width)
    values = pa.array(np.ascontiguousarray(rows).reshape(-1))
    return pa.ListArray.from_arrays(pa.array(offsets), values, type=field.type)
