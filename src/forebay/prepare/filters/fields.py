"""Checks and small steps that the filters share: fields of a recipe's table, and the first rule that fails."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.errors import UsageError


def need_number(stage: object, *names: str, low: float = 0, high: float = float("inf")) -> None:
    """Raise UsageError unless these fields of a stage are numbers in [low, high]."""
    for name in names:
        value = getattr(stage, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            expected = f"a number from {low:g}" + (f" to {high:g}" if np.isfinite(high) else "")
            raise UsageError(f"{name}: expected {expected}, got {value!r}")


def need_count(stage: object, *names: str, low: int = 0) -> None:
    """Raise UsageError unless these fields of a stage are whole numbers from `low`."""
    for name in names:
        value = getattr(stage, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise UsageError(f"{name}: expected a whole number from {low}, got {value!r}")


def need_flag(stage: object, *names: str) -> None:
    """Raise UsageError unless these fields of a stage are true or false."""
    for name in names:
        if not isinstance(getattr(stage, name), bool):
            raise UsageError(f"{name}: expected true or false, got {getattr(stage, name)!r}")


def need_order(stage: object, low: str, high: str) -> None:
    """Raise UsageError if the field `low` of a stage is above the field `high`."""
    if getattr(stage, low) > getattr(stage, high):
        raise UsageError(f"{low}: expected at most {high} ({getattr(stage, high)}), got {getattr(stage, low)}")


def need_strings(stage: object, *names: str) -> None:
    """Make these fields tuples (a recipe gives lists); raise UsageError unless they hold strings that are not empty."""
    for name in names:
        value: Any = getattr(stage, name)
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) and item for item in value):
            raise UsageError(f"{name}: expected a list of strings, got {value!r}")
        object.__setattr__(stage, name, tuple(value))


def first_failing(*failed: NDArray[np.bool_]) -> NDArray[np.int16]:
    """int16 [rows]: the first of the rules that fails in each row, or -1."""
    stacked = np.stack(failed)
    return np.where(stacked.any(0), stacked.argmax(0), -1).astype(np.int16)


def measure(kernel: Any, batch: pa.RecordBatch, columns: int, extra: Sequence[object] = ()) -> NDArray[np.int64]:
    """What a kernel of `kernels.py` measures of each text: int64 [columns, rows]."""
    from forebay.prepare.filters.characters import character_table
    from forebay.prepare.filters.words import word_table

    cut = word_table(batch.column("text"))
    out = np.zeros((batch.num_rows, columns), np.int64)
    kernel(*cut.texts, *cut.words, character_table(), *extra, out)
    return out.T
