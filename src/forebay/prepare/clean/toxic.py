"""Drops documents with words from lists of words, or that a fastText model calls toxic.

One compiled pass over each document (see `phrases`). No list is shipped: the usual one, LDNOOBW, is under CC-BY-4.0 and
is given by its path. Figures: `benchmarks/prepare/clean.py`.
"""

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from forebay.errors import UsageError
from forebay.prepare.clean.spans import Automaton, apart, build, word_table
from forebay.prepare.compiled import jit
from forebay.prepare.documents import Stage, StageResult, keep_all, replace_column, text_buffers
from forebay.prepare.scores.fasttext import FastText
from forebay.prepare.settings import Share, check_fields

UNSPACED = frozenset(("zh", "ja", "th", "lo", "km", "my", "yue", "wuu", "bo"))
"""Languages written without spaces: a phrase is found anywhere."""
ALLOWED = ("sm", "グロ", "女の子", "性")
"""Entries of the Japanese and Chinese lists that are common parts of honest words. Source: datatrove's
C4BadWordsFilter, which leaves them out: each alone would drop more than a tenth of its language."""
WORDS, SCORE = 0, 1


@jit()
def _count(offsets, data, automaton, table, bounded, matches):  # type: ignore[no-untyped-def]
    """Writes how many phrases a row has, of those that overlap the first to end: int64 [rows]."""
    for row in range(len(offsets) - 1):
        start, stop = offsets[row], offsets[row + 1]
        state, free = 0, start
        for i in range(start, stop):
            state = automaton.steps[state, automaton.columns[data[i]]]
            if automaton.phrase[state] < 0:
                continue
            pos = state
            while True:
                first = i + 1 - automaton.lengths[automaton.phrase[pos]]
                if first >= free and (not bounded or apart(data, start, stop, first, i + 1, table)):
                    matches[row] += 1
                    free = i + 1
                    break
                pos = automaton.shorter[pos]
                if pos == 0:
                    break


@dataclass(frozen=True)
class Toxic(Stage):
    """Drops documents by word lists, by a fastText model, or by both.

    Args:
        lists: A file of phrases, one a line, for all documents; or a directory with one such file for each language,
            named by its code (`en`, `de`). A document whose language has no file is not checked (count `no_list`).
        language: Of documents in a batch without a column `language`.
        allow: Entries of the lists that do not count.
        max_matches: More than this drops; -1 for no limit.
        model: A fastText model's path.
        label: Of the model: whose probability counts.
        threshold: A probability of at least this drops. The column `toxic_score` says it.

    Source: C4 (Raffel et al. 2020): any word of LDNOOBW drops; in Chinese, Japanese and Thai wherever it stands, else
    where no word character touches it (datatrove's C4BadWordsFilter). Cost: linear in any text.
    """

    name: ClassVar[str] = "toxic"
    version: ClassVar[int] = 1
    reasons: ClassVar[tuple[str, ...]] = ("toxic_words", "toxic_score")
    lists: str = ""
    language: str = "en"
    allow: tuple[str, ...] = ALLOWED
    max_matches: Annotated[int, Field(ge=-1)] = 0
    model: str = ""
    label: str = "__label__toxic"
    threshold: Share = 0.5

    def __post_init__(self) -> None:
        check_fields(self)
        if not (self.lists or self.model):
            raise UsageError(
                "lists: expected a file or directory of word lists, or a model, got neither. "
                "No list comes with Forebay; the usual one is LDNOOBW's, one file a language"
            )
        if self.lists and not Path(self.lists).exists():
            raise UsageError(f"lists: expected a file or directory, got {self.lists!r}, which does not exist")
        if self.model and not Path(self.model).is_file():
            raise UsageError(f"model: expected a fastText model, got {self.model!r}, which is no file")

    def files(self) -> tuple[str, ...]:
        """The lists and the model."""
        matches = [self.model] if self.model else []
        if self.lists:
            path = Path(self.lists)
            matches += [str(p) for p in sorted(path.iterdir()) if p.is_file()] if path.is_dir() else [self.lists]
        return tuple(matches)

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        """Drops as configured; counts `matches` (in what is kept) and `no_list`."""
        drop, counts = keep_all(len(batch)), Counter[str]()
        if self.lists:
            matches, listed = self._matches(batch)
            over = (matches > self.max_matches) & (self.max_matches >= 0)
            drop[over] = WORDS
            counts.update(matches=int(matches[~over].sum()), no_list=int((~listed & ~over).sum()))
        if self.model:
            scores = np.nan_to_num(np.asarray(FastText(self.model, self.label).score(batch)[""], np.float64))
            batch = replace_column(batch, "toxic_score", pa.array(scores, pa.float64()))
            drop[(drop < 0) & (scores >= self.threshold)] = SCORE
        return StageResult(batch, drop, {kind: count for kind, count in counts.items() if count})

    def _matches(self, batch: pa.RecordBatch) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        matches, listed = np.zeros(len(batch), np.int64), np.zeros(len(batch), bool)
        languages = [self.language] * len(batch)
        if "language" in batch.schema.names:
            languages = [language or self.language for language in batch.column("language").to_pylist()]
        folded = pc.utf8_lower(batch.column("text"))
        for language in sorted(set(languages)):
            automaton = _automaton(self.lists, language, self.allow)
            if automaton is None:
                continue
            rows = np.flatnonzero(np.array([language == other for other in languages]))
            some = folded if len(rows) == len(batch) else folded.take(pa.array(rows))
            offsets, data = text_buffers(some)
            here = np.zeros(len(rows), np.int64)
            bounded = language not in UNSPACED
            _count(offsets, data, automaton, word_table(), bounded, here)
            matches[rows], listed[rows] = here, True
        return matches, listed


@functools.lru_cache(maxsize=256)
def _automaton(lists: str, language: str, allow: tuple[str, ...]) -> Automaton | None:
    """None if there is no list for that language, or an empty one."""
    path = Path(lists)
    if path.is_dir():
        if language != Path(language).name or not (path / language).is_file():
            return None
        path = path / language
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"lists: expected UTF-8, got {error} ({path})") from error
    phrases = sorted({line.strip() for line in lines} - {"", *allow})
    return build(pc.utf8_lower(pa.array(phrases, pa.large_string())).to_pylist()) if phrases else None
