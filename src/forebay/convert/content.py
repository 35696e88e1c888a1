"""What a conversion carries: a stream of tokens with document ends, or a table. Readers give it, sinks take it.

Hides: that a document may span parts, and a part any number of documents. A source is read from the start by each call
of `parts` or `batches`, in bounded memory: a part holds at most some 16 Mi tokens or is a view of a map. Every count is
a Python integer or 64 bits.

A reader of tables is `forebay.convert.tables.open_table(path, options) -> TableSource | None`; its sinks are the
functions of `forebay.convert.tables.TABLE_SINKS`, by the name of their format; `safetensors` among them writes layout
`rows`. A sink creates what it writes at `out` (which is not there yet, its directory is), a file or a directory; who
calls it verifies that and moves it to its own name.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.convert.values import flatten
from forebay.dataset.manifest import MANIFEST_FILE, TOKEN_DTYPES
from forebay.dataset.reader import Dataset, open_dataset
from forebay.dataset.slices import release_pages
from forebay.errors import DatasetError, UsageError
from forebay.formats import ForeignDataset, open_foreign
from forebay.formats.arrow import is_list
from forebay.formats.foreign import TOKEN_COLUMNS
from forebay.prepare.documents import batched
from forebay.prepare.read.listing import Skipped, describe_skipped

U64 = NDArray[np.uint64]
_log = logging.getLogger("forebay.convert")

_MOST_TOKENS = 4 << 20  # Of a batch or piece that is put together here.


@dataclass(frozen=True)
class TokenPart:
    """A run of a stream."""

    tokens: NDArray[Any]  # U16 or U32 [T].
    # [D], exclusive ends of the documents that end in it, counted from its start, rising. A document may go on in the
    # next part; tokens after the last end of all belong to none that ended.
    ends: U64


@dataclass(frozen=True)
class TokenSource:
    """Tokens to be read from the start, any number of times."""

    kind: str  # The format's name.
    dtype: str  # `U16` or `U32`.
    num_tokens: int  # In all parts.
    num_documents: int  # Documents that end in it; 0 where the format knows none.
    seq_len: int | None  # Tokens of every sample, where the format says.
    parts: Callable[[], Iterator[TokenPart]]  # The stream, in order; raises DatasetError where it is damaged.
    # `tokenizer`, `eos_id`, `vocab_size`, `name` where they are known; `left_out`, columns of a table.
    facts: Mapping[str, Any] = field(default_factory=dict)
    dataset: Dataset | None = None  # Whose tokens they are, if they are of an open dataset.


@dataclass(frozen=True)
class TableSource:
    """Rows to be read from the start, any number of times: text as strings, tensors as `pa.fixed_shape_tensor` or
    list columns.
    """

    kind: str  # The format's name.
    schema: pa.Schema  # Of every batch.
    num_rows: int | None  # None where only reading tells.
    batches: Callable[[], Iterator[pa.RecordBatch]]  # The rows, in order; raises DatasetError where they are damaged.
    # What else is known: `classes`, the names behind integer labels.
    facts: Mapping[str, Any] = field(default_factory=dict)
    dataset: Dataset | None = None  # Whose rows they are, if they are of a dataset of Forebay's.

    def changed(self, schema: pa.Schema, columns: Callable[[pa.RecordBatch], list[pa.Array]]) -> TableSource:
        """The table with other columns, made of each batch's."""

        def read() -> Iterator[pa.RecordBatch]:
            return (pa.record_batch(columns(batch), schema=schema) for batch in self.batches())

        return replace(self, schema=schema, batches=read)


@dataclass(frozen=True)
class Options:
    """What a conversion was told. Each reader and sink takes what concerns it.

    Attributes:
        dtype: `U16` or `U32` to write; None for the source's own.
        input_dtype: Type of tokens that no header tells, such as `uint16`.
        column: The column of tokens, for formats with columns.
        seq_len: Tokens of a sample, where the format written has samples.
        slice_bytes: Largest file, of formats with several.
        shard_tokens: Tokens of each file instead.
        eos_id: The token that ends a document, where the source tells no documents.
        name: Of the dataset.
        compress: `zstd`, or nothing.
        tensors: Types to write, by column: `{"images": "f16"}`.
        lossy: Take values that their new type cannot hold.
        resize, crop: (height, width) of images.
        max_member_bytes: Of a tar, unpacked: what is larger is refused.
        more: Settings of one format alone (`generation` of npy, `header` of bin, `slice_rows` of rows …).
        follow_links: Also read what links in a directory lead to elsewhere.
        strict: A file that would be left out is an error.
        on_progress: Called with tokens or rows written since the last call.
        on_skipped: Called with the files of a directory that are left out; without it they are logged.
    """

    dtype: str | None = None
    input_dtype: str | None = None
    column: str | None = None
    seq_len: int | None = None
    slice_bytes: int = 64 << 20
    shard_tokens: int | None = None
    eos_id: int | None = None
    name: str | None = None
    compress: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict)
    lossy: bool = False
    resize: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    max_member_bytes: int = 64 << 20
    more: Mapping[str, Any] = field(default_factory=dict)
    follow_links: bool = False
    strict: bool = False
    on_progress: Callable[[int], None] | None = None
    on_skipped: Callable[[Sequence[Skipped]], None] | None = None

    def advance(self, count: int) -> None:
        """Tell of progress."""
        if self.on_progress is not None:
            self.on_progress(count)

    def skipped(self, skipped: Sequence[Skipped]) -> None:
        """Report files that are left out."""
        if self.on_skipped is not None:
            self.on_skipped(skipped)
            return
        for line in describe_skipped(skipped):
            _log.warning("convert: %s", line)


