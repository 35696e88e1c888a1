"""WebDataset: each row a sample of a tar file, its columns members.

Text is `<column>.txt`, an image or other bytes `<column>.jpg` and the like by what it begins with (else `.bin`), lists
and tensors of numbers `<column>.npy`, a `label` is `cls`, all else stands in `json`. Columns `text` and `image` are
`txt` and `jpg` alone, as is usual. The sample's name is that of column `__key__`, else the row's number.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import pyarrow as pa

from forebay.convert.content import Options, TableSource, Written
from forebay.convert.images import bare_images
from forebay.convert.table_digest import flatten, is_number, tensor_shape
from forebay.convert.table_sinks.base import contains, is_beyond_json, refuse_columns, write_parts
from forebay.convert.table_sources.samples import KEY
from forebay.errors import DatasetError, UsageError

_KINDS = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpg"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"RIFF", "webp"))
_Encode = Callable[[Any], tuple[str, bytes]]


class _Part:
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
    return write_parts(source, out, options, ".tar", lambda file, _: _Part(file))


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
        values = leaves.to_numpy(zero_copy_only=False)
        stops = np.cumsum(np.maximum(counts, 0)).tolist()
        rows = [None if n < 0 else values[stop - n : stop] for n, stop in zip(counts.tolist(), stops)]
        return [row if row is None or shape is None else row.reshape(shape) for row in rows]
    found: list[Any] = (column.cast(pa.float32()) if pa.types.is_float16(column.type) else column).to_pylist()
    if pa.types.is_floating(kind) and not np.isfinite(leaves.drop_null().to_numpy(zero_copy_only=False)).all():
        raise DatasetError(
            f"WebDataset: expected finite numbers in {name!r}, which stands in JSON, got others (row {first_row} or "
            "after). Write --to parquet, or leave the column out."
        )
    if name == KEY:
        for key in found:
            if not isinstance(key, str) or not key or "." in key.rpartition("/")[2]:
                raise DatasetError(f"WebDataset: expected keys without a dot, got {key!r}. Leave out column {KEY}.")
    return found
