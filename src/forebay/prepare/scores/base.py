"""The `Scorer` protocol, and `Score`: the stage that runs one, `[score.NAME]` in a recipe.

A scorer makes columns of documents and drops none; `[[select]]` drops by columns. Columns stay beside the text, so
thresholds are chosen later without scoring again: documents that have the columns of `[score.NAME]` from a scorer of
the same settings are not scored, and its model is not opened. `segments` and the functions after it say how a recipe's
stages run where scores matter.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from forebay.base import Json
from forebay.errors import PrepareError, UsageError
from forebay.formats.inputs import RESERVED_COLUMNS
from forebay.prepare.documents import Stage, StageResult, keep_all, replace_column, without_paths
from forebay.prepare.settings import check_fields, plain

SCORERS = {
    "fasttext": "forebay.prepare.scores.classifiers:FastText",
    "kenlm": "forebay.prepare.filters.perplexity:Kenlm",
    "transformers": "forebay.prepare.scores.classifiers:Transformers",
    "signals": "forebay.prepare.filters.quality:Signals",
    "combine": "forebay.prepare.scores.columns:Combine",
    "bucket": "forebay.prepare.scores.columns:Bucket",
}
"""The scorers that come with Forebay; entry points of `forebay.scorers` are used by their names, too."""
COLUMN = "column"  # In place of a model's path: the input has the columns that the model would make.
TYPES = {"number": pa.float64(), "text": pa.large_string()}


class Scorer(Protocol):
    """A pure function from a batch to columns. A frozen dataclass, whose fields are its settings; picklable.

    Models are loaded where `score` runs. By default a scorer makes one column of numbers, reads no files, and runs on a
    CPU in a process with the limits of `[limits]`.
    """

    def __post_init__(self) -> None:
        check_fields(self)

    name: ClassVar[str]
    version: ClassVar[int | str]
    """Changed when the same batch would give other columns, so that old results are not used."""
    seconds_per_mb: ClassVar[float] = 1.0
    """Declared cost: CPU seconds for 10^6 bytes of text. Ten times it is added to the limits of the process."""
    forks: ClassVar[bool] = True
    """Whether it works in a fork of a process that has loaded it. What uses a GPU or threads of its own does not."""
    is_derived: ClassVar[bool] = False
    """Whether it reads columns alone: such columns are made again, whatever the input has."""
    libraries: ClassVar[tuple[str, ...]] = ()
    """The packages whose version may decide a score."""

    @property
    def columns(self) -> Mapping[str, str]:
        """Type, `number` or `text`, of each column by its ending: "" is NAME itself, `x` is `NAME_x`."""
        return {"": "number"}

    def files(self) -> tuple[str, ...]:
        """Files that it reads: their contents are part of what the columns depend on."""
        return ()

    def score(self, batch: pa.RecordBatch) -> Mapping[str, Any]:
        """For each ending of `columns` an array of the batch's rows, NaN or "" where there is no score.

        Rows do not influence each other, as batches may be cut anywhere.
        """


@dataclass(frozen=True)
class Score(Stage):
    """Adds the columns of a scorer, and drops nothing.

    Args:
        column: The name of the column, NAME of `[score.NAME]`.
        use: The scorer by name, or `module:Name`.
        scorer: The scorer itself.
    """

    column: str
    use: str
    scorer: Scorer

    def __post_init__(self) -> None:
        columns = getattr(self.scorer, "columns", {"": "number"})
        for ending, kind in columns.items():
            if kind not in TYPES or self.column_name(ending) in RESERVED_COLUMNS:
                raise UsageError(
                    f"score.{self.column}: expected columns of new names, each number or text, got "
                    f"{self.column_name(ending)} = {kind!r}"
                )

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"score.{self.column}"

    @property
    def version(self) -> int | str:  # type: ignore[override]
        return self.scorer.version

    @property
    def libraries(self) -> tuple[str, ...]:
        return tuple(getattr(self.scorer, "libraries", ()))

    @property
    def seconds_per_mb(self) -> float:
        return float(getattr(self.scorer, "seconds_per_mb", 1.0))

    @property
    def is_own(self) -> bool:
        """Whether it is not run in a fork."""
        return not (type(self.scorer).__module__.startswith("forebay.") and getattr(self.scorer, "forks", True))

    def column_name(self, ending: str) -> str:
        return f"{self.column}_{ending}" if ending else self.column

    @property
    def adds(self) -> tuple[str, ...]:
        return tuple(self.column_name(ending) for ending in self.scorer.columns)

    @property
    def scored(self) -> dict[str, list[Any]]:
        if getattr(self.scorer, "is_derived", False):
            return {}
        settings = plain(without_paths(self.scorer))
        return {column: [self.use, self.version, settings] for column in self.adds}

    def files(self) -> tuple[str, ...]:
        return tuple(self.scorer.files())

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        rows, output = batch.num_rows, self.scorer.score(batch)
        for ending, kind in self.scorer.columns.items():
            values = output.get(ending)
            if values is None or len(values) != rows:
                raise PrepareError(
                    f"{self.name}: expected a column {ending!r} of {rows} rows, got "
                    f"{'none' if values is None else f'one of {len(values)} rows'}. Fix the scorer {self.use}."
                )
            column = pa.array(values) if not isinstance(values, pa.Array) else values
            column = column.cast(TYPES[kind]).fill_null(float("nan") if kind == "number" else "")
            batch = replace_column(batch, self.column_name(ending), column)
        return StageResult(batch, keep_all(rows))

    @property
    def percentiles(self) -> tuple[str, tuple[float, ...]] | None:
        """As `Select.percentiles`."""
        return getattr(self.scorer, "percentiles_of", None)

    def with_thresholds(self, thresholds: tuple[float, ...]) -> "Score":
        return dataclasses.replace(self, scorer=self.scorer.with_thresholds(thresholds))  # type: ignore[attr-defined]


def number_column(batch: pa.RecordBatch, name: str, what: str) -> Any:
    """float64 [rows] of a column of numbers, NaN for none. Raises PrepareError if there is no such column."""
    column = named_column(batch, name, what)
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise PrepareError(f"{what}: expected a column of numbers, got {name} of {column.type}. Name another column.")
    return column.cast(pa.float64()).fill_null(float("nan")).to_numpy(zero_copy_only=False)


def named_column(batch: pa.RecordBatch, name: str, what: str) -> pa.Array:
    """A column of a batch by its name. Raises PrepareError with those that there are."""
    if name not in batch.schema.names:
        raise PrepareError(
            f"{what}: expected a column {name!r}, got "
            f"{', '.join(n for n in batch.schema.names if n not in ('place', 'html', 'text', 'where', 'text_bytes'))}. "
            "Put its [score.NAME] before, or name a field of the input in [read.columns]."
        )
    return batch.column(name)


_CLEANING = frozenset(("empty", "no_text", "malformed"))
"""Reasons of stages that make text and have no opinion of it."""


def segments(stages: Iterable[Stage]) -> list[tuple[Stage, ...]]:
    """The stages in runs: all but the first begin with one that needs percentiles of all documents before it."""
    out: list[list[Stage]] = [[]]
    for stage in stages:
        if getattr(stage, "percentiles", None):
            out.append([])
        out[-1].append(stage)
    return [tuple(segment) for segment in out]


def recorded_scores(stages: Iterable[Stage]) -> Json:
    """What made each column of scores: the scorer's name, version and settings, as files keep it."""
    scored: Json = {}
    for stage in stages:
        scored |= getattr(stage, "scored", {})
    return scored


def without_scoring(stages: Sequence[Stage], recorded: Mapping[str, Any]) -> tuple[tuple[Stage, ...], list[str]]:
    """The stages without what the input has already, and the names of those whose columns it has from other settings.

    Args:
        recorded: What made each column of the input; None for a field that the recipe itself names.
    """
    out: list[Stage] = []
    other: list[str] = []
    for stage in stages:
        columns = getattr(stage, "scored", {})
        if not columns or any(column not in recorded for column in columns):
            out.append(stage)
        elif any(recorded[column] not in (None, scorer) for column, scorer in columns.items()):
            other.append(stage.name)
            out.append(stage)
        elif hasattr(stage, "from_columns"):
            out.append(stage.from_columns())
    return tuple(out), other


def annotating(stages: Iterable[Stage]) -> tuple[Stage, ...]:
    """The stages that clean text or add columns, without those that would drop documents."""
    out: list[Stage] = []
    for stage in stages:
        if hasattr(stage, "annotation"):
            out.append(stage.annotation())
        elif set(stage.reasons) <= _CLEANING:
            out.append(stage)
    return tuple(out)