@dataclass(frozen=True)
class Written:
    """What a sink wrote."""

    files: tuple[Path, ...]  # Paths below `out`, in order; `out` itself where it is one file.
    num_tokens: int | None  # Tokens, or None for a table.
    num_rows: int | None  # Rows of a table, or samples, or None.
    num_documents: int  # Document ends that the format written holds.
    digest: str  # Of (tokens, document ends) as `Digest` has it; of a table, whatever its sink verifies by.
    notes: tuple[str, ...] = ()  # What a user should know: tokens left out, documents that the format does not hold.


class Digest:
    """The hash of a stream of tokens and of its document ends, whatever its type and however it is cut.

    SHA-256, which processors have instructions for, of four runs of numbers: the low 16 bits of every token; where
    tokens of 65536 and above stand (u64), and their high 16 bits; the ends, counted from the stream's start, as u64.
    """

    def __init__(self) -> None:
        self._low, self._places, self._high, self._ends = (hashlib.sha256() for _ in range(4))
        self.num_tokens, self.num_documents = 0, 0

    def add(self, part: TokenPart) -> None:
        """The next part."""
        for start in range(0, len(part.tokens), 1 << 20):
            piece = part.tokens[start : start + (1 << 20)]
            self._low.update(np.ascontiguousarray(piece.astype("<u2", copy=False)).view(np.uint8).data)
            if piece.dtype.itemsize > 2 and len(places := np.flatnonzero(piece >> 16)):
                self._places.update((places + (self.num_tokens + start)).astype("<u8").view(np.uint8).data)
                self._high.update((piece[places] >> 16).astype("<u2").view(np.uint8).data)
        self._ends.update(np.ascontiguousarray(part.ends + np.uint64(self.num_tokens), "<u8").view(np.uint8).data)
        self.num_tokens += len(part.tokens)
        self.num_documents += len(part.ends)

    @property
    def tokens(self) -> str:
        """Of the tokens alone, hex, 128 bits."""
        parts = (one.digest() for one in (self._low, self._places, self._high))
        return hashlib.sha256(b"".join(parts)).hexdigest()[:32]

    @property
    def whole(self) -> str:
        """Of tokens and document ends: `<hex>:<hex>`."""
        return f"{self.tokens}:{self._ends.hexdigest()[:32]}"


def tokens_of_dataset(dataset: Dataset) -> TokenSource:
    """An open dataset of layout `tokens`, slice by slice."""
    m = dataset.manifest
    known: dict[str, Any] = {"name": m.name}
    if not isinstance(dataset, ForeignDataset):
        known |= {"tokenizer": m.tokenizer, "vocab_size": m.vocab_size, "eos_id": m.eos_id, "id": dataset.id}
    facts = {key: value for key, value in known.items() if value or (key == "eos_id" and value is not None)}

    def read() -> Iterator[TokenPart]:
        for index in range(dataset.num_slices):
            if isinstance(dataset, ForeignDataset):
                one = dataset.read_slice(index)
                yield TokenPart(one.tokens, one.document_ends)
                dataset.release(index)
            else:
                one = dataset.open_slice(index)
                yield TokenPart(one.tokens, one.document_ends)
                release_pages(one.tokens)

    kind = dataset.kind if isinstance(dataset, ForeignDataset) else "safetensors"
    seq_len = getattr(dataset, "seq_len", None)
    return TokenSource(kind, m.dtype, dataset.num_tokens, m.documents, int(seq_len or 0) or None, read, facts, dataset)


