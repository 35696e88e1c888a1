"""Apache ORC: text and rows by stripe. A stripe (64 MiB by default) is in memory at a time."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pyarrow as pa
import pyarrow.orc

from forebay.errors import CorruptInputError
from forebay.formats.columns import ColumnFormat, batch_rows
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions, open_stored
from forebay.formats.records import Record


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

    def num_groups(self, reader: Any) -> int:
        return int(reader.nstripes)

    def batches(self, reader: Any) -> Iterator[pa.RecordBatch]:
        return (reader.read_stripe(stripe) for stripe in range(reader.nstripes))

    def rows(self, reader: Any, split: InputSplit, keys: list[str]) -> Iterator[tuple[int, dict[str, object] | Record]]:
        names = list(dict.fromkeys(key if key in reader.schema.names else key.partition(".")[0] for key in keys))
        for stripe in range(split.start, split.stop or reader.nstripes):
            batch = reader.read_stripe(stripe, columns=names)
            yield from ((-1 if i else stripe, row) for i, row in enumerate(batch_rows(batch, keys)))
