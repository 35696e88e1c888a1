"""Parquet and Arrow files: whether each part reads, and what their token columns hold.

Hides: that reading is all there is to test: pages are decoded and their checksums compared, batch by batch.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from forebay.doctor.report import POSSIBLE, Options
from forebay.doctor.tokens import TokenCounts, Window
from forebay.doctor.verdicts import FETCH, Look, judge
from forebay.errors import UsageError
from forebay.formats.arrow import ipc_batches, is_list, open_ipc
from forebay.formats.foreign import TOKEN_COLUMNS, head_of
from forebay.prepare.read.ipc import TooLarge, check_ipc
from forebay.storage.atomic import open_atomic

_DAMAGE = (pa.ArrowException, OSError, ValueError, EOFError, MemoryError, TooLarge)


class Table(Look):
    """A walk through one table file; `good` are the indexes of row groups or batches that read."""

    counts: TokenCounts

    def __init__(self, path: Path, options: Options) -> None:
        super().__init__(path, counts=TokenCounts(options, rows=True))
        self.options = options
        self.good: list[int] = []

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
        found = judge(self.counts, str(self.path), FETCH, "tokenize the text again")
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
        mend = f"forebay doctor {path} --mend OUT (which keeps the row groups that read), or {FETCH}"
        for group in range(meta.num_row_groups):
            rows = 0
            try:
                for batch in file.iter_batches(1024, row_groups=[group], use_threads=False):
                    rows += len(batch)
                    found.take(batch)
            except pa.ArrowNotImplementedError as error:
                found.say(
                    "unread", f"row group {group}", f"this pyarrow cannot read it: {_said(error)}", FETCH, POSSIBLE
                )
                continue
            except _DAMAGE as error:
                found.say("damaged", f"row group {group}", f"expected it to read, got: {_said(error)}", mend)
                continue
            if rows != meta.row_group(group).num_rows:
                wanted = meta.row_group(group).num_rows
                found.say("damaged", f"row group {group}", f"expected {wanted} rows, got {rows}", mend)
                continue
            found.good.append(group)
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
            for number, batch in enumerate(ipc_batches(reader)):
                batch.validate(full=True)
                rows += len(batch)
                found.take(batch)
                found.good.append(number)
                found.read_bytes += batch.nbytes
                if found.is_enough():
                    break
            is_stream = isinstance(reader, pa.ipc.RecordBatchStreamReader)
            if is_stream and not found.is_enough() and _tail(path, 8) != b"\xff\xff\xff\xff\0\0\0\0":
                evidence = "expected the stream's end (8 bytes), got none: it may be cut between two batches"
                found.say("truncated", f"byte {path.stat().st_size}", evidence, _mend_arrow(path), POSSIBLE)
    except _DAMAGE as error:
        place = f"batch {len(found.good)}"
        mend = _mend_arrow(path) if found.good else FETCH
        found.say("damaged", place, f"expected a batch that reads, got: {_said(error)}", mend)
    found.facts["rows"] = rows
    found.finish()
    return found


def _mend_arrow(path: Path) -> str:
    return f"forebay doctor {path} --mend OUT (which keeps the batches that read), or {FETCH}"


def mend_table(path: Path, kind: str, out: Path, options: Options) -> list[Path]:
    """Write the row groups or batches that read to directory `out`.

    Raises:
        UsageError: If none does.
    """
    found = (examine_parquet if kind == "parquet" else examine_arrow)(path, options)
    if not found.good:
        raise UsageError(f"{path}: expected some rows that read, got none. Fetch or write it again.")
    target = out / path.name
    with open_atomic(target) as part:
        if kind == "parquet":
            with pq.ParquetFile(path) as file, pq.ParquetWriter(part, file.schema_arrow) as writer:
                for group in found.good:
                    writer.write_table(file.read_row_group(group))
        else:
            with open_ipc(path) as reader:
                is_stream = isinstance(reader, pa.ipc.RecordBatchStreamReader)
                with (pa.ipc.new_stream if is_stream else pa.ipc.new_file)(part, reader.schema) as writer:
                    for batch in islice(ipc_batches(reader), len(found.good)):  # The good ones come first.
                        writer.write_batch(batch)
    return [target]


def _tail(path: Path, num_bytes: int) -> bytes:
    return head_of(path, num_bytes, max(0, path.stat().st_size - num_bytes))


def _said(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
