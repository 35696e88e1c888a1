"""One pass over what was kept, when it is known what was: source ids, clusters with names, distributions, samples.

Hides: that none of it needs the text but a few samples, so the pass reads a few bytes a document.
"""

from __future__ import annotations

import heapq
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from forebay.errors import PrepareError
from forebay.files import atomic_write, open_atomic
from forebay.prepare.documents import part_batches
from forebay.prepare.read import Found, Skipped
from forebay.prepare.read.base import Piece
from forebay.prepare.read.listing import count_reasons, shown_path
from forebay.prepare.report import write_report
from forebay.prepare.stats import CLUSTER, EDGES, SAMPLE_CHARACTERS, SAMPLES, Sample, Tally
from forebay.prepare.tasks.text import TextResult, bases, mix, row_place

if TYPE_CHECKING:
    from forebay.prepare.dedup.corpus import Cutter, DedupResult, Flags, Part
    from forebay.prepare.dedup.settings import Dedup
    from forebay.prepare.driver import PrepareSummary, Run

_COLUMNS = ("place", "id", "where", "text_bytes", "language", "perplexity")
EXACT, NEAR = "exact_duplicate", "near_duplicate"
_MAX_REJECTS, _MAX_SKIPPED = 50, 200
SKIPPED_FILE, REPORT_FILE = "skipped.jsonl", "report.html"
CLUSTERS = pa.schema([("cluster", pa.int64()), ("id", pa.large_string()), ("kept", pa.bool_()), ("near", pa.bool_())])


