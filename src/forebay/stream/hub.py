"""Datasets of the hub, and those that other libraries stream, as records: WebDataset, MosaicML, any iterable.

The hub's are read file by file, as files here are (`HubRecords`), where their format is one of ours.

Hides: how each of them says where it stands. What can be read by index (a map-style dataset, a MosaicML
`StreamingDataset`, a list) goes on at its index; what has a state of its own (`datasets.IterableDataset`) goes on from
that; all else is read from its beginning and passed over, which is exact if it gives the same records again.

No library is imported here: they come in with the object, or by `hf:` where the hub's own has to read.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.errors import ForebayError, PrepareError, StateError, UsageError
from forebay.order.bijection import permute
from forebay.prepare.documents import Record
from forebay.prepare.read import ReadOptions, Source, settle
from forebay.prepare.read.fields import to_record
from forebay.prepare.read.hub import open_with_library, source_at
from forebay.storage.hub_copies import HubCopy
from forebay.storage.hub_splits import PREFIX, HubDataset, find_dataset
from forebay.stream.records import FileReading, Records, checked_place

HUB = "hf:"
RUN_FILES = 1000
"""Files of the hub are mixed in runs of so many: a page of its listing, so that the first is known at once."""
_ROWS = 256  # Read in one go by index: 0.3 us a row from Arrow where one by one takes 60.


def records_of(given: Any, options: ReadOptions) -> Records:
    """A dataset object, `hf:NAME[/CONFIG][:SPLIT]` (a directory as NAME) or a copy of one, as records."""
    if isinstance(given, str):
        url = given if given.startswith(PREFIX) else PREFIX + given.removeprefix(HUB)
        given = find_dataset(url) or open_with_library(url)
    if isinstance(given, HubDataset | HubCopy):
        return HubRecords(given, options)
    home = type(given).__module__.partition(".")[0]
    if getattr(given, "_distributed", None) is not None:
        raise UsageError(
            "stream: expected a whole dataset, got one rank's part of it (split_dataset_by_node). Give the whole: "
            "ranks part it here."
        )
    if home == "streaming":
        return ObjectRecords(given, options, lambda start: _by_index(given, int(given.size), start), "index")
    if home == "datasets" and hasattr(given, "column_names") and hasattr(given, "__len__"):
        return ObjectRecords(given, options, lambda start: _by_rows(given, start), "index")
    if isinstance(given, Sequence):
        return ObjectRecords(given, options, lambda start: _by_index(given, len(given), start), "index")
    if home == "datasets" and hasattr(given, "state_dict"):
        _refuse_shuffled(given)
        return ObjectRecords(given, options, lambda start: iter(given), "own")
    if not hasattr(given, "__iter__"):
        raise UsageError(f"stream: expected paths, URLs or an iterable of records, got {type(given).__name__}.")
    if iter(given) is given:
        raise UsageError(
            "stream: expected an iterable that begins anew each time, got an iterator, which can be read once. "
            "Give the dataset, not iter(dataset)."
        )
    return ObjectRecords(given, options, lambda start: _replayed(given, start), "replay")


class HubRecords:
    """The records of a dataset of the hub, or of a copy of one: the same, at the same places.

    Its identity is the dataset's URL with the commit, which may be opened again when the hub has a newer one.
    """

    def __init__(self, dataset: HubDataset | HubCopy, options: ReadOptions) -> None:
        self._dataset, self._options = dataset, options
        self.identity = dataset.url

    def open(self, epoch: int, key: bytes | None, place: Any = None) -> FileReading:
        """As `Records` says; with a key the files come in another order within each run of `RUN_FILES`."""

        def open_source(index: int) -> Source | None:
            if key is not None:
                first = index - index % RUN_FILES
                size = next((n for n in range(RUN_FILES) if self._dataset.file(first + n) is None), RUN_FILES)
                if index >= first + size:
                    return None
                index = first + int(permute(np.array([index - first], np.uint64), size, key)[0])
            found = source_at(self._dataset, index)
            return None if found is None else settle(found, self._options)

        return FileReading(open_source, self._options, checked_place(place))


class ObjectRecords:
    """The records of a dataset object; `kind` says how it goes on: `index`, `own` (its state) or `replay`."""

    def __init__(self, dataset: Any, options: ReadOptions, rows: Callable[[int], Iterator[Any]], kind: str) -> None:
        self._dataset, self._options, self._rows, self.kind = dataset, options, rows, kind
        self._first = copy.deepcopy(dataset.state_dict()) if kind == "own" else {}
        size = getattr(dataset, "size", None) if kind == "index" else getattr(dataset, "num_shards", None)
        size = len(dataset) if kind == "index" and not isinstance(size, int) else size
        self.identity = f"{type(dataset).__module__}.{type(dataset).__name__}:{size if isinstance(size, int) else '?'}"

    def open(self, epoch: int, key: bytes | None, place: Any = None) -> ObjectReading:
        """As `Records` says; the order is the object's own, which is told the epoch if it wants to know."""
        own, number = (place[1], place[0]) if _is_place(place) else (None, 0)
        if self.kind == "own":
            self._dataset.set_epoch(epoch)
            own = own or {**copy.deepcopy(self._first), "epoch": epoch}
            self._dataset.load_state_dict(own)
        elif hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        state = self._dataset.state_dict if self.kind == "own" else None
        return ObjectReading(self._rows, number, self._options, self.identity, state, own)


