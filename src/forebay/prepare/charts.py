"""What a report shows of rules with thresholds and of a sample: lines for a terminal, and charts of its page."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forebay.base import Json
from forebay.units import format_bytes, format_count, format_seconds

Entry = Mapping[str, Any]
WIDTH, HEIGHT = 480.0, 90.0  # Of a chart, in its own units.
_ESTIMATES = (("documents_in", "documents"), ("documents_out", "documents kept"), ("text_bytes", "text kept"),
              ("tokens", ""), ("disk_bytes", "disk while it runs"))  # fmt: skip


def cut(text: str, width: int) -> str:
    """The text, or its beginning and an ellipsis, in at most `width` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def count(value: float) -> str:
    """All digits, in groups: `12,345`."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Return three significant digits: `12.3 k`, `4.56 M`; all of a whole number below 10 000."""
    return count(value) if abs(value) < 10_000 and value == int(value) else format_count(value)


def share(part: float, total: float) -> str:
    """`61.2 %`; a share that is neither none nor all never reads as such: `<0.1 %`, `>99.9 %`."""
    if not total:
        return "–"
    value = 100 * part / total
    if 0 < value < 0.1:
        return "<0.1 %"
    if 99.9 < value < 100:
        return ">99.9 %"
    return f"{value:.0f} %" if value in (0, 100) else f"{value:.1f} %"


def number(value: float) -> str:
    """A threshold or a measured value."""
    return f"{value:.4g}" if abs(value) < 1000 or not math.isfinite(value) else short(value)


def tokens_name(report: Entry) -> str:
    """Return the name of what the run counted as tokens."""
    return f"tokens{' (bytes)' * (report['recipe']['tokenize']['tokenizer'] == 'bytes')}"


def rule_name(rule: Entry) -> str:
    """`gopher_short < 50`: what is dropped."""
    return f"{rule['reason']} {'<' if rule['kind'] == 'low' else '>'} {number(rule['threshold'])}"