@dataclass(frozen=True)
class Corpus:
    """What was read and sifted: the pieces, what came of each, and which of their documents are copies."""

    found: Found
    pieces: Sequence[Piece]
    texts: Sequence[TextResult]
    dedup: DedupResult | None
    folder: str

    @property
    def signed(self) -> list[Part]:
        """The parts as deduplication sees them."""
        from forebay.prepare.dedup.corpus import Part

        return [Part(f"{self.folder}/{text.name}", text.documents_out) for text in self.texts]

    @property
    def documents_in(self) -> int:
        return sum(text.documents_in for text in self.texts)

    @property
    def bases(self) -> list[int]:
        """For each piece how many lines or rows its file has in earlier pieces."""
        return list(bases(self.pieces, self.texts))

    def marks(self, index: int, config: Dedup) -> tuple[Flags | None, Cutter | None, str]:
        """What is dropped and cut of a part, and a name for all that it depends on."""
        if self.dedup is None:
            return None, None, ""
        from forebay.prepare.dedup.corpus import Cutter

        cut = Cutter(self.dedup.cut[index], config) if self.dedup.cut else None
        return self.dedup.drop[index], cut, f"{Path(self.dedup.clusters).stem} {index}"

    def report(
        self, run: Run, tally: Tally, id: str, counts: dict[str, Any], subsets: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """What the report page shows, as JSON; no times, so that the same input gives the same page."""
        funnel = list(tally.funnel.items())
        return {
            "name": run.recipe.name,
            "id": id,
            "created_with": f"forebay {version('forebay')}",
            "recipe": run.recipe.to_tables(),
            "totals": {
                **{key: counts[key] for key in ("documents_in", "documents_out", "tokens", "slices")},
                "bytes_in": funnel[0][1].bytes_in,
                "bytes_out": funnel[-1][1].bytes_out,
                "malformed": sum(text.malformed for text in self.texts),
                "subsets": {name: {k: v for k, v in facts.items() if k != "id"} for name, facts in subsets.items()},
            },
            "inputs": self._inputs(),
            "skipped": count_reasons(self.found.skipped),
            "skipped_files": [
                {"path": shown_path(one.path), "reason": one.reason, "status": one.status}
                for one in self.found.skipped[:_MAX_SKIPPED]
            ],
            "funnel": [{"stage": name, **vars(count)} for name, count in funnel],
            "histograms": {
                name: {"edges": EDGES[name].tolist(), "log": True, **{s: c.tolist() for s, c in sides.items()}}
                for name, sides in tally.histograms.items()
            },
            "languages": tally.languages,
            "samples": [
                {"stage": stage, "reason": reason, "where": s.where, "url": s.url, "text": s.text}
                for (stage, reason), samples in tally.samples.items()
                for s in samples
            ],
            "rejects": list(self._rejects(run)),
        }

    def _inputs(self) -> list[dict[str, Any]]:
        read = {(s.path, s.sha256): [0, 0] for s in self.found.sources}
        for piece, text in zip(self.pieces, self.texts):
            key = piece.sources[0].path, piece.sources[0].sha256
            if len(piece.sources) == 1:
                read[key][0] += text.documents_in
                read[key][1] += text.malformed
                continue
            for source in piece.sources:
                read[source.path, source.sha256][0] += 1
            if text.malformed:
                for line in Path(f"{self.folder}/{text.name}.rejects").read_text("utf-8").splitlines():
                    source = piece.sources[json.loads(line)["place"]]
                    read[source.path, source.sha256][1] += 1
        return [
            {"name": s.name, "format": s.format, "bytes": s.bytes, "documents": n, "malformed": bad}
            for s, (n, bad) in zip(self.found.sources, (read[s.path, s.sha256] for s in self.found.sources))
        ]

    def _rejects(self, run: Run) -> Iterator[dict[str, Any]]:
        path = run.out / "rejects.jsonl"
        if path.exists():
            with path.open(encoding="utf-8") as file:
                for _, line in zip(range(_MAX_REJECTS), file):
                    reject = json.loads(line)
                    yield {"where": reject["where"], "reason": reject["reason"]}


def write_skipped(out: Path, skipped: Sequence[Skipped]) -> None:
    """Name each input that is left out in `skipped.jsonl`, with its reason; no file is left if there is none."""
    if not skipped:
        (out / SKIPPED_FILE).unlink(missing_ok=True)
        return
    lines = (json.dumps({**one._asdict(), "path": shown_path(one.path)}, ensure_ascii=False) for one in skipped)
    atomic_write(out / SKIPPED_FILE, (line.encode("utf-8", "replace") + b"\n" for line in lines))


def read_skipped(out: Path) -> list[Skipped]:
    """What `write_skipped` wrote there."""
    try:
        return [Skipped(**json.loads(line)) for line in (out / SKIPPED_FILE).read_text("utf-8").splitlines()]
    except (OSError, ValueError, TypeError):
        return []


def write_empty_report(run: Run, corpus: Corpus, tally: Tally) -> None:
    """Write the report of a run that stops before there is a dataset: what was read, and why it was dropped."""
    counts = {"documents_in": corpus.documents_in, "documents_out": 0, "tokens": 0, "slices": 0}
    write_report(run.out / REPORT_FILE, corpus.report(run, tally, "", counts, {}))


def conclude(
    run: Run,
    corpus: Corpus,
    tally: Tally,
    id: str,
    counts: dict[str, Any],
    subsets: dict[str, dict[str, Any]],
    commit: Callable[[], object],
) -> PrepareSummary:
    """Write the report, `commit` the output, which is complete then, and remove what only an unfinished run needs."""
    from forebay.prepare.driver import PrepareSummary

    write_report(run.out / REPORT_FILE, corpus.report(run, tally, id, counts, subsets))
    commit()
    shutil.rmtree(run.work)
    skipped = count_reasons(corpus.found.skipped)
    return PrepareSummary(run.recipe.name, id, **counts, subsets=subsets, skipped=skipped)


def nothing_left(run: Run, corpus: Corpus, tally: Tally) -> PrepareError:
    """Write the report; the error that names what dropped the documents."""
    write_empty_report(run, corpus, tally)
    stages = []
    for name, count in tally.funnel.items():
        reasons = count.dropped.most_common(3)
        stages += [f"{name} ({', '.join(f'{reason} {n:,}' for reason, n in reasons)})"] if reasons else []
    if stages:
        why = f"dropped by {'; '.join(stages)}. See {run.out / REPORT_FILE}, and loosen these stages."
    else:
        why = f"the inputs hold no documents. See {run.out / REPORT_FILE}."
    return PrepareError(f"prepare: expected documents with text, got none: {corpus.documents_in:,} read, {why}")


@dataclass(frozen=True, order=True)
class _Chosen:
    """A document that may become a sample: those with the smallest keys do."""

    key: int
    part: int
    row: int


def collect(run: Run, corpus: Corpus, tally: Tally) -> None:
    """Write the clusters; add the copies that were dropped, distributions, samples of what is kept."""
    chosen: dict[int, list[_Chosen]] = {0: [], 1: [], 2: []}
    kept_bytes = 0
    with ExitStack() as stack:
        clusters = _Clusters(run.out / "clusters.parquet", corpus.dedup, stack)
        for index, (piece, text, base) in enumerate(zip(corpus.pieces, corpus.texts, corpus.bases)):
            drop = corpus.dedup.drop[index].load() if corpus.dedup else np.zeros(text.documents_out, np.uint8)
            _choose(chosen, text.key, index, drop)
            for start, batch in part_batches(f"{corpus.folder}/{text.name}.arrow", _COLUMNS):
                marks = drop[start : start + batch.num_rows]
                kept = batch.filter(pa.array(marks == 0))
                tally.see("kept", kept)
                kept_bytes += pc.sum(kept.column("text_bytes")).as_py() or 0
                clusters.write(index, start, batch, lambda row, p=piece, b=batch, n=base: id_of(p, b, row, n))
    if corpus.dedup is not None:
        _count_copies(corpus.dedup, tally, kept_bytes)
    for code, (stage, reason) in {0: ("", "kept"), 1: ("dedup", EXACT), 2: ("dedup", NEAR)}.items():
        found = sorted(_samples(corpus, chosen[code]))
        if found:
            tally.samples[stage, reason] = found


def write_ids(run: Run, corpus: Corpus, left_out: Sequence[Path]) -> None:
    """Write the kept ids, in the order of the input.

    `left_out`: for each part a file of u32, the rows that deduplication kept, but that came to nothing later.
    """
    if run.keep_ids is None:
        return
    with open_atomic(run.keep_ids) as ids:
        for index, (piece, text, base) in enumerate(zip(corpus.pieces, corpus.texts, corpus.bases)):
            drop = corpus.dedup.drop[index].load() if corpus.dedup else np.zeros(text.documents_out, np.uint8)
            drop[np.fromfile(left_out[index], "<u4")] = 1
            for start, batch in part_batches(f"{corpus.folder}/{text.name}.arrow", _COLUMNS):
                kept = np.flatnonzero(drop[start : start + batch.num_rows] == 0)
                found = (id_of(piece, batch, row, base).replace("\n", " ") for row in kept.tolist())
                ids.writelines(id.encode("utf-8", "backslashreplace") + b"\n" for id in found)


def _count_copies(result: DedupResult, tally: Tally, kept_bytes: int) -> None:
    last = next(reversed(tally.funnel.values()))
    count = tally.stage("dedup")
    count.documents_in, count.bytes_in = result.documents, last.bytes_out
    count.documents_out, count.bytes_out = result.documents - result.exact - result.near, kept_bytes
    count.dropped.update({reason: n for reason, n in ((EXACT, result.exact), (NEAR, result.near)) if n})
    if result.units_cut:
        count.changed["lines or paragraphs cut"] = result.units_cut
    for size, number in result.sizes:
        tally.observe(CLUSTER, "read", [size], number)


def _choose(chosen: dict[int, list[_Chosen]], key: str, index: int, drop: NDArray[np.uint8]) -> None:
    keys = mix(np.arange(len(drop), dtype=np.uint64), np.uint64(int(key[:16], 16)))
    for code, held in chosen.items():
        rows = np.flatnonzero(drop == code)
        few = rows[np.argsort(keys[rows], kind="stable")[:SAMPLES]]
        chosen[code] = heapq.nsmallest(SAMPLES, [*held, *(_Chosen(int(keys[r]), index, int(r)) for r in few)])


def _samples(corpus: Corpus, chosen: Sequence[_Chosen]) -> Iterator[Sample]:
    starts = corpus.bases
    for one in chosen:
        piece, text = corpus.pieces[one.part], corpus.texts[one.part]
        for start, batch in part_batches(f"{corpus.folder}/{text.name}.arrow"):
            if one.row < start + batch.num_rows:
                row = one.row - start
                where = row_place(piece, batch, row, starts[one.part])
                text_of = batch.column("text")[row].as_py()[:SAMPLE_CHARACTERS]
                yield Sample(one.key, where, batch.column("url")[row].as_py(), text_of)
                break


def id_of(piece: Piece, batch: pa.RecordBatch, row: int, base: int) -> str:
    """The source id of a document: the input's own, or where it stands."""
    return batch.column("id")[row].as_py() or row_place(piece, batch, row, base)


class _Clusters:
    """The clusters with the documents' source ids in place of their numbers; without clusters, nothing."""

    def __init__(self, path: Path, result: DedupResult | None, stack: ExitStack) -> None:
        self._rows: Iterator[dict[str, Any]] = iter(())
        if result is not None:
            reader = stack.enter_context(pq.ParquetFile(result.clusters))
            file = stack.enter_context(open_atomic(path))
            self._writer = stack.enter_context(pq.ParquetWriter(file, CLUSTERS))
            rows = (row for batch in reader.iter_batches(batch_size=1 << 14) for row in batch.to_pylist())
            self._rows = (row for row in rows if row["part"] >= 0)
        self._next = next(self._rows, None)

    def write(self, part: int, start: int, batch: pa.RecordBatch, id_of: Any) -> None:
        found = []
        while self._next is not None and self._next["part"] == part and self._next["document"] < start + batch.num_rows:
            row = self._next
            found.append({**row, "id": id_of(row["document"] - start)})
            self._next = next(self._rows, None)
        if found:
            self._writer.write_table(pa.Table.from_pylist(found, schema=CLUSTERS))
