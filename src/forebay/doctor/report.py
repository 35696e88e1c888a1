"""What an examination is asked and what it finds: plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"
MOST_BYTES = 256 << 20  # Read of one file or dataset unless all of it is asked for.
_FETCH = "fetch or write it again"
_TOKENIZE = "tokenize the text again, as with: forebay prepare TEXT --tokenizer TOKENIZER --out DIR"
_OTHERS = f"{_TOKENIZE} --dedup exact,minhash"
_IDS = "move the ids away, and forebay convert TOKENS OUT --to npy --seq-len N computes others"
_CUT = "cut it there with truncate --size BYTES, or fetch it again"
_ADVICE = {
    "header-as-tokens": "forebay convert FILE OUT --to bin, which goes by content; join arrays, not their files",
    "no-header": "forebay convert FILE OUT --to npy --input-dtype TYPE --seq-len N writes one",
    "appended": _CUT,
    "trailing-zeros": _CUT,
    "byte-order": "save it again as little-endian: tokens.astype('<u2') or '<u4'",
    "wrong-dtype": "forebay convert FILE OUT --to bin --input-dtype TYPE, or save it again as uint16 or uint32",
    "shape": "save it again as a vector: tokens.reshape(-1)",
    "phantom-ids": _IDS,
    "ids-of-another-view": _IDS,
    "ids-count": _IDS,
    "ids-mismatch": "fetch the tokens and their ids again",
    "byte-order-mark": "remove its first three bytes: tail -c +4 FILE",
    "document-ends": _TOKENIZE,
    "missing-eos": _TOKENIZE,
    "padding": _TOKENIZE,
    "vocabulary-overflow": _TOKENIZE,
    "wrap-16": _TOKENIZE,
    "duplicate-lines": _OTHERS,
    "duplicate-samples": _OTHERS,
    "repeated-passages": _OTHERS,
    "overlap": f"prepare both again from texts of which each is in one: {_OTHERS}",
    "same-data": "leave out one of the two",
    "unclear": "say --dtype, or name one of the files",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        fault: Its name, such as `header-as-tokens`; docs/doctor.md lists them.
        confidence: `certain` (by arithmetic), `likely` (by statistics with a wide margin) or `possible`.
        path: The file.
        place: Where in it: `byte 128`, `token 4096`, `sample 7`, `row group 2` …
        evidence: What was expected and what was found.
    """

    fault: str
    confidence: str
    path: str
    place: str
    evidence: str

    @property
    def advice(self) -> str:
        """What to do, as words or a command."""
        return _ADVICE.get(self.fault, _FETCH)

    @property
    def is_wrong(self) -> bool:
        """Whether it fails the examination; a possible fault is told and does not."""
        return self.confidence != POSSIBLE


@dataclass(frozen=True)
class Options:
    """What the caller knows of the data, and how much of it to read.

    Attributes:
        dtype: Type of tokens that no header tells; None to guess.
        vocab_size: Ids are below it; 0 if unknown.
        eos_id: Ends each document; None if unknown.
        seq_len: Tokens of a sample; 0 if unknown.
        tokenizer: Decodes the first tokens; None if unknown.
        full: Read every byte.
        most_bytes: Read of one file or dataset where `full` is False.
    """

    dtype: np.dtype[Any] | None = None
    vocab_size: int = 0
    eos_id: int | None = None
    seq_len: int = 0
    tokenizer: Tokenizer | None = None
    full: bool = False
    most_bytes: int = MOST_BYTES
