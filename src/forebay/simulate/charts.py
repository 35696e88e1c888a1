"""Charts of a run as SVG: curves over time, areas one on another, and a map of who worked when. No library."""

import math
from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 14, 34
_INSIDE_X, _INSIDE_Y = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
LEVELS = 5

_INK = {"kept": "#1d7a6c", "second": "#d58a5b", "read": "#9fb0b2", "soft": "#5d676b", "line": "#e3e1d9"}


def _style() -> str:
    ink = {name: f"var(--{name},{colour})" for name, colour in _INK.items()}
    rules = [
        'svg{font:13px system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}',
        f"svg text{{fill:{ink['soft']};font-variant-numeric:tabular-nums}}",
        f"svg .rule{{stroke:{ink['line']}}}svg .axis{{stroke:{ink['soft']};stroke-opacity:.55}}",
        f"svg .idle{{fill:{ink['second']}}}svg .busy{{fill:{ink['kept']}}}",
        f"svg .bound{{fill:none;stroke:{ink['soft']};stroke-width:1.4;stroke-dasharray:5 4}}",
    ]
    for css, name in (("a", "kept"), ("b", "second"), ("c", "read")):
        rules.append(f"svg .{css}{{fill:{ink[name]}}}svg .line.{css}{{fill:none;stroke:{ink[name]};stroke-width:1.8}}")
    return "\n".join(rules)


STYLE = _style()
"""Of every chart; the colours are the page's where it has some."""


def curves(
    label: str,
    moments: Sequence[float],
    lines: Sequence[tuple[str, str, Sequence[float]]],
    *,
    unit: str = "",
    top: float | None = None,
    stacked: bool = False,
    end: float | None = None,
) -> str:
    """Lines over time, or areas one on another.

    Args:
        label: What it shows, for who cannot see it.
        moments: Seconds, [n].
        lines: (css class, name, values [n]) each; the class bound is drawn dashed.
        top: Of the axis; by default what the largest value needs.
        end: Of time; by default the last moment.
    """
    stop = max(end if end is not None else max(moments, default=0.0), 1e-9)
    sums: list[F64] = []
    floor: F64 = np.zeros(len(moments))
    for css, _, values in lines:
        below = sums[-1] if stacked and sums and css != "bound" else np.zeros(len(moments))
        sums.append(below + np.asarray(values, np.float64))
    high = top if top is not None else max((float(one.max(initial=0)) for one in sums), default=0.0) or 1.0
    parts = _axes(high, unit, stop)
    for (css, name, _), reached in zip(lines, sums):
        upper = _points(moments, reached, stop, high)
        title = f"<title>{escape(name)}</title>"
        if stacked and css != "bound":
            lower = _points(moments, floor, stop, high)[::-1]
            parts.append(f'<polygon class="{css}" points="{" ".join(upper + lower)}">{title}</polygon>')
            floor = reached
        else:
            kind = "bound" if css == "bound" else f"line {css}"
            parts.append(f'<polyline class="{kind}" points="{" ".join(upper)}">{title}</polyline>')
    return _svg(label, parts)


def heat_map(label: str, shares: F64, stop: float) -> str:
    """Who worked when: a row a worker (or some of them), a column a span of time.

    Args:
        shares: float64 [rows, columns], busy part in [0, 1]; NaN where nobody was alive.
        stop: Where time ends, in seconds.
    """
    rows, columns = shares.shape
    levels = np.where(np.isnan(shares), -1, np.ceil(np.nan_to_num(shares) * LEVELS - 0.05)).astype(np.int64)
    width, height = _INSIDE_X / columns, _INSIDE_Y / rows
    parts = _time_axis(stop)
    for level in range(LEVELS + 1):
        path = []
        for row in range(rows):
            for first, last in _runs(levels[row] == level):
                x, w = _LEFT + first * width, (last - first) * width
                path.append(f"M{x:.1f} {_TOP + row * height:.1f}h{w:.1f}v{height:.2f}h-{w:.1f}z")
        if path:
            css = "busy" if level else "idle"
            opacity = level / LEVELS if level else 0.55
            hint = f"{100 * level // LEVELS} % busy or a little less" if level else "alive and idle"
            parts.append(
                f'<path class="{css}" opacity="{opacity:.2f}" d="{"".join(path)}"><title>{hint}</title></path>'
            )
    parts.append(f'<text x="{_LEFT - 8}" y="{_TOP + 9}" text-anchor="end">first</text>')
    parts.append(f'<text x="{_LEFT - 8}" y="{_HEIGHT - _BOTTOM}" text-anchor="end">last</text>')
    return _svg(label, parts)


def standalone(svg: str) -> str:
    """A chart as a file of its own, on white."""
    head, _, rest = svg.partition(">")
    ground = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fffefb"/>'
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{ground}{rest}\n'


def _svg(label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _points(moments: Sequence[float], values: F64, stop: float, high: float) -> list[str]:
    xs = _LEFT + _INSIDE_X * np.clip(np.asarray(moments, np.float64) / stop, 0, 1)
    ys = _TOP + _INSIDE_Y * (1 - np.clip(values / high, 0, 1))
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


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[first, stop) of each run of true flags."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))
