"""Arrow IPC files and streams, Feather, and the datasets that Hugging Face's save_to_disk writes of them.

Files that are not compressed are memory-mapped: a batch is a view of the map. Tensors are written as lists of fixed
size, which other tools read too.

Of what save_to_disk wrote, state.json names the Arrow streams in order. Rows are documents. The small batches of a file
are joined into slices of at least 4 Mi tokens; a slice of one batch of 2- or 4-byte numbers is a view of the map, any
other is copied when it opens. Source: datasets 2.14, arrow_dataset.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from forebay.arrays import U64, Array
from forebay.errors import CorruptInputError, DatasetError, UsageError, listed
from forebay.files import path_below
from forebay.formats import external
from forebay.formats.arrow_ipc import check_blocks, check_stream, checked_stream
from forebay.formats.columns import (
    READ_ERRORS,
    ColumnFormat,
    GroupBatches,
    GroupRows,
    checked_rows,
    common_schema,
    with_lists,
)
from forebay.formats.conversion import ConvertOptions, TableSource, Written
from forebay.formats.external import ExternalDataset
from forebay.formats.inputs import SPLIT_BYTES, Extents, InputFile, InputSplit, ReadOptions, open_input, open_stored
from forebay.formats.layout import ColumnDirectory, layout_of_tokens
from forebay.formats.records import batched
from forebay.formats.tables import write_parts
from forebay.storage.listing import is_saved_dataset


class Arrow(ColumnFormat):
    """Arrow IPC files and streams."""

    name = "arrow"
    title = "Arrow"
    suffixes = (".arrow", ".arrows", ".feather", ".ftr", ".ipc")

    def sniff(self, head: bytes) -> bool:
        is_stream = head.startswith(b"\xff\xff\xff\xff") and 0 < int.from_bytes(head[4:8], "little") < 1 << 24
        return head.startswith((b"ARROW1", b"FEA1")) or (is_stream and head[8:9] in b"\x0c\x10\x14\x18")

    @contextmanager
    def open_file(self, file: InputFile, options: ReadOptions, split: InputSplit | None) -> Iterator[Any]:
        with ExitStack() as opened:
            if file.compression:
                stream = opened.enter_context(open_input(file, options))
                yield pa.ipc.open_stream(checked_stream(stream))
                return
            stored = opened.enter_context(open_stored(file, is_random=True))
            magic = stored.read(6)
            stored.seek(0)
            if magic[:4] == b"FEA1":
                raise CorruptInputError(
                    "Feather of version 1 is no longer read. Write it again with pyarrow or pandas."
                )
            is_remote = "://" in file.path
            if magic == b"ARROW1":
                if split is not None:
                    check_blocks(stored, split.start, split.stop)
                source = pa.PythonFile(stored) if is_remote else opened.enter_context(pa.memory_map(file.path))
                yield pa.ipc.open_file(source)
            elif is_remote:
                yield pa.ipc.open_stream(checked_stream(stored))
            else:
                if split is not None:
                    check_stream(stored)
                yield pa.ipc.open_stream(opened.enter_context(pa.memory_map(file.path)))

    def split(self, file: InputFile, options: ReadOptions) -> Extents:
        number = 0
        try:
            with self.open_file(file, options, None) as reader:
                number = getattr(reader, "num_record_batches", 0)  # A stream does not say.
        except READ_ERRORS:
            pass  # Reading it reports what is wrong.
        if not number:
            yield 0, 0, file.bytes
        step = max(1, number * SPLIT_BYTES // max(1, file.bytes))
        for start in range(0, number, step):
            stop = min(start + step, number)
            yield start, stop, file.bytes * stop // number - file.bytes * start // number

    def batches(self, reader: Any, first: int = 0) -> GroupBatches:
        if isinstance(reader, pa.ipc.RecordBatchFileReader):
            return ((index, reader.get_batch(index)) for index in range(first, reader.num_record_batches))
        return ((-1 if index else 0, batch) for index, batch in enumerate(reader))

    def rows(self, reader: Any, split: InputSplit, keys: list[str]) -> GroupRows:
        checked: dict[str, Any] = {}
        num_groups = split.stop - split.start if split.stop else None
        for start, batch in islice(self.batches(reader, split.start), num_groups):
            yield from ((-1 if i else start, row) for i, row in enumerate(checked_rows(batch, keys, checked)))

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """IPC files, which are Feather 2; `compress`: zstd, lz4 or nothing."""
        codec = {"none": ""}.get(options.compress, options.compress)
        if codec not in ("", "zstd", "lz4"):
            raise UsageError(f"--set compress: expected zstd, lz4 or none for Arrow, got {codec!r}.")
        table, settings = with_lists(source), pa.ipc.IpcWriteOptions(compression=codec or None)
        return write_parts(
            table, out, options, ".arrow", lambda file, _: pa.ipc.new_file(file, table.schema, options=settings)
        )


class SavedArrow(ColumnDirectory):
    """A directory that save_to_disk of Hugging Face datasets wrote."""

    name = "saved arrow"

    def is_dataset(self, folder: Path) -> bool:
        return is_saved_dataset(folder)

    def open_tokens(self, path: Path, dtype: Any = None, column: str | None = None) -> ExternalDataset:
        return SavedDataset(path, column)

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        return Arrow().open_rows(files_of(paths[0]), options)

    def schema(self, folder: Path) -> pa.Schema:
        return saved_schema(files_of(folder)[0])


STATE_FILE = "state.json"
_MAX_STATE_BYTES = 64 << 20


class SavedDataset(external.ExternalDataset):
    """The files of one saved dataset, in its order; one row is one document."""

    def __init__(self, path: Path, column: str | None) -> None:
        files = files_of(path)
        schemas = [saved_schema(file) for file in files]
        chosen, self.left_out = layout_of_tokens(path, common_schema(files, schemas), column, external.REMEDY)
        self._batches = [_batches_of(file, chosen) for file in files]
        self._runs: dict[tuple[int, int], tuple[int, int]] = {}
        parts = []
        kind = np.dtype(schemas[0].field(chosen).type.value_type.to_pandas_dtype())
        for i, (file, batches) in enumerate(zip(files, self._batches)):
            counts = [len(lists.flatten()) for lists in batches]
            runs = batched(range(len(counts)), counts.__getitem__, external.MAX_COPIED_TOKENS, len(counts))
            start = 0
            for k, run in enumerate(run for run in runs if any(counts[index] for index in run)):
                self._runs[i, start] = a, b = run[0], run[-1] + 1
                count, rows = sum(counts[a:b]), sum(map(len, batches[a:b]))
                name, num_bytes = f"{external.shown_name(path, file)}#{k:05d}", count * kind.itemsize
                parts.append(external.ExternalSlice(i, name, start, count, rows, num_bytes))
                start += count
        super().__init__(path, "arrow", external.stored_dtype(kind), files, external.fingerprints(files), parts)

    def _read(self, part: external.ExternalSlice) -> tuple[Array, U64]:
        a, b = self._runs[part.file, part.start]
        path = self.files[part.file]
        batches = self._batches[part.file][a:b]
        lengths = np.concatenate([pc.list_value_length(lists).to_numpy(zero_copy_only=False) for lists in batches])
        values = [lists.flatten() for lists in batches]
        if (lengths < 0).any() or any(value.null_count for value in values):
            raise DatasetError(f"{path}: expected lists of token ids, got null among them. Write it again.")
        pieces = [external.as_tokens(value.to_numpy(zero_copy_only=True), path) for value in values]
        tokens = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return tokens, np.cumsum(lengths, dtype=np.uint64)


def check_split(path: Path) -> None:
    """Raise UsageError if a directory is several saved datasets, each in a directory of its own."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(state.parent.name for state in path.glob(f"*/{STATE_FILE}"))
        raise UsageError(
            f"{path}: expected one dataset, got the splits {listed(splits) or 'of none'}. Name the directory "
            f"of one: {path / (splits or ['SPLIT'])[0]}."
        )