def open_tokens(path: str | Path, options: Options) -> TokenSource | None:
    """What holds tokens at a path or a pattern; None where it is of another kind."""
    text = str(path)
    if "://" in text and not text.startswith("file://"):
        raise UsageError(
            f"{text}: expected a path on this machine, got a URL. Copy it here first: forebay mirror {text} DIR."
        )
    place = Path(text.removeprefix("file://"))
    if (place / MANIFEST_FILE).is_file():
        dataset = open_dataset(place)
        return tokens_of_dataset(dataset) if dataset.manifest.layout == "tokens" else None
    if (
        not place.exists()
        and not place.with_name(place.name + ".idx").exists()
        and not re.search(r"[*?\[]", place.name)
    ):
        raise DatasetError(f"{place}: expected something to convert, got nothing there. Check the path.")
    found = open_foreign(place, dtype=options.input_dtype, column=options.column)
    return None if found is None else tokens_of_dataset(found)


def tokens_of_table(table: TableSource, column: str | None = None) -> TokenSource:
    """The list column of a table as tokens; each row is a document. Reads the table once, to count."""
    name = token_column(table.schema, column)
    if name is None:
        raise UsageError(
            f"{table.kind}: expected a column of lists of integers ({column or ' or '.join(TOKEN_COLUMNS)}), got "
            f"{', '.join(f'{f.name}: {f.type}' for f in table.schema)[:500]}. Name one with --column, or tokenize text "
            "with `forebay prepare`."
        )
    total, rows, largest = 0, 0, 0
    lengths: set[int] = set()
    for values, ends in _lists(table, name):
        total, rows = total + len(values), rows + len(ends)
        largest = max(largest, int(values.max()) if len(values) else 0)
        if len(lengths) < 2:
            lengths.update(np.unique(np.diff(ends, prepend=np.uint64(0)))[:2].tolist())
    seq_len = lengths.pop() if len(lengths) == 1 else None
    others = [field.name for field in table.schema if field.name != name]
    facts = {"left_out": others} if others else {}
    dtype = "U16" if largest < 1 << 16 else "U32"

    def read() -> Iterator[TokenPart]:
        return (TokenPart(values.astype(TOKEN_DTYPES[dtype]), ends) for values, ends in _lists(table, name))

    return TokenSource(table.kind, dtype, total, rows, seq_len or None, read, facts)


def table_of_tokens(source: TokenSource, column: str = "input_ids") -> TableSource:
    """A stream as a table: each document a row, the tokens after the last end one more."""
    kind = pa.list_(pa.uint16() if source.dtype == "U16" else pa.uint32())
    schema = pa.schema([pa.field(column, kind)])

    def read() -> Iterator[pa.RecordBatch]:
        for rows in batched(documents(source.parts()), len, _MOST_TOKENS, 1 << 16):
            offsets = pa.array(np.cumsum([0, *map(len, rows)], dtype=np.int32))
            lists = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(rows)), type=kind)
            yield pa.record_batch([lists], schema=schema)

    return TableSource(source.kind, schema, None, read)


def token_column(schema: pa.Schema, column: str | None = None) -> str | None:
    """The column that holds tokens: the one named, or `input_ids` or `tokens`; None unless it is lists of integers."""
    for name in [column] if column is not None else TOKEN_COLUMNS:
        if name in schema.names and _is_token_list(schema.field(name).type):
            return name
    return None


def documents(parts: Iterable[TokenPart]) -> Iterator[NDArray[Any]]:
    """Each document of a stream, its tokens [T]; then what follows the last end, if anything. Holds one document."""
    begun: list[NDArray[Any]] = []
    for part in parts:
        start = 0
        for end in part.ends.tolist():
            piece = part.tokens[start:end]
            if begun:
                piece, begun = np.concatenate([*begun, piece]), []
            yield piece
            start = end
        if start < len(part.tokens):
            begun.append(part.tokens[start:])
    if begun:
        yield np.concatenate(begun)


def _is_token_list(kind: Any) -> bool:
    if isinstance(kind, pa.FixedShapeTensorType):
        return len(kind.shape) == 1 and pa.types.is_integer(kind.value_type)
    return is_list(kind) and bool(pa.types.is_integer(kind.value_type))


def _lists(table: TableSource, column: str) -> Iterator[tuple[NDArray[Any], U64]]:
    """The values of a list column, and where each row's end, batch by batch."""
    row = 0
    for batch in table.batches():
        lengths, values = flatten(batch.column(batch.schema.get_field_index(column)))
        if (lengths < 0).any() or values.null_count:
            raise DatasetError(
                f"column {column}: expected a list of token ids in every row, got none from row {row} on."
            )
        found = values.to_numpy(zero_copy_only=False)
        if len(found) and (int(found.min()) < 0 or int(found.max()) >> 32):
            raise DatasetError(
                f"column {column}: expected token ids in [0, 2**32), got {int(found.min())} to {int(found.max())} from "
                f"row {row} on. Name the column of tokens with --column."
            )
        yield found, np.cumsum(lengths, dtype=np.uint64)
        row += len(batch)
