"""Documents as Arrow record batches, and the contract of the stages that clean and filter them.

A stage is a frozen dataclass whose fields are its configuration (the keys of its table in a recipe), and whose `apply`
is a pure function of a batch. A batch has at least the columns of `SCHEMA`. A stage may change `text` and add columns
(`language`, `perplexity`) for later stages and the report. It never adds, removes or moves rows: it marks rows.
"""

import copy
import dataclasses
import inspect
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePath
from typing import Any, ClassVar, Protocol, TypeVar, cast

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, DTypeLike

from forebay.arrays import BOOL, I16, I64, U8, Array
from forebay.errors import PrepareError, UsageError
from forebay.prepare.settings import check_fields
from forebay.storage.store import Store

T = TypeVar("T")

Map = Callable[[Callable[[Any, int], Any], Sequence[Any]], list[Any]]
"""Calls `run(task, scale)` for each task and returns the results in the order of the tasks."""
SCHEMA = pa.schema(
    [
        ("place", pa.int64()),  # number of the line, row, record or file within its piece, from 0
        ("id", pa.large_string()),  # the input's own id of the document; "" if it gives none
        ("url", pa.large_string()),  # "" if none
        ("html", pa.bool_()),  # whether text is HTML that still has to be extracted
        ("text", pa.large_string()),
    ]
)
BATCH_BYTES = 4 << 20  # UTF-8 bytes of text in a batch, about: one document larger than that is a batch alone.
BATCH_ROWS = 4096


