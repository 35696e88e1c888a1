"""Arrays as rows: NumPy's .npy and .npz.

Arrays of several files go side by side, each a column by its file's name. They are read as streams: none is in memory
as a whole. Pickled objects are never loaded.
"""

import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from forebay.arrays import Array, DType
from forebay.errors import DatasetError, UsageError, listed
from forebay.formats.base import Format
from forebay.formats.conversion import ConvertOptions, TableSource
from forebay.formats.raw_tokens import RawTokens
from forebay.formats.tables import BATCH_BYTES, arrow_field, batch_of, rows_at_once
from forebay.formats.vectors import NPY_MAGIC, read_header
from forebay.storage.compression import check_unpacked
from forebay.storage.remote_path import RemotePath

_READ_ERRORS = (OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile)
"""What files and members of archives raise that are damaged, encrypted, or of an unknown compression."""


class Npy(RawTokens):
    """Files with NumPy's header."""

    name = "npy"
    suffixes: tuple[str, ...] = ()  # `raw tokens` has .npy: some shards so named have no header.
    magics = (NPY_MAGIC,)

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        """`column` chooses some of the files: `x_train,y_train`."""
        stacks = [open_array(path, path.stem, partial(path.open, "rb"), path.stat().st_size) for path in paths]
        return table_of_arrays(self.name, stacks, options.column)


class Npz(Format):
    """One archive; `column` chooses some of its arrays."""

    name = "npz"
    suffixes = (".npz",)

    def sniff(self, head: bytes) -> bool:
        """A ZIP archive whose first member is named .npy."""
        is_zip = head.startswith(b"PK\x03\x04")
        return is_zip and head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(b".npy")

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        path, *others = paths
        if others:
            raise UsageError(f"{path.parent}: expected one .npz, got {len(paths)}. Name one of them.")
        try:
            with zipfile.ZipFile(_archive_of(path)) as archive:
                members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        except (zipfile.BadZipFile, OSError) as error:
            raise DatasetError(f"{path}: expected a .npz archive, got: {error}. Fetch it again.") from error
        arrays = []
        for member in members:
            check_unpacked(f"{path}, {member.filename}", member.compress_size, member.file_size)
            name = member.filename.removesuffix(".npy")
            arrays.append(open_array(path, name, partial(_open_member, path, member.filename), member.file_size))
        return table_of_arrays(self.name, arrays, options.column)


def _open_member(path: Path, name: str) -> Any:
    with zipfile.ZipFile(_archive_of(path)) as archive:
        return archive.open(name)  # Keeps the file open until it is closed itself.


def _archive_of(path: Path) -> Any:
    return path.open("rb") if isinstance(path, RemotePath) else path


@dataclass(frozen=True)
class ArrayFile:
    """An array in a file or archive: the offset of its first value, and how it is opened."""

    name: str
    path: Path
    open: Callable[[], AbstractContextManager[Any]]
    start: int
    dtype: DType
    rows: int
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * math.prod(self.shape)


def open_array(path: Path, name: str, opener: Callable[[], AbstractContextManager[Any]], num_bytes: int) -> ArrayFile:
    """Read the header of an array. Raises DatasetError if it does not fit the `num_bytes` of the file or member."""
    location = path if path.suffix == ".npy" else f"{path}, {name}"
    try:
        with opener() as file:
            shape, is_fortran, dtype = read_header(file)
            start = file.tell()
    except (ValueError, *_READ_ERRORS) as error:
        raise DatasetError(f"{location}: expected an array, got: {error}. Fetch it again.") from error
    if dtype.hasobject or dtype.kind not in "biuf" or not shape or (is_fortran and len(shape) > 1):
        order = " in Fortran's order" if is_fortran else ""
        raise DatasetError(
            f"{location}: expected rows of numbers in C order, got {dtype} {list(shape)}{order}. Save it again with "
            "numpy.ascontiguousarray."
        )
    claimed = start + math.prod(shape) * dtype.itemsize
    if claimed != num_bytes:
        raise DatasetError(
            f"{location}: expected {num_bytes} bytes, as it has, got a header that says {claimed}: {dtype} "
            f"{list(shape)}. It is cut or damaged: fetch it again."
        )
    return ArrayFile(name, path, opener, start, dtype, shape[0], shape[1:])


def table_of_arrays(format_name: str, arrays: list[ArrayFile], columns: str | None) -> TableSource:
    """Return arrays of as many rows side by side as a table; those that `columns` names: `x_train,y_train`."""
    names = [name for name in (columns or "").split(",") if name]
    if missing := set(names) - {array.name for array in arrays}:
        raise UsageError(f"--set column: expected some of {[array.name for array in arrays]}, got {sorted(missing)}.")
    arrays = [array for array in arrays if not names or array.name in names]
    sizes = {array.name: array.rows for array in arrays}
    if not arrays or len(sizes) < len(arrays) or len(set(sizes.values())) > 1:
        raise UsageError(
            f"{arrays[0].path.parent if arrays else 'arrays'}: expected arrays of other names and as many rows, got "
            f"{listed(f'{array.name} {array.rows} ({array.path.name})' for array in arrays) or 'none'}. Name "
            "those that belong together: --set column=x_train,y_train, or a pattern of files."
        )
    schema = pa.schema([arrow_field(array.name, array.dtype.newbyteorder("="), array.shape) for array in arrays])
    return TableSource(format_name, schema, arrays[0].rows, lambda: _read_batches(arrays, schema))


def _read_batches(arrays: Sequence[ArrayFile], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    step = rows_at_once(sum(array.row_bytes for array in arrays))
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(array.open()) for array in arrays]
        except _READ_ERRORS as error:
            raise DatasetError(f"{arrays[0].path}: expected arrays, got: {error}. Fetch it again.") from error
        for array, file in zip(arrays, files):
            _read_exactly(file, array.start, array)
        for start in range(0, arrays[0].rows, step):
            count = min(step, arrays[0].rows - start)
            yield batch_of({array.name: _read_rows(array, file, count) for array, file in zip(arrays, files)}, schema)


def _read_rows(array: ArrayFile, file: BinaryIO, count: int) -> Array:
    data = _read_exactly(file, count * array.row_bytes, array)
    rows = np.frombuffer(data, array.dtype).reshape(count, *array.shape)
    return rows.astype(array.dtype.newbyteorder("="), copy=False)


def _read_exactly(file: BinaryIO, size: int, array: ArrayFile) -> bytes:
    pieces = []
    remaining = size
    try:
        while remaining:
            piece = file.read(min(remaining, BATCH_BYTES))  # More would be allocated at once.
            if not piece:
                raise EOFError(f"{remaining} bytes fewer: the file is cut")
            pieces.append(piece)
            remaining -= len(piece)
    except _READ_ERRORS as error:
        raise DatasetError(
            f"{array.path}: expected {array.rows} rows of {array.name}, {array.row_bytes} bytes each, got: {error}. "
            "Fetch it again."
        ) from error
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
