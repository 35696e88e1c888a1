"""The local engine with real processes: deaths, memory, errors, interrupts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from forebay.errors import DatasetError, PrepareError, UsageError
from forebay.prepare.engines.base import Attempts, Engine
from forebay.prepare.engines.local import LocalEngine
from support.calibration import scaled


@dataclass(frozen=True)
class Piece:
    number: int
    label: str = ""
    folder: str = ""


@dataclass(frozen=True)
class Long:
    text: str = "x" * 5000


class Odd(Exception):
    """An error that cannot be unpickled: its arguments are not those of its constructor."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} is not {b}")


def square(piece: Piece, scale: int) -> int:
    return piece.number**2


def process_id(piece: Piece, scale: int) -> int:
    time.sleep(0.02)
    return os.getpid()


def die_at_zero(piece: Piece, scale: int) -> tuple[int, int]:
    if piece.label and scale == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return piece.number, scale


def always_die(piece: Piece, scale: int) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def exit_seven(piece: Piece, scale: int) -> int:
    if piece.number == 1 and scale == 0:
        os._exit(7)
    return scale


def memory_until_two(piece: Piece, scale: int) -> tuple[int, int]:
    if piece.number == 3 and scale < 2:
        raise MemoryError("no room")
    return piece.number, scale


def alone_when_smaller(piece: Piece, scale: int) -> tuple[float, float, int]:
    begin = time.monotonic()  # Of all processes; the clock may be set meanwhile.
    if piece.number in (0, 4) and scale == 0:
        raise MemoryError
    time.sleep(0.05)
    return begin, time.monotonic(), scale


def fail(piece: Piece, scale: int) -> int:
    if piece.number == 5:
        raise DatasetError("corpus.jsonl: line 7 is not JSON.")
    return 0


def fail_key(piece: Piece, scale: int) -> int:
    raise KeyError("text")


def fail_odd(piece: Piece, scale: int) -> int:
    raise Odd(1, 2)


def mark_and_wait(piece: Piece, scale: int) -> int:
    Path(piece.folder, f"{os.getpid()}.{scale}").touch()
    if scale == 0:
        time.sleep(60)
    return scale


def pieces(n: int) -> list[Piece]:
    return [Piece(i) for i in range(n)]


@pytest.fixture
def trouble() -> list[str]:
    return []


@pytest.fixture
def two(trouble: list[str]) -> Iterator[Engine]:
    with LocalEngine(2, on_message=trouble.append) as engine:
        yield engine


@pytest.fixture(scope="module")
def warm() -> Iterator[Engine]:
    """Two processes for all tests in which none dies."""
    with LocalEngine(2) as engine:
        yield engine


def collect(engine: Engine, run: object, tasks: list[Piece], weights: list[int] | None = None) -> list[object]:
    result: dict[int, object] = {}
    engine.map(run, tasks, result.__setitem__, weights)  # type: ignore[arg-type]
    return [result[i] for i in range(len(tasks))]


def test_results_do_not_depend_on_workers(warm: Engine) -> None:
    with LocalEngine(1) as item, LocalEngine(3) as three:
        results = [collect(engine, square, pieces(7)) for engine in (item, warm, three)]
    assert results == [[i * i for i in range(7)]] * 3


def test_processes_stay_for_all_maps_and_are_gone_when_closed(two: Engine) -> None:
    def both() -> set[object]:
        """The processes of as many maps as it takes until both had a task: one may start late."""
        seen: set[object] = set()
        deadline = time.monotonic() + scaled(30)
        while len(seen) < 2:
            assert time.monotonic() < deadline, seen
            seen |= set(collect(two, process_id, pieces(8)))
        return seen

    first, second = both(), both()
    assert len(first) == 2 and first == second
    assert os.getpid() not in first
    two.close()
    assert not [pid for pid in first if psutil.pid_exists(pid)]  # type: ignore[arg-type]
    two.close()


