"""Arrow IPC files and streams, Feather, and the datasets that Hugging Face's save_to_disk writes of them.

Files that are not compressed are memory-mapped: a batch is a view of the map. Tensors are written as lists of fixed
size, which other tools read too.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from forebay.errors import CorruptInputError, UsageError
from forebay.formats.arrow_ipc import check_blocks, check_stream, checked_stream
from forebay.formats.columns import READ_ERRORS, ColumnFormat, GroupBatches, GroupRows, checked_rows, with_lists
from forebay.formats.conversion import ConvertOptions, TableSource, Written
from forebay.formats.external import ExternalDataset
from forebay.formats.inputs import SPLIT_BYTES, Extents, InputFile, InputSplit, ReadOptions, open_input, open_stored
from forebay.formats.layout import ColumnDirectory
from forebay.formats.saved_arrow import SavedDataset, files_of, saved_schema
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
