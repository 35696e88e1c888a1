"""The report as one HTML page, harmless whatever the corpus says.

Text of the corpus is escaped, its control characters made visible, and each piece isolated in an element of its own. A
policy in the page forbids it to load anything and to run any script but its own.
"""

import base64
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import accumulate
from typing import Any

import jinja2
from markupsafe import Markup

from forebay.prepare.report.figures import count, share, short, toml
from forebay.units import format_bytes

Report = Mapping[str, Any]
JSON_OPENING = '<script type="application/json" id="forebay-report">'
MAX_INPUTS, MAX_REJECTS, MAX_LANGUAGES, MAX_REASONS = 50, 100, 20, 12
_WIDTH, _HEIGHT = 360, 190
_LEFT_MARGIN, _RIGHT, _TOP, _BOTTOM = 44, 8, 12, 26

# Control characters by their pictures, halves of surrogate pairs by the replacement character, turns by words.
_VISIBLE: dict[int, str] = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= dict.fromkeys((*range(0x7F, 0xA0), *range(0xD800, 0xE000), *range(0xFFFE, 0x10000)), "�")
_VISIBLE |= {0xFDD0: "⟨prompt⟩ ", 0xFDD1: "⟨response⟩ "}


@functools.cache
def _template() -> jinja2.Template:
    def shown(value: Any) -> Any:
        return value if isinstance(value, Markup) else str(value).translate(_VISIBLE)

    environment = jinja2.Environment(autoescape=True, finalize=shown)
    environment.filters.update({"count": _of_none(count), "short": _of_none(short), "size": _of_none(format_bytes)})
    environment.globals.update(share=_of_none(share), percent=_percent)
    return environment.from_string(_file("report.html"))


def _of_none(figure: Any) -> Any:
    return lambda *values: figure(*(value or 0 for value in values))


def _file(name: str) -> str:
    return files("forebay.prepare.report").joinpath(name).read_text("utf-8")


def _percent(part: float, total: float) -> str:
    return f"{min(100.0, 100 * part / total) if total else 0:.3f}%"


