"""What is made of columns: ensembles and buckets (scorers), selection, repetition, and names of subsets (stages)."""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from forebay.arrays import BOOL, F64
from forebay.errors import UsageError
from forebay.prepare.documents import (
    Measure,
    Stage,
    StageResult,
    check_rules,
    first_failing,
    keep_all,
    replace_column,
    text_buffers,
)
from forebay.prepare.scores.base import Scorer, named_column, number_column
from forebay.prepare.settings import Number, Texts, check_fields

Numbers = tuple[float, ...]
Percentiles = tuple[Annotated[float, Field(ge=0, le=100)], ...]
_DATE = r"^\d{4}(-\d{2}(-\d{2}([T ].*)?)?)?$"
COPIES = "copies"


@dataclass(frozen=True)
class Combine(Scorer):
    """An ensemble: one number of several columns.

    Args:
        columns_of: The columns, which stand before.
        how: `max`, `min`, `mean`, or `sum`.

    A column without a value is left out.

    Source: Su et al. 2024 (Nemotron-CC), section 2.3, takes the maximum of the buckets of three classifiers.
    """

    columns_of: Texts = ()
    how: Literal["max", "min", "mean", "sum"] = "max"

    name = "combine"
    version = 1
    required = ("columns_of", "at least one column")
    is_derived = True

    def score(self, batch: pa.RecordBatch) -> Mapping[str, F64]:
        values = np.stack([number_column(batch, name, "score: combine") for name in self.columns_of])
        present = ~np.isnan(values)
        if self.how in ("max", "min"):
            values = np.where(present, values, -math.inf if self.how == "max" else math.inf)
            out = values.max(0) if self.how == "max" else values.min(0)
        else:
            out = np.zeros(batch.num_rows)
            for row in np.where(present, values, 0.0):
                out += row  # in this order: a sum of an array has another one for other shapes
            if self.how == "mean":
                with np.errstate(all="ignore"):
                    out /= present.sum(0)
        return {"": np.where(present.any(0), out, np.nan)}


@dataclass(frozen=True)
class Bucket(Scorer):
    """The number of a bucket, from 0: how many thresholds are not above the value.

    Args:
        column: The column, which stands before.
        thresholds: Rising numbers.
        buckets: Instead of thresholds: so many buckets of equally many documents.

    Source: Su et al. 2024 (Nemotron-CC), section 2.3: 20 buckets.
    """

    column: str = ""
    thresholds: Numbers = ()
    buckets: Annotated[int, Field(ge=0, le=1000)] = 0

    name = "bucket"
    version = 1
    required = ("column", "the name of a column")
    is_derived = True

    def __post_init__(self) -> None:
        check_fields(self)
        if bool(self.thresholds) == bool(self.buckets):
            raise UsageError("thresholds: expected one of thresholds or buckets")
        if list(self.thresholds) != sorted(self.thresholds):
            raise UsageError(f"thresholds: expected rising numbers, got {list(self.thresholds)}")

    @property
    def percentiles_of(self) -> tuple[str, Percentiles] | None:
        if self.thresholds:
            return None
        return self.column, tuple(100 * i / self.buckets for i in range(1, self.buckets))

    def with_thresholds(self, thresholds: Numbers) -> "Bucket":
        return dataclasses.replace(self, thresholds=thresholds or (math.inf,), buckets=0)

    def score(self, batch: pa.RecordBatch) -> Mapping[str, F64]:
        values = number_column(batch, self.column, "score: bucket")
        index = np.searchsorted(np.array(self.thresholds), values, side="right")
        return {"": np.where(np.isnan(values), np.nan, index)}


@dataclass(frozen=True)
class _Condition(Stage):
    """What `[[select]]` and `[[subset]]` ask of a column."""

    column: str = ""
    min: float | None = None
    max: float | None = None
    one_of: Texts = ()


@dataclass(frozen=True)
class Select(_Condition):
    """Keep documents by a column: a score, or a field of the input (`[read.columns]`).

    Args:
        column: Its name.
        min, max: Bounds of a number, both included.
        one_of, none_of: Texts of which a column of text has to be one, or none: licences, languages.
        keep_percentile: `[low, high]`: keep numbers between these percentiles of all documents that come here: at
            least the low one, below the high one. Exact, for any number of processes; equal numbers stay together.
        after, before: Dates (ISO 8601: `2023`, `2023-05-01`): not before the first, and before the second.
        missing: Documents without a value: `drop` or `keep`.
    """

    none_of: Texts = ()
    after: str = ""
    before: str = ""
    keep_percentile: Percentiles = ()
    missing: Literal["drop", "keep"] = "drop"

    version = 1
    required = ("column", "the name of a column")

    def __post_init__(self) -> None:
        check_fields(self)
        pair = self.keep_percentile
        if pair and not (len(pair) == 2 and pair[0] < pair[1]):
            raise UsageError(f"keep_percentile: expected [low, high] with 0 <= low < high <= 100, got {list(pair)}")
        kinds = [self.min is not None or self.max is not None, bool(self.one_of or self.none_of)]
        kinds += [bool(self.after or self.before), bool(pair)]
        if sum(kinds) != 1:
            raise UsageError(
                "column: expected bounds (min, max), texts (one_of, none_of), dates (after, before) or "
                f"keep_percentile, and one kind of them, got {sum(kinds)}"
            )
        low = -math.inf if self.min is None else self.min
        if self.max is not None and low > self.max:
            raise UsageError(f"min: expected at most max ({self.max}), got {self.min}")
        for name in ("after", "before"):
            if (value := getattr(self, name)) and not _is_date(pa.array([value]))[0].as_py():
                raise UsageError(f"{name}: expected a date such as 2023-05-01, got {value!r}")

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"select.{self.column}"

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(f"{self.column}_{reason}" for reason in ("missing", "low", "high", "other", "early", "late"))

    @property
    def percentiles(self) -> tuple[str, Percentiles] | None:
        """The column and the percentiles of it that `with_thresholds` needs."""
        return (self.column, self.keep_percentile) if self.keep_percentile else None

    def with_thresholds(self, thresholds: Numbers) -> Stage:
        return Between(self.column, thresholds[0], thresholds[1], self.missing)

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        nothing = np.zeros(batch.num_rows, bool)
        rules: dict[str, Measure | BOOL] = dict.fromkeys(("low", "high", "other", "early", "late"), nothing)
        if self.min is not None or self.max is not None:
            values = number_column(batch, self.column, self.name)
            missing = np.isnan(values)
            rules["low"] = Measure(values, low=-math.inf if self.min is None else self.min)
            rules["high"] = Measure(values, high=math.inf if self.max is None else self.max)
        else:
            texts = named_column(batch, self.column, self.name).cast(pa.large_string()).fill_null("")
            missing = _flags(pc.equal(texts, "")) if self.one_of or self.none_of else ~_flags(_is_date(texts))
            if self.one_of or self.none_of:
                other = ~_flags(pc.is_in(texts, pa.array(self.one_of, texts.type))) if self.one_of else nothing
                rules["other"] = (other | _flags(pc.is_in(texts, pa.array(self.none_of, texts.type)))) & ~missing
            if self.after:
                rules["early"] = _flags(pc.less(texts, self.after)) & ~missing
            if self.before:
                rules["late"] = _flags(pc.greater_equal(texts, self.before)) & ~missing
        return check_rules(batch, self.reasons, (missing & (self.missing == "drop"), *rules.values()))


