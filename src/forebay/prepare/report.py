"""The report of a prepared dataset: what was read, what was dropped and why, with samples.

A dict of JSON without times, embedded in one HTML page that loads nothing and runs no script. Text of the corpus is
escaped, its control characters are made visible, and each piece is isolated in an element of its own.
"""

import functools
import json
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from forebay.errors import DatasetError
from forebay.files import atomic_write
from forebay.prepare.charts import count, rates, rule_charts, rule_lines, sample_lines, share, short
from forebay.units import format_bytes

Report = Mapping[str, Any]
JSON_OPENING = '<script type="application/json" id="forebay-report">'
REPORT_VERSION = 1  # Changed when a key changes its meaning.
MAX_INPUTS, MAX_REJECTS, MAX_LANGUAGES, MAX_BINS = 50, 100, 20, 24
# Control characters by their pictures, halves of surrogate pairs by the replacement character, turns by words.
_VISIBLE: dict[int, str] = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= dict.fromkeys((*range(0x7F, 0xA0), *range(0xD800, 0xE000), *range(0xFFFE, 0x10000)), "�")
_VISIBLE |= {0xFDD0: "⟨prompt⟩ ", 0xFDD1: "⟨response⟩ ", 0xFDD2: "⟨header⟩ "}
_PREFIXES = {"stage": "", "dropped": "  − ", "changed": "  ~ "}


def write_report(path: Path, report: Report) -> None:
    """Write the page, whole or not at all; of a sample the report as JSON beside it, too."""
    if "sample" in report:
        atomic_write(path.with_suffix(".json"), json.dumps(report, indent=1).encode() + b"\n")
    else:  # an earlier one of a sample
        path.with_suffix(".json").unlink(missing_ok=True)
    atomic_write(path, render(report).encode("utf-8"))


def load_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The dict that a page was written from: `report.html`, the `report.json` of a sample, or their folder.

    Raises:
        DatasetError: If there is none, or it is damaged or of a later version.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "report.html"
    try:
        text = file.read_text("utf-8")
        if file.suffix != ".json":
            start = text.index(JSON_OPENING) + len(JSON_OPENING)
            text = text[start : text.index("</script>", start)]
        report = json.loads(text)
    except FileNotFoundError:
        raise DatasetError(f"{file}: there is no report. `forebay prepare` writes one with each dataset.") from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file}: expected a report of forebay prepare, got something else ({error}).") from error
    if not isinstance(report, dict):
        raise DatasetError(f"{file}: expected a report of forebay prepare, got {type(report).__name__}.")
    if (made_by := report.get("version", 0)) not in range(REPORT_VERSION + 1):
        raise DatasetError(
            f"{file}: expected a report of version {REPORT_VERSION} or below, got {made_by!r}. Update forebay."
        )
    return report


def render(report: Report) -> str:
    """The whole page of a report: a pure function of it."""
    data = json.dumps(report, ensure_ascii=True, separators=(",", ":"))
    for char in "&<>":
        data = data.replace(char, f"\\u{ord(char):04x}")
    recipe = json.dumps(report["recipe"], indent=2, ensure_ascii=False) if report.get("recipe") else ""
    subtitle = f"{report.get('id') or ''} written by {report.get('created_with') or 'forebay'}"
    tables = [table for table in _tables(report) if table[2]]
    return render_page(
        report.get("name") or "dataset", subtitle, tables, list(rule_charts(report)), _samples(report), recipe, data
    )


def render_page(
    title: str,
    subtitle: str,
    tables: Sequence[Any],
    rules: Sequence[Report] = (),
    samples: Sequence[Any] = (),
    recipe: str = "",
    data: str = "",
) -> str:
    """A page of tables (title, heads, rows), charts of rules, samples, a recipe, and the JSON behind them."""
    return _template().render(
        title=title, subtitle=subtitle, tables=tables, rules=rules, samples=samples, recipe=recipe,
        opening=Markup(JSON_OPENING), json=Markup(data),
    )  # fmt: skip


