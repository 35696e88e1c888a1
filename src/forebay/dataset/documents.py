"""From tokens of a slice to the documents that they are of, by number, by source id, and as text.

A document's number counts the document ends of the dataset from 0, slice after slice; that is its name in every
dataset. Where `forebay prepare --document-ids` left a `documents.parquet`, its row n is document n: id and source.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from forebay.dataset.manifest import DOCUMENTS_FILE, Manifest, SliceTable
from forebay.dataset.slices import Slice
from forebay.errors import DatasetError, UsageError

PREVIEW_TOKENS = 64
PREVIEW_CHARS = 160


class Slices(Protocol):
    """What is needed of a dataset."""

    path: Path
    manifest: Manifest
    table: SliceTable
    id: str

    def open_slice(self, index: int) -> Slice:
        """Slice `index`, mapped."""
        ...


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a slice, all of one document. `id`, `source`, `text` are empty where nothing tells."""

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
    id: str  # with `source`, the input it came from: empty where none is kept (`--document-ids`)
    source: str
    tokens: NDArray[Any]  # U16 or U32 [T]
    text: str  # its tokens as text; empty where the dataset holds no tokenizer

    def __repr__(self) -> str:
        named = "".join(f", {name}={value!r}" for name, value in (("id", self.id), ("source", self.source)) if value)
        return f"Document({self.index}{named}, {len(self.tokens):,} tokens, text={self.text[:80]!r})"


class Documents:
    """The documents of a dataset that lies in a directory. What is not asked for is not read."""

    def __init__(self, dataset: Slices) -> None:
        self.dataset = dataset
        self._first = np.cumsum(dataset.table.documents) - dataset.table.documents

    @property
    def has_ids(self) -> bool:
        """Whether the dataset knows where its documents come from."""
        return (self.dataset.path / DOCUMENTS_FILE).is_file()

    def pieces(self, slice_index: int, start: int, stop: int, *, text: bool = True) -> list[Piece]:
        """The documents of tokens [start, stop) of a slice, in order; of a row dataset none."""
        if self.dataset.manifest.layout != "tokens" or start >= stop:
            return []
        opened = self.dataset.open_slice(slice_index)
        ends = np.asarray(opened.document_ends).astype(np.int64)
        first = int(np.searchsorted(ends, start, "right"))
        inner = ends[first : int(np.searchsorted(ends, stop, "left"))].tolist()
        edges = [start, *inner, stop]
        numbers = [int(self._first[slice_index]) + first + i for i in range(len(edges) - 1)]
        known = self.ids(numbers)
        return [
            Piece(number, slice_index, a, b, *known.get(number, ("", "")), self._preview(opened, a, b) if text else "")
            for number, a, b in zip(numbers, edges, edges[1:])
        ]

    def of_samples(self, slice_index: int, samples: Sequence[int], seq_len: int, *, text: bool = True) -> list[Piece]:
        """As `pieces`, of samples of seq_len consecutive tokens, sample by sample."""
        return [
            piece
            for sample in samples
            for piece in self.pieces(slice_index, sample * seq_len, (sample + 1) * seq_len, text=text)
        ]

    def ids(self, numbers: Sequence[int]) -> dict[int, tuple[str, str]]:
        """(id, source) by number, where the dataset knows them; reads the row groups concerned."""
        if not self.has_ids or not numbers:
            return {}
        found: dict[int, tuple[str, str]] = {}
        with self._table() as table:
            for group, base, count in _groups(table):
                mine = sorted({n for n in numbers if base <= n < base + count})
                if mine:
                    rows = table.read_row_group(group, columns=["id", "source"]).take([n - base for n in mine])
                    found |= dict(zip(mine, zip(rows["id"].to_pylist(), rows["source"].to_pylist())))
        return found

    def find(self, name: str) -> list[int]:
        """The numbers of the documents with this id; `#12`, and `12` where the dataset has no ids, is a number.

        Cost: with ids, one pass over them, some 50 MB/s a core of Parquet.
        """
        number = name.removeprefix("#")
        if (number != name or not self.has_ids) and number.isascii() and number.isdigit():
            found = [int(number)] if int(number) < int(self.dataset.table.documents.sum()) else []
        elif self.has_ids:
            with self._table() as table:
                found = [
                    base + int(row)
                    for group, base, _ in _groups(table)
                    for row in np.flatnonzero(pc.equal(table.read_row_group(group, columns=["id"])["id"], name))
                ]
        else:
            raise UsageError(
                f"document {name!r}: {self.dataset.path} keeps no ids ({DOCUMENTS_FILE}). Say #NUMBER, or a slice and "
                "tokens; `forebay prepare --document-ids` keeps them."
            )
        if not found:
            raise UsageError(f"document {name!r}: none in {self.dataset.path}. Numbers are #0 to "
                             f"#{int(self.dataset.table.documents.sum()) - 1}.")  # fmt: skip
        return found

    def where(self, number: int) -> Iterator[tuple[int, int, int]]:
        """(slice, start, stop) of the tokens of a document: of one slice, or of neighbours that it crosses."""
        last = int(np.searchsorted(self._first + self.dataset.table.documents, number, "right"))
        if number < 0 or last >= len(self._first):
            raise UsageError(f"document #{number}: expected one of {int(self.dataset.table.documents.sum())}.")
        ends = np.asarray(self.dataset.open_slice(last).document_ends).astype(np.int64)
        inside = number - int(self._first[last])
        start = int(ends[inside - 1]) if inside else 0
        # A document may begin in earlier slices: those behind the last end of which it is the rest.
        at, before = last, []
        while start == 0 and at > 0:
            at -= 1
            size = int(self.dataset.table.count[at])
            earlier = np.asarray(self.dataset.open_slice(at).document_ends).astype(np.int64)
            low = int(earlier[-1]) if len(earlier) else 0
            if low < size:
                before.append((at, low, size))
            if low > 0 or len(earlier):
                break
        yield from reversed(before)
        yield last, start, int(ends[inside])

    def tokens(self, number: int) -> NDArray[Any]:
        """All tokens of a document: a view where it lies in one slice, else a copy."""
        pieces = [self.dataset.open_slice(index).tokens[start:stop] for index, start, stop in self.where(number)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def text(self, tokens: NDArray[Any]) -> str:
        """Tokens as text; empty where the dataset holds no tokenizer."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True))

    def _table(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.dataset.path / DOCUMENTS_FILE)
        except (OSError, ValueError) as error:
            raise DatasetError(
                f"{self.dataset.path / DOCUMENTS_FILE}: cannot read it: {error}. Fetch it again."
            ) from error

    def _preview(self, opened: Any, start: int, stop: int) -> str:
        text = self.text(opened.tokens[start : min(stop, start + PREVIEW_TOKENS)])
        return " ".join(text.split())[:PREVIEW_CHARS]

    @cached_property
    def _tokenizer(self) -> Any:
        path = self.dataset.path / "tokenizer.json"
        if not path.is_file():
            return None
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(path))
        except Exception:  # noqa: BLE001  # the library raises bare ones; a preview is worth no failure
            return None


def _groups(table: pq.ParquetFile) -> Iterator[tuple[int, int, int]]:
    """(row group, its first row, its rows)."""
    base = 0
    for group in range(table.metadata.num_row_groups):
        count = table.metadata.row_group(group).num_rows
        yield group, base, count
        base += count


def by_dataset_id(datasets: Sequence[Slices]) -> Mapping[str, Documents]:
    """By the ids of the datasets."""
    return {dataset.id: Documents(dataset) for dataset in datasets}
