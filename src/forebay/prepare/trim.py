"""TRIM tasks: documents whose perplexity lies outside percentiles of the whole corpus are taken out.

Hides: why this is a pass of its own: a percentile is known only when every document has been scored, and what it drops
must not stand for its copies in the deduplication that follows.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from forebay.prepare.dedup.config import Dedup
from forebay.prepare.documents import Verdict, part_batches
from forebay.prepare.stats import Tally
from forebay.prepare.text import TextResult, commit_text, finished_text, keeping, mix
from forebay.prepare.tokens.encode import TextPart

TRIM_VERSION = 1
REASONS = ("below_percentile", "above_percentile")


@dataclass(frozen=True)
class TrimTask:
    """Documents of a part with `low <= perplexity < high`, signed if `sign`."""

    part: TextPart
    text: TextResult
    low: float
    high: float
    dedup: Dedup
    sign: bool
    folder: str

    @cached_property
    def name(self) -> str:
        """A hash of all that the result depends on."""
        facts = [TRIM_VERSION, self.text.name, self.low, self.high, self.dedup.signature() if self.sign else {}]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    @property
    def prefix(self) -> str:
        """Path of its files, without the ending."""
        return f"{self.folder}/{self.name}"

    @property
    def label(self) -> str:
        """What a person calls it."""
        return f"percentiles of {self.part.arrow}"


def trim(task: TrimTask, scale: int) -> TextResult:
    """The part without the documents outside the bounds; `scale` is not used: batches are as they were written.

    Raises:
        OSError: If it cannot be read or written.
    """
    done = finished_text(task)
    if done is not None:
        return done
    tally = Tally()
    with keeping(task.prefix, task.dedup if task.sign else None) as out:
        for _, batch in part_batches(task.part.arrow):
            values = batch.column("perplexity").to_numpy(zero_copy_only=False)
            drop = np.where(values < task.low, 0, np.where(values >= task.high, 1, -1)).astype(np.int16)
            keys = mix(batch.column("place").to_numpy().astype(np.uint64), np.uint64(2))

            def where(row: int, batch: pa.RecordBatch = batch) -> str:
                return f"{batch.column('id')[row].as_py() or batch.column('place')[row].as_py() + 1}"

            tally.judge("perplexity_percentile", REASONS, batch, Verdict(batch, drop), keys, where)
            out.add(batch.filter(pa.array(drop < 0)))
    result = replace(task.text, name=task.name, documents_out=out.documents, bytes_out=out.bytes)
    return commit_text(task.prefix, tally, result)