def rule_lines(rules: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    """For a terminal: what each rule drops of what reaches it, and would with half or one and a half of its threshold.

    Not of rules that would drop nothing with any of these.
    """
    for rule in rules:
        bounds = [rule["neighbours"][index] for index in (0, -1)] if rule["neighbours"] else []
        if rule["dropped"] or any(entry["dropped"] for entry in bounds):
            near = ", ".join(f"{share(e['dropped'], rule['documents'])} at {number(e['threshold'])}" for e in bounds)
            yield rule_name(rule), f"{share(rule['dropped'], rule['documents']):>7}  {near}"


def sample_lines(report: Entry) -> Iterator[tuple[str, str]]:
    """Label and text: what was sampled, the rates' intervals, what the whole input gives and what that costs."""
    sample = report.get("sample")
    if not sample:
        return
    parts = f"{count(sample['splits'])} of {count(sample['of_splits'])} parts of the input"
    sizes = f"{format_bytes(sample['bytes'])} of {format_bytes(sample['of_bytes'])}"
    yield "sample", f"{count(sample['documents'])} documents of {parts} ({sizes})"
    yield "", ", ".join(f"{count(n)} of {count(number)} {kind}" for kind, (n, number) in sample["kinds"].items())
    is_known = len(report["cost"]["wall_s"]) > 1
    how = "with intervals of 95 %" if is_known else "without intervals, as of some kind one part was read"
    yield "whole input", f"expected, {how}"
    for name, label in _ESTIMATES:
        figures = report["estimate"].get(name)
        if figures:
            first, *bounds = [format_bytes(value) if name.endswith("_bytes") else short(value) for value in figures]
            between = f"  ({' to '.join(bounds)})" if bounds else ""
            yield f"  {label or tokens_name(report)}", f"{first}{between}"
    if any(stage["stage"] == "dedup" for stage in report["funnel"]):
        yield "", "more copies are found in the whole input than in a sample: fewer documents stay"
    cost = report["cost"]
    expected, *bounds = map(format_seconds, cost["wall_s"])
    between = f" ({' to '.join(bounds)})" if bounds else ""
    yield (
        "  time",
        f"{expected} on {cost['processes']} processes{between}; {format_seconds(cost['whole_cpu_s'])} of CPU",
    )
    stages = sorted(cost["cpu_s"].items(), key=lambda item: -item[1][1])
    yield "  CPU", ", ".join(f"{name} {format_seconds(seconds)}" for name, (_, seconds) in stages[:5] if seconds)
    yield "  memory", f"{format_bytes(cost['peak_bytes'])} in a process, at most"


def rates(report: Entry) -> Iterator[Sequence[str]]:
    """Reason, documents, share and its interval."""
    sample = report.get("sample", {})
    for rate in sample.get("rates", []):
        bounds = rate["interval"]
        shown = f"{100 * bounds[0]:.2f} to {100 * bounds[1]:.2f} %" if bounds else "of the sample alone"
        name = f"{rate['stage']}: {rate['reason']}"
        yield name, count(rate["dropped"]), share(rate["dropped"], sample["documents"]), shown


def chart(data: Entry, thresholds: Sequence[float], bounds: tuple[float, float] | None = None) -> Json:
    """A histogram to draw: rectangles [x, y, width, height, side, words], lines at thresholds, labels of the bounds.

    The height of a bar is the square root of its count, so that small ones are seen. `bounds`: of the axis. The same in
    words: `label`, and `figures`, a row for each bar.
    """
    edges, retained, dropped = data["edges"], data["kept"], data["dropped"]
    sides = list(zip(edges, edges[1:], retained, dropped))
    thresholds = [value for value in thresholds if math.isfinite(value)]
    bounds = bounds or (min(edges[0], *thresholds), max(edges[-1], *thresholds))
    scale = math.log if data.get("log") and bounds[0] > 0 else float
    low, high = map(scale, bounds)
    top = max(map(sum, zip(retained, dropped)), default=0)

    def x(value: float) -> float:
        return round(WIDTH * (scale(value) - low) / (high - low), 1) if high > low else 0.0

    bars = []
    for first, last, stays, goes in sides:
        full = HEIGHT * math.sqrt((stays + goes) / top) if top else 0.0
        y = HEIGHT
        for side, n in (("kept", stays), ("dropped", goes)):
            if n:
                height = full * n / (stays + goes)
                y -= height
                width = max(round(x(last) - x(first) - 0.5, 1), 0.5)
                words = f"{number(first)} to {number(last)}: {count(n)} {side}"
                bars.append((x(first), round(y, 1), width, round(height, 1), side, words))
    limits = " and ".join(map(number, thresholds)) or "infinite"
    return {
        "label": f"Histogram: {count(sum(retained))} kept, {count(sum(dropped))} dropped, threshold {limits}",
        "figures": [
            (f"{number(first)} to {number(last)}", count(stays), count(goes))
            for first, last, stays, goes in sides if stays or goes
        ],
        "bars": bars, "lines": [(x(value), f"threshold {number(value)}") for value in thresholds],
        "low": number(bounds[0]), "high": number(bounds[1]), "width": WIDTH, "height": HEIGHT,
    }  # fmt: skip


def rule_charts(report: Entry) -> Iterator[Json]:
    """What the page shows of each rule: its chart, other thresholds, and the documents nearest to it."""
    rules = report["rules"]
    max_dropped = sorted((rule["dropped"] for rule in rules), reverse=True)[:3]
    for rule in rules:
        yield {
            "open": rule["dropped"] in max_dropped and rule["dropped"] > 0,
            "is_idle": not rule["dropped"],
            "name": f"{rule['stage']} · {rule_name(rule)}",
            "drops": f"{share(rule['dropped'], rule['documents'])} of {count(rule['documents'])}",
            "charts": [("", chart(rule["histogram"], [rule["threshold"]]))],
            "others": [
                (
                    number(e["threshold"]) + " (the recipe's)" * (e["threshold"] == rule["threshold"]),
                    count(e["dropped"]),
                    share(e["dropped"], rule["documents"]),
                )
                for e in rule["neighbours"]
            ],
            "nearest": [
                (side, [{**e, "value": number(float(e["value"]))} for e in rule["nearest"][side]])
                for side in ("kept", "dropped")
            ],
        }
