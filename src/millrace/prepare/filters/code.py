"""The rules by which corpora of source code leave out generated, minified and data files.

Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", 3.1 (mean line above 100 characters,
longest above 1000, a small share of alphanumeric characters); the share 0.25 is that of the CodeParrot dataset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millrace.prepare.documents import Verdict, text_buffers
from millrace.prepare.filters.fields import first_failing, need_number

_ALPHANUMERIC = np.zeros(256, np.int64)
_ALPHANUMERIC[[c for c in range(128) if chr(c).isalnum()]] = 1
_ALPHANUMERIC[0xC2:0xF5] = 1  # the first byte of a character beyond ASCII: nearly always a letter
_CHARACTER = np.ones(256, np.int64)
_CHARACTER[0x80:0xC0] = 0


@dataclass(frozen=True)
class Code:
    """Drop files whose lines no person wrote.

    Args:
        max_mean_line_chars: Mean length of a line: 100.
        max_line_chars: The longest line: 1000.
        min_alphanumeric: Share of letters and digits among all characters: 0.25.
    """

    max_mean_line_chars: float = 100
    max_line_chars: float = 1000
    min_alphanumeric: float = 0.25

    name: ClassVar[str] = "code"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        need_number(self, "max_mean_line_chars", "max_line_chars")
        need_number(self, "min_alphanumeric", high=1)

    @property
    def reasons(self) -> tuple[str, ...]:
        """In the order in which they are tried."""
        return ("code_long_lines", "code_long_line", "code_few_alphanumeric")

    def files(self) -> tuple[str, ...]:
        """None."""
        return ()

    def apply(self, batch: pa.RecordBatch) -> Verdict:
        """Drop what fails a rule."""
        offsets, data = text_buffers(batch.column("text"))
        base = offsets[0] if len(offsets) else 0
        rows, data = offsets - base, data[base : offsets[-1]]
        characters = _below(_CHARACTER[data])
        sizes, newlines = _sums(characters, rows), _sums(_below(data == ord("\n")), rows)
        with np.errstate(divide="ignore", invalid="ignore"):
            failed = (
                (sizes - newlines) / (newlines + 1) > self.max_mean_line_chars,
                _longest_lines(data, rows, characters) > self.max_line_chars,
                _sums(_below(_ALPHANUMERIC[data]), rows) / sizes < self.min_alphanumeric,
            )
        return Verdict(batch, first_failing(*failed))


def _longest_lines(
    data: NDArray[np.uint8], rows: NDArray[np.int64], characters: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Characters in the longest line of each document."""
    newlines = np.flatnonzero(data == ord("\n"))
    stops = np.sort(np.concatenate([newlines, rows[1:]]))
    # A line begins after a newline, or where a document does. Where a document begins with a newline, its end and that
    # of the document before are one place: such a line is empty.
    after = np.isin(stops, newlines).astype(np.int64)
    starts = np.minimum(np.concatenate([[0], (stops + after)[:-1]])[: len(stops)], stops)
    longest = np.zeros(len(rows) - 1, np.int64)
    document = np.maximum(np.searchsorted(rows, stops, side="left") - 1, 0)
    np.maximum.at(longest, document, characters[stops] - characters[starts])
    return longest


def _below(values: NDArray[np.int64] | NDArray[np.bool_]) -> NDArray[np.int64]:
    """How much lies before each position: int64 [n + 1]."""
    return np.concatenate([[0], np.cumsum(values, dtype=np.int64)])


def _sums(below: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return below[rows[1:]] - below[rows[:-1]]
