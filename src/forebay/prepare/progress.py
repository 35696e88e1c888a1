"""The record of a preparation's progress: a JSON file that is replaced about once a second while it runs.

`OUT/.work/progress.json` while the run is not complete, of each member of a job array `OUT/.work/members/I.json`, and
`OUT/.progress.json` afterwards; `read_progress` reads either, and makes one record of those of members.
It is no part of the output and never fails a run. Cost: below 0.5 % of the run's CPU time. A record has some 20 kB, at
most 400.

Its keys: docs/reference/preparation-record.md.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError, PrepareError
from forebay.files import HOST, atomic_write
from forebay.prepare.executions import Execution, StepTimes, find_stragglers, merged_steps
from forebay.prepare.failures import Failure
from forebay.prepare.members import cost_of, merge, read_all
from forebay.prepare.rates import Progress, RecentRate, ResultOf, StageProgress, progress_between
from forebay.prepare.stats import StageCount, StageStats, Usage
from forebay.storage.store import FolderStore, Store, open_store

VERSION = 2
RUNNING_FILE, FINISHED_FILE = ".work/progress.json", ".progress.json"
RUN_FILE = ".work/run.json"  # Which run an output is of, while it is not complete.
MEMBERS = ".work/members/"  # The records of the members of a job array: each has its own.
LIVE = "live"  # The folder of what the running tasks of this machine have done.
WRITE_S, BUCKET_WRITE_S = 1.0, 10.0
_MAX_SAMPLES, _MAX_CHARACTERS, _MAX_RULES = 3, 300, 100
MAX_LISTED = 20  # Malformed records, messages, and attempts that failed.
MAX_MACHINES = 100


@dataclass(frozen=True)
class TaskCounts:
    """What a task tells the record, besides its result: bounded copies of its statistics."""

    funnel: dict[str, StageCount]
    seconds: dict[str, float]
    samples: dict[tuple[str, str], list[tuple[str, str]]]
    rejects: list[dict[str, str]]

    @classmethod
    def of(cls, stats: StageStats, rejects: Sequence[dict[str, str]] = ()) -> TaskCounts:
        """Of a task's statistics, and of what it rejected: `where` and `reason`."""
        samples = {
            rule: [(sample.location, sample.text[:_MAX_CHARACTERS]) for sample in samples[:_MAX_SAMPLES]]
            for rule, samples in stats.samples.items()
        }
        return cls(stats.funnel, stats.usage.seconds, samples, list(rejects[:MAX_LISTED]))


class TaskProgress:
    """What a running task has done so far: a small file, replaced once a second, that the record adds to results."""

    def __init__(self, store: Store, name: str, path: str, start: int) -> None:
        """For a task of that name which reads a local file from an offset on; a file elsewhere has no position."""
        self._file = store.directory(LIVE) / name
        self._path, self._start, self._written_at = os.path.realpath(path), start, time.monotonic()

    def update(self, documents: int, documents_kept: int) -> None:
        """Called by the task now and then."""
        if (now := time.monotonic()) - self._written_at >= WRITE_S:
            self._written_at = now
            counts = documents, documents_kept, max(0, _offset_of(self._path) - self._start)
            with suppress(OSError):
                self._file.write_text(" ".join(map(str, counts)))
            record: ProgressRecord | None = getattr(_of_thread, "record", None)
            if record is not None and record.pid == os.getpid():  # the task runs in the process of the run
                record.tick()

    def close(self) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


_of_thread = threading.local()  # The record of the run in this thread.


def _offset_of(path: str) -> int:
    """Where this process reads a file that it has open; 0 if that is not known."""
    with suppress(FileNotFoundError):  # no Linux
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # closed by now
                if str(descriptor.readlink()) == path:
                    return int(Path("/proc/self/fdinfo", descriptor.name).read_text().split()[1])
    return 0


