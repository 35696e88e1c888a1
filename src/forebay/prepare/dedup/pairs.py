"""From signatures to links between equal keys: runs sorted by key, and their merge, in bounded memory.

Hides: the external sort. A `Sort` task turns the rows of some parts into one sorted run: columns of u64 after each
other, the key (two columns for 128 bits), then the number that has it. Where one key occurs often it keeps the first
number and links the others to it, so that a key costs a merge no more than one record a run, however many copies there
are. A `Merge` task reads one range of keys from all runs and links across them. A link is a pair of u64: the later
number, the earlier one.

Both write the same bytes at any scale: a range of keys is cut into 4^scale ranges that are sorted one by one.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from forebay.errors import PrepareError
from forebay.files import open_atomic, temporary_directory

U64 = NDArray[np.uint64]
_CHUNK_ROWS = 1 << 15
RECORD_BYTES = {"minhash": 16, "exact": 24, "units": 24}
SORT_FACTOR = 5
"""Bytes of memory that sorting takes for each byte of records: they, the permutation, a sorted copy, the links."""


@dataclass(frozen=True)
class Span:
    """Rows [start, stop) of a part's file: documents, or of `.units` lines or paragraphs.

    `base` is the number in the corpus of the part's row 0, and `document` that of its first document; -1 if none of
    its documents can have been dropped.
    """

    prefix: str
    base: int
    start: int
    stop: int
    document: int


@dataclass(frozen=True)
class Sort:
    """Rows of a kind (`exact`, `minhash`, `units`) to a sorted run `NAME.run`, and links among them `NAME.links`.

    `drop`: a file with a byte a document of the corpus: the rows of a document whose byte is not 0 are left out.
    """

    name: str
    folder: str
    kind: str
    columns: int
    spans: tuple[Span, ...]
    drop: str = ""


@dataclass(frozen=True)
class Merge:
    """Range number `index` of `ranges` equal ranges of keys, over `runs` runs named `STEM-N`, to `NAME.links`."""

    name: str
    folder: str
    kind: str
    stem: str
    runs: int
    index: int
    ranges: int


def reserve(file: BinaryIO, size: int) -> None:
    """Make a file that long, of zeros, with room on the disk: writing to a map of one without would end the process."""
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.truncate(size)


def sort_run(task: Sort, scale: int) -> str:
    """Run a Sort; its run is committed last, and one that is there is not made again. Returns its name."""
    out = Path(task.folder) / f"{task.name}.run"
    if out.exists():
        return task.name
    keys = _key_columns(task.kind)
    with temporary_directory(out) as folder:
        pieces = [folder / str(column) for column in range(keys + 1)]
        with open_atomic(out.with_suffix(".links")) as links, ExitStack() as stack:
            files = [stack.enter_context(piece.open("wb")) for piece in pieces]
            for low, high in _ranges(0, 1 << 64, 4**scale):
                columns = _grouped(_select(_rows(task), keys, low, high), links)
                for file, column in zip(files, columns):
                    file.write(column.data)
        with open_atomic(out) as whole:
            for piece in pieces:
                with piece.open("rb") as sorted_column:
                    shutil.copyfileobj(sorted_column, whole, 1 << 20)
    return task.name


def merge_runs(task: Merge, scale: int) -> str:
    """Run a Merge, or take up its links. Returns its name."""
    out = Path(task.folder) / f"{task.name}.links"
    if out.exists():
        return task.name
    keys = _key_columns(task.kind)
    step = -(-(1 << 64) // task.ranges)
    low, high = task.index * step, min((task.index + 1) * step, 1 << 64)
    with open_atomic(out) as links:
        for lower, upper in _ranges(low, high, 4**scale):
            parts = [
                _slice_of_run(Path(task.folder) / f"{task.stem}-{run}.run", keys, lower, upper)
                for run in range(task.runs)
            ]
            _grouped([np.concatenate(column) for column in zip(*parts)], links)
    return task.name


def _key_columns(kind: str) -> int:
    return 1 if kind == "minhash" else 2


def _ranges(low: int, high: int, pieces: int) -> Iterator[tuple[int, int]]:
    step = -(-(high - low) // pieces)
    for start in range(low, high, step):
        yield start, min(start + step, high)


def _rows(task: Sort) -> Iterator[list[U64]]:
    """The records of its spans: columns of keys, then numbers; those of dropped documents and of nothing left out."""
    width = task.columns
    for span in task.spans:
        ends: U64 | None = None
        if task.kind == "units" and task.drop and span.document >= 0:
            ends = np.cumsum(np.fromfile(f"{span.prefix}.counts", "<u4"), dtype=np.uint64)
        for start in range(span.start, span.stop, _CHUNK_ROWS):
            stop = min(start + _CHUNK_ROWS, span.stop)
            rows = read_u64(f"{span.prefix}.{task.kind}", start * width, stop * width).reshape(-1, width)
            keep = rows.any(axis=1)
            if task.drop and span.document >= 0:
                keep &= _is_kept(task.drop, span, start, stop, ends)
            rows, numbers = rows[keep], np.flatnonzero(keep).astype(np.uint64) + np.uint64(span.base + start)
            if task.kind == "minhash":
                yield [rows.reshape(-1), np.repeat(numbers, width)]
            else:
                yield [rows[:, 0], rows[:, 1], numbers]


def _is_kept(drop: str, span: Span, start: int, stop: int, ends: U64 | None) -> NDArray[np.bool_]:
    """Whether the documents of rows [start, stop) are kept."""
    if ends is None:
        return np.asarray(read_flags(drop, span.document + start, stop - start) == 0)
    if start == stop:
        return np.empty(0, np.bool_)
    of = np.searchsorted(ends, np.arange(start, stop, dtype=np.uint64), side="right")
    flags = read_flags(drop, span.document + int(of[0]), int(of[-1] - of[0]) + 1)
    return np.asarray(flags[of - of[0]] == 0)


def read_flags(path: str | Path, start: int, count: int) -> NDArray[np.uint8]:
    """Bytes [start, start + count) of a file."""
    return np.fromfile(path, np.uint8, count, offset=start)


def read_u64(path: str | Path, start: int, stop: int) -> U64:
    """Words [start, stop) of a file of u64."""
    found: U64 = np.fromfile(path, "<u8", stop - start, offset=8 * start)
    if len(found) != stop - start:
        raise PrepareError(
            f"{path}: expected {8 * stop} bytes or more, got {Path(path).stat().st_size}. Sign it again."
        )
    return found


def _select(chunks: Iterator[list[U64]], keys: int, low: int, high: int) -> list[U64]:
    found: list[list[U64]] = [[np.empty(0, np.uint64)] for _ in range(keys + 1)]
    for columns in chunks:
        inside = (columns[0] >= np.uint64(low)) & (columns[0] <= np.uint64(high - 1))
        for held, column in zip(found, columns):
            held.append(column[inside])
    return [np.concatenate(held) for held in found]


def _grouped(columns: list[U64], links: BinaryIO) -> list[U64]:
    """Sort records by key; link all numbers of a key to its first, and return the first record of each.

    The columns are ordered by number, and the sort is stable.
    """
    if not len(columns[0]):
        return columns
    order = np.lexsort(columns[-2::-1])
    columns = [column[order] for column in columns]
    del order
    new = np.zeros(len(columns[0]), np.bool_)
    new[0] = True
    for key in columns[:-1]:
        new[1:] |= key[1:] != key[:-1]
    firsts = np.flatnonzero(new)
    numbers, later = columns[-1], np.flatnonzero(~new)
    earlier = firsts[np.searchsorted(firsts, later) - 1]
    links.write(np.stack([numbers[later], numbers[earlier]], axis=1).data)
    return [column[firsts] for column in columns]


def _slice_of_run(path: Path, keys: int, low: int, high: int) -> list[U64]:
    """The records of a run whose (first) key is in [low, high): found by bisection, so that only they are read."""
    rows = path.stat().st_size // (8 * (keys + 1))
    if not rows:
        return [np.empty(0, np.uint64)] * (keys + 1)
    key = np.memmap(path, "<u8", "r", shape=(rows,))
    start = int(np.searchsorted(key, np.uint64(low)))
    stop = int(np.searchsorted(key, np.uint64(high - 1), "right"))
    return [read_u64(path, column * rows + start, column * rows + stop) for column in range(keys + 1)]
