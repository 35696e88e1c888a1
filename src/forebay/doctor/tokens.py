"""What tokens tell of themselves: headers read as tokens, a wrong type or byte order, ids beyond the vocabulary …

Hides: the statistics. A window of at most a million tokens is looked at once, in NumPy, and only counts are kept: 30 to
45 M tokens a second of a core, 150 MB of memory whatever the size. Margins are wide: whatever is called `likely` does
not occur in text by any tokenizer with ids that rise with rarity.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.doctor.passages import Held, Passages, row_hashes
from forebay.doctor.report import Options

WINDOW_TOKENS = 1 << 20
BLOCK_BYTES = 4096
_LONG_RUN = 256
_MAGIC = {
    width: re.compile(b"".join(re.escape(half) + bytes(width - 2) for half in (b"\x93N", b"UM", b"PY")))
    for width in (2, 4, 8)
}
"""NumPy's magic as tokens of 2 bytes (which is how it stands in a file), and as those written again wider."""


@dataclass(frozen=True)
class Window:
    """A run of tokens."""

    path: str
    start: int  # Its first token, counted in the file.
    tokens: NDArray[Any]  # Integers [T], little endian.
    ends: NDArray[np.int64] | None = None  # Exclusive document ends in it, int64 [D]; None where the format has none.


@dataclass(frozen=True)
class Place:
    """Where something was first seen, and what it was."""

    path: str
    token: int
    value: int


