"""The report as a page: one HTML file that needs nothing else, and is harmless whatever the corpus says.

Hides: the layout. All that comes from a corpus goes through `shown`, which escapes it and makes its control characters
visible; each piece of it lies in a box of its own, which confines writing directions and stacks of accents. A policy in
the page forbids it to load anything and to run any script but its own one.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from forebay.prepare.report.charts import histogram, medians
from forebay.prepare.report.figures import count, share, short, size, toml

Report = Mapping[str, Any]
JSON_OPENING = '<script type="application/json" id="forebay-report">'
MAX_INPUTS, MAX_REJECTS, MAX_LANGUAGES, MAX_REASONS = 50, 100, 20, 12

_SCRIPT = """
const find = document.querySelector(".find");
find.hidden = false;
find.addEventListener("input", () => {
  const wanted = find.value.toLowerCase();
  for (const group of document.querySelectorAll("#samples details")) {
    let some = false;
    for (const sample of group.querySelectorAll(".sample")) {
      sample.hidden = !(group.firstChild.textContent + sample.textContent).toLowerCase().includes(wanted);
      some ||= !sample.hidden;
    }
    group.hidden = !some;
    if (wanted) group.open = some;
  }
});
"""
# Control characters by their pictures, halves of surrogate pairs by the replacement character, turns by words.
_VISIBLE: dict[int, str] = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= dict.fromkeys((*range(0x7F, 0xA0), *range(0xD800, 0xE000), *range(0xFFFE, 0x10000)), "�")
_VISIBLE |= {0xFDD0: "⟨given⟩ ", 0xFDD1: "⟨learnt⟩ "}


def shown(text: object) -> str:
    """Text of a corpus as HTML that is that text and nothing else."""
    return escape(str(text).translate(_VISIBLE), quote=True)


def page(report: Report) -> str:
    """The whole page of a report."""
    body = "".join(
        f'<section id="{name}"><h2>{title}</h2>{text}</section>'
        for name, title, text in (
            ("totals", "What came out", _totals(report)),
            ("funnel", "The funnel, stage by stage", _funnel(report)),
            ("distributions", "Distributions", _distributions(report)),
            ("languages", "Languages", _languages(report)),
            ("samples", "Look at the text", _samples(report)),
            ("malformed", "Malformed records", _rejects(report)),
            ("inputs", "Inputs", _inputs(report)),
            ("skipped", "Inputs that were not read", _skipped(report)),
            ("recipe", "Recipe", _recipe(report)),
            ("lineage", "Lineage", _lineage(report)),
        )
        if text
    )
    name = shown(report.get("name") or "dataset")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_hash(_SCRIPT)}'; base-uri 'none'"
    css = files("forebay.prepare.report").joinpath("report.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{name} · Forebay report</title><style>{css}</style></head><body><main>"
        f'<header><p class="brand">Forebay · dataset report</p><h1><bdi>{name}</bdi></h1>'
        f'<p class="id"><code>{shown(report.get("id", ""))}</code></p>{_nav(body)}</header>{body}'
        f"<footer>Written by {shown(report.get('created_with', 'forebay'))}. This page is complete, loads "
        f"nothing, and has the figures behind it in its source, as JSON.</footer></main>"
        f"{JSON_OPENING}{_json(report)}</script><script>{_SCRIPT}</script></body></html>\n"
    )


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _json(report: Report) -> str:
    text = json.dumps(report, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _nav(body: str) -> str:
    names = ("funnel", "distributions", "languages", "samples", "malformed", "inputs", "skipped", "recipe", "lineage")
    links = "".join(f'<a href="#{name}">{name.capitalize()}</a>' for name in names if f'id="{name}"' in body)
    return f'<nav aria-label="Sections">{links}</nav>'


def _totals(report: Report) -> str:
    t = report.get("totals", {})
    came, kept = t.get("documents_in", 0), t.get("documents_out", 0)
    tiles = [
        ("Documents", short(kept), f"of {count(came)} read"),
        ("Kept", share(kept, came), "of the documents"),
        (
            "Text",
            size(t.get("bytes_out", 0)),
            f"{share(t.get('bytes_out', 0), t.get('bytes_in', 0))} of the bytes read",
        ),
        ("Tokens", short(t.get("tokens", 0)), f"in {count(t.get('slices', 0))} slices"),
        ("Malformed", short(t.get("malformed", 0)), f"{share(t.get('malformed', 0), came)} of what was read"),
    ]
    html = "".join(
        f'<div class="tile"><span class="what">{what}</span><b>{figure}</b><span>{note}</span></div>'
        for what, figure, note in tiles
    )
    return f'<div class="tiles">{html}</div>{_ribbon(report)}{_subsets(t.get("subsets", {}))}'


def _ribbon(report: Report) -> str:
    """Where the documents went, as one bar: kept, then what each stage dropped."""
    funnel = report.get("funnel", [])
    whole = funnel[0].get("documents_in", 0) if funnel else 0
    if not whole:
        return ""
    losses = sorted(((sum(s.get("dropped", {}).values()), str(s.get("stage", ""))) for s in funnel), reverse=True)
    losses = [(n, name) for n, name in losses if n]
    if len(losses) > 6:
        losses = [*losses[:5], (sum(n for n, _ in losses[5:]), "other stages")]
    parts = [(funnel[-1].get("documents_out", 0), "kept", "kept")]
    parts += [(n, name, f"d{i + 1}") for i, (n, name) in enumerate(losses)]
    bar = "".join(f'<i class="{css}" style="flex:{n} 1 0"></i>' for n, _, css in parts)
    legend = "".join(
        f'<li><i class="{css}"></i><bdi>{shown(name)}</bdi> <b>{share(n, whole)}</b></li>' for n, name, css in parts
    )
    return f'<div class="ribbon" aria-hidden="true">{bar}</div><ul class="legend">{legend}</ul>'


def _subsets(subsets: Mapping[str, Mapping[str, int]]) -> str:
    if len(subsets) < 2:
        return ""
    tokens = sum(s.get("tokens", 0) for s in subsets.values())
    rows = [
        [_bdi(name), count(s.get("documents", 0)), count(s.get("tokens", 0)), share(s.get("tokens", 0), tokens)]
        for name, s in subsets.items()
    ]
    return (
        '<div style="margin-top:26px">' + _table("Subsets", ["Subset", "Documents", "Tokens", "Share"], rows) + "</div>"
    )


def sums(funnel: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each stage, what does not add up in its figures; empty if all does."""
    told = []
    before: int | None = None
    for stage in funnel:
        came, left = stage.get("documents_in", 0), stage.get("documents_out", 0)
        dropped = sum(stage.get("dropped", {}).values())
        wrong = []
        if before is not None and came != before:
            wrong.append(f"{count(before)} left the stage before, {count(came)} came here")
        if came - dropped != left:
            wrong.append(f"{count(came)} in − {count(dropped)} dropped ≠ {count(left)} out")
        told.append("; ".join(wrong))
        before = left
    return told


