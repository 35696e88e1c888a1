"""The local engine with real processes: deaths, memory, errors, and what is left of them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from forebay.errors import DatasetError, PrepareError
from forebay.files import HOST, remove_stale
from forebay.prepare.engines.base import Engine
from forebay.prepare.engines.local import LocalEngine
from support.waiting import until


@dataclass(frozen=True)
class Piece:
    number: int
    label: str = ""
    folder: str = ""


class OddError(Exception):
    """An error that cannot be unpickled: its arguments are not those of its constructor."""

    def __init__(self, a: int, b: int):
        super().__init__(f"{a} is not {b}")


def square(piece: Piece, scale: int) -> int:
    return piece.number**2


def process_id(piece: Piece, scale: int) -> int:
    time.sleep(0.02)
    return os.getpid()


def die_by_label(piece: Piece, scale: int) -> tuple[int, int]:
    if piece.label == "exit" and scale == 0:
        os._exit(7)
    if piece.label == "kill" and scale == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if piece.label == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    return piece.number, scale


def alone_when_smaller(piece: Piece, scale: int) -> tuple[float, float, int]:
    begin = time.monotonic()  # Of all processes; the clock may be set meanwhile.
    if piece.number in (0, 4) and scale == 0:
        raise MemoryError
    time.sleep(0.05)
    return begin, time.monotonic(), scale


def fail_by_label(piece: Piece, scale: int) -> int:
    if piece.label == "odd":
        raise OddError(1, 2)
    if piece.label == "key":
        raise KeyError("text")
    raise DatasetError("corpus.jsonl: line 7 is not JSON.")


def mark_and_wait(piece: Piece, scale: int) -> int:
    Path(piece.folder, f"{os.getpid()}.{scale}").touch()
    if scale == 0:
        signal.pause()
    return scale


def pieces(n: int, label: str = "", index: int = -1) -> list[Piece]:
    return [Piece(i, label if index in (i, -1) else "") for i in range(n)]


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def two(messages: list[str]) -> Iterator[Engine]:
    with LocalEngine(2, on_message=messages.append) as engine:
        yield engine


def collect(engine: Engine, run: object, tasks: list[Piece]) -> list[object]:
    result = {}
    engine.map(run, tasks, result.__setitem__)
    return [result[i] for i in range(len(tasks))]


def test_processes_stay_for_all_maps_and_are_gone_when_closed(two: Engine):
    def both():
        """Return the processes of as many maps as it takes until both had a task: one may start late."""
        seen = set()
        while len(seen) < 2:
            seen |= set(collect(two, process_id, pieces(8)))
        return seen

    first = both()
    assert collect(two, square, pieces(1000)) == [i * i for i in range(1000)]
    assert first == both() and os.getpid() not in first
    assert collect(two, process_id, pieces(1))[0] in first and collect(two, process_id, []) == []
    two.close()
    assert not [pid for pid in first if psutil.pid_exists(pid)]
    two.close()


@pytest.mark.parametrize("label, message", [("kill", r"SIGKILL \(out of memory\?\)"), ("exit", "exit code 7")])
def test_a_death_blames_its_task_alone(two: Engine, messages: list[str], label: str, message: str):
    assert collect(two, die_by_label, pieces(8, label, index=3)) == [(i, int(i == 3)) for i in range(8)]
    (shown,) = messages
    expected = rf"task 3 \({label}\) died with {message}: retried alone with smaller batches \(scale 1 of 3\)"
    assert re.fullmatch(expected, shown)


def test_a_task_that_always_dies_is_named(two: Engine, messages: list[str]):
    with pytest.raises(PrepareError, match=r"task \d \(crash\) died with SIGSEGV, also alone"):
        collect(two, die_by_label, pieces(2, "crash"))
    assert any("scale 3 of 3" in text for text in messages)
    assert collect(two, square, pieces(2)) == [0, 1]  # the engine can be used again


def test_what_is_tried_again_runs_alone(two: Engine, messages: list[str]):
    spans = collect(two, alone_when_smaller, pieces(8))
    smaller = [span for span in spans if span[2]]
    assert len(smaller) == 2 and all("ran out of memory" in text for text in messages)
    for begin, end, _ in smaller:
        others = [(b, e) for b, e, _ in spans if (b, e) != (begin, end)]
        assert all(e <= begin or b >= end for b, e in others)


def test_errors_keep_their_type(two: Engine):
    with pytest.raises(DatasetError, match="line 7"):
        collect(two, fail_by_label, pieces(9))
    with pytest.raises(KeyError, match="text") as caught:
        collect(two, fail_by_label, pieces(9, "key"))
    assert "in fail_by_label" in caught.value.__notes__[0]  # where it was raised, in the other process
    with pytest.raises(PrepareError, match="OddError: 1 is not 2"):  # it cannot be sent to this process
        collect(two, fail_by_label, pieces(3, "odd"))


def test_an_error_of_on_done_ends_the_processes(two: Engine):
    def refuse(index, result):
        raise RuntimeError("full")

    workers = set(collect(two, process_id, pieces(8)))
    with pytest.raises(RuntimeError, match="full"):
        two.map(process_id, pieces(9), refuse)
    assert not any(psutil.pid_exists(pid) for pid in workers)


SCRIPT = """
import multiprocessing, os, sys, threading
from slow.prepare.test_engines import Piece, mark_and_wait
from forebay.prepare.engines.local import LocalEngine