def test_one_worker_or_one_task_runs_here_unless_a_process_is_warm(warm: Engine) -> None:
    with LocalEngine(1) as engine:
        assert set(collect(engine, process_id, pieces(2))) == {os.getpid()}
    with LocalEngine(2) as engine:
        assert collect(engine, process_id, pieces(1)) == [os.getpid()]
        assert os.getpid() not in collect(engine, process_id, pieces(2))
        assert os.getpid() not in collect(engine, process_id, pieces(1))
    assert collect(warm, process_id, []) == []


def test_heavy_tasks_go_first() -> None:
    order: list[int] = []
    with LocalEngine(1) as engine:
        engine.map(square, pieces(4), lambda index, _: order.append(index), [1, 5, 2, 5])
        assert order == [1, 3, 2, 0]
    with pytest.raises(UsageError, match="at least 1"):
        LocalEngine(0)


def test_a_thousand_tiny_tasks_are_quick(warm: Engine) -> None:
    collect(warm, square, pieces(2))
    begin = time.monotonic()
    assert collect(warm, square, pieces(1000)) == [i * i for i in range(1000)]
    assert time.monotonic() - begin < scaled(3)


def test_a_death_blames_its_task_alone(two: Engine, trouble: list[str]) -> None:
    tasks = [Piece(i, "warc/x.gz" if i == 3 else "") for i in range(8)]
    assert collect(two, die_at_zero, tasks) == [(i, int(i == 3)) for i in range(8)]
    assert trouble == [
        "task 3 (warc/x.gz) died with SIGKILL (out of memory?): retried alone with smaller batches (scale 1 of 3)"
    ]


def test_an_exit_is_a_death_too(two: Engine, trouble: list[str]) -> None:
    assert collect(two, exit_seven, pieces(3)) == [0, 1, 0]
    assert len(trouble) == 1 and "died with exit code 7" in trouble[0]


def test_a_task_that_always_dies_is_named(two: Engine, trouble: list[str]) -> None:
    with pytest.raises(PrepareError, match=r"task \d \(bad.warc\) died with SIGSEGV, also alone"):
        two.map(always_die, [Piece(0, "bad.warc"), Piece(1, "bad.warc")], lambda *_: None)
    assert any("scale 3 of 3" in text for text in trouble)
    assert collect(two, square, pieces(2)) == [0, 1]  # the engine can be used again


def test_long_names_are_cut() -> None:
    attempts = Attempts([Long()], None, lambda _: None)
    for scale in range(3):
        attempts.died(0, scale, "died")
    with pytest.raises(PrepareError) as caught:
        attempts.died(0, 3, "died")
    assert len(str(caught.value)) < 400 and "Long(text='xxx" in str(caught.value)


@pytest.mark.parametrize("workers", [1, 2])
def test_no_memory_is_tried_again_smaller(workers: int) -> None:
    messages: list[str] = []
    with LocalEngine(workers, on_message=messages.append) as engine:
        result = collect(engine, memory_until_two, pieces(5))
    assert result == [(i, 2 if i == 3 else 0) for i in range(5)]
    assert len(messages) == 2 and all("task 3" in text and "ran out of memory" in text for text in messages)


def test_what_is_tried_again_runs_alone(two: Engine) -> None:
    spans = collect(two, alone_when_smaller, pieces(8))
    smaller = [span for span in spans if span[2]]  # type: ignore[index]
    assert len(smaller) == 2
    for begin, end, _ in smaller:  # type: ignore[misc]
        others = [(b, e) for b, e, _ in spans if (b, e) != (begin, end)]  # type: ignore[misc]
        assert all(e <= begin or b >= end for b, e in others)


