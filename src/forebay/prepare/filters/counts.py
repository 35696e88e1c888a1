"""Drops documents by counts of characters, words and lines: too short or too long ones, and generated source code."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from forebay.prepare.compiled import jit
from forebay.prepare.documents import Stage, StageResult, first_failing, text_buffers
from forebay.prepare.filters.kernels import measure_length
from forebay.prepare.filters.word_tables import character_table
from forebay.prepare.settings import Number, Share, check_fields, check_order


@dataclass(frozen=True)
class Length(Stage):
    """Keep documents of `min` to `max` characters and words, both included.

    Args:
        min_chars, max_chars: Unicode characters.
        min_words, max_words: Runs of characters without white space between.
    """

    min_chars: Number = 1
    max_chars: Number = float("inf")
    min_words: Number = 0
    max_words: Number = float("inf")

    name: ClassVar[str] = "length"
    version: ClassVar[int] = 1
    reasons: ClassVar[tuple[str, ...]] = tuple(
        f"{amount}_{unit}" for unit in ("chars", "words") for amount in ("few", "many")
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for unit in ("chars", "words"):
            check_order(self, f"min_{unit}", f"max_{unit}")

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        offsets, data = text_buffers(batch.column("text"))
        counts = np.zeros((batch.num_rows, 2), np.int64)
        measure_length(offsets, data, character_table(), counts)
        chars, words = counts.T
        few, many = (chars < self.min_chars, words < self.min_words), (chars > self.max_chars, words > self.max_words)
        return StageResult(batch, first_failing(few[0], many[0], few[1], many[1]))


@dataclass(frozen=True)
class Code(Stage):
    """Drop files whose lines no person wrote.

    Args:
        max_mean_line_chars: Mean length of a line: 100.
        max_line_chars: The longest line: 1000.
        min_alphanumeric: Share of letters and digits among all characters: 0.25.
    """

    max_mean_line_chars: Number = 100
    max_line_chars: Number = 1000
    min_alphanumeric: Share = 0.25

    name: ClassVar[str] = "code"
    version: ClassVar[int] = 1
    reasons: ClassVar[tuple[str, ...]] = ("code_long_lines", "code_long_line", "code_few_alphanumeric")

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        offsets, data = text_buffers(batch.column("text"))
        m = np.zeros((4, batch.num_rows), np.int64)
        _measure(offsets, data, m)
        sizes, newlines, longest, alphanumeric = m
        with np.errstate(divide="ignore", invalid="ignore"):
            failed = (
                (sizes - newlines) / (newlines + 1) > self.max_mean_line_chars,
                longest > self.max_line_chars,
                alphanumeric / sizes < self.min_alphanumeric,
            )
        return StageResult(batch, first_failing(*failed))


@jit()
def _measure(offsets, data, out):  # type: ignore[no-untyped-def]
    """int64 [4, rows]: characters, newlines, characters of the longest line, letters and digits.

    A character beyond ASCII is nearly always a letter, and counts as one.
    """
    for row in range(len(offsets) - 1):
        line = 0
        for i in range(offsets[row], offsets[row + 1]):
            byte = data[i]
            if 0x80 <= byte < 0xC0:
                continue
            out[0, row] += 1
            line += 1
            if byte == 10:
                out[1, row] += 1
                line = 0
            elif byte >= 0xC2 or 48 <= byte < 58 or 65 <= byte < 91 or 97 <= byte < 123:
                out[3, row] += 1
            out[2, row] = max(out[2, row], line)
