"""Drops source files that are no code to learn from: minified, generated, data.

A compiled pass counts lines and letters; google-re2 finds encoded data. Linear in any text. The language of a file is
the extension of its `id`, or of its address. Source: Lozhkov et al. 2024 (The Stack v2, StarCoder2), section 2.4.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.prepare.compiled import jit
from forebay.prepare.documents import Measure, StageResult, check_rules, text_buffers
from forebay.prepare.filters.language import ByLanguage, LanguageStage
from forebay.prepare.filters.points import kind, next_point
from forebay.prepare.filters.word_tables import LETTER, character_table
from forebay.prepare.settings import Count, Number

CODE = ("lines", "chars", "longest", "letters")  # Columns of `_measure`.
_GENERATED = (
    r"auto-?generated|automatically generated|generated automatically|this file (?:is|was) generated|@generated\b|"
    r"code generated .{0,200}do not edit"
)
_ENCODED = (
    r"(?:[a-zA-Z0-9+/=]{16,}\n?){4,}",
    r"(?:\b(?:0x|\\x)?[0-9a-fA-F]{2}(?:,[ \n]*|\b\s*)){8,}",
    r"(?:\\u[0-9a-fA-F]{4}){8,}",
)
"""Base64 (in lines of 16 characters or more, so that blank lines and lists of words are none), numbers in hexadecimal,
escaped characters."""
_MARKUP = "html htm xhtml json jsonl md markdown rst tex txt roff man svg xml ipynb csv tsv"
_DATA = "txt json jsonl yaml yml owl dot gv csv tsv"
_LONG_LINES = (("max_mean_line_chars", 100_000), ("max_line_chars", 100_000))
_FEW_LINES = (("max_lines", 512),)
_BY_EXTENSION: ByLanguage = tuple(
    (extension, _LONG_LINES * (extension in _MARKUP.split()) + _FEW_LINES * (extension in _DATA.split()))
    for extension in dict.fromkeys(f"{_MARKUP} {_DATA}".split())
)


@dataclass(frozen=True)
class Code(LanguageStage):
    """Drop source files by the shape of their lines, by marks of generators, and by encoded data.

    A value at a threshold is kept.

    Args:
        max_lines: 100 000; 512 for `.json`, `.yaml`, `.txt` and other data.
        max_mean_line_chars, max_line_chars: 100 and 1000; 100 000 for markup and data.
        language: Tables of other settings by extension of the file: `[code.language.html]`. Yours replace ours.

    Always drops files of which less than a quarter of the characters are letters; whose first 5 lines say that a
    program wrote them; or whose encoded data (base64 from 64 characters on, 8 hexadecimal numbers or escaped characters
    in a row) is more than half of the characters, or longer than 1024.

    Source: Lozhkov et al. 2024 (The Stack v2, StarCoder2), section 2.4, with its figures.
    """

    max_lines: Count = 100_000
    max_mean_line_chars: Number = 100
    max_line_chars: Count = 1000
    min_letters: float = field(default=0.25, init=False)
    max_encoded: float = field(default=0.5, init=False)
    max_encoded_chars: int = field(default=1024, init=False)
    language: ByLanguage = _BY_EXTENSION

    name = "code"
    version = 2
    reasons = tuple(f"code_{name}" for name in ("lines", "mean_line", "long_line", "letters", "generated", "encoded"))

    def codes(self, batch: pa.RecordBatch) -> list[str | None]:
        """The extension of each file: of its id, or of its address."""
        names = zip(batch.column("id").to_pylist(), batch.column("url").to_pylist())
        return [_extension(identity) or _extension(url.partition("?")[0]) for identity, url in names]

    def filter_batch(self, batch: pa.RecordBatch) -> StageResult:
        offsets, data = text_buffers(batch.column("text"))
        out = np.zeros((batch.num_rows, len(CODE)), np.int64)
        _measure(offsets, data, character_table(), out)
        m = dict(zip(CODE, out.T))
        generated, encoded = np.zeros(batch.num_rows, bool), np.zeros(batch.num_rows, bool)
        for row in range(batch.num_rows):
            text = data[offsets[row] : offsets[row + 1]].tobytes()
            generated[row] = _expressions()[0].search(b"\n".join(text[:4096].split(b"\n", 5)[:5])) is not None
            lengths = [len(match.group()) for match in _expressions()[1].finditer(text)]
            share = sum(lengths) > self.max_encoded * len(text)
            encoded[row] = share or max(lengths, default=0) > self.max_encoded_chars
        with np.errstate(all="ignore"):
            rules = (
                Measure(m["lines"], high=self.max_lines),
                Measure(m["chars"] / np.maximum(m["lines"], 1), high=self.max_mean_line_chars),
                Measure(m["longest"], high=self.max_line_chars),
                Measure(m["letters"] / m["chars"], low=self.min_letters),
                generated,
                encoded,
            )
        return check_rules(batch, self.reasons, rules)


def _extension(name: str) -> str:
    stem, dot, extension = name.rpartition("/")[2].rpartition(".")
    return extension.lower() if dot and stem and extension.isalnum() and len(extension) <= 10 else ""


@lru_cache(1)
def _expressions() -> tuple[Any, Any]:
    import re2

    options = re2.Options()
    options.longest_match = True
    options.log_errors = False
    return re2.compile(f"(?i){_GENERATED}".encode()), re2.compile("|".join(_ENCODED).encode(), options)


@jit()
def _measure(offsets, data, table, out):  # type: ignore[no-untyped-def]
    """`CODE` int64 [rows, 4]: lines that are not empty; their characters, those of the longest, letters."""
    for row in range(len(offsets) - 1):
        lines = chars = longest = letters = length = 0
        i = offsets[row]
        while i < offsets[row + 1]:
            point, i = next_point(data, i)
            if point == 10:
                lines += length > 0
                longest = max(longest, length)
                length = 0
                continue
            length += 1
            chars += 1
            letters += kind(table, point) & LETTER != 0
        out[row] = lines + (length > 0), chars, max(longest, length), letters
