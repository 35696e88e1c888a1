"""Documents in flight: Arrow record batches, and what a stage says of them.

A stage is a frozen dataclass whose fields are its configuration (the keys of its table in a recipe), and whose `apply`
is a pure function of a batch.

Each batch has at least the columns of `SCHEMA`. A stage may change `text`, and may add columns (`language`,
`language_score`, `perplexity`) that later stages and the report read. It never adds, removes or moves rows: it marks
them as dropped, and whoever runs it takes them out.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePath
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.errors import PrepareError
from forebay.prepare.settings import check_fields

SCHEMA = pa.schema(
    [
        ("place", pa.int64()),  # number of the line, row, record or file within its piece, from 0
        ("id", pa.large_string()),  # the input's own id of the document; "" if it gives none
        ("url", pa.large_string()),  # "" if none
        ("html", pa.bool_()),  # whether text is HTML that still has to be extracted
        ("text", pa.large_string()),
    ]
)
BATCH_BYTES = 4 << 20
"""UTF-8 bytes of text in a batch, about: one document larger than that is a batch alone."""
BATCH_ROWS = 4096


@dataclass(frozen=True)
class Verdict:
    """What a stage did to a batch.

    Args:
        batch: The same rows in the same order, perhaps with another text and more columns.
        drop: int16 [rows]: -1 for a row that is kept, else an index into the stage's `reasons`.
        counts: What was changed, by kind, over the rows that are kept: `{"email": 3}`.
        problems: What is wrong with rows that are dropped as malformed: these are listed with the malformed records.
    """

    batch: pa.RecordBatch
    drop: NDArray[np.int16]
    counts: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[int, str] = field(default_factory=dict)


def first_failing(*failed: NDArray[np.bool_]) -> NDArray[np.int16]:
    """int16 [rows]: the first of the rules that fails in each row, or -1; the `drop` of a Verdict."""
    stacked = np.stack(failed)
    return np.where(stacked.any(0), stacked.argmax(0), -1).astype(np.int16)


class Stage(Protocol):
    """A pure function from batch to batch. Frozen, hashable and picklable: models are loaded where `apply` runs.

    Without more, a subclass drops nothing and reads no files.
    """

    def __post_init__(self) -> None:
        """Check the settings against their types. Raises UsageError if one does not fit."""
        check_fields(self)

    name: ClassVar[str]
    """Its table in a recipe, and its name in the report: `gopher_quality`."""
    version: ClassVar[int]
    """Raised when the same batch would give another verdict, so that old results are not taken up."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it may drop a document, in the order in which they are tried; `drop` holds indices into this."""
        return ()

    def files(self) -> tuple[str, ...]:
        """Files (models, lists) that it reads: their contents are part of what the result depends on."""
        return ()

    def apply(self, batch: pa.RecordBatch) -> Verdict:
        """Its verdict on a batch; rows do not influence each other, so that batches may be cut anywhere."""


def portable(stage: Stage) -> Stage:
    """The stage with the names of its files in place of their paths: what a result depends on besides their contents.

    For looking at, not for use.
    """
    paths = [PurePath(path) for path in stage.files()]

    def named(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(named(member) for member in value)
        if isinstance(value, str) and value and any(path.is_relative_to(value) for path in paths):
            return PurePath(value).name
        return value

    made = copy.copy(stage)
    for field_of in fields(stage):  # type: ignore[arg-type]  # stages are dataclasses
        object.__setattr__(made, field_of.name, named(getattr(stage, field_of.name)))
    return made


def keep_all(rows: int) -> NDArray[np.int16]:
    """A `drop` that drops nothing."""
    return np.full(rows, -1, np.int16)


def replace_column(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    """The batch with that column in place of the one of the same name, or after the others."""
    if name in batch.schema.names:
        return batch.set_column(batch.schema.get_field_index(name), name, column)
    return batch.append_column(name, column)


def part_batches(path: str, columns: Iterable[str] = ()) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The batches that a task wrote (all columns, or of these those that are there), each with the row of its first."""
    try:
        with pa.OSFile(path, "rb") as source:
            reader = pa.ipc.open_file(source)
            if columns:
                wanted = sorted(reader.schema.names.index(name) for name in columns if name in reader.schema.names)
                source.seek(0)
                reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=wanted))
            start = 0
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                yield start, batch
                start += batch.num_rows
    except (OSError, pa.ArrowException) as error:
        raise PrepareError(
            f"{path}: cannot read the documents of an earlier run: {error}. Remove .work and run again."
        ) from error


def text_buffers(column: pa.LargeStringArray) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """The offsets int64 [rows + 1] into the UTF-8 bytes uint8 [*] of a text column without nulls, without a copy.

    Row i is `data[offsets[i]:offsets[i + 1]]`, also if the column is a slice of another. Neither can be written: numba
    compiles a function anew for arrays that can, and columns come as both.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not pa.types.is_large_string(column.type):
        column = column.cast(pa.large_string())
    assert column.null_count == 0
    _, offsets, data = column.buffers()
    rows = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    found = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    rows.flags.writeable = found.flags.writeable = False
    return rows, found


def text_column(offsets: NDArray[np.int64], data: NDArray[np.uint8]) -> pa.LargeStringArray:
    """The inverse of `text_buffers`; `data` must be UTF-8, cut between characters."""
    return pa.LargeStringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(data))