def _funnel(report: Report) -> str:
    funnel = report.get("funnel", [])
    if not funnel:
        return ""
    whole = funnel[0].get("documents_in", 0)
    most = max((n for stage in funnel for n in stage.get("dropped", {}).values()), default=0)
    items = "".join(_stage(stage, whole, most, wrong) for stage, wrong in zip(funnel, sums(funnel)))
    key = '<p class="key"><span><i class="kept"></i>kept</span><span><i class="lost"></i>dropped here</span></p>'
    lede = (
        "Bars are measured against all documents read; the thin ones, which tell why documents were dropped, "
        "against the largest reason of all stages."
    )
    return f'<p class="lede">{lede}</p>{key}<ol class="funnel">{items}</ol>'


def _stage(stage: Mapping[str, Any], whole: int, most: int, wrong: str) -> str:
    came, left = stage.get("documents_in", 0), stage.get("documents_out", 0)
    dropped = {k: v for k, v in sorted(stage.get("dropped", {}).items(), key=lambda kv: (-kv[1], kv[0])) if v}
    lost = sum(dropped.values())
    told = f" · {share(lost, came)} dropped here" if lost else ""
    head = (
        f'<div class="stage"><b>{_bdi(stage.get("stage", ""))}</b><span><strong>{count(left)}</strong> left · '
        f"{share(left, whole)} of all{told}<span class='extra'> · {size(stage.get('bytes_out', 0))}</span></span></div>"
        f'<div class="track" aria-hidden="true"><i class="kept" style="width:{_percent(left, whole)}"></i>'
        f'<i class="lost" style="width:{_percent(lost, whole)}"></i></div>'
    )
    alarm = f'<p class="alarm" role="alert">These figures do not add up: {escape(wrong)}.</p>' if wrong else ""
    changed = {k: v for k, v in sorted(stage.get("changed", {}).items(), key=lambda kv: (-kv[1], kv[0])) if v}
    chips = "".join(f"<span><bdi>{shown(k)}</bdi> <b>{count(v)}</b></span>" for k, v in changed.items())
    changes = f'<p class="chips">Changed: {chips}</p>' if chips else ""
    return f"<li>{head}{alarm}{_reasons(dropped, came, most)}{changes}</li>"


