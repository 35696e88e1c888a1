"""What is to be converted: the tokens or the table at a path or URL, and the one as the other.

Hides which files of a directory belong together: all of one format, as `formats.detect` says, in the order of their
names. Files that hold no table are left out. Files at a URL are read by ranges; of those with one suffix the first
says the format. A dataset of Forebay at a URL is read slice by slice through a temporary file.
"""

import glob
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from forebay.arrays import U64, Array
from forebay.dataset.manifest import MANIFEST_FILE, TOKEN_DTYPES
from forebay.dataset.reader import Dataset, open_dataset
from forebay.errors import DatasetError, ForebayError, PrepareError, PrintableUrl, UsageError, listed
from forebay.files import nothing_there
from forebay.formats import dataset_format, open_external, open_token_files
from forebay.formats.arrow import check_split
from forebay.formats.base import get_format, names_with
from forebay.formats.conversion import (
    ConvertOptions,
    Position,
    Positioned,
    TableSource,
    TokenPart,
    TokenSource,
    Written,
)
from forebay.formats.detect import Detection, detect
from forebay.formats.images import Images
from forebay.formats.layout import decide_layout, layout_of_tokens
from forebay.formats.records import batched
from forebay.formats.tables import TableDigest, flatten, leaf_type, num_bytes
from forebay.formats.token_stream import MAX_TOKENS, documents
from forebay.formats.vectors import HEADERS, IDS_PREFIX, RAW_SUFFIXES
from forebay.storage.addresses import path_or_url
from forebay.storage.compression import MIN_UNPACKED_BYTES
from forebay.storage.listing import Skipped, list_files
from forebay.storage.origins import open_remote
from forebay.storage.remote_path import RemotePath, find_paths, url_name

_NO_OPTIONS = ConvertOptions()
_JSON_NUMBERS = ("jsonl", "webdataset")
_BLOCKS = ("mds", "litdata")
_WITH_COLUMNS = ("arrow", "mds", "litdata")  # Formats of tokens that hold other columns beside them, text too.


@contextmanager
def naming_source(path: object) -> Iterator[None]:
    """Raise errors of the libraries that read and write as one that names the source."""
    try:
        yield
    except PrepareError as failure:
        raise getattr(failure, "error", failure) from failure  # A HubReadError has the one to show.
    except (pa.ArrowException, MemoryError, OverflowError) as error:
        what = "more than fits into memory" if isinstance(error, MemoryError) else str(error).strip().rstrip(".")
        raise DatasetError(f"{path}: expected data that can be converted, got {what[:300]}. Check the file.") from error


def open_source(path: str | Path, options: ConvertOptions, to: str | None = None) -> TokenSource | TableSource:
    """Open what is at a path, as format `to` needs it: tokens or a table. Without `to`, tokens if there are any."""
    path = path_or_url(path)
    with naming_source(path):
        if isinstance(path, PrintableUrl):
            return _open_source(_RemoteFolder(path, find_paths(path)), options, to)
        return _open_source(path, options, to)


class _RemoteFolder(NamedTuple):
    """The files at a URL, listed once."""

    url: PrintableUrl
    paths: list[RemotePath]

    def __str__(self) -> str:
        return self.url


def _open_source(
    path: str | Path | _RemoteFolder, options: ConvertOptions, to: str | None
) -> TokenSource | TableSource:
    prefers_table = needs_table(to, options)
    table = None
    tokens, problem = _try_tokens(path, options)
    keeps_columns = to in _BLOCKS and options.column is None
    has_columns = tokens is not None and tokens.format in _WITH_COLUMNS
    if tokens is None or (has_columns and (prefers_table or (keeps_columns and "left_out" in tokens.metadata))):
        table = open_table(path, options)
    if table is not None:
        table = _bounded(table, options.max_unpacked_ratio)
        layout = decide_layout(table.schema, options.column)
        as_rows = to is None or get_format(to).supports("write_rows")
        if prefers_table or (as_rows and (layout.is_rows or (keeps_columns and layout.left_out))):
            return table
        return tokens_of_table(table, options)
    if tokens is not None:
        return _narrowed(tokens) if has_columns and options.dtype is None else tokens
    if problem is not None:
        raise problem
    shown = max(path.paths, key=lambda file: file.num_bytes) if isinstance(path, _RemoteFolder) else Path(path)
    detection = detect(shown) if shown.is_file() else None
    raise DatasetError(
        f"{path}: expected a dataset, token files or a table, got "
        f"{(detection.format or detection.reason) if detection else 'nothing of these'}. Tokens without header need "
        "--set input_dtype=uint16 or uint32; text becomes tokens with `forebay prepare`."
    )


