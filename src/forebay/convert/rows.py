"""A table as slices of layout `rows`: every column of numbers a tensor [N, …], a row in one slice with all its tensors.

Hides: that images are decoded, that lists become tensors (padded to `seq_len`, or all of one length), that types
change as `tensors` says, checked, and that text stays behind: what is left out is in the notes and in the manifest.
Memory is one slice, twice.

Padding of `input_ids` is `eos_id` or 0, of `labels` -100, of all else 0; an `attention_mask` U8 says which is which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from forebay.convert.content import Options, TableSource, Written
from forebay.convert.images import Aside, with_images
from forebay.convert.narrow import QUANTIZED, SCALE_SUFFIX, dtype_name, name_of_dtype, narrow
from forebay.convert.table import DTYPE_KEY, batch_of, field_of
from forebay.convert.values import TableDigest, flatten, is_number, leaf_type
from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, Manifest, SliceInfo, SliceTable
from forebay.dataset.slices import open_slice, write_rows_slice
from forebay.errors import DatasetError, UsageError
from forebay.files import atomic_write

Array: TypeAlias = NDArray[Any]
REJECTS_FILE = "rejects.jsonl"
_IGNORED = -100
_HEADER_BYTES = 4096


@dataclass
class _Column:
    """A column on its way to a tensor; `shape` is a row's, once it is known."""

    name: str
    kind: str
    to: str
    shape: tuple[int, ...] | None = None
    width: int | None = None
    pad: int = 0


