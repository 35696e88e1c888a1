"""Documents of files of every format that `prepare` reads, in an order that the key of an epoch fixes, and in shares.

Hides: which file of an epoch comes when, what each lane reads of it, and how reading goes on where it stopped: at the
very record in JSONL, lines, tar and TFRecord (compressed: after unpacking what stands before it), at the row group in
Parquet, at the batch in Arrow, from the file's beginning in all others. Records that stand before the place are
skipped, never yielded twice.
"""

import hashlib
import heapq
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forebay.errors import PrepareError, StateError
from forebay.formats.inputs import SPLIT_BYTES, InputFile, InputSplit, ReadOptions
from forebay.formats.records import Record
from forebay.order.bijection import permute
from forebay.prepare.inputs import divide_file, find_inputs, read_split, resolve_format, split_files, text_format
from forebay.storage.listing import describe_skipped

MIN_SHARE_BYTES = 1 << 20
"""Files with fewer bytes for each lane are read by all lanes, each of which takes every `lanes`-th record."""
RUN_FILES = 1000
"""Files of the hub are shuffled in runs of so many: a page of its listing, so that the first is known at once."""
LANES = (24, 20, 16, 12, 8, 6, 4, 3, 2)
"""Numbers of lanes for worlds that change: those that many world sizes divide."""
_MAX_LOAD = 1.05  # of a lane, over the mean, where whole files are dealt
_MAX_EXCESS = 1.15  # of a lane, over the mean, where their number is chosen
_log = logging.getLogger("forebay.stream")
_START = (0, 0, -1, 0, 0)


class Share(NamedTuple):
    """The part of the records that a lane reads: number `lane` of `lanes` parts of about the same size."""

    lane: int = 0
    lanes: int = 1


ALL_RECORDS = Share()