def _reasons(dropped: Mapping[str, int], came: int, most: int) -> str:
    """Why a stage dropped documents; `most` is what a bar of full width stands for, in all stages."""
    if not dropped:
        return ""
    rows = list(dropped.items())
    if len(rows) > MAX_REASONS:
        rest = rows[MAX_REASONS - 1 :]
        rows = [*rows[: MAX_REASONS - 1], (f"{len(rest)} other reasons", sum(n for _, n in rest))]
    html = "".join(
        f'<tr><th scope="row"><bdi>{shown(reason)}</bdi></th><td><i style="width:{_percent(n, most)}"></i></td>'
        f'<td class="n">{count(n)}<span class="extra"> · {share(n, came)}</span></td></tr>'
        for reason, n in rows
    )
    return f'<table class="why" aria-label="Reasons">{html}</table>'


def _percent(part: float, whole: float) -> str:
    return f"{min(100.0, 100 * part / whole) if whole else 0:.3f}%"


def _distributions(report: Report) -> str:
    figures = "".join(
        f"<figure><h3><bdi>{shown(title[:1].upper() + title[1:])}</bdi></h3>{histogram(shown(title), data)}"
        f"<figcaption>{medians(data)}</figcaption></figure>"
        for title, data in report.get("histograms", {}).items()
    )
    key = '<p class="key"><span><i class="read"></i>read</span><span><i class="kept"></i>kept</span></p>'
    return f'{key}<div class="charts">{figures}</div>' if figures else ""


def _languages(report: Report) -> str:
    known = report.get("languages", {})
    found = sorted(
        ((v.get("read", 0), v.get("kept", 0), str(k)) for k, v in known.items()), key=lambda x: (-x[0], x[2])
    )
    if not found:
        return ""
    if len(found) > MAX_LANGUAGES:
        rest = found[MAX_LANGUAGES:]
        found = [
            *found[:MAX_LANGUAGES],
            (sum(r for r, _, _ in rest), sum(k for _, k, _ in rest), f"{len(rest)} others"),
        ]
    most = max(max(read, kept) for read, kept, _ in found)
    rows = [
        [
            _bdi(name),
            "".join(
                f'<i class="{css}" style="width:{_percent(n, most)}"></i>'
                for n, css in ((read, "read"), (kept, "kept"))
                if n
            ),
            count(read),
            count(kept),
            share(kept, read),
        ]
        for read, kept, name in found
    ]
    return _table("Languages", ["Language", "Read (grey), kept", "Read", "Kept", "Share"], rows, pair=1)


def _samples(report: Report) -> str:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for sample in report.get("samples", []):
        groups.setdefault((str(sample.get("stage", "")), str(sample.get("reason", ""))), []).append(sample)
    if not groups:
        return ""
    dropped = {s.get("stage", ""): s.get("dropped", {}) for s in report.get("funnel", [])}
    html = ""
    for (stage, reason), samples in sorted(groups.items(), key=lambda item: bool(item[0][0])):
        title = f"{stage} · {reason}" if stage else reason
        of = dropped.get(stage, {}).get(reason) if stage else report.get("totals", {}).get("documents_out")
        told = f"{count(len(samples))} shown" + (f" of {count(of)}" if of else "")
        html += (
            f'<details{"" if stage else " open"}><summary><i class="dot {"lost" if stage else "kept"}"></i>'
            f"<b><bdi>{shown(title)}</bdi></b><span>{told}</span></summary>{''.join(map(_sample, samples))}</details>"
        )
    find = (
        '<input class="find" type="search" placeholder="Find in the samples…" aria-label="Find in the samples" hidden>'
    )
    lede = "The first characters of documents that were kept, and of those dropped, by reason."
    return f'<p class="lede">{lede}</p>{find}{html}'


