"""Checks and small steps that the filters share: fields of a recipe's table, and the first rule that fails."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.errors import UsageError


def need_order(stage: object, low: str, high: str) -> None:
    """Raise UsageError if the field `low` of a stage is above the field `high`."""
    if getattr(stage, low) > getattr(stage, high):
        raise UsageError(f"{low}: expected at most {high} ({getattr(stage, high)}), got {getattr(stage, low)}")


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
