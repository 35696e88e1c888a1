"""Parquet and Arrow files: whether each part reads, and what their token columns hold.

Hides: that reading is all there is to test: pages are decoded and their checksums compared, batch by batch.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from forebay.doctor.report import POSSIBLE, Options
from forebay.doctor.tokens import TokenCounts, Window
from forebay.doctor.verdicts import Report, judge
from forebay.formats.arrow import ipc_batches, is_list, open_ipc
from forebay.formats.foreign import TOKEN_COLUMNS, head_of
from forebay.prepare.read.ipc import TooLarge, check_ipc

_DAMAGE = (pa.ArrowException, OSError, ValueError, EOFError, MemoryError, TooLarge)


class Table(Report):
    """A walk through one table file."""

    counts: TokenCounts

    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(path, counts=TokenCounts(options, rows=True))
        self.options = options

    def is_enough(self) -> bool:
        return not self.options.full and self.read_bytes > self.options.most_bytes

    def take(self, batch: Any) -> None:
        """Look at the tokens in a batch, if it has a column of them."""
        for name in TOKEN_COLUMNS:
            index = batch.schema.get_field_index(name)
            if index < 0:
                continue
            column = batch.column(index)
            if is_list(column.type):
                values = column.flatten()
                if pa.types.is_integer(values.type) and len(values) and not values.null_count:
                    tokens = np.asarray(values.to_numpy(zero_copy_only=False))
                    if tokens.dtype.itemsize > 1:
                        self.counts.feed(Window(str(self.path), self.facts.get("tokens", 0), tokens))
                        self.facts["tokens"] = self.facts.get("tokens", 0) + len(tokens)
                return

    def finish(self) -> None:
        if not self.findings and not self.facts.get("rows"):
            self.say("empty", "byte 0", "expected rows, got none")
        found = judge(self.counts, str(self.path))
        # Columns of 8-byte integers are how tables keep tokens.
        self.findings.extend(one for one in found if one.fault != "wrong-dtype" or self.counts.width == 2)


def examine_parquet(path: Path, options: Options) -> Table:
    """Every row group of a Parquet file, or as many as the options allow; the footer tells whether it is whole."""
    found = Table(path, options)
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except _DAMAGE as error:
        fault = "damaged" if _tail(path, 4) == b"PAR1" else "truncated"
        found.say(fault, f"byte {path.stat().st_size}", f"expected a footer that ends in PAR1, got: {_said(error)}")
        return found
    with file:
        meta = file.metadata
        found.facts.update(rows=meta.num_rows, row_groups=meta.num_row_groups)
        found.facts["columns"] = ", ".join(f"{f.name} {f.type}" for f in file.schema_arrow)[:500]
        for group in range(meta.num_row_groups):
            rows = 0
            try:
                for batch in file.iter_batches(1024, row_groups=[group], use_threads=False):
                    rows += len(batch)
                    found.take(batch)
            except pa.ArrowNotImplementedError as error:
                found.say("unread", f"row group {group}", f"this pyarrow cannot read it: {_said(error)}", POSSIBLE)
                continue
            except _DAMAGE as error:
                found.say("damaged", f"row group {group}", f"expected it to read, got: {_said(error)}")
                continue
            if rows != meta.row_group(group).num_rows:
                wanted = meta.row_group(group).num_rows
                found.say("damaged", f"row group {group}", f"expected {wanted} rows, got {rows}")
                continue
            found.read_bytes += meta.row_group(group).total_byte_size
            if found.is_enough():
                break
    found.finish()
    return found


def examine_arrow(path: Path, options: Options) -> Table:
    """Every batch of an Arrow file or stream, validated."""
    found = Table(path, options)
    rows = number = 0
    try:
        check_ipc(path)
        with open_ipc(path) as reader:
            found.facts["columns"] = ", ".join(f"{f.name} {f.type}" for f in reader.schema)[:500]
            for batch in ipc_batches(reader):
                batch.validate(full=True)
                rows += len(batch)
                found.take(batch)
                number += 1
                found.read_bytes += batch.nbytes
                if found.is_enough():
                    break
            is_stream = isinstance(reader, pa.ipc.RecordBatchStreamReader)
            if is_stream and not found.is_enough() and _tail(path, 8) != b"\xff\xff\xff\xff\0\0\0\0":
                evidence = "expected the stream's end (8 bytes), got none: it may be cut between two batches"
                found.say("truncated", f"byte {path.stat().st_size}", evidence, POSSIBLE)
    except _DAMAGE as error:
        found.say("damaged", f"batch {number}", f"expected a batch that reads, got: {_said(error)}")
    found.facts["rows"] = rows
    found.finish()
    return found


def _tail(path: Path, num_bytes: int) -> bytes:
    return head_of(path, num_bytes, max(0, path.stat().st_size - num_bytes))


def _said(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
