"""The page of a run: what it came to, and its charts, in one file that loads nothing."""

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np

from forebay.simulate.charts import F64, STYLE, curves, heat_map, standalone
from forebay.simulate.result import Result

_ROWS, _COLUMNS = 100, 160


def write_page(result: Result, target: Path) -> Path:
    """Writes FILE.html, or DIR/index.html and DIR/*.svg; returns the page's path."""
    drawn = charts(result)
    page = target
    if target.suffix != ".html":
        target.mkdir(parents=True, exist_ok=True)
        page = target / "index.html"
        for name, (_, _, svg) in drawn.items():
            (target / f"{name}.svg").write_text(standalone(svg), "utf-8")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_page(result, drawn), "utf-8")
    return page


def charts(result: Result) -> dict[str, tuple[str, str, str]]:
    """Title, key as HTML, and SVG of each chart that the run has data for, by name."""
    trace = result.trace
    if trace is None:
        return {}
    moments, all_curves = trace.moments, trace.curves
    stop = max(result.time_s, result.bound.seconds if result.bound.seconds < float("inf") else 0.0)
    found = {}
    lines: list[tuple[str, str, list[float]]] = [("a", "used", [100 * part for part in all_curves["done"]])]
    if result.bound.curve:
        at, part = zip(*result.bound.curve)
        ideal = (100 * np.interp(moments, at, part)).tolist()
        lines.append(("bound", "no plan could be faster", ideal))
    found["coverage"] = (
        "Coverage",
        _key(lines),
        curves("Share of the work done over time", moments, lines, unit=" %", top=100.0, end=stop),
    )
    for name, title, unit, stacked, wanted in _CURVES:
        lines = [(css, said, all_curves[key]) for css, key, said in wanted if key in all_curves]
        if lines:
            found[name] = (title, _key(lines), curves(title, moments, lines, unit=unit, stacked=stacked, end=stop))
    if result.busy is not None:
        shares = busy_shares(result.busy, result.alive, result.time_s)
        key = '<i class="busy"></i>busy <i class="idle"></i>alive and idle <i class="none"></i>not there'
        found["utilisation"] = ("Who worked when", key, heat_map("Busy share of each worker", shares, result.time_s))
    return found


_CURVES = (
    ("bandwidth", "Bytes a second", "B/s", True,
     (("b", "bytes/s from origins", "from origins"), ("a", "bytes/s from workers", "from workers"))),
    ("requests", "Requests a second", "", False,
     (("a", "requests/s", "to the store"), ("b", "refused/s", "answered 503"))),
    ("leases", "Leases in hand", "", True,
     (("a", "leases in use", "here"), ("b", "leases being fetched", "being fetched"))),
    ("workers", "Workers", "", False,
     (("c", "workers alive", "alive"), ("a", "workers using", "training"))),
)  # fmt: skip


def busy_shares(busy: F64, alive: Mapping[int, tuple[float, float]], stop: float) -> F64:
    """The busy part of each worker's time: float64 [rows, columns], NaN where nobody of a row was alive.

    Args:
        busy: float64 [K, 3]: worker, and from when to when it was busy.
        alive: From when to when each worker lived.
    """
    rows = min(_ROWS, len(alive))
    row_of = {worker: at * rows // len(alive) for at, worker in enumerate(sorted(alive))}
    edges = np.linspace(0, stop, _COLUMNS + 1)
    worked, lived = np.zeros((rows, _COLUMNS)), np.zeros((rows, _COLUMNS))
    for worker, (start, end) in alive.items():
        lived[row_of[worker]] += _overlap(edges, start, min(end, stop))
    for worker, start, end in busy.tolist():
        first, last = np.searchsorted(edges, [start, end], side="right").tolist()
        part = slice(max(0, first - 1), min(last, _COLUMNS))
        worked[row_of[int(worker)], part] += _overlap(edges[part.start : part.stop + 1], start, end)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares: F64 = np.minimum(1.0, worked / lived)
    shares[lived <= 0.2 * stop / _COLUMNS] = np.nan
    return shares


def _overlap(edges: F64, start: float, end: float) -> F64:
    covered: F64 = np.maximum(0.0, np.minimum(edges[1:], end) - np.maximum(edges[:-1], start))
    return covered


def _key(lines: list[tuple[str, str, list[float]]]) -> str:
    return " ".join(f'<i class="{css}"></i>{escape(name)}' for css, name, _ in lines) if len(lines) > 1 else ""


def _page(result: Result, drawn: Mapping[str, tuple[str, str, str]]) -> str:
    settings = result.settings
    css = files("forebay.simulate").joinpath("page.css").read_text("utf-8")
    tiles = [
        ("exactly once" if result.ok else "wrong", f"{result.verdict.samples:,}", "samples"),
        ("time", f"{result.time_ratio:.3f}×", f"{result.time_s:,.0f} s; no plan under {result.bound.seconds:,.0f} s"),
        ("origin", f"{result.origin_ratio:.3f}×", "the dataset, sent by origins"),
        ("wasted", f"{result.verdict.wasted:,}", "samples used, lost with their worker"),
    ]
    shown = "".join(
        f'<div class="tile"><span class="what">{what}</span><b>{value}</b><span>{escape(about)}</span></div>'
        for what, value, about in tiles
    )
    wrong = "".join(f'<p class="alarm">{escape(text)}</p>' for text in (*result.verdict.examples, result.fault) if text)
    figures = "".join(
        f'<figure id="{name}"><h2>{escape(title)}</h2><p class="key">{key}</p>{svg}</figure>'
        for name, (title, key, svg) in drawn.items()
    )
    rows = "".join(
        f"<tr><th scope=row>{escape(name.replace('_', ' '))}</th><td>{value:,.6g}</td></tr>"
        for name, value in result.counts.items()
    )
    title = f"{settings.workers:,} workers, {settings.slices:,} slices"
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{title} · Forebay simulation</title><style>{css}{STYLE}</style></head><body><main>"
        f'<header><p class="brand">Forebay simulation · {settings.mode}</p><h1>{title}</h1>'
        f'<p class="id"><code>{escape(settings.command())}</code></p></header>'
        f"<section><div class=tiles>{shown}</div>{wrong}</section>"
        f"<section class=figures>{figures}</section>"
        f"<section><h2>Counts</h2><table>{rows}</table></section></main></body></html>\n"
    )
