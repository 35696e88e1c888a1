"""The documents of a run between reading and writing, and one pass over what is kept: samples, ids.

The pass reads a few bytes a document, as it needs the text of a few samples only.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from forebay.files import atomic_write, open_atomic
from forebay.formats.inputs import InputSplit
from forebay.prepare.dedup.methods import Dedup
from forebay.prepare.documents import part_batches
from forebay.prepare.inputs import InputFiles
from forebay.prepare.sampling import Sampling
from forebay.prepare.sources import first_rows, row_position, source_id
from forebay.prepare.stats import SAMPLE_CHARACTERS, SAMPLES, Sample, StageStats, mix64
from forebay.prepare.tasks.text import TextResult
from forebay.storage.listing import Skipped, shown_path

if TYPE_CHECKING:
    from forebay.prepare.dedup.cutting import Cutter, Flags
    from forebay.prepare.dedup.deduplicate import DedupResult

_COLUMNS = ("place", "id", "where", "text_bytes", "language", "subset")
SKIPPED_FILE = "skipped.jsonl"


@dataclass(frozen=True)
class Corpus:
    """What was read and filtered: the splits, the result of each, which documents are copies, and the statistics."""

    inputs: InputFiles
    splits: Sequence[InputSplit]
    texts: Sequence[TextResult]
    dedup: DedupResult | None
    folder: str
    stats: StageStats
    sampling: Sampling

    @property
    def documents_in(self) -> int:
        return sum(text.documents_in for text in self.texts)

    @property
    def first_rows(self) -> list[int]:
        """For each split how many lines or rows its file has in earlier splits."""
        return list(first_rows(self.splits, (text.places for text in self.texts)))

    def arrow(self, index: int) -> str:
        """The file of a split's documents."""
        return f"{self.folder}/{self.texts[index].name}.arrow"

    def duplicates(self, index: int) -> tuple[Flags | None, Cutter | None, str]:
        """What is dropped and cut of a split, and a name for all that it depends on."""
        if self.dedup is None:
            return None, None, ""
        from forebay.prepare.dedup.cutting import Cutter

        cut = Cutter(self.dedup.cut[index]) if self.dedup.cut else None
        return self.dedup.drop[index], cut, f"{self.dedup.name} {index}"

    def drop_codes(self, index: int) -> NDArray[np.uint8]:
        """For each document of a split 0, or 1 + the index of the method that found it a duplicate."""
        if self.dedup is None:
            return np.zeros(self.texts[index].documents_out, np.uint8)
        return self.dedup.drop[index].load()


def write_skipped(out: Path, skipped: Sequence[Skipped]) -> None:
    """Write `skipped.jsonl`: each input that is left out, with its reason; no file is left if there is none."""
    if not skipped:
        (out / SKIPPED_FILE).unlink(missing_ok=True)
        return
    lines = (json.dumps({**item._asdict(), "path": shown_path(item.path)}, ensure_ascii=False) for item in skipped)
    atomic_write(out / SKIPPED_FILE, (line.encode("utf-8", "replace") + b"\n" for line in lines))


def read_skipped(out: Path) -> list[Skipped]:
    """The contents of `skipped.jsonl`."""
    try:
        return [Skipped(**json.loads(line)) for line in (out / SKIPPED_FILE).read_text("utf-8").splitlines()]
    except (OSError, ValueError, TypeError):
        return []


_Candidate = tuple[int, int, int]
"""Key, split and row of a document that may become a sample: those with the smallest keys do."""


def examine_kept(corpus: Corpus, config: Dedup) -> None:
    """Add duplicates, distributions and samples of what is kept to the statistics."""
    candidates: dict[int, list[_Candidate]] = {code: [] for code in range(len(config.reasons) + 1)}
    kept_bytes = 0
    for index, text in enumerate(corpus.texts):
        codes = corpus.drop_codes(index)
        _choose(candidates, text.key, index, codes)
        for start, batch in part_batches(corpus.arrow(index), [*_COLUMNS, *corpus.stats.histograms]):
            retained = batch.filter(pa.array(codes[start : start + batch.num_rows] == 0))
            corpus.stats.add_batch("kept", retained)
            kept_bytes += pc.sum(retained.column("text_bytes")).as_py() or 0
    reasons = config.reasons
    if corpus.dedup is not None:
        _count_duplicates(corpus.dedup, reasons, corpus.stats, kept_bytes)
    for code, (stage, reason) in enumerate([("", "kept"), *(("dedup", reason) for reason in reasons)]):
        if samples := sorted(_samples(corpus, candidates[code])):
            corpus.stats.samples[stage, reason] = samples


def write_ids(path: Path | None, corpus: Corpus, left_out: Sequence[Path]) -> None:
    """Write the source ids of kept documents, in the order of the input, a line each.

    `left_out`: for each split a file of u32, the rows that deduplication kept, but of which nothing remained.
    """
    if path is None:
        return
    with open_atomic(path) as file:
        for index, (split, first_row) in enumerate(zip(corpus.splits, corpus.first_rows)):
            codes = corpus.drop_codes(index)
            codes[np.fromfile(left_out[index], "<u4")] = 1
            for start, batch in part_batches(corpus.arrow(index), _COLUMNS):
                rows = np.flatnonzero(codes[start : start + batch.num_rows] == 0)
                ids = (source_id(split, batch, row, first_row).replace("\n", " ") for row in rows.tolist())
                file.writelines(id.encode("utf-8", "backslashreplace") + b"\n" for id in ids)


def _count_duplicates(result: DedupResult, reasons: Sequence[str], stats: StageStats, kept_bytes: int) -> None:
    count = stats.following("dedup")
    count.documents_out, count.bytes_out = result.documents - sum(result.dropped), kept_bytes
    count.dropped.update({reason: n for reason, n in zip(reasons, result.dropped) if n})
    count.changed.update({label: n for label, n in result.units_cut.items() if n})


def _choose(candidates: dict[int, list[_Candidate]], key: str, index: int, codes: NDArray[np.uint8]) -> None:
    keys = mix64(np.arange(len(codes), dtype=np.uint64), np.uint64(int(key[:16], 16)))
    for code, chosen in candidates.items():
        rows = np.flatnonzero(codes == code)
        few = rows[np.argsort(keys[rows], kind="stable")[:SAMPLES]]
        candidates[code] = heapq.nsmallest(SAMPLES, [*chosen, *((int(keys[r]), index, int(r)) for r in few)])


def _samples(corpus: Corpus, candidates: Sequence[_Candidate]) -> Iterator[Sample]:
    starts = corpus.first_rows
    for key, split, document in candidates:
        for start, batch in part_batches(corpus.arrow(split)):
            if (row := document - start) < batch.num_rows:
                position = row_position(corpus.splits[split], batch, row, starts[split])
                text = batch.column("text")[row].as_py()[:SAMPLE_CHARACTERS]
                yield Sample(key, position, batch.column("url")[row].as_py(), text)
                break