class TokenCounts:
    """Everything that is counted over the windows of one file or dataset; `forebay.doctor.verdicts` judges it."""

    def __init__(self, options: Options, *, rows: bool = False) -> None:
        self.options, self.rows = options, rows
        self.width = 0
        self.tokens = self.maximum = 0
        self.first: NDArray[Any] = np.empty(0, np.uint32)
        self.low = np.zeros(1 << 16, np.int64)  # Of ids below 65536.
        self.halves = Halves()
        self.over: Place | None = None
        self.num_over = 0
        self.headers: list[Place] = []
        self.runs: dict[int, int] = {}  # Tokens in long runs, by their id.
        self.longest_run = Place("", 0, 0)
        self.zero_blocks: list[Place] = []
        self.num_zero_blocks = 0
        self.num_eos = self.longest_gap = self._since_eos = 0
        self.longest_gap_at = Place("", 0, 0)
        self._reached: tuple[str, int] = ("", -1)
        self.num_ends = self.num_ends_bare = 0
        self.bare: Place | None = None
        self.passages, self.samples = Passages(), Held()

    def feed(self, window: Window) -> None:
        """Count one window; windows of a file come in order, with or without gaps."""
        tokens = window.tokens
        if not len(tokens):
            return
        self.width = tokens.dtype.itemsize
        if not self.tokens:
            self.first = tokens[:64].copy()
        self.tokens += len(tokens)
        self.maximum = max(self.maximum, int(tokens.max()))
        small = tokens if self.width == 2 else tokens[(tokens >= 0) & (tokens < 1 << 16)]
        self.low += np.bincount(small.view(np.uint16) if self.width == 2 else small, minlength=1 << 16)
        self.halves.feed(tokens)
        self._vocabulary(window)
        if self.rows:
            return
        self._headers(window)
        self._runs(window)
        self._eos(window)
        self.passages.feed(tokens)
        length = self.options.seq_len
        if length:
            first = -window.start % length
            whole = (len(tokens) - first) // length
            if whole > 0:
                self.samples.add(row_hashes(tokens[first : first + whole * length].reshape(-1, length)))

    def _vocabulary(self, window: Window) -> None:
        tokens = window.tokens
        bound = self.options.vocab_size or (1 << 31)
        if int(tokens.max()) < bound and (tokens.dtype.kind == "u" or int(tokens.min()) >= 0):
            return
        beyond = np.flatnonzero((tokens >= bound) | (tokens < 0))
        self.num_over += len(beyond)
        if self.over is None:
            at = int(beyond[0])
            self.over = Place(window.path, window.start + at, int(tokens[at]))

    def _headers(self, window: Window) -> None:
        data = np.ascontiguousarray(window.tokens).view(np.uint8).data
        for width in {2, self.width}:
            for found in _MAGIC[width].finditer(data):
                if len(self.headers) < 1000:
                    self.headers.append(Place(window.path, window.start + found.start() // self.width, width))

    def _runs(self, window: Window) -> None:
        tokens = window.tokens
        edges = np.concatenate(([0], np.flatnonzero(tokens[1:] != tokens[:-1]) + 1, [len(tokens)]))
        lengths = np.diff(edges)
        for i in np.flatnonzero(lengths >= _LONG_RUN).tolist():
            token, length = int(tokens[edges[i]]), int(lengths[i])
            self.runs[token] = self.runs.get(token, 0) + length
            if length > self.longest_run.value:
                self.longest_run = Place(window.path, window.start + int(edges[i]), length)
        if self.runs.get(0):
            self._zeros(window)

    def _zeros(self, window: Window) -> None:
        data = np.ascontiguousarray(window.tokens).view(np.uint8)
        per_block = BLOCK_BYTES // self.width
        blocks = data[: len(data) - len(data) % BLOCK_BYTES].reshape(-1, BLOCK_BYTES)
        empty = np.flatnonzero(~blocks.any(axis=1))
        self.num_zero_blocks += len(empty)
        for i in empty[: max(0, 16 - len(self.zero_blocks))].tolist():
            self.zero_blocks.append(Place(window.path, window.start + i * per_block, per_block))

    def _eos(self, window: Window) -> None:
        eos, tokens = self.options.eos_id, window.tokens
        if eos is None:
            return
        places = np.flatnonzero(tokens == eos)
        self.num_eos += len(places)
        if self._reached != (window.path, window.start):
            self._since_eos = 0
        gaps = np.diff(np.concatenate(([-1 - self._since_eos], places, [len(tokens)]))) - 1
        longest = int(gaps.argmax())
        if int(gaps[longest]) > self.longest_gap:
            at = int(places[longest - 1]) + 1 if longest else -self._since_eos
            self.longest_gap = int(gaps[longest])
            self.longest_gap_at = Place(window.path, window.start + at, self.longest_gap)
        self._since_eos = int(gaps[-1])
        self._reached = (window.path, window.start + len(tokens))
        if window.ends is not None:
            ends = window.ends[np.diff(np.concatenate(([0], window.ends))) > 0]
            bare = ends[tokens[ends - 1] != eos] if len(ends) else ends
            self.num_ends += len(ends)
            self.num_ends_bare += len(bare)
            if len(bare) and self.bare is None:
                at = int(bare[0]) - 1
                self.bare = Place(window.path, window.start + at, int(tokens[at]))


class Halves:
    """The 16-bit halves of tokens: what tells one type read as another."""

    def __init__(self) -> None:
        self.count = 0  # Halves at even places (and as many at odd ones).
        self.odd_small = self.even_small = 0  # Below 16 there: the upper halves of ids below 2**20.
        self.even_small_swapped = 0  # As `even_small`, of the bytes in the other order.
        self.pairs = self.even_pairs_zero = 0
        self.odd_pairs_zero = 0  # 4-byte numbers at odd places that are 0: the upper halves of 8-byte numbers.
        self.swapped = 0  # 4-byte numbers whose last byte in memory varies and whose first is 0.

    def feed(self, tokens: NDArray[Any]) -> None:
        raw = np.ascontiguousarray(tokens).view(np.uint8)
        halves = raw[: len(raw) & ~7].view("<u2")
        even, odd = halves[::2], halves[1::2]
        self.count += len(even)
        self.odd_small += int((odd < 16).sum())
        self.even_small += int((even < 16).sum())
        self.even_small_swapped += int(((even & 255 == 0) & (even < 16 << 8)).sum())
        whole = raw[: len(raw) & ~7].view("<u4")
        self.pairs += len(whole) // 2
        self.odd_pairs_zero += int((whole[1::2] == 0).sum())
        self.even_pairs_zero += int((whole[::2] == 0).sum())
        self.swapped += int((whole & 255 == 0).sum())


def spans(count: int, width: int, options: Options) -> Iterator[tuple[int, int]]:
    """[start, stop) of the windows to look at: all, or some at even distances with the first and the last."""
    starts = range(0, count, WINDOW_TOKENS)
    most = len(starts) if options.full else max(2, options.most_bytes // (WINDOW_TOKENS * width))
    if len(starts) > most:
        chosen = np.unique(np.linspace(0, len(starts) - 1, most).astype(np.int64)).tolist()
        starts = [starts[i] for i in chosen]  # type: ignore[assignment]
    for start in starts:
        yield start, min(start + WINDOW_TOKENS, count)
