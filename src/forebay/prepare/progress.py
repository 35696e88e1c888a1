"""The record of a preparation's progress: a JSON file that is replaced about once a second while it runs.

`OUT/.work/progress.json` while the run is not complete, `OUT/.progress.json` afterwards; `read_progress` reads either.
It is no part of the output and never fails a run. Cost: below 0.5 % of the run's CPU time. A record has some 20 kB, at
most 400.

Schema, version 1 (times in seconds since 1970, durations in seconds, sizes in bytes):

    version, name, output   1; the recipe's name; `dataset`, `text`, `lm` or `report`
    state                   `running`, `done`, `failed` or `interrupted`; `interrupted` too where the process is gone
    error                   the error's text, "" without one
    started_at, updated_at  of the first call for this output, and of this record. In a run of one process `updated_at`
                            may be as old as its task
    wall_s                  of all calls, without the time between them
    host, pid               of the process that runs it
    num_workers, workers    processes at most; each that has a task: {pid, task}, [] where the engine does not tell
    stage                   the stage that runs, "" before the first
    stages                  in their order: {stage, done, total, unit, started_at, stopped_at (null: it runs), cpu_s,
                            documents_in, documents_out, documents_per_s, bytes_per_s, remaining_s}. The last three are
                            of the last minute, and null until twice as many tasks as processes are done, or all
                            processes have read for ten seconds. Text counts tasks that run, too
    documents_in, documents_out, malformed   read, kept by all rules so far, and malformed; of tasks that run the first
                            two alone, which the funnel does not count yet
    funnel                  in the order of the recipe: {stage, documents_in, documents_out, dropped: {reason: n},
                            changed: {kind: n}}
    samples                 up to 3 of each rule: {stage, reason, where, text}, text of at most 300 characters, as it is
                            in the input: readers escape it
    rejects                 up to 20 of the malformed: {where, reason}
    skipped                 inputs that are not read, {reason: n}
    messages                the last 20: {at, text}, of a worker that died or of an input that is left out
    cpu_s                   CPU seconds by rule or step, {name: seconds}; of kernels that were compiled none
    peak_bytes              the largest memory of a worker
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from forebay.errors import ForebayError, PrepareError
from forebay.files import HOST, atomic_write, is_running
from forebay.prepare.stats import StageCount, StageStats, Usage
from forebay.storage.store import FolderStore, Store, open_store

VERSION = 1
RUNNING_FILE, FINISHED_FILE = ".work/progress.json", ".progress.json"
LIVE = "live"  # The folder of what the running tasks of this machine have done.
WRITE_S, BUCKET_WRITE_S = 1.0, 10.0
_WINDOW_S = 60.0  # Of recent results, from which rates follow.
_MIN_LIVE_S = 10.0  # So long all processes must have had a task that runs, for a rate without results.
_MOMENT_S = 0.05  # Results so near to each other are at one moment.
_MAX_SAMPLES, _MAX_CHARACTERS, _MAX_RULES = 3, 300, 100
MAX_LISTED = 20  # Malformed records, and messages.


@dataclass(frozen=True)
class Progress:
    """How far a stage is. `text` counts bytes of input, and documents read and kept; others count their own units.

    Args:
        documents, documents_kept, bytes: So far, of `text` and `encode`.
        remaining_s: Of this stage; None until enough of it is done.
        documents_per_s, bytes_per_s: Of the last minute, None likewise.
    """

    stage: str
    done: int
    total: int
    unit: str
    documents: int = 0
    documents_kept: int = 0
    bytes: int = 0
    remaining_s: float | None = None
    documents_per_s: float | None = None
    bytes_per_s: float | None = None


class RecentRate:
    """What a stage does in a second, by the results of the last minute.

    Tasks start together, and the first of each process pay for imports and kernels: the first results, one a process,
    do not count, and there is no rate until as many more (three at least) arrived.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers, self._results = num_workers, 0
        self._is_live, self._first_live_at = False, math.inf
        self._points: deque[tuple[float, Progress]] = deque()  # Moments, and what was done by then.

    def add(self, progress: Progress, now: float) -> None:
        """Add a result: what is done with it, at a moment of a monotonic clock."""
        self._results += 1
        if self._results >= self._num_workers and not self._is_live:
            self._add_point(progress, now)

    def add_live(self, progress: Progress, tasks: int, now: float) -> None:
        """Add what is done by results and by `tasks` that run: results alone do not count while there are such."""
        self._is_live = tasks > 0
        if self._is_live and self._results + tasks >= self._num_workers:
            self._first_live_at = min(self._first_live_at, now)
            self._add_point(progress, now)

    def _add_point(self, progress: Progress, now: float) -> None:
        if self._points and now - self._points[-1][0] < _MOMENT_S:
            self._points[-1] = (self._points[-1][0], progress)
        else:
            self._points.append((now, progress))
        while len(self._points) > 3 and self._points[1][0] < now - _WINDOW_S:
            self._points.popleft()

    def apply(self, progress: Progress, now: float) -> Progress:
        """The progress with its rates. They fall where no result arrives for longer than between two before."""
        is_known = self._results >= self._num_workers + max(self._num_workers, 3)
        is_known |= now - self._first_live_at >= _MIN_LIVE_S
        if not is_known or len(self._points) < 2 or progress.unit == " steps":
            return progress
        moments = [moment for moment, _ in self._points]
        (then, first), (last_at, last) = self._points[0], self._points[-1]
        usual_s = max(after - before for before, after in pairwise(moments))
        waited_s = min(now - last_at, usual_s)
        elapsed_s = now - then - waited_s
        done_per_s = (last.done - first.done) / elapsed_s
        return replace(
            progress,
            remaining_s=max(0.0, (progress.total - progress.done) / done_per_s - waited_s) if done_per_s else None,
            documents_per_s=(last.documents - first.documents) / elapsed_s if last.documents else None,
            bytes_per_s=(last.bytes - first.bytes) / elapsed_s if last.bytes else None,
        )


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
class _Stage:
    progress: Progress
    rate: RecentRate
    started_at: float
    stopped_at: float | None = None
    cpu_s: float = 0.0
    live: Progress | None = None  # With what running tasks have done, if they tell.

    @property
    def current(self) -> Progress:
        """The last results, or more."""
        live = self.live
        return live if live is not None and live.done >= self.progress.done and live.documents else self.progress

    def to_json(self, now: float) -> dict[str, Any]:
        shown = self.rate.apply(self.current, now) if self.stopped_at is None else self.progress
        return {
            "stage": shown.stage, "done": shown.done, "total": shown.total, "unit": shown.unit.strip(),
            "started_at": self.started_at, "stopped_at": self.stopped_at, "cpu_s": round(self.cpu_s, 3),
            "documents_in": shown.documents, "documents_out": shown.documents_kept,
            "documents_per_s": _rounded(shown.documents_per_s), "bytes_per_s": _rounded(shown.bytes_per_s),
            "remaining_s": _rounded(shown.remaining_s),
        }  # fmt: skip


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
    is_replay: bool = False  # Results of an earlier call are reported: they take no time.

    def __post_init__(self) -> None:
        self._stages: dict[str, _Stage] = {}
        self._funnel: dict[str, StageCount] = {}
        self._samples: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self._rejects: list[dict[str, str]] = []
        self._messages: deque[dict[str, Any]] = deque(maxlen=MAX_LISTED)
        self._usage = Usage()
        self._stage = ""
        self._started_at, self._earlier_s = time.time(), 0.0
        self._first = self._ticked_at = self._written_at = self.clock()
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
        """Write that the run goes on elsewhere, or later."""
        self._finish("interrupted", reason)

    def start(self, key: str) -> None:
        """Begin to write, and continue the record of an earlier call of that key."""
        self._state, self._key = "running", key
        with suppress(FileNotFoundError, PrepareError, KeyError, TypeError, ValueError):
            earlier = _read(self.store, RUNNING_FILE)
            if earlier["key"] == key:
                self._continue(earlier)
        shutil.rmtree(self._live, ignore_errors=True)
        self.write()

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

    def watch(self, engine: Any) -> None:
        """Take the engine's ticks, and what its processes do, if it tells."""
        engine.on_tick, self.workers = self.tick, getattr(engine, "running", list)

    def update(self, progress: Progress) -> None:
        """Take how far a stage is, and hand it on with its rates."""
        now, stage = self.clock(), self._stages.get(progress.stage)
        if progress.stage != self._stage or stage is None:
            self._stop_stage()
            self._stage = progress.stage
            stage = self._stages[progress.stage] = _Stage(progress, RecentRate(self.num_workers), time.time())
        if progress.done > stage.progress.done and not self.is_replay:
            stage.rate.add(progress, now)
        stage.progress = progress
        self._show(stage, now)
        self._write_after(2 * WRITE_S)  # where the engine has no ticks

    def tick(self) -> None:
        """Called while tasks run, about once a second or more often."""
        now, stage = self.clock(), self._stages.get(self._stage)
        if self._state == "running" and stage is not None and now - self._ticked_at >= WRITE_S:
            self._ticked_at = now
            self._add_live(stage, now)
            self._show(stage, now)
        self._write_after(WRITE_S)

    def _add_live(self, stage: _Stage, now: float) -> None:
        """Add what running tasks have done to the results of a stage."""
        counts = [0, 0, 0]
        files = list(self._live.iterdir()) if self._live.exists() else []
        for file in files:
            with suppress(OSError, ValueError):  # it is just being replaced or removed
                counts = [a + b for a, b in zip(counts, map(int, file.read_text().split()), strict=True)]
        documents, documents_kept, read = counts
        last = stage.progress
        stage.live = replace(
            last, done=min(last.done + read, last.total), documents=last.documents + documents,
            documents_kept=last.documents_kept + documents_kept, bytes=last.bytes + read,
        ) if files else None  # fmt: skip
        stage.rate.add_live(stage.live or last, len(files), now)

    def _show(self, stage: _Stage, now: float) -> None:
        if self.on_progress is not None:
            self.on_progress(stage.rate.apply(stage.current, now))

    def _write_after(self, pause_s: float) -> None:
        pause_s = pause_s if isinstance(self.store, FolderStore) else BUCKET_WRITE_S
        if self._state == "running" and self.clock() - self._written_at >= pause_s:
            self.write()

    def add(self, usage: Usage, counts: TaskCounts | None) -> None:
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

    def _count(self, funnel: Mapping[str, StageCount]) -> None:
        for name, count in funnel.items():
            self._funnel.setdefault(name, StageCount()).add(count)

    def set_counts(self, stats: StageStats) -> None:
        """Replace the counts by those of all tasks."""
        self._funnel = {}
        self._count(stats.funnel)
        for rule, samples in stats.samples.items():
            if len(self._samples) < _MAX_RULES or rule in self._samples:
                self._samples[rule] = [(s.location, s.text[:_MAX_CHARACTERS]) for s in samples[:_MAX_SAMPLES]]

    def notify(self, text: str) -> None:
        """Record a message, and hand it on."""
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
        data = json.dumps(self.to_json(), ensure_ascii=False).encode("utf-8", "replace")
        with suppress(OSError, ForebayError):  # a full disk, which the run reports
            is_done = self._state == "done"
            if isinstance(self.store, FolderStore) and not is_done:
                path = self.store.path / RUNNING_FILE
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(path, data, flush=False)
            else:
                self.store.write(FINISHED_FILE if is_done else RUNNING_FILE, data)

    def to_json(self) -> dict[str, Any]:
        now = self.clock()
        counts, stage = list(self._funnel.items()), self._stages.get(self._stage)
        live, last = (stage.current, stage.progress) if stage is not None else (Progress("", 0, 0, ""),) * 2
        return {
            "version": VERSION, "name": self.name, "output": self.output, "key": self._key,
            "state": self._state, "error": self._error, "started_at": self._started_at, "updated_at": time.time(),
            "wall_s": round(self._earlier_s + now - self._first, 3), "host": HOST, "pid": self.pid,
            "num_workers": self.num_workers, "workers": self.workers() if self._state == "running" else [],
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


def read_progress(out: str | os.PathLike[str]) -> dict[str, Any]:
    """The record of the preparation in a directory or bucket, as in the module's docstring.

    Raises:
        PrepareError: If there is none, or it is damaged or of a later version.
    """
    store = open_store(out)
    for name in (RUNNING_FILE, FINISHED_FILE):
        with suppress(FileNotFoundError):
            record = _read(store, name)
            break
    else:
        raise PrepareError(
            f"{store.url}: expected the directory of a preparation, got one without a record of its progress. `forebay "
            "prepare --out` writes it."
        )
    if record["state"] == "running" and record["host"] == HOST and not is_running(record["pid"]):
        record |= {"state": "interrupted", "error": "the process is gone: killed, or out of memory", "workers": []}
    return record


def _read(store: Store, name: str) -> dict[str, Any]:
    path = f"{store.url}/{name}"
    try:
        record = json.loads(store.read(name))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise PrepareError(f"{path}: expected the record of a preparation, got something else ({error}).") from error
    version = record.get("version") if isinstance(record, dict) else None
    if version != VERSION:
        raise PrepareError(f"{path}: expected a record of version {VERSION}, got {version!r}. Update forebay.")
    return dict(record)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
