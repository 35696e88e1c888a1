"""The documents of a dataset: by number, by source id, by token range, and as text.

Documents are numbered from 0 by their ends, slice after slice. If `forebay prepare` wrote a `documents.parquet`
(option --document-ids), its row n has the id and the source of document n.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.arrays import Array
from forebay.dataset.manifest import DOCUMENTS_FILE
from forebay.errors import DatasetError, UsageError

PREVIEW_TOKENS = 64
PREVIEW_CHARS = 160


@dataclass(frozen=True)
class DocumentRange:
    """Tokens [start, stop) of a slice, all of one document. `id`, `source` and `text` are empty if unknown."""

    document: int
    slice: int
    start: int
    stop: int
    id: str = ""
    source: str = ""
    text: str = ""


@dataclass(frozen=True)
class Document:
    """One document of a dataset."""

    index: int  # from 0
    id: str  # with `source`, its input; empty unless prepared with --document-ids
    source: str
    tokens: Array  # U16 or U32 [T]
    text: str  # its tokens as text; empty if the dataset has no tokenizer

    def __repr__(self) -> str:
        return (
            f"Document({self.index}{f', id={self.id!r}' * bool(self.id)}"
            f"{f', source={self.source!r}' * bool(self.source)}, {len(self.tokens):,} tokens, text={self.text[:80]!r})"
        )

    def _repr_html_(self) -> str:
        """Its source and the first of its text."""
        fields = {"id": self.id, "source": self.source, "tokens": len(self.tokens)}
        from forebay import html

        return html.card(f"Document {self.index}", fields, html.coloured([[self.text]] if self.text else []))


class Documents:
    """The documents of a local dataset; reads only what is requested."""

    def __init__(self, dataset: Any) -> None:  # A `reader.Dataset`.
        self.dataset = dataset
        self._first = np.cumsum(dataset.table.documents) - dataset.table.documents

    @property
    def has_ids(self) -> bool:
        """Whether the dataset has the ids and sources of its documents."""
        return bool((self.dataset.path / DOCUMENTS_FILE).is_file())

    def pieces(self, slice_index: int, start: int, stop: int) -> list[DocumentRange]:
        """The documents of tokens [start, stop) of a slice, in order; none for layout rows."""
        if self.dataset.manifest.layout != "tokens" or start >= stop:
            return []
        opened = self.dataset.open_slice(slice_index)
        document_ends = np.asarray(opened.document_ends).astype(np.int64)
        first = int(np.searchsorted(document_ends, start, "right"))
        inner = document_ends[first : int(np.searchsorted(document_ends, stop, "left"))].tolist()
        edges = [start, *inner, stop]
        numbers = [int(self._first[slice_index]) + first + i for i in range(len(edges) - 1)]
        ids_of = self.ids(numbers)
        return [
            DocumentRange(number, slice_index, a, b, *ids_of.get(number, ("", "")), self._preview(opened, a, b))
            for number, a, b in zip(numbers, edges, edges[1:])
        ]

    def ids(self, numbers: Sequence[int]) -> dict[int, tuple[str, str]]:
        """(id, source) by number, if the dataset has them; reads only the row groups concerned."""
        if not self.has_ids or not numbers:
            return {}
        by_number: dict[int, tuple[str, str]] = {}
        with self._table() as table:
            for group, base, count in _groups(table):
                mine = sorted({n for n in numbers if base <= n < base + count})
                if mine:
                    rows = table.read_row_group(group, columns=["id", "source"]).take([n - base for n in mine])
                    by_number |= dict(zip(mine, zip(rows["id"].to_pylist(), rows["source"].to_pylist())))
        return by_number

    def find(self, name: str) -> list[int]:
        """The numbers of the documents with this id; `#12`, and `12` where the dataset has no ids, is a number.

        Cost: with ids, one pass over them, some 50 MB/s a core of Parquet.
        """
        number = name.removeprefix("#")
        if (number != name or not self.has_ids) and number.isascii() and number.isdigit():
            numbers = [int(number)] if int(number) < int(self.dataset.table.documents.sum()) else []
        elif self.has_ids:
            with self._table() as table:
                numbers = [
                    base + int(row)
                    for group, base, _ in _groups(table)
                    for row in np.flatnonzero(pc.equal(table.read_row_group(group, columns=["id"])["id"], name))
                ]
        else:
            raise UsageError(
                f"document {name!r}: {self.dataset.path} has no ids ({DOCUMENTS_FILE}). Give #NUMBER, or a slice and "
                "tokens; `forebay prepare --document-ids` writes ids."
            )
        if not numbers:
            raise UsageError(f"document {name!r}: none in {self.dataset.path}. Numbers are #0 to "
                             f"#{int(self.dataset.table.documents.sum()) - 1}.")  # fmt: skip
        return numbers

    def token_ranges(self, number: int) -> Iterator[tuple[int, int, int]]:
        """(slice, start, stop) of the tokens of a document, which may span neighbouring slices."""
        last = int(np.searchsorted(self._first + self.dataset.table.documents, number, "right"))
        if number < 0 or last >= len(self._first):
            raise UsageError(f"document #{number}: expected one of {int(self.dataset.table.documents.sum())}.")
        document_ends = np.asarray(self.dataset.open_slice(last).document_ends).astype(np.int64)
        inside = number - int(self._first[last])
        start = int(document_ends[inside - 1]) if inside else 0
        # A document may begin in earlier slices, behind their last document end.
        index, before = last, []
        while start == 0 and index > 0:
            index -= 1
            size = int(self.dataset.table.count[index])
            earlier = np.asarray(self.dataset.open_slice(index).document_ends).astype(np.int64)
            low = int(earlier[-1]) if len(earlier) else 0
            if low < size:
                before.append((index, low, size))
            if low > 0 or len(earlier):
                break
        yield from reversed(before)
        yield last, start, int(document_ends[inside])

    def tokens(self, number: int) -> Array:
        """All tokens of a document: a view if it lies in one slice, else a copy."""
        pieces = [self.dataset.open_slice(index).tokens[start:stop] for index, start, stop in self.token_ranges(number)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def text(self, tokens: Array) -> str:
        """Tokens as text; empty if the dataset has no tokenizer."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True))

    def _table(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.dataset.file(DOCUMENTS_FILE))
        except (OSError, ValueError) as error:
            raise DatasetError(
                f"{self.dataset.path / DOCUMENTS_FILE}: cannot read it: {error}. Fetch it again."
            ) from error

    def _preview(self, opened: Any, start: int, stop: int) -> str:
        text = self.text(opened.tokens[start : min(stop, start + PREVIEW_TOKENS)])
        return " ".join(text.split())[:PREVIEW_CHARS]

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            path = self.dataset.file("tokenizer.json")
            from tokenizers import Tokenizer

            return Tokenizer.from_file(str(path))
        except Exception:  # noqa: BLE001  # the library raises bare exceptions; a preview must not fail
            return None


def _groups(table: pq.ParquetFile) -> Iterator[tuple[int, int, int]]:
    base = 0
    for group in range(table.metadata.num_row_groups):
        count = table.metadata.row_group(group).num_rows
        yield group, base, count
        base += count
