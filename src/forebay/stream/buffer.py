"""A buffer that mixes documents: filled first, then for each that comes in one goes out at random.

Hides: the generator (our own, by counter, so that no library's version changes the order) and how what is held is
written down. Memory: `max_bytes` of UTF-8 and the largest document, plus 40 bytes a document.
"""

import base64
import binascii
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from forebay.errors import StateError
from forebay.order.bijection import random_words

_BLOCK = 1024
_LEVEL = 3  # 31 MB of English: 0.17 s, to a third; level 1 0.10 s and half as large again, level 6 0.57 s.


class ShuffleBuffer:
    """Documents, UTF-8, of which any may be next.

    Args:
        size: Documents that it holds before one goes out; 0 keeps their order.
        max_bytes: It gives one out sooner if they are longer than this together.
        key: 16 bytes that fix the choices.
        draws: How many were chosen before.
        held: What it holds, in its own order.
        start: Documents after which the first goes out; from there it grows by one with each. None: `size`.
    """

    def __init__(
        self,
        size: int,
        max_bytes: int,
        key: bytes,
        draws: int = 0,
        held: Iterable[bytes] = (),
        start: int | None = None,
    ) -> None:
        self._size, self._max_bytes, self._key = size, max_bytes, key
        self._start = size if start is None else start
        self.draws = draws
        self._held = list(held)
        self._bytes = sum(map(len, self._held))
        self._words: list[int] = []
        self._block = -1

    def __len__(self) -> int:
        return len(self._held)

    @property
    def full(self) -> bool:
        """Whether one must go out before another comes in."""
        return len(self._held) > min(self._size, self._start + self.draws) or self._bytes > self._max_bytes

    def push(self, text: bytes) -> None:
        """Hold one more."""
        self._held.append(text)
        self._bytes += len(text)

    def pop(self) -> bytes:
        """Give out any, each with the same chance; the last takes its place."""
        block, index = divmod(self.draws, _BLOCK)
        if block != self._block:
            counters = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
            self._words, self._block = (random_words(self._key, counters) >> np.uint64(32)).tolist(), block
        self.draws += 1
        slot = self._words[index] * len(self._held) >> 32
        last = self._held.pop()
        if slot == len(self._held):
            text = last
        else:
            text, self._held[slot] = self._held[slot], last
        self._bytes -= len(text)
        return text

    def held(self) -> tuple[bytes, ...]:
        """What it holds, in its own order."""
        return tuple(self._held)


def pack_texts(texts: Sequence[bytes]) -> str:
    """Texts as a string of ASCII: base64 of zstd of their lengths (u32) and their bytes."""
    lengths = np.array([len(texts), *map(len, texts)], "<u4")
    return _pack(b"".join((lengths.tobytes(), *texts)))


def unpack_texts(packed: Any) -> tuple[bytes, ...]:
    """The inverse of `pack_texts`; StateError if it is damaged."""
    data = memoryview(_unpack(packed))
    number = int.from_bytes(data[:4], "little")
    if len(data) < 4 * (number + 1):
        raise _damaged(packed)
    ends = np.cumsum(np.frombuffer(data[4 : 4 * (number + 1)], "<u4"), dtype=np.int64) + 4 * (number + 1)
    if len(data) != (int(ends[-1]) if number else 4):
        raise _damaged(packed)
    starts = [4 * (number + 1), *ends.tolist()]
    return tuple(bytes(data[start:stop]) for start, stop in itertools.pairwise(starts))


def pack_tokens(tokens: NDArray[Any]) -> str:
    """Tokens as a string of ASCII: base64 of zstd of u32."""
    return _pack(tokens.astype("<u4").tobytes())


def unpack_tokens(packed: Any, dtype: Any) -> NDArray[Any]:
    """The inverse of `pack_tokens`; StateError if it is damaged."""
    data = _unpack(packed)
    if len(data) % 4:
        raise _damaged(packed)
    return np.frombuffer(data, "<u4").astype(dtype)


def _pack(data: bytes) -> str:
    return base64.b64encode(zstandard.ZstdCompressor(_LEVEL).compress(data)).decode()


def _unpack(packed: Any) -> bytes:
    try:
        data: bytes = zstandard.ZstdDecompressor().decompress(base64.b64decode(packed, validate=True))
        return data
    except (zstandard.ZstdError, binascii.Error, TypeError, ValueError) as error:
        raise _damaged(packed) from error


def _damaged(packed: Any) -> StateError:
    return StateError(
        f"stream state: expected documents or tokens as state_dict() packs them, got {str(packed)[:40]!r}. "
        "The state was cut or changed; take an older one."
    )
