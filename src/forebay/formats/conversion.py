"""What formats exchange: streams of tokens, tables, the options of a conversion, and the result of writing.

A source is read from the start by each call of `parts` or `batches`, in bounded memory: a part holds at most some 16 Mi
tokens or is a view of a memory map. Where it can also be read from a position inside, a conversion to a bucket that was
killed goes on there: its `FileSink` has what was committed before.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

from forebay.arrays import U64, Array
from forebay.dataset.reader import Dataset
from forebay.files import atomic_write
from forebay.storage.listing import Skipped, describe_skipped

T = TypeVar("T")
Position: TypeAlias = list[int]
"""Where in its files a source may be read from: numbers whose meaning its format knows."""
Positioned: TypeAlias = Iterator[tuple[Position | None, T]]
"""Parts of a source, each with the position from which it may be read again; None where it may not."""
ReadFrom: TypeAlias = Callable[[Position | None], Positioned[T]]
"""Reads a source from a position; None: from the start."""
_log = logging.getLogger("forebay.convert")


def _log_skipped(skipped: Sequence[Skipped]) -> None:
    for line in describe_skipped(skipped):
        _log.warning("convert: %s", line)


@dataclass(frozen=True)
class TokenPart:
    """A run of a stream of tokens.

    Attributes:
        tokens: U16 or U32 [T].
        ends: U64 [D], exclusive ends of the documents that end in it, counted from its start, rising. A document may
            continue in the next part; tokens after the last end of all belong to no document that ended.
    """

    tokens: Array
    document_ends: U64


@dataclass(frozen=True)
class TokenSource:
    """Tokens that can be read from the start any number of times.

    Attributes:
        format: Its format's name.
        dtype: `U16` or `U32`.
        num_tokens: In all parts; None where only reading tells.
        num_documents: Documents that end in it; 0 where the format does not tell; None where only reading tells.
        parts: Reads the stream, in order; raises DatasetError where it is damaged.
        metadata: `tokenizer`, `eos_id`, `vocab_size`, `name` where they are known; `left_out`, columns of a table.
        dataset: The open dataset that the tokens are of, if any.
        parts_from: Yields each part with its position, None where reading cannot begin; from a position, or the start.
        files: Paths or URLs that it reads.
    """

    format: str
    dtype: str
    num_tokens: int | None
    num_documents: int | None
    parts: Callable[[], Iterator[TokenPart]]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dataset: Dataset | None = None
    parts_from: ReadFrom[TokenPart] | None = None
    files: Sequence[Path] = ()


@dataclass(frozen=True)
class TableSource:
    """Rows that can be read from the start any number of times.

    Text is strings, tensors are `pa.fixed_shape_tensor` or list columns.

    Attributes:
        format: Its format's name.
        schema: Of every batch.
        num_rows: None where only reading tells.
        batches: Reads the rows, in order; raises DatasetError where they are damaged.
        metadata: `classes`, the names behind integer labels.
        batches_from, files: As `parts_from` and `files` of TokenSource.
    """

    format: str
    schema: pa.Schema
    num_rows: int | None
    batches: Callable[[], Iterator[pa.RecordBatch]]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    batches_from: ReadFrom[pa.RecordBatch] | None = None
    files: Sequence[Path] = ()

    def with_columns(self, schema: pa.Schema, columns: Callable[[pa.RecordBatch], list[pa.Array]]) -> "TableSource":
        """Return the table with other columns, made of each batch's."""

        def read() -> Iterator[pa.RecordBatch]:
            return (pa.record_batch(columns(batch), schema=schema) for batch in self.batches())

        return replace(self, schema=schema, batches=read)


@dataclass(frozen=True)
class OutputFile:
    """A complete file of an output that has several.

    Attributes:
        name: Its path below the output, with slashes.
        num_bytes: Its size.
        sha256: Of a slice its id, else of the file.
        count: Tokens or rows.
        num_documents: Documents that end in it.
        leaves: Of a slice the hashes of its chunks.
        lengths: Of a slice of tokens its part of `lengths.zst`.
        digest: Of a part of a table, as of `Written`.
    """

    name: str
    num_bytes: int
    sha256: str
    count: int
    num_documents: int = 0
    leaves: bytes = b""
    lengths: bytes = b""
    digest: str = ""


@dataclass
class FileSink:
    """Where the files of a format with several go: here they stay where they are written.

    Attributes:
        is_remote: Files go elsewhere one by one, so each is verified and has a digest of its own.
        committed: Files that an earlier run wrote. The source begins behind them, and so does the writer.
        num_skipped_rows: Rows at the beginning of the source that are in `committed`.
    """

    is_remote = False
    committed: Sequence[OutputFile] = ()
    num_skipped_rows: int = 0

    def commit(self, file: OutputFile, path: Path) -> OutputFile:
        """Take over a complete file at `path`; returns what the writer keeps of it."""
        return file

    def complete(self, files: Sequence[OutputFile]) -> Iterable[OutputFile]:
        """Return the files with their `leaves` and `lengths`."""
        return files

    def write(self, path: Path, data: Iterable[bytes]) -> None:
        """Write a file that belongs to all others."""
        atomic_write(path, data)


@dataclass(frozen=True)
class ConvertOptions:
    """The settings of a conversion. Each format uses those that concern it.

    Attributes:
        dtype: `U16` or `U32` to write; None for the source's own.
        input_dtype: Type of tokens that no header tells, such as `uint16`.
        column: The column of tokens, for formats with columns.
        seq_len: Tokens of a sample, where the format written has samples.
        slice_bytes: Largest file, of formats with several.
        eos_id: The token that ends a document, where the source does not tell documents.
        vocab_size: Ids of the vocabulary, for a dataset whose source does not tell; larger ids are refused.
        name: Of the dataset.
        compress: `zstd`, or nothing.
        tensors: Types to write, by column: `{"images": "f16"}`.
        resize: (height, width) of images.
        max_unpacked_ratio: Rows of a table have at most this many times the bytes of its files, or 256 MiB.
        on_progress: Called with tokens or rows written since the last call.
        on_skipped: Called with the files of a directory that are left out; by default they are logged.
        sink: Takes the files of formats with several; set by a conversion to a bucket.
    """

    dtype: str | None = None
    input_dtype: str | None = None
    column: str | None = None
    seq_len: int | None = None
    slice_bytes: int = 64 << 20
    eos_id: int | None = None
    vocab_size: int = 0
    name: str | None = None
    compress: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict)
    resize: tuple[int, int] | None = None
    max_unpacked_ratio: int = 2000
    on_progress: Callable[[int], None] = lambda count: None
    on_skipped: Callable[[Sequence[Skipped]], None] = _log_skipped
    sink: FileSink = field(default_factory=FileSink)


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        files: Paths below `out`, in order; `Path()` where `out` itself is the one file.
        num_tokens: None for a table.
        num_rows: Rows of a table, or documents that are rows, or None.
        num_documents: Document ends that the format written holds.
        digest: Of (tokens, document ends) as `TokenDigest` computes it; of a table, of `TableDigest`.
        notes: What a user should know: tokens left out, documents that the format does not hold.
    """

    files: tuple[Path, ...]
    num_tokens: int | None
    num_rows: int | None
    num_documents: int
    digest: str
    notes: tuple[str, ...] = ()
