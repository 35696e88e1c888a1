"""Runs the stages over batches in a process of their own with limits: a hostile document costs itself alone.

Hides: fork, pipes, and how a process that died or went over a limit is replaced: by another fork of one that has
loaded the models and compiled code of the stages. Costs about 3 ms a batch of 4 MiB. CPU time is limited everywhere,
memory on Linux only.
"""

import contextlib
import faulthandler
import mmap
import multiprocessing
import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Annotated, Any

from pydantic import Field

from forebay.prepare.engines.base import attempt, exit_name, resident_bytes, result_of, use_one_core
from forebay.prepare.settings import Positive, Settings
from forebay.processes import end_with_parent

_POLL_S = 0.05
_SHARED_BYTES = 16 << 20
# The status of a process, in memory that it shares: its id, whether it has read the request, and its activity.
_STATUS_BYTES, _PID_BYTES, _TEXT_START = 256, 8, 9
_ENDED = b"ended "  # No answer begins so: answers are pickles, sizes and Arrow batches.

Buffer = Any  # What has the buffer protocol: `bytes`, an Arrow buffer.
Run = Callable[[Any, Buffer], tuple[Any, Buffer]]


@dataclass(frozen=True)
class Limits(Settings):
    """`[limits]`: what the stages may take for a batch of documents, or for one that is larger than a batch.

    A document that takes more is malformed. Stages of your own have no limits.

    Args:
        seconds, seconds_per_mb: CPU seconds for a batch, and for each 10^6 bytes of text in it besides.
        memory_bytes: Memory that the stages may take besides 32 times the text. (What models need does not count.)
    """

    seconds: Annotated[float, Field(gt=0)] = 60.0
    seconds_per_mb: float = field(default=30.0, init=False)
    memory_bytes: Positive = 1 << 30

    def of(self, size: int) -> tuple[float, int]:
        """CPU seconds and bytes of memory for a batch with so many bytes of text."""
        return self.seconds + self.seconds_per_mb * size / 1e6, self.memory_bytes + 32 * size


class SandboxWorker:
    """Two forked processes: one runs functions; the other, which does nothing else, forks it again when it ends."""

    def __init__(self, key: Any) -> None:
        self.key = key
        self._status = mmap.mmap(-1, _STATUS_BYTES)
        self._shared = mmap.mmap(-1, _SHARED_BYTES)
        self._pipe, theirs = multiprocessing.Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._pipe.close()
                _serve(theirs, self._status, self._shared)
            finally:
                os._exit(1)
        theirs.close()

    def call(self, run: Run, task: Any, data: Buffer, limits: tuple[float, int]) -> tuple[Any, bytes] | str:
        """What `run(task, data)` returns or raises; or how its process ended. MemoryError if both processes did."""
        seconds, memory_bytes = limits
        self._status[_PID_BYTES:] = bytes(_STATUS_BYTES - _PID_BYTES)
        try:
            self._pipe.send_bytes(pickle.dumps((run, task, seconds), pickle.HIGHEST_PROTOCOL))
            _send(self._pipe, self._shared, data)
            before = 0
            while not self._pipe.poll(_POLL_S):
                # A process is not killed before it has read the whole request: the next one would read the rest.
                taken = resident_bytes(self._serving_pid()) if self._status[_PID_BYTES] else 0
                before = before or taken
                if taken - before > memory_bytes:
                    self._replace()
                    return f"{_activity(self._status)}needed more than {memory_bytes >> 20} MiB of memory"
            answer = self._pipe.recv_bytes()
            if answer.startswith(_ENDED):
                code = int(answer.removeprefix(_ENDED))
                if code == -signal.SIGPROF:
                    return f"{_activity(self._status)}took more than {seconds:.3g} s of CPU time"
                return f"{_activity(self._status)}ended its process ({exit_name(code)})"
            outcome: Any = pickle.loads(answer)
            out = bytes(_receive(self._pipe, self._shared)) if outcome[0] == "done" else b""
            if outcome[0] == "memory":
                self._replace()
                return f"{_activity(self._status)}ran out of memory"
        except (EOFError, OSError) as error:
            close()
            raise MemoryError("the processes of the stages ended") from error
        return result_of(outcome), out

    def _serving_pid(self) -> int:
        return int.from_bytes(self._status[:_PID_BYTES], "little")

    def _replace(self) -> None:
        self._kill()
        while not self._pipe.recv_bytes().startswith(_ENDED):  # It may have answered meanwhile.
            pass

    def _kill(self) -> None:
        if pid := self._serving_pid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """End both processes: the second ends after it has waited for the first."""
        self._pipe.close()
        self._kill()
        os.waitpid(self._pid, 0)


