"""Kept documents as text, in Parquet: what another tool reads, or a later preparation that only tokenizes.

Hides: that documents which deduplication drops are left out here, and their repeated lines cut. `OUT/text.json` is
written last: it names each file with its hash, and how they were made.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.dataset.slices import hash_file
from forebay.files import atomic_write, open_atomic
from forebay.prepare.corpus import Corpus, collect, conclude, id_of, write_ids
from forebay.prepare.documents import OWN_COLUMNS, part_batches
from forebay.prepare.read import Piece
from forebay.prepare.stats import Tally

if TYPE_CHECKING:
    from forebay.prepare.dedup.corpus import Cutter, Flags
    from forebay.prepare.driver import PrepareSummary, Run

TEXT_FILE = "text.json"
_COLUMNS = ("url", "text", "language", "language_score", "perplexity")


@dataclass(frozen=True)
class ExportTask:
    """The kept documents of one part to `out/text/INDEX.parquet`; `base` is as in `bases`."""

    arrow: str
    documents: int
    piece: Piece
    base: int
    drop: Flags | None
    cut: Cutter | None
    out: str
    index: int

    @property
    def label(self) -> str:
        return f"text of {self.piece.sources[0].path}"

    @property
    def file(self) -> str:
        return f"text/{self.index:06d}.parquet"


@dataclass(frozen=True)
class Exported:
    """One file of text; no documents, no file."""

    file: str
    documents: int
    bytes: int
    sha256: str


def left_out_file(task: ExportTask) -> Path:
    """Where the rows are that were not dropped before and yet have no text: u32."""
    return Path(task.arrow).with_name(f"{task.index:06d}.left")


def export(task: ExportTask, scale: int = 0) -> Exported:
    """Write the file; a batch of a part, as it was written, is in memory at a time."""
    path = Path(task.out) / task.file
    drop = task.drop.load() if task.drop is not None else np.zeros(task.documents, np.uint8)
    documents = 0
    left_out = [np.empty(0, np.int64)]
    with ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        for start, batch in part_batches(task.arrow):
            ids = [id_of(task.piece, batch, row, task.base) for row in range(batch.num_rows)]
            texts = task.cut.cut(batch.column("text"), start) if task.cut is not None else batch.column("text")
            kept = drop[start : start + batch.num_rows] == 0
            empty = pc.equal(texts, "").to_numpy(zero_copy_only=False)  # all of whose lines stood elsewhere
            left_out.append(start + np.flatnonzero(kept & empty))
            columns = {"id": pa.array(ids, pa.large_string())}
            others = [name for name in batch.schema.names if name not in OWN_COLUMNS]
            columns |= {name: batch.column(name) for name in (*_COLUMNS, *others) if name in batch.schema.names}
            table = pa.table({**columns, "text": texts}).filter(pa.array(kept & ~empty))
            if table.num_rows and writer is None:
                file = stack.enter_context(open_atomic(path))
                writer = stack.enter_context(pq.ParquetWriter(file, table.schema, compression="zstd"))
            if writer is not None:
                writer.write_table(table)
            documents += table.num_rows
    atomic_write(left_out_file(task), np.concatenate(left_out).astype("<u4").tobytes())
    return Exported(task.file, documents, path.stat().st_size, hash_file(path)) if documents else Exported("", 0, 0, "")


def finish_text(run: Run, corpus: Corpus, tally: Tally, lineage: dict[str, Any]) -> PrepareSummary:
    """Write the text of all that is kept, the report, and `text.json` last."""
    collect(run, corpus, tally)
    (run.out / "text").mkdir(exist_ok=True)
    tasks = []
    for index, (text, base) in enumerate(zip(corpus.texts, corpus.bases)):
        drop, cut, _ = corpus.marks(index, run.recipe.dedup)
        arrow = f"{corpus.folder}/{text.name}.arrow"
        tasks.append(ExportTask(arrow, text.documents_out, corpus.pieces[index], base, drop, cut, str(run.out), index))
    note = run.counted("text out", len(tasks), " files")
    files = [result for result in run.map(export, tasks, note=note) if result.documents]
    write_ids(run, corpus, [left_out_file(task) for task in tasks])
    for path in (run.out / "text").iterdir():
        if f"text/{path.name}" not in {file.file for file in files}:
            path.unlink()
    documents_out = sum(file.documents for file in files)
    before = next(reversed(tally.funnel.values())).documents_out
    if before != documents_out:
        count = tally.stage("text")
        count.documents_in, count.documents_out = before, documents_out
        count.dropped["empty"] = before - documents_out
    counts: dict[str, Any] = {
        "documents_in": corpus.documents_in,
        "documents_out": documents_out,
        "tokens": 0,
        "slices": 0,
        "dropped": tally.dropped(),
    }
    facts = {
        "name": run.recipe.name,
        "files": [asdict(file) for file in files],
        "lineage": {**lineage, "counts": counts},
    }
    whole = json.dumps(facts, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
    commit = partial(atomic_write, run.out / TEXT_FILE, whole)
    return conclude(run, corpus, tally, hashlib.sha256(whole).hexdigest(), counts, {}, commit)
