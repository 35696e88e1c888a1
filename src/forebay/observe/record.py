"""The record of a run: a folder of views as lines of JSON, which `forebay top --replay` opens later.

Each process that records writes a file of its own, `NAME.views.jsonl`, so that the ranks of a run share a folder. A
file is bounded: when it is full, every second view of it is dropped and the interval doubles. A line that was cut by a
kill is ignored.
"""

import math
import re
from pathlib import Path

import orjson

from forebay.errors import StateError, UsageError
from forebay.files import atomic_write
from forebay.observe.views import View, merge_views

SUFFIX = ".views.jsonl"
MAX_BYTES = 64 << 20
INTERVAL_S = 2.0
_TOGETHER_S = 1.0  # Views of several files within this time are of one moment.
_TIME = re.compile(rb'^\{"at":([0-9.]+)')


class RunRecord:
    """Appends views to a file of a folder.

    Args:
        name: Of the file, without its suffix; another process uses another one.
        interval_s: Views that follow sooner are not written. It doubles whenever the file is full.

    Raises:
        UsageError: If the folder cannot be created or written.
    """

    def __init__(
        self, folder: str | Path, name: str = "run", *, interval_s: float = INTERVAL_S, max_bytes: int = MAX_BYTES
    ) -> None:
        self.path = Path(folder) / f"{name}{SUFFIX}"
        self._interval_s, self._max_bytes, self._written_at = interval_s, max_bytes, -math.inf
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:  # A line that was cut is ended, so that the next one can be read.
                self._size = file.tell()
                file.seek(max(0, self._size - 1))
                if file.read() not in (b"", b"\n"):
                    file.write(b"\n")
        except OSError as error:
            raise UsageError(
                f"record: cannot write {self.path}: {error}. Give a folder that can be written."
            ) from error

    def add(self, view: View) -> None:
        """Append a view, unless the last one is less than the interval old. StateError if the disk refuses it."""
        if view["at"] - self._written_at < 0.9 * self._interval_s:
            return
        line = orjson.dumps({"at": view["at"], **view}) + b"\n"
        try:
            if self._size + len(line) > self._max_bytes:
                self._thin()
            with self.path.open("ab") as file:
                file.write(line)
        except OSError as error:
            raise StateError(f"record: cannot write {self.path}: {error}. Free space, or record elsewhere.") from error
        self._size, self._written_at = self._size + len(line), view["at"]

    def _thin(self) -> None:
        rest = b"".join(self.path.read_bytes().splitlines(keepends=True)[1::2])
        atomic_write(self.path, rest)
        self._size, self._interval_s = len(rest), 2 * self._interval_s


class RecordReader:
    """Reads a record, also while it is written: an index of times in memory, views from the files.

    Raises:
        UsageError: If the folder has no record.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        # The bytes read of each file, and its views: (at, start, stop).
        self._files: dict[Path, tuple[int, list[tuple[float, int, int]]]] = {}
        if not is_record(self.folder):
            raise UsageError(
                f"{self.folder}: expected a folder with the record of a run (*{SUFFIX}), got none. Record one with "
                "`forebay dashboard ADDRESS --record DIR`, or forebay.serve_dashboard(loader, record=DIR)."
            )

    def times(self) -> list[float]:
        """When views were written, in order; those of several files within a second count as one."""
        self._index()
        merged: list[float] = []
        for moment in sorted(entry[0] for _, entries in self._files.values() for entry in entries):
            if not merged or moment - merged[-1] >= _TOGETHER_S:
                merged.append(moment)
        return merged

    def latest(self) -> View:
        """The last view. Raises UsageError if there is none yet."""
        return self.view_at(float("inf"))

    def view_at(self, moment: float) -> View:
        """The view at a moment in Unix seconds: of each file the last one that is not later, merged."""
        self._index()
        views = []
        for path, (_, entries) in sorted(self._files.items()):
            earlier = [entry for entry in entries if entry[0] < moment + _TOGETHER_S] or entries[:1]
            if earlier:
                _, start, stop = earlier[-1]
                with path.open("rb") as file:
                    file.seek(start)
                    views.append(orjson.loads(file.read(stop - start)))
        if not views:
            raise UsageError(f"{self.folder}: expected a view in the record, got none yet. Try again in a few seconds.")
        return merge_views(views)

    def _index(self) -> None:
        for path in self.folder.glob(f"*{SUFFIX}"):
            size, entries = self._files.get(path, (0, []))
            if path.stat().st_size < size:  # Every second view was dropped.
                size, entries = 0, []
            with path.open("rb") as file:
                file.seek(size)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # It is being written.
                    if (match := _TIME.match(line)) is not None and line.endswith(b"}\n"):
                        entries.append((float(match[1]), size, size + len(line)))
                    size += len(line)
            self._files[path] = size, entries


def is_record(folder: Path) -> bool:
    """Whether a folder has the record of a run."""
    return any(folder.glob(f"*{SUFFIX}"))
