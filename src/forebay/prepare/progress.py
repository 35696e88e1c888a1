"""The progress of a preparation: how far its stages are, what its tasks did and which failed, and the record of it.

A record is a JSON file that is replaced about once a second: `OUT/.work/progress.json` while the run is not complete,
of each member of a job array `OUT/.work/members/I.json`, and `OUT/.progress.json` afterwards; `read_progress` reads
either, and makes one record of those of members. It is not part of the output, never fails a run, and is bounded.

Its keys: docs/reference/preparation-record.md.
"""

import json
import os
import textwrap
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from forebay.base import Json
from forebay.errors import ForebayError, PrepareError, printable
from forebay.files import HOST, is_running
from forebay.prepare.charts import cut
from forebay.prepare.forecast import Progress, StageProgress, expected_s
from forebay.prepare.stats import StageCount, StageStats, Usage, peak_bytes
from forebay.storage.store import Store, open_store
from forebay.units import format_bytes

VERSION = 3
RUNNING_FILE, FINISHED_FILE = ".work/progress.json", ".progress.json"
RUN_FILE = ".work/run.json"  # Which run an output is of, while it is not complete.
MEMBERS = ".work/members/"  # The records of the members of a job array: each has its own.
FAILED = "failed/"  # This folder of a run's work keeps the last attempt of each failed task as `STEP-NAME.json`.
WRITE_S = 1.0
SILENT_S = 60.0  # A process that has not written its record for so long is named.
MAX_LISTED = 20  # Malformed records, messages, and attempts that failed.
LOG_BYTES = 16 << 10  # As much is kept of a process's last output, and of a traceback.
_RECORDED = (
    "name", "output", "key", "state", "error", "started_at", "pid", "member", "num_workers", "tasks", "num_retries",
    "counts_all", "samples", "rejects", "code",
)  # fmt: skip
"""Keys of a record that are attributes of a `ProgressRecord`."""
_MAX_SAMPLES, _MAX_CHARACTERS, _MAX_RULES, _MAX_FAILURES, _MAX_INPUTS = 3, 300, 100, 100, 20
Record = Mapping[str, Any]


def label(task: Any) -> str:
    """Return the task's `label`, else its `name`, else its repr; at most 120 characters."""
    return cut(str(getattr(task, "label", None) or getattr(task, "name", None) or task), 120)


def name_of(task: Any) -> str:
    """Return the task's `name` without a folder; "" without one."""
    return str(getattr(task, "name", "")).rpartition("/")[2]


@dataclass(frozen=True)
class Failure:
    """An attempt that failed.

    Args:
        kind: `error`: the task raised one; `memory`: it ran out of it; `died`: its process died; `lost`: its machine is
            gone, or the process that had claimed it gives no sign.
        attempt: From 1, over all processes and calls.
        log: The last that the process wrote to standard error, "" where the engine does not have it.
    """

    kind: Literal["error", "memory", "died", "lost"]
    task: str
    reason: str
    step: str = ""
    inputs: list[str] = field(default_factory=list)
    host: str = ""
    node: str = ""
    pid: int = 0
    attempt: int = 1
    failed_at: float = field(default_factory=time.time)
    traceback: str = ""
    log: str = ""
    peak_bytes: int = 0


def failure_of(error: Exception, label: str) -> Failure:
    """Return the failure of a task in this process, by its exception."""
    lines = "".join(traceback.format_exception(error))[-LOG_BYTES:]
    kind: Literal["error", "memory"] = "memory" if isinstance(error, MemoryError) else "error"
    reason, pid = f"{type(error).__name__}: {error}", os.getpid()
    return Failure(kind, label, reason, host=HOST, pid=pid, traceback=lines, peak_bytes=peak_bytes())


def write_failure(work: Store, step: str, name: str, task: Any, failure: Failure) -> None:
    """Write the object of a failed attempt; without an error, as there is one to report already.

    Who has the failure writes it: the task's process, which may share nothing but the store, or the engine.
    """
    path = f"{FAILED}{step}-{name}.json"
    inputs = [file.path for file in getattr(getattr(task, "split", None), "files", ())[:_MAX_INPUTS]]
    with suppress(OSError, ForebayError):
        attempt = 1
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            attempt = json.loads(work.read(path))["attempt"] + 1
        data = asdict(replace(failure, step=step, inputs=inputs, attempt=attempt))
        work.write(path, json.dumps(data).encode("utf-8", "replace"))


