"""The documents of a run between reading and writing: what is kept of them, and their ids."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forebay.errors import printable
from forebay.files import open_atomic
from forebay.formats.inputs import InputFile, InputSplit
from forebay.prepare.documents import part_batches
from forebay.prepare.inputs import InputFiles
from forebay.prepare.run import PrepareRun
from forebay.prepare.sampling import Sampling
from forebay.prepare.sources import first_rows, source_id
from forebay.prepare.stats import StageStats
from forebay.prepare.tasks.statistics import COLUMNS, ExamineTask, FilteredPart, add_stats, examine, stats_name
from forebay.prepare.tasks.text import TextResult
from forebay.storage.listing import Skipped
from forebay.storage.store import Store

if TYPE_CHECKING:
    from forebay.prepare.dedup.deduplicate import DedupResult

SKIPPED_FILE = "skipped.jsonl"


@dataclass(frozen=True)
class Corpus:
    """What was read and filtered: the splits, the result of each, which documents are copies, and the statistics."""

    inputs: InputFiles
    splits: Sequence[InputSplit]
    texts: Sequence[TextResult]
    dedup: "DedupResult | None"
    store: Store
    stats: StageStats
    sampling: Sampling

    @property
    def documents_in(self) -> int:
        return sum(text.documents_in for text in self.texts)

    @property
    def failed(self) -> dict[str, float]:
        """How many inputs failed, and how much of the input that is."""
        return count_failed(self.inputs.skipped, self.inputs.files, self.sampling.read_bytes)

    def parts(self) -> Iterator[FilteredPart]:
        """Yield the documents of each split, with what is dropped and cut of them."""
        rows = first_rows(self.splits, (text.places for text in self.texts))
        for index, (split, text, first_row) in enumerate(zip(self.splits, self.texts, rows)):
            part = FilteredPart(text.part.arrow, text.key, text.documents_out, split, first_row)
            if self.dedup is not None:
                from forebay.prepare.dedup.cutting import Cutter

                cut = Cutter(self.dedup.cut[index]) if self.dedup.cut else None
                part = replace(part, drop=self.dedup.drop[index], cut=cut, dedup_name=f"{self.dedup.name} {index}")
            yield part


def write_skipped(store: Store, skipped: Sequence[Skipped]) -> None:
    """Write `skipped.jsonl`: each input that is left out, with its reason; no object is left if there is none."""
    if not skipped:
        store.remove([SKIPPED_FILE])
        return
    lines = (json.dumps({**item._asdict(), "path": printable(item.path)}, ensure_ascii=False) for item in skipped)
    store.write(SKIPPED_FILE, (line.encode("utf-8", "replace") + b"\n" for line in lines))


def read_skipped(store: Store) -> list[Skipped]:
    """The contents of `skipped.jsonl`."""
    try:
        return [Skipped(**json.loads(line)) for line in store.read(SKIPPED_FILE).splitlines()]
    except (OSError, ValueError, TypeError):
        return []


def count_failed(skipped: Sequence[Skipped], files: Sequence[InputFile], num_bytes: int) -> dict[str, float]:
    """Return how many inputs failed, with the bytes that are missing and their share of all.

    Args:
        files: The inputs that are read; a file of unknown size counts as their mean.
        num_bytes: The size of what is read of them. A folder that cannot be read may hold anything: its share is 1.
    """
    failed = [item for item in skipped if item.status == "failed"]
    mean = sum(file.bytes for file in files) // max(1, len(files))
    missing = sum(item.bytes if item.bytes >= 0 else mean for item in failed)
    unlisted = sum(
        item.bytes if item.bytes >= 0 else mean for item in failed if item.path not in {f.path for f in files}
    )
    share = min(1.0, missing / (num_bytes + unlisted)) if num_bytes + unlisted else float(bool(failed))
    share = 1.0 if any(item.path.endswith("/") for item in failed) else share
    return {"inputs": len(failed), "bytes": missing, "share": round(share, 6)}


def examine_kept(run: PrepareRun, corpus: Corpus) -> None:
    """Add duplicates, distributions and samples of what is kept to the statistics."""
    reasons = run.recipe.dedup.reasons
    labels = (("", "kept"), *(("dedup", reason) for reason in reasons))
    columns = tuple(corpus.stats.histograms)
    tasks = [ExamineTask(part, labels, columns, corpus.store) for part in corpus.parts() if part.documents]
    kept_bytes = sum(run.map(examine, tasks))
    retained = add_stats(corpus.store, [stats_name(task) for task in tasks], run.map)
    if corpus.dedup is not None:
        _count_duplicates(corpus.dedup, reasons, corpus.stats, kept_bytes)
    samples = {label: retained.samples.pop(label) for label in labels if label in retained.samples}
    corpus.stats.add(retained)
    corpus.stats.samples |= samples


def write_ids(path: Path | None, corpus: Corpus, left_out: Sequence[str]) -> None:
    """Write the source ids of kept documents, in the order of the input, a line each.

    `left_out`: for each split with documents an object of u32: rows that deduplication kept, of which nothing remained.
    """
    if path is None:
        return
    with open_atomic(path) as file:
        for part, name in zip((part for part in corpus.parts() if part.documents), left_out, strict=True):
            codes = part.drop_codes()
            codes[corpus.store.read_array(name, "<u4")] = 1
            for start, batch in part_batches(corpus.store, part.arrow, COLUMNS):
                rows = np.flatnonzero(codes[start : start + batch.num_rows] == 0)
                ids = (source_id(part.split, batch, row, part.first_row).replace("\n", " ") for row in rows.tolist())
                file.writelines(id.encode("utf-8", "backslashreplace") + b"\n" for id in ids)


def _count_duplicates(result: "DedupResult", reasons: Sequence[str], stats: StageStats, kept_bytes: int) -> None:
    count = stats.following("dedup")
    count.documents_out, count.bytes_out = result.documents - sum(result.dropped), kept_bytes
    count.dropped.update({reason: n for reason, n in zip(reasons, result.dropped) if n})
    count.changed.update({label: n for label, n in result.units_cut.items() if n})
