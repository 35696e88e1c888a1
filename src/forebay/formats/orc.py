"""Apache ORC: text and rows by stripe. A stripe (64 MiB by default) is in memory at a time."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from forebay.errors import CorruptInputError, UsageError
from forebay.formats.base import Format
from forebay.formats.columns import (
    READ_ERRORS,
    batch_rows,
    check_batch,
    check_has_rows,
    columns_text,
    common_schema,
    damaged_table,
    error_text,
    select_columns,
    with_lists,
)
from forebay.formats.conversion import ConvertOptions, TableSource, Written
from forebay.formats.inputs import SPLIT_BYTES, InputFile, InputSplit, ReadOptions, open_stored
from forebay.formats.records import Record, to_record
from forebay.formats.report import Report
from forebay.formats.tables import Part, rows_at_once, write_parts

_CODECS = ("zstd", "snappy", "none")


class Orc(Format):
    """ORC files; as a table several of one schema."""

    name = "orc"
    suffixes = (".orc",)

    def sniff(self, head: bytes) -> bool:
        return head.startswith(b"ORC")

    def split(self, file: InputFile, options: ReadOptions) -> Iterator[tuple[int, int, int]]:
        number = 0
        try:
            number = _open(file).nstripes
        except READ_ERRORS:
            yield 0, 0, file.bytes  # Reading it reports what is wrong.
        step = max(1, number * SPLIT_BYTES // max(1, file.bytes))
        for start in range(0, number, step):
            stop = min(start + step, number)
            yield start, stop, file.bytes * stop // number - file.bytes * start // number

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        file = split.files[0]
        row_number = -1
        try:
            orc = _open(file)
            keys = select_columns(orc.schema, options, file)
            names = list(dict.fromkeys(key if key in orc.schema.names else key.partition(".")[0] for key in keys))
            for stripe in range(split.start, split.stop or orc.nstripes):
                start = stripe
                for row in batch_rows(orc.read_stripe(stripe, columns=names), keys):
                    row_number += 1
                    yield to_record(row_number, row, options, start=start)
                    start = -1
        except READ_ERRORS as error:
            problem = str(error) if isinstance(error, CorruptInputError) else f"damaged ORC: {error_text(error)}"
            yield Record(row_number + 1, problem=problem)

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        files = [_open_local(path) for path in paths]
        schema = common_schema(paths, [file.schema for file in files])
        return TableSource(self.name, schema, sum(file.nrows for file in files), lambda: _read_batches(paths, schema))

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """`compress`: zstd (by default), snappy or none."""
        codec = options.compress or "zstd"
        if codec not in _CODECS:
            raise UsageError(f"--compress: expected one of {', '.join(_CODECS)} for ORC, got {codec!r}.")

        def open_part(file: Any, first_row: int) -> Part:
            from pyarrow import orc

            part: Part = orc.ORCWriter(file, compression="uncompressed" if codec == "none" else codec)
            return part

        return write_parts(with_lists(source), out, options, ".orc", open_part, group_bytes=options.slice_bytes // 8)

    def check(self, path: Path, report: Report) -> None:
        """Read every stripe, or as many as the options allow."""
        stripe = 0
        try:
            orc = _open_local(path)
            report.metadata.update(rows=orc.nrows, stripes=orc.nstripes, columns=columns_text(orc.schema))
            for stripe in range(orc.nstripes):
                batch = orc.read_stripe(stripe)
                check_batch(report, batch)
                report.read_bytes += batch.nbytes
                if report.is_enough(report.read_bytes):
                    break
        except (*READ_ERRORS, MemoryError) as error:
            report.add_finding("damaged", f"stripe {stripe}", f"expected it to read, got: {error_text(error)}")
        check_has_rows(report)


def _open(file: InputFile) -> Any:
    from pyarrow import orc

    if file.compression:
        raise CorruptInputError(f"an ORC file inside {file.compression} cannot be read at random. Unpack it first.")
    return orc.ORCFile(pa.PythonFile(open_stored(file)) if "://" in file.path else file.path)


def _open_local(path: Path) -> Any:
    from pyarrow import orc

    try:
        return orc.ORCFile(path)
    except READ_ERRORS as error:
        raise damaged_table(path, "ORC", error) from error


def _read_batches(paths: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for path in paths:
        try:
            orc = _open_local(path)
            for stripe in range(orc.nstripes):
                batch = orc.read_stripe(stripe)
                step = rows_at_once(batch.nbytes / max(1, batch.num_rows))
                for start in range(0, batch.num_rows, step):
                    yield pa.RecordBatch.from_arrays(batch.slice(start, step).columns, schema=schema)
        except READ_ERRORS as error:
            raise damaged_table(path, "ORC", error) from error
