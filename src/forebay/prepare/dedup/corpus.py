"""Deduplicate a corpus of signed parts: plan the tasks, map them over an engine, and say what came of it.

Hides: the order of steps. Exact first: equal documents are linked, and only the best of them goes on to MinHash; the
links of both make the clusters. Lines and paragraphs come last, over the documents that stay, so that a first
occurrence is never in a document that is dropped. Every task is named by a hash of the signatures and settings and
skipped when its file is there; `STEM.result` is written last, and then what only the steps needed is removed.

Disk while it runs: 16 bytes a band and document (224 by default), 24 for exact, 8 for the components; what stays is one
byte a document, one a line, and the clusters.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.errors import PrepareError, UsageError
from forebay.files import atomic_write, open_atomic, remove_stale
from forebay.prepare.dedup import kernels
from forebay.prepare.dedup.clusters import EXACT, KEPT, NEAR, Mark, Settle, mark, settle
from forebay.prepare.dedup.pairs import (
    RECORD_BYTES,
    SORT_FACTOR,
    Merge,
    Sort,
    Span,
    merge_runs,
    read_flags,
    read_u64,
    sort_run,
)
from forebay.prepare.dedup.settings import Dedup
from forebay.prepare.dedup.signer import UNIT, Signed, character_table, read_signed, scratch_for
from forebay.prepare.documents import text_buffers, text_column

VERSION = 1
"""Raised when the same signatures would be settled in another way, so that old results are not taken up."""
STORED = "signatures"
"""The prefix of a dataset's own signatures within their folder."""
_RUN_RECORDS = 1 << 21
"""At most this many records a run: about 1 s of work, so that small corpora use several processes too."""

Mapper = Callable[[Callable[[Any, int], Any], Sequence[Any]], list[Any]]
"""Calls `run(task, scale)` for each task and returns the results in the order of the tasks."""
Progress = Callable[[str, int, int], None]
"""(step, steps done, steps in all)."""


@dataclass(frozen=True)
class Part:
    """The signatures of one piece of the corpus, by prefix, and how many documents it has."""

    prefix: str
    documents: int


@dataclass(frozen=True)
class Flags:
    """A byte for each of `count` documents (or lines) of a part, from byte `start` of a file."""

    path: str
    start: int
    count: int

    def load(self) -> NDArray[np.uint8]:
        """uint8 [count]."""
        return read_flags(self.path, self.start, self.count)


@dataclass(frozen=True)
class DedupResult:
    """What came of a deduplication; numbers are of the parts, without what they were compared against.

    Args:
        drop: For each part a byte a document: 0 kept, 1 equal to another, 2 nearly equal to another.
        cut: For each part a byte a line or paragraph that is long enough, 1 to be cut; empty if none are compared.
        clusters: Parquet: cluster (number of the kept document), part (negative: of `against`), document, kept, near.
        sizes: How many clusters there are of each size, those with documents of `against` too: [[2, 120], [3, 41]].
    """

    documents: int
    exact: int
    near: int
    units: int
    units_cut: int
    clusters: str
    drop: tuple[Flags, ...]
    cut: tuple[Flags, ...]
    sizes: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class _Corpus:
    """All parts in order, those of `against` first."""

    config: Dedup
    parts: tuple[Part, ...]
    signed: tuple[Signed, ...]
    against: int
    folder: str
    stem: str
    memory_bytes: int

    def rows(self, kind: str) -> list[int]:
        return [s.units if kind == "units" else s.documents for s in self.signed]


