"""Engines: map a function over tasks, in processes that stay warm, and try again smaller where memory ran out.

Hides: processes, pipes, who had which task when a process died. A process has one task at a time, so that a death
blames one task and no other loses its work. Idle time between two tasks of a process is a round trip through a pipe:
0.1 ms, for tasks that are meant to take seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from forebay.errors import PrepareError, UsageError
from forebay.prepare.engines.local.sandbox import Outcome, attempt, close, label, pickled_error, result_of, use_one_core

MAX_SCALE = 3
"""The last scale that is tried: memory about 1/64 of that of scale 0."""

_EXIT_S = 5.0
"""How long a worker whose pipe is closed may take to exit, so that its own exit code is what is said of it."""

T = TypeVar("T")
R = TypeVar("R")
Trouble = Callable[[str], None]


class Engine(ABC):
    """Maps functions over tasks; a context manager, whose end closes it.

    `on_trouble` is told of each death of a worker, and what is done about it.
    """

    def __init__(self, on_trouble: Trouble | None) -> None:
        self._on_trouble = on_trouble or (lambda _: None)

    def map(
        self,
        run: Callable[[T, int], R],
        tasks: Sequence[T],
        on_done: Callable[[int, R], None],
        weights: Sequence[int] | None = None,
    ) -> None:
        """Call `run(task, scale)` for every task, and `on_done(index, result)` here, in any order.

        `scale` is 0, or 1 to `MAX_SCALE` for a task whose worker died or ran out of memory: then nothing else runs
        beside it. An error that `run` raises ends the map and is raised here, with its type; `on_done` may raise too.
        `run` can be imported by a new process, tasks can be pickled, and are called in messages what their `label` or
        `name` says. The heaviest go first (`weights`, in any unit), so that none is left over at the end.
        """
        self._map(run, tasks, on_done, Attempts(tasks, weights, self._on_trouble))

    @abstractmethod
    def _map(self, run: Any, tasks: Sequence[Any], on_done: Callable[[int, Any], None], attempts: Attempts) -> None:
        """As `map`, with the attempts to make."""

    @abstractmethod
    def close(self) -> None:
        """End what the engine started. May be called twice."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def local_engine(workers: int, *, on_trouble: Trouble | None = None) -> Engine:
    """Processes of this machine, started when a map first needs them and used for all maps until closed.

    With one worker, or for one task before any process was started, all runs in this process (where libraries may use
    all their threads).
    """
    if workers < 1:
        raise UsageError(f"workers: expected at least 1, got {workers}.")
    return _LocalEngine(workers, on_trouble)


class Attempts:
    """Which task is to be tried next, and at which scale: the policy that all engines share."""

    def __init__(self, tasks: Sequence[Any], weights: Sequence[int] | None, on_trouble: Trouble) -> None:
        if weights is not None and len(weights) != len(tasks):
            raise UsageError(f"weights: expected {len(tasks)}, one a task, got {len(weights)}.")
        order = range(len(tasks)) if weights is None else sorted(range(len(tasks)), key=lambda i: -weights[i])
        self._tasks = tasks
        self._queue = deque(order)
        self._again: deque[tuple[int, int]] = deque()
        self._alone = False
        self._on_trouble = on_trouble

    def __len__(self) -> int:
        """How many are neither done nor under way."""
        return len(self._queue) + len(self._again)

    @property
    def startable(self) -> int:
        """How many may be started at once, at most."""
        return 1 if self._again else 0 if self._alone else len(self._queue)

    def next(self, running: int) -> tuple[int, int] | None:
        """The (index, scale) to start now; None if there is none, or it has to wait until nothing is running."""
        if running and (self._again or self._alone):
            return None
        self._alone = bool(self._again)
        if self._again:
            return self._again.popleft()
        return (self._queue.popleft(), 0) if self._queue else None

    def repeat(self, index: int, scale: int) -> None:
        """Note that an attempt came to nothing by no fault of its own: the same again, soon."""
        if scale:
            self._again.appendleft((index, scale))
        else:
            self._queue.appendleft(index)

    def died(self, index: int, scale: int, how: str) -> None:
        """Note that an attempt took its worker with it; PrepareError if there is no smaller scale to try."""
        name = f"task {index} ({label(self._tasks[index])})"
        if scale >= MAX_SCALE:
            raise PrepareError(
                f"{name} {how}, also alone and with the smallest batches. Finished work is kept: give the machine more "
                "memory, or take this input out, and run the same command again."
            )
        self._on_trouble(f"{name} {how}: retried alone with smaller batches (scale {scale + 1} of {MAX_SCALE})")
        self._again.append((index, scale + 1))


