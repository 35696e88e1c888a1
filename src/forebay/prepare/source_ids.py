"""Where a document is in the input, for people: `file:line` or `file (inner position)`."""

from collections.abc import Iterable, Iterator

import pyarrow as pa

from forebay.formats.inputs import InputSplit
from forebay.storage.listing import shown_path

_FILE_FORMATS = ("text", "html")
"""Formats of one document a file."""
_LINE_FORMATS = ("jsonl", "csv", "lines", "reddit")
"""Formats whose documents people find by line: the byte that their readers add is left out."""


def first_rows(splits: Iterable[InputSplit], places: Iterable[int]) -> Iterator[int]:
    """For each split how many lines or rows its file has in earlier splits; `places` are how many each split has."""
    first, source = 0, None
    for split, count in zip(splits, places):
        first = first if split.files[0] == source and split.start else 0
        source = split.files[0]
        yield first
        first += count


def describe_position(split: InputSplit, index: int, inner: str, first_row: int = 0) -> str:
    """The position of record `place` of a split; `first_row` is `first_rows` of the split."""
    if split.format in _FILE_FORMATS or len(split.files) > 1:
        return shown_path(split.files[index].path)
    path = shown_path(split.files[0].path)
    if inner and not (split.format in _LINE_FORMATS and inner.startswith("byte ")):
        return f"{path} ({inner})"
    return (
        f"{path}:{first_row + index + 1}"
        if first_row or not split.start
        else f"{path}: {index + 1} after {split.start}"
    )


def row_position(split: InputSplit, batch: pa.RecordBatch, row: int, first_row: int = 0) -> str:
    """`describe_position` of a row of a batch."""
    return describe_position(split, batch.column("place")[row].as_py(), batch.column("where")[row].as_py(), first_row)


def source_id(split: InputSplit, batch: pa.RecordBatch, row: int, first_row: int) -> str:
    """The input's own id of a document, or its position."""
    return batch.column("id")[row].as_py() or row_position(split, batch, row, first_row)
