"""The report of a prepared dataset: what was read, what was dropped and why, with samples.

A dict of JSON without times, embedded in one HTML page that loads nothing and runs no script. Text of the corpus is
escaped, its control characters are made visible, and each piece is isolated in an element of its own.
"""

import functools
import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from forebay import html
from forebay.base import Json
from forebay.errors import DatasetError, PrepareError, printable
from forebay.prepare.charts import (
    count,
    cut,
    rates,
    rule_charts,
    rule_lines,
    rule_name,
    sample_lines,
    share,
    short,
    tokens_name,
)
from forebay.prepare.progress import read_progress
from forebay.storage.addresses import is_url
from forebay.storage.store import FolderStore, Store, open_store
from forebay.units import format_bytes, format_seconds, numbered

Report = Mapping[str, Any]
REPORT_FILE = "report.html"
JSON_OPENING = '<script type="application/json" id="forebay-report">'
REPORT_VERSION = 1  # Changed when a key changes its meaning.
MAX_INPUTS, MAX_REJECTS, MAX_LANGUAGES, MAX_BINS, MAX_FAILED = 50, 100, 20, 24, 5
MAX_ROWS = 12  # A longer table is folded.
FIRST = ("Inputs that failed", "Sample", "Drop rates in the whole input", "Funnel")  # They come first on the page.
# Control characters by their pictures, halves of surrogate pairs by the replacement character, turns by words.
_VISIBLE: dict[int, str] = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= dict.fromkeys((*range(0x7F, 0xA0), *range(0xD800, 0xE000), *range(0xFFFE, 0x10000)), "�")
_VISIBLE |= {0xFDD0: "⟨prompt⟩ ", 0xFDD1: "⟨response⟩ ", 0xFDD2: "⟨header⟩ "}
_PREFIXES = {"stage": "", "dropped": "  − ", "changed": "  ~ "}


_LISTS = """\
Inputs that failed|failures|Name:path,Missing:bytes,Reason:reason||skipped.jsonl
Evaluation sets|sets|Set:name,Instances:instances,Too short:too_short,N-grams:ngrams,Documents with them:documents||
Contaminated documents|hits|Document:where,Set:set,Instance:instance,Shared words:ngram,Instance's text:text|The first \
of each set.|contamination.jsonl
Thresholds by percentiles|thresholds|Stage:stage,Column:column,Percentile:percentile,Value:value||
Malformed records, by reason|rejected|Reason:reason,Records:number||rejects.jsonl
Malformed records|rejects|Where:where,Reason:reason||
Inputs that were not read, by reason|skipped|Reason:reason,Files and folders:number||skipped.jsonl
Inputs that were not read|skipped_files|Name:path,Status:status,Reason:reason||
Inputs|inputs|Name:name,Format:format,Size:bytes,Documents:documents,Malformed:malformed||"""
"""Tables of lists of a report: title, key, columns and their keys, description, file beside the page."""


@dataclass(frozen=True)
class Link:
    """A cell that leads to a part of the page, what is shown at it, and what is before it."""

    text: str
    link: str
    tip: str
    lead: str