class _Worker:
    """A process, our end of the pipe to it, and the attempt that it has; `ready` once it has said so."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True, name="forebay-prepare")
        with _no_interrupt():
            self.process.start()
        theirs.close()
        self.ready = False
        self.has: tuple[int, int] | None = None

    def give(self, run: Any, task: Any, index: int, scale: int) -> None:
        """Start an attempt; a worker that just died is noticed by whoever waits for it."""
        message = pickle.dumps((run, task, scale), pickle.HIGHEST_PROTOCOL)
        self.has = (index, scale)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(message)

    def receive(self) -> Outcome | None:
        """What it sent; None if it died."""
        try:
            outcome: Outcome = self.pipe.recv()
        except (EOFError, OSError):
            return None
        return outcome

    def end(self) -> int | None:
        """Kill it if it lives, and wait for it; its exit code."""
        if self.process.exitcode is None:
            self.process.kill()
        self.process.join()
        self.pipe.close()
        return self.process.exitcode


class _LocalEngine(Engine):
    def __init__(self, workers: int, on_trouble: Trouble | None) -> None:
        super().__init__(on_trouble)
        self._num_workers = workers
        self._workers: list[_Worker] = []

    def close(self) -> None:
        close()  # what served the tasks that ran in this process
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.end()

    def _map(self, run: Any, tasks: Sequence[Any], on_done: Callable[[int, Any], None], attempts: Attempts) -> None:
        # A process that is warm has loaded what the task needs.
        if min(self._num_workers, len(tasks)) <= 1 and not self._workers:
            while (pair := attempts.next(0)) is not None:
                try:
                    result = run(tasks[pair[0]], pair[1])
                except MemoryError as error:
                    attempts.died(*pair, f"ran out of memory ({error})" if str(error) else "ran out of memory")
                else:
                    on_done(pair[0], result)
            return
        try:
            self._map_apart(run, tasks, on_done, attempts)
        except BaseException:
            self.close()
            raise

    def _map_apart(
        self, run: Any, tasks: Sequence[Any], on_done: Callable[[int, Any], None], attempts: Attempts
    ) -> None:
        while True:
            running = sum(worker.has is not None for worker in self._workers)
            while len(self._workers) < min(self._num_workers, running + attempts.startable):
                self._workers.append(_Worker())
            for worker in self._workers:
                if worker.ready and worker.has is None and (pair := attempts.next(running)) is not None:
                    worker.give(run, tasks[pair[0]], *pair)
                    running += 1
            if not running and not len(attempts):
                return
            for worker in self._heard():
                self._hear(worker, on_done, attempts)

    def _heard(self) -> list[_Worker]:
        """Wait for some worker that sent something or died."""
        ways: dict[Any, _Worker] = {way: w for w in self._workers for way in (w.pipe, w.process.sentinel)}
        return list(dict.fromkeys(ways[way] for way in connection.wait(list(ways))))

    def _hear(self, worker: _Worker, on_done: Callable[[int, Any], None], attempts: Attempts) -> None:
        outcome = worker.receive()
        if outcome is not None and not worker.ready:
            worker.ready = True
            return
        pair, worker.has = worker.has, None
        if outcome is None or outcome[0] == "memory":
            # One that ran out of memory is ended too: what it still holds is not given back otherwise.
            self._workers.remove(worker)
            if outcome is None:
                worker.process.join(_EXIT_S)
            code = worker.end()
            if not worker.ready:
                raise PrepareError(
                    f"prepare: a worker process {_how(code)} before its first task. If a script runs prepare, it must "
                    'do so under `if __name__ == "__main__":`; else there is too little memory for so many --workers.'
                )
            if pair is not None:
                attempts.died(*pair, _how(code) if outcome is None else "ran out of memory")
        elif pair is not None:
            on_done(pair[0], result_of(outcome))


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"died with exit code {code}"
    if -code == signal.SIGKILL:
        return "died with signal 9 (out of memory?)"
    with contextlib.suppress(ValueError):
        return f"died with signal {-code} ({signal.Signals(-code).name})"
    return f"died with signal {-code}"


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Start processes in here: they must not die by the Ctrl-C of the terminal before they can ignore it."""
    resource_tracker.ensure_running()  # which, started with the first process, would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Any) -> None:
    """The life of a worker: attempts, one by one, until the pipe is closed."""
    _begin()
    pipe.send(("done", b""))
    while True:
        try:
            run, task, scale = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        except Exception as error:  # noqa: BLE001 - a function that cannot be imported here: the caller says so
            pipe.send(("error", pickled_error(error, traceback.format_exc())))
            continue
        outcome = attempt(run, task, scale)
        del run, task
        pipe.send(outcome)


def _begin() -> None:
    use_one_core()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # where memory runs out, the kernel is to take a worker, not its parent
            Path("/proc/self/oom_score_adj").write_text("500")
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: Any) -> None:
    """End with the parent, however it ended: a killed one cannot tell its workers."""
    parent.join()
    os._exit(1)
