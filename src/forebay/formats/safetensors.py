"""SafeTensors files, and datasets of Forebay: slices with a manifest, of layout `tokens` or `rows`.

Rows of a table: every column of numbers becomes a tensor [N, …], and a row is in one slice with all its tensors. Images
are decoded, lists become tensors (padded to `seq_len`, or all of one length), types change as `tensors` says, checked,
and other columns are left out: the notes and the manifest name them. Memory is one slice, twice.

Padding of `input_ids` is `eos_id` or 0, of `labels` -100, of other columns 0; an `attention_mask` U8 marks it.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from forebay.arrays import I64, U8, Array
from forebay.base import Json
from forebay.dataset.agreement import TOKENIZER_FILE
from forebay.dataset.chunks import CHUNKS_FILE, HashedPieces, chunk_size
from forebay.dataset.lengths import encode_lengths
from forebay.dataset.manifest import LENGTHS_FILE, MANIFEST_FILE, TABLE_FILE, Manifest, SliceInfo, SliceTable
from forebay.dataset.reader import open_dataset, verify_dataset
from forebay.dataset.slices import hash_file, open_slice, write_rows_slice, write_token_slice
from forebay.errors import DatasetError, UsageError, listed
from forebay.files import atomic_write
from forebay.formats import tables
from forebay.formats.base import Format
from forebay.formats.cast import QUANTIZED, cast, dtype_name, name_of_dtype
from forebay.formats.conversion import ConvertOptions, OutputFile, TableSource, TokenSource, Written
from forebay.formats.images import with_images
from forebay.formats.layout import KEY, is_token_list
from forebay.formats.report import Report, add_slice, check_slices
from forebay.formats.token_stream import build_stream, slices_of

REJECTS_FILE = "rejects.jsonl"
_IGNORED = -100
_DIGITS = 40  # Bytes that a tensor's header grows by, of no rows at first.
_ARRAYS = ("npy", "npz", "safetensors")  # Formats whose integers are stored as they are.
_ROW_DTYPES = {
    "input_ids": "U32", "tokens": "U32", "labels": "I32",
    **dict.fromkeys(("attention_mask", "special_tokens_mask", "token_type_ids"), "U8"),
}  # fmt: skip
"""Of integers of tables: what these columns have in one container, or by one library, they lack in another."""


class SafeTensors(Format):
    """SafeTensors files whose tensors share their first dimension."""

    name = "safetensors"
    suffixes = (".safetensors",)

    def sniff(self, head: bytes) -> bool:
        is_json = re.match(rb'\{[\s"}]', head[8:10]) is not None
        return is_json and 2 <= int.from_bytes(head[:8], "little") <= 100_000_000

    def open_rows(
        self, paths: Sequence[Path], options: ConvertOptions, metadata: Mapping[str, Any] | None = None
    ) -> TableSource:
        """As of any format; vectors of integers that differ in length between files become a column of lists."""
        fields: dict[str, pa.Field] = {}
        num_rows = 0
        for path in paths:
            opened = open_slice(path)
            if opened.layout == "tokens":
                raise DatasetError(
                    f"{path}: expected rows, or tokens with a manifest, got tokens alone. Give their directory a "
                    "manifest first: forebay import DIR."
                )
            num_rows += opened.num_rows
            own = {
                name: tables.arrow_field(name, array.dtype, array.shape[1:], opened.dtypes[name])
                for name, array in sorted(opened.tensors.items())
            }
            fields = fields or own
            for name in sorted(fields.keys() | own.keys()):
                first, second = fields.get(name), own.get(name)
                if first == second:
                    continue
                types = [field.type for field in (first, second) if field is not None]
                values = {kind.value_type for kind in types if is_token_list(kind)}
                if len(types) == 2 and all(map(is_token_list, types)) and len(values) == 1:
                    fields[name] = pa.field(name, pa.list_(values.pop()))
                else:
                    got = [f.type if f is not None else "none" for f in (first, second)]
                    raise DatasetError(
                        f"{path}: expected tensor {name!r} as {got[0]}, as in {paths[0]}, got {got[1]}. Convert "
                        "them as two tables."
                    )
        schema = pa.schema(list(fields.values()))
        return TableSource(self.name, schema, num_rows, lambda: _read_batches(paths, schema), metadata or {})

    def check(self, path: Path, report: Report) -> None:
        """Header against size, document ends, token columns."""
        report.total_bytes = path.stat().st_size
        try:
            opened = open_slice(path)
        except DatasetError as error:
            report.add_finding("damaged", "header", str(error))
            return
        shapes = [f"{name} {opened.dtypes[name]} {list(array.shape)}" for name, array in opened.tensors.items()]
        report.metadata.update(layout=opened.layout, tensors=", ".join(shapes[:16]))
        if not any(array.size for array in opened.tensors.values()):
            report.add_finding("empty", "header", "expected values, got tensors without any")
            return
        add_slice(report, opened)


class ForebayDataset(Format):
    """A directory with a manifest of Forebay."""

    name = "forebay"

    def is_dataset(self, folder: Path) -> bool:
        return (folder / MANIFEST_FILE).is_file()

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        """The one dataset in `paths`, of layout `rows`."""
        dataset = open_dataset(paths[0])
        if dataset.manifest.layout != "rows":
            raise UsageError(f"{paths[0]}: expected a dataset of layout rows, got {dataset.manifest.layout}.")
        converted = dataset.manifest.lineage.get("converted", {})
        classes = converted.get("classes") if isinstance(converted, dict) else None
        slices = [dataset.open_slice(index).path for index in range(dataset.num_slices)]  # Compares the hashes.
        return SafeTensors().open_rows(slices, options, {"classes": classes} if classes else {})

    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        """A dataset of layout `tokens`."""
        stream, sink = build_stream(source, options, "keep"), options.sink
        (out / "slices").mkdir(parents=True)
        slices = list(sink.committed)
        stream.num_written = sum(file.count for file in slices), sum(file.num_documents for file in slices)
        for part in slices_of(stream, options.slice_bytes):
            name = f"slices/{len(slices):06d}.safetensors"
            written = write_token_slice(out / name, part.tokens, part.document_ends, chunk_size(options.slice_bytes))
            if sink.is_remote:
                _check_slice(out / name, {"tokens": part.tokens, "document_ends": part.document_ends})
            lengths = encode_lengths(part.document_ends, len(part.tokens))
            file = OutputFile(name, *written[:2], len(part.tokens), len(part.document_ends), written.leaves, lengths)
            slices.append(sink.commit(file, out / name))
        files, metadata = _copy_tokenizer(source, out), source.metadata
        eos_id = options.eos_id if options.eos_id is not None else metadata.get("eos_id")
        vocab_size = options.vocab_size or int(metadata.get("vocab_size", 0))
        lineage = {"converted": {"id": metadata["id"]} if "id" in metadata else {}, "files": files}
        properties = {
            "name": options.name or str(metadata.get("name", "")) or out.name,
            "layout": "tokens",
            "dtype": stream.dtype,
            "tokenizer": str(metadata.get("tokenizer", "")),
            "vocab_size": vocab_size if stream.dtype == "U32" or vocab_size <= 1 << 16 else 0,
            "eos_id": None if eos_id is None or (vocab_size and eos_id >= vocab_size) else eos_id,
        }
        return stream.written(_finish(out, slices, [*files], options, lineage, properties))

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """A dataset of layout `rows`."""
        if options.compress not in ("", "none"):
            raise UsageError(f"--set compress: expected none for forebay, got {options.compress!r}. Leave it out.")
        rejected: list[Json] = []
        table = with_images(source, options, rejected)
        columns, left_out = _columns(table.schema, options, {} if table.format in _ARRAYS else _ROW_DTYPES)
        (out / "slices").mkdir(parents=True)
        kinds = {column.name: "I8" if column.to == QUANTIZED else column.to for column in columns}
        writer = _Writer(out, options, kinds, list(options.sink.committed))
        skip = options.sink.num_skipped_rows
        first_row = sum(file.count for file in writer.slices) - skip
        for complete in table.batches():
            first_row += min(skip, complete.num_rows)
            batch, skip = complete.slice(skip), max(0, skip - complete.num_rows)
            tensors = _tensors(batch, columns, first_row)
            first_row += batch.num_rows
            if batch.num_rows:
                writer.add(tensors)
                options.on_progress(batch.num_rows)
        writer.flush()
        if not writer.slices:
            raise DatasetError(f"{source.format}: expected rows, got none.")
        notes = []
        if left_out:
            notes.append(
                f"left out columns without numbers ({len(left_out)}): {listed(left_out)}; --to parquet or jsonl keeps "
                "them"
            )
        if rejected:
            atomic_write(out / REJECTS_FILE, b"".join(orjson.dumps(row) + b"\n" for row in rejected))
            notes.append(
                f"{len(rejected)} images were rejected, with the reasons in {REJECTS_FILE}; the first: "
                f"{rejected[0]['reason']}"
            )
        converted = {
            "tensors": writer.tensors,
            "changed": {c.name: [c.kind, c.to] for c in columns if c.kind != c.to and "F" in c.kind},
            "left_out": sorted(left_out),
            "rejected": len(rejected),
            "classes": table.metadata.get("classes"),
        }
        lineage = {"converted": {key: value for key, value in converted.items() if value}}
        properties = {"name": options.name or out.name, "layout": "rows", "eos_id": options.eos_id}
        names = [REJECTS_FILE] if rejected else []
        files = _finish(out, writer.slices, names, options, lineage, properties)
        num_rows = sum(file.count for file in writer.slices)
        return Written(files, None, num_rows, 0, writer.digest.text(), tuple(notes))

    def check(self, path: Path, report: Report) -> None:
        """Every hash if the dataset is small or everything is asked for, then the contents of the slices."""
        try:
            dataset = open_dataset(path, verify="never")
        except DatasetError as error:
            report.add_finding("damaged", "manifest", str(error))
            return
        m, options = dataset.manifest, report.options
        report.total_bytes = m.bytes
        report.metadata.update({key: value for key, value in dataset.describe().items() if value not in ("", None)})
        if options.full or m.bytes <= options.max_bytes:
            verified = verify_dataset(path)
            report.read_bytes = m.bytes
            for name in verified.bad:
                is_missing, is_extra = name in verified.missing, name in verified.extra
                state = "is missing" if is_missing else "is listed nowhere" if is_extra else "does not match its hash"
                report.add_finding("damaged", name, state)
            if verified.bad:
                return
        report.options = replace(options, vocab_size=options.vocab_size or m.vocab_size)
        check_slices(report, dataset)


@dataclass
class _Column:
    name: str
    kind: str
    to: str
    shape: tuple[int, ...] | None = None
    width: int | None = None
    pad: int = 0


@dataclass
class _Writer:
    out: Path
    options: ConvertOptions
    kinds: dict[str, str]
    slices: list[OutputFile]
    tensors: dict[str, list[Any]] = field(default_factory=dict)
    digest: tables.TableDigest = field(default_factory=tables.TableDigest)
    _waiting: list[dict[str, Array]] = field(default_factory=list)
    _rows: int = 0

    def add(self, tensors: dict[str, Array]) -> None:
        count = len(next(iter(tensors.values())))
        row_bytes = sum(array.nbytes for array in tensors.values()) / max(1, count)
        empty = write_rows_slice(BytesIO(), {name: a[:0] for name, a in tensors.items()}, self.kinds).size
        head_bytes = empty + _DIGITS * len(tensors)
        num_rows = max(1, int((self.options.slice_bytes - head_bytes) // max(1.0, row_bytes)))
        start = 0
        while start < count:
            stop = min(count, start + num_rows - self._rows)
            self._waiting.append({name: array[start:stop] for name, array in tensors.items()})
            self._rows += stop - start
            start = stop
            if self._rows >= num_rows:
                self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        tensors = {name: np.concatenate([part[name] for part in self._waiting]) for name in self._waiting[0]}
        name = f"slices/{len(self.slices):06d}.safetensors"
        written = write_rows_slice(self.out / name, tensors, self.kinds, chunk_size(self.options.slice_bytes))
        opened = open_slice(self.out / name)
        self.tensors = {name: [opened.dtypes[name], *a.shape[1:]] for name, a in sorted(opened.tensors.items())}
        if self.options.sink.is_remote:
            _check_slice(self.out / name, tensors)
        file = OutputFile(name, *written[:2], self._rows, leaves=written.leaves)
        self.slices.append(self.options.sink.commit(file, self.out / name))
        fields = [
            tables.arrow_field(n, a.dtype, a.shape[1:], self.kinds.get(n, "")) for n, a in sorted(tensors.items())
        ]
        self.digest.add(tables.batch_of(tensors, pa.schema(fields)))
        self._waiting, self._rows = [], 0


def _finish(
    out: Path, slices: Sequence[OutputFile], names: list[str], options: ConvertOptions, lineage: Json,
    properties: Json,
) -> tuple[Path, ...]:  # fmt: skip
    """Write what belongs to all slices, the manifest last; return all files, with other `names`."""
    rows = [
        SliceInfo(index, file.name, file.num_bytes, file.sha256, file.count, file.num_documents)
        for index, file in enumerate(slices)
    ]
    table = SliceTable.from_rows(rows, chunk_size(options.slice_bytes))
    if properties["layout"] == "tokens":
        lengths = properties["lengths"] = HashedPieces(file.lengths for file in options.sink.complete(slices))
        options.sink.write(out / LENGTHS_FILE, lengths)
        names.append(LENGTHS_FILE)
    options.sink.write(out / CHUNKS_FILE, (file.leaves for file in options.sink.complete(slices)))
    atomic_write(out / TABLE_FILE, table.to_parquet())
    atomic_write(out / MANIFEST_FILE, Manifest.of(table, lineage, **properties).to_json())
    return tuple(map(Path, (*(file.name for file in slices), *names, CHUNKS_FILE, TABLE_FILE, MANIFEST_FILE)))


def _check_slice(path: Path, tensors: Mapping[str, Array]) -> None:
    """Compare a slice with what was written to it, bit by bit."""
    opened = open_slice(path).tensors
    for name, array in tensors.items():
        written, expected = (np.ascontiguousarray(a).reshape(-1).view(np.uint8).data for a in (opened[name], array))
        if written != expected:
            raise DatasetError(f"{path.name}: expected {name} as it was written, got other values. Check the disk.")


def _columns(schema: pa.Schema, options: ConvertOptions, dtypes: Mapping[str, str]) -> tuple[list[_Column], list[str]]:
    columns, left_out = [], []
    for column in schema:
        leaf = tables.leaf_type(column.type)
        if not tables.is_number(leaf):
            left_out += [column.name] if column.name != KEY else []  # Only WebDataset has it: one table has one id.
            continue
        kind = (column.metadata or {}).get(tables.DTYPE_KEY, b"").decode() or name_of_dtype(
            np.dtype(leaf.to_pandas_dtype())
        )
        to = dtypes.get(column.name, kind) if pa.types.is_integer(leaf) else kind
        to = dtype_name(options.tensors[column.name]) if column.name in options.tensors else to
        pad = _IGNORED if column.name == "labels" else (options.eos_id or 0) if column.name == "input_ids" else 0
        columns.append(_Column(column.name, kind, to, width=options.seq_len, pad=pad))
    unknown = sorted(set(options.tensors) - {column.name for column in columns})
    if unknown or not columns:
        raise UsageError(
            f"rows: expected columns of numbers{' called ' + ', '.join(unknown) if unknown else ''}, got "
            f"{listed(schema)}. SafeTensors holds numbers alone: "
            "write --to parquet or jsonl to keep the rest; text becomes tokens with `forebay prepare`."
        )
    return columns, left_out


def _tensors(batch: pa.RecordBatch, columns: Sequence[_Column], first_row: int) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for column in columns:
        array, mask = _array(batch.column(column.name), column, first_row)
        tensors |= cast(array, column.to, column.name, source=column.kind, first_row=first_row)
        if column.name == "input_ids" and mask is not None and all(c.name != "attention_mask" for c in columns):
            tensors["attention_mask"] = mask
    return tensors


def _array(values: pa.Array, column: _Column, first_row: int) -> tuple[Array, U8 | None]:
    counts, leaves = tables.flatten(values)
    gaps = np.flatnonzero(counts < 0)
    if len(gaps) or leaves.null_count:
        raise DatasetError(
            f"column {column.name!r}: expected a value in every row, got none (row "
            f"{first_row + int(gaps[0]) if len(gaps) else f'{first_row} or after'}). SafeTensors holds no missing "
            "values: fill or drop the column, or write --to parquet or jsonl."
        )
    flat = leaves.to_numpy(zero_copy_only=False)
    if column.width is not None and tables.is_vector(values.type):
        return _padded(flat, counts, column, column.width, first_row)
    shape = _row_shape(values, column, first_row)
    if column.shape is None:
        column.shape = shape
    if len(values) and shape != column.shape:
        raise _ragged(column, column.shape, shape, first_row)
    return flat.reshape(len(values), *shape), None


def _row_shape(values: pa.Array, column: _Column, first_row: int) -> tuple[int, ...]:
    kind = values.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return tuple(kind.shape)
    if tables.leaf_type(kind) == kind:
        return ()
    if pa.types.is_fixed_size_list(kind):
        return (kind.list_size, *_row_shape(values.flatten(), column, first_row))
    lengths = np.asarray(pa.compute.list_value_length(values))
    if len(lengths) and (lengths != lengths[0]).any():
        row = int(np.flatnonzero(lengths != lengths[0])[0])
        raise _ragged(column, (int(lengths[0]),), (int(lengths[row]),), first_row + row)
    return (int(lengths[0]) if len(lengths) else 0, *_row_shape(values.flatten(), column, first_row))


def _padded(flat: Array, counts: I64, column: _Column, width: int, first_row: int) -> tuple[Array, U8]:
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


def _ragged(column: _Column, expected: tuple[int, ...], got: tuple[int, ...], row: int) -> DatasetError:
    return DatasetError(
        f"column {column.name!r}: expected rows of one shape, {list(expected)}, got {list(got)} (row {row} or after). "
        "Give --seq-len N to pad vectors; or, for tokens alone, --set column=NAME."
    )


def _copy_tokenizer(source: TokenSource, out: Path) -> dict[str, str]:
    if (dataset := source.dataset) is None or TOKENIZER_FILE not in dataset.manifest.listed_files:
        return {}
    if not (dataset.path / TOKENIZER_FILE).is_file():
        return {}
    shutil.copyfile(dataset.file(TOKENIZER_FILE), out / TOKENIZER_FILE)
    return {TOKENIZER_FILE: hash_file(out / TOKENIZER_FILE)}


def _read_batches(paths: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path in paths:
        opened = open_slice(path)
        size = sum(array.nbytes for array in opened.tensors.values())
        step = tables.rows_at_once(size / max(1, opened.num_rows))
        for start in range(0, opened.num_rows, step):
            rows = {name: array[start : start + step] for name, array in opened.tensors.items()}
            yield tables.batch_of(rows, schema)
