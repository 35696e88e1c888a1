"""Arrow IPC files and streams, Feather, and the datasets that Hugging Face's save_to_disk writes of them.

Files that are not compressed are memory-mapped: a batch is a view of the map. Tensors are written as lists of fixed
size, which other tools read too.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from forebay.errors import CorruptInputError, DatasetError
from forebay.formats.arrow_ipc import check_blocks, check_ipc, check_stream, checked_stream
from forebay.formats.base import Format
from forebay.formats.columns import (
    READ_ERRORS,
    check_batch,
    check_has_rows,
    checked_rows,
    columns_text,
    common_schema,
    damaged_table,
    error_text,
    select_columns,
    with_lists,
)
from forebay.formats.conversion import ConvertOptions, TableSource, TokenSource, Written
from forebay.formats.external import ExternalDataset, read_tail
from forebay.formats.inputs import SPLIT_BYTES, InputFile, InputSplit, ReadOptions, open_input, open_stored
from forebay.formats.records import Record, to_record
from forebay.formats.report import POSSIBLE, Report, check_external
from forebay.formats.saved_arrow import SavedDataset, files_of, write_saved_dataset
from forebay.formats.tables import rows_at_once, write_parts
from forebay.storage.listing import is_saved_dataset

_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


class Arrow(Format):
    """Arrow IPC files and streams; written from tokens, a dataset as save_to_disk writes it."""

    name = "arrow"
    suffixes = (".arrow", ".arrows", ".feather", ".ftr", ".ipc")

    def sniff(self, head: bytes) -> bool:
        is_stream = head.startswith(b"\xff\xff\xff\xff") and 0 < int.from_bytes(head[4:8], "little") < 1 << 24
        return head.startswith((b"ARROW1", b"FEA1")) or (is_stream and head[8:9] in b"\x0c\x10\x14\x18")

    def split(self, file: InputFile, options: ReadOptions) -> Iterator[tuple[int, int, int]]:
        number = 0
        with suppress(*READ_ERRORS), _open_input(file, options) as reader:
            if isinstance(reader, pa.ipc.RecordBatchFileReader):
                number = reader.num_record_batches
        if not number:  # A stream, or damaged: reading it reports what is wrong.
            yield 0, 0, file.bytes
        step = max(1, number * SPLIT_BYTES // max(1, file.bytes))
        for start in range(0, number, step):
            stop = min(start + step, number)
            yield start, stop, file.bytes * stop // number - file.bytes * start // number

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        file = split.files[0]
        row_number = -1
        try:
            with _open_input(file, options, split) as reader:
                keys = select_columns(reader.schema, options, file)
                checked: dict[str, int] = {}
                for start, batch in _split_batches(reader, split):
                    for row in checked_rows(batch, keys, checked):
                        row_number += 1
                        yield to_record(row_number, row, options, start=start)
                        start = -1
        except READ_ERRORS as error:
            problem = str(error) if isinstance(error, CorruptInputError) else f"damaged Arrow: {error_text(error)}"
            yield Record(row_number + 1, problem=problem, location=f"row {row_number + 1}")

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        return _open_table(paths, self.name)

    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        return write_saved_dataset(source, out, options)

    def check(self, path: Path, report: Report) -> None:
        """Validate every batch of a file or stream."""
        rows = number = 0
        try:
            check_ipc(path)
            with open_ipc(path) as reader:
                report.metadata["columns"] = columns_text(reader.schema)
                for batch in ipc_batches(reader):
                    batch.validate(full=True)
                    rows += len(batch)
                    check_batch(report, batch)
                    number += 1
                    report.read_bytes += batch.nbytes
                    if report.is_enough(report.read_bytes):
                        break
                is_stream = isinstance(reader, pa.ipc.RecordBatchStreamReader)
                if is_stream and not report.is_enough(report.read_bytes) and read_tail(path, 8) != _STREAM_END:
                    evidence = "expected the stream's end (8 bytes), got none: it may be cut between two batches"
                    report.add_finding("truncated", f"byte {path.stat().st_size}", evidence, POSSIBLE)
        except (*READ_ERRORS, MemoryError) as error:
            evidence = f"expected a batch that reads, got: {error_text(error)}"
            report.add_finding("damaged", f"batch {number}", evidence)
        report.metadata["rows"] = rows
        check_has_rows(report)


class Feather(Format):
    """Arrow IPC files under the name of what is written of a table; they are read as `arrow`."""

    name = "feather"

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """Arrow IPC files; `compress`: zstd or nothing."""
        table, settings = with_lists(source), pa.ipc.IpcWriteOptions(compression=options.compress or None)
        return write_parts(
            table, out, options, ".arrow", lambda file, _: pa.ipc.new_file(file, table.schema, options=settings)
        )


class SavedArrow(Format):
    """A directory that save_to_disk of Hugging Face datasets wrote."""

    name = "saved arrow"

    def is_dataset(self, folder: Path) -> bool:
        return is_saved_dataset(folder)

    def open_tokens(self, path: Path, dtype: Any = None, column: str | None = None) -> ExternalDataset:
        return SavedDataset(path, column)

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        return _open_table(files_of(paths[0]), "save_to_disk")

    def check(self, path: Path, report: Report) -> None:
        try:
            dataset = SavedDataset(path)
        except DatasetError as error:
            report.add_finding("index-mismatch", "index", str(error))
            return
        check_external(report, dataset)


@contextmanager
def _open_input(file: InputFile, options: ReadOptions, split: InputSplit | None = None) -> Iterator[Any]:
    """A reader of an IPC file, memory-mapped if it can be, or of a stream; with a split its messages are checked."""
    with ExitStack() as opened:
        if file.compression:
            stream = opened.enter_context(open_input(file, options))
            yield pa.ipc.open_stream(checked_stream(stream))
            return
        stored = opened.enter_context(open_stored(file))
        magic = stored.read(6)
        stored.seek(0)
        if magic[:4] == b"FEA1":
            raise CorruptInputError("Feather of version 1 is no longer read. Write it again with pyarrow or pandas.")
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


def _split_batches(reader: Any, split: InputSplit) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of a file with their numbers; of a stream, which is read from its beginning, with -1."""
    if not isinstance(reader, pa.ipc.RecordBatchFileReader):
        yield from ((-1, batch) for batch in reader)
        return
    for index in range(split.start, split.stop or reader.num_record_batches):
        yield index, reader.get_batch(index)


