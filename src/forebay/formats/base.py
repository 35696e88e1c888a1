"""What a file format is: a class with a name, suffixes and the operations that it supports.

A new format is a subclass of `Format` in a file of its own, and one line: in `registry.BUILT_IN`, or under the entry
point group `forebay.formats` of another package. docs/how-to/extend.md shows an example.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from forebay.errors import UsageError
from forebay.formats.conversion import ConvertOptions, TableSource, TokenSource, Written
from forebay.formats.external import ExternalDataset
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
from forebay.formats.records import Record
from forebay.formats.report import Report

F = TypeVar("F", bound=Callable[..., Any])


def _optional(method: F) -> F:
    method.is_optional = True  # type: ignore[attr-defined]
    return method


class Format:
    """A file format. Every operation is optional: one that a format leaves out raises UsageError.

    Attributes:
        name: As users write it: `--format warc`, `--to parquet`.
        suffixes: Of its files, lower case, without a compression's.
        is_plain_text: Whether its files are text that nowhere says its encoding.
        is_grouped: Whether small files share a split; `Record.index` is then the number of the file in it.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    is_plain_text: ClassVar[bool] = False
    is_grouped: ClassVar[bool] = False

    def sniff(self, head: bytes) -> bool:
        """Return whether a file is of this format, by its first 4 KiB (unpacked)."""
        return False

    def is_dataset(self, folder: Path) -> bool:
        """Return whether a directory as a whole is of this format."""
        return False

    def split(self, file: InputFile, options: ReadOptions) -> Iterator[tuple[int, int, int]]:
        """Yield `(start, stop, bytes)` of the splits of an uncompressed file; by default it is one."""
        yield 0, 0, file.bytes

    @_optional
    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        """Yield the documents of a split, in order.

        Damage is a Record with a `problem`, followed by what can still be read. Raises only for what is not in the
        data (a file that is gone, a package that is missing).
        """
        raise self._unsupported("read as text")

    @_optional
    def open_tokens(self, path: Path, dtype: Any = None, column: str | None = None) -> ExternalDataset:
        """Open the tokens of a directory or file in place.

        Args:
            dtype: Type of tokens where the format does not tell.
            column: Of tokens, for formats with columns.
        """
        raise self._unsupported("opened as tokens")

    @_optional
    def open_rows(self, paths: Sequence[Path], options: ConvertOptions) -> TableSource:
        """Open files as a table, one after another."""
        raise self._unsupported("read as a table")

    @_optional
    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        """Write a stream of tokens to `out`, which does not exist yet: a file or a directory."""
        raise self._unsupported("written from tokens")

    @_optional
    def write_rows(self, source: TableSource, out: Path, options: ConvertOptions) -> Written:
        """Write a table to `out`, which does not exist yet: one file if it has a suffix, else a directory."""
        raise self._unsupported("written from a table")

    @_optional
    def check(self, path: Path, report: Report) -> None:
        """Add to a report what a file or directory holds and what is wrong with it; nothing is changed."""
        raise self._unsupported("checked")

    def supports(self, operation: str) -> bool:
        """Return whether the format has an operation: `read_text`, `write_rows` …"""
        return not getattr(getattr(type(self), operation), "is_optional", False)

    def _unsupported(self, what: str) -> UsageError:
        return UsageError(f"format {self.name}: expected one that can be {what}, got one that cannot. Name another.")
