"""Pairs of documents with an equal key: an external sort of signatures in runs, and their merge, in bounded memory.

A run has columns of u64 after each other: the key (two columns for 128 bits), then the number that has it. Where a key
occurs often, a run keeps the first number and pairs the others with it, so that a key costs a merge one record a run. A
pair is two u64: the later number, the earlier one. The bytes are the same at any scale: a range of keys is cut into
4^scale ranges that are sorted one by one.
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
_CHUNK_ROWS = 1 << 14
SORT_FACTOR = 5
"""Bytes of memory that sorting takes for each byte of records: they, the permutation, a sorted copy, the pairs."""


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of a split's signature file: documents, or the rows of a unit.

    `base` is the number in the corpus of the split's row 0, and `document` that of its first document.
    """

    prefix: str
    base: int
    start: int
    stop: int
    document: int


@dataclass(frozen=True)
class Keys:
    """The keys of signature files `.ENDING`: `columns` words a row, each `key_columns` in turn a key.

    A document has a row, or as many as its u32 in `.COUNTS` says.
    """

    ending: str
    columns: int
    key_columns: int
    counts: str = ""

    @property
    def record_bytes(self) -> int:
        """Of a key with its number."""
        return 8 * (self.key_columns + 1)


@dataclass(frozen=True)
class SortTask:
    """Signatures to a sorted run `NAME.run`, and pairs within it, `NAME.pairs`.

    `drop`: a file with a byte a document of the corpus: the rows of a document whose byte is not 0 are left out.
    """

    name: str
    folder: str
    keys: Keys
    ranges: tuple[RowRange, ...]
    drop: str = ""


@dataclass(frozen=True)
class MergeTask:
    """Range number `index` of `num_ranges` equal ranges of keys, over `runs` runs named `STEM-N`, to `NAME.pairs`."""

    name: str
    folder: str
    key_columns: int
    stem: str
    runs: int
    index: int
    num_ranges: int


def reserve(file: BinaryIO, size: int) -> None:
    """Allocate a file of zeros on the disk: writing to a sparse map on a full disk would end the process."""
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.truncate(size)


def sort_run(task: SortTask, scale: int) -> str:
    """Run a SortTask unless its run exists, which is committed last. Returns its name."""
    out = Path(task.folder) / f"{task.name}.run"
    if out.exists():
        return task.name
    with temporary_directory(out) as folder:
        columns = [folder / str(column) for column in range(task.keys.key_columns + 1)]
        with open_atomic(out.with_suffix(".pairs")) as pairs, ExitStack() as stack:
            files = [stack.enter_context(column.open("wb")) for column in columns]
            for low, high in _ranges(0, 1 << 64, 4**scale):
                for file, values in zip(files, _group(_select(task, low, high), pairs)):
                    file.write(values.data)
        with open_atomic(out) as run:
            for column in columns:
                with column.open("rb") as values_file:
                    shutil.copyfileobj(values_file, run, 1 << 20)
    return task.name


def merge_runs(task: MergeTask, scale: int) -> str:
    """Run a MergeTask unless its pairs exist. Returns its name."""
    out = Path(task.folder) / f"{task.name}.pairs"
    if out.exists():
        return task.name
    step = -(-(1 << 64) // task.num_ranges)
    low, high = task.index * step, min((task.index + 1) * step, 1 << 64)
    with open_atomic(out) as pairs:
        for lower, upper in _ranges(low, high, 4**scale):
            parts = [
                _read_run(Path(task.folder) / f"{task.stem}-{run}.run", task.key_columns, lower, upper)
                for run in range(task.runs)
            ]
            _group([np.concatenate(column) for column in zip(*parts)], pairs)
    return task.name


def _ranges(low: int, high: int, count: int) -> Iterator[tuple[int, int]]:
    step = -(-(high - low) // count)
    for start in range(low, high, step):
        yield start, min(start + step, high)


def _records(task: SortTask) -> Iterator[list[U64]]:
    """Columns of keys, then of numbers; without keys of zeros and those of dropped documents."""
    keys, width = task.keys, task.keys.key_columns
    per_row = keys.columns // width
    for rows in task.ranges:
        unit_ends: U64 | None = None
        if keys.counts and task.drop:
            unit_ends = np.cumsum(np.fromfile(f"{rows.prefix}.{keys.counts}", "<u4"), dtype=np.uint64)
        for start in range(rows.start, rows.stop, _CHUNK_ROWS):
            stop = min(start + _CHUNK_ROWS, rows.stop)
            words = read_u64(f"{rows.prefix}.{keys.ending}", start * keys.columns, stop * keys.columns)
            present = words.reshape(-1, width).any(axis=1)
            if task.drop:
                present &= np.repeat(_is_kept(task.drop, rows, start, stop, unit_ends), per_row)
            numbers = np.repeat(np.arange(rows.base + start, rows.base + stop, dtype=np.uint64), per_row)
            yield [*(words[column::width][present] for column in range(width)), numbers[present]]


def _is_kept(drop: str, rows: RowRange, start: int, stop: int, unit_ends: U64 | None) -> NDArray[np.bool_]:
    if unit_ends is None:
        return np.asarray(read_flags(drop, rows.document + start, stop - start) == 0)
    if start == stop:
        return np.empty(0, np.bool_)
    documents = np.searchsorted(unit_ends, np.arange(start, stop, dtype=np.uint64), side="right")
    flags = read_flags(drop, rows.document + int(documents[0]), int(documents[-1] - documents[0]) + 1)
    return np.asarray(flags[documents - documents[0]] == 0)


def read_flags(path: str | Path, start: int, count: int) -> NDArray[np.uint8]:
    """Bytes [start, start + count) of a file."""
    return np.fromfile(path, np.uint8, count, offset=start)


def read_u64(path: str | Path, start: int, stop: int) -> U64:
    """Words [start, stop) of a file of u64."""
    words: U64 = np.fromfile(path, "<u8", stop - start, offset=8 * start)
    if len(words) != stop - start:
        raise PrepareError(
            f"{path}: expected {8 * stop} bytes or more, got {Path(path).stat().st_size}. Sign it again."
        )
    return words


def _select(task: SortTask, low: int, high: int) -> list[U64]:
    chunks: list[list[U64]] = [[np.empty(0, np.uint64)] for _ in range(task.keys.key_columns + 1)]
    for columns in _records(task):
        inside = (columns[0] >= np.uint64(low)) & (columns[0] <= np.uint64(high - 1))
        for chunk, column in zip(chunks, columns):
            chunk.append(column[inside])
    return [np.concatenate(chunk) for chunk in chunks]


def _group(columns: list[U64], pairs: BinaryIO) -> list[U64]:
    """Sort records by key; pair all numbers of a key with its first, and return the first record of each.

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
    pairs.write(np.stack([numbers[later], numbers[earlier]], axis=1).data)
    return [column[firsts] for column in columns]


def _read_run(path: Path, key_columns: int, low: int, high: int) -> list[U64]:
    rows = path.stat().st_size // (8 * (key_columns + 1))
    if not rows:
        return [np.empty(0, np.uint64)] * (key_columns + 1)
    key = np.memmap(path, "<u8", "r", shape=(rows,))
    start = int(np.searchsorted(key, np.uint64(low)))
    stop = int(np.searchsorted(key, np.uint64(high - 1), "right"))
    return [read_u64(path, column * rows + start, column * rows + stop) for column in range(key_columns + 1)]
