"""Charts as inline SVG: a distribution before and after, in a fixed 360 by 190 drawing that a phone shows unscaled."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Any

from forebay.prepare.report.figures import count, short

_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 12, 26


def histogram(title: str, data: Mapping[str, Any]) -> str:
    """Counts per bin of what was read (behind) and what was kept (before it); each bin is equally wide.

    Args:
        title: What is distributed, as HTML.
        data: `edges` [n + 1], and `read` or `kept` or both, [n] each.
    """
    edges: list[float] = list(data.get("edges", ()))
    series = [(kind, list(data[kind])) for kind in ("read", "kept") if any(data.get(kind) or ())]
    bins = len(edges) - 1
    if bins < 1 or not series or any(len(values) != bins for _, values in series):
        return '<p class="none">Nothing was counted.</p>'
    edges, series = _trimmed(edges, series)
    bins = len(edges) - 1
    top = max(max(values) for _, values in series)
    step = (_WIDTH - _LEFT - _RIGHT) / bins
    base = _HEIGHT - _BOTTOM
    parts = _rules(top, base)
    for kind, values in series:
        gap = 0.5 if kind == "read" else min(2.0, step * 0.16)
        for index, value in enumerate(values):
            if value > 0:
                tall = max(1.0, (base - _TOP) * value / top)
                x = _LEFT + index * step + gap
                hint = escape(f"{_edge(edges[index])} to {_edge(edges[index + 1])}: {count(value)} {kind}")
                parts.append(
                    f'<rect class="{kind}" x="{x:.2f}" y="{base - tall:.2f}" width="{max(0.6, step - 2 * gap):.2f}" '
                    f'height="{tall:.2f}"><title>{hint}</title></rect>'
                )
    parts += _ticks(edges, bool(data.get("log")), base)
    told = "; ".join(
        f"{kind}: {count(sum(values))}, median about {_edge(median(edges, values))}" for kind, values in series
    )
    label = f"{title}. {escape(told)}"
    drawing = "".join(parts)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{drawing}</svg>'


def _trimmed(
    edges: list[float], series: list[tuple[str, list[int]]]
) -> tuple[list[float], list[tuple[str, list[int]]]]:
    """Without the bins at either end in which nothing lies."""
    filled = [index for index in range(len(edges) - 1) if any(values[index] for _, values in series)]
    start, stop = filled[0], filled[-1] + 1
    return edges[start : stop + 1], [(kind, values[start:stop]) for kind, values in series]


def _rules(top: float, base: float) -> list[str]:
    parts = []
    step = _round_step(top / 5)
    for index in range(1, int(top / step) + 1):
        y = base - (base - _TOP) * step * index / top
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{_edge(step * index)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
    return parts


def _round_step(least: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below it, and at least 1."""
    power = 10.0 ** math.floor(math.log10(max(least, 1e-12)))
    return max(1.0, next(power * n for n in (1, 2, 5, 10) if power * n >= least * (1 - 1e-9)))


def _ticks(edges: Sequence[float], log: bool, base: float) -> list[str]:
    """Three to seven round numbers below the axis, where they lie between the edges."""
    parts = []
    for value in _round_values(edges[0], edges[-1], log):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * _place(edges, value, log) / (len(edges) - 1)
        anchor = "end" if x > _WIDTH - _RIGHT - 12 else "middle"
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="{anchor}">{escape(_edge(value))}</text>')
    return parts


def _round_values(start: float, stop: float, log: bool) -> list[float]:
    if log and start > 0 and stop > start:
        powers = range(math.floor(math.log10(start)), math.ceil(math.log10(stop)) + 1)
        for digits in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7)):
            values = [n * 10.0**power for power in powers for n in digits if start <= n * 10.0**power <= stop]
            if len(values) >= 4:
                break
        return values[:: max(1, math.ceil(len(values) / 7))] or [start, stop]
    if not stop > start:
        return [start]
    power = 10.0 ** math.floor(math.log10((stop - start) / 4))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= (stop - start) / 6)
    return [step * n for n in range(math.ceil(start / step), math.floor(stop / step * (1 + 1e-9)) + 1)]


def _place(edges: Sequence[float], value: float, log: bool) -> float:
    """Where a value lies among the edges, in bins."""
    index = min(max(bisect_right(edges, value) - 1, 0), len(edges) - 2)
    start, stop = edges[index], edges[index + 1]
    if log and start > 0:
        start, stop, value = math.log(start), math.log(stop), math.log(value)
    return index + min(1.0, max(0.0, (value - start) / (stop - start))) if stop > start else index


def medians(data: Mapping[str, Any]) -> str:
    """The medians of a distribution in words, as HTML."""
    edges = data.get("edges", ())
    told = [
        f"{kind} {_edge(median(edges, data[kind]))}"
        for kind in ("read", "kept")
        if any(data.get(kind) or ()) and len(data[kind]) == len(edges) - 1
    ]
    return f"Documents per bin; median {', '.join(told)}" if told else "Documents per bin"


def _edge(value: float) -> str:
    if abs(value) >= 10_000:
        text = short(value)
        number, _, unit = text.partition(" ")
        return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def median(edges: Sequence[float], values: Sequence[int]) -> float:
    """Where half of the counts lie on either side, taking each bin as evenly filled."""
    half = sum(values) / 2
    for index, reached in enumerate(accumulate(values)):
        if values[index] and reached >= half:
            inside = (half - (reached - values[index])) / values[index]
            return edges[index] + inside * (edges[index + 1] - edges[index])
    return edges[0]
