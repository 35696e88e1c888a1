"""Runs the stages over batches in a process of their own, with limits: a hostile document costs itself alone.

Hides: fork, pipes, and how a process that was killed, took too long, or too much memory is replaced: by another fork
of one that has the models and compiled code of the stages. Both serve all tasks of their parent, share its memory, and
end with it. Costs about 3 ms for each batch of 4 MiB. CPU time is limited everywhere, memory on Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from forebay.errors import ForebayError, PrepareError
from forebay.prepare.settings import Positive, Settings

_POLL_S = 0.05
_NOTE_BYTES, _PID_BYTES, _TEXT_AT = 256, 8, 9  # a process, whether it has read the request, what it does
_SHARED_BYTES = 16 << 20
_ENDED = b"ended "  # No answer begins so: they are pickles, sizes and Arrow's batches.
_PR_SET_PDEATHSIG = 1

T = TypeVar("T")
R = TypeVar("R")
Outcome = tuple[Literal["done", "error", "memory"], bytes]
Buffer = Any
"""What has the buffer protocol: `bytes`, an Arrow buffer."""
Run = Callable[[Any, Buffer], tuple[Any, Buffer]]


@dataclass(frozen=True)
class Limits(Settings):
    """`[limits]`: what the stages may take for a batch of documents, or for one that is larger than a batch.

    A document that takes more is malformed. Stages of your own, and `toxic` with a `classifier`, have no limits.

    Args:
        seconds, seconds_per_mb: CPU seconds for a batch, and for each 10^6 bytes of text in it besides.
        memory_bytes: Memory that the stages may take besides 32 times the text. (What models need does not count.)
    """

    seconds: Annotated[float, Field(gt=0)] = 60.0
    seconds_per_mb: Annotated[float, Field(gt=0)] = 30.0
    memory_bytes: Positive = 1 << 30

    def of(self, size: int) -> tuple[float, int]:
        """CPU seconds and bytes of memory for a batch with so many bytes of text."""
        return self.seconds + self.seconds_per_mb * size / 1e6, self.memory_bytes + 32 * size


def label(task: Any) -> str:
    """What a task is called in messages: its `label`, else `name`, else as much of it as fits."""
    text = str(getattr(task, "label", None) or getattr(task, "name", None) or task)
    return text if len(text) <= 120 else text[:119] + "…"


def attempt(run: Callable[[T, int], R], task: T, scale: int) -> Outcome:
    """Run a task where its errors cannot be raised: the pickled result, or error, and which of the two it is."""
    try:
        return "done", pickle.dumps(run(task, scale), pickle.HIGHEST_PROTOCOL)
    except MemoryError as error:
        return "memory", pickle.dumps(str(error))
    except BaseException as error:  # noqa: BLE001 - all of them cross to the caller, who raises them
        return "error", pickled_error(error, f"In {label(task)}:\n{traceback.format_exc()}")


def result_of(outcome: Outcome) -> Any:
    """The result of an attempt that is done; raises the error of one that failed."""
    kind, data = outcome
    value = pickle.loads(data)
    if kind == "error":
        raise value
    return value


def pickled_error(error: BaseException, where: str) -> bytes:
    """An error that crosses to another process, with where it came from; one that cannot be pickled as its text."""
    if not isinstance(error, ForebayError):
        error.add_note(where)
    try:
        data = pickle.dumps(error)
        if type(pickle.loads(data)) is type(error):
            return data
    except Exception:  # noqa: BLE001, S110 - whatever its class does when it is copied, the text below says it
        pass
    return pickle.dumps(PrepareError(f"{type(error).__name__}: {error}\n{where}"))


def use_one_core() -> None:
    """Ask the libraries of this process not to start threads: the other cores have a process of their own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"