@dataclass(frozen=True)
class Table:
    """A section of the page with a table. A head "bar" is a column of shares in per cent, with "dropped" behind them
    where that is meant; `file` is beside the page.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str | Link]]
    description: str = ""
    file: str = ""
    parts: "Sequence[Table]" = ()  # Tables below it in the same section.

    @property
    def id(self) -> str:
        return re.sub(r"[^a-z]+", "-", self.title.lower()).strip("-") or "table"

    @property
    def is_long(self) -> bool:
        return len(self.rows) > MAX_ROWS


def write_report(store: Store, report: Report, times: Report | None = None) -> None:
    """Write `report.html`, whole or not at all; of a sample the report as `report.json`, too.

    `times`: the run's record (`prepare.progress`). All but the section of them is a pure function of the report.
    """
    if "sample" in report:
        store.write("report.json", json.dumps(report, indent=1).encode() + b"\n")
    else:  # an earlier one of a sample
        store.remove(["report.json"])
    store.write(REPORT_FILE, render(report, times).encode("utf-8"))


class PreparationReport(Json):
    """The contents of a report. In a notebook it shows its figures and its funnel."""

    def _repr_html_(self) -> str:
        fields = {label: f"{value} {detail}" for label, value, detail in _totals(self)}
        funnel = next(table for table in _tables(self) if table.title == "Funnel")
        rows = [
            [f"{name.lead}{name.text}" if isinstance(name, Link) else name, *cells[:3]]
            for name, *cells in funnel.rows
        ]  # fmt: skip
        return html.card(f"Report of {self['name']}", fields, html.table(funnel.heads[:4], rows))


def load_report(path: str | os.PathLike[str]) -> PreparationReport:
    """The dict that a page was written from: `report.html`, the `report.json` of a sample, or their folder or bucket.

    Raises:
        DatasetError: If there is none, or it is damaged or of a later version.
    """
    store, name = _located(path)
    file = f"{store.url}/{name}"
    try:
        text = store.read(name).decode()
        if not name.endswith(".json"):
            start = text.index(JSON_OPENING) + len(JSON_OPENING)
            text = text[start : text.index("</script>", start)]
        report = json.loads(text)
    except FileNotFoundError:
        raise DatasetError(f"{file}: there is no report. `forebay prepare` writes one with each dataset.") from None
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"{file}: expected a report of forebay prepare, got what cannot be read ({error})."
        ) from error
    version = report.get("version") if isinstance(report, dict) else None
    if version != REPORT_VERSION:
        raise DatasetError(
            f"{file}: expected a report of version {REPORT_VERSION}, got {version!r}. Use the forebay that wrote it."
        )
    return PreparationReport(report)


def _located(path: str | os.PathLike[str]) -> tuple[Store, str]:
    """The store of a report, and its name there."""
    if is_url(path) or Path(path).is_dir():
        return open_store(path), REPORT_FILE
    return FolderStore(str(Path(path).parent)), Path(path).name


def page_of(path: str | os.PathLike[str]) -> str:
    """The URL of the page of a report, for people."""
    store, name = _located(path)
    return f"{store.as_uri()}/{REPORT_FILE if name.endswith('.json') else name}"


def load_times(path: str | os.PathLike[str]) -> Report | None:
    """The record of the run that wrote a report, which lies beside it; None without one."""
    with suppress(PrepareError):
        store, _ = _located(path)
        return read_progress(store.folder or path)
    return None


def render(report: Report, times: Report | None = None) -> str:
    """The whole page of a report, with the times of its run if they are given: a pure function of both."""
    data = json.dumps(report, ensure_ascii=True, separators=(",", ":"))
    for char in "&<>":
        data = data.replace(char, f"\\u{ord(char):04x}")
    recipe = json.dumps(report["recipe"], indent=2, ensure_ascii=False)
    subtitle = f"{report['id']} written by {report['created_with']}"
    tables = [table for table in _tables(report) if table.rows]
    return render_page(
        report["name"], subtitle,
        [table for table in tables if table.title in FIRST], list(rule_charts(report)),
        [table for table in tables if table.title not in FIRST],
        totals=list(_totals(report)), groups=_samples(report), times=times_table(times) if times else None,
        recipe=recipe, data=data,
    )  # fmt: skip


def render_page(
    title: str,
    subtitle: str,
    first: Sequence[Table],
    rules: Sequence[Report],
    rest: Sequence[Table] = (),
    *,
    totals: Sequence[tuple[str, str, str]] = (),
    groups: Sequence[Report] = (),
    times: Table | None = None,
    recipe: str = "",
    data: str = "",
) -> str:
    """A page of figures, tables, charts of rules, groups of samples, folded tables, a recipe and the JSON of it all."""
    sections = [(table.id, table.title) for table in first]
    sections += [("thresholds", "Thresholds")] * bool(rules) + [("documents", "Documents")] * bool(groups)
    sections += [(table.id, table.title) for table in (*rest, *filter(None, [times]))]
    return _template().render(
        title=title, subtitle=subtitle, totals=totals, first=first, rules=rules, groups=groups, rest=rest, times=times,
        links=sections + [("recipe", "Recipe")] * bool(recipe), recipe=recipe,
        opening=Markup(JSON_OPENING), json=Markup(data),
    )  # fmt: skip


def times_table(record: Report) -> Table:
    """CPU seconds by rule and step of a run's record, in the order of the funnel, and what is in no funnel after it."""
    seconds = dict(record["cpu_s"])
    documents = {stage["stage"]: stage["documents_in"] for stage in record["funnel"]}
    total = sum(seconds.values())
    names = [*(name for name in documents if name in seconds), *(name for name in seconds if name not in documents)]
    rows = [
        (
            name, format_seconds(seconds[name]), share(seconds[name], total),
            count(documents[name] / seconds[name]) if documents.get(name) and seconds[name] >= 0.01 else "",
            _percent(seconds[name], max(seconds.values())),
        )
        for name in names
    ]  # fmt: skip
    stopped = [stage for stage in record["stages"] if stage["stopped_at"]]
    durations = {stage["stage"]: format_seconds(stage["stopped_at"] - stage["started_at"]) for stage in stopped}
    compiling = f" ({durations['kernels']})" if "kernels" in durations else ""
    description = (
        f"{format_seconds(record['wall_s'])} with {record['num_workers']} processes, {format_seconds(total)} of CPU, "
        f"at most {format_bytes(record['peak_bytes'])} in a process. Steps of the last call: "
        f"{', '.join(map(' '.join, durations.items())) or 'none'}. CPU is "
        f"without the compilation of kernels{compiling}. All but this section depends on input and recipe alone."
    )
    attempts = [
        (f["task"], f["step"], f["node"] or f["host"], str(f["attempt"]), f["reason"]) for f in record["retries"]
    ]  # fmt: skip
    heads = ("Task", "Step", "Host", "Attempt", "Reason")
    parts = [Table("Attempts that failed", heads, attempts, "The last of them.")] if attempts else []
    heads = ("Rule or step", "CPU", "Share", "Documents a CPU second", "bar")
    return Table("Times", heads, rows, description, "", parts)


