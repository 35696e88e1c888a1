"""Drops documents by lists of hosts, and of words in addresses. A row without a URL is kept.

The lists are the user's files, a host or word a line (`#` begins a comment), such as UT1's blocklists, which FineWeb
used (Penedo et al. 2024, section 3.1).
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from forebay.errors import PrepareError, UsageError
from forebay.prepare.documents import Stage, StageResult
from forebay.prepare.settings import Texts, check_fields

_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Url(Stage):
    """Drop documents whose address is on a list.

    Args:
        hosts: Files of hosts; one stands for all below it (`example.org` for `www.example.org`).
        words: Files of words; a document goes if its address holds one as a whole word (`casino` in `/casino-offers`).
    """

    hosts: Texts = ()
    words: Texts = ()

    name: ClassVar[str] = "url"
    version: ClassVar[int] = 1
    reasons: ClassVar[tuple[str, ...]] = ("url_host", "url_word")

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.hosts and not self.words:
            raise UsageError("hosts: expected files of hosts here or of words in `words`, got none")

    def files(self) -> tuple[str, ...]:
        return (*self.hosts, *self.words)

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        hosts, words = _lists(self.hosts), _lists(self.words)
        drop = np.full(batch.num_rows, -1, np.int16)
        for row, url in enumerate(batch.column("url").to_pylist()):
            if not url:
                continue
            if hosts and not hosts.isdisjoint(_suffixes(url)):
                drop[row] = 0
            elif words and not words.isdisjoint(_WORD.findall(url.lower())):
                drop[row] = 1
        return StageResult(batch, drop)


def _suffixes(url: str) -> list[str]:
    try:
        labels = (urlsplit(url).hostname or "").rstrip(".").split(".")
    except ValueError:  # such as an unclosed bracket: an address of nothing
        return []
    return [".".join(labels[i:]) for i in range(min(len(labels), 64))]


@lru_cache(maxsize=8)
def _lists(paths: tuple[str, ...]) -> frozenset[str]:
    entries: set[str] = set()
    for path in paths:
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise PrepareError(f"{path}: expected a list, a word or host a line: {error}.") from error
        entries.update(word for line in lines if (word := line.partition("#")[0].strip().lower().rstrip(".")))
    return frozenset(entries)