def deduplicate(
    parts: Sequence[Part],
    config: Dedup,
    folder: Path,
    map: Mapper,
    on_progress: Progress | None = None,
    memory_bytes: int = 256 << 20,
) -> DedupResult:
    """Which documents and lines of the corpus are copies. Depends on the parts' signatures and their order alone.

    May be killed at any time and called again: what was finished is taken up. `parts` are in corpus order, signed with
    the same settings; `folder` is of one call at a time; a task may take about `memory_bytes`.
    """
    if memory_bytes < 1 << 16:
        raise UsageError(f"memory_bytes: expected at least {1 << 16}, got {memory_bytes}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    corpus = _open(parts, config, folder, memory_bytes)
    result = folder / f"{corpus.stem}.result"
    if result.exists():
        return _load(corpus, json.loads(result.read_bytes()))
    remove_stale(folder)
    facts = _run(corpus, map, on_progress or (lambda step, done, total: None))
    atomic_write(result, json.dumps(facts).encode())
    for used in folder.glob(f"{corpus.stem}-*"):
        used.unlink()
    return _load(corpus, facts)


def _open(parts: Sequence[Part], config: Dedup, folder: Path, memory_bytes: int) -> _Corpus:
    stored = [str(Path(path) / STORED) for path in config.against]
    signed = [read_signed(prefix, config, ignore=("weight",)) for prefix in stored]
    signed += [read_signed(part.prefix, config) for part in parts]
    every = [Part(prefix, one.documents) for prefix, one in zip(stored, signed)] + list(parts)
    for part, one in zip(every, signed):
        if part.documents != one.documents:
            raise UsageError(f"{part.prefix}: expected {one.documents} documents as signed, got {part.documents}")
    settings = [VERSION, config.signature(), config.keep, len(stored)]
    facts = [settings, [[one.sha256, one.documents, one.units] for one in signed]]
    stem = "dedup-" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    return _Corpus(config, tuple(every), tuple(signed), len(stored), str(folder), stem, memory_bytes)


def _run(corpus: _Corpus, map: Mapper, on_progress: Progress) -> dict[str, Any]:
    config, stem = corpus.config, corpus.stem
    total = 1 + 2 * config.exact + 2 * config.minhash + (config.exact and config.minhash) + 3 * bool(config.unit)
    done = 0

    def step(what: str, run: Callable[[Any, int], Any], tasks: Sequence[Any]) -> list[str]:
        nonlocal done
        on_progress(what, done, total)
        names: list[str] = map(run, tasks) if tasks else []
        done += 1
        return names

    links: list[str] = []
    base = ""
    if config.exact:
        links += _link(corpus, "exact", "", step)
        if config.minhash:
            (base,) = step("settle", settle, [_settle(corpus, f"{stem}-exact", links, EXACT)])
    if config.minhash:
        links += _link(corpus, "minhash", f"{corpus.folder}/{base}.drop" if base else "", step)
    code = NEAR if config.minhash else EXACT
    step("settle", settle, [_settle(corpus, stem, links, code, base=base, clusters=True)])
    facts: dict[str, Any] = json.loads((Path(corpus.folder) / f"{stem}.json").read_bytes())
    facts["units_cut"] = 0
    if config.unit:
        units = _link(corpus, "units", f"{corpus.folder}/{stem}.drop", step)
        step("cut", mark, [Mark(stem, corpus.folder, tuple(units), sum(corpus.rows("units")))])
        facts["units_cut"] = _count(corpus, "cut", "units")[1]
    facts["counts"] = _count(corpus, "drop", "documents")
    on_progress("done", total, total)
    return facts


def _settle(
    corpus: _Corpus, name: str, links: Sequence[str], code: int, *, base: str = "", clusters: bool = False
) -> Settle:
    parts = tuple((part.prefix, part.documents) for part in corpus.parts)
    weighted = corpus.config.keep != "first"
    return Settle(name, corpus.folder, tuple(links), parts, corpus.against, weighted, code, base, clusters)


def _link(
    corpus: _Corpus, kind: str, drop: str, step: Callable[[str, Callable[[Any, int], Any], Sequence[Any]], list[str]]
) -> list[str]:
    """The names of the files of links between equal keys of a kind."""
    columns = corpus.config.bands if kind == "minhash" else 2
    per_row = columns if kind == "minhash" else 1
    record = RECORD_BYTES[kind] * SORT_FACTOR
    limit = max(min(corpus.memory_bytes // record, _RUN_RECORDS) // per_row, 1)
    stem = f"{corpus.stem}-{kind}-{limit}"
    runs = [
        Sort(f"{stem}-{i}", corpus.folder, kind, columns, spans, drop)
        for i, spans in enumerate(_spans(corpus, kind, limit))
    ]
    names = step(f"sort {kind}", sort_run, runs)
    ranges = -(-sum(corpus.rows(kind)) * per_row * record // corpus.memory_bytes)
    merges = [
        Merge(f"{stem}-{ranges}-{i}", corpus.folder, kind, stem, len(runs), i, ranges)
        for i in range(ranges if len(runs) > 1 else 0)
    ]
    return names + step(f"merge {kind}", merge_runs, merges)


def _spans(corpus: _Corpus, kind: str, limit: int) -> Iterator[tuple[Span, ...]]:
    """Rows of the parts in order, in groups of at most `limit`."""
    held: list[Span] = []
    size = base = document = 0
    for index, (part, rows) in enumerate(zip(corpus.parts, corpus.rows(kind))):
        start = 0
        while start < rows:
            stop = min(rows, start + limit - size)
            held.append(Span(part.prefix, base, start, stop, -1 if index < corpus.against else document))
            size += stop - start
            start = stop
            if size == limit:
                yield tuple(held)
                held, size = [], 0
        base += rows
        document += part.documents
    if held:
        yield tuple(held)


def _count(corpus: _Corpus, ending: str, kind: str) -> list[int]:
    """How many bytes of each value 0, 1, 2 the new parts have in a file of flags."""
    rows = corpus.rows(kind)
    counts = np.zeros(3, np.int64)
    at, stop = sum(rows[: corpus.against]), sum(rows)
    while at < stop:
        flags = read_flags(f"{corpus.folder}/{corpus.stem}.{ending}", at, min(1 << 20, stop - at))
        counts += np.bincount(flags, minlength=3)
        at += len(flags)
    return [int(n) for n in counts]


def _load(corpus: _Corpus, facts: dict[str, Any]) -> DedupResult:
    def flags(ending: str, kind: str) -> tuple[Flags, ...]:
        rows = corpus.rows(kind)
        starts = np.cumsum([0, *rows]).tolist()
        path = f"{corpus.folder}/{corpus.stem}.{ending}"
        return tuple(Flags(path, starts[i], rows[i]) for i in range(corpus.against, len(rows)))

    kept, exact, near = facts["counts"]
    return DedupResult(
        documents=kept + exact + near,
        exact=exact,
        near=near,
        units=sum(corpus.rows("units")[corpus.against :]),
        units_cut=facts["units_cut"],
        clusters=f"{corpus.folder}/{corpus.stem}.parquet",
        drop=flags("drop", "documents"),
        cut=flags("cut", "units") if corpus.config.unit else (),
        sizes=facts["sizes"],
    )


class Cutter:
    """Cuts a part's texts, given all of them in the order in which they were signed, in any batches. Picklable.

    Documents that are dropped pass too (they have marks, and may be cut or not): drop them after this. `flags` is
    `DedupResult.cut` of the part.
    """

    def __init__(self, flags: Flags, config: Dedup) -> None:
        self._flags, self._config = flags, config
        self._cut = self._scratch = np.empty(0, np.uint8)
        self._used = 0

    def cut(self, texts: pa.LargeStringArray, first_row: int) -> pa.LargeStringArray:
        """The texts of the part's rows from `first_row` without what is marked; one of which nothing is left is ""."""
        if first_row == 0:
            self._cut, self._used = self._flags.load(), 0
        offsets, data = text_buffers(texts)
        config = self._config
        self._scratch = scratch_for(offsets, self._scratch)
        table = character_table(config.normalise_of(config.unit))
        out, out_offsets = np.empty(int(offsets[-1] - offsets[0]), np.uint8), np.empty(len(offsets), np.int64)
        # A text of n bytes has at most n units; marks past the end are read only if these are other texts.
        marks = self._cut[self._used : self._used + len(out) + 1]
        if len(marks) <= len(out):
            marks = np.concatenate([marks, np.zeros(len(out) + 1 - len(marks), np.uint8)])
        self._used += kernels.cut_units(
            data, offsets, UNIT[config.unit], table, config.min_characters, self._scratch, marks, out, out_offsets
        )
        if self._used > len(self._cut):
            raise PrepareError(
                f"{self._flags.path}: expected the {len(self._cut)} lines or paragraphs that were signed, got more. "
                "The documents have changed since: run the task that signed them again."
            )
        return text_column(out_offsets, out[: out_offsets[-1]])


_CHUNK_ROWS = 1 << 15


def store_signatures(parts: Sequence[Part], result: DedupResult, config: Dedup, folder: Path) -> None:
    """Keep what later data is compared against: a folder for the `against` of its settings.

    The rows are of the documents that stayed and of those that were dropped as near duplicates: what is near one of
    these belongs to the cluster, and would have been dropped with it. (Equal documents have equal signatures.) Of lines
    and paragraphs those that stayed. That is 128 bytes a document by default, and 16 a line.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    remove_stale(folder)
    settings = {ending: value for ending, value in config.signature().items() if ending != "weight"}
    digest = hashlib.sha256()
    documents = units = 0
    for ending in settings:
        rows = 0
        with open_atomic(folder / f"{STORED}.{ending}") as file:
            for index in range(len(parts)):
                for stored in _stored_rows(parts[index], result, config, index, ending):
                    file.write(stored.data)
                    digest.update(stored.data)
                    rows += len(stored)
        documents, units = (documents, rows) if ending == "units" else (rows, units)
    signed = Signed(documents, units, settings, digest.hexdigest())
    atomic_write(folder / f"{STORED}.signatures", json.dumps(asdict(signed)).encode())


def find_stored(path: str, config: Dedup) -> tuple[str, str]:
    """The folder of signatures that a user names, by itself or by the dataset around it, and a hash of its contents."""
    for folder in (Path(path), Path(path) / STORED):
        if (folder / f"{STORED}.signatures").is_file():
            signed = read_signed(str(folder / STORED), config, ignore=("weight",))
            return str(folder), hashlib.sha256(json.dumps(asdict(signed)).encode()).hexdigest()
    raise UsageError(
        f"dedup.against: expected a dataset that was prepared with deduplication, or its {STORED!r} folder, "
        f"got {path}, which holds no {STORED}. Check the path; a dataset without them is prepared again, with the same "
        "[dedup]."
    )


def _stored_rows(
    part: Part, result: DedupResult, config: Dedup, index: int, ending: str
) -> Iterator[NDArray[np.uint64]]:
    drop = result.drop[index].load()
    if ending == "units":
        counts: NDArray[Any] = np.fromfile(f"{part.prefix}.counts", "<u4")
        keep = np.repeat(drop == KEPT, counts) & (result.cut[index].load() == 0)
    else:
        keep = drop != EXACT
    width = config.bands if ending == "minhash" else 2
    for start in range(0, len(keep), _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, len(keep))
        rows = read_u64(f"{part.prefix}.{ending}", start * width, stop * width).reshape(-1, width)
        yield np.ascontiguousarray(rows[keep[start:stop]])
