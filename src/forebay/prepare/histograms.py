"""Histograms that add up to the same whatever the order: counts of fine bins, from which a few bars are drawn."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_FINE_SHIFT = np.uint64(64 - 12 - 5)  # A bin is a sign, an exponent and five bits: 3 % wide at most.
_MAX_BARS = 40


def float_keys(values: NDArray[np.float64]) -> NDArray[np.uint64]:
    """uint64 in the order of the numbers, one for each; -0.0 is 0.0."""
    bits = (np.asarray(values, np.float64) + 0.0).view(np.uint64)
    return np.where(bits >> np.uint64(63), ~bits, bits | np.uint64(1 << 63))


def float_of(keys: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The inverse of `float_keys`."""
    return np.where(keys >> np.uint64(63), keys & np.uint64((1 << 63) - 1), ~keys).view(np.float64)


def count_bins(values: ArrayLike) -> dict[int, int]:
    """How many numbers are in each fine bin; NaN is none."""
    numbers = np.asarray(values, np.float64)
    bins, counts = np.unique(float_keys(numbers[~np.isnan(numbers)]) >> _FINE_SHIFT, return_counts=True)
    return dict(zip(bins.tolist(), counts.tolist()))


def bars(sides: Mapping[str, Mapping[int, int]]) -> dict[str, Any]:
    """A histogram to draw: `edges` [bars + 1], `log`, and the counts of each side, of at most 40 bars.

    Numbers of one sign up to 100 get bars of equal width, others of equal ratio. Infinite ones are in the last bar.
    """
    bins = np.array(sorted({index for counts in sides.values() for index in counts}), np.uint64)
    low, high = float_of(bins << _FINE_SHIFT), float_of(((bins + np.uint64(1)) << _FINE_SHIFT) - np.uint64(1))
    middle = np.where(np.isfinite(low), np.where(np.isfinite(high), low / 2 + high / 2, low), np.nan)
    finite = middle[np.isfinite(middle)]
    first, last = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    is_log = first >= 0 and last > 100
    if is_log:
        edges = 2.0 ** np.linspace(np.floor(np.log2(max(first, 1.0))), np.ceil(np.log2(last)), _MAX_BARS + 1)
        edges[0] = min(edges[0], first)
    else:
        step = _round_step((last - first) / (_MAX_BARS - 2))
        start = np.floor(first / step) * step
        edges = start + step * np.arange(int((last - start) / step) + 2)
    edges = np.unique(np.round(edges, 10))
    bar = np.clip(np.searchsorted(edges, np.nan_to_num(middle, nan=edges[-1]), "right") - 1, 0, len(edges) - 2)
    out: dict[str, Any] = {"edges": edges.tolist(), "log": bool(is_log)}
    for side, counts in sides.items():
        values = [counts.get(int(index), 0) for index in bins]
        out[side] = np.bincount(bar, values, len(edges) - 1).astype(np.int64).tolist()
    return out


def _round_step(step: float) -> float:
    power = 10.0 ** np.floor(np.log10(step)) if step > 0 else 0.1
    return float(next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step))