@dataclass(frozen=True)
class StageResult:
    """The result of a stage on a batch.

    Args:
        batch: The same rows in the same order, perhaps with another text and more columns.
        drop: int16 [rows]: -1 for a row that stays, else an index into the stage's `reasons`.
        counts: What was changed, by kind, over the rows that stay: `{"email": 3}`.
        problems: Of rows dropped as malformed: the message under which they are listed.
        hits: Rows and what `contamination.jsonl` says of each.
        measures: What rules with thresholds compared, by reason: the report has a histogram of each.
    """

    batch: pa.RecordBatch
    drop: I16
    counts: Mapping[str, int] = field(default_factory=dict)
    problems: Mapping[int, str] = field(default_factory=dict)
    hits: Sequence[tuple[int, Mapping[str, Any]]] = ()
    measures: Mapping[str, "Measure"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", {kind: n for kind, n in self.counts.items() if n})


@dataclass(frozen=True)
class Measure:
    """A number of each row that a rule compares: rows below `low` or above `high` fail, NaN does not.

    Args:
        values: [rows], of any type of number.
        low, high: A threshold, or one for each row; an infinite one is none.
    """

    values: ArrayLike
    low: ArrayLike = -math.inf
    high: ArrayLike = math.inf

    @property
    def failed(self) -> BOOL:
        """bool [rows]"""
        values = np.asarray(self.values)
        return np.asarray((values < self.low) | (values > self.high))


def check_rules(batch: pa.RecordBatch, reasons: Sequence[str], rules: Sequence[Measure | BOOL]) -> StageResult:
    """Drop the rows that fail a rule, by the first that they fail; a rule for each reason: a measure, or who fails."""
    drop = first_failing(*(rule.failed if isinstance(rule, Measure) else rule for rule in rules))
    measures = {reason: rule for reason, rule in zip(reasons, rules, strict=True) if isinstance(rule, Measure)}
    return StageResult(batch, drop, measures=measures)


def first_failing(*failed: BOOL) -> I16:
    """int16 [rows]: the first of the rules that fails in each row, or -1: the `drop` of a StageResult."""
    stacked = np.stack(failed)
    return np.where(stacked.any(0), stacked.argmax(0), -1).astype(np.int16)


class Stage(Protocol):
    """A pure function from batch to batch. Frozen, hashable and picklable: models are loaded where `apply` runs.

    By default a subclass drops nothing and reads no files.
    """

    def __post_init__(self) -> None:
        check_fields(self)

    name: ClassVar[str]
    """Its table in a recipe, and its name in the report: `gopher_quality`."""
    version: ClassVar[int | str]
    """Changed when the same batch would give another result, so that old results are not used."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it may drop a document, in the order in which they are tried; `drop` holds indices into this."""
        return ()

    def files(self) -> tuple[str, ...]:
        """Files (models, lists) that it reads: their contents are part of what the result depends on."""
        return ()

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        """The result for a batch. Rows do not influence each other, as batches may be cut anywhere."""


def without_paths(stage: T) -> T:
    """The stage (or scorer) with the names of its files in place of their paths, for hashing and display."""
    paths = [PurePath(path) for path in stage.files()]  # type: ignore[attr-defined]

    def named(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(named(member) for member in value)
        if isinstance(value, str) and value and any(path.is_relative_to(value) for path in paths):
            return PurePath(value).name
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            copied = copy.copy(value)
            for item in fields(value):
                object.__setattr__(copied, item.name, named(getattr(value, item.name)))
            return copied
        return value

    return cast("T", named(stage))


def keep_all(rows: int) -> I16:
    """A `drop` that drops nothing."""
    return np.full(rows, -1, np.int16)


def replace_column(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    """The batch with that column in place of the one of the same name, or after the others."""
    if name in batch.schema.names:
        return batch.set_column(batch.schema.get_field_index(name), name, column)
    return batch.append_column(name, column)


def part_batches(store: Store, name: str, columns: Iterable[str] = ()) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The batches of a task's Arrow file, each with the number of its first row; with `columns`, only these."""
    try:
        with store.local(name) as path:
            yield from file_batches(path, columns)
    except (OSError, pa.ArrowException) as error:
        raise PrepareError(
            f"{store.url}/{name}: cannot read the documents of an earlier run: {error}. Remove .work and run again."
        ) from error


def read_items(store: Store, name: str, dtype: DTypeLike, count: int, start: int = 0) -> Array:
    """Items [start, start + count) of an object that a task wrote. Raises PrepareError if it ends before."""
    items = store.read_array(name, dtype, count, start)
    if len(items) != count:
        raise PrepareError(
            f"{store.url}/{name}: expected {start + count} items of an earlier run, got fewer bytes. Remove .work and "
            "run again."
        )
    return items


def file_batches(path: Path, columns: Iterable[str] = ()) -> Iterator[tuple[int, pa.RecordBatch]]:
    """`part_batches` of a file of this machine. Raises OSError or ArrowException."""
    with pa.OSFile(str(path), "rb") as source:
        reader = pa.ipc.open_file(source)
        if columns:
            indices = sorted(reader.schema.names.index(name) for name in columns if name in reader.schema.names)
            source.seek(0)
            reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=indices))
        start = 0
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            yield start, batch
            start += batch.num_rows


def text_buffers(column: pa.LargeStringArray) -> tuple[I64, U8]:
    """The offsets int64 [rows + 1] into the UTF-8 bytes uint8 [*] of a text column without nulls, without a copy.

    Row i is `data[offsets[i]:offsets[i + 1]]`, also in a slice of a column. Both are read-only: numba would compile a
    second version of each function for arrays that are not.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not pa.types.is_large_string(column.type):
        column = column.cast(pa.large_string())
    assert column.null_count == 0
    _, offset_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[column.offset : column.offset + len(column) + 1]
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer is not None else np.zeros(0, np.uint8)
    offsets.flags.writeable = data.flags.writeable = False
    return offsets, data


def text_column(offsets: I64, data: U8) -> pa.LargeStringArray:
    """The inverse of `text_buffers`; `data` must be UTF-8, cut between characters."""
    return pa.LargeStringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(data))


@dataclasses.dataclass(frozen=True)
class FunctionFilter(Stage):
    """A filter that drops the rows that its function does not keep."""

    function: ClassVar[Callable[..., Any]]
    per_document: ClassVar[bool]

    @property
    def reasons(self) -> tuple[str, ...]:
        return (self.name,)

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        settings = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        result: Any
        if self.per_document:
            rows = (dict(zip(batch.schema.names, row)) for row in zip(*batch.to_pydict().values()))
            result = [self.function(row, **settings) for row in rows]
            if result and isinstance(result[0], Measure):
                result = Measure(*map(np.array, zip(*((item.values, item.low, item.high) for item in result))))
        else:
            result = self.function(batch, **settings)
        rule = result if isinstance(result, Measure) else ~self._as_mask(result, batch.num_rows)
        return check_rules(batch, self.reasons, [rule])

    def _as_mask(self, result: Any, num_rows: int) -> np.ndarray[Any, Any]:
        """Return the result as booleans. Raises TypeError for what is not one a document; null is False."""
        mask = np.asarray(result.fill_null(False) if isinstance(result, pa.Array | pa.ChunkedArray) else result)
        if mask.shape != (num_rows,) or mask.dtype != np.bool_:
            raise TypeError(
                "expected "
                f"{'True or False' if self.per_document else f'an array of {num_rows} booleans, one a document'}, got "
                f"{result[0] if self.per_document else result!r:.100} "
                f"({type(result[0] if self.per_document else result).__name__}). With per_document=True the function "
                "gets one document as a dict"
            )
        return mask


def text_filter(
    name: str, *, version: str, per_document: bool = False
) -> Callable[[Callable[..., Any]], type[FunctionFilter]]:
    """Make a filter of a function; its keyword parameters become the settings of the filter.

        @forebay.text_filter("enough_lines", version="1")
        def enough_lines(batch, min_lines: int = 3):
            return pc.greater_equal(pc.count_substring(batch["text"], "\\n"), min_lines - 1)

        forebay.prepare_dataset(["in"], "out", tokenizer="gpt2", filters=[enough_lines(min_lines=5)])

    The function may be in a script or a notebook cell. A recipe names one of a module: `use = "module:enough_lines"`.

    Args:
        name: In the report, and the reason under which documents are dropped.
        version: Change it with the function, so that its old results are not used: it enters the names of tasks.
        per_document: The function gets the columns of one document as a dict and returns whether to keep it; by
            default it gets a RecordBatch (`text`, `url`, `id`, ...) and returns a keep mask. In place of either it may
            return a `forebay.prepare.Measure`, a number with its threshold, of which the report has a histogram.
    """

    def decorate(function: Callable[..., Any]) -> type[FunctionFilter]:
        hints = typing.get_type_hints(function)
        settings: list[Any] = []
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            if parameter.default is inspect.Parameter.empty:
                raise UsageError(
                    f"text_filter {name}: expected a default for {parameter.name}, got none. Give every setting one."
                )
            settings.append((parameter.name, hints.get(parameter.name, Any), parameter.default))
        constants = {
            "function": staticmethod(function), "per_document": per_document, "name": name, "version": version,
            "__doc__": function.__doc__, "__module__": function.__module__, "__qualname__": function.__qualname__,
        }  # fmt: skip
        return dataclasses.make_dataclass(
            function.__name__, settings, bases=(FunctionFilter,), namespace=constants, frozen=True
        )

    return decorate