def files_of(path: Path) -> list[Path]:
    """Return the files of a saved dataset, in order. Raises DatasetError if state.json is damaged, or selects rows."""
    state_file = path / STATE_FILE
    try:
        state = orjson.loads(external.read_head(state_file, _MAX_STATE_BYTES))
        names = [file["filename"] for file in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{state_file}: expected the names of a saved dataset's files, got {error!r}.") from error
    if state.get("_indices_files"):
        raise DatasetError(
            f"{path}: expected rows in the order of their files, got a dataset that was shuffled or selected from. "
            "Save it again after flatten_indices()."
        )
    if not names or not all(
        isinstance(n, str) and n not in ("", ".", "..") and "/" not in n and n.isprintable() for n in names
    ):
        raise DatasetError(f"{state_file}: expected names of files beside it, got {str(names)[:200]}.")
    return [path_below(path, name) for name in names]


@contextmanager
def _stream(path: Path) -> Iterator[Any]:
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            yield reader
    except OSError as error:
        raise external.unreadable(path, error) from error
    except (pa.ArrowException, ValueError) as error:
        raise DatasetError(
            f"{path}: expected a stream of Arrow batches, got: {error}. Write or fetch it again."
        ) from error


def saved_schema(path: Path) -> pa.Schema:
    """Return the columns of a file. Raises DatasetError if it is damaged."""
    with _stream(path) as reader:
        return reader.schema


def _batches_of(path: Path, column: str) -> list[Any]:
    with _stream(path) as reader:
        columns = (batch.column(column) for batch in reader if len(batch))
        batches = [getattr(lists, "storage", lists) for lists in columns]  # A tensor stores a list.
        for lists in batches:
            lists.validate()
            if lists.null_count:
                raise DatasetError(f"{path}: expected a list in every row of {column}, got none in some.")
        return batches