def render_text(report: Report, times: Report | None = None) -> str:
    """For a terminal of 80 columns, ending in a newline: the funnel, what a sample says of the whole input, times."""
    lines = [report["name"]]
    lines += [f"{label}: {value} {detail}" for label, value, detail in _totals(report)]
    total = _documents_in(report)
    for kind, label, documents in _funnel(report):
        figures = f"{count(documents):>15} {'' if kind == 'changed' else share(documents, total):>9}"
        lines.append(f"{cut(_PREFIXES[kind] + label, 80 - len(figures)):<{80 - len(figures)}}{figures}")
    if "sample" in report:
        lines += ["", f"{'dropped of what reaches a rule':<39}  share  with other thresholds"]
        lines += [f"{cut(name, 38):<39}{text}" for name, text in rule_lines(report["rules"])]
        lines.append("")
        for label, text in sample_lines(report):
            lines += textwrap.wrap(text, 80, initial_indent=f"{label:<22}", subsequent_indent=" " * 22)
    if times and times["cpu_s"]:
        cpu = sorted(times["cpu_s"].items(), key=lambda item: -item[1])
        words = (
            f"{format_seconds(times['wall_s'])}, {format_seconds(sum(times['cpu_s'].values()))} of CPU: "
            f"{', '.join(f'{name} {format_seconds(seconds)}' for name, seconds in cpu[:6])}"
        )
        lines += ["", *textwrap.wrap(words, 80, initial_indent="time  ", subsequent_indent="      ")]
        lines.append(f"tasks {count(times['tasks'])}, {count(times['num_retries'])} repeated")
    return "\n".join(cut(printable(line), 80).rstrip() for line in lines) + "\n"


@functools.cache
def _template() -> jinja2.Template:
    def shown(value: Any) -> Any:
        return value if isinstance(value, Markup) else str(value).translate(_VISIBLE)

    environment = jinja2.Environment(autoescape=True, finalize=shown)
    return environment.from_string(files("forebay.prepare").joinpath("report.html").read_text("utf-8"))


def _documents_in(report: Report) -> int:
    return int(report["funnel"][0]["documents_in"])


def _totals(report: Report) -> list[tuple[str, str, str]]:
    t, total, failed = report["totals"], _documents_in(report), report["failed"]
    missing = f"{share(failed['share'], 1)} of the bytes are missing" if failed["inputs"] else ""
    return [
        *([("failed inputs", count(failed["inputs"]), missing)] if missing else []),
        ("documents", count(t["documents_out"]), f"of {count(total)} kept ({share(t['documents_out'], total)})"),
        (
            "text",
            format_bytes(t["bytes_out"]),
            f"{share(t['bytes_out'], t['bytes_in'])} of the {format_bytes(t['bytes_in'])} read, unpacked",
        ),
        (tokens_name(report), short(t["tokens"]), f"in {numbered(t['slices'], 'slice')}" if t["slices"] else ""),
        ("malformed", count(t["malformed"]), f"{share(t['malformed'], total)} of what was read"),
    ]


def _funnel(report: Report) -> Iterator[tuple[str, str, int]]:
    """Kind (of _PREFIXES), label and documents, or changes of their text, of each line of the funnel."""
    for stage in report["funnel"]:
        yield "stage", stage["stage"], stage["documents_out"]
        for kind in ("dropped", "changed"):
            for label, n in sorted(stage[kind].items(), key=lambda item: (-item[1], item[0])):
                if n:
                    yield kind, label, n