@dataclass(frozen=True)
class FilePart:
    """What a lane reads of a file: between two borders (bytes from 0 to the file's size), and of that a share.

    `number` is the file's among all, the same for each lane: files of one record are dealt by it.
    """

    file: InputFile
    number: int
    borders: tuple[int, ...] = ()  # (): the file is not divided.
    index: int = 0
    share: Share = ALL_RECORDS

    @property
    def bytes(self) -> int:
        return self.borders[self.index + 1] - self.borders[self.index] if self.borders else self.file.bytes

    def splits(self, options: ReadOptions) -> tuple[list[InputSplit], Share]:
        """What to read, and the records of it to take.

        A file whose row groups are too large for its parts is read by all lanes, each of which takes its records.
        """
        file, borders = resolve_format(self.file, options), self.borders
        is_text = is_divisible(file) and text_format(file.format).is_plain_text
        if not borders and not is_text:
            return split_files([file], options), self.share
        borders = borders or (0, file.bytes)
        parts, sizes = divide_file(file, options, borders), np.diff(borders)
        if any(part is None and 2 * size >= max(sizes) for part, size in zip(parts, sizes)):
            return split_files([file], options), Share(self.index, len(parts))
        part = parts[self.index]
        if part is None:
            return [], self.share
        if not part.stop:  # empty, or damaged so that it is read as one
            return split_files([file], options), self.share
        count, length = max(1, part.bytes // SPLIT_BYTES), part.stop - part.start
        edges = [part.start + length * number // count for number in range(count + 1)]
        pieces = divide_file(file, options, edges) if is_text else [
            replace(part, start=start, stop=stop, bytes=part.bytes // count) for start, stop in pairwise(edges)
        ]  # fmt: skip
        return [piece for piece in pieces if piece is not None and piece.start < piece.stop], self.share


def share_files(files: Sequence[InputFile], share: Share) -> list[FilePart]:
    """What a lane reads of files: the lanes' parts are disjoint and together all, and of about the same size.

    Whole files if these can be dealt evenly, or cannot be divided and are as many as the lanes. Else the files are laid
    end to end and cut at `lanes` equal parts, where a file that cannot be divided goes to the part with its middle.
    """
    lane, lanes = share
    everything = [FilePart(file, number, share=share) for number, file in enumerate(files)]
    sizes = [max(1, file.bytes) for file in files]
    if lanes == 1 or sum(sizes) < lanes * MIN_SHARE_BYTES:
        return everything
    undivided = [replace(part, share=ALL_RECORDS) for part in everything]
    loads, owners = [(0, number) for number in range(lanes)], [0] * len(files)
    for index in sorted(range(len(files)), key=lambda index: (-sizes[index], index)):  # the largest first
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + sizes[index], owners[index]))
    divisible = [is_divisible(file) for file in files]
    is_even = max(loads)[0] * lanes <= _MAX_LOAD * sum(sizes)
    if is_even or (len(files) >= lanes and not any(divisible)):
        return [part for part, owner in zip(undivided, owners) if owner == lane]
    stops = np.cumsum(sizes).tolist()
    cuts = [sum(sizes) * number // lanes for number in range(1, lanes)]
    owned, parts = set[int](), list[FilePart]()
    for part, size, stop, divides in zip(undivided, sizes, stops, divisible):
        start = stop - size
        inside = [cut - start for cut in cuts if start < cut < stop] if divides else []
        first = int(np.searchsorted(cuts, start if divides else start + size // 2, "right"))
        owned.update(range(first, first + len(inside) + 1))
        if first <= lane <= first + len(inside):
            borders = (0, *inside, size) if inside else ()
            parts.append(replace(part, borders=borders, index=lane - first))
    return parts if len(owned) == lanes else everything


def is_divisible(file: InputFile) -> bool:
    """Whether parts of a file can be read alone."""
    return bool(file.format) and not (file.compression or file.encoding) and text_format(file.format).is_divisible


@dataclass(eq=False)
class FileRecords:
    """The records of files, which come in runs: lists, each shuffled and shared by itself.

    Args:
        identity: What two machines must share for a position to mean the same.
        runs: The runs of an epoch, which may be listed as they are read; of about so many files.
    """

    identity: str
    options: ReadOptions
    runs: Callable[[int], Iterable[list[InputFile]]]

    def max_lanes(self) -> int:
        """Return the max_part lanes of which each reads a part of its own, of about the same size; at least 1."""
        files, options = next(iter(self.runs(RUN_FILES)), []), self.options
        for lanes in sorted({*LANES, min(LANES[0], len(files))}, reverse=True) if files else ():
            shares = [share_files(files, Share(lane, lanes)) for lane in range(lanes)]
            loads = [sum(part.bytes for part in parts) for parts in shares]
            largest = _MAX_EXCESS * sum(loads) / lanes
            max_part = max((part for parts in shares for part in parts), key=lambda part: len(part.borders))
            share = max_part.share
            if max_part.borders:  # One file stands for all that are divided.
                pieces = divide_file(resolve_format(max_part.file, options), options, max_part.borders)
                loads += [piece.bytes for piece in pieces if piece]
                _, share = max_part.splits(options)
            if max(loads) <= largest and share.lanes == 1:
                return lanes
        return 1

    def open(self, epoch: int, key: bytes | None, position: Any = None, share: Share = ALL_RECORDS) -> "FileReading":
        """Open a share of an epoch's records from a position, or its beginning; a key fixes the order of the files."""
        parts, lanes = list[FilePart](), share.lanes
        # In the order of the files the first one is enough to begin.
        runs = iter(self.runs(RUN_FILES if key or lanes > 1 else 1))

        def part_at(index: int) -> FilePart | None:
            while index >= len(parts) and (run := next(runs, None)) is not None:
                order = np.arange(len(run), dtype=np.uint64)
                order = order if key is None else permute(order, len(run), key)
                shared = share_files([run[i] for i in order.tolist()], share)
                if shared and shared[0].share.lanes > 1 and sum(file.bytes for file in run) >= lanes * MIN_SHARE_BYTES:
                    _log.warning(
                        "stream: %d files that cannot be divided are too few for %d lanes: each lane reads all of "
                        "them and takes its share of the records. Write more files, or uncompressed ones.",
                        len(run), lanes,
                    )  # fmt: skip
                parts.extend(shared)
            return parts[index] if index < len(parts) else None

        return FileReading(part_at, self.options, check_position(position))


def find_records(inputs: Sequence[str | Path], options: ReadOptions) -> FileRecords:
    """The records of paths, directories, globs, URLs. What is left out of a directory is logged.

    Their identity is that of each file's format, size and first 4 KiB.
    """
    listed = find_inputs(inputs, options)
    if failed := [item for item in listed.skipped if item.status == "failed"]:
        raise PrepareError(f"stream: expected inputs that can be read, got {'; '.join(describe_skipped(failed))}")
    for line in describe_skipped(listed.skipped):
        _log.warning("stream: %s", line)
    fields = [(source.format, source.compression, source.bytes, source.sha256) for source in listed.files]
    identity = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    return FileRecords(identity, options, lambda size: [list(listed.files)])


@dataclass
class FileReading:
    """The records of parts of files, one part after the other; `part_at(index)` is None after the last.

    Its position is five integers: the part; the piece of it; where in the piece to begin (-1: at its beginning) and
    the number of the record there; how many records from there on were read.
    """

    _part_at: Callable[[int], FilePart | None]
    _options: ReadOptions
    _position: tuple[int, int, int, int, int]

    def position(self) -> list[int]:
        """Return plain JSON from which `open` continues with the record after the last one yielded."""
        return list(self._position)

    def __iter__(self) -> Iterator[tuple[Record, str]]:
        index, number, start, first, num_read = self._position
        while (part := self._part_at(index)) is not None:
            pieces, share = part.splits(self._options)
            while number < len(pieces):
                piece = pieces[number] if start < 0 else replace(pieces[number], start=start)
                passed, num_read = num_read, 0
                for record in read_split(piece, self._options):
                    if record.failed:
                        raise PrepareError(f"{part.file.path}: {record.problem.removeprefix(f'{part.file.path}: ')}")
                    if record.start >= 0:
                        start, first, num_read = record.start, first + num_read, 0
                    num_read += 1
                    if passed:
                        passed -= 1
                        continue
                    self._position = (index, number, start, first, num_read)
                    if (part.number + number + first + num_read) % share.lanes != share.lane:
                        continue
                    if record.problem and not record.location:
                        location = f"record {first + num_read - 1}" + (f" of piece {number}" if number else "")
                        record = replace(record, location=location)
                    yield record, part.file.name
                number, start, first, num_read = number + 1, -1, 0, 0
            index, number = index + 1, 0
        self._position = (index, *_START[1:])


def check_position(position: Any) -> tuple[int, int, int, int, int]:
    """Return the position of a FileReading from JSON; None: the beginning."""
    if position is None:
        return _START
    if (
        not isinstance(position, list)
        or [type(n) for n in position] != [int] * 5
        or min(map(sub, position, _START)) < 0
    ):
        raise StateError(f"stream state: expected a place in the files, got {position}. Take it from state_dict().")
    return tuple(position)