def read_failures(work: Store) -> list[Json]:
    """Return the last failed attempt of each task that is not finished, latest first; at most 100."""
    failures = []
    for path in list(work.sizes(FAILED))[:_MAX_FAILURES]:
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            entry = json.loads(work.read(path))
            name = path.removeprefix(f"{FAILED}{entry['step']}-")
            if not work.exists(f"done/{entry['step']}/{name}"):
                failures.append({**asdict(Failure("error", "", "")), **entry})
    return sorted(failures, key=lambda entry: -entry["failed_at"])


def render_failures(failures: Sequence[Record]) -> str:
    """Return failed tasks for a terminal: each with where it ran, its traceback and the last output of its process."""
    lines: list[str] = []
    for failure in failures:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure["failed_at"]))
        lines += ["", f"failed task: {failure['task']}"]
        lines.append(
            f"  {failure['step']}, attempt {failure['attempt']}, {moment}, process {failure['pid']} of "
            f"{failure['host'] or 'an unknown host'} {failure['node']}".rstrip()
        )
        if failure["peak_bytes"]:
            lines.append(f"  memory of the process: at most {format_bytes(failure['peak_bytes'])}")
        lines += textwrap.wrap(failure["reason"], 100, initial_indent="  ", subsequent_indent="  ")
        lines += [f"  input: {path}" for path in failure["inputs"]]
        for title, text in (("traceback", failure["traceback"]), ("standard error, the last of it", failure["log"])):
            if text:
                lines += [f"  {title}:", *(f"    {line}" for line in text.rstrip().splitlines())]
    return "\n".join(map(printable, lines))


@dataclass(frozen=True)
class TaskCounts:
    """What a task tells the record, besides its result: bounded copies of its statistics."""

    funnel: dict[str, StageCount]
    seconds: dict[str, float]
    samples: list[dict[str, str]]
    rejects: list[dict[str, str]]

    @classmethod
    def of(cls, stats: StageStats, rejects: Sequence[dict[str, str]] = ()) -> "TaskCounts":
        """Of a task's statistics, and of what it rejected: `where` and `reason`."""
        samples = [
            {"stage": stage, "reason": reason, "where": sample.location, "text": sample.text[:_MAX_CHARACTERS]}
            for (stage, reason), group in stats.samples.items() if stage
            for sample in group[:_MAX_SAMPLES]
        ]  # fmt: skip
        return cls(stats.funnel, stats.usage.seconds, samples, list(rejects[:MAX_LISTED]))


_of_thread = threading.local()  # The record of the run in this thread.


