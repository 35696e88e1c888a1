"""Length, Gopher's rules of quality and repetition, and those that FineWeb adds.

A rule compares two columns that a kernel measured; the first rule that fails, in the published order, is the reason.
Source: Rae et al. 2021 (Gopher), section A.1.1 and table A1; Penedo et al. 2024 (FineWeb), section 3.5. What they leave
open (words, duplicates, top n-grams) is as in datatrove 0.10. The scorer `signals` makes columns of what these rules
measure. The compiler, 0.5 s to import, is imported on use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from forebay.arrays import BOOL, F64, I64, Array
from forebay.errors import UsageError
from forebay.prepare.documents import Measure, StageResult, check_rules
from forebay.prepare.filters.language import (
    UNSPACED,
    ByLanguage,
    LanguageStage,
    all_stop_words,
    language_hash,
    language_hashes,
    stop_word_table,
    stop_words,
)
from forebay.prepare.filters.word_tables import HashTable
from forebay.prepare.scores.base import Scorer
from forebay.prepare.settings import Number, Share, check_order

Ngrams = tuple[tuple[Annotated[int, Field(ge=1, le=100)], Number], ...]
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
TOP_NGRAMS = ((2, 0.20), (3, 0.18), (4, 0.16))
DUPLICATE_NGRAMS = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))


def measure(kernel: Any, batch: pa.RecordBatch, columns: Sequence[Any], *extra: object) -> dict[Any, I64]:
    """What a kernel of `kernels.py` measures of each text, int64 [rows], by the names of its columns."""
    from forebay.prepare.filters.word_tables import character_table
    from forebay.prepare.filters.words import word_table

    cut = word_table(batch)
    out = np.zeros((batch.num_rows, len(columns)), np.int64)
    kernel(cut, character_table(), *extra, out)
    return dict(zip(columns, out.T))


@dataclass(frozen=True)
class Length(LanguageStage):
    """Keep documents of `min` to `max` characters and words, both included.

    Args:
        min_chars, max_chars: Unicode characters.
        min_words, max_words: Runs of characters without white space between; Chinese, Japanese, Thai, Lao, Khmer and
            Burmese are cut into words.
        language: Tables of other settings for languages: `[length.language.de]`.
    """

    min_chars: Number = 1
    max_chars: Number = float("inf")
    min_words: Number = 0
    max_words: Number = float("inf")
    language: ByLanguage = ()

    name = "length"
    version = 2
    reasons = tuple(f"{amount}_{unit}" for unit in ("chars", "words") for amount in ("few", "many"))

    def __post_init__(self) -> None:
        super().__post_init__()
        for unit in ("chars", "words"):
            check_order(self, f"min_{unit}", f"max_{unit}")

    def filter_batch(self, batch: pa.RecordBatch) -> StageResult:
        from forebay.prepare.filters.kernels import text_lengths

        chars, words = text_lengths(batch.column("text"))
        rules = (
            Measure(chars, low=self.min_chars), Measure(chars, high=self.max_chars),
            Measure(words, low=self.min_words), Measure(words, high=self.max_words),
        )  # fmt: skip
        return check_rules(batch, self.reasons, rules)


@dataclass(frozen=True)
class GopherQuality(LanguageStage):
    """Drop text that does not look like prose: too short, odd words, lists, teasers, no stop words.

    A minimum of 0 or a maximum of `inf` switches its rule off. A value at a threshold is kept.

    Args:
        min_words, max_words: Words that are not all symbols: 50 to 100 000.
        min_word_chars, max_word_chars: Their mean length: 3 to 10. `auto`: 3, or 1 where most words are Korean or of
            scripts without spaces, as FineWeb-2 has it for Chinese, Japanese and Korean.
        max_symbols_per_word: `#` signs a word, and ellipses a word: 0.1.
        max_bullet_lines, max_ellipsis_lines: Shares of lines that begin with a bullet (0.9), or end with
            an ellipsis (0.3).
        min_alpha_words: Share of words with a letter: 0.8.
        min_stop_words: How many different ones of the list must occur, in that spelling: 2, of at most 8. The list is
            the published one for English and where no language is known, or one of the document's language, by the
            column `language`; a language without a list passes.
        language: Tables of other settings for languages: `[gopher_quality.language.de]`.

    Source: Rae et al. 2021, section A.1.1, "Quality Filtering"; Penedo et al. 2025 (FineWeb-2) for other languages.
    """

    min_words: Number = 50
    max_words: Number = 100_000
    min_word_chars: Number | Literal["auto"] = "auto"
    max_word_chars: Number = 10
    max_symbols_per_word: Number = 0.1
    max_bullet_lines: Number = 0.9
    max_ellipsis_lines: Number = 0.3
    min_alpha_words: Share = 0.8
    min_stop_words: Annotated[int, Field(ge=0, le=len(STOP_WORDS))] = 2
    language: ByLanguage = ()

    name = "gopher_quality"
    version = 2
    reasons = (
        "gopher_short", "gopher_long", "gopher_short_words", "gopher_long_words", "gopher_hashes", "gopher_ellipses",
        "gopher_bullet_lines", "gopher_ellipsis_lines", "gopher_alpha_words", "gopher_stop_words",
    )  # fmt: skip
    shares_words = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self, "min_words", "max_words")
        if self.min_word_chars != "auto":
            check_order(self, "min_word_chars", "max_word_chars")

    def filter_batch(self, batch: pa.RecordBatch) -> StageResult:
        m, has_list = quality_measures(batch)
        shortest: Any = self.min_word_chars
        if shortest == "auto":
            shortest = np.where(2 * m["dense"] > m["text_words"], 1, 3)
        with np.errstate(all="ignore"):
            mean = m["text_chars"] / m["text_words"]  # of no words: no number, which no rule drops
            rules = (
                Measure(m["text_words"], low=self.min_words),
                Measure(m["text_words"], high=self.max_words),
                Measure(mean, low=shortest),
                Measure(mean, high=self.max_word_chars),
                Measure(m["hashes"] / m["words"], high=self.max_symbols_per_word),
                Measure(m["ellipses"] / m["words"], high=self.max_symbols_per_word),
                Measure(m["bullets"] / m["lines"], high=self.max_bullet_lines),
                Measure(m["trails"] / m["lines"], high=self.max_ellipsis_lines),
                Measure(m["alpha_words"] / m["words"], low=self.min_alpha_words),
                Measure(np.where(has_list, m["stops"], np.nan), low=self.min_stop_words),
            )
        return check_rules(batch, self.reasons, rules)


def quality_measures(batch: pa.RecordBatch) -> tuple[dict[str, I64], BOOL]:
    """The columns of `kernels.QUALITY` by name, and the rows whose language has a list of stop words."""
    from forebay.prepare.filters.kernels import QUALITY, measure_quality

    keys, values, listed = _stop_table()
    languages, unknown = language_hashes(batch, listed)
    return measure(measure_quality, batch, QUALITY, keys, values, languages), ~unknown


@lru_cache(1)
def _stop_table() -> tuple[*HashTable, dict[str, int]]:
    """The table, and the hash of each language that has a list of its own in it."""
    unspaced = [word for code in UNSPACED for word in stop_words(code)]
    lists = {code: list(words) for code, words in all_stop_words().items()} | {"en": list(STOP_WORDS)}
    return *stop_word_table([("", [*STOP_WORDS, *unspaced]), *lists.items()]), {
        code: language_hash(code) for code in lists
    }


@dataclass(frozen=True)
class GopherRepetition(LanguageStage):
    """Drop text that repeats its lines, paragraphs or phrases.

    A maximum of `inf`, or an empty list, switches a rule off. A value at a threshold is kept.

    Args:
        max_duplicate_paragraphs, max_duplicate_paragraph_chars: Shares of paragraphs (between empty lines) that came
            before, and of characters in them: 0.3, 0.2.
        max_duplicate_lines, max_duplicate_line_chars: The same for lines.
        top_ngrams: `[n, share]`: most characters that the commonest n-gram may cover.
        duplicate_ngrams: `[n, share]`: most characters that n-grams which came before may cover.
        language: Tables of other settings for languages: `[gopher_repetition.language.de]`; with n-grams of the same n.

    Source: Rae et al. 2021, table A1.
    """

    max_duplicate_paragraphs: Number = 0.30
    max_duplicate_paragraph_chars: Number = 0.20
    max_duplicate_lines: Number = 0.30
    max_duplicate_line_chars: Number = 0.20
    top_ngrams: Ngrams = TOP_NGRAMS
    duplicate_ngrams: Ngrams = DUPLICATE_NGRAMS
    language: ByLanguage = ()

    name = "gopher_repetition"
    version = 2
    shares_words = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("top_ngrams", "duplicate_ngrams"):
            pairs = getattr(self, name)
            if len({n for n, _ in pairs}) != len(pairs):
                raise UsageError(f"{name}: expected pairs [n, share] of different n, got {pairs!r}")

    @property
    def reasons(self) -> tuple[str, ...]:
        return (
            "gopher_empty",
            "gopher_duplicate_paragraphs",
            "gopher_duplicate_paragraph_chars",
            "gopher_duplicate_lines",
            "gopher_duplicate_line_chars",
            *(f"gopher_top_{n}_gram" for n, _ in self.top_ngrams),
            *(f"gopher_duplicate_{n}_grams" for n, _ in self.duplicate_ngrams),
        )

    def filter_batch(self, batch: pa.RecordBatch) -> StageResult:
        grams = (*self.top_ngrams, *self.duplicate_ngrams)
        chars, shares = repetition_shares(batch, [n for n, _ in self.top_ngrams], [n for n, _ in self.duplicate_ngrams])
        limits = (
            self.max_duplicate_paragraphs, self.max_duplicate_paragraph_chars, self.max_duplicate_lines,
            self.max_duplicate_line_chars, *(limit for _, limit in grams),
        )  # fmt: skip
        measures = (Measure(share, high=limit) for share, limit in zip(shares, limits, strict=True))
        return check_rules(batch, self.reasons, (chars == 0, *measures))


def repetition_shares(batch: pa.RecordBatch, top: Sequence[int], duplicate: Sequence[int]) -> tuple[I64, list[F64]]:
    """The characters of each text; and the shares in the order of `GopherRepetition`, with n-grams of these n."""
    from forebay.prepare.filters.kernels import REPETITION, measure_repetition

    sizes = sorted((n, len(REPETITION) + i, i < len(top)) for i, n in enumerate((*top, *duplicate)))
    table = np.array(sizes, np.int64).reshape(-1, 3)
    m = measure(measure_repetition, batch, (*REPETITION, *range(len(sizes))), table)
    with np.errstate(all="ignore"):
        shares = [
            m["same_paragraphs"] / m["paragraphs"], m["paragraph_chars"] / m["chars"], m["same_lines"] / m["lines"],
            m["line_chars"] / m["chars"], *(m[i] / m["chars"] for i in range(len(sizes))),
        ]  # fmt: skip
    return m["chars"], shares


@dataclass(frozen=True)
class FineWeb(LanguageStage):
    """Drop lists, menus and boilerplate by the shape of their lines (those that are not blank).

    A minimum of 0 or a maximum of `inf` switches its rule off. A value at a threshold is kept.

    Args:
        min_ended_lines: Share of lines that end with a sentence's punctuation: 0.12.
        max_short_lines: Share of lines of at most 30 characters: 0.67.
        max_duplicate_chars: Share of characters in lines that came before: 0.01.
        max_newlines_per_word: 0.3.
        language: Tables of other settings for languages: `[fineweb.language.de]`.

    Source: Penedo et al. 2024, section 3.5: 0.12, 0.67 and 0.1 for duplicates; the code that made FineWeb, in
    datatrove, has 0.01 for duplicates, and 0.3 for newlines.
    """

    min_ended_lines: Share = 0.12
    max_short_lines: Number = 0.67
    short_line_chars: int = field(default=30, init=False)  # Source: Penedo et al. 2024, section 3.5.
    max_duplicate_chars: Number = 0.01
    max_newlines_per_word: Number = 0.3
    language: ByLanguage = ()

    name = "fineweb"
    version = 2
    reasons = tuple(
        f"fineweb_{name}" for name in ("empty", "few_ended_lines", "short_lines", "duplicate_chars", "newlines")
    )
    shares_words = True

    def filter_batch(self, batch: pa.RecordBatch) -> StageResult:
        from forebay.prepare.filters.kernels import FINEWEB, measure_lines

        m = measure(measure_lines, batch, FINEWEB, self.short_line_chars)
        with np.errstate(all="ignore"):
            rules = (
                m["lines"] == 0,
                Measure(m["ended"] / m["lines"], low=self.min_ended_lines),
                Measure(m["short"] / m["lines"], high=self.max_short_lines),
                Measure(m["same_chars"] / m["chars"], high=self.max_duplicate_chars),
                Measure(m["newlines"] / m["words"], high=self.max_newlines_per_word),
            )
        return check_rules(batch, self.reasons, rules)


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

    name = "signals"
    version = 1
    seconds_per_mb = 0.03

    @property
    def columns(self) -> Mapping[str, str]:
        return dict.fromkeys(_COLUMNS, "number")

    def score(self, batch: pa.RecordBatch) -> Mapping[str, Array]:
        from forebay.prepare.filters.kernels import FINEWEB, measure_lines

        q, _ = quality_measures(batch)
        _, repeats = repetition_shares(batch, _TOP, _DUPLICATE)
        f = measure(measure_lines, batch, FINEWEB, FineWeb.short_line_chars)
        with np.errstate(all="ignore"):
            values = [
                q["text_words"], q["lines"], q["text_chars"] / q["text_words"], q["stops"],
                q["hashes"] / q["words"], q["ellipses"] / q["words"], q["bullets"] / q["lines"],
                q["trails"] / q["lines"], q["alpha_words"] / q["words"], *repeats[:4], f["ended"] / f["lines"],
                f["short"] / f["lines"], f["newlines"] / f["words"], *repeats[4:],
            ]  # fmt: skip
        return dict(zip(_COLUMNS, values, strict=True))