def render_text(report: Report) -> str:
    """The funnel for a terminal of 80 columns, and what a sample says of the whole input, ending in a newline."""
    lines = [str(report.get("name") or "dataset")]
    lines += [f"{label}: {value} {detail}" for label, value, detail in _totals(report)]
    total = _documents_in(report)
    for kind, label, documents in _funnel(report):
        figures = f"{count(documents):>15} {'' if kind == 'changed' else share(documents, total):>9}"
        lines.append(f"{cut(_PREFIXES[kind] + label, 80 - len(figures)):<{80 - len(figures)}}{figures}")
    if report.get("sample"):
        lines += ["", f"{'dropped of what reaches a rule':<39}  share  with other thresholds"]
        lines += [f"{cut(name, 38):<39}{text}" for name, text in rule_lines(report.get("rules", []))]
        lines.append("")
        for label, text in sample_lines(report):
            lines += textwrap.wrap(text, 80, initial_indent=f"{label:<22}", subsequent_indent=" " * 22)
    return "\n".join(cut(printable(line), 80).rstrip() for line in lines) + "\n"


def printable(line: str) -> str:
    """A line without what a terminal would obey: control characters, and those that turn the direction of writing."""
    return "".join(char if char.isprintable() else "�" for char in line)


def cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


@functools.cache
def _template() -> jinja2.Template:
    def shown(value: Any) -> Any:
        return value if isinstance(value, Markup) else str(value).translate(_VISIBLE)

    environment = jinja2.Environment(autoescape=True, finalize=shown)
    return environment.from_string(files("forebay.prepare").joinpath("report.html").read_text("utf-8"))


def _documents_in(report: Report) -> int:
    funnel = report.get("funnel", [])
    return int(funnel[0].get("documents_in", 0) if funnel else report.get("totals", {}).get("documents_in", 0))


def _totals(report: Report) -> list[tuple[str, str, str]]:
    t = dict.fromkeys(("documents_out", "bytes_in", "bytes_out", "tokens", "slices", "malformed"), 0)
    t |= report.get("totals", {})
    total = _documents_in(report)
    return [
        ("documents", count(t["documents_out"]), f"of {count(total)} kept ({share(t['documents_out'], total)})"),
        ("text", format_bytes(t["bytes_out"]), f"{share(t['bytes_out'], t['bytes_in'])} of the bytes read"),
        ("tokens", short(t["tokens"]), f"in {count(t['slices'])} slices"),
        ("malformed", count(t["malformed"]), f"{share(t['malformed'], total)} of what was read"),
    ]


def _funnel(report: Report) -> Iterator[tuple[str, str, int]]:
    """Kind (of _PREFIXES), label and documents, or changes of their text, of each line of the funnel."""
    for stage in report.get("funnel", []):
        yield "stage", str(stage.get("stage", "")), stage.get("documents_out", 0)
        for kind in ("dropped", "changed"):
            for label, n in sorted(stage.get(kind, {}).items(), key=lambda item: (-item[1], item[0])):
                if n:
                    yield kind, label, n


