"""Processes that share tasks: each task once where none dies; what a dead one claimed is taken over; late ones read."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import UsageError
from forebay.prepare.engines import share
from forebay.prepare.engines.share import ShareEngine, parse_share
from forebay.prepare.results import Committing
from forebay.storage.store import open_store


@dataclass(frozen=True)
class Piece:
    number: int
    folder: str

    @property
    def name(self) -> str:
        return f"piece-{self.number}"


def square(task: Piece, scale: int) -> int:
    """Leaves a line for each run."""
    with Path(task.folder, f"ran-{task.number}").open("a") as file:
        file.write("x\n")
    return task.number**2


def run_share(folder: Path, index: int, count: int, pieces: int) -> dict[int, int]:
    """The results by task."""
    store, results = open_store(folder / "work"), dict[int, int]()
    with ShareEngine(1, index, count, store) as engine:
        tasks = [Piece(number, str(folder)) for number in range(pieces)]
        engine.map(Committing(store, square), tasks, lambda i, output: results.__setitem__(i, output[0]))
    return results


def test_each_task_runs_once(tmp_path: Path) -> None:
    results: list[dict[int, int]] = []
    threads = [threading.Thread(target=lambda i=i: results.append(run_share(tmp_path, i, 3, 12))) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [{number: number**2 for number in range(12)}] * 3
    assert [path.read_text() for path in tmp_path.glob("ran-*")] == ["x\n"] * 12


def test_claims_of_the_dead_lapse_and_those_of_the_living_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale_s = 0.5
    monkeypatch.setattr(share, "STALE_S", stale_s)
    store = open_store(tmp_path / "work")
    for number, owner in ((0, b"dead"), (1, b"unborn"), (2, b"alive")):
        store.create(f"claims/square/piece-{number}.0", owner)
    store.write("beats/dead", b"7")
    looks, by_owner, began, read = 0, 0, time.monotonic(), type(store).read

    def read_late(self: Any, name: str) -> bytes:
        """The living one beats before each look, also if the machine stood still in between."""
        nonlocal looks, by_owner
        if name == "beats/alive":
            looks += 1
            store.write(name, str(looks).encode())
            if len(list(tmp_path.glob("ran-*"))) == 3 and time.monotonic() - began > 3 * stale_s:
                by_owner += 1
                Committing(store, square)(Piece(2, str(tmp_path)), 0)
        return read(self, name)

    monkeypatch.setattr(type(store), "read", read_late)
    assert run_share(tmp_path, 0, 2, 4) == {0: 0, 1: 1, 2: 4, 3: 9}
    assert (tmp_path / "ran-2").read_text() == "x\n" and by_owner == 1 and looks > 2


def test_results_that_are_there_are_read(tmp_path: Path) -> None:
    first = run_share(tmp_path, 1, 2, 5)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("ran-*")}
    assert run_share(tmp_path, 0, 2, 5) == first
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("ran-*")} == before


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "1/2/3", "a/b", "0/0"])
def test_other_shares_are_refused(text: str) -> None:
    assert parse_share("0/1") == (0, 1) and parse_share("99/100") == (99, 100)
    with pytest.raises(UsageError, match="expected I/N"):
        parse_share(text)


def test_an_error_of_a_task_is_raised(tmp_path: Path) -> None:
    def fail(task: Any, scale: int) -> int:
        raise AssertionError

    store = open_store(tmp_path / "work")
    with ShareEngine(1, 0, 1, store) as engine, pytest.raises(Exception, match="fail"):
        engine.map(Committing(store, fail), [Piece(0, str(tmp_path))], lambda i, output: None)
