"""What a file format is: a class with a name, suffixes and the operations that it supports; and every format by name.

A new format is a subclass of `Format` in a file of its own, and one line: in `BUILT_IN`, or under the entry point group
`forebay.formats` of another package. docs/how-to/extend.md shows an example. A format is imported when it is first
used. Detection asks them in the order of `BUILT_IN`, those of other packages last, by name.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from forebay.errors import UsageError
from forebay.formats.conversion import ConvertOptions, TableSource, TokenSource, Written
from forebay.formats.external import ExternalDataset
from forebay.formats.inputs import Extents, InputFile, InputSplit, ReadOptions
from forebay.formats.records import Record
from forebay.formats.report import Report
from forebay.plugins import load_plugin, plugins

ENTRY_POINTS = "forebay.formats"
BUILT_IN = {
    "megatron": "megatron:Megatron",
    "npy": "npy:Npy",
    "npz": "npy:Npz",
    "llm.c": "raw_tokens:LlmC",
    "parquet": "parquet:Parquet",
    "arrow": "arrow:Arrow",
    "safetensors": "safetensors:SafeTensors",
    "images": "images:Images",
    "tfrecord": "tfrecord:TFRecord",
    "webdataset": "webdataset:WebDataset",
    "warc": "warc:Warc",
    "wet": "warc:Wet",
    "wikipedia": "wikipedia:Wikipedia",
    "mbox": "mbox:Mbox",
    "pdf": "books:Pdf",
    "epub": "books:Epub",
    "stackexchange": "posts:StackExchange",
    "reddit": "posts:Reddit",
    "api": "jsonl:ApiRequest",
    "jsonl": "jsonl:Jsonl",
    "json": "jsonl:Json",
    "html": "html:Html",
    "raw tokens": "raw_tokens:RawTokens",
    "csv": "csv:Csv",
    "text": "text:Text",
    "lines": "text:Lines",
    "code": "code:SourceCode",
    "bin": "raw_tokens:Bin",
    "ds": "raw_tokens:Ds",
    "shards": "shard_writer:Shards",
    "forebay": "safetensors:ForebayDataset",
    "mds": "mds:Mds",
    "litdata": "litdata:LitData",
    "saved arrow": "arrow:SavedArrow",
}
"""Module (of this package) and class of each built-in format."""


class Format:
    """A file format. Every operation is optional: one that a format leaves out raises UsageError.

    Attributes:
        name: As users write it: `read.format=warc`, `--to parquet`.
        suffixes: Of its files, lower case, without a compression's.
        magics: First bytes, any of which only its files have.
        is_plain_text: Whether its files are text that nowhere says its encoding.
        is_grouped: Whether small files share a split; `Record.index` is then the number of the file in it.
        is_divisible: Whether `divide` works.
        token_codecs: Values of `ConvertOptions.compress` that `write_tokens` takes.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    magics: tuple[bytes, ...] = ()
    is_plain_text = False
    is_grouped = False
    is_divisible = False
    token_codecs: tuple[str, ...] = ()

    def sniff(self, head: bytes) -> bool:
        """Return whether a file is of this format, by its first 4 KiB (unpacked)."""
        return head.startswith(self.magics)

    def is_dataset(self, folder: Path) -> bool:
        """Return whether a directory as a whole is of this format."""
        return False

    def split(self, file: InputFile, options: ReadOptions) -> Extents:
        """Yield `(start, stop, bytes)` of the splits of an uncompressed file; by default it is one."""
        yield 0, 0, file.bytes

    def divide(self, file: InputFile, options: ReadOptions, borders: Sequence[int]) -> list[InputSplit | None]:
        """Return a split for each part of an uncompressed file between bytes that ascend from 0 to its size.

        Each document is in one of them. None for a part in which none begins.
        """
        raise self._unsupported("divided")

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        """Yield the documents of a split, in order.

        Damage is a Record with a `problem`, followed by what can still be read. Raises only for what is not in the
        data (a file that is gone, a package that is missing).
        """
        raise self._unsupported("read as text")

    def open_tokens(self, path: Path, dtype: Any = None, column: str | None = None) -> ExternalDataset:
        """Open the tokens of a directory or file in place.

        Args:
            dtype: Type of tokens where the format does not tell.
            column: Of tokens, for formats with columns.
        """
        raise self._unsupported("opened as tokens")

    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        """Open files as a table, one after another."""
        raise self._unsupported("read as a table")

    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        """Write a stream of tokens to `out`, which does not exist yet: a file or a directory."""
        raise self._unsupported("written from tokens")

    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """Write a table to `out`, which does not exist yet: one file if it has a suffix, else a directory."""
        raise self._unsupported("written from a table")

    def check(self, path: Path, report: Report) -> None:
        """Add to a report what a file or directory holds and what is wrong with it; nothing is changed."""
        raise self._unsupported("checked")

    def supports(self, operation: str) -> bool:
        """Return whether the format has an operation: `read_text`, `write_rows` …"""
        return getattr(type(self), operation) is not getattr(Format, operation)

    def _unsupported(self, what: str) -> UsageError:
        return UsageError(f"format {self.name}: expected one that can be {what}, got one that cannot. Name another.")


def format_names() -> tuple[str, ...]:
    """Return the names of all formats, in the order of detection."""
    return (*BUILT_IN, *sorted(plugins(ENTRY_POINTS).keys() - BUILT_IN.keys()))


@cache
def get_format(name: str) -> Format:
    """Return a format by name. Raises UsageError if there is none, or it cannot be loaded."""
    if name not in format_names():
        raise UsageError(f"format: expected one of {', '.join(format_names())}, got {name!r}.")
    plugin = load_plugin(ENTRY_POINTS, name, {key: f"forebay.formats.{path}" for key, path in BUILT_IN.items()})()
    if not isinstance(plugin, Format) or plugin.name != name:
        raise UsageError(
            f"format {name}: expected a forebay.formats.base.Format of that name, got {type(plugin).__name__} "
            f"{getattr(plugin, 'name', '')!r}. Fix or uninstall its package."
        )
    return plugin


def formats(operation: str = "") -> Iterator[Format]:
    """Yield all formats, in the order of detection; only those with an operation (`read_text` …) if one is named."""
    for name in format_names():
        if not operation or get_format(name).supports(operation):
            yield get_format(name)


def names_with(operation: str) -> tuple[str, ...]:
    """Return the names of the formats that support an operation."""
    return tuple(entry.name for entry in formats(operation))
