"""The local engine: processes of this machine that stay warm from one map to the next.

A process has one task at a time, so that a death blames one task and no other loses its work. A process is idle for a
round trip through a pipe between two tasks: 0.1 ms. A new process takes some 20 ms if the program has chosen to fork
(`multiprocessing.set_start_method("fork")`, as the command does) and has one thread; else 1 to 2 s of imports.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, process, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

from forebay.base import Json
from forebay.errors import PrepareError, UsageError
from forebay.files import HOST, temporary_path
from forebay.machine import num_cores
from forebay.prepare.engines import base, sandbox
from forebay.prepare.progress import LOG_BYTES
from forebay.processes import deferred_signals
from forebay.storage.store import Store

_EXIT_S = 5.0  # How long a worker whose pipe is closed may take to exit with its own exit code.
_MAX_LOG_BYTES = 1 << 20  # Of the file that a worker's standard error goes through.


class _Log:
    """The standard error of a worker: a file that this process passes on to its own, and whose tail it has."""

    def __init__(self) -> None:
        self.path = temporary_path(Path(tempfile.gettempdir(), "worker.log"))
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "rb", buffering=0)
        self.tail = b""

    def forward(self) -> None:
        """Write what is new to standard error."""
        while data := self._file.read(_MAX_LOG_BYTES):
            self.tail = (self.tail + data)[-LOG_BYTES:]
            with suppress(OSError, ValueError):  # ours is closed
                sys.stderr.write(data.decode("utf-8", "replace"))
                sys.stderr.flush()
        if self._file.tell() > _MAX_LOG_BYTES:  # The worker appends: it goes on at the start.
            os.truncate(self._file.fileno(), 0)
            self._file.seek(0)

    def close(self) -> None:
        self.forward()
        self._file.close()
        self.path.unlink(missing_ok=True)


class _Worker:
    """A process, our end of its pipe, and its task as (index, scale). It is `ready` after its first message."""

    def __init__(self) -> None:
        method = "fork" if _may_fork() else "spawn"
        context: Any = multiprocessing.get_context(method)
        self.pipe, theirs = context.Pipe()
        self.log = _Log()
        self.process: process.BaseProcess = context.Process(
            target=_serve, args=(theirs, self.log.path), daemon=True, name="forebay-prepare"
        )
        try:
            with deferred_signals(), _starting(method):
                self.process.start()
        except BaseException:  # also an interrupt that came meanwhile
            self.log.close()
            raise
        theirs.close()
        self.ready = False
        self.task: tuple[int, int] | None = None
        self.state: Json = {}
        self.peak_bytes = 0

    def start(self, run: Any, task: Any, index: int, scale: int) -> None:
        """Start an attempt. A worker that just died is noticed when its outcome is awaited."""
        message = base.dumps((run, task, scale))
        self.task, self.state = (index, scale), base.state_of(task, self.process.pid)
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(message)

    def receive(self) -> base.Outcome | None:
        """The outcome; None if the process died."""
        with suppress(EOFError, OSError):
            outcome: base.Outcome = self.pipe.recv()
            return outcome
        return None

    def end(self) -> int | None:
        """Kill the process if it lives; its exit code."""
        if self.process.exitcode is None:
            self.process.kill()
        self.process.join()
        self.pipe.close()
        self.log.close()
        return self.process.exitcode

    def update(self) -> None:
        """Pass its standard error on, and look at its memory."""
        self.log.forward()
        if self.task is not None and self.process.pid is not None:
            self.peak_bytes = max(self.peak_bytes, base.resident_bytes(self.process.pid))


class LocalEngine(base.Engine):
    """An engine of processes that are started when a map first needs them, and used for all maps until it is closed.

    One worker, or one task before any process was started, runs in this process, where libraries may use all their
    threads. `workers` is by default the number of cores; `store` is not used.
    """

    def __init__(
        self, workers: int | None, *, store: Store | None = None, on_message: base.Notify = lambda message: None
    ) -> None:
        if workers is not None and workers < 1:
            raise UsageError(f"workers: expected at least 1, got {workers}.")
        self._on_message = on_message
        self._num_workers = workers or num_cores()
        self._workers: list[_Worker] = []
        self._state: Json = {}  # Of the task that runs in this process.
        self._updated_at = -base.TICK_S

    _runs_tasks_here = True  # Those of one process.

    def close(self) -> None:
        sandbox.close()  # of the tasks that ran in this process
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.end()

    @property
    def num_workers(self) -> int:
        return self._num_workers

    def running(self) -> list[Json]:
        return [*filter(None, [self._state]), *(w.state for w in self._workers if w.task is not None)]

    def map(
        self, run: base.TaskFunction, tasks: Sequence[Any], on_done: base.OnDone, weights: base.Weights = None
    ) -> None:
        attempts = base.Attempts(tasks, weights, self._on_message, self._may_start, self.on_failure)
        if self._runs_tasks_here and min(self._num_workers, len(tasks)) <= 1 and not self._workers:
            while (pair := attempts.next(0)) is not None:
                self._state = base.state_of(tasks[pair[0]])
                try:
                    result = run(tasks[pair[0]], pair[1])
                except MemoryError as error:
                    how = f"ran out of memory ({error})" if str(error) else "ran out of memory"
                    attempts.died(*pair, how, "memory", host=HOST, pid=os.getpid())
                else:
                    self._state = {}
                    on_done(pair[0], result)
                    self._tick()
            return
        try:
            self._map_over_workers(run, on_done, attempts)
        except BaseException:
            self.close()
            raise

    def _may_start(self, task: Any) -> bool:
        """Whether a task that comes next is to be run; else it is left out."""
        return True

    def _tick(self) -> None:
        self.on_tick()

    def _map_over_workers(self, run: base.TaskFunction, on_done: base.OnDone, attempts: base.Attempts) -> None:
        tasks = attempts.tasks
        while True:
            running = sum(worker.task is not None for worker in self._workers)
            if tasks and not self._workers and _may_fork():
                getattr(tasks[0], "load", lambda: None)()
            while len(self._workers) < min(self._num_workers, running + attempts.startable):
                self._workers.append(_Worker())
            for worker in self._workers:
                if worker.ready and worker.task is None and (pair := attempts.next(running)) is not None:
                    worker.start(run, tasks[pair[0]], *pair)
                    running += 1
            if not running and not len(attempts):
                return
            if time.monotonic() - self._updated_at >= base.TICK_S:
                self._updated_at = time.monotonic()
                for worker in self._workers:
                    worker.update()
            self._tick()
            handles: dict[Any, _Worker] = {h: w for w in self._workers for h in (w.pipe, w.process.sentinel)}
            for worker in dict.fromkeys(handles[handle] for handle in connection.wait(list(handles), base.TICK_S)):
                self._receive(worker, on_done, attempts)

    def _receive(self, worker: _Worker, on_done: base.OnDone, attempts: base.Attempts) -> None:
        outcome = worker.receive()
        if outcome is not None and not worker.ready:
            worker.ready = True
            return
        pair, worker.task = worker.task, None
        if outcome is None or outcome[0] == "memory":
            # A worker that ran out of memory is ended too, since it keeps what it allocated.
            self._workers.remove(worker)
            if outcome is None:
                worker.process.join(_EXIT_S)
            code = worker.end()
            if not worker.ready:
                raise PrepareError(
                    f"prepare: a worker process {_describe_exit(code)} before its first task. There may be too little "
                    "memory for so many --workers."
                )
            if pair is not None:
                kind: base.Kind = "memory" if outcome else "died"
                how = "ran out of memory" if outcome else _describe_exit(code)
                log = worker.log.tail.decode("utf-8", "replace")
                attempts.died(
                    *pair, how, kind, host=HOST, pid=worker.process.pid, log=log, peak_bytes=worker.peak_bytes
                )
        elif pair is not None:
            on_done(pair[0], base.result_of(outcome))


def _describe_exit(code: int | None) -> str:
    return f"died with {base.exit_name(code or 0)}{' (out of memory?)' if code == -signal.SIGKILL else ''}"


def _may_fork() -> bool:
    """Whether the program has chosen so, and no thread may have a lock that its fork would wait for.

    (Arrow's jemalloc has one, which takes care of forks.)
    """
    if sys.platform != "linux" or multiprocessing.get_start_method(allow_none=True) != "fork":
        return False
    threads = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            threads.append((thread / "comm").read_text())
    return len(threads) - threads.count("jemalloc_bg_thd\n") == 1


@contextmanager
def _starting(method: str) -> Iterator[None]:
    """Start processes in here: Ctrl-C in the terminal does not kill them before they ignore it.

    Nor do they run the caller's script again, which may have no guard.
    """
    main = sys.modules["__main__"]
    if method == "spawn":
        resource_tracker.ensure_running()  # which, started with the first process, would unblock the signal
        sys.modules["__main__"] = ModuleType("__main__")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        sys.modules["__main__"] = main


def _serve(pipe: Any, log: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        log.unlink()
    _set_up_worker()
    pipe.send(("done", b""))
    while True:
        try:
            run, task, scale = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001 - a function that cannot be imported here
            pipe.send(("error", base.pickled_error(error, traceback.format_exc())))
            continue
        outcome = base.attempt(run, task, scale)
        del run, task
        pipe.send(outcome)


def _set_up_worker() -> None:
    base.use_one_core()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        with suppress(OSError):  # out of memory: the kernel kills a worker rather than its parent
            Path("/proc/self/oom_score_adj").write_text("500")
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