def _tables(report: Report) -> Iterator[Table]:
    total = _documents_in(report)
    failed = [item for item in report["skipped_files"] if item["status"] == "failed"]
    failed.sort(key=lambda item: -item["bytes"])
    totals = report["failed"]
    about = f"{numbered(totals['inputs'], 'input')}: {format_bytes(totals['bytes'])} are missing. Here are the largest."
    inputs, rejects = report["inputs"], report["rejects"][:MAX_REJECTS]
    if extra := inputs[MAX_INPUTS:]:
        summed = {key: sum(item[key] for item in extra) for key in ("bytes", "documents", "malformed")}
        inputs = [*inputs[:MAX_INPUTS], {"name": f"{count(len(extra))} more inputs", **summed}]
    if (more := report["totals"]["malformed"] - len(rejects)) > 0 and rejects:
        rejects.append({"where": f"{count(more)} more are not shown"})
    shown = {**report, **report.get("contamination", {}), "failures": failed[:MAX_FAILED], "inputs": inputs}
    lists = [_list_table({**shown, "rejects": rejects}, line) for line in _LISTS.splitlines()]
    yield replace(lists[0], description=about)
    yield Table("Sample", ("", ""), list(sample_lines(report)))
    heads = ("Rule", "Sampled documents", "Share", "Interval of 95 %")
    yield Table("Drop rates in the whole input", heads, list(rates(report)))
    tips, stage_name = _tips(report), ""
    stages: list[Sequence[str | Link]] = []
    for kind, label, n in _funnel(report):
        stage_name = label if kind == "stage" else stage_name
        link, tip = tips.get((stage_name, label), ("", "")) if kind == "dropped" else ("", "")
        lead = _PREFIXES[kind].replace(" ", "\N{NO-BREAK SPACE}")
        bar = _percent(n, total) + (" dropped" if kind == "dropped" else "")
        figures = ("", count(n), "", "0") if kind == "changed" else (count(n), "", share(n, total), bar)
        stages.append((Link(label, link, tip, lead) if link else lead + label, *figures))
    description = "After each stage; − dropped, by rule, of which there are samples below; ~ changes of texts, by kind."
    yield Table("Funnel", ("Stage, rule", "Documents", "Changes", "Of all", "bar"), stages, description)
    yield from lists[1:3]
    for title, data in report["histograms"].items():
        bins = list(_bins(data))
        max_documents = max((max(read, retained) for _, read, retained in bins), default=0)
        rows = [
            (label, count(read), count(retained), _percent(retained or read, max_documents))
            for label, read, retained in bins
        ]
        yield Table(f"Distribution: {title}", ("From, to", "Read", "Kept", "bar"), rows)
    yield lists[3]
    for title, key in (("Languages", "languages"), ("Subsets", "subsets")):
        counts = [(name, n.get("read", 0), n.get("kept", 0)) for name, n in report[key].items()]
        counts.sort(key=lambda row: (-row[1], row[0]))
        if rest := counts[MAX_LANGUAGES:]:
            others = f"{len(rest)} others", sum(row[1] for row in rest), sum(row[2] for row in rest)
            counts = [*counts[:MAX_LANGUAGES], others]
        values = [(name, count(read), count(retained), share(retained, read)) for name, read, retained in counts]
        yield Table(title, (title[:-1], "Read", "Kept", "Share"), values)
    yield from lists[4:]


def _list_table(report: Report, line: str) -> Table:
    """Return the table of a list, or of counts by reason, by a line of `_LISTS`."""
    title, key, columns, description, file = line.split("|")
    entries = report.get(key) or ()
    if isinstance(entries, Mapping):
        entries = [{"reason": reason, "number": number} for reason, number in entries.items()]
    names = dict(column.split(":") for column in columns.split(","))
    rows = [[_cell(name, entry[name]) if name in entry else "" for name in names.values()] for entry in entries]
    return Table(title, [*names], rows, description, file)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if name == "bytes":
        return format_bytes(value) if value >= 0 else "unknown"
    return count(value) if isinstance(value, int) else f"{value:.6g}"


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


def _samples(report: Report) -> list[Json]:
    """The samples by rule: those that are kept first."""
    groups: dict[tuple[str, str], list[Report]] = {}
    for sample in report["samples"]:
        groups.setdefault((sample["stage"], sample["reason"]), []).append(sample)
    dropped = {
        (stage["stage"], reason): n for stage in report["funnel"] for reason, n in stage["dropped"].items()
    }  # fmt: skip
    rules = {(rule["stage"], rule["reason"]): rule for rule in report["rules"]}
    shown = []
    for number, (key, samples) in enumerate(sorted(groups.items(), key=lambda item: bool(item[0][0]))):
        about = ""
        if n := dropped.get(key):
            about = f"{count(n)} dropped, {count(len(samples))} of them here."
        if rule := rules.get(key):
            about += (
                f" Drops {rule_name(rule).removeprefix(key[1]).strip()}; {count(rule['documents'])} reached the rule."
            )
        title = f"{key[0]} · {key[1]}" if key[0] else key[1]
        shown.append({"key": key, "id": f"dropped-{number}", "title": title, "about": about, "samples": samples})
    return shown


def _tips(report: Report) -> dict[tuple[str, str], tuple[str, str]]:
    """By rule: where samples of what it dropped are on the page, and a description."""
    tips = {group["key"]: (group["id"], group["about"]) for group in _samples(report)}
    if report["rejects"]:
        tips["read", "malformed"] = ("malformed-records", "Records that could not be read, with the reason.")
    return tips
