"""Sets of slices on the wire: `0-15,17` for slices 0 to 15 and 17; short, as what a member holds comes in runs."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ProtocolViolation

_ITEM = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?", re.ASCII)


def format_ranges(have: NDArray[np.bool_]) -> str:
    """The text for a set, given as [num_slices] flags; empty for none."""
    edges = np.flatnonzero(np.diff(have.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    return ",".join(f"{first}-{stop - 1}" if stop - first > 1 else f"{first}" for first, stop in edges.tolist())


def parse_ranges(text: str, num_slices: int) -> NDArray[np.bool_]:
    """[num_slices] flags for a text.

    Raises:
        ProtocolViolation: If it is malformed, or names a slice that the dataset does not have.
    """
    have = np.zeros(num_slices, np.bool_)
    for item in text.split(",") if text else ():
        found = _ITEM.fullmatch(item)
        first = int(found[1]) if found else -1
        last = int(found[2] or first) if found else -1
        if not 0 <= first <= last < num_slices:
            raise ProtocolViolation(f"slices: expected ranges like 0-15,17 within [0, {num_slices}), got {item[:40]!r}")
        have[first : last + 1] = True
    return have