def _sample(sample: Mapping[str, Any]) -> str:
    where = " · ".join(f"<bdi>{shown(sample[key])}</bdi>" for key in ("where", "url") if sample.get(key))
    text = f'<pre dir="auto">{shown(sample.get("text", ""))}</pre>'
    return f'<article class="sample"><p class="where">{where}</p>{text}</article>'


def _rejects(report: Report) -> str:
    rejects = report.get("rejects", [])
    if not rejects:
        return ""
    rows = [
        [f'<span class="where">{_bdi(r.get("where", ""))}</span>', _bdi(r.get("reason", ""))]
        for r in rejects[:MAX_REJECTS]
    ]
    total = max(report.get("totals", {}).get("malformed", 0), len(rejects))
    rest = f'<p class="none">{count(total - len(rows))} more are not shown.</p>' if total > len(rows) else ""
    return _table("Malformed records", ["Where", "What is wrong"], rows) + rest


def _inputs(report: Report) -> str:
    inputs = list(report.get("inputs", []))
    if not inputs:
        return ""
    if len(inputs) > MAX_INPUTS:
        rest = inputs[MAX_INPUTS:]
        summed = {key: sum(i.get(key, 0) for i in rest) for key in ("bytes", "documents", "malformed")}
        inputs = [*inputs[:MAX_INPUTS], {"name": f"{count(len(rest))} more inputs", "format": "", **summed}]
    rows = [
        [
            f'<span class="where">{_bdi(i.get("name", ""))}</span>',
            _bdi(i.get("format", "")),
            size(i.get("bytes", 0)),
            count(i.get("documents", 0)),
            count(i.get("malformed", 0)),
        ]
        for i in inputs
    ]
    return _table("Inputs", ["Name", "Format", "Size", "Documents", "Malformed"], rows)


def _skipped(report: Report) -> str:
    reasons = report.get("skipped", {})
    if not reasons:
        return ""
    counts = _table("Reasons", ["Why", "Files and folders"], [[_bdi(why), count(n)] for why, n in reasons.items()])
    rows = [
        [
            f'<span class="where">{_bdi(one.get("path", ""))}</span>',
            _bdi(one.get("status", "")),
            _bdi(one.get("reason", "")),
        ]
        for one in report.get("skipped_files", [])
    ]
    total = sum(reasons.values())
    rest = f'<p class="none">{count(total - len(rows))} more are in skipped.jsonl.</p>' if total > len(rows) else ""
    return counts + _table("Inputs that were not read", ["Name", "", "Why"], rows) + rest


def _recipe(report: Report) -> str:
    return f'<pre class="recipe">{shown(toml(report["recipe"]))}</pre>' if report.get("recipe") else ""


def _lineage(report: Report) -> str:
    inputs = report.get("inputs", [])
    facts = [
        ("Dataset id", f"<code>{shown(report.get('id', ''))}</code>"),
        ("Made with", shown(report.get("created_with", ""))),
        ("From", f"{count(len(inputs))} inputs, {size(sum(i.get('bytes', 0) for i in inputs))}"),
        ("Stages", " → ".join(_bdi(s.get("stage", "")) for s in report.get("funnel", []))),
        ("Check it", "<code>forebay verify</code> reads every slice again and compares its hash with the manifest's."),
    ]
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts if text) + "</dl>"


def _bdi(text: object) -> str:
    return f"<bdi>{shown(text)}</bdi>"


def _table(label: str, head: Sequence[str], rows: Sequence[Sequence[str]], pair: int = -1) -> str:
    """A table whose cells are HTML; columns of figures are set to the right."""
    figures = [
        all(row[i][:1] in "0123456789<–>" and row[i][:2] not in ("<b", "<s", "<i") for row in rows)
        for i in range(len(head))
    ]

    def cells(tag: str, row: Sequence[str]) -> Iterator[str]:
        for index, text in enumerate(row):
            css = "n" if figures[index] else "pair" if index == pair else ""
            yield f"<{tag}{' scope=col' if tag == 'th' else ''}{f' class={css}' if css else ''}>{text}</{tag}>"

    body = "".join(f"<tr>{''.join(cells('td', row))}</tr>" for row in rows)
    top = f"<thead><tr>{''.join(cells('th', head))}</tr></thead>"
    return f'<div class="scroll"><table class="list" aria-label="{label}">{top}<tbody>{body}</tbody></table></div>'