def open_ipc(path: Path) -> Any:
    """Open a reader of an Arrow IPC file or stream, by its first bytes; batches are views of the file's map."""
    source = pa.memory_map(str(path))
    magic = source.read(6)
    source.seek(0)
    return pa.ipc.open_file(source) if magic == b"ARROW1" else pa.ipc.open_stream(source)


def ipc_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    """Return the record batches of a reader, in order."""
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    return iter(reader)


def _open_table(paths: Sequence[Path], name: str) -> TableSource:
    schemas = []
    for path in paths:
        try:
            check_ipc(path)
            with open_ipc(path) as reader:
                schemas.append(reader.schema)
        except READ_ERRORS as error:
            raise damaged_table(path, "Arrow", error) from error
    schema = common_schema(paths, schemas)
    return TableSource(name, schema, None, lambda: _read_batches(paths, schema))


def _read_batches(paths: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path in paths:
        try:
            with open_ipc(path) as reader:
                for batch in ipc_batches(reader):
                    batch.validate()
                    for column in batch.columns:
                        if not pa.types.is_primitive(column.type):
                            column.validate(full=True)  # A damaged file's offsets could point anywhere.
                    step = rows_at_once(batch.nbytes / max(1, batch.num_rows))
                    for start in range(0, batch.num_rows, step):
                        yield pa.RecordBatch.from_arrays(batch.slice(start, step).columns, schema=schema)
        except READ_ERRORS as error:
            raise damaged_table(path, "Arrow", error) from error
