"""Export a ledger's uses as a table: JSON lines, CSV or Parquet, in blocks of bounded memory."""

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.errors import UsageError
from forebay.files import open_atomic, remove_stale
from forebay.ledger.index import LedgerIndex
from forebay.observe.blame import replay

FORMATS = ("jsonl", "csv", "parquet")
_BLOCK = 1 << 14
_SCHEMA = pa.schema(
    [
        ("entry", pa.int64()),
        ("at", pa.timestamp("ms", "UTC")),
        ("worker", pa.string()),
        ("name", pa.string()),
        ("dataset_id", pa.string()),
        ("epoch", pa.int64()),
        ("slice", pa.int64()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("step", pa.int64()),
    ]
)


def export_uses(index: LedgerIndex, out: str | Path, form: str, *, sample_ids: bool = False) -> int:
    """Write one row per use, in one of FORMATS; return their number.

    `sample_ids` adds a column `samples`: the global ids in the order of reading; in CSV separated by spaces. It costs
    20 ns a sample, and 8 bytes before compression.
    """
    if form not in FORMATS:
        raise UsageError(f"export: expected a format of {FORMATS}, got {form!r}.")
    remove_stale(Path(out).parent)
    with ExitStack() as stack:
        write = _writer(stack.enter_context(open_atomic(out)), form, sample_ids, stack)
        for rows in _blocks(index, sample_ids):
            write(rows)
    return len(index.uses)


def _blocks(index: LedgerIndex, sample_ids: bool) -> Iterator[list[dict[str, Any]]]:
    job, names = index.job, index.names
    bases = (job.samples.cumsum() - job.samples).tolist()
    for first in range(0, len(index.uses), _BLOCK):
        rows = []
        for seq, worker, epoch, index_, start, stop, step, _, recorded_at in index.uses[
            first : first + _BLOCK
        ].tolist():
            peer = index.workers[worker]
            row = {
                "entry": seq,
                "at": datetime.fromtimestamp(recorded_at, UTC),
                "worker": peer,
                "name": names.get(peer, ""),
                "dataset_id": job.dataset_ids[job.dataset_of(index_)],
                "epoch": epoch,
                "slice": index_,
                "start": start,
                "stop": stop,
                "step": step,
            }
            if sample_ids:
                row["samples"] = (replay(job, epoch, index_, start, stop)[0] + bases[index_]).tolist()
            rows.append(row)
        yield rows


def _writer(raw: BinaryIO, form: str, sample_ids: bool, stack: ExitStack) -> Callable[[list[dict[str, Any]]], object]:
    if form == "parquet":
        schema = _SCHEMA.append(pa.field("samples", pa.list_(pa.int64()))) if sample_ids else _SCHEMA
        table = stack.enter_context(pq.ParquetWriter(raw, schema, compression="zstd"))
        return lambda rows: table.write_table(pa.Table.from_pylist(rows, schema))
    file = stack.enter_context(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
    if form == "jsonl":
        return lambda rows: file.writelines(json.dumps({**row, "at": row["at"].timestamp()}) + "\n" for row in rows)
    lines = csv.DictWriter(file, [*_SCHEMA.names, *(["samples"] if sample_ids else [])])
    lines.writeheader()
    return lambda rows: lines.writerows(_flat(row) for row in rows)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    samples = {"samples": " ".join(map(str, row["samples"]))} if "samples" in row else {}
    return {**row, "at": row["at"].isoformat(timespec="milliseconds"), **samples}
