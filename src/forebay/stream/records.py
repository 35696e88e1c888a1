"""Where documents come from: the `Records` seam, and files of every format that `prepare.read` knows.

Hides: which file of an epoch comes when, and how reading goes on where it stopped: at the very record in JSONL, lines,
tar and TFRecord (compressed: after unpacking what stands before it), at the row group in Parquet, at the batch in
Arrow, from the file's beginning in all others. Records that stand before the place are passed over, never given twice.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forebay.errors import PrepareError, StateError, UsageError
from forebay.formats.inputs import InputFile, ReadOptions
from forebay.formats.records import Record
from forebay.order.bijection import permute
from forebay.prepare.inputs import find_inputs, read_split, split_files
from forebay.storage.listing import describe_skipped

_log = logging.getLogger("forebay.stream")
_START = (0, 0, -1, 0, 0)


class Reading(Protocol):
    """One pass over the records of an epoch, from some place on."""

    def __iter__(self) -> Iterator[tuple[Record, str]]:
        """Each record, and the name of what holds it; those with a problem too. Once."""
        ...

    def place(self) -> Any:
        """Plain JSON from which `Records.open` goes on with the record after the last one given."""
        ...


class Records(Protocol):
    """Documents in an order that the key of an epoch fixes, readable from any place that was reached."""

    @property
    def identity(self) -> str:
        """What two machines must agree on for a place to mean the same."""
        ...

    def open(self, epoch: int, key: bytes | None, place: Any = None) -> Reading:
        """An epoch's records, from a place or from the beginning. `key` None: in the order in which they lie."""
        ...


class FileRecords:
    """The records of files: paths, directories, globs, URLs. What is left out of a directory is logged.

    No file is read whole to know it: its identity is its format, its size and its first 4 KiB.
    """

    def __init__(
        self, inputs: Sequence[str | Path] | str | Path, options: ReadOptions, *, follow_links: bool = False
    ) -> None:
        given = [inputs] if isinstance(inputs, str | Path) else list(inputs)
        self._options = options
        found = find_inputs([path for one in given for path in _expand(one)], options, follow_links=follow_links)
        for line in describe_skipped(found.skipped):
            _log.warning("stream: %s", line)
        self._files = found.files
        facts = [(source.format, source.compression, source.bytes, source.sha256) for source in self._files]
        self.identity = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def open(self, epoch: int, key: bytes | None, place: Any = None) -> FileReading:
        """As `Records` says; with a key the files of each epoch come in another order."""
        order = np.arange(len(self._files), dtype=np.uint64)
        if key is not None:
            order = permute(order, len(order), key)
        sources = [self._files[i] for i in order.tolist()]
        place_of = checked_place(place, len(sources))
        return FileReading(lambda index: sources[index] if index < len(sources) else None, self._options, place_of)


@dataclass
class FileReading:
    """The records of some sources, one source after the other; `source_at(index)` is None after the last.

    Its place is five integers: the source; the piece of it; where in the piece to begin (-1: at its beginning) and the
    number of the record there; how many records from there on were given.
    """

    _source_at: Callable[[int], InputFile | None]
    _options: ReadOptions
    _at: tuple[int, int, int, int, int]

    def place(self) -> list[int]:
        return list(self._at)

    def __iter__(self) -> Iterator[tuple[Record, str]]:
        index, number, start, first, given = self._at
        while (source := self._source_at(index)) is not None:
            pieces = split_files([source], self._options)
            while number < len(pieces):
                piece = pieces[number] if start < 0 else replace(pieces[number], start=start)
                passed, given = given, 0
                for record in read_split(piece, self._options):
                    if record.failed:
                        raise PrepareError(record.problem)
                    if record.start >= 0:
                        start, first, given = record.start, first + given, 0
                    given += 1
                    if passed:
                        passed -= 1
                        continue
                    self._at = (index, number, start, first, given)
                    if record.problem and not record.location:
                        record = replace(record, location=_where(first + given - 1, number))
                    yield record, source.name
                number, start, first, given = number + 1, -1, 0, 0
            index, number = index + 1, 0
        self._at = (index, *_START[1:])


def _where(number: int, piece: int) -> str:
    return f"record {number}" + (f" of piece {piece}" if piece else "")


def checked_place(place: Any, sources: int | None = None) -> tuple[int, int, int, int, int]:
    """The place of a FileReading as it came from JSON; None: the beginning. `sources`: how many there are, if known."""
    if place is None:
        return _START
    if not isinstance(place, list) or len(place) != 5 or not all(type(n) is int for n in place):
        raise StateError(f"stream state: expected five integers for the place in the files, got {place!r}.")
    index, number, start, first, given = place
    if min(index, number, start + 1, first, given) < 0 or (sources is not None and index > sources):
        many = "the" if sources is None else sources
        raise StateError(f"stream state: expected a place in {many} files, got {place}. Take it from state_dict().")
    return index, number, start, first, given


def _expand(given: str | Path) -> Iterator[str | Path]:
    """The paths that a glob stands for, sorted; all else as it is."""
    text = str(given)
    if "://" in text or not glob.has_magic(text) or Path(text).exists():
        yield given
        return
    found = sorted(glob.glob(text, recursive=True))  # noqa: PTH207 - an absolute pattern is none for Path.glob
    if not found:
        raise UsageError(f"stream: expected files that match {text!r}, got none. Check the pattern.")
    yield from found
