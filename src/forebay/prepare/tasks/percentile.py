"""PERCENTILE tasks: the documents of a part whose perplexity is within percentiles of the corpus.

They run after all documents are scored and before deduplication, so that a document that is dropped here does not stand
for its copies.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from forebay.prepare.dedup.methods import Dedup
from forebay.prepare.documents import StageResult, part_batches
from forebay.prepare.stats import StageStats, mix64
from forebay.prepare.tasks.encode import TextPart
from forebay.prepare.tasks.keys import hash_json
from forebay.prepare.tasks.text import TextResult, commit_text, finished_text, open_documents

PERCENTILE_VERSION = 1
_REASONS = ("below_percentile", "above_percentile")


@dataclass(frozen=True)
class PercentileTask:
    """Documents of a part with `low <= perplexity < high`, signed for `dedup` if that is given."""

    part: TextPart
    text: TextResult
    low: float
    high: float
    dedup: Dedup | None
    folder: str

    @cached_property
    def name(self) -> str:
        """A hash of all that the result depends on."""
        signature = self.dedup.signature() if self.dedup else {}
        return hash_json([PERCENTILE_VERSION, self.text.name, self.low, self.high, signature])

    @property
    def prefix(self) -> str:
        return f"{self.folder}/{self.name}"

    @property
    def label(self) -> str:
        return f"percentiles of {self.part.arrow}"


def filter_percentiles(task: PercentileTask, scale: int) -> TextResult:
    """Write the part without the documents outside the bounds. `scale` is not used: batches stay as they are."""
    if (finished := finished_text(task.prefix)) is not None:
        return finished
    stats = StageStats()
    with open_documents(task.prefix, task.dedup) as out:
        for _, batch in part_batches(task.part.arrow):
            values = batch.column("perplexity").to_numpy(zero_copy_only=False)
            drop = np.where(values < task.low, 0, np.where(values >= task.high, 1, -1)).astype(np.int16)
            keys = mix64(batch.column("place").to_numpy().astype(np.uint64), np.uint64(2))

            def position(row: int, batch: pa.RecordBatch = batch) -> str:
                return f"{batch.column('id')[row].as_py() or batch.column('place')[row].as_py() + 1}"

            alive = np.ones(len(batch), bool)
            stats.add_result("perplexity_percentile", _REASONS, batch, StageResult(batch, drop), keys, position, alive)
            out.add(batch.filter(pa.array(drop < 0)))
    result = replace(task.text, name=task.name, documents_out=out.documents, bytes_out=out.bytes)
    return commit_text(task.prefix, stats, result)
