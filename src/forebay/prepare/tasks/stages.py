"""The stages of a recipe over the batches of a task, in a process of their own.

What they drop is counted and sampled; what is malformed is listed. A batch that ends that process, or takes too much
time or memory, is tried again in parts, down to the document.
"""

import hashlib
import json
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from forebay.base import Json
from forebay.errors import ForebayError, PrepareError
from forebay.formats.inputs import InputSplit, ReadOptions
from forebay.formats.records import Record
from forebay.prepare.compiled import work_time
from forebay.prepare.dedup.methods import Dedup
from forebay.prepare.documents import SCHEMA, Stage, StageResult, replace_column
from forebay.prepare.engines.sandbox import Buffer, Limits, set_activity, worker_for
from forebay.prepare.sources import row_position
from forebay.prepare.stats import StageStats, mix64, peak_bytes, text_bytes
from forebay.storage.store import Store

REJECT_CHARACTERS = 200
MAX_REJECTS = 10_000  # Malformed records of one split that are listed; the rest are counted.
_PARTS = 16  # A batch that ends the process of the stages is tried again in so many parts, down to single documents.
_MAX_FAULTS = 32  # After so many documents of a split that did so, whole batches that do are rejected.

Reject = Json


@dataclass(frozen=True)
class StagesTask:
    """Stages over the documents of a split, signed for `dedup` if that is given.

    `earlier` are the names of stages that ran before those of the task; `recipe_key` hashes all else that the result
    depends on.
    """

    split: InputSplit
    stages: tuple[Stage, ...]
    earlier: tuple[str, ...]
    dedup: Dedup | None
    store: Store
    recipe_key: str
    limits: Limits