class Task(Piece):
    loaded_by = None
    def load(self):
        Task.loaded_by = os.getpid()

def loader_id(task, scale):
    return Task.loaded_by

def wait():
    with LocalEngine(2) as engine:
        engine.map(mark_and_wait, [Piece(i, folder=sys.argv[1]) for i in range(3)], print)

def load(thread):
    stop, results = threading.Event(), []
    if thread:
        threading.Thread(target=stop.wait).start()
    with LocalEngine(2) as engine:
        engine.map(loader_id, [Task(i) for i in range(3)], lambda index, result: results.append(result))
    stop.set()
    print(set(results) == {os.getpid()}, set(results) == {None})

"""


def start(tmp_path: Path, method: str, call: str, guard: str = 'if __name__ == "__main__":') -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(f"{SCRIPT}{guard}\n    multiprocessing.set_start_method({method!r})\n    {call}\n")
    return subprocess.Popen(
        [sys.executable, script, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_no_worker_outlives_its_parent(method: str, tmp_path):
    with start(tmp_path, method, "wait()") as parent:
        until(lambda: len(list(tmp_path.glob("*.0"))) == 2)
        parent.kill()
        assert parent.wait() == -signal.SIGKILL
        until(lambda: not any(psutil.pid_exists(int(mark.stem)) for mark in tmp_path.glob("*.0")))
        assert "Traceback" not in parent.stderr.read()  # the workers are quiet


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
@pytest.mark.parametrize("call, result", [("load(False)", "True False"), ("load(True)", "False True")])
def test_a_program_that_chose_so_loads_once_and_forks(call: str, result: str, tmp_path):
    """Not with a second thread, whose locks the forks would wait for."""
    with start(tmp_path, "fork", call) as program:
        assert program.communicate()[0].strip() == result


_INTERRUPTED = """
import multiprocessing, os, signal, time
from multiprocessing.context import ForkProcess
from forebay.prepare.engines import local

start = ForkProcess.start


def interrupted(process):
    start(process)
    os.kill(os.getpid(), signal.SIGINT)


multiprocessing.set_start_method("fork")
ForkProcess.start = interrupted
local._serve = lambda pipe, log: time.sleep(60)  # It has not come to remove its log.
with local.LocalEngine(2) as engine:
    engine.map(max, [1, 2], print)
"""


def test_interrupt_while_a_worker_is_started_leaves_no_file(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert done.stderr.rstrip().endswith("KeyboardInterrupt"), done.stderr
    assert list(tmp_path.iterdir()) == []


_INTERRUPTED_THREAD = """
import os, signal, threading
from multiprocessing import resource_tracker, util
from forebay.prepare.engines import local

resource_tracker.ensure_running()
threading.Thread(target=threading.Event().wait, daemon=True).start()
spawn = util.spawnv_passfds


def interrupted(path, args, fds):
    process = spawn(path, args, fds)
    os.kill(os.getpid(), signal.SIGINT)
    return process


util.spawnv_passfds = interrupted
with local.LocalEngine(2) as engine:
    engine.map(max, [1, 2], print)
"""


def test_interrupt_of_a_program_with_threads_leaves_a_worker_no_half_of_its_settings():
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED_THREAD], capture_output=True, text=True)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt") and "EOFError" not in done.stderr, done.stderr


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="has no /proc, which says that a process has ended")
def test_a_process_that_has_ended_is_dead_before_anybody_asks_for_its_exit_code(tmp_path):
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        (tmp_path / f".a.{HOST}.{process.pid}.{'0' * 8}.tmp").touch()
        remove_stale(tmp_path)
        assert list(tmp_path.iterdir()) == []