def _tables(report: Report) -> Iterator[tuple[str, Sequence[str], list[Sequence[str]]]]:
    yield "Totals", ("", "", ""), list(_totals(report))
    total = _documents_in(report)
    yield "Sample", ("", ""), list(sample_lines(report))
    heads = ("Rule", "Sampled documents", "Share", "Interval of 95 %")
    yield "Drop rates in the whole input", heads, list(rates(report))
    stages = [
        (
            _PREFIXES[kind] + label,
            count(n),
            *(("", "0") if kind == "changed" else (share(n, total), _percent(n, total))),
        )
        for kind, label, n in _funnel(report)
    ]
    yield "Funnel", ("Stage and reason", "Documents, ~ changes", "Of all read", "bar"), list(stages)
    listed = report.get("contamination", {})
    sets = [
        (s.get("name", ""), *(count(s.get(key, 0)) for key in ("instances", "too_short", "ngrams", "documents")))
        for s in listed.get("sets", [])
    ]
    yield "Evaluation sets", ("Set", "Instances", "Too short", "N-grams", "Documents with them"), list(sets)
    hits = [
        [hit.get(key, "") for key in ("where", "set", "instance", "ngram", "text")] for hit in listed.get("hits", [])
    ]
    yield "Contaminated documents", ("Document", "Set", "Instance", "Shared words", "Instance's text"), list(hits)
    for title, data in report.get("histograms", {}).items():
        bins = list(_bins(data))
        max_documents = max((max(read, retained) for _, read, retained in bins), default=0)
        rows = [
            (label, count(read), count(retained), _percent(retained or read, max_documents))
            for label, read, retained in bins
        ]
        yield f"Distribution: {title}", ("From, to", "Read", "Kept", "bar"), list(rows)
    chosen = [(t.get("stage", ""), t.get("column", ""), f"{t.get('percentile', 0):g}", f"{t.get('value', 0):.6g}")
              for t in report.get("thresholds", [])]  # fmt: skip
    yield "Thresholds by percentiles", ("Stage", "Column", "Percentile", "Value"), list(chosen)
    for title, key in (("Languages", "languages"), ("Subsets", "subsets")):
        counts = [(name, n.get("read", 0), n.get("kept", 0)) for name, n in report.get(key, {}).items()]
        counts.sort(key=lambda row: (-row[1], row[0]))
        if rest := counts[MAX_LANGUAGES:]:
            others = f"{len(rest)} others", sum(row[1] for row in rest), sum(row[2] for row in rest)
            counts = [*counts[:MAX_LANGUAGES], others]
        values = [(name, count(read), count(retained), share(retained, read)) for name, read, retained in counts]
        yield title, (title[:-1], "Read", "Kept", "Share"), list(values)
    rejects = [(r.get("where", ""), r.get("reason", "")) for r in report.get("rejects", [])[:MAX_REJECTS]]
    if (more := report.get("totals", {}).get("malformed", 0) - len(rejects)) > 0 and rejects:
        rejects.append((f"{count(more)} more are not shown", ""))
    yield "Malformed records", ("Where", "Reason"), list(rejects)
    skipped = [(reason, count(n)) for reason, n in report.get("skipped", {}).items()]
    yield "Inputs that were not read, by reason", ("Reason", "Files and folders"), list(skipped)
    names = [[item.get(key, "") for key in ("path", "status", "reason")] for item in report.get("skipped_files", [])]
    yield "Inputs that were not read", ("Name", "Status", "Reason"), list(names)
    inputs = list(report.get("inputs", []))
    if extra := inputs[MAX_INPUTS:]:
        summed = {key: sum(item.get(key, 0) for item in extra) for key in ("bytes", "documents", "malformed")}
        inputs = [*inputs[:MAX_INPUTS], {"name": f"{count(len(extra))} more inputs", **summed}]
    read = [
        (i.get("name", ""), i.get("format", ""), format_bytes(i.get("bytes", 0)), count(i.get("documents", 0)),
         count(i.get("malformed", 0)))
        for i in inputs
    ]  # fmt: skip
    yield "Inputs", ("Name", "Format", "Size", "Documents", "Malformed"), list(read)


def _percent(part: float, total: float) -> str:
    return f"{min(100.0, 100 * part / total) if total else 0:.1f}"


def _bins(data: Report) -> Iterator[tuple[str, int, int]]:
    edges = data.get("edges") or []
    counts = list(zip_longest(data.get("read") or (), data.get("kept") or (), fillvalue=0))
    filled = [index for index, pair in enumerate(counts) if any(pair)]
    if not filled or len(edges) != len(counts) + 1:
        return
    stop = filled[-1] + 1
    step = -(-(stop - filled[0]) // MAX_BINS)
    for first in range(filled[0], stop, step):
        last = min(first + step, stop)
        read, retained = map(sum, zip(*counts[first:last]))
        yield f"{short(edges[first])} to {short(edges[last])}", read, retained


def _samples(report: Report) -> list[tuple[str, list[Report]]]:
    groups: dict[tuple[str, str], list[Report]] = {}
    for sample in report.get("samples", []):
        groups.setdefault((str(sample.get("stage", "")), str(sample.get("reason", ""))), []).append(sample)
    ordered = sorted(groups.items(), key=lambda item: bool(item[0][0]))
    return [(f"{stage} · {reason}" if stage else reason, samples) for (stage, reason), samples in ordered]
