"""Drops documents with toxic text: by a lexicon with weights, or by lists of words.

One compiled pass over each document (see `spans`). The lexicon is in `toxic.txt.gz`: the lists of LDNOOBW in 27
languages (CC-BY-4.0), with weights of ours; `scripts/make_toxic_lists.py` made it.
"""

import functools
import gzip
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.arrays import BOOL, I64
from forebay.errors import UsageError
from forebay.prepare.clean.spans import Automaton, apart, build, read_lines, word_table
from forebay.prepare.compiled import jit
from forebay.prepare.documents import Measure, Stage, StageResult, keep_all, replace_column, text_buffers
from forebay.prepare.filters.kernels import text_lengths
from forebay.prepare.filters.language import LOOK_CHARS, default_model, language_code
from forebay.prepare.scores.classifiers import FastText
from forebay.prepare.settings import Number, check_fields

UNSPACED = frozenset(("zh", "ja", "th", "lo", "km", "my", "yue", "wuu", "bo"))
"""Languages written without spaces: a phrase is found anywhere."""
ALLOWED = ("sm", "グロ", "女の子", "性")
"""Entries of the Japanese and Chinese lists that are common parts of honest words. Source: datatrove's
C4BadWordsFilter, which leaves them out: each alone would drop more than a tenth of its language."""
WORDS, LEXICON, MIN_WEIGHT = 0, 1, 5
SHIPPED = "ldnoobw"
SURE_LANGUAGE, UNSURE_LANGUAGES = 0.5, ("en", "ru", "zh")  # Lists of three scripts.
FIRST_NAMES = ("Dick", "Semen", "Pussy Riot")
_NAMES = re.compile(
    rf"\b(?:{'|'.join(FIRST_NAMES)}|Fucking|Wank|Anus|Dildo|Intercourse|Cock|Bumsen|Verga|Puta|Polla|Pik|Figa)\b"
)
_ABOUT_PLACES = re.compile(
    r"(?i)\b(?:village|town|city|municipality|mountain|summit|parish|county|province|in \w+land|austria|bavaria|"
    r"garmisch|gemeinde|ortsteil|dorf|gipfel|landkreis|einwohner|österreich|municipio|pueblo|novia|comune|frazione|commune)"
)
"""Fucking in Austria, the Wank near Garmisch."""


@jit()
def _count(offsets, data, automaton, table, bounded, weights, matches):  # type: ignore[no-untyped-def]
    """Writes the weights of the phrases of a row, of those that overlap the first to end: int64 [rows]."""
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
                    matches[row] += weights[automaton.phrase[pos]]
                    free = i + 1
                    break
                pos = automaton.shorter[pos]
                if pos == 0:
                    break


