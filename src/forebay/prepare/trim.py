"""TRIM tasks: documents whose perplexity lies outside percentiles of the whole corpus are taken out.

Hides: why this is a pass of its own: a percentile is known only when every document has been scored, and what it drops
must not stand for its copies in the deduplication that follows.
"""

import hashlib
import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from forebay.prepare.dedup import Dedup
from forebay.prepare.documents import Verdict
from forebay.prepare.stats import Tally, text_bytes
from forebay.prepare.text import TextResult, mix, scores, signer_of, write_documents
from forebay.prepare.tokens.encode import TextPart
from forebay.storage.atomic import atomic_write

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
    def label(self) -> str:
        """What a person calls it."""
        return f"percentiles of {self.part.arrow}"


def trim(task: TrimTask, scale: int) -> TextResult:
    """The part without the documents outside the bounds; `scale` is not used: batches are as they were written.

    Raises:
        OSError: If it cannot be read or written.
    """
    prefix = f"{task.folder}/{task.name}"
    try:
        return TextResult(**json.loads(Path(f"{prefix}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        pass
    tally = Tally()
    documents = size = 0
    with ExitStack() as stack:
        write = stack.enter_context(write_documents(f"{prefix}.arrow"))
        signer = stack.enter_context(signer_of(prefix, task.dedup)) if task.sign else None
        source = stack.enter_context(pa.memory_map(task.part.arrow))
        reader = pa.ipc.open_file(source)
        for index in range(reader.num_record_batches if task.part.documents else 0):
            batch = reader.get_batch(index)
            values = batch.column("perplexity").to_numpy(zero_copy_only=False)
            drop = np.where(values < task.low, 0, np.where(values >= task.high, 1, -1)).astype(np.int16)
            keys = mix(batch.column("place").to_numpy().astype(np.uint64), np.uint64(2))

            def where(row: int, batch: pa.RecordBatch = batch) -> str:
                return f"{batch.column('id')[row].as_py() or batch.column('place')[row].as_py() + 1}"

            tally.judge("perplexity_percentile", REASONS, batch, Verdict(batch, drop), keys, where)
            kept = batch.filter(pa.array(drop < 0))
            if kept.num_rows:
                documents += kept.num_rows
                size += int(text_bytes(kept).sum())
                if signer is not None:
                    signer.add(kept.column("text"), scores(kept, task.dedup))
                write(kept)
    result = replace(task.text, name=task.name, documents_out=documents, bytes_out=size)
    atomic_write(Path(f"{prefix}.stats"), json.dumps(tally.to_json()).encode())
    atomic_write(Path(f"{prefix}.json"), json.dumps(asdict(result)).encode())
    return result