@dataclass
class ProgressRecord:
    """The record of one call; it continues that of an earlier call which did not complete the same output.

    Not thread-safe: everything is called in the thread of the run.
    """

    store: Store
    name: str = ""
    output: str = ""
    num_workers: int = 1
    on_progress: Callable[[Progress], None] | None = None
    on_message: Callable[[str], None] | None = None
    clock: Callable[[], float] = time.monotonic
    workers: Callable[[], list[dict[str, Any]]] = list
    skipped: Mapping[str, int] = field(default_factory=dict)
    member: str = ""  # Of a job array: its number.
    price_per_core_hour: float | None = None
    result_of: ResultOf = "driver"  # What the next report of progress is of.
    step: str = ""  # Of the tasks that run.

    def __post_init__(self) -> None:
        self._stages: dict[str, StageProgress] = {}
        self._funnel: dict[str, StageCount] = {}
        self._samples: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self._rejects: list[dict[str, str]] = []
        self._messages: deque[dict[str, Any]] = deque(maxlen=MAX_LISTED)
        self._usage = Usage()
        self._steps: dict[tuple[str, str], StepTimes] = {}
        self._retries: deque[dict[str, Any]] = deque(maxlen=MAX_LISTED)
        self._lost_machines: dict[str, None] = {}
        self._earlier_stages: dict[str, Mapping[str, Any]] = {}
        self._worker_s, self._counts_all = 0.0, False
        self._engine: Any = None
        self._stage = ""
        self._started_at, self._earlier_s = time.time(), 0.0
        self._first = self._ticked_at = self._written_at = self._counted_at = self.clock()
        self._state = self._error = self._key = ""
        self.pid = os.getpid()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write how the run ends that is in here, if it does not complete."""
        _of_thread.record = self
        try:
            yield
        except BaseException as error:
            self._finish("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", str(error))
            raise
        finally:
            _of_thread.record = None

    def complete(self) -> None:
        """Write the last record, beside the output, which is complete."""
        self._finish("done")

    def leave(self, reason: str) -> None:
        """Write that other processes go on, unless the run is complete."""
        if self.store.exists(RUN_FILE):
            self._finish("ended", reason)

    def start(self, key: str) -> None:
        """Begin to write, and continue the record of an earlier call of that key."""
        self._state, self._key = "running", key
        with suppress(FileNotFoundError, PrepareError, KeyError, TypeError, ValueError):
            earlier = _parse(self.store, self._file, self.store.read(self._file))
            if earlier["key"] == key:
                self._continue(earlier)
        if not self.member:  # else other members may have tasks that run
            shutil.rmtree(self._live, ignore_errors=True)
        self.write()

    @property
    def _file(self) -> str:
        return f"{MEMBERS}{self.member}.json" if self.member else RUNNING_FILE

    @property
    def _live(self) -> Path:
        return self.store.child(".work").directory(LIVE)

    def _continue(self, earlier: Mapping[str, Any]) -> None:
        funnel = {
            entry["stage"]: StageCount(entry["documents_in"], entry["documents_out"]) for entry in earlier["funnel"]
        }
        for entry in earlier["funnel"]:
            funnel[entry["stage"]].dropped.update(entry["dropped"])
            funnel[entry["stage"]].changed.update(entry["changed"])
        samples: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for sample in earlier["samples"]:
            samples.setdefault((sample["stage"], sample["reason"]), []).append((sample["where"], sample["text"]))
        usage = Usage(dict(earlier["cpu_s"]), earlier["peak_bytes"])
        self._started_at, self._earlier_s = float(earlier["started_at"]), float(earlier["wall_s"])
        self._funnel, self._samples, self._usage, self._rejects = funnel, samples, usage, earlier["rejects"]
        self._steps, self._worker_s = merged_steps(earlier["steps"]), earlier["worker_s"]
        self._retries.extend(earlier["retries"])
        self._lost_machines = dict.fromkeys(earlier["lost_machines"])
        self._earlier_stages = {entry["stage"]: entry for entry in earlier["stages"]}

    def watch(self, engine: Any) -> None:
        """Take the engine's ticks, and what its processes do, if it tells."""
        engine.on_tick, self.workers = self.tick, getattr(engine, "running", list)
        self._engine = engine

    def update(self, progress: Progress) -> None:
        """Take how far a stage is, and hand it on with its rates."""
        now, stage = self.clock(), self._stages.get(progress.stage)
        if progress.stage != self._stage or stage is None:
            self._stop_stage()
            self._stage = progress.stage
            stage = self._stages[progress.stage] = self._start_stage(progress)
        is_new = progress.done > stage.progress.done and self.result_of in ("driver", "task")
        stage.add(progress, self.result_of)
        if is_new:
            stage.rate.add(stage.timed, now)
        self._show(stage, now)
        self._write_after(2 * WRITE_S)  # where the engine has no ticks

    def _start_stage(self, progress: Progress) -> StageProgress:
        """A stage from nothing, or with what the record of an earlier call has of it."""
        start = replace(progress, done=0, documents=0, documents_kept=0, bytes=0)
        earlier = self._earlier_stages.get(progress.stage)
        rate = RecentRate(self.num_workers)
        if earlier is None:
            return StageProgress(start, rate, time.time(), start, start, start, is_continued=False)
        own, before = (
            replace(start, done=done, documents=documents, documents_kept=documents_kept)
            for done, documents, documents_kept in (earlier["own"], earlier["before"])
        )
        return StageProgress(start, rate, time.time(), start, own, before, is_continued=True, cpu_s=earlier["cpu_s"])

    def tick(self) -> None:
        """Called while tasks run, about once a second or more often."""
        now, stage = self.clock(), self._stages.get(self._stage)
        if self._state == "running" and stage is not None and now - self._ticked_at >= WRITE_S:
            self._ticked_at = now
            self._add_live(stage, now)
            self._show(stage, now)
        self._write_after(WRITE_S)

    def _add_live(self, stage: StageProgress, now: float) -> None:
        """Add what running tasks have done to the results of a stage."""
        counts = [0, 0, 0]
        files = list(self._live.iterdir()) if self._live.exists() else []
        if self.member:
            names = {worker["name"] for worker in self.workers()}
            files = [file for file in files if file.name in names]
        for file in files:
            with suppress(OSError, ValueError):  # it is just being replaced or removed
                counts = [a + b for a, b in zip(counts, map(int, file.read_text().split()), strict=True)]
        documents, documents_kept, read = counts
        last = stage.progress
        stage.live = replace(
            last, done=min(last.done + read, last.total), documents=last.documents + documents,
            documents_kept=last.documents_kept + documents_kept, bytes=last.bytes + read,
        ) if files else None  # fmt: skip
        stage.rate.add_live(progress_between(stage.timed, stage.live or last, last), len(files), now)

    def _show(self, stage: StageProgress, now: float) -> None:
        if self.on_progress is not None:
            self.on_progress(stage.rate.apply(stage.current, now))

    def _write_after(self, pause_s: float) -> None:
        pause_s = pause_s if isinstance(self.store, FolderStore) else BUCKET_WRITE_S
        if self._state == "running" and self.clock() - self._written_at >= pause_s:
            self.write()

    def add(self, usage: Usage, counts: TaskCounts | None, execution: Execution | None = None) -> None:
        """Count what a task used and, of a task that reads or filters, what it dropped."""
        seconds = sum(usage.seconds.values())
        self._usage.add(usage)
        if counts is not None:
            seconds += sum(counts.seconds.values())
            self._usage.add(Usage(counts.seconds))
            self._count(counts.funnel)
            for rule, samples in counts.samples.items():
                if len(self._samples) < _MAX_RULES or rule in self._samples:
                    self._samples[rule] = [*self._samples.get(rule, []), *samples][:_MAX_SAMPLES]
            self._rejects = [*self._rejects, *counts.rejects][:MAX_LISTED]
        if (stage := self._stages.get(self._stage)) is not None:
            stage.cpu_s += seconds
        if execution is not None:
            self._times.add(execution)
            self._times.cpu_s += seconds

    @property
    def _times(self) -> StepTimes:
        key = (self._stage, self.step)
        return self._steps.setdefault(key, StepTimes(*key))

    def add_failure(self, failure: Failure) -> None:
        """Count an attempt that failed, and list it."""
        if failure.kind != "error":  # which ends the run
            self._times.add_failure(failure.kind)
        if failure.kind == "lost":
            self._lost_machines.setdefault(failure.node or failure.host or "unknown")
        names = ("kind", "task", "reason", "host", "node", "pid", "attempt", "failed_at")
        self._retries.append({"step": self.step, **{name: getattr(failure, name) for name in names}})

    def _count(self, funnel: Mapping[str, StageCount]) -> None:
        for name, count in funnel.items():
            self._funnel.setdefault(name, StageCount()).add(count)

    def set_counts(self, stats: StageStats) -> None:
        """Replace the counts by those of all tasks."""
        self._funnel, self._counts_all = {}, True
        self._count(stats.funnel)
        for rule, samples in stats.samples.items():
            if len(self._samples) < _MAX_RULES or rule in self._samples:
                self._samples[rule] = [(s.location, s.text[:_MAX_CHARACTERS]) for s in samples[:_MAX_SAMPLES]]

    def notify(self, text: str) -> None:
        """Record a message, a repeated one only with its last time, and hand it on."""
        if self._messages and self._messages[-1]["text"] == text:
            self._messages.pop()
        self._messages.append({"at": time.time(), "text": text})
        if self.on_message is not None:
            self.on_message(text)

    def _finish(self, state: str, error: str = "") -> None:
        if self._state == "running":
            self._stop_stage()
            self._state, self._error = state, error
            self.write()

    def _stop_stage(self) -> None:
        if (stage := self._stages.get(self._stage)) is not None:
            stage.stopped_at = time.time()

    def write(self) -> None:
        """Replace the file. While the run lasts it is not flushed to disk, which would keep the run waiting."""
        self._written_at = self.clock()
        is_done = self._state == "done"
        data = json.dumps(self.all_members() if is_done else self.to_json(), ensure_ascii=False).encode(
            "utf-8", "replace"
        )
        with suppress(OSError, ForebayError):  # a full disk, which the run reports
            if isinstance(self.store, FolderStore) and not is_done:
                path = self.store.path / self._file
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(path, data, flush=False)
            else:
                self.store.write(FINISHED_FILE if is_done else self._file, data)

    def all_members(self) -> dict[str, Any]:
        """The record, with those of the members of a job array."""
        own = self.to_json()
        with suppress(OSError, ForebayError):
            members = {name: record for name, record in _read_running(self.store).items() if name != self._file}
            return merge([own, *(record for record in members.values() if record["key"] == self._key)])
        return own

    def _count_time(self, now: float) -> None:
        engine_workers: int = getattr(self._engine, "num_workers", 0)
        self.num_workers = engine_workers or self.num_workers
        self._worker_s += (now - self._counted_at) * self.num_workers
        self._counted_at = now

    def to_json(self) -> dict[str, Any]:
        now = self.clock()
        self._count_time(now)
        counts, stage = list(self._funnel.items()), self._stages.get(self._stage)
        live, last = (stage.current, stage.progress) if stage is not None else (Progress("", 0, 0, ""),) * 2
        workers = self._running()
        record = {
            "version": VERSION, "name": self.name, "output": self.output, "key": self._key,
            "state": self._state, "error": self._error, "started_at": self._started_at, "updated_at": time.time(),
            "wall_s": round(self._earlier_s + now - self._first, 3), "host": HOST, "pid": self.pid,
            "member": self.member, "num_workers": self.num_workers,
            "workers": workers, "stragglers": find_stragglers(workers, self._steps),
            "steps": [times.to_json() for times in self._steps.values()],
            "retries": list(self._retries), "lost_machines": list(self._lost_machines)[:MAX_MACHINES],
            "worker_s": round(self._worker_s, 3), "price_per_core_hour": self.price_per_core_hour,
            "counts_all": self._counts_all, "members": [],
            "stage": self._stage if self._state == "running" else "",
            "stages": [stage.to_json(now) for stage in self._stages.values()],
            "documents_in": (counts[0][1].documents_in if counts else 0) + live.documents - last.documents,
            "documents_out": (counts[-1][1].documents_out if counts else 0) + live.documents_kept - last.documents_kept,
            "malformed": counts[0][1].dropped["malformed"] if counts else 0,
            "funnel": [
                {"stage": name, "documents_in": count.documents_in, "documents_out": count.documents_out,
                 "dropped": count.dropped, "changed": count.changed}
                for name, count in counts
            ],
            "samples": [
                {"stage": stage, "reason": reason, "where": location, "text": text}
                for (stage, reason), samples in self._samples.items() if stage
                for location, text in samples
            ],
            "rejects": self._rejects, "skipped": dict(self.skipped), "messages": list(self._messages),
            "cpu_s": {name: round(seconds, 3) for name, seconds in self._usage.seconds.items()},
            "peak_bytes": self._usage.peak_bytes,
        }  # fmt: skip
        return {**record, **cost_of(record)}

    def _running(self) -> list[dict[str, Any]]:
        if self._state != "running":
            return []
        return [{"step": self.step, "member": self.member, **worker} for worker in self.workers()]