def _bounded(table: TableSource, max_unpacked_ratio: int) -> TableSource:
    """Return a table of which a pass yields at most max(256 MiB, the ratio times the bytes of its files).

    Raises DatasetError beyond that: what is no bomb alone may be one with a thousand others.
    """
    if not table.files:
        return table
    limit = max(MIN_UNPACKED_BYTES, max_unpacked_ratio * sum(path.stat().st_size for path in table.files))
    read_from = table.batches_from

    def read(batches: Positioned[pa.RecordBatch]) -> Positioned[pa.RecordBatch]:
        remaining = limit
        for position, batch in batches:
            remaining -= sum(map(num_bytes, batch.columns))
            if remaining < 0:
                raise DatasetError(
                    f"{table.files[0].parent}: expected at most {limit:,} bytes of rows in all, got more: a bomb, or "
                    f"rows without content. Give --set max_unpacked_ratio={10 * max_unpacked_ratio} if you trust them."
                )
            yield position, batch

    def read_all() -> Iterator[pa.RecordBatch]:
        return (batch for _, batch in read((None, batch) for batch in table.batches()))

    bounded_from = None if read_from is None else lambda position: read(read_from(position))
    return replace(table, batches=read_all, batches_from=bounded_from)


def needs_table(to: str | None, options: ConvertOptions) -> bool:
    """Return whether a format is written from a table rather than from tokens."""
    if to is None or not get_format(to).supports("write_rows"):
        return False
    return not get_format(to).supports("write_tokens") or bool(options.tensors)


def _try_tokens(
    path: str | Path | _RemoteFolder, options: ConvertOptions
) -> tuple[TokenSource | None, ForebayError | None]:
    try:
        read = _open_remote_tokens(path, options) if isinstance(path, _RemoteFolder) else open_tokens(path, options)
        return read, None
    except (DatasetError, UsageError) as error:
        if isinstance(path, _RemoteFolder):
            if any(file.name == MANIFEST_FILE or file.name.startswith(IDS_PREFIX) for file in path.paths):
                raise
            return None, error
        target = Path(path)
        if any((target if target.is_dir() else target.parent).glob(f"{IDS_PREFIX}*")):
            raise  # Tokens that contradict their sample ids are no table of numbers.
        return None, error


def open_tokens(path: str | Path, options: ConvertOptions) -> TokenSource | None:
    """Open the tokens at a path or a pattern; None if it is of another kind."""
    target = Path(path)
    if (target / MANIFEST_FILE).is_file():
        dataset = open_dataset(target)
        return tokens_of_dataset(dataset) if dataset.manifest.layout == "tokens" else None
    is_pair = target.with_name(target.name + ".idx").exists()
    if not target.exists() and not is_pair and not re.search(r"[*?\[]", str(target)):
        raise DatasetError(f"{target}: expected something to convert, got {nothing_there(target)}")
    external = open_external(target, dtype=options.input_dtype, column=options.column)
    return None if external is None else tokens_of_dataset(external)


def tokens_of_dataset(dataset: Dataset) -> TokenSource:
    """Return the tokens of an open dataset of layout `tokens`, slice by slice."""
    m = dataset.manifest
    properties = {"name": m.name, "tokenizer": m.tokenizer, "vocab_size": m.vocab_size}
    properties |= {"eos_id": m.eos_id, "id": dataset.id if dataset.has_hashes else "", "left_out": dataset.left_out}
    metadata = {key: value for key, value in properties.items() if value or (key == "eos_id" and value is not None)}

    def read(position: Position | None) -> Positioned[TokenPart]:
        for index in range(position[0] if position else 0, dataset.num_slices):
            opened = dataset.read_slice(index)
            largest = 0 if dataset.has_hashes else int(opened.tokens.max(initial=0))
            if largest >> 31:
                raise DatasetError(
                    f"{opened.path}: expected token ids in [0, 2**31), got {largest}, or {largest - (1 << 32)}. The "
                    "numbers are of another type, or are no tokens."
                )
            yield [index], TokenPart(opened.tokens, opened.document_ends)
            dataset.release(index, opened)

    return TokenSource(
        dataset.format, m.dtype, dataset.num_tokens, m.documents, lambda: (part for _, part in read(None)), metadata,
        dataset, parts_from=read, files=dataset.files,
    )  # fmt: skip


