"""Sets of slices on the wire: `0-15,17` for slices 0 to 15 and 17; short, as what a member has comes in runs."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ProtocolViolation

MAX_RANGES = 200_000
RANGES = re.compile(r"(?:[0-9]{1,9}(?:-[0-9]{1,9})?(?:,[0-9]{1,9}(?:-[0-9]{1,9})?)*)?")


def format_ranges(indexes: NDArray[np.int64]) -> str:
    """The text for rising indexes; empty for none."""
    if len(indexes) == 0:
        return ""
    edges = np.flatnonzero(np.diff(indexes) != 1)
    first, last = indexes[np.concatenate([[0], edges + 1])], indexes[np.concatenate([edges, [len(indexes) - 1]])]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first.tolist(), last.tolist()))


def parse_ranges(text: object, stop: int) -> NDArray[np.int64]:
    """The indexes in [0, stop) that a text names, rising.

    Raises:
        ProtocolViolation: If it is no such text, its ranges do not rise, or it names an index from `stop` on.
    """
    if not isinstance(text, str) or not RANGES.fullmatch(text):
        raise ProtocolViolation(f"slices: expected ranges like 0-15,17, got {str(text)[:80]!r}")
    if not text:
        return np.empty(0, np.int64)
    pairs = [part.partition("-") for part in text.split(",")]
    if len(pairs) > MAX_RANGES:
        raise ProtocolViolation(f"slices: expected at most {MAX_RANGES} ranges, got {len(pairs)}")
    first = np.array([low for low, _, _ in pairs], np.int64)
    last = np.array([high or low for low, _, high in pairs], np.int64)
    if (first > last).any() or (first[1:] <= last[:-1]).any() or last[-1] >= stop:
        raise ProtocolViolation(f"slices: expected ranges that rise within [0, {stop}), got {text[:80]!r}")
    counts = last - first + 1
    begins = np.repeat(first - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    return np.asarray(begins + np.arange(int(counts.sum())), np.int64)
