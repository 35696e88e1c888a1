"""Apache ORC: text and rows by stripe. A stripe (64 MiB by default) is in memory at a time."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.orc

from forebay.errors import CorruptInputError, UsageError
from forebay.formats.columns import ColumnFormat, batch_rows, with_lists
from forebay.formats.conversion import ConvertOptions, TableSource, Written
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions, open_stored
from forebay.formats.records import Record
from forebay.formats.tables import Part, contains, refuse_columns, write_parts

_CODECS = ("zstd", "snappy", "none")


class Orc(ColumnFormat):
    """ORC files; as a table several of one schema."""

    name = "orc"
    title = "ORC"
    suffixes = (".orc",)

    def sniff(self, head: bytes) -> bool:
        return head.startswith(b"ORC")

    def open_file(self, file: InputFile, options: ReadOptions, split: InputSplit | None) -> AbstractContextManager[Any]:
        if file.compression:
            raise CorruptInputError(f"an ORC file inside {file.compression} cannot be read at random. Unpack it first.")
        return nullcontext(pa.orc.ORCFile(pa.PythonFile(open_stored(file)) if "://" in file.path else file.path))

    def open_path(self, path: Path) -> AbstractContextManager[Any]:
        return nullcontext(pa.orc.ORCFile(path))

    def num_groups(self, reader: Any) -> int:
        return int(reader.nstripes)

    def batches(self, reader: Any) -> Iterator[pa.RecordBatch]:
        return (reader.read_stripe(stripe) for stripe in range(reader.nstripes))

    def rows(self, reader: Any, split: InputSplit, keys: list[str]) -> Iterator[tuple[int, dict[str, object] | Record]]:
        names = list(dict.fromkeys(key if key in reader.schema.names else key.partition(".")[0] for key in keys))
        for stripe in range(split.start, split.stop or reader.nstripes):
            batch = reader.read_stripe(stripe, columns=names)
            yield from ((-1 if i else stripe, row) for i, row in enumerate(batch_rows(batch, keys)))

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """`compress`: zstd (by default), snappy or none."""
        codec = options.compress or "zstd"
        if codec not in _CODECS:
            raise UsageError(f"--set compress: expected one of {', '.join(_CODECS)} for ORC, got {codec!r}.")
        refuse_columns(
            source.schema,
            lambda kind: not contains(kind, lambda k: pa.types.is_unsigned_integer(k) or pa.types.is_float16(k)),
            "ORC",
            "Write --to parquet, or leave the column out.",
        )

        def open_part(file: Any, first_row: int) -> Part:
            part: Part = pyarrow.orc.ORCWriter(file, compression="uncompressed" if codec == "none" else codec)
            return part

        return write_parts(with_lists(source), out, options, ".orc", open_part, group_bytes=options.slice_bytes // 8)
