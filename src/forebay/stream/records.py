"""Documents of files of every format that `prepare` reads, in an order that the key of an epoch fixes.

Hides: which file of an epoch comes when, and how reading goes on where it stopped: at the very record in JSONL, lines,
tar and TFRecord (compressed: after unpacking what stands before it), at the row group in Parquet, at the batch in
Arrow, from the file's beginning in all others. Records that stand before the place are skipped, never yielded twice.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import PrepareError, StateError, UsageError
from forebay.formats.inputs import InputFile, ReadOptions
from forebay.formats.records import Record
from forebay.order.bijection import permute
from forebay.prepare.inputs import find_inputs, read_split, split_files
from forebay.storage.listing import describe_skipped

_log = logging.getLogger("forebay.stream")
_START = (0, 0, -1, 0, 0)


class FileRecords:
    """The records of files: paths, directories, globs, URLs. What is left out of a directory is logged.

    `identity`, which two machines must share for a position to mean the same, is that of each file's format, size and
    first 4 KiB.
    """

    def __init__(self, inputs: Sequence[str | Path], options: ReadOptions) -> None:
        self._options = options
        listed = find_inputs([path for name in inputs for path in _expand(name)], options)
        for line in describe_skipped(listed.skipped):
            _log.warning("stream: %s", line)
        self._files = listed.files
        fields = [(source.format, source.compression, source.bytes, source.sha256) for source in self._files]
        self.identity = hashlib.sha256(json.dumps(fields).encode()).hexdigest()

    def open(self, epoch: int, key: bytes | None, position: Any = None) -> FileReading:
        """Open an epoch's records from a position, or from the beginning; a key fixes the order of the files."""
        order = np.arange(len(self._files), dtype=np.uint64)
        if key is not None:
            order = permute(order, len(order), key)
        sources = [self._files[i] for i in order.tolist()]
        start = check_position(position, len(sources))
        return FileReading(lambda index: sources[index] if index < len(sources) else None, self._options, start)


@dataclass
class FileReading:
    """The records of some sources, one source after the other; `source_at(index)` is None after the last.

    Its position is five integers: the source; the piece of it; where in the piece to begin (-1: at its beginning) and
    the number of the record there; how many records from there on were read.
    """

    _source_at: Callable[[int], InputFile | None]
    _options: ReadOptions
    _position: tuple[int, int, int, int, int]

    def position(self) -> list[int]:
        """Return plain JSON from which `open` continues with the record after the last one yielded."""
        return list(self._position)

    def __iter__(self) -> Iterator[tuple[Record, str]]:
        index, number, start, first, num_read = self._position
        while (source := self._source_at(index)) is not None:
            pieces = split_files([source], self._options)
            while number < len(pieces):
                piece = pieces[number] if start < 0 else replace(pieces[number], start=start)
                passed, num_read = num_read, 0
                for record in read_split(piece, self._options):
                    if record.failed:
                        raise PrepareError(record.problem)
                    if record.start >= 0:
                        start, first, num_read = record.start, first + num_read, 0
                    num_read += 1
                    if passed:
                        passed -= 1
                        continue
                    self._position = (index, number, start, first, num_read)
                    if record.problem and not record.location:
                        location = f"record {first + num_read - 1}" + (f" of piece {number}" if number else "")
                        record = replace(record, location=location)
                    yield record, source.name
                number, start, first, num_read = number + 1, -1, 0, 0
            index, number = index + 1, 0
        self._position = (index, *_START[1:])


def check_position(position: Any, sources: int | None = None) -> tuple[int, int, int, int, int]:
    """Return the position of a FileReading from JSON; None: the beginning. `sources`: how many there are, if known."""
    if position is None:
        return _START
    if not isinstance(position, list) or len(position) != 5 or not all(type(n) is int for n in position):
        raise StateError(f"stream state: expected five integers for the place in the files, got {position!r}.")
    index, number, start, first, num_read = position
    if min(index, number, start + 1, first, num_read) < 0 or (sources is not None and index > sources):
        many = "the" if sources is None else sources
        raise StateError(f"stream state: expected a place in {many} files, got {position}. Take it from state_dict().")
    return index, number, start, first, num_read


def _expand(name: str | Path) -> Sequence[str | Path]:
    text = str(name)
    if "://" in text or not glob.has_magic(text) or Path(text).exists():
        return [name]
    matches = sorted(glob.glob(text, recursive=True))  # noqa: PTH207 - an absolute pattern is none for Path.glob
    if not matches:
        raise UsageError(f"stream: expected files that match {text!r}, got none. Check the pattern.")
    return matches