@dataclass
class _Writer:
    """Rows that wait, and the slices that were written."""

    out: Path
    options: Options
    kinds: dict[str, str]
    infos: list[SliceInfo] = field(default_factory=list)
    digest: TableDigest = field(default_factory=TableDigest)
    _waiting: list[dict[str, Array]] = field(default_factory=list)
    _rows: int = 0

    def add(self, tensors: dict[str, Array]) -> None:
        count = len(next(iter(tensors.values())))
        row_bytes = sum(array.nbytes for array in tensors.values()) / max(1, count)
        most = int(self.options.more.get("slice_rows") or 0)
        most = most or max(1, int((self.options.slice_bytes - _HEADER_BYTES) // max(1.0, row_bytes)))
        start = 0
        while start < count:
            stop = min(count, start + most - self._rows)
            self._waiting.append({name: array[start:stop] for name, array in tensors.items()})
            self._rows += stop - start
            start = stop
            if self._rows >= most:
                self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        tensors = {name: np.concatenate([part[name] for part in self._waiting]) for name in self._waiting[0]}
        name = f"slices/{len(self.infos):06d}.safetensors"
        size, sha256 = write_rows_slice(self.out / name, tensors, self.kinds)
        self.infos.append(SliceInfo(len(self.infos), name, size, sha256, self._rows, 0))
        fields = [field_of(n, a.dtype, a.shape[1:], self.kinds.get(n, "")) for n, a in sorted(tensors.items())]
        self.digest.add(batch_of(tensors, pa.schema(fields)))
        self._waiting, self._rows = [], 0


def write_rows(source: TableSource, out: Path, options: Options) -> Written:
    """A dataset of layout `rows`."""
    aside: list[Aside] = []
    table = with_images(source, options, aside)
    columns, left_out = _columns(table.schema, options)
    (out / "slices").mkdir(parents=True)
    kinds = {column.name: "I8" if column.to == QUANTIZED else column.to for column in columns}
    writer = _Writer(out, options, kinds)
    first_row = 0
    for batch in table.batches():
        tensors = _tensors(batch, columns, first_row, options.lossy)
        first_row += batch.num_rows
        if batch.num_rows:
            writer.add(tensors)
            options.advance(batch.num_rows)
    writer.flush()
    if not writer.infos:
        raise DatasetError(f"{source.kind}: expected rows, got none.")
    notes = [f"left out, being no numbers: {', '.join(left_out)}; --to parquet or jsonl keeps them"] if left_out else []
    files = [Path(info.name) for info in writer.infos]
    if aside:
        lines = [orjson.dumps({"row": a.row, "name": a.name, "reason": a.reason}) + b"\n" for a in aside]
        atomic_write(out / REJECTS_FILE, b"".join(lines))
        notes.append(
            f"{len(aside)} images kept aside, with the reasons in {REJECTS_FILE}; the first: {aside[0].reason}"
        )
        files.append(Path(REJECTS_FILE))
    lineage = _lineage(table, columns, writer, left_out, len(aside), options)
    slices = SliceTable.from_rows(writer.infos)
    atomic_write(out / TABLE_FILE, slices.to_parquet())
    manifest = Manifest.of(slices, lineage, name=options.name or out.name, layout="rows", eos_id=options.eos_id)
    atomic_write(out / MANIFEST_FILE, manifest.to_json())
    files += [Path(TABLE_FILE), Path(MANIFEST_FILE)]
    return Written(tuple(files), None, writer.digest.num_rows, 0, writer.digest.text(), tuple(notes))


def _columns(schema: pa.Schema, options: Options) -> tuple[list[_Column], list[str]]:
    """What becomes tensors, and the names of what does not."""
    columns, left_out = [], []
    for one in schema:
        leaf = leaf_type(one.type)
        if not is_number(leaf):
            left_out.append(one.name)
            continue
        kind = (one.metadata or {}).get(DTYPE_KEY, b"").decode() or name_of_dtype(np.dtype(leaf.to_pandas_dtype()))
        to = dtype_name(options.tensors[one.name]) if one.name in options.tensors else kind
        pad = _IGNORED if one.name == "labels" else (options.eos_id or 0) if one.name == "input_ids" else 0
        columns.append(_Column(one.name, kind, to, width=options.seq_len, pad=pad))
    unknown = sorted(set(options.tensors) - {column.name for column in columns})
    if unknown or not columns:
        raise UsageError(
            f"rows: expected columns of numbers{' called ' + ', '.join(unknown) if unknown else ''}, got "
            f"{', '.join(f'{one.name}: {one.type}' for one in schema)[:300]}. SafeTensors holds numbers alone: write "
            "--to parquet or jsonl to keep the rest; text becomes tokens with `forebay prepare`."
        )
    return columns, left_out


def _tensors(batch: pa.RecordBatch, columns: Sequence[_Column], first_row: int, lossy: bool) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for column in columns:
        array, mask = _array(batch.column(column.name), column, first_row)
        found |= narrow(array, column.to, column.name, source=column.kind, first_row=first_row, lossy=lossy)
        if column.name == "input_ids" and mask is not None and all(c.name != "attention_mask" for c in columns):
            found["attention_mask"] = mask
    return found


def _array(values: pa.Array, column: _Column, first_row: int) -> tuple[Array, NDArray[np.uint8] | None]:
    """Rows as an array [N, …], and where it is no padding, if rows may be padded."""
    counts, leaves = flatten(values)
    gaps = np.flatnonzero(counts < 0)
    if len(gaps) or leaves.null_count:
        row = f"row {first_row + int(gaps[0])}" if len(gaps) else f"row {first_row} or after"
        raise DatasetError(
            f"column {column.name!r}: expected a value in every row, got none ({row}). SafeTensors holds no missing "
            "values: fill or drop the column, or write --to parquet or jsonl."
        )
    flat = leaves.to_numpy(zero_copy_only=False)
    if _is_vector(values.type) and column.width is not None:
        return _padded(flat, counts, column, first_row)
    shape = _row_shape(values, column, first_row)
    if column.shape is None:
        column.shape = shape
    if len(values) and shape != column.shape:
        raise _ragged(column, column.shape, shape, first_row)
    return flat.reshape(len(values), *shape), None


def _is_vector(kind: Any) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and not pa.types.is_nested(kind.value_type))


def _row_shape(values: pa.Array, column: _Column, first_row: int) -> tuple[int, ...]:
    """What every row's shape is."""
    kind = values.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return tuple(kind.shape)
    if leaf_type(kind) == kind:
        return ()
    if pa.types.is_fixed_size_list(kind):
        return (kind.list_size, *_row_shape(values.flatten(), column, first_row))
    lengths = np.asarray(pa.compute.list_value_length(values))
    if len(lengths) and (lengths != lengths[0]).any():
        row = int(np.flatnonzero(lengths != lengths[0])[0])
        raise _ragged(column, (int(lengths[0]),), (int(lengths[row]),), first_row + row)
    return (int(lengths[0]) if len(lengths) else 0, *_row_shape(values.flatten(), column, first_row))


def _padded(
    flat: Array, counts: NDArray[np.int64], column: _Column, first_row: int
) -> tuple[Array, NDArray[np.uint8] | None]:
    width = column.width or 0
    over = np.flatnonzero(counts > width)
    if len(over):
        raise DatasetError(
            f"column {column.name!r}: expected at most {width} values in a row, got {counts[over[0]]} (row "
            f"{first_row + int(over[0])}). Give a larger --seq-len, or cut the rows first."
        )
    pad = column.pad if flat.dtype.kind in "iu" else 0
    if flat.dtype.kind in "iu" and not np.iinfo(flat.dtype).min <= pad <= np.iinfo(flat.dtype).max:
        raise DatasetError(f"column {column.name!r}: expected a type that holds {pad}, to pad with, got {flat.dtype}.")
    mask = np.arange(width) < counts[:, None]
    out = np.full(mask.shape, pad, flat.dtype)
    out[mask] = flat
    return out, mask.astype(np.uint8)


def _ragged(column: _Column, wanted: tuple[int, ...], got: tuple[int, ...], row: int) -> DatasetError:
    return DatasetError(
        f"column {column.name!r}: expected rows of one shape, {list(wanted)}, got {list(got)} (row {row} or after). "
        "Give --seq-len N to pad vectors."
    )


def _lineage(
    table: TableSource, columns: Sequence[_Column], writer: _Writer, left_out: list[str], aside: int, options: Options
) -> dict[str, Any]:
    first = open_slice(writer.out / writer.infos[0].name)
    changed = {c.name: {"from": c.kind, "to": first.dtypes[c.name]} for c in columns if c.kind != c.to}
    for column in columns:
        if column.to == QUANTIZED:
            changed[column.name] |= {"scale": column.name + SCALE_SUFFIX, "per": "row", "error": "at most scale / 2"}
    told = {
        "changed": changed,
        "left_out": left_out,
        "aside": aside,
        "lossy": options.lossy and bool(changed),
        "classes": table.facts.get("classes"),
    }
    tensors = {name: [first.dtypes[name], *array.shape[1:]] for name, array in sorted(first.tensors.items())}
    return {"converted": {"format": table.kind, "tensors": tensors, **{k: v for k, v in told.items() if v}}}
