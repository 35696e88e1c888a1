"""The scorer `signals`: what the rules of Gopher and FineWeb measure, as columns (RedPajama-v2's quality signals)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from forebay.prepare.scores.base import Scorer

_TOP, _DUPLICATE = (2, 3, 4), (5, 6, 7, 8, 9, 10)
_SHARES = (
    "hashes_per_word", "ellipses_per_word", "bullet_lines", "ellipsis_lines", "alpha_words", "duplicate_paragraphs",
    "duplicate_paragraph_chars", "duplicate_lines", "duplicate_line_chars", "ended_lines", "short_lines",
    "newlines_per_word", *(f"top_{n}_gram" for n in _TOP), *(f"duplicate_{n}_grams" for n in _DUPLICATE),
)  # fmt: skip
_COLUMNS = ("words", "lines", "mean_word_chars", "stop_words", *_SHARES)


@dataclass(frozen=True)
class Signals(Scorer):
    """The measures behind `[gopher_quality]`, `[gopher_repetition]` and `[fineweb]`, one column each, NAME_x.

    Counts: words (those not all symbols), lines, stop_words (different ones of the language's list). All others but
    mean_word_chars are shares; of nothing, such as words in a text without any, NaN.

    Source: Weber et al. 2024 (RedPajama-v2), section 4.3, whose signals are those of Gopher and C4.
    """

    name: ClassVar[str] = "signals"
    version: ClassVar[int] = 1
    seconds_per_mb: ClassVar[float] = 0.03

    @property
    def columns(self) -> Mapping[str, str]:
        return dict.fromkeys(_COLUMNS, "number")

    def score(self, batch: pa.RecordBatch) -> Mapping[str, NDArray[Any]]:
        from forebay.prepare.filters import kernels
        from forebay.prepare.filters.quality import FineWeb, measure, quality_measures

        sizes = [(n, len(kernels.REPETITION) + i, n in _TOP) for i, n in enumerate((*_TOP, *_DUPLICATE))]
        q, _ = quality_measures(batch, "auto")
        repeats = measure(
            kernels.measure_repetition, batch, len(kernels.REPETITION) + len(sizes), [np.array(sizes, np.int64)]
        )
        shape = measure(kernels.measure_lines, batch, len(kernels.FINEWEB), [FineWeb.short_line_chars])
        r, grams = dict(zip(kernels.REPETITION, repeats)), repeats[len(kernels.REPETITION) :]
        f = dict(zip(kernels.FINEWEB, shape, strict=True))
        with np.errstate(divide="ignore", invalid="ignore"):
            values = [
                q["text_words"], q["lines"], q["text_chars"] / q["text_words"], q["stops"],
                q["hashes"] / q["words"], q["ellipses"] / q["words"], q["bullets"] / q["lines"],
                q["trails"] / q["lines"], q["alpha_words"] / q["words"], r["same_paragraphs"] / r["paragraphs"],
                r["paragraph_chars"] / r["chars"], r["same_lines"] / r["lines"], r["line_chars"] / r["chars"],
                f["ended"] / f["lines"], f["short"] / f["lines"], f["newlines"] / f["words"],
                *(chars / r["chars"] for chars in grams),
            ]  # fmt: skip
        return dict(zip(_COLUMNS, values, strict=True))