@dataclass(frozen=True)
class Toxic(Stage):
    """Drops documents by the lexicon that comes with it, or by word lists.

    The lexicon is no classifier: it finds obscene words, not threats or contempt in polite ones. Its entries weigh 5,
    and 1 if honest text has them as well; 3 in languages that were not examined. Names of places and persons (Fucking
    in Austria, Dick) do not count. Of short texts of our own its precision and recall are 0.96 and 0.74 in English
    (C4's rule: 0.40, 0.71), and 1 and 0.8 or more in German, French, Spanish, Italian, Portuguese, Dutch, Polish,
    Russian and Chinese.

    Args:
        lists: `ldnoobw`: the same lists, but any entry counts, as C4 has it. A file of phrases, one a line, for all
            documents; or a directory with one such file for each language, named by its code (`en`, `de`). A document
            whose language has no list is not checked (count `no_list`).
        language: Of documents without one in a column `language`; "": it is detected, and a text whose language is in
            doubt is compared with the lists of English, Russian and Chinese too.
        allow: Entries of the lists that do not count.
        max_score: Without lists: more weight for 100 words drops, if the document has a weight of 5 at least. The
            column `toxic_score` says it.

    Source: C4 (Raffel et al. 2020): any word of LDNOOBW drops; in Chinese, Japanese and Thai wherever it stands, else
    where no word character touches it (datatrove's C4BadWordsFilter). Weights and limits are ours. Cost: linear in any
    text.
    """

    name = "toxic"
    version = 3
    reasons = ("toxic_words", "toxic_lexicon")
    lists: str = ""
    language: str = ""
    allow: tuple[str, ...] = ALLOWED
    max_score: Number = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.lists not in ("", SHIPPED) and not Path(self.lists).exists():
            raise UsageError(
                f"lists: expected `{SHIPPED}`, a file or a directory, got {self.lists!r}, which does not exist"
            )

    def files(self) -> tuple[str, ...]:
        """The lists, and the model of languages."""
        matches = [] if self.language else [default_model()]
        if self.lists not in ("", SHIPPED):
            path = Path(self.lists)
            matches += [str(p) for p in sorted(path.iterdir()) if p.is_file()] if path.is_dir() else [self.lists]
        return tuple(matches)

    def annotation(self) -> Stage:
        """The same column, and nothing is dropped."""
        return replace(self, lists="", max_score=math.inf)

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        """Drops as configured; counts `matches` (in what is kept) and `no_list`."""
        drop = keep_all(len(batch))
        matches, listed = self._matches(batch)
        if self.lists:
            over = matches > 0
            drop[over] = WORDS
            measures = {"toxic_words": Measure(matches, high=0)}
        else:
            _, words = text_lengths(batch.column("text"))
            scores = 100 * matches / np.maximum(words, 1)
            over = (scores > self.max_score) & (matches >= MIN_WEIGHT)
            drop[over] = LEXICON
            measures = {"toxic_lexicon": Measure(np.where(matches >= MIN_WEIGHT, scores, np.nan), high=self.max_score)}
            batch = replace_column(batch, "toxic_score", pa.array(scores, pa.float64()))
        counts = {"matches": int(matches[~over].sum()), "no_list": int((~listed & ~over).sum())}
        return StageResult(batch, drop, counts, measures=measures)

    def _matches(self, batch: pa.RecordBatch) -> tuple[I64, BOOL]:
        matches, listed = np.zeros(len(batch), np.int64), np.zeros(len(batch), bool)
        languages, doubtful = self._languages(batch)
        folded = pc.utf8_lower(batch.column("text"))
        rows_by_language = {language: set(doubtful) for language in UNSURE_LANGUAGES if doubtful}
        for row, language in enumerate(languages):
            rows_by_language.setdefault(language, set()).add(row)
        for language, chosen in sorted(rows_by_language.items()):
            rows = sorted(chosen)
            automaton, weights = _automaton(self.lists, language, self.allow)
            if automaton is None:
                continue
            offsets, data = text_buffers(folded if len(rows) == len(batch) else folded.take(pa.array(rows)))
            here = np.zeros(len(rows), np.int64)
            bounded = language_code(language) not in UNSPACED
            _count(offsets, data, automaton, word_table(), bounded, weights, here)
            if not self.lists:
                for i in np.flatnonzero(here >= MIN_WEIGHT).tolist():
                    here[i] -= _weight_of_names(batch.column("text")[rows[i]].as_py(), _entries(language))
            matches[rows], listed[rows] = np.maximum(matches[rows], here), True
        return matches, listed

    def _languages(self, batch: pa.RecordBatch) -> tuple[list[str], list[int]]:
        """The language of each document, and the rows whose language is in doubt."""
        column = batch.column("language").to_pylist() if "language" in batch.schema.names else [None] * len(batch)
        languages: list[str] = [language or self.language for language in column]
        unknown = [row for row, language in enumerate(languages) if not language]
        if not unknown:
            return languages, []
        output = FastText(default_model(), max_chars=LOOK_CHARS).score(batch.take(pa.array(unknown)))
        for row, label in zip(unknown, output[""].to_pylist()):
            languages[row] = label or "en"
        is_sure = np.nan_to_num(output["score"]) >= SURE_LANGUAGE
        return languages, np.array(unknown)[~is_sure].tolist()


def _weight_of_names(text: str, entries: Mapping[str, int]) -> int:
    """The weight of names: entries never in small letters that are first names, or in a text with words for places."""
    about_places = _ABOUT_PLACES.search(text) is not None
    names = [match.group() for match in _NAMES.finditer(text)]
    honest = [name for name in names if name.lower() not in text and (about_places or name in FIRST_NAMES)]
    return sum(entries.get(name.lower(), 0) for name in honest)


@functools.lru_cache(maxsize=256)
def _automaton(lists: str, language: str, allow: tuple[str, ...]) -> tuple[Automaton | None, I64]:
    """The phrases and their weights; None if there is no list for that language, or an empty one."""
    if lists == SHIPPED:
        return _built({word: 1 for word in _listed(language) if word[0] != "+" and word not in allow})
    if not lists:
        return _built({word: weight for word, weight in _entries(language).items() if weight and word not in allow})
    path = Path(lists)
    if path.is_dir():
        if language != Path(language).name or not (path / language).is_file():
            return _built({})
        path = path / language
    return _built(dict.fromkeys({line.strip() for line in read_lines(path, "lists")} - {"", *allow}, 1))


def _entries(language: str) -> dict[str, int]:
    """The weight of each entry of a language, ours too."""
    return {word.removeprefix("+"): weight for word, weight in _listed(language).items()}


def _listed(language: str) -> dict[str, int]:
    return _shipped().get(language, _shipped().get(language_code(language), {}))


def _built(weights: dict[str, int]) -> tuple[Automaton | None, I64]:
    phrases = sorted(weights)
    folded = pc.utf8_lower(pa.array(phrases, pa.large_string())).to_pylist()
    numbers = np.array([weights[phrase] for phrase in phrases], np.int64)
    return (build(folded) if phrases else None), numbers


@functools.cache
def _shipped() -> dict[str, dict[str, int]]:
    """The weight of each entry by language; `+` stands before those that are not LDNOOBW's."""
    data = gzip.decompress((resources.files("forebay.prepare.clean") / "toxic.txt.gz").read_bytes())
    languages: dict[str, dict[str, int]] = {}
    for line in data.decode().splitlines():
        if line.startswith("["):
            entries = languages.setdefault(line[1:-1], {})
        elif not line.startswith("#"):
            weight, _, word = line.partition(" ")
            entries[word] = int(weight)
    return languages
