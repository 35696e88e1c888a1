"""Sources of documents that are no files, such as a database; and where a document is in the input, for people.

A source's parts are inputs of tasks. Positions are `file:line` or `file (inner position)`.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from forebay.errors import MissingPackageError, PrepareError, error_text, full_url, printable, printable_url
from forebay.formats.base import Format
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
from forebay.formats.records import Record, strip_turn_marks, to_record
from forebay.plugins import load_plugin, plugins
from forebay.storage.compression import COMPRESSIONS
from forebay.storage.hub import missing_packages
from forebay.storage.hub_copies import HubCopy
from forebay.storage.hub_splits import PREFIX, HubSplit, format_of, parse_url


class DocumentSource(Protocol):
    """A source of the user's: an object, or what an entry point of `forebay.sources` makes of an input `NAME://…`.

    Picklable, as each part is read by a task.
    """

    name: str
    version: str
    """Changed when the documents change: old results are then not used."""

    def parts(self) -> Sequence[str]:
        """The names of the parts, each of which one task reads; always in the same order."""

    def read(self, part: str) -> Iterator[Mapping[str, str]]:
        """The documents of a part, always in the same order: `text`, and perhaps `id` and `url`."""


def open_source(source: str | Path | DocumentSource) -> DocumentSource | None:
    """The source that an input is or names; None for files and URLs."""
    if isinstance(source, Path):
        return None
    if not isinstance(source, str):
        return source
    scheme, separator, _ = source.partition("://")
    if not separator or scheme not in plugins("forebay.sources"):
        return None
    opened: DocumentSource = load_plugin("forebay.sources", scheme)(full_url(source))
    return opened


def source_splits(source: DocumentSource) -> list[InputSplit]:
    """The parts of a source as splits of one file each."""
    sha256 = hashlib.sha256(f"{source.name} {source.version}".encode()).hexdigest()
    return [
        InputSplit(
            (InputFile(f"{source.name}://{part}", f"{source.name}/{part}", source.name, "", 1, sha256),), bytes=1
        )
        for part in source.parts()
    ]


def read_source(source: DocumentSource, split: InputSplit) -> Iterator[Record]:
    """The documents of a part as records."""
    part = split.files[0].path.removeprefix(f"{source.name}://")
    for index, document in enumerate(source.read(part)):
        text = strip_turn_marks(document["text"])
        yield Record(index, document.get("id", ""), text, document.get("url", ""))


_FILE_FORMATS = ("text", "html")  # Formats of one document a file.
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
        return printable(split.files[index].path)
    path = printable(split.files[0].path)
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


def source_at(dataset: HubSplit | HubCopy, index: int) -> InputFile | None:
    """The file of that number as a source, None after the last; its format is "" if its first bytes have to say."""
    file = dataset.file(index)
    if file is None:
        return None
    compression = COMPRESSIONS.get("." + file.path.lower().rpartition(".")[2], "")
    format = format_of(file.path)
    return InputFile(
        dataset.location(index), file.path, "" if format == "json" else format, compression, file.size, file.version
    )


def library_source(url: str) -> InputFile:
    """A dataset of the hub as one source, which the package `datasets` reads. Sends no request."""
    if not url.startswith(PREFIX) or not url.removeprefix(PREFIX).strip("/"):
        raise PrepareError(f"{printable_url(url)}: expected {PREFIX}NAME[/CONFIG][:SPLIT]. Check the input.")
    return InputFile(url, url.removeprefix(PREFIX).strip("/"), "hub", "", 0, "")


class Hub(Format):
    """A dataset that the package `datasets` reads."""

    name = "hub"

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        url = split.files[0].path
        index = -1
        try:
            for index, row in enumerate(open_with_library(url)):
                yield to_record(index, row, options) if isinstance(row, Mapping) else Record(index, problem="no row")
        except (PrepareError, MissingPackageError):
            raise
        except Exception as error:  # file systems raise anything
            reason = f"{type(error).__name__}: {error_text(error)}"
            raise PrepareError(
                f"{printable_url(url)}: cannot read input after {index + 1} rows: {reason}. Check name and network."
            ) from error


def open_with_library(url: str) -> Any:
    """The dataset of a URL as the package `datasets` streams it."""
    try:
        import datasets
    except ImportError as error:
        raise missing_packages(f"{printable_url(url)} has files that are not read without them") from error
    name = parse_url(url)
    revision = None if name.is_local else name.revision
    return datasets.load_dataset(name.name, name.config, split=name.split, revision=revision, streaming=True)


HUB = Hub()
