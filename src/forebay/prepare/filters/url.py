"""Drops documents by their address: hosts, addresses, words, parts of words, expressions. A row without a URL is kept.

The words that come with it are ours: few, in `word_lists.toml`. Lists of hosts are the user's files, a host or word a
line (`#` begins a comment), such as UT1's, which RefinedWeb and FineWeb used (Penedo et al. 2023, section G.1; 2024,
section 3.1).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from forebay.errors import PrepareError, UsageError
from forebay.prepare.documents import Measure, Stage, StageResult, keep_all
from forebay.prepare.filters.word_tables import word_lists
from forebay.prepare.settings import Texts, check_fields

_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Url(Stage):
    """Drop documents whose address is on a list, or holds words that are.

    Args:
        hosts: Files of hosts; one stands for all below it (`example.org` for `www.example.org`).
        urls: Files of whole addresses; scheme, a `www.` and a last `/` make no difference.
        words: Files of words; a document goes if its address holds one as a whole word (`casino` in `/casino-offers`).
        patterns: Regular expressions (re2's) that may not match anywhere in the address, in small letters.
        shipped: Whether our own lists count too: words, strict substrings, and soft words, of which two different ones
            drop; `auto`: if you name no list and no pattern.

    Source: Penedo et al. 2023 (RefinedWeb), section G.1: strict substrings, hard words, two soft words.
    """

    hosts: Texts = ()
    words: Texts = ()
    urls: Texts = ()
    patterns: Texts = ()
    shipped: bool | Literal["auto"] = "auto"

    name = "url"
    version = 2
    reasons = (
        "url_host", "url_word", "url_address", "url_soft_words", "url_substring", "url_pattern",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_fields(self)
        if self.shipped is False and not (self.files() or self.patterns):
            raise UsageError("hosts: expected files of hosts here, or another list, a pattern or `shipped`, got none")
        _pattern(self.patterns)

    def files(self) -> tuple[str, ...]:
        return (*self.hosts, *self.words, *self.urls)

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        shipped = not (self.files() or self.patterns) if self.shipped == "auto" else self.shipped
        hosts, urls = _lists(self.hosts, ""), _lists(self.urls, "")
        own = word_lists()["url"]
        words = _lists(self.words, own["words"] * shipped)
        soft = _lists((), own["soft_words"] * shipped)
        substrings = _substrings(_lists((), own["substrings"] * shipped))
        pattern = _pattern(self.patterns)
        drop, soft_words = keep_all(batch.num_rows), np.zeros(batch.num_rows, np.int64)
        for row, url in enumerate(batch.column("url").to_pylist()):
            if not url:
                continue
            lower = url.lower()
            parts = _WORD.findall(lower)
            soft_words[row] = len(soft.intersection(parts))
            if hosts and not hosts.isdisjoint(_suffixes(url)):
                drop[row] = 0
            elif words and not words.isdisjoint(parts):
                drop[row] = 1
            elif urls and _plain(lower) in urls:
                drop[row] = 2
            elif soft_words[row] > 1:
                drop[row] = 3
            elif substrings and substrings.search("".join(parts)):
                drop[row] = 4
            elif pattern and pattern.search(lower):
                drop[row] = 5
        measures = {"url_soft_words": Measure(soft_words, high=1)} if soft else {}
        return StageResult(batch, drop, measures=measures)


def _suffixes(url: str) -> list[str]:
    try:
        labels = (urlsplit(url).hostname or "").rstrip(".").split(".")
    except ValueError:  # such as an unclosed bracket: an address of nothing
        return []
    return [".".join(labels[i:]) for i in range(min(len(labels), 64))]


def _plain(url: str) -> str:
    return re.sub(r"^(?:[a-z][a-z0-9+.-]*:)?(?://)?(?:www\.)?", "", url).rstrip("/.")


@lru_cache(maxsize=8)
def _lists(paths: tuple[str, ...], shipped: str) -> frozenset[str]:
    entries: set[str] = set(shipped.split())
    for path in paths:
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise PrepareError(f"{path}: expected a list, a word or host a line: {error}.") from error
        entries.update(_plain(word) for line in lines if (word := re.split(r"(?:^|\s)#", line)[0].strip().lower()))
    return frozenset(entries - {""})


@lru_cache(maxsize=8)
def _substrings(words: Iterable[str]) -> Any:
    cleaned = sorted({"".join(_WORD.findall(word)) for word in words} - {""})
    return _compiled("|".join(map(re.escape, cleaned))) if cleaned else None


@lru_cache(maxsize=8)
def _pattern(patterns: tuple[str, ...]) -> Any:
    for pattern in patterns:
        _compiled(pattern)
    return _compiled("|".join(f"(?:{pattern})" for pattern in patterns)) if patterns else None


def _compiled(pattern: str) -> Any:
    import re2

    options = re2.Options()
    options.log_errors = False
    options.max_mem = 256 << 20
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        raise UsageError(f"patterns: expected an expression of re2, got {pattern[:200]!r}: {error}") from error