def render(report: Report) -> str:
    """The whole page of a report: a pure function of it."""
    totals, funnel, inputs = report.get("totals", {}), report.get("funnel", []), report.get("inputs", [])
    rejects, skipped, files_left_out = (report.get(k, []) for k in ("rejects", "skipped", "skipped_files"))
    total = funnel[0].get("documents_in", 0) if funnel else 0
    script = _file("report.js")
    data = json.dumps(report, ensure_ascii=True, separators=(",", ":"))
    for char in "&<>":
        data = data.replace(char, f"\\u{ord(char):04x}")
    return _template().render(
        report=report,
        t=totals,
        total=total,
        ribbon=_ribbon(funnel),
        subsets=_subsets(totals.get("subsets", {})),
        stages=[_stage(stage, wrong) for stage, wrong in zip(funnel, sums(funnel))],
        maximum=max((n for stage in funnel for n in stage.get("dropped", {}).values()), default=0),
        charts=[(title, histogram(counts)) for title, counts in report.get("histograms", {}).items()],
        languages=_languages(report.get("languages", {})),
        samples=_samples(report),
        rejects=[(r.get("where", ""), r.get("reason", "")) for r in rejects[:MAX_REJECTS]],
        more_rejects=max(totals.get("malformed", 0), len(rejects)) - len(rejects[:MAX_REJECTS]),
        inputs=_inputs(inputs),
        skipped=[(reason, count(n)) for reason, n in skipped.items()] if skipped else [],
        skipped_files=[[item.get(key, "") for key in ("path", "status", "reason")] for item in files_left_out],
        more_skipped=sum(skipped.values()) - len(files_left_out) if skipped else 0,
        recipe=toml(report["recipe"]) if report.get("recipe") else "",
        read_from=f"{count(len(inputs))} inputs, {format_bytes(sum(i.get('bytes', 0) for i in inputs))}",
        css=Markup(_file("report.css")),
        json_opening=Markup(JSON_OPENING),
        json=Markup(data),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _ribbon(funnel: Sequence[Report]) -> list[tuple[int, str, str]]:
    """Where the documents went, as one bar: kept, then what each stage dropped."""
    losses = sorted(((sum(s.get("dropped", {}).values()), str(s.get("stage", ""))) for s in funnel), reverse=True)
    losses = [(n, name) for n, name in losses if n]
    if len(losses) > 6:
        losses = [*losses[:5], (sum(n for n, _ in losses[5:]), "other stages")]
    kept_part = [(funnel[-1].get("documents_out", 0), "kept", "kept")] if funnel else []
    return [*kept_part, *((n, name, f"d{i}") for i, (n, name) in enumerate(losses, 1))]


def _subsets(subsets: Mapping[str, Mapping[str, int]]) -> list[tuple[str, ...]]:
    tokens = sum(s.get("tokens", 0) for s in subsets.values())
    return [
        (name, count(s.get("documents", 0)), count(s.get("tokens", 0)), share(s.get("tokens", 0), tokens))
        for name, s in subsets.items()
    ]


def sums(funnel: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each stage, what does not add up in its figures; empty if all does."""
    problems = []
    before: int | None = None
    for stage in funnel:
        came, documents_out = stage.get("documents_in", 0), stage.get("documents_out", 0)
        dropped = sum(stage.get("dropped", {}).values())
        wrong = []
        if before is not None and came != before:
            wrong.append(f"{count(before)} left the stage before, {count(came)} came here")
        if came - dropped != documents_out:
            wrong.append(f"{count(came)} in − {count(dropped)} dropped ≠ {count(documents_out)} out")
        problems.append("; ".join(wrong))
        before = documents_out
    return problems


def _stage(stage: Report, wrong: str) -> dict[str, Any]:
    reasons, changed = (
        sorted(((k, n) for k, n in stage.get(key, {}).items() if n), key=lambda kn: (-kn[1], kn[0]))
        for key in ("dropped", "changed")
    )
    lost = sum(n for _, n in reasons)
    if len(reasons) > MAX_REASONS:
        rest = reasons[MAX_REASONS - 1 :]
        reasons = [*reasons[: MAX_REASONS - 1], (f"{len(rest)} other reasons", sum(n for _, n in rest))]
    return {
        "name": stage.get("stage", ""),
        "documents_in": stage.get("documents_in", 0),
        "documents_out": stage.get("documents_out", 0),
        "bytes": stage.get("bytes_out", 0),
        "dropped": lost,
        "reasons": reasons,
        "changed": changed,
        "wrong": wrong,
    }


def histogram(data: Report) -> dict[str, Any]:
    """Where the parts of a chart stand: counts per bin of what was read (behind) and of what was kept; {} without any.

    Each bin is equally wide; those at either end in which nothing lies are left out. `data` has `edges` [n + 1], and
    `read` or `kept` or both, [n] each.
    """
    edges: list[float] = list(data.get("edges", ()))
    series = {kind: list(data[kind]) for kind in ("read", "kept") if any(data.get(kind) or ())}
    if len(edges) < 2 or not series or any(len(values) != len(edges) - 1 for values in series.values()):
        return {}
    filled = [index for index, values in enumerate(zip(*series.values())) if any(values)]
    edges = edges[filled[0] : filled[-1] + 2]
    series = {kind: values[filled[0] : filled[-1] + 1] for kind, values in series.items()}
    top, bins, base = max(map(max, series.values())), len(edges) - 1, _HEIGHT - _BOTTOM
    step, rule = (_WIDTH - _LEFT_MARGIN - _RIGHT) / bins, _round_step(top / 5)
    bars = []
    for kind, values in series.items():
        gap = 0.5 if kind == "read" else min(2.0, step * 0.16)
        for index, value in enumerate(values):
            if value > 0:
                y = round(base - max(1.0, (base - _TOP) * value / top), 2)
                hint = f"{_edge(edges[index])} to {_edge(edges[index + 1])}: {count(value)} {kind}"
                bars.append(
                    (kind, round(_LEFT_MARGIN + index * step + gap, 2), y, round(max(0.6, step - 2 * gap), 2), hint)
                )
    medians = (f"{kind} {count(sum(v))}, median about {_edge(median(edges, v))}" for kind, v in series.items())
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT_MARGIN,
        "right": _WIDTH - _RIGHT,
        "base": base,
        "bars": bars,
        "rules": [(round(base - (base - _TOP) * n / top, 1), _edge(n)) for n in range(rule, top + 1, rule)],
        "ticks": [(round(_LEFT_MARGIN + i * step, 1), _edge(edges[i])) for i in range(0, bins, -(-bins // 6))],
        "summary": "; ".join(medians),
    }


def _round_step(minimum: float) -> int:
    """The least of 1, 2 and 5 times a power of ten that is not below it, and at least 1."""
    power = 10.0 ** math.floor(math.log10(max(minimum, 1)))
    return int(next(power * n for n in (1, 2, 5, 10) if power * n >= minimum * (1 - 1e-9)))


def _edge(value: float) -> str:
    if abs(value) >= 10_000:
        number, _, unit = short(value).partition(" ")
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


def _languages(languages: Mapping[str, Mapping[str, int]]) -> list[tuple[Any, ...]]:
    rows = [(v.get("read", 0), v.get("kept", 0), str(name)) for name, v in languages.items()]
    rows.sort(key=lambda row: (-row[0], row[2]))
    rest = rows[MAX_LANGUAGES:]
    if rest:
        others = sum(row[0] for row in rest), sum(row[1] for row in rest), f"{len(rest)} others"
        rows = [*rows[:MAX_LANGUAGES], others]
    maximum = max((max(read, kept_part) for read, kept_part, _ in rows), default=0)
    return [
        (
            name,
            [("read", read, maximum), ("kept", kept_part, maximum)],
            count(read),
            count(kept_part),
            share(kept_part, read),
        )
        for read, kept_part, name in rows
    ]


def _samples(report: Report) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for sample in report.get("samples", []):
        groups.setdefault((str(sample.get("stage", "")), str(sample.get("reason", ""))), []).append(sample)
    dropped = {s.get("stage", ""): s.get("dropped", {}) for s in report.get("funnel", [])}
    rows = []
    for (stage, reason), samples in sorted(groups.items(), key=lambda item: bool(item[0][0])):
        of = dropped.get(stage, {}).get(reason) if stage else report.get("totals", {}).get("documents_out")
        problems = f"{count(len(samples))} shown" + (f" of {count(of)}" if of else "")
        title = f"{stage} · {reason}" if stage else reason
        rows.append({"stage": stage, "title": title, "summary": problems, "samples": samples})
    return rows


def _inputs(inputs: Sequence[Report]) -> list[tuple[str, ...]]:
    rest = inputs[MAX_INPUTS:]
    if rest:
        summed = {key: sum(i.get(key, 0) for i in rest) for key in ("bytes", "documents", "malformed")}
        inputs = [*inputs[:MAX_INPUTS], {"name": f"{count(len(rest))} more inputs", "format": "", **summed}]
    return [
        (i.get("name", ""), i.get("format", ""), format_bytes(i.get("bytes", 0)),
         count(i.get("documents", 0)), count(i.get("malformed", 0)))
        for i in inputs
    ]  # fmt: skip