def read_progress(out: str | os.PathLike[str]) -> dict[str, Any]:
    """The record of the preparation in a directory or bucket, as in the module's docstring.

    Raises:
        PrepareError: If there is none, or it is damaged or of a later version.
    """
    store = open_store(out)
    records, finished = _read_running(store), None
    with suppress(FileNotFoundError):
        finished = _parse(store, FINISHED_FILE, store.read(FINISHED_FILE))
    if not records and finished is None:
        raise PrepareError(
            f"{store.url}: expected the directory of a preparation, got one without a record of its progress. `forebay "
            "prepare --out` writes it."
        )
    last = max(records.values(), key=lambda record: record["updated_at"], default=finished)
    assert last is not None
    if finished is not None and (finished["key"] == last["key"] or finished["updated_at"] > last["updated_at"]):
        return finished  # A member may have written its record after the output was complete.
    return merge([record for record in records.values() if record["key"] == last["key"]])


def running_files(store: Store) -> dict[str, bytes]:
    """The records of an unfinished run by name: that of a run, and those of the members of a job array."""
    files = read_all(store, MEMBERS)
    with suppress(FileNotFoundError):
        files[RUNNING_FILE] = store.read(RUNNING_FILE)
    return files


def _read_running(store: Store) -> dict[str, dict[str, Any]]:
    return {name: _parse(store, name, data) for name, data in running_files(store).items()}


def _parse(store: Store, name: str, data: bytes) -> dict[str, Any]:
    path = f"{store.url}/{name}"
    try:
        record = json.loads(data)
    except ValueError as error:
        raise PrepareError(f"{path}: expected the record of a preparation, got something else ({error}).") from error
    version = record.get("version") if isinstance(record, dict) else None
    if version != VERSION:
        raise PrepareError(
            f"{path}: expected a record of version {VERSION}, got {version!r}. Update forebay, or prepare again."
        )
    return dict(record)