def _is_place(place: Any) -> bool:
    if place is None:
        return False
    if not isinstance(place, list) or len(place) != 2 or type(place[0]) is not int or place[0] < 0:
        raise StateError(f"stream state: expected a record's number and a dataset's state, got {str(place)[:80]}.")
    return True


@dataclass
class ObjectReading:
    """Rows of a dataset object from a number on; its place is that number, and the dataset's own state or None."""

    _rows: Callable[[int], Iterator[Any]]
    _number: int
    _options: ReadOptions
    _name: str
    _state: Callable[[], Any] | None
    _own: Any
    _begun: bool = False

    def place(self) -> list[Any]:
        if self._state is not None and self._begun:
            self._own = copy.deepcopy(self._state())
        return [self._number, self._own]

    def __iter__(self) -> Iterator[tuple[Record, str]]:
        rows = self._rows(self._number)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except ForebayError:
                raise
            except Exception as error:  # file systems and decoders raise anything
                first: BaseException = error
                while first.__context__ is not None:  # what a library raises while it handles an error hides that
                    first = first.__context__
                why = " ".join(f"{type(first).__name__}: {first}".split())[:500].rstrip(".")
                raise PrepareError(
                    f"{self._name}: cannot read input after {self._number} records: {why}. Check the dataset."
                ) from error
            finally:
                self._begun = True
            record = _record(self._number, row, self._options)
            self._number += 1
            yield record, self._name


def _record(number: int, row: Any, options: ReadOptions) -> Record:
    where = f"record {number}"
    if isinstance(row, str | bytes):
        row = {options.text_key: row}
    if not isinstance(row, Mapping):
        return Record(number, problem=f"expected a row with fields, got {type(row).__name__}", where=where)
    if "__key__" in row and options.text_key not in row:  # a sample of WebDataset: members by suffix
        if "txt" in row:
            row = {**row, options.text_key: row["txt"]}
        elif "json" in row:
            told = row["json"]
            try:
                row = told if isinstance(told, Mapping) else json.loads(told)
            except ValueError as error:
                return Record(number, problem=f"not JSON: {error}", where=where)
            if not isinstance(row, Mapping):
                return Record(number, problem=f"expected an object, got {type(row).__name__}", where=where)
    return to_record(number, row, options, where)


def _by_index(dataset: Any, size: int, start: int) -> Iterator[Any]:
    return (dataset[index] for index in range(start, size))


def _by_rows(dataset: Any, start: int) -> Iterator[Any]:
    for first in range(start, len(dataset), _ROWS):
        columns = dataset[first : first + _ROWS]
        yield from (dict(zip(columns, values)) for values in zip(*columns.values()))


def _replayed(dataset: Iterable[Any], start: int) -> Iterator[Any]:
    rows = iter(dataset)
    for number in range(start):
        if next(rows, rows) is rows:
            raise StateError(
                f"stream state: expected {start} records before the place, got {number}. The dataset gives others than "
                "when the state was taken; open the same one."
            )
    yield from rows


def _refuse_shuffled(dataset: Any) -> None:
    """A state of `datasets` does not hold its shuffle buffer: what was in it would be lost on resume."""
    inner, seen = getattr(dataset, "_ex_iterable", None), 0
    while inner is not None and seen < 64:
        if type(inner).__name__ == "BufferShuffledExamplesIterable":
            raise UsageError(
                "stream: expected a dataset that is not shuffled, got one with a shuffle buffer of its own, whose "
                "contents its state does not hold. Leave out .shuffle(); shuffle_buffer does it here, exactly."
            )
        inner, seen = getattr(inner, "ex_iterable", None), seen + 1
