"""The rules that FineWeb adds to those of C4 and Gopher.

Source: Penedo et al. 2024, "The FineWeb Datasets", section 3.5 (custom filters), as datatrove 0.10 measures them.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from forebay.prepare.documents import Stage, Verdict
from forebay.prepare.filters.fields import first_failing, measure, need_count, need_flag, need_number


@dataclass(frozen=True)
class FineWeb(Stage):
    """Drop lists, menus and boilerplate by the shape of their lines (those that are not blank).

    A minimum of 0 or a maximum of `inf` switches its rule off. A value at a threshold is kept.

    Args:
        min_ended_lines: Share of lines that end with a sentence's punctuation: 0.12.
        keep_unended: Keep a document none of whose lines ends so (text without punctuation).
        max_short_lines, short_line_chars: Share of lines of at most so many characters: 0.67 of 30.
        max_duplicate_chars: Share of characters in lines that came before: 0.01.
        max_newlines_per_word: 0.3.

    Source: Penedo et al. 2024, section 3.5: 0.12, 0.67 and 0.1 for duplicates; the code that made FineWeb, in
    datatrove, has 0.01 for duplicates, and 0.3 for newlines.
    """

    min_ended_lines: float = 0.12
    keep_unended: bool = False
    max_short_lines: float = 0.67
    short_line_chars: int = 30
    max_duplicate_chars: float = 0.01
    max_newlines_per_word: float = 0.3

    name: ClassVar[str] = "fineweb"
    version: ClassVar[int] = 1
    reasons: ClassVar[tuple[str, ...]] = tuple(
        f"fineweb_{name}" for name in ("empty", "few_ended_lines", "short_lines", "duplicate_chars", "newlines")
    )
    shares_words: ClassVar[bool] = True

    def __post_init__(self) -> None:
        need_number(self, "min_ended_lines", high=1)
        need_number(self, "max_short_lines", "max_duplicate_chars", "max_newlines_per_word")
        need_count(self, "short_line_chars")
        need_flag(self, "keep_unended")

    def apply(self, batch: pa.RecordBatch) -> Verdict:
        """Drop what fails a rule."""
        from forebay.prepare.filters.kernels import FINEWEB, measure_lines

        m = dict(zip(FINEWEB, measure(measure_lines, batch, len(FINEWEB), [self.short_line_chars]), strict=True))
        with np.errstate(divide="ignore", invalid="ignore"):
            unended = (m["ended"] == 0) & self.keep_unended
            failed = (
                m["lines"] == 0,
                (m["ended"] / m["lines"] < self.min_ended_lines) & ~unended,
                m["short"] / m["lines"] > self.max_short_lines,
                m["same_chars"] / m["chars"] > self.max_duplicate_chars,
                m["newlines"] / m["words"] > self.max_newlines_per_word,
            )
        return Verdict(batch, first_failing(*failed))
