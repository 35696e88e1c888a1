"""Sources of documents that are no files, such as a database: the protocol, and their parts as inputs of tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from forebay.formats.inputs import InputFile, InputSplit
from forebay.formats.records import Record, strip_turn_marks
from forebay.plugins import load_plugin, plugins


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
    opened: DocumentSource = load_plugin("forebay.sources", scheme)(source)
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
