"""Charts of a run as SVG: lines over time. No library."""

import math
from collections.abc import Sequence
from html import escape

import numpy as np

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 14, 34
_INSIDE_X, _INSIDE_Y = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

_INK = {"kept": "#1d7a6c", "second": "#d58a5b", "read": "#9fb0b2", "soft": "#5d676b", "line": "#e3e1d9"}


def _style() -> str:
    ink = {name: f"var(--{name},{colour})" for name, colour in _INK.items()}
    rules = [
        'svg{font:13px system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}',
        f"svg text{{fill:{ink['soft']};font-variant-numeric:tabular-nums}}",
        f"svg .rule{{stroke:{ink['line']}}}svg .axis{{stroke:{ink['soft']};stroke-opacity:.55}}",
        f"svg .bound{{fill:none;stroke:{ink['soft']};stroke-width:1.4;stroke-dasharray:5 4}}",
    ]
    for css, name in (("a", "kept"), ("b", "second"), ("c", "read")):
        rules.append(f"svg .line.{css}{{fill:none;stroke:{ink[name]};stroke-width:1.8}}")
    return "\n".join(rules)


STYLE = _style()
"""Of every chart; the colours are the page's where it has some."""


def curves(
    label: str,
    moments: Sequence[float],
    lines: Sequence[tuple[str, str, Sequence[float]]],
    *,
    stop: float,
    unit: str = "",
) -> str:
    """Lines over time.

    Args:
        label: What it shows, for who cannot see it.
        moments: Seconds, [n].
        lines: (css class, name, values [n]) each; the class bound is drawn dashed.
        stop: The end of the axis of time, seconds.
    """
    stop = max(stop, 1e-9)
    high = max((max(values, default=0.0) for _, _, values in lines), default=0.0) or 1.0
    parts = _axes(high, unit, stop)
    for css, name, values in lines:
        kind = "bound" if css == "bound" else f"line {css}"
        points = " ".join(_points(moments, values, stop, high))
        parts.append(f'<polyline class="{kind}" points="{points}"><title>{escape(name)}</title></polyline>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _points(moments: Sequence[float], values: Sequence[float], stop: float, high: float) -> list[str]:
    xs = _LEFT + _INSIDE_X * np.clip(np.asarray(moments, np.float64) / stop, 0, 1)
    ys = _TOP + _INSIDE_Y * (1 - np.clip(np.asarray(values, np.float64) / high, 0, 1))
    return [f"{x:.1f},{y:.1f}" for x, y in zip(xs.tolist(), ys.tolist())]


def _axes(high: float, unit: str, stop: float) -> list[str]:
    parts = []
    for value in _ticks(high, 5):
        y = _TOP + _INSIDE_Y * (1 - value / high)
        parts.append(f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_short(value, unit)}</text>')
    return parts + _time_axis(stop)


def _time_axis(stop: float) -> list[str]:
    base = _HEIGHT - _BOTTOM
    parts = [f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>']
    ticks = _ticks(stop, 8)
    for value in ticks:
        x = _LEFT + _INSIDE_X * value / stop
        anchor = "end" if x > _WIDTH - _RIGHT - 14 else "middle"
        unit = " s" if value == ticks[-1] else ""
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 17}" text-anchor="{anchor}">{_short(value, unit)}</text>')
    return parts


def _ticks(high: float, num: int) -> list[float]:
    """Round numbers from 0 to at most `high`, about so many."""
    power = 10.0 ** math.floor(math.log10(max(high, 1e-12) / num))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= high / num * (1 - 1e-9))
    return [step * i for i in range(int(high / step * (1 + 1e-9)) + 1)]


def _short(value: float, unit: str) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            shown = value / (1e3 if letter == "k" else size)
            return f"{shown:g}\u202f{letter}{unit.strip()}" if unit.strip() != "s" else f"{value:,.0f}{unit}"
    return f"{value:,.10g}{unit}"