@pytest.mark.parametrize(("run", "kind", "text"), [(fail, DatasetError, "line 7"), (fail_key, KeyError, "text")])
def test_errors_keep_their_type(two: Engine, run: object, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as caught:
        two.map(run, pieces(9), lambda *_: None)  # type: ignore[arg-type]
    if kind is KeyError:
        assert "in fail_key" in caught.value.__notes__[0]  # where it was raised, in the other process


def test_an_error_that_cannot_cross_is_told(two: Engine) -> None:
    with pytest.raises(PrepareError, match="Odd: 1 is not 2"):
        two.map(fail_odd, pieces(3), lambda *_: None)


def test_an_error_of_on_done_ends_the_processes(two: Engine) -> None:
    def refuse(index: int, result: int) -> None:
        raise RuntimeError("full")

    collect(two, process_id, pieces(2))
    before = len(psutil.Process().children())
    with pytest.raises(RuntimeError, match="full"):
        two.map(process_id, pieces(9), refuse)
    assert len(psutil.Process().children()) == before - 2


def test_a_worker_killed_from_outside_is_replaced(two: Engine, trouble: list[str], tmp_path: Path) -> None:
    def kill() -> None:
        while not (marks := list(tmp_path.glob("*.0"))):
            time.sleep(0.02)
        os.kill(int(marks[0].stem), signal.SIGKILL)
        while len(marks := list(tmp_path.glob("*.0"))) < 2:
            time.sleep(0.02)
        for mark in marks:
            with contextlib.suppress(ProcessLookupError):  # The first one, once it was waited for.
                os.kill(int(mark.stem), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert collect(two, mark_and_wait, [Piece(i, folder=str(tmp_path)) for i in range(2)]) == [1, 1]
    thread.join()
    assert len(trouble) == 2


SCRIPT = """
import multiprocessing, sys
sys.path.insert(0, {folder!r})
from unit.prepare.engines.test_engines import Piece, mark_and_wait
from forebay.prepare.engines.local import LocalEngine
{guard}
    multiprocessing.set_start_method({method!r})
    with LocalEngine(2) as engine:
        engine.map(mark_and_wait, [Piece(i, folder=sys.argv[1]) for i in range(3)], print)
"""


def start(tmp_path: Path, method: str, guard: str = 'if __name__ == "__main__":') -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent), guard=guard, method=method))
    return subprocess.Popen(
        [sys.executable, script, str(tmp_path)], start_new_session=True, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_parent(how: signal.Signals, method: str, tmp_path: Path) -> None:
    with start(tmp_path, method) as parent:
        while len(marks := list(tmp_path.glob("*.0"))) < 2:
            time.sleep(0.02)
        if how == signal.SIGINT:
            os.killpg(parent.pid, how)  # as a terminal does: all of them get it
        else:
            parent.kill()
        assert parent.wait() == -how
        begin = time.monotonic()
        while any(psutil.pid_exists(int(mark.stem)) for mark in marks):
            assert time.monotonic() - begin < scaled(2)
            time.sleep(0.02)
        assert parent.stderr is not None
        assert parent.stderr.read().count("Traceback") == int(how == signal.SIGINT)  # the workers are quiet


def test_a_script_without_guard_is_told(tmp_path: Path) -> None:
    with start(tmp_path, "spawn", "if True:") as parent:
        assert parent.wait() == 1
        assert parent.stderr is not None
        assert "before its first task" in parent.stderr.read()


FORKING = """
import multiprocessing, os, sys, threading
sys.path.insert(0, {folder!r})
from unit.prepare.engines.test_engines import Piece, process_id
from forebay.prepare.engines.local import LocalEngine

class Task(Piece):
    loaded_by = None
    def load(self):
        Task.loaded_by = os.getpid()

def loaded_by(task, scale):
    return Task.loaded_by

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    stop = threading.Event()
    if sys.argv[1] == "thread":
        threading.Thread(target=stop.wait).start()
    results = []
    with LocalEngine(2) as engine:
        engine.map(loaded_by, [Task(i) for i in range(3)], lambda index, result: results.append(result))
    stop.set()
    print(set(results) == {{os.getpid()}}, set(results) == {{None}})
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")
@pytest.mark.parametrize(("threads", "result"), [("one", "True False"), ("thread", "False True")])
def test_a_program_that_chose_so_loads_once_and_forks(threads: str, result: str, tmp_path: Path) -> None:
    """Not with a second thread, whose locks the forks would wait for."""
    script = tmp_path / "script.py"
    script.write_text(FORKING.format(folder=str(Path(__file__).parent)))
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, threads], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == result, done.stderr