class _Current(threading.local):
    worker: SandboxWorker | None = None
    status: mmap.mmap | None = None


_current = _Current()


def set_activity(text: str) -> None:
    """Write what this process does, for the message about its end."""
    if _current.status is not None:
        size = _STATUS_BYTES - _TEXT_START
        _current.status[_TEXT_START:] = text.encode()[:size].ljust(size, b"\0")


def worker_for(key: Any, warm: Callable[[Any], Any]) -> SandboxWorker:
    """The worker of this thread, forked after `warm(key)` has loaded what all its forks need; another key, another."""
    if _current.worker is None or _current.worker.key != key:
        close()
        warm(key)
        _current.worker = SandboxWorker(key)
    return _current.worker


def close() -> None:
    """End the worker of this thread, if there is one."""
    worker, _current.worker = _current.worker, None
    if worker is not None:
        worker.end()


def run_in_fork(run: Callable[[], object]) -> tuple[str, str]:
    """How a fork that runs this ended ("" if well; an exception is well), and its last activity."""
    status = mmap.mmap(-1, _STATUS_BYTES)
    pid = os.fork()
    if pid == 0:
        try:
            _set_up_fork(status)
            run()
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"ended its process ({exit_name(code)})" if code else "", _activity(status)


def _activity(status: mmap.mmap) -> str:
    return bytes(status[_TEXT_START:]).rstrip(b"\0").decode("utf-8", "replace")


def _set_up_fork(status: mmap.mmap) -> None:
    _current.status = status
    faulthandler.disable()  # the end of this process is no failure of ours
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    use_one_core()
    end_with_parent()


def _serve(pipe: Connection, status: mmap.mmap, shared: mmap.mmap) -> None:
    _set_up_fork(status)
    while True:
        pid = os.fork()
        if pid == 0:
            end_with_parent()
            status[:_PID_BYTES] = os.getpid().to_bytes(_PID_BYTES, "little")
            _answer(pipe, status, shared)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        pipe.send_bytes(_ENDED + str(code).encode())


def _answer(pipe: Connection, status: mmap.mmap, shared: mmap.mmap) -> None:
    while True:
        run, task, seconds = pickle.loads(pipe.recv_bytes())
        data = _receive(pipe, shared)
        status[_PID_BYTES] = 1
        out: list[Buffer] = []

        def work(task: Any, _: int, run: Run = run, data: Buffer = data, out: list[Buffer] = out) -> Any:
            result, buffer = run(task, data)
            out.append(buffer)
            return result

        signal.setitimer(signal.ITIMER_PROF, seconds)
        outcome = attempt(work, task, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        del run, task, data, work
        pipe.send_bytes(pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL))
        if outcome[0] == "done":
            _send(pipe, shared, out[0])


def _send(pipe: Connection, shared: mmap.mmap, data: Buffer) -> None:
    """Send through shared memory if the data fits, as a pipe copies four times. Overwrites what was received."""
    view = memoryview(data)
    if view.nbytes > _SHARED_BYTES:
        pipe.send_bytes(b"")
        pipe.send_bytes(view)
    else:
        shared[: view.nbytes] = view
        pipe.send_bytes(view.nbytes.to_bytes(8, "little"))


def _receive(pipe: Connection, shared: mmap.mmap) -> Buffer:
    size = pipe.recv_bytes()
    return memoryview(shared)[: int.from_bytes(size, "little")] if size else pipe.recv_bytes()
