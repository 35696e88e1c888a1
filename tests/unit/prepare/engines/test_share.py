"""Jobs that share tasks: each task once where none dies; what a dead one claimed is taken over; late ones read results.

`tests/slow/prepare/test_prepare_cluster.py` has jobs of their own processes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import UsageError
from forebay.prepare.engines import share
from forebay.prepare.engines.share import STALE_S, ShareEngine, parse_share
from forebay.prepare.results import Committing
from forebay.storage.store import open_store


@dataclass(frozen=True)
class Piece:
    number: int
    folder: str

    @property
    def name(self) -> str:
        return f"piece-{self.number}"


class InProcessShare(ShareEngine):
    _runs_tasks_here = True


def square(task: Piece, scale: int) -> int:
    """Leave a line for each run."""
    with Path(task.folder, f"ran-{task.number}").open("a") as file:
        file.write("x\n")
    return task.number**2


def run_share(folder: Path, index: int, count: int, pieces: int, run: Any = square) -> dict[int, int]:
    """Return the results by task."""
    store, results = open_store(folder / "work"), dict[int, int]()
    with InProcessShare(1, index, count, store) as engine:
        tasks = [Piece(number, str(folder)) for number in range(pieces)]
        engine.map(Committing(store, run), tasks, lambda i, output: results.__setitem__(i, output[0]))
    return results


def test_claims_of_the_dead_lapse_and_those_of_the_living_do_not(tmp_path, monkeypatch):
    store = open_store(tmp_path / "work")
    for number, owner in ((0, b"dead"), (1, b"unborn"), (2, b"alive")):
        store.create(f"claims/square/piece-{number}.0", owner)
    store.write("beats/dead", b"7")

    class Clock:
        """Moves on when somebody sleeps; then the living job beats, and ends its task long after the others."""

        now = 0.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds
            store.write("beats/alive", str(self.now).encode())
            if self.now > 5 * STALE_S and not (tmp_path / "ran-2").exists():
                assert len(list(tmp_path.glob("ran-*"))) == 3
                Committing(store, square)(Piece(2, str(tmp_path)), 0)

    clock = Clock()
    monkeypatch.setattr(share, "time", clock)
    assert run_share(tmp_path, 0, 2, 4) == {0: 0, 1: 1, 2: 4, 3: 9}
    assert [path.read_text() for path in tmp_path.glob("ran-*")] == ["x\n"] * 4 and clock.now > 5 * STALE_S


def test_other_shares_are_refused():
    assert parse_share("0/1") == (0, 1) and parse_share("99/100") == (99, 100)
    for text in ("", "1", "2/2", "-1/2", "1/2/3", "a/b", "0/0"):
        with pytest.raises(UsageError, match="expected I/N"):
            parse_share(text)


def test_an_error_of_a_task_is_raised(tmp_path):
    def fail(task, scale):
        raise ArithmeticError("of the task")

    with pytest.raises(ArithmeticError, match="of the task"):
        run_share(tmp_path, 0, 1, 1, fail)
