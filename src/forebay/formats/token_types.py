"""The type of tokens without a header, from their numbers: one type read as another leaves traces in the 16-bit halves.

Margins are wide: what is reported does not occur in text by any tokenizer whose ids rise with rarity.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_MIN_TOKENS = 64
_MIN_FOR_BYTE_ORDER = 1024


class TypeEvidence:
    """Counts over tokens that show of which type their bytes are.

    Attributes:
        width: Bytes of a token as read.
        tokens: Their number.
        low: Counts of ids below 65536, int64 [65536].
    """

    def __init__(self) -> None:
        self.width = self.tokens = 0
        self.low = np.zeros(1 << 16, np.int64)
        self._count = 0  # Halves at even positions (and as many at odd ones).
        self._odd_small = self._even_small = 0  # Below 16: the upper halves of ids below 2**20.
        self._even_small_swapped = 0  # As `_even_small`, of the bytes in the other order.
        self._pairs = self._even_pairs_zero = 0
        self._odd_pairs_zero = 0  # 4-byte numbers at odd positions that are 0: the upper halves of 8-byte numbers.
        self._swapped = 0  # 4-byte numbers whose last byte in memory varies and whose first is 0.

    def add(self, tokens: NDArray[Any]) -> None:
        """Add tokens: integers of 2, 4 or 8 bytes [T], not empty."""
        self.width = tokens.dtype.itemsize
        self.tokens += len(tokens)
        small = tokens if self.width == 2 else tokens[(tokens >= 0) & (tokens < 1 << 16)]
        self.low += np.bincount(small.view(np.uint16) if self.width == 2 else small, minlength=1 << 16)
        raw = np.ascontiguousarray(tokens).view(np.uint8)
        halves = raw[: len(raw) & ~7].view("<u2")
        even, odd = halves[::2], halves[1::2]
        self._count += len(even)
        self._odd_small += int((odd < 16).sum())
        self._even_small += int((even < 16).sum())
        self._even_small_swapped += int(((even & 255 == 0) & (even < 16 << 8)).sum())
        wide = raw[: len(raw) & ~7].view("<u4")
        self._pairs += len(wide) // 2
        self._odd_pairs_zero += int((wide[1::2] == 0).sum())
        self._even_pairs_zero += int((wide[::2] == 0).sum())
        self._swapped += int((wide & 255 == 0).sum())

    def other_dtype(self) -> str:
        """Return the NumPy type that the bytes seem to be of; "" where it is the one that they were read as."""
        n, pairs = self._count, self._pairs
        if self.tokens < _MIN_TOKENS or not n:
            return ""
        is_varied = n - self._even_small >= n // 4
        is_wide = self._odd_pairs_zero == pairs and self._even_pairs_zero < pairs // 2
        upper = n - self._odd_small
        if self.width == 2:
            if self._odd_small == n and is_varied:
                return "<i8" if is_wide else "<u4"
            if self._even_small_swapped == n and upper >= n // 2:
                return ">u4"
            return ">u2" if self._looks_swapped() else ""
        if self.width == 4:
            if is_wide and is_varied:
                return "<i8"
            if self._swapped == 2 * pairs and upper >= n // 2:
                return ">u4"
            # Ids of 2**20 and more in most positions: two tokens in one.
            if upper >= n // 2 and n - self._even_small >= n // 2:
                return "<u2"
        return ""

    def _looks_swapped(self) -> bool:
        """Whether ids with their bytes swapped are those of text: most of them small.

        In text 30 to 60 % of the ids are below 1024 and 2 to 5 % are that with bytes swapped. No token counts for more
        than a hundredth, so that padding decides nothing.
        """
        distinct = np.count_nonzero(self.low)
        if self.tokens < _MIN_FOR_BYTE_ORDER or distinct < 16:
            return False
        weights = np.minimum(self.low, max(1, self.tokens // 100))
        ids = np.arange(1 << 16)
        total = int(weights.sum())
        if int(weights[ids & 255 == 0].sum()) * 20 >= total * 19:
            return True  # Bytes, each in the upper half.
        if distinct < 256:
            return False
        straight = int(weights[ids < 1024].sum())
        swapped = int(weights[ids & 255 < 4].sum())
        return swapped > total // 5 and swapped > 3 * straight
