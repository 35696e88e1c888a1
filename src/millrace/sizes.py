"""Sizes as people write them."""

from __future__ import annotations

import re

from millrace.errors import UsageError

_UNITS = {"": 1, "B": 1} | {f"{u}{s}": 1 << 10 * i for i, u in enumerate("KMGT", 1) for s in ("", "IB")}
_UNITS |= {f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)}


def parse_size(text: str) -> int:
    """Bytes from `64MiB`, `1 GB` or `4096`; above zero.

    Raises:
        UsageError: If it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not found or found.group(2).upper() not in _UNITS:
        raise UsageError(f"{text!r} is not a size: try 64MiB, 1GB or 4096")
    size = int(float(found.group(1)) * _UNITS[found.group(2).upper()])
    if size <= 0:
        raise UsageError(f"{text!r}: a size must be above zero")
    return size