class Worker:
    """Two forked processes: one runs functions; the other, which does nothing else, forks it again when it ends."""

    def __init__(self, key: Any) -> None:
        self.key = key
        self._note = mmap.mmap(-1, _NOTE_BYTES)
        self._shared = mmap.mmap(-1, _SHARED_BYTES)
        self._pipe, theirs = multiprocessing.Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._pipe.close()
                _serve(theirs, self._note, self._shared)
            finally:
                os._exit(1)
        theirs.close()

    def call(self, run: Run, task: Any, data: Buffer, limits: tuple[float, int]) -> tuple[Any, bytes] | str:
        """What `run(task, data)` returns or raises; or how the process ended over it. MemoryError if both ended."""
        seconds, memory_bytes = limits
        self._note[_PID_BYTES:] = bytes(_NOTE_BYTES - _PID_BYTES)
        try:
            self._pipe.send_bytes(pickle.dumps((run, task, seconds), pickle.HIGHEST_PROTOCOL))
            _send(self._pipe, self._shared, data)
            before = 0
            while not self._pipe.poll(_POLL_S):
                # None is killed over half a request: the next would read the rest.
                taken = _memory(self._serving()) if self._note[_PID_BYTES] else 0
                before = before or taken
                if taken - before > memory_bytes:
                    self._replace()
                    return f"{_said(self._note)}needed more than {memory_bytes >> 20} MiB of memory"
            answer = self._pipe.recv_bytes()
            if answer.startswith(_ENDED):
                code = int(answer.removeprefix(_ENDED))
                if code == -signal.SIGPROF:
                    return f"{_said(self._note)}took more than {seconds:.3g} s of CPU time"
                return _said(self._note) + _ended(code)
            outcome: Any = pickle.loads(answer)
            out = bytes(_receive(self._pipe, self._shared)) if outcome[0] == "done" else b""
            if outcome[0] == "memory":
                self._replace()
                return f"{_said(self._note)}ran out of memory"
        except (EOFError, OSError) as error:
            close()
            raise MemoryError("the processes of the stages ended") from error
        return result_of(outcome), out

    def _serving(self) -> int:
        return int.from_bytes(self._note[:_PID_BYTES], "little")

    def _replace(self) -> None:
        """Have another process serve."""
        self._kill()
        while not self._pipe.recv_bytes().startswith(_ENDED):  # It may have answered meanwhile.
            pass

    def _kill(self) -> None:
        if pid := self._serving():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """End both processes: the second, which nobody listens to any more, after it has waited for the first."""
        self._pipe.close()
        self._kill()
        os.waitpid(self._pid, 0)


def _said(note: mmap.mmap) -> str:
    return bytes(note[_TEXT_AT:]).rstrip(b"\0").decode("utf-8", "replace")


def _ended(code: int) -> str:
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    with contextlib.suppress(ValueError):
        how = signal.Signals(-code).name
    return f"ended its process ({how})"


def ending(run: Callable[[], object]) -> tuple[str, str]:
    """How a fork ends that runs this, "" if well, and what it said last; an exception is a good end."""
    note = mmap.mmap(-1, _NOTE_BYTES)
    pid = os.fork()
    if pid == 0:
        try:
            _prepare_fork(note)
            run()
        finally:
            os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return _ended(code) if code else "", _said(note)


def _prepare_fork(note: mmap.mmap) -> None:
    _here.note = note
    faulthandler.disable()  # its end is no failure of ours
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    use_one_core()
    _end_with_parent()


def _memory(pid: int) -> int:
    """Resident bytes of a process; 0 where nothing says so."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0


def _serve(pipe: Connection, note: mmap.mmap, shared: mmap.mmap) -> None:
    _prepare_fork(note)
    while True:
        pid = os.fork()
        if pid == 0:
            _end_with_parent()
            note[:_PID_BYTES] = os.getpid().to_bytes(_PID_BYTES, "little")
            _answer(pipe, note, shared)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        pipe.send_bytes(_ENDED + str(code).encode())


def _send(pipe: Connection, shared: mmap.mmap, data: Buffer) -> None:
    """By shared memory if it fits: a pipe copies four times. What lay there is overwritten."""
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


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(pipe: Connection, note: mmap.mmap, shared: mmap.mmap) -> None:
    while True:
        run, task, seconds = pickle.loads(pipe.recv_bytes())
        data = _receive(pipe, shared)
        note[_PID_BYTES] = 1
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


class _Here(threading.local):
    """What serves this thread; in what serves, where it says what it does."""

    worker: Worker | None = None
    note: mmap.mmap | None = None


_here = _Here()


def say(what: str) -> None:
    """Note what this process does, for whoever looks at its end."""
    if _here.note is not None:
        _here.note[_TEXT_AT:] = what.encode()[: _NOTE_BYTES - _TEXT_AT].ljust(_NOTE_BYTES - _TEXT_AT, b"\0")


def worker_for(key: Any, warm: Callable[[Any], Any]) -> Worker:
    """What serves this thread, forked after `warm(key)` has loaded here what all forks need; another key, another."""
    if _here.worker is None or _here.worker.key != key:
        close()
        warm(key)
        _here.worker = Worker(key)
    return _here.worker


def close() -> None:
    """End what serves this thread, if anything does."""
    worker, _here.worker = _here.worker, None
    if worker is not None:
        worker.end()