def _is_date(texts: pa.Array) -> pa.Array:
    return pc.match_substring_regex(texts, _DATE)


def _flags(column: pa.Array) -> BOOL:
    return np.asarray(column.to_numpy(zero_copy_only=False), bool)


@dataclass(frozen=True)
class Between(Stage):
    """Documents with `low <= column < high`: a `Select` by percentiles whose thresholds are known."""

    column: str
    low: float
    high: float
    missing: str

    version = 1

    def __post_init__(self) -> None:
        pass

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"select.{self.column}"

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(f"{self.column}_{reason}" for reason in ("missing", "below_percentile", "above_percentile"))

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        values = number_column(batch, self.column, self.name)
        missing = np.isnan(values) & (self.missing == "drop")
        high = np.nextafter(self.high, -math.inf) if self.high < math.inf else math.inf
        return check_rules(batch, self.reasons, (missing, Measure(values, low=self.low), Measure(values, high=high)))


@dataclass(frozen=True)
class Repeat(Stage):
    """Upweight documents: each is written as many times as a factor says.

    Of a factor such as 2.3 a document is written three times with probability 0.3, by a hash of its text, else twice;
    with 0.3 it is kept with that probability. Deduplication comes before.

    Args:
        column: A column of numbers.
        factors: The factor of each whole number from 0, such as those of buckets; empty: the column is the factor.
    """

    column: str = ""
    factors: tuple[Number, ...] = ()
    max_copies: int = field(default=100, init=False)  # A larger factor is an error of the recipe, and counts as this.

    name = "repeat"
    version = 1
    reasons = ("repeat_missing", "repeat_none")
    required = ("column", "the name of a column")

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        values = number_column(batch, self.column, self.name)
        missing = np.isnan(values)
        if self.factors:
            table, index = np.array(self.factors), np.where(missing, 0, values)
            missing = missing | (index < 0) | (index >= len(table)) | (index != np.floor(index))
            values = table[np.where(missing, 0, index).astype(np.int64)]
        factors = np.clip(np.where(missing, 0, values), 0, self.max_copies)
        copies = np.floor(factors + _draws(batch.column("text"))).astype(np.int64)
        batch = replace_column(batch, COPIES, pa.array(copies))
        drop = first_failing(missing, copies == 0)
        extra = int((copies - 1)[drop < 0].sum())
        return StageResult(batch, drop, {"copies added": extra})


def _draws(texts: pa.Array) -> F64:
    """A number of [0, 1) for each text, by its hash."""
    offsets, data = text_buffers(texts)
    hashes = (hashlib.blake2b(data[a:b].data, digest_size=8).digest() for a, b in itertools.pairwise(offsets.tolist()))
    return np.array([(int.from_bytes(digest, "little") >> 11) * 2.0**-53 for digest in hashes], np.float64)


@dataclass(frozen=True)
class Subset(_Condition):
    """Names the subset of a document by a column: of `[[subset]]` tables the first that fits decides.

    The column `subset` has the name; `--to parquet` writes a folder for each. Without a table that fits a document
    stays, in the subset `rest`.

    Args:
        subset: The name: letters, digits, `-`, `_` and `.`.
        column: The name of the column.
        min, max, one_of: As of `[[select]]`.
    """

    subset: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$", max_length=64)] = "rest"

    name = "subset"
    version = 1

    def __post_init__(self) -> None:
        check_fields(self)
        self._select()

    def _select(self) -> Select:
        return Select(**{item.name: getattr(self, item.name) for item in dataclasses.fields(_Condition)})

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        result = self._select().apply(batch)
        fits = pa.array(result.drop < 0)
        before: Any = pa.array([""] * batch.num_rows, pa.large_string())
        if "subset" in batch.schema.names:
            before = batch.column("subset")
        free = pc.or_(pc.equal(before, ""), pc.equal(before, "rest"))
        names = pc.if_else(pc.and_(fits, free), self.subset, pc.if_else(free, "rest", before))
        return StageResult(replace_column(batch, "subset", names.cast(pa.large_string())), keep_all(len(fits)))
