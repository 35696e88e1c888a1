"""What the writers of tables share: parts of a bounded size, the digest of what was written, how far it is.

Hides: when a part ends. `out` with a suffix is one file; otherwise a directory of `part-00000.parquet` and so on, each
begun anew once the one before holds `slice_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa

from forebay.convert.content import Options, Written
from forebay.convert.table_digest import TableDigest, tensor_shape
from forebay.convert.table_sources.base import TableSource
from forebay.errors import DatasetError, UsageError

_STEP_ROWS = 1024  # A part is looked at after so many rows, or fewer if they weigh more than an eighth of it.


class Part(Protocol):
    """A file that is being written."""

    def write(self, batch: pa.RecordBatch, first_row: int) -> None:
        """The next rows; `first_row` is their place in the whole table."""

    def finish(self) -> None:
        """Write what is left; the file is still open."""


OpenPart = Callable[[BinaryIO, pa.Schema], Part]


def write_parts(source: TableSource, out: Path, options: Options, suffix: str, open_part: OpenPart) -> Written:
    """Write a table to `out`: one file, or a directory of parts with this suffix."""
    digest, files = TableDigest(), list[Path]()
    pieces = _pieces(source, options.slice_bytes)
    ahead = next(pieces, None)  # A part is begun only for rows that are there.
    single = bool(out.suffix)
    if not single:
        out.mkdir()
    while ahead is not None or not files:  # An empty table is one empty part.
        path = out if single else out / f"part-{len(files):05d}{suffix}"
        with path.open("xb") as file:
            part = open_part(file, source.schema)
            try:
                while ahead is not None and (single or file.tell() < options.slice_bytes):
                    part.write(ahead, digest.num_rows)
                    digest.add(ahead)
                    options.advance(ahead.num_rows)
                    ahead = next(pieces, None)
            finally:
                part.finish()  # Also after an error: a writer that is let go of would write on.
        files.append(Path() if single else path.relative_to(out))
    return Written(tuple(files), None, digest.num_rows, 0, digest.text())


def _pieces(source: TableSource, slice_bytes: int) -> Iterator[pa.RecordBatch]:
    for batch in source.batches():
        row_bytes = batch.nbytes / max(1, batch.num_rows)
        step = max(1, min(_STEP_ROWS, int(slice_bytes // 8 // max(1.0, row_bytes))))
        for start in range(0, batch.num_rows, step):
            yield batch.slice(start, step)


def refuse_columns(schema: pa.Schema, fits: Callable[[Any], bool], what: str, advice: str) -> None:
    """Raise UsageError if a column is of a type that a format does not hold."""
    bad = [f"{field.name}: {field.type}" for field in schema if not fits(field.type)]
    if bad:
        raise UsageError(f"{what}: expected columns that it can hold, got {', '.join(bad)[:300]}. {advice}")


def with_lists(source: TableSource) -> TableSource:
    """The table with tensors as lists of fixed size in lists of fixed size, which others read, too. No copy."""
    kinds = [_list_type(field.type) for field in source.schema]
    if kinds == source.schema.types:
        return source
    schema = pa.schema([field.with_type(kind) for field, kind in zip(source.schema, kinds)])
    return source.changed(schema, lambda batch: [_listed(column, kind) for column, kind in zip(batch.columns, kinds)])


def _list_type(kind: Any) -> Any:
    if not isinstance(kind, pa.FixedShapeTensorType) or 0 in kind.shape:
        return kind
    found = kind.value_type
    for size in reversed(kind.shape):
        found = pa.list_(found, size)
    return found


def _listed(column: pa.Array, kind: Any) -> pa.Array:
    if kind == column.type:
        return column
    if column.null_count:
        raise DatasetError("tensors: expected one in every row, got none in some. Fill or drop these rows.")
    values, sizes = column.storage.flatten(), tensor_shape(kind)
    for size in reversed(sizes or ()):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values


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
