"""How surprising a document is to an n-gram model: its perplexity.

Hides: the library `kenlm`, which reads ARPA text and its own binary files.

Source: Wenzek et al. 2020 (CCNet), section 4.2: documents ranked by the perplexity of a Kneser-Ney model of Wikipedia.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from forebay.errors import UsageError
from forebay.extras import install_command
from forebay.prepare.documents import Stage, Verdict, replace_column
from forebay.prepare.filters.fields import first_failing, need_number, need_order
from forebay.prepare.filters.spacing import spaced

LOOK_BYTES = 1 << 18
"""Of a longer document the first so many bytes are scored."""


@dataclass(frozen=True)
class Perplexity(Stage):
    """Keep documents whose perplexity is in an interval; adds the column `perplexity` (infinite for no words).

    Each line is a sentence to the model, in small letters with punctuation apart, as `forebay lm train` reads it.

    Args:
        model: Path of a KenLM model: ARPA or binary.
        min_perplexity, max_perplexity: Both included.
        keep_percentile: `[low, high]`: keep documents between these percentiles of all documents. Whoever sees the
            whole corpus applies it (`apply` does not), under the last of `reasons`.
    """

    model: str = ""
    min_perplexity: float = 0
    max_perplexity: float = float("inf")
    keep_percentile: tuple[float, ...] = ()

    name: ClassVar[str] = "perplexity"
    version: ClassVar[int] = 1
    # The last one is applied by `keep_percentile`.
    reasons: ClassVar[tuple[str, ...]] = ("perplexity_low", "perplexity_high", "perplexity_percentile")

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise UsageError(
                f"model: expected the path of a KenLM model (ARPA or binary), got {self.model!r}. "
                "`forebay lm train` makes one of your own text."
            )
        need_number(self, "min_perplexity", "max_perplexity")
        need_order(self, "min_perplexity", "max_perplexity")
        value: Any = self.keep_percentile
        good = isinstance(value, (list, tuple)) and all(type(p) in (int, float) for p in value)
        if not good or (len(value) != 0 and not (len(value) == 2 and 0 <= value[0] < value[1] <= 100)):
            raise UsageError(f"keep_percentile: expected [low, high] with 0 <= low < high <= 100, got {value!r}")
        object.__setattr__(self, "keep_percentile", tuple(float(p) for p in value))

    def files(self) -> tuple[str, ...]:
        """The model."""
        return (self.model,)

    def apply(self, batch: pa.RecordBatch) -> Verdict:
        """Score all, drop what is outside the interval."""
        model = _load(self.model)
        ends, data = spaced(batch.column("text"), LOOK_BYTES)
        scores = np.empty(batch.num_rows, np.float64)
        for row in range(batch.num_rows):
            scores[row] = perplexity(model, data[ends[row] : ends[row + 1]].tobytes().decode())
        batch = replace_column(batch, "perplexity", pa.array(scores, pa.float64()))
        return Verdict(batch, first_failing(scores < self.min_perplexity, scores > self.max_perplexity))


def perplexity(model: Any, lines: str) -> float:
    """Of lines of spaced words, each ended by a newline: 10 ** (-log10 of their probability / words and line ends)."""
    parts = lines.split("\n")[:-1]
    if not parts:
        return math.inf
    total = sum(model.score(line, bos=True, eos=True) for line in parts)
    exponent = -total / (lines.count(" ") + 2 * len(parts))
    return float(10.0**exponent) if exponent < 300 else math.inf


@lru_cache(2)
def _load(path: str) -> Any:
    try:
        import kenlm
    except ImportError as error:
        raise UsageError(
            f"perplexity: the package kenlm is not installed. Install it: {install_command('lm')} (it is built from "
            "source: a C++ compiler is needed), or take this filter out of the recipe."
        ) from error
    if not Path(path).is_file():
        raise UsageError(f"model: expected a KenLM model, got no file at {path}")
    config = kenlm.Config()
    config.show_progress = False
    try:
        return kenlm.Model(path, config)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"model: expected a KenLM model (ARPA or binary) at {path}, got one it refuses: {error}"
        ) from error