def run_stages(
    task: StagesTask, batch: pa.RecordBatch, stats: StageStats, reader: "Rejects"
) -> Iterator[pa.RecordBatch]:
    """The documents of a batch that pass the stages of a task, in one batch or in several."""
    job = (task.stages, task.earlier, reader.seed, task.split)
    if not task.stages or _has_own(task.stages):
        started = work_time()
        passed, rejects = _apply(job, batch, stats)
        reader.counted_s += work_time() - started
        reader.reject(rejects)
        yield passed
        return
    size = int(text_bytes(batch).sum())
    seconds, memory_bytes = task.limits.of(size)
    limits = (seconds + 10 * _declared_seconds(task.stages) * size / 1e6, memory_bytes)
    started = work_time()
    worker = worker_for(task.stages, _warm)
    reader.counted_s += (warming_s := work_time() - started)
    stats.usage.count("start", warming_s)
    outcome = worker.call(_apply_packed, job, _packed(batch), limits)
    if not isinstance(outcome, str):
        (counted, rejects), data = outcome
        stats.add(counted)
        reader.reject(rejects)
        yield _unpacked(data)
        return
    rows = batch.num_rows
    if rows == 1 or reader.faults >= _MAX_FAULTS:
        reader.reject_batch(batch, outcome, stats)
        return
    step = -(-rows // _PARTS)
    for start in range(0, rows, step):
        yield from run_stages(task, batch.slice(start, step), stats, reader)


_Job = tuple[tuple[Stage, ...], tuple[str, ...], np.uint64, InputSplit]


def _apply_packed(job: _Job, data: Buffer) -> tuple[tuple[StageStats, list[Reject]], pa.Buffer]:
    stats = StageStats()
    passed, rejects = _apply(job, _unpacked(data), stats)
    stats.usage.peak_bytes = peak_bytes()
    return (stats, rejects), _packed(passed)


def _has_own(stages: tuple[Stage, ...]) -> bool:
    return any(getattr(s, "is_own", not type(s).__module__.startswith("forebay.")) for s in stages)


def _declared_seconds(stages: tuple[Stage, ...]) -> float:
    """For a million bytes of text, besides those of `[limits]`."""
    return sum(getattr(stage, "seconds_per_mb", 0.0) for stage in stages)


def load_for_forks(stages: tuple[Stage, ...]) -> None:
    """Load once what all workers need, if it is quick and starts no threads: not models of others' libraries."""
    if not _has_own(stages) and _declared_seconds(stages) < 1:
        _warm(stages)


def _packed(batch: pa.RecordBatch) -> pa.Buffer:
    size = pa.ipc.get_record_batch_size(batch) + batch.schema.serialize().size + 64
    sink = pa.FixedSizeBufferWriter(buffer := pa.allocate_buffer(size))
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return buffer.slice(0, sink.tell())


def _unpacked(data: Buffer) -> pa.RecordBatch:
    return next(iter(pa.ipc.open_stream(data)))


def _warm(stages: tuple[Stage, ...]) -> None:
    """Have the stages load what they need, on a document without meaning."""
    batch = to_batch([Record(0, text="A few words in one line.\nThere are more of them in another.\n")], ReadOptions())
    for stage in stages:
        with suppress(Exception):  # raised again where it matters
            batch = stage.apply(batch).batch


def _apply(job: _Job, batch: pa.RecordBatch, stats: StageStats) -> tuple[pa.RecordBatch, list[Reject]]:
    """The rows that pass every stage, and what stages found to be malformed.

    Rows that a stage drops are removed before the next one, except between two that share the words of a batch
    (`shares_words`): cutting words again costs more than examining some rows in vain.
    """
    stages, earlier, seed, split = job
    keys = mix64(batch.column("place").to_numpy().astype(np.uint64), seed + np.uint64(1))
    alive = np.ones(batch.num_rows, bool)
    shared = False
    rejects: list[Reject] = []
    for stage, name in zip(stages, stage_names(stages, earlier)):
        shares = bool(getattr(stage, "shares_words", False))
        if not alive.all() and not (shares and shared):
            batch, keys = batch.filter(pa.array(alive)), keys[alive]
            alive = np.ones(batch.num_rows, bool)
        if not alive.any():
            break
        shared = shares
        set_activity(f"stage {name} ")
        position = partial(row_position, split, batch)
        started = work_time()
        result = _checked_result(stage, batch, position)
        stats.usage.count(name, work_time() - started)
        stats.add_result(name, stage.reasons, batch, result, keys, position, alive)
        rejects.extend(_reject(batch, row, problem) for row, problem in result.problems.items())
        added = set(result.batch.schema.names) - set(batch.schema.names)
        batch = result.batch
        if added:
            stats.add_batch("read", batch.select([n for n in batch.schema.names if n in added - {"subset"}]))
        alive &= result.drop < 0
    if not alive.all():
        batch, keys = batch.filter(pa.array(alive)), keys[alive]
    if batch.num_rows:
        stats.add_samples("", "kept", batch, np.arange(batch.num_rows), keys, partial(row_position, split, batch))
        batch = replace_column(batch, "text_bytes", pa.array(text_bytes(batch)))
    return batch, rejects


def stage_names(stages: Iterable[Stage], earlier: Sequence[str] = ()) -> list[str]:
    """Names that differ from one another and from `earlier` ones: a stage's second occurrence is `length#2`."""
    names = list(earlier)
    for stage in stages:
        count = sum(name.split("#")[0] == stage.name for name in names)
        names.append(f"{stage.name}#{count + 1}" if count else stage.name)
    return names[len(earlier) :]


def _reject(batch: pa.RecordBatch, row: int, reason: str) -> Reject:
    position, location, text = (batch.column(name)[row].as_py() for name in ("place", "where", "text"))
    return {"place": position, "where": location, "reason": reason, "text": text[:REJECT_CHARACTERS]}


def _checked_result(stage: Stage, batch: pa.RecordBatch, position: Callable[[int], str]) -> StageResult:
    try:
        result = stage.apply(batch)
        rows, marks = result.batch.num_rows, len(result.drop)
    except (ForebayError, MemoryError, OSError, ImportError):
        raise
    except Exception as error:
        raise PrepareError(
            f"{position(0)}: stage {stage.name} failed here or up to {batch.num_rows} documents later: "
            f"{type(error).__name__}: {error} ({_raising_line(error)}). Fix the stage, or remove it from the recipe."
        ) from error
    if rows != batch.num_rows or marks != rows:
        raise PrepareError(
            f"{position(0)}: stage {stage.name}: expected a result for each of {batch.num_rows} documents, got a batch "
            f"of {rows} and {marks} marks. A stage marks rows as dropped and removes none."
        )
    for reason, measure in result.measures.items():
        if reason not in stage.reasons or np.shape(measure.values) != (rows,):
            raise PrepareError(
                f"{position(0)}: stage {stage.name}: expected a measure of one of its reasons, a number "
                f"for each of {rows} documents, got {reason!r} of shape {np.shape(measure.values)}. Fix the stage."
            )
    return result


def _raising_line(error: Exception) -> str:
    """Return where a stage raised: the innermost line that is not in a library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames[1:] if "site-packages" not in frame.filename] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"


def seed_of(split: InputSplit) -> np.uint64:
    """A hash of the first bytes of the sources, as the rest is not read yet; without paths and times."""
    values = [*(f"{s.sha256} {s.bytes}" for s in split.files), str(split.start)]
    return np.uint64(int.from_bytes(hashlib.sha256(" ".join(values).encode()).digest()[:8], "little"))


class Rejects:
    """The malformed documents of a split."""

    def __init__(self, split: InputSplit) -> None:
        self.seed = seed_of(split)
        self.malformed = self.faults = 0
        self.counted_s = 0.0  # CPU seconds of this process that the statistics have under a name.
        self.rejects: list[Reject] = []

    def reject(self, rejects: Iterable[Reject]) -> None:
        """Count malformed documents, and list them up to MAX_REJECTS."""
        for reject in rejects:
            self.malformed += 1
            if self.malformed <= MAX_REJECTS:
                self.rejects.append(reject)

    def reject_batch(self, batch: pa.RecordBatch, reason: str, stats: StageStats) -> None:
        """Reject documents over which the process of the stages ended."""
        self.faults += 1
        count = stats.stage("read")
        count.documents_out -= batch.num_rows
        count.bytes_out -= int(text_bytes(batch).sum())
        count.dropped["malformed"] += batch.num_rows
        self.reject(_reject(batch, row, reason) for row in range(batch.num_rows))


def to_batch(records: list[Record], options: ReadOptions) -> pa.RecordBatch:
    attributes = {f.name: "index" if f.name == "place" else f.name for f in SCHEMA}
    columns = {f.name: pa.array([getattr(r, attributes[f.name]) for r in records], f.type) for f in SCHEMA}
    columns["where"] = pa.array([r.location for r in records], pa.large_string())
    for index, (name, kind) in enumerate(options.columns.items()):
        missing, column_type = (math.nan, pa.float64()) if kind == "number" else ("", pa.large_string())
        columns[name] = pa.array([r.values[index] if r.values else missing for r in records], column_type)
    return pa.RecordBatch.from_pydict(columns)


def json_line(record: Reject) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