def _open_remote_tokens(source: _RemoteFolder, options: ConvertOptions) -> TokenSource | None:
    folder = Path(url_name(source.url))
    if any(path.name == MANIFEST_FILE and len(path.parts) == 2 for path in source.paths):
        dataset = open_remote(source.url)
        if dataset.manifest.layout != "tokens":
            raise UsageError(
                f"{source.url}: expected a dataset of layout tokens, got {dataset.manifest.layout}. Copy it here "
                f"first: forebay mirror {source.url} DIR."
            )
        return tokens_of_dataset(dataset)
    suffixes = {path.suffix: path for path in source.paths if not path.name.startswith(IDS_PREFIX)}
    chosen = {suffix for suffix, path in suffixes.items() if suffix in RAW_SUFFIXES or detect(path).format in HEADERS}
    files = [path for path in source.paths if path.suffix in chosen]
    external = open_token_files(folder, files, options.input_dtype)
    return None if external is None else tokens_of_dataset(external)


def _narrowed(source: TokenSource) -> TokenSource:
    """Return tokens with the type that a table of them gets: that of the largest, whatever type its columns have."""
    if source.dtype != "U32":
        return source
    largest = max((int(part.tokens.max()) for part in source.parts() if len(part.tokens)), default=0)
    return source if largest >> 16 else replace(source, dtype="U16")


def tokens_of_table(table: TableSource, options: ConvertOptions) -> TokenSource:
    """Return the list column of a table as tokens; each row is a document.

    Reads a local table once, to count; of one at a URL the column or the options tell the type.
    """
    name, others = layout_of_tokens(table.format, table.schema, options.column, "--set column={}")
    total = None
    rows = None
    if any(isinstance(path, RemotePath) for path in table.files):
        field = table.schema.field(name)
        if leaf_type(field.type) in (pa.uint8(), pa.uint16()):
            dtype = "U16"
        elif options.dtype is None:
            raise UsageError(
                f"column {field.name}: expected --dtype uint16 (all tokens are below 65536) or uint32, got none and "
                f"{field.type}: only reading all files at the URL would tell the largest token. Give one."
            )
        else:
            dtype = "U32"
    else:
        total, rows, largest = 0, 0, 0
        for _, values, document_ends in _lists(table, name):
            total, rows = total + len(values), rows + len(document_ends)
            largest = max(largest, int(values.max()) if len(values) else 0)
        dtype = "U16" if largest < 1 << 16 else "U32"
    metadata = {"left_out": others} if others else {}
    kind = TOKEN_DTYPES[dtype]

    def read(position: Position | None = None) -> Positioned[TokenPart]:
        return (
            (index, TokenPart(values.astype(kind, copy=False), document_ends))
            for index, values, document_ends in _lists(table, name, position)
        )

    return TokenSource(
        table.format, dtype, total, rows, lambda: (part for _, part in read()), metadata,
        parts_from=read if table.batches_from is not None else None, files=table.files,
    )  # fmt: skip


def table_of_tokens(source: TokenSource, column: str) -> TableSource:
    """Return a stream as a table: each document a row, the tokens after the last end one more."""
    kind = pa.list_(pa.uint16() if source.dtype == "U16" else pa.uint32())
    schema = pa.schema([pa.field(column, kind)])

    def read() -> Iterator[pa.RecordBatch]:
        for rows in batched(documents(source.parts()), len, MAX_TOKENS, 1 << 16):
            offsets = pa.array(np.cumsum([0, *map(len, rows)], dtype=np.int32))
            lists = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(rows)), type=kind)
            yield pa.record_batch([lists], schema=schema)

    return TableSource(source.format, schema, None, read)


def table_of_stream(schema: pa.Schema, batches: Iterable[pa.RecordBatch], to: str) -> TableSource:
    """Return rows that are there only once as a table for `write_rows` of the format `to`.

    A number that is missing is NaN: where a format keeps numbers in JSON, which has none, it becomes null. Columns of
    MDS and LitData have no gaps, as their rows would have to be read once before they are written.
    """
    floats = [field.name for field in schema if pa.types.is_floating(field.type)] if to in _JSON_NUMBERS else []
    fields = [field.with_nullable(to not in _BLOCKS) for field in schema]
    table = pa.schema(fields, schema.metadata)

    def read() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = [
                pc.if_else(pc.is_nan(column), None, column) if name in floats else column
                for name, column in zip(schema.names, batch.columns)
            ]
            yield pa.record_batch(columns, schema=table)

    return TableSource("stream", table, None, read)


