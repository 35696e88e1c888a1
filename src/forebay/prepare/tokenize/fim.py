"""Fill in the middle: some documents as prefix, suffix and middle, with sentinel tokens before each.

A document is cut at two characters at random, and its parts are encoded by themselves; which, where and in which order
is a function of its text and the seed. Source: Bavarian et al. 2022: sections 3 (PSM, and SPM with the sentinels of a
prefix and a suffix side by side) and 4.4 (cuts at characters); Lozhkov et al. 2024 (StarCoder2) for the rate.
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.arrays import I64, Array
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.errors import UsageError
from forebay.prepare.settings import Settings, Share
from forebay.prepare.tokenize.encoders import EncoderSpec, encoder_for, vocabulary_of

MIN_CHARS = 3


@dataclass(frozen=True)
class FillInTheMiddle(Settings):
    """`[fim]`: documents as prefix, suffix and middle, for models that complete code.

    Args:
        rate: Share of documents that are cut: 0.5.
        spm_rate: Share of those with the suffix first: 0.5.
        prefix, suffix, middle: Tokens of the vocabulary.
        seed: Of the choices.
    """

    rate: Share = 0.5
    spm_rate: Share = 0.5
    prefix: str = "<fim_prefix>"
    suffix: str = "<fim_suffix>"
    middle: str = "<fim_middle>"
    seed: int = 0

    dtype = ""  # that of the tokenizer

    @property
    def fields(self) -> list[Any]:
        """All that the result depends on."""
        return ["fim", 1, asdict(self)]

    def sentinels(self, spec: EncoderSpec) -> tuple[int, int, int]:
        """The ids of the three tokens. Raises UsageError if the tokenizer lacks one."""
        vocab, _ = vocabulary_of(spec)
        for key in ("prefix", "suffix", "middle"):
            if (name := getattr(self, key)) not in vocab:
                raise UsageError(
                    f"fim.{key}: expected a token of the tokenizer, got {name!r}, which it does not have. "
                    "Name one that it has, or choose a tokenizer for code."
                )
        return vocab[self.prefix], vocab[self.suffix], vocab[self.middle]

    def cuts(self, text: str) -> tuple[int, int, bool] | None:
        """Where the middle of a text begins and ends, in characters, and whether the suffix is first; None: uncut."""
        if len(text) < MIN_CHARS:
            return None
        digest = hashlib.sha256(f"forebay fim {self.seed} ".encode() + text.encode()).digest()
        whether, order, first, second = (int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8))
        if whether >= self.rate * 2**64:
            return None
        start, stop = sorted((first % (len(text) + 1), second % (len(text) + 1)))
        return start, stop, order < self.spm_rate * 2**64

    def encode(self, spec: EncoderSpec, texts: pa.LargeStringArray) -> tuple[Array, I64, dict[str, int]]:
        """Tokens, lengths (0: empty) and counts: `empty`, and the `fill_in_the_middle` among those kept."""
        prefix, suffix, middle = ([token] for token in self.sentinels(spec))
        plain, cuts = texts.to_pylist(), list(map(self.cuts, texts.to_pylist()))
        pieces = [
            [text] if cut is None else [text[: cut[0]], text[cut[1] :], text[cut[0] : cut[1]]]
            for text, cut in zip(plain, cuts)
        ]
        encoded = iter(encoder_for(spec).encode([piece for parts in pieces for piece in parts]))
        dtype = TOKEN_DTYPES[spec.dtype]
        begin, end = ([] if token is None else [token] for token in (spec.bos_id, spec.eos_id))
        out: list[Array] = [np.empty(0, dtype)]
        for text, cut in zip(plain, cuts):
            body: list[Any] = [next(encoded)] if cut is None else []
            if cut is not None:
                before, after, between = (next(encoded) for _ in range(3))
                body = [prefix, before, suffix, after, middle, between]
                if cut[2]:
                    body = [prefix, suffix, after, middle, before, between]
            parts = [begin, *body, end] if text else []
            out.append(np.concatenate([np.empty(0, dtype), *parts], dtype=dtype, casting="unsafe"))
        lengths = np.array([len(ids) for ids in out[1:]], np.int64)
        counts = {"empty": plain.count(""), "fill_in_the_middle": sum(cut is not None for cut in cuts)}
        return np.concatenate(out), lengths, counts
