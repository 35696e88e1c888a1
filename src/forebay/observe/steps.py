"""The coordinator's log of steps, read and proved: each global sample once in the lineage that survived.

The log is the coordinator's own SQLite file (`schedule.roster`): order mode needs no second record, for what a step
read is a pure function. A file is read whether or not a coordinator is running on it, from a copy of it and its WAL.
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
    """Whether this is a coordinator's state: its directory, or the file in it."""
    path = path / ROSTER_NAME if path.is_dir() else path
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


@dataclass(frozen=True)
class StepsReport:
    """What a coordinator's log proves. `epochs` has one dict, for a run's samples are numbered through: samples,
    missing, repeated; redone: samples of steps that a later generation did again, whose gradients did not count.
    """

    ok: bool
    epochs: list[dict[str, int]]
    problems: list[str] = field(default_factory=list)
    generations: int = 0
    steps: int = 0

    def to_json(self) -> dict[str, Any]:
        """What `forebay ledger verify --json` prints."""
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
    """The file and its WAL as they were at one moment: again, if a coordinator wrote meanwhile."""
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
    found = [file.stat() if file.exists() else None for file in files]
    return [(0, 0) if one is None else (one.st_size, one.st_mtime_ns) for one in found]


def verify_steps(path: Path) -> StepsReport:
    """Whether each global sample from the first on was used once, by the steps that count.

    A generation's steps count up to where the next one began. Cost: one pass over the log's rows.
    """
    with open_log(path) as roster:
        generations, rows = roster.generations(), roster.rows()
    begun = {g["number"]: g for g in generations}
    ends: dict[int, int | None] = {}
    least: int | None = None
    for generation in reversed(generations):
        ends[generation["number"]] = least
        start = int(generation["start_step"])
        least = start if least is None else min(least, start)
    problems: list[str] = []
    samples = missing = repeated = redone = steps = 0
    next_step = next_sample = 0
    for number, start, stop, first_sample, count in sorted(rows, key=lambda row: (row[0], row[1])):
        if number not in begun or not 0 <= start < stop or count < 0:
            problems.append(f"steps [{start}, {stop}) of generation {number}: there is no such generation or step")
            continue
        end = ends[number]
        kept = stop if end is None else max(start, min(stop, end))
        redone += (stop - kept) * count
        if kept == start:
            continue
        if start != next_step:
            problems.append(f"generation {number}: step {start} follows, expected step {next_step}")
        gap = first_sample - next_sample
        missing, repeated = missing + max(gap, 0), repeated + max(-gap, 0)
        samples += (kept - start) * count
        steps += kept - start
        next_step, next_sample = kept, max(next_sample, first_sample + (kept - start) * count)
    epoch = {"epoch": 0, "samples": samples, "missing": missing, "repeated": repeated, "redone": redone}
    ok = not problems and not missing and not repeated and steps > 0
    return StepsReport(ok, [epoch], problems, len(generations), steps)