def tick() -> None:
    """Let the record of this process's run be written while a task runs in its thread."""
    record: ProgressRecord | None = getattr(_of_thread, "record", None)
    if record is not None and record.pid == os.getpid():
        record.tick()


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
    workers: Callable[[], list[Json]] = list
    skipped: Mapping[str, int] = field(default_factory=dict)
    member: str = ""  # Of a job array: its number.
    result_of: str = "task"  # What the next result is of: "task" of this process, "earlier", "other" processes.
    task_s: float = 0.0  # How long the task took whose result comes next.
    step: str = ""  # Of the tasks that run.
    unfinished: str = ""  # An unfinished run that is there, which is not told yet.

    def __post_init__(self) -> None:
        self._stages: dict[str, StageProgress] = {}
        self._stage: StageProgress | None = None
        self._planned: tuple[str, ...] = ()
        self._funnel: dict[str, StageCount] = {}
        self.samples: list[dict[str, str]] = []
        self.rejects: list[dict[str, str]] = []
        self._messages: deque[Json] = deque(maxlen=MAX_LISTED)
        self._retries: deque[Json] = deque(maxlen=MAX_LISTED)
        self._usage, self.tasks, self.num_retries, self.counts_all = Usage(), 0, 0, False
        self.started_at, self._earlier_s = time.time(), 0.0
        self._first = self._ticked_at = self._written_at = self.clock()
        self.state = self.error = self.key = ""
        self.code: dict[str, list[str]] = {}
        self._engine: Any = None
        self.pid = os.getpid()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Write how the run ends that is in here, if it does not complete."""
        before, _of_thread.record = getattr(_of_thread, "record", None), self
        try:
            yield
        except BaseException as error:
            self.finish("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", str(error))
            raise
        finally:
            _of_thread.record = before

    def start(self, key: str) -> None:
        """Begin to write, and continue the record of an earlier call of that key."""
        self.state, self.key = "running", key
        with suppress(FileNotFoundError, PrepareError, KeyError, TypeError, ValueError):
            earlier = _parse(self.store, self._file, self.store.read(self._file))
            if earlier["key"] == key:
                self._funnel, self._earlier_s = _funnel([earlier]), float(earlier["wall_s"])
                self._usage = Usage(dict(earlier["cpu_s"]), earlier["peak_bytes"])
                self._retries.extend(earlier["retries"])
                for name in ("samples", "rejects", "tasks", "num_retries", "started_at"):
                    setattr(self, name, earlier[name])
        self.write()

    @property
    def _file(self) -> str:
        return f"{MEMBERS}{self.member}.json" if self.member else RUNNING_FILE

    def watch(self, engine: Any) -> None:
        """Take the engine's ticks, and what its processes do, if it tells."""
        engine.on_tick, self.workers = self.tick, getattr(engine, "running", list)
        self._engine = engine

    def plan(self, *stages: str) -> None:
        """Name the stages whose time counts, in their order, from the first that reads text.

        Others, such as one that compiles before it, count for themselves and change no pace.
        """
        self._planned = stages

    def begin(self, name: str, remaining: Mapping[str, int], unit: str, tasks: int) -> None:
        """Begin a stage of so many tasks, or add tasks to it; `remaining` are their units by kind."""
        if self._stage is None or self._stage.name != name:
            self._stop_stage()
            self._stage = self._stages.setdefault(name, StageProgress(name, unit, self.clock()))
            self._stage.stopped_at = None
        self._stage.add(remaining, tasks)
        self._show()

    def advance(
        self, done: int, kind: str = "", documents: int = 0, documents_kept: int = 0, kept_bytes: int = 0
    ) -> None:
        """Count a finished task of the stage that runs."""
        assert self._stage is not None
        counts = [done, documents, documents_kept]
        self._stage.advance(counts, kind, self.result_of, self.task_s, self.clock(), kept_bytes)
        self._show()
        self._write_after(2 * WRITE_S)  # where the engine has no ticks

    def tick(self, done: int = 0) -> None:
        """Called while tasks run, about once a second or more often; `done` are units of a task of this process."""
        now, stage = self.clock(), self._stage
        if self.state == "running" and stage is not None and now - self._ticked_at >= WRITE_S:
            self._ticked_at = now
            if stage.unit == "B":
                stage.show(stage.done[0] + (done or sum(map(_read_bytes, self.workers()))))
            self._show()
        self._write_after(WRITE_S)

    def _show(self) -> None:
        if self.on_progress is not None and self._stage is not None:
            self.on_progress(self._stage.progress(self.clock(), self._remaining_s()))

    def _remaining_s(self) -> float | None:
        """Return how long the planned stages still take; None if it is not known."""
        stage, planned = self._stage, self._planned
        text = self._stages.get(planned[0]) if planned else stage
        if self.state != "running" or stage is None or text is None:
            return None
        kept_bytes, num_workers = text.expected_kept_bytes(), self.num_workers
        expected = 0.0 if stage is text else expected_s(stage.name, kept_bytes, num_workers)
        remaining_s = stage.remaining_s(num_workers, self.clock(), expected)
        later = planned[1 + max((i for i, name in enumerate(planned) if name in self._stages), default=0) :]
        others_s = sum(expected_s(name, kept_bytes, num_workers) for name in later)
        return None if remaining_s is None else remaining_s + others_s

    def _write_after(self, pause_s: float) -> None:
        if self.state == "running" and self.clock() - self._written_at >= max(pause_s, self.store.write_pause_s):
            self.write()

    def add(self, usage: Usage, counts: TaskCounts | None, seconds: float | None = None) -> None:
        """Count what a task of this process used and, of a task that reads or filters, what it dropped."""
        self._usage.add(usage)
        cpu_s = sum(usage.seconds.values())
        if counts is not None:
            self._usage.add(Usage(counts.seconds))
            cpu_s += sum(counts.seconds.values())
            self._count(counts.funnel)
            self._sample(counts.samples)
            self.rejects = [*self.rejects, *counts.rejects][:MAX_LISTED]
        if self._stage is not None:
            self._stage.cpu_s += cpu_s
        self.tasks += seconds is not None
        self.task_s = seconds or 0.0

    def add_failure(self, failure: Failure) -> None:
        """Count an attempt that failed, and list it."""
        self.num_retries += failure.kind != "error"  # which ends the run
        names = ("kind", "task", "reason", "host", "node", "pid", "attempt", "failed_at")
        self._retries.append({"step": self.step, **{name: getattr(failure, name) for name in names}})

    def _count(self, funnel: Mapping[str, StageCount]) -> None:
        for name, count in funnel.items():
            self._funnel.setdefault(name, StageCount()).add(count)

    def _sample(self, samples: Sequence[dict[str, str]]) -> None:
        self.samples = _limited([*self.samples, *samples])

    def set_counts(self, stats: StageStats) -> None:
        """Replace the counts by those of all tasks."""
        self._funnel, self.counts_all = {}, True
        self._count(stats.funnel)
        self._sample(TaskCounts.of(stats).samples)

    def notify(self, text: str) -> None:
        """Record a message, a repeated one only with its last time, and hand it on."""
        if self._messages and self._messages[-1]["text"] == text:
            self._messages.pop()
        self._messages.append({"at": time.time(), "text": text})
        if self.on_message is not None:
            self.on_message(text)

    def finish(self, state: str, error: str = "") -> None:
        """Write how the run ended; if it is `done`, beside the output, which is complete."""
        if self.state == "running":
            self._stop_stage()
            self.state, self.error = state, error
            self.write()

    def _stop_stage(self) -> None:
        if self._stage is not None:
            self._stage.stopped_at = time.time()

    def write(self) -> None:
        """Replace the file. While the run lasts it is not flushed to disk, which would keep the run waiting."""
        self._written_at = self.clock()
        is_done = self.state == "done"
        record = self.all_members() if is_done else self.to_json()
        data = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace")
        with suppress(OSError, ForebayError):  # a full disk, which the run reports
            self.store.write(FINISHED_FILE if is_done else self._file, data, flush=is_done)

    def all_members(self) -> Json:
        """Return the record, with those of the members of a job array."""
        own = self.to_json()
        with suppress(OSError, ForebayError):
            members = {name: record for name, record in _read_running(self.store).items() if name != self._file}
            return merge([own, *(record for record in members.values() if record["key"] == self.key)])
        return own

    def to_json(self) -> Json:
        """Return the record of this process."""
        now, counts = self.clock(), list(self._funnel.values())
        self.num_workers = getattr(self._engine, "num_workers", 0) or self.num_workers
        is_running = self.state == "running"
        return {
            **{name: getattr(self, name) for name in _RECORDED}, "version": VERSION, "updated_at": time.time(),
            "wall_s": round(self._earlier_s + now - self._first, 3), "host": HOST, "members": [],
            "workers": [{"step": self.step, "member": self.member, **w} for w in self.workers() if is_running],
            "retries": list(self._retries), "skipped": dict(self.skipped), "messages": list(self._messages),
            "stage": self._stage.name if is_running and self._stage is not None else "",
            "remaining_s": self._remaining_s(), "stages": [stage.to_json(now) for stage in self._stages.values()],
            "documents_in": counts[0].documents_in if counts else 0,
            "documents_out": counts[-1].documents_out if counts else 0,
            "malformed": counts[0].dropped["malformed"] if counts else 0,
            "funnel": _funnel_to_json(self._funnel),
            "cpu_s": {name: round(seconds, 3) for name, seconds in self._usage.seconds.items()},
            "peak_bytes": self._usage.peak_bytes,
        }  # fmt: skip


