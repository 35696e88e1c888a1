"""Documents on their way to tokens: mixed, encoded.

Hides how many are encoded at a time (which tokens come out, and in which order, does not depend on it), and the
generator of the shuffle buffer: our own, by counter, so that no library's version changes the order. Memory: the
buffer's `max_bytes` of UTF-8 and the largest document, plus 40 bytes a document.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from forebay.arrays import Array
from forebay.order.bijection import random_words
from forebay.prepare.tokenize.encoders import Encoder, make_encoder
from forebay.prepare.tokenize.tokenizers import TokenizerFile

FIRST_BYTES, MAX_BYTES = 64 << 10, 1 << 20
"""Text encoded at a time: little at first, for an early first batch; then twice as much each time, up to the most."""
_BLOCK = 1024


@dataclass(frozen=True)
class Malformed:
    """A record that was skipped: the file or dataset, where in it, and what is wrong."""

    name: str
    location: str
    problem: str


class ShuffleBuffer:
    """Documents, UTF-8, of which any may be next.

    Args:
        size: Documents that it holds before one goes out; 0 keeps their order.
        max_bytes: It gives one out sooner if they are longer than this together.
        key: 16 bytes that fix the choices.
        draws: How many were chosen before.
        texts: What it holds, in its own order.
        start: Documents after which the first goes out; from there it grows by one with each. None: `size`.
    """

    def __init__(
        self, size: int, max_bytes: int, key: bytes, draws: int = 0, texts: Iterable[bytes] = (),
        start: int | None = None,
    ) -> None:  # fmt: skip
        self._size, self._max_bytes, self._key = size, max_bytes, key
        self._start = size if start is None else start
        self.draws = draws
        self.texts = list(texts)
        self._bytes = sum(map(len, self.texts))
        self._words: list[int] = []
        self._block = -1

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def full(self) -> bool:
        """Whether one must go out before another comes in."""
        return len(self.texts) > min(self._size, self._start + self.draws) or self._bytes > self._max_bytes

    def push(self, text: bytes) -> None:
        """Add a document."""
        self.texts.append(text)
        self._bytes += len(text)

    def pop(self) -> bytes:
        """Remove and return any, each with the same chance; the last takes its place."""
        block, index = divmod(self.draws, _BLOCK)
        if block != self._block:
            counters = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
            self._words, self._block = (random_words(self._key, counters) >> np.uint64(32)).tolist(), block
        self.draws += 1
        slot = self._words[index] * len(self.texts) >> 32
        text, self.texts[slot] = self.texts[slot], self.texts[-1]
        self.texts.pop()
        self._bytes -= len(text)
        return text


class TextEncoder:
    """Texts to one run of tokens, each with its BOS and EOS; an empty text gives none."""

    def __init__(self, tokenizer: TokenizerFile, lanes: int = 1) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = MAX_BYTES // lanes  # For each of the lanes that it encodes.
        self.next_bytes = min(FIRST_BYTES, self._max_bytes)  # How much text to bring next.

    @cached_property
    def _encoder(self) -> Encoder:
        return make_encoder(self._tokenizer.data, self._tokenizer.kind)

    def encode(self, texts: list[bytes], counts: dict[str, int]) -> Array:
        """Return the tokens, in the tokenizer's type [T]; `counts` grows by what they were."""
        self.next_bytes = min(2 * self.next_bytes, self._max_bytes)
        tokenizer, dtype = self._tokenizer, self._tokenizer.numpy_dtype
        before, after = ([] if token is None else [token] for token in (tokenizer.bos_id, tokenizer.eos_id))
        parts: list[Any] = [np.zeros(0, dtype)]
        for ids in self._encoder.encode([text.decode() for text in texts if text]):
            parts += (before, ids, after)
        tokens = np.concatenate(parts, dtype=dtype, casting="unsafe")
        counts["documents"] += len(texts)
        counts["empty"] += texts.count(b"")
        counts["text_bytes"] += sum(map(len, texts))
        counts["tokens"] += len(tokens)
        return tokens
