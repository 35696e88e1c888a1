"""Datasets of the hub, and those that other libraries stream, as records: WebDataset, MosaicML, any iterable.

The hub's files are read like local ones where their format is one of ours (`hub_records`).

Hides how each object continues at a position: by index (a map-style dataset, a MosaicML `StreamingDataset`, a list), by
a state of its own (`datasets.IterableDataset`), or by skipping records from the start, which is exact if the object
repeats its records. No library is imported here; only `hf:` may import `datasets`.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, TypeAlias

from forebay.errors import ForebayError, PrepareError, StateError, UsageError, error_text
from forebay.formats.inputs import InputFile, ReadOptions
from forebay.formats.records import Record, to_record
from forebay.prepare.inputs import resolve_format
from forebay.prepare.sources import open_with_library, source_at
from forebay.storage.hub_copies import HubCopy
from forebay.storage.hub_splits import PREFIX, HubSplit, find_split
from forebay.stream.records import ALL_RECORDS, LANES, FileRecords, Share

HUB = "hf:"
_ROWS = 256  # Read together by index: 0.3 us a row from Arrow where one by one takes 60.


def records_of(dataset: Any, options: ReadOptions) -> "Records":
    """Return the records of a dataset object, of `hf:NAME[/CONFIG][:SPLIT]` (a directory as NAME) or of a copy of one.

    Raises UsageError for an object that cannot be read again from a position.
    """
    if isinstance(dataset, str):
        url = dataset if dataset.startswith(PREFIX) else PREFIX + dataset.removeprefix(HUB)
        dataset = find_split(url) or open_with_library(url)
    if isinstance(dataset, HubSplit | HubCopy):
        return hub_records(dataset, options)
    library = type(dataset).__module__.partition(".")[0]
    if getattr(dataset, "_distributed", None) is not None:
        raise UsageError(
            "stream: expected a whole dataset, got one rank's part of it (split_dataset_by_node). Give the whole: "
            "ranks part it here."
        )
    if library == "datasets" and hasattr(dataset, "column_names") and hasattr(dataset, "__len__"):
        return ObjectRecords(dataset, options, _by_rows, "index", len(dataset))
    if library == "streaming" or isinstance(dataset, Sequence):
        size = int(dataset.size) if library == "streaming" else len(dataset)
        return ObjectRecords(dataset, options, lambda data, a, b: (data[i] for i in range(a, b)), "index", size)
    if library == "datasets" and hasattr(dataset, "state_dict"):
        _check_not_shuffled(dataset)
        return ObjectRecords(dataset, options, lambda dataset, start, stop: iter(dataset), "own")
    if not hasattr(dataset, "__iter__"):
        raise UsageError(f"stream: expected paths, URLs or an iterable of records, got {type(dataset).__name__}.")
    if iter(dataset) is dataset:
        raise UsageError(
            "stream: expected an iterable that can be read again, got an iterator, which can be read once. Give the "
            "dataset, not iter(dataset)."
        )
    return ObjectRecords(dataset, options, _skip_to, "replay")


def hub_records(split: HubSplit | HubCopy, options: ReadOptions) -> FileRecords:
    """The records of a split of the hub, or of a copy of one: the same, at the same positions.

    Their identity is the split's URL with the commit, which can be opened again when the hub has a newer one.
    """

    def runs(size: int) -> Iterator[list[InputFile]]:
        files = iter(partial(next, map(partial(source_at, split), count())), None)
        while run := [file for file in islice(files, size) if file]:
            yield run if options.format == "auto" else [resolve_format(file, options) for file in run]

    return FileRecords(split.url, options, runs)


@dataclass(eq=False)
class ObjectRecords:
    """The records of a dataset object; `kind` says how it continues: `index`, `own` (its state) or `replay`.

    Of an index a lane reads its range of rows; of another object all, of which it takes every `lanes`-th.

    Args:
        rows: Returns the rows [start, stop) of a dataset; kind `index` alone stops before its end.
        size: Of an index.
    """

    dataset: Any
    options: ReadOptions
    rows: Callable[[Any, int, int], Iterator[Any]]
    kind: str
    size: int = 0

    def __post_init__(self) -> None:
        dataset = self.dataset
        self._start = copy.deepcopy(dataset.state_dict()) if self.kind == "own" else {}
        shards = self.size if self.kind == "index" else getattr(dataset, "num_shards", None)
        name = f"{type(dataset).__module__}.{type(dataset).__name__}"
        self.identity = f"{name}:{shards if isinstance(shards, int) else '?'}"

    def max_lanes(self) -> int:
        """As `FileRecords.max_lanes`."""
        return LANES[0] if self.size >= LANES[0] ** 2 else 1

    def open(self, epoch: int, key: bytes | None, position: Any = None, share: Share = ALL_RECORDS) -> "ObjectReading":
        """As `FileRecords.open`; the order is the object's own, which is given the epoch if it takes one."""
        start, stop = 0, 0
        if self.kind == "index":
            start, stop = (self.size * number // share.lanes for number in (share.lane, share.lane + 1))
            share = ALL_RECORDS
        position = [start, None] if position is None else position
        if not isinstance(position, list) or len(position) != 2 or type(position[0]) is not int or position[0] < 0:
            raise StateError(
                f"stream state: expected a record's number and a dataset's state, got {str(position)[:80]}."
            )
        number, state = position
        # The state of an iteration is the object's: each lane of several has an object of its own.
        dataset = copy.deepcopy(self.dataset) if self.kind == "own" and share.lanes > 1 else self.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        if self.kind == "own":
            state = state or {**copy.deepcopy(self._start), "epoch": epoch}
            dataset.load_state_dict(state)
        return ObjectReading(self, dataset, number, state, stop, share)


@dataclass
class ObjectReading:
    """Rows of a dataset object from a number on; the position is that number, and the dataset's own state or None."""

    _records: ObjectRecords
    _dataset: Any
    _number: int
    _state: Any
    _stop: int
    _share: Share
    _started: bool = False

    def position(self) -> list[Any]:
        if self._records.kind == "own" and self._started:
            self._state = copy.deepcopy(self._dataset.state_dict())
        return [self._number, self._state]

    def __iter__(self) -> Iterator[tuple[Record, str]]:
        rows, name = self._records.rows(self._dataset, self._number, self._stop), self._records.identity
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except ForebayError:
                raise
            except Exception as error:  # file systems and decoders raise anything
                cause: BaseException = error
                while cause.__context__ is not None:  # an exception of a library's error handling hides the cause
                    cause = cause.__context__
                reason = f"{type(cause).__name__}: {error_text(cause)}"
                raise PrepareError(
                    f"{name}: cannot read input after {self._number} records: {reason}. Check the dataset."
                ) from error
            finally:
                self._started = True
            number, self._number = self._number, self._number + 1
            if number % self._share.lanes == self._share.lane:
                yield _record(number, row, self._records.options), name


def _record(number: int, row: Any, options: ReadOptions) -> Record:
    location, problem = f"record {number}", ""
    if isinstance(row, str | bytes):
        row = {options.text_key: row}
    if isinstance(row, Mapping) and "__key__" in row and options.text_key not in row:  # WebDataset: members by suffix
        if "txt" in row:
            row = {**row, options.text_key: row["txt"]}
        elif "json" in row:
            try:
                row = row["json"] if isinstance(row["json"], Mapping) else json.loads(row["json"])
            except ValueError as error:
                problem = f"not JSON: {error}"
    if not problem and not isinstance(row, Mapping):
        problem = f"expected a row with fields, got {type(row).__name__}"
    return Record(number, problem=problem, location=location) if problem else to_record(number, row, options, location)


def _by_rows(dataset: Any, start: int, stop: int) -> Iterator[Any]:
    for first in range(start, stop, _ROWS):
        columns = dataset[first : min(first + _ROWS, stop)]
        yield from (dict(zip(columns, values)) for values in zip(*columns.values()))


def _skip_to(dataset: Iterable[Any], start: int, stop: int) -> Iterator[Any]:
    rows = iter(dataset)
    for number in range(start):
        if next(rows, rows) is rows:
            raise StateError(
                f"stream state: expected {start} records before the position, got {number}. The dataset has other "
                "records than when the state was taken; open the same one."
            )
    yield from rows


def _check_not_shuffled(dataset: Any) -> None:
    """UsageError for a shuffle buffer of `datasets`, whose contents its state does not hold."""
    examples, depth = getattr(dataset, "_ex_iterable", None), 0
    while examples is not None and depth < 64:
        if type(examples).__name__ == "BufferShuffledExamplesIterable":
            raise UsageError(
                "stream: expected a dataset that is not shuffled, got one with a shuffle buffer of its own, whose "
                "contents its state does not hold. Leave out .shuffle(); shuffle_documents does it here, exactly."
            )
        examples, depth = getattr(examples, "ex_iterable", None), depth + 1


Records: TypeAlias = FileRecords | ObjectRecords