def _read_bytes(worker: Record) -> int:
    """Return how far a process of this machine has read the file of its task; 0 if that is not known."""
    path, start = worker.get("input", ("", 0))
    with suppress(OSError):  # elsewhere, not Linux, or just closed
        for descriptor in Path(f"/proc/{worker['pid']}/fd").iterdir() if path else ():
            if str(descriptor.readlink()) == path:
                position = Path(f"/proc/{worker['pid']}/fdinfo", descriptor.name).read_text().split()[1]
                return max(0, int(position) - int(start))
    return 0


def _limited(samples: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return the first samples of each rule, each document once."""
    groups: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for sample in samples:
        groups.setdefault((sample["stage"], sample["reason"]), {}).setdefault(sample["where"], sample)
    return [sample for group in list(groups.values())[:_MAX_RULES] for sample in list(group.values())[:_MAX_SAMPLES]]


def _funnel(records: Sequence[Record]) -> dict[str, StageCount]:
    """Return the sum of the funnels of records."""
    funnel: dict[str, StageCount] = {}
    for entry in (entry for record in records for entry in record["funnel"]):
        dropped, changed = Counter[str](entry["dropped"]), Counter[str](entry["changed"])
        count = StageCount(entry["documents_in"], entry["documents_out"], dropped=dropped, changed=changed)
        funnel.setdefault(entry["stage"], StageCount()).add(count)
    return funnel


def _funnel_to_json(funnel: Mapping[str, StageCount]) -> list[Json]:
    names = ("documents_in", "documents_out", "dropped", "changed")
    return [{"stage": stage, **{name: getattr(count, name) for name in names}} for stage, count in funnel.items()]


def read_progress(out: str | os.PathLike[str]) -> Json:
    """Return the record of the preparation in a directory or bucket, as in the module's docstring.

    Raises:
        PrepareError: If there is none, or it is damaged or of another version.
    """
    store = open_store(out)
    records, finished = _read_running(store), None
    with suppress(FileNotFoundError):
        finished = _parse(store, FINISHED_FILE, store.read(FINISHED_FILE))
    if not records and finished is None:
        raise PrepareError(
            f"{store.url}: expected the record of a run (*.views.jsonl), or the output of `forebay prepare`, got a "
            "folder with neither."
        )
    last = max(records.values(), key=lambda record: record["updated_at"], default=finished)
    assert last is not None
    if finished is not None and (finished["key"] == last["key"] or finished["updated_at"] > last["updated_at"]):
        return finished  # A member may have written its record after the output was complete.
    return merge([record for record in records.values() if record["key"] == last["key"]])


def read_all(store: Store, prefix: str) -> dict[str, bytes]:
    """Return the small objects whose names begin with a prefix, by name; without those that are removed meanwhile."""

    def read(name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return store.read(name)
        return None

    names = list(store.sizes(prefix))
    return {name: data for name, data in zip(names, store.each(read, names)) if data is not None}


def running_files(store: Store) -> dict[str, bytes]:
    """Return the records of an unfinished run by name: that of a run, and those of the members of a job array."""
    files = read_all(store, MEMBERS)
    with suppress(FileNotFoundError):
        files[RUNNING_FILE] = store.read(RUNNING_FILE)
    return files


def _read_running(store: Store) -> dict[str, Json]:
    return {name: _parse(store, name, data) for name, data in running_files(store).items()}


def _parse(store: Store, name: str, data: bytes) -> Json:
    path = f"{store.url}/{name}"
    try:
        record = json.loads(data)
    except ValueError as error:
        raise PrepareError(
            f"{path}: expected the record of a preparation, got what cannot be read ({error})."
        ) from error
    version = record.get("version") if isinstance(record, dict) else None
    if version != VERSION:
        raise PrepareError(
            f"{path}: expected a record of version {VERSION}, got {version!r}. Use the version of forebay that wrote "
            "it, or prepare again."
        )
    return dict(record)


def process_state(record: Record) -> str:
    """Return what a process does by its record: `running`, `silent`, `lost`, or how it ended."""
    if record["state"] != "running":
        return str(record["state"])
    if record["host"] == HOST and not is_running(record["pid"]):
        return "lost"
    return "silent" if time.time() - record["updated_at"] > SILENT_S else "running"


def merge(records: Sequence[Record]) -> Json:
    """Return the record of a run, of the records of its processes: what each did, and how far they are together."""
    if len(records) == 1 and not records[0]["member"]:
        gone = {"state": "interrupted", "error": "the process is gone: killed, or out of memory", "workers": []}
        return {**records[0], **(gone if process_state(records[0]) == "lost" else {})}
    records = sorted(records, key=lambda record: record["member"].zfill(8))
    names = ("host", "pid", "tasks", "num_workers", "updated_at", "error")
    members = [
        {
            "member": record["member"] or "finish", "state": process_state(record),
            **{name: record[name] for name in names}, "running": len(record["workers"]),
            "task": record["workers"][0]["task"] if record["workers"] else "",
            "last_report_s": round(max(0.0, time.time() - record["updated_at"]), 1),
            "cpu_s": round(sum(record["cpu_s"].values()), 3),
        }
        for record in records
    ]  # fmt: skip
    state, error = _common_state(members)
    active = [r for r, m in zip(records, members) if m["state"] == "running" and state == "running"]
    latest = max(active or records, key=lambda record: record["updated_at"])
    counted = [record for record in records if record["counts_all"]][-1:] or records
    retries = sorted((entry for record in records for entry in record["retries"]), key=lambda e: e["failed_at"])
    cpu_s: Counter[str] = Counter()
    for record in records:
        cpu_s.update(record["cpu_s"])
    return {
        **latest, "state": state, "error": error, "member": "", "members": members,
        "started_at": min(record["started_at"] for record in records),
        "wall_s": max(record["wall_s"] for record in records),
        "workers": [worker for record in active for worker in record["workers"]],
        "remaining_s": 1 / paces if (paces := sum(1 / r["remaining_s"] for r in active if r["remaining_s"])) else None,
        "stages": _merged_stages(records, active), "funnel": _funnel_to_json(_funnel(counted)),
        **{name: sum(r[name] for r in counted) for name in ("documents_in", "documents_out", "malformed")},
        **{name: sum(r[name] for r in records) for name in ("tasks", "num_retries")},
        "num_workers": sum(record["num_workers"] for record in active or records),
        "samples": _limited([sample for record in records for sample in record["samples"]]),
        "rejects": [reject for record in records for reject in record["rejects"]][:MAX_LISTED],
        "retries": retries[-MAX_LISTED:], "cpu_s": cpu_s,
        "peak_bytes": max(record["peak_bytes"] for record in records),
    }  # fmt: skip


def _common_state(members: Sequence[Record]) -> tuple[str, str]:
    """Return the state of a run of several processes, and why it is not running."""
    by_state = {member["state"]: member for member in reversed(members)}
    for state in ("done", "running"):
        if state in by_state:
            return state, ""
    if failed := by_state.get("failed"):
        return "failed", f"job {failed['member']} ({failed['host']}): {failed['error']}"
    if ended := by_state.get("ended"):
        return "ended", ended["error"]
    gone = sum(member["state"] in ("silent", "lost") for member in members)
    return "interrupted", f"{gone} of {len(members)} processes are gone, the others were stopped"


def _merged_stages(records: Sequence[Record], active: Sequence[Record]) -> list[Json]:
    """Return the stages over all processes: at least what one has seen, or all did and what was done before them."""
    by_name: dict[str, list[tuple[bool, Record]]] = {}
    for record in records:
        for stage in record["stages"]:
            by_name.setdefault(stage["stage"], []).append((record in active and not stage["stopped_at"], stage))
    merged = []
    for entries in by_name.values():
        stages, running = [stage for _, stage in entries], [stage for is_running, stage in entries if is_running]
        done = {
            name: max(
                *(stage[name] for stage in stages),
                min(stage["earlier"][i] for stage in stages) + sum(stage["own"][i] for stage in stages),
            )
            for i, name in enumerate(("done", "documents_in", "documents_out"))
        }
        rates = {name: sum(s[name] or 0 for s in running) or None for name in ("documents_per_s", "bytes_per_s")}
        merged.append({
            **(running or stages)[-1], **done, **rates,
            "started_at": min(stage["started_at"] for stage in stages),
            "cpu_s": round(sum(stage["cpu_s"] for stage in stages), 3),
        })  # fmt: skip
    return sorted(merged, key=lambda stage: stage["started_at"])
