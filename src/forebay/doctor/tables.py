"""Parquet and Arrow files: whether each part reads, and what their token columns hold.

Hides: that reading is all there is to test: pages are decoded and their checksums compared, batch by batch.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from forebay.doctor.report import CERTAIN, POSSIBLE, Finding, Options
from forebay.doctor.tokens import TokenCounts, Window
from forebay.doctor.verdicts import judge
from forebay.errors import UsageError
from forebay.storage.atomic import open_atomic

_COLUMNS = ("input_ids", "tokens")
_DAMAGE = (pa.ArrowException, OSError, ValueError, EOFError, MemoryError)
FETCH = "fetch or write it again"


class Table:
    """A walk through one table file; `good` are the indexes of row groups or batches that read."""

    def __init__(self, path: Path, options: Options) -> None:
        self.path, self.options = path, options
        self.facts: dict[str, Any] = {}
        self.findings: list[Finding] = []
        self.good: list[int] = []
        self.read_bytes = 0
        self.counts = TokenCounts(options, rows=True)

    def say(self, fault: str, place: str, evidence: str, mend: str = FETCH, sure: str = CERTAIN) -> None:
        self.findings.append(Finding(fault, sure, str(self.path), place, evidence, mend))

    def is_enough(self) -> bool:
        return not self.options.full and self.read_bytes > self.options.most_bytes

    def take(self, batch: Any) -> None:
        """Look at the tokens in a batch, if it has a column of them."""
        for name in _COLUMNS:
            index = batch.schema.get_field_index(name)
            if index < 0:
                continue
            column = batch.column(index)
            kind = column.type
            if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
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
        tail = path.read_bytes()[-4:] if path.stat().st_size < 8 else _tail(path)
        fault = "truncated" if tail != b"PAR1" else "damaged"
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
        with pa.memory_map(str(path)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
            found.facts["columns"] = ", ".join(f"{f.name} {f.type}" for f in reader.schema)[:500]
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else iter(reader)
            for number, batch in enumerate(batches):
                batch.validate(full=True)
                rows += len(batch)
                found.take(batch)
                found.good.append(number)
                found.read_bytes += batch.nbytes
                if found.is_enough():
                    break
            if not is_file and not found.is_enough() and not _ends_well(path):
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
            with pa.memory_map(str(path)) as source:
                is_file = source.read(6) == b"ARROW1"
                source.seek(0)
                reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
                make = pa.ipc.new_file if is_file else pa.ipc.new_stream
                with make(part, reader.schema) as writer:
                    for index in found.good:
                        writer.write_batch(reader.get_batch(index) if is_file else reader.read_next_batch())
    return [target]


def _ends_well(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-min(8, path.stat().st_size), 2)
        return file.read() == b"\xff\xff\xff\xff\0\0\0\0"


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-4, 2)
        return file.read()


def _said(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
