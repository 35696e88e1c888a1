"""The page of a run: what it came to, and its charts, in one file that loads nothing."""

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np

from forebay.simulate.charts import STYLE, curves
from forebay.simulate.result import Result


def write_page(result: Result, target: Path) -> Path:
    """Write FILE.html, or DIR/index.html; returns the page's path."""
    page = target if target.suffix == ".html" else target / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(_page(result, charts(result)), "utf-8")
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
        curves("Share of the work done over time", moments, lines, stop=stop, unit=" %"),
    )
    for name, title, unit, wanted in _CURVES:
        lines = [(css, said, all_curves[key]) for css, key, said in wanted if key in all_curves]
        if lines:
            found[name] = (title, _key(lines), curves(title, moments, lines, stop=stop, unit=unit))
    return found


_CURVES = (
    ("bandwidth", "Bytes a second", "B/s",
     (("b", "bytes/s from origins", "from origins"), ("a", "bytes/s from workers", "from workers"))),
    ("leases", "Leases in hand", "",
     (("a", "leases in use", "here"), ("b", "leases being fetched", "being fetched"))),
    ("workers", "Workers", "",
     (("c", "workers alive", "alive"), ("a", "workers using", "training"))),
)  # fmt: skip


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