def _lists(
    table: TableSource, column: str, position: Position | None = None
) -> Iterator[tuple[Position | None, Array, U64]]:
    row = 0
    read = table.batches_from or (lambda _: ((None, batch) for batch in table.batches()))
    for index, batch in read(position):
        lengths, leaves = flatten(batch.column(batch.schema.get_field_index(column)))
        if (lengths < 0).any() or leaves.null_count:
            raise DatasetError(
                f"column {column}: expected a list of token ids in every row, got none from row {row} on."
            )
        values = leaves.to_numpy(zero_copy_only=False)
        if len(values) and (int(values.min()) < 0 or int(values.max()) >> 32):
            raise DatasetError(
                f"column {column}: expected token ids in [0, 2**32), got {int(values.min())} to {int(values.max())} "
                f"from row {row} on. Name the column of tokens with --set column=NAME."
            )
        yield index, values, np.cumsum(lengths, dtype=np.uint64)
        row += len(batch)


def open_table(path: str | Path | _RemoteFolder, options: ConvertOptions = _NO_OPTIONS) -> TableSource | None:
    """Open the table in a file, a directory, or the files of a pattern (`train-*.parquet`); None if there is none.

    The option `column` chooses arrays of .npz and .npy by name: `x_train,y_train`.
    """
    target = Path(str(path))
    if target.is_dir():
        name = dataset_format(target)
        if name == "forebay" and open_dataset(target).manifest.layout != "rows":
            return None
        if name and get_format(name).supports("open_rows"):
            return get_format(name).open_rows([target], options)
        check_split(target)
        for inside in sorted(target.iterdir()):
            if dataset_format(inside) not in ("", "forebay"):
                raise UsageError(f"{target}: expected one dataset, got some in directories. Name one: {inside}.")
    groups, skipped = _by_format(path.paths if isinstance(path, _RemoteFolder) else table_files(target))
    if len(groups) > 1:
        raise UsageError(
            f"{target}: expected files of one format, got "
            f"{listed(f'{name} ({files[0].name} …)' for name, files in groups.items())}. Name those of one: "
            "'DIR/*.parquet'."
        )
    for name, files in groups.items():
        options.on_skipped(skipped)
        if name == Images.name:
            folder = (
                Path(url_name(path.url)) if isinstance(path, _RemoteFolder) else target if target.is_dir() else None
            )
            return replace(Images().open_rows(files, options, folder), files=files)
        return replace(get_format(name).open_rows(files, options), files=files)
    return None


def table_files(target: Path) -> Iterator[Path | Skipped]:
    """Yield the files behind a path or pattern, by name, and those that are left out."""
    if target.is_dir():
        yield from list_files(target)
    elif target.is_file():
        yield target
    else:
        yield from sorted(path for path in map(Path, glob.glob(str(target), recursive=True)) if path.is_file())  # noqa: PTH207


def _by_format(files: Iterable[Path | Skipped]) -> tuple[dict[str, list[Path]], list[Skipped]]:
    names = names_with("open_rows")
    groups: dict[str, list[Path]] = {}
    skipped = []
    detected: dict[str, Detection] = {}
    for path in files:
        if isinstance(path, Skipped):
            skipped.append(path)
            continue
        detection = detected.get(path.suffix) or detect(path)
        if isinstance(path, RemotePath):
            detected[path.suffix] = detection
        if detection.problem:
            raise DatasetError(f"{path}: {detection.problem}")
        name = "jsonl" if detection.format == "reddit" else detection.format
        if name in names:
            groups.setdefault(name, []).append(path)
        else:
            skipped.append(Skipped(str(path), f"no table: {name or detection.reason}"))
    return groups, skipped


def verify_table(out: Path, written: Written, options: ConvertOptions = _NO_OPTIONS) -> None:
    """Read the output again and compare the number of rows and every value of every column."""
    output = open_table(out)
    if output is None and written.num_rows:
        raise DatasetError(f"{out.name}: expected a table, got none. Nothing was written. Check the disk.")
    digest = TableDigest()
    for batch in output.batches() if output is not None else ():
        digest.add(batch)
        options.on_progress(batch.num_rows)
    expected: dict[str, str] = orjson.loads(written.digest)
    got = digest.columns()
    differing = sorted(name for name in expected if got.get(name) != expected[name])
    if digest.num_rows != written.num_rows or differing:
        raise DatasetError(
            f"{out.name}: expected {written.num_rows} rows as they were written, got {digest.num_rows}, with other "
            f"values in {listed(differing) or 'no column'}, when reading them again. Nothing was written. "
            "Write --to another format, or check the disk."
        )
