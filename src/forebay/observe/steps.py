"""Verify a coordinator's log of steps: each global sample was used once by the steps that counted.

The log is the coordinator's SQLite file (`coordinator/store.py`); the samples of a step are a pure function and need no
record. A file may be read while a coordinator runs: a copy of it and its WAL is opened.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.coordinator.store import ROSTER_NAME, RunStore
from forebay.errors import LedgerError, StateError

_MAGIC = b"SQLite format 3\0"
_TRIES = 50


def is_roster(path: Path) -> bool:
    """Whether a path is a coordinator's state: its directory, or the file in it."""
    path = path / ROSTER_NAME if path.is_dir() else path
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


@dataclass(frozen=True)
class StepsReport:
    """Result of `verify_steps`. `epochs` has one dict, as a run numbers its samples: samples, missing, repeated;
    redone: samples of steps that a later generation repeated, whose gradients did not count.
    """

    ok: bool
    epochs: list[dict[str, int]]
    problems: list[str] = field(default_factory=list)
    generations: int = 0
    steps: int = 0

    def to_json(self) -> dict[str, Any]:
        """The output of `forebay ledger verify --json`."""
        return dict(vars(self))


@contextmanager
def open_log(path: Path) -> Iterator[RunStore]:
    """The log in a coordinator's state, for reading. Raises LedgerError if it cannot be read."""
    path = path / ROSTER_NAME if path.is_dir() else path
    with tempfile.TemporaryDirectory() as directory:
        try:
            _copy(path, Path(directory))
            roster = RunStore(directory)
        except (OSError, StateError) as error:
            raise LedgerError(f"{path}: cannot read the coordinator's log: {error}.") from error
        try:
            yield roster
        finally:
            roster.close()


def _copy(path: Path, directory: Path) -> None:
    """Copy the file and its WAL at one moment; retry if a coordinator wrote meanwhile."""
    files = [path, path.with_name(path.name + "-wal")]
    for _ in range(_TRIES):
        before = _stamps(files)
        for file in files:
            copy = directory / file.name.replace(path.name, ROSTER_NAME)
            copy.unlink(missing_ok=True)
            if file.exists():
                shutil.copyfile(file, copy)
        if _stamps(files) == before:
            return
    raise LedgerError(f"{path}: it changes while it is read. Ask the coordinator (GET /v1/log), or stop it first.")


def _stamps(files: list[Path]) -> list[tuple[int, int]]:
    stats = [file.stat() if file.exists() else None for file in files]
    return [(0, 0) if stat is None else (stat.st_size, stat.st_mtime_ns) for stat in stats]


def verify_steps(path: Path) -> StepsReport:
    """Verify that each global sample from the first on was used once by the steps that count.

    A generation's steps count up to the start of the next one. Cost: one pass over the log's rows.
    """
    with open_log(path) as roster:
        generations, rows = roster.generations(), roster.rows()
    numbers = {g["number"]: g for g in generations}
    end_steps: dict[int, int | None] = {}
    first_later_step: int | None = None
    for generation in reversed(generations):
        end_steps[generation["number"]] = first_later_step
        start = int(generation["start_step"])
        first_later_step = start if first_later_step is None else min(first_later_step, start)
    problems: list[str] = []
    samples = missing = repeated = redone = steps = 0
    next_step = next_sample = 0
    for number, start, stop, first_sample, count in sorted(rows, key=lambda row: (row[0], row[1])):
        if number not in numbers or not 0 <= start < stop or count < 0:
            problems.append(f"steps [{start}, {stop}) of generation {number}: there is no such generation or step")
            continue
        end = end_steps[number]
        counted_stop = stop if end is None else max(start, min(stop, end))
        redone += (stop - counted_stop) * count
        if counted_stop == start:
            continue
        if start != next_step:
            problems.append(f"generation {number}: step {start} follows, expected step {next_step}")
        gap = first_sample - next_sample
        missing, repeated = missing + max(gap, 0), repeated + max(-gap, 0)
        samples += (counted_stop - start) * count
        steps += counted_stop - start
        next_step, next_sample = counted_stop, max(next_sample, first_sample + (counted_stop - start) * count)
    epoch = {"epoch": 0, "samples": samples, "missing": missing, "repeated": repeated, "redone": redone}
    ok = not problems and not missing and not repeated and steps > 0
    return StepsReport(ok, [epoch], problems, len(generations), steps)
