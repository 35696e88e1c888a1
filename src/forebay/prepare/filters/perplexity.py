"""The perplexity of each document under an n-gram model, with the library `kenlm` (ARPA and its own binary files).

Text becomes words as in training: small letters, words between single spaces, a line for a line.
Source: Wenzek et al. 2020 (CCNet), section 4.2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.arrays import F64, I64, U8
from forebay.errors import UsageError, package_for
from forebay.prepare.compiled import jit
from forebay.prepare.documents import Measure, Stage, StageResult, check_rules, replace_column, text_buffers
from forebay.prepare.filters.points import decode, encode, kind, room_of
from forebay.prepare.filters.word_tables import BREAK
from forebay.prepare.filters.words import clip, cut_words, tables, word_room
from forebay.prepare.scores.base import COLUMN, Scorer, number_column
from forebay.prepare.settings import Number, check_fields, check_order

LOOK_BYTES = 1 << 18  # Of a longer document the first so many bytes are scored.


@dataclass(frozen=True)
class Kenlm(Scorer):
    """Perplexity under an n-gram model (ARPA or binary), infinite for a text without words.

    Each line is a sentence to the model, in small letters with punctuation apart, as `--to lm` reads it.

    Args:
        model: Path of the model.

    Source: Wenzek et al. 2020 (CCNet), section 4.2.
    """

    model: str = ""

    name = "kenlm"
    version = 2
    seconds_per_mb = 0.04
    libraries = ("kenlm",)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.model:
            raise UsageError(
                f"model: expected the path of a KenLM model (ARPA or binary), got {self.model!r}. "
                "`forebay prepare --to lm` trains one on your own text."
            )

    def files(self) -> tuple[str, ...]:
        return (self.model,)

    def score(self, batch: pa.RecordBatch) -> Mapping[str, F64]:
        model = _load_kenlm(self.model)
        word_ends, data = spaced(batch.column("text"), LOOK_BYTES)
        scores = np.empty(batch.num_rows, np.float64)
        for row in range(batch.num_rows):
            scores[row] = perplexity(model, data[word_ends[row] : word_ends[row + 1]].tobytes().decode())
        return {"": scores}


@dataclass(frozen=True)
class Perplexity(Stage):
    """Keep documents whose perplexity is in an interval; adds the column `perplexity` (infinite for no words).

    The scorer `kenlm` with bounds. Several models: `[score.NAME]` with `use = "kenlm"`.

    Args:
        model: Path of a KenLM model: ARPA or binary; `column`: the input has the column.
        min_perplexity, max_perplexity: Both included.
    """

    model: str = ""
    min_perplexity: Number = 0
    max_perplexity: Number = float("inf")

    name = "perplexity"
    version = 2
    reasons = ("perplexity_low", "perplexity_high")

    def __post_init__(self) -> None:
        check_fields(self)
        Kenlm(self.model)
        check_order(self, "min_perplexity", "max_perplexity")

    def files(self) -> tuple[str, ...]:
        return () if self.model == COLUMN else (self.model,)

    @property
    def scored(self) -> dict[str, list[Any]]:
        return {} if self.model == COLUMN else {"perplexity": ["kenlm", Kenlm.version, PurePath(self.model).name]}

    def from_columns(self) -> "Perplexity":
        return replace(self, model=COLUMN)

    def annotation(self) -> "Perplexity":
        return replace(self, min_perplexity=0, max_perplexity=math.inf)

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        if self.model == COLUMN:
            scores = number_column(batch, "perplexity", "perplexity")
        else:
            scores = Kenlm(self.model).score(batch)[""]
            batch = replace_column(batch, "perplexity", pa.array(scores, pa.float64()))
        rules = Measure(scores, low=self.min_perplexity), Measure(scores, high=self.max_perplexity)
        return check_rules(batch, self.reasons, rules)


def perplexity(model: Any, lines: str) -> float:
    """Of lines of spaced words, each ended by a newline: 10 ** (-log10 of their probability / words and line ends)."""
    parts = lines.split("\n")[:-1]
    if not parts:
        return math.inf
    total = sum(model.score(line, bos=True, eos=True) for line in parts)
    exponent = -total / (lines.count(" ") + 2 * len(parts))
    return float(10.0**exponent) if exponent < 300 else math.inf


@lru_cache(4)
def _load_kenlm(path: str) -> Any:
    otherwise = " (it is built with a C++ compiler), or take this filter out of the recipe."
    with package_for("perplexity", otherwise):
        import kenlm
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


def spaced(texts: pa.LargeStringArray, limit: int) -> tuple[I64, U8]:
    """Each text as lines of words, `a word , another .\\n`: offsets int64 [rows + 1], UTF-8 bytes uint8.

    Lines without a word are left out; of a text longer than `limit` bytes the rest is. No word holds white space or a
    control character, and none is `<s>`, `</s>` or `<unk>`.
    """
    offsets, data = text_buffers(pc.utf8_lower(texts))
    stops = clip(offsets, data, limit)
    capacity = int((stops - offsets[:-1]).sum())
    out = np.empty(2 * capacity + len(stops), np.uint8)
    word_ends = np.zeros(len(stops) + 1, np.int64)
    _space(offsets, stops, data, *tables(), out, word_ends)
    return word_ends, out[: word_ends[-1]]


@jit()
def _space(offsets, stops, data, table, keys, values, out, out_ends):  # type: ignore[no-untyped-def]
    capacity = room_of(offsets, stops)
    points = np.empty(capacity, np.uint32)
    begins, word_ends, tail, kinds = word_room(capacity)
    written = 0
    for row in range(len(stops)):
        n = decode(data, offsets[row], stops[row], points)
        start = 0
        for i in range(n + 1):
            if i < n and kind(table, points[i]) & BREAK == 0:
                if points[i] < 32 or points[i] == 127:
                    points[i] = 32
                continue
            words = cut_words(points, start, i, table, keys, values, begins, word_ends, tail, kinds)
            for w in range(words):
                written = encode(points, begins[w], word_ends[w], out, written)
                out[written] = 10 if w + 1 == words else 32
                written += 1
            start = i + 1
        out_ends[row + 1] = written
