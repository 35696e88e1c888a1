"""Drops documents that are too short or too long; characters and words are counted in one pass over the bytes."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from forebay.prepare.documents import Stage, StageResult, first_failing, text_buffers
from forebay.prepare.filters.characters import character_table
from forebay.prepare.filters.kernels import measure_length
from forebay.prepare.settings import Number, check_fields, check_order

BYTES_PER_TOKEN = 4
"""UTF-8 bytes of English text to a token of a vocabulary of 50 000, about; an estimate, before there is a tokenizer."""


@dataclass(frozen=True)
class Length(Stage):
    """Keep documents of `min` to `max` characters, words and tokens, both included.

    Args:
        min_chars, max_chars: Unicode characters.
        min_words, max_words: Runs of characters without white space between.
        min_tokens, max_tokens: Estimated: bytes / 4.
    """

    min_chars: Number = 1
    max_chars: Number = float("inf")
    min_words: Number = 0
    max_words: Number = float("inf")
    min_tokens: Number = 0
    max_tokens: Number = float("inf")

    name: ClassVar[str] = "length"
    version: ClassVar[int] = 1
    reasons: ClassVar[tuple[str, ...]] = (
        "few_chars",
        "many_chars",
        "few_words",
        "many_words",
        "few_tokens",
        "many_tokens",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for unit in ("chars", "words", "tokens"):
            check_order(self, f"min_{unit}", f"max_{unit}")

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        offsets, data = text_buffers(batch.column("text"))
        counts = np.zeros((batch.num_rows, 2), np.int64)
        measure_length(offsets, data, character_table(), counts)
        chars, words = counts.T
        tokens = np.diff(offsets) / BYTES_PER_TOKEN
        return StageResult(
            batch,
            first_failing(
                chars < self.min_chars,
                chars > self.max_chars,
                words < self.min_words,
                words > self.max_words,
                tokens < self.min_tokens,
                tokens > self.max_tokens,
            ),
        )
