"""Two reports side by side: what their recipes and results differ in, and which documents only one of them keeps."""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from forebay import html
from forebay.arrays import U64
from forebay.base import Json
from forebay.errors import DatasetError, printable
from forebay.prepare.charts import chart, count, cut, rule_name, share
from forebay.prepare.report import Report, Table, render_page
from forebay.units import format_bytes, format_seconds

SIDES = ("a", "b")
EXAMPLES = 10
_BUCKETS = 256  # Of ids: memory is that of the largest of them, 16 bytes an id.
_TOTALS = (("documents_in", "documents read"), ("documents_out", "documents kept"), ("bytes_out", "text kept"),
           ("tokens", "tokens"), ("malformed", "malformed"))  # fmt: skip


class Comparison(Json):
    """What `compare_reports` returns. In a notebook it shows its tables."""

    def _repr_html_(self) -> str:
        tables = [(title, heads, rows) for title, heads, rows in comparison_tables(self) if rows]
        body = "".join(html.table([title, *heads[1:]], rows) for title, heads, rows in tables)
        return html.card(f"A: {self['a']['name']}, B: {self['b']['name']}", {}, body)


def compare_reports(a: Report, b: Report) -> Comparison:
    """What two reports differ in: `recipe` has the settings that differ, `rules` every rule of either."""
    of_a, of_b = (dict(_settings(report["recipe"])) for report in (a, b))
    keys = dict.fromkeys([*of_a, *of_b])
    stages = {key: key.partition(".")[0] for key in keys if of_a.get(key) != of_b.get(key)}
    absent = {stage for stage in stages.values() if f"[{stage}]" in keys and f"[{stage}]" not in of_a.keys() & of_b}
    return Comparison(
        version=1,
        a=_summary(a),
        b=_summary(b),
        recipe=[
            {"key": key, "a": of_a.get(key), "b": of_b.get(key)} for key, stage in stages.items() if stage not in absent
        ],
        rules=_rules(a, b),
        thresholds=_thresholds(a, b),
    )


def _summary(report: Report) -> Json:
    totals = {name: report["totals"][name] for name, _ in _TOTALS}
    return {"name": report["name"], "id": report["id"], "totals": totals, "is_sample": "sample" in report}


def _settings(recipe: Report) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; a stage that is on has a key of its own, `[name]`."""
    for name, value in recipe.items():
        if name == "stages":
            seen: Counter[str] = Counter()
            for stage, settings in value:
                seen[stage] += 1
                label = f"{stage}#{seen[stage]}" if seen[stage] > 1 else stage
                yield f"[{label}]", True
                yield from _flat(label, settings)
        elif name != "name":
            yield from _flat(name, value)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}", inner)
    else:
        yield prefix, value


def _rules(a: Report, b: Report) -> list[Json]:
    """Of each rule the documents that both drop, and their share of all read."""
    counts: dict[tuple[str, str], list[int]] = {}
    for index, report in enumerate((a, b)):
        for stage in report["funnel"]:
            for reason, dropped in stage["dropped"].items():
                counts.setdefault((stage["stage"], reason), [0, 0])[index] += dropped
    read = [report["totals"]["documents_in"] for report in (a, b)]
    intervals = [
        {(rate["stage"], rate["reason"]): rate["interval"] for rate in report.get("sample", {}).get("rates", [])}
        for report in (a, b)
    ]
    rules = []
    for rule, pair in counts.items():
        shares = [n / of if of else 0.0 for n, of in zip(pair, read)]
        sides = [
            {"dropped": n, "share": s, "interval": by_rule.get(rule)} for n, s, by_rule in zip(pair, shares, intervals)
        ]
        rules.append(
            {"stage": rule[0], "reason": rule[1], **dict(zip(SIDES, sides)), "difference": shares[1] - shares[0]}
        )
    return rules


def _thresholds(a: Report, b: Report) -> list[Json]:
    """What each rule with a threshold measured: the entries of both reports by rule, in the order of the recipe."""
    by_rule: dict[tuple[str, str, str], dict[str, list[Any]]] = {}
    for side, report in zip(SIDES, (a, b)):
        for rule in report["rules"]:
            key = rule["stage"], rule["reason"], rule["kind"]
            entry = {name: rule[name] for name in ("threshold", "documents", "dropped", "histogram")}
            by_rule.setdefault(key, {"a": [], "b": []})[side].append(entry)
    return [{"stage": s, "reason": r, "kind": k, **sides} for (s, r, k), sides in by_rule.items()]


def compare_times(a: Report, b: Report) -> list[Json]:
    """CPU seconds of two runs, by their records: of all, and of each rule and step of either."""
    names = dict.fromkeys([*a["cpu_s"], *b["cpu_s"]])
    total = {"name": "all", "a": sum(a["cpu_s"].values()), "b": sum(b["cpu_s"].values())}
    steps = [{"name": name, "a": a["cpu_s"].get(name, 0.0), "b": b["cpu_s"].get(name, 0.0)} for name in names]
    return [total, *sorted(steps, key=lambda step: -max(step["a"], step["b"]))]


def compare_ids(a: Path, b: Path) -> Json:
    """How many ids of two files, one a line, are in both and in one alone, and the first of these.

    Memory is bounded for files of any length: ids are compared by 64 bits of their hash, a bucket at a time.
    """
    both, only, first = 0, [0, 0], [np.empty(0, np.uint64), np.empty(0, np.uint64)]
    with tempfile.TemporaryDirectory() as folder:
        files = [_partition(path, Path(folder, side)) for path, side in zip((a, b), SIDES)]
        for paths in zip(*files):
            rows = [np.fromfile(path, "<u8").reshape(-1, 2) for path in paths]
            unique = [part[np.unique(part[:, 0], return_index=True)[1]] for part in rows]
            for index in (0, 1):
                alone = unique[index][~np.isin(unique[index][:, 0], unique[1 - index][:, 0])]
                only[index] += len(alone)
                first[index] = np.sort(np.concatenate([first[index], alone[:, 1]]))[:EXAMPLES]
            both += len(np.intersect1d(unique[0][:, 0], unique[1][:, 0], assume_unique=True))
    return {
        "both": both, "only_a": only[0], "only_b": only[1],
        "examples_a": _lines(a, first[0]), "examples_b": _lines(b, first[1]),
    }  # fmt: skip


def _partition(path: Path, folder: Path) -> list[Path]:
    """Files of (hash, offset of the line), by the first byte of the hash."""
    folder.mkdir()
    paths = [folder / f"{bucket:03d}" for bucket in range(_BUCKETS)]
    try:
        with ExitStack() as stack, path.open("rb") as lines:
            files = [stack.enter_context(bucket.open("wb")) for bucket in paths]
            offset = 0
            for line in lines:
                digest = hashlib.blake2b(line.rstrip(b"\n"), digest_size=8).digest()
                files[digest[0]].write(digest + offset.to_bytes(8, "little"))
                offset += len(line)
    except OSError as error:
        raise DatasetError(
            f"{path}: cannot read the ids: {error.strerror or error}. `forebay prepare --write-ids FILE` writes them."
        ) from error
    return paths


def _lines(path: Path, offsets: U64) -> list[str]:
    with path.open("rb") as file:
        lines = []
        for offset in offsets.tolist():
            file.seek(offset)
            lines.append(file.readline(1000).decode("utf-8", "replace").rstrip("\n"))
    return lines


def comparison_tables(comparison: Report) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """Title, heads and rows of what a comparison shows."""
    a, b = comparison["a"], comparison["b"]
    totals = []
    for name, label in _TOTALS:
        values = a["totals"][name], b["totals"][name]
        shown = [format_bytes(v) if name == "bytes_out" else count(v) for v in values]
        totals.append((label, *shown, _change(values)))
    documents = [side["totals"]["documents_out"] for side in (a, b)]
    read = [side["totals"]["documents_in"] for side in (a, b)]
    shares = [n / of if of else 0.0 for n, of in zip(documents, read)]
    totals.insert(2, ("share kept", *(share(n, of) for n, of in zip(documents, read)), _points(shares[1] - shares[0])))
    heads = ("", "A", "B", "Difference")
    yield "Result", heads, totals
    recipe = [(entry["key"], _value(entry["a"]), _value(entry["b"]), "") for entry in comparison["recipe"]]
    yield "Settings that differ", ("", "A", "B", ""), recipe
    reasons = Counter(rule["reason"] for rule in comparison["rules"])
    rules = [
        (rule["reason"] if reasons[rule["reason"]] == 1 else f"{rule['stage']}: {rule['reason']}",
         *(share(rule[side]["dropped"], total) for side, total in zip(SIDES, read)), _points(rule["difference"]))
        for rule in comparison["rules"]
    ]  # fmt: skip
    yield "Dropped, of all read", heads, rules
    if ids := comparison.get("documents"):
        rows = [(label, count(ids[key]), "", "") for label, key in
                (("kept by both", "both"), ("by A alone", "only_a"), ("by B alone", "only_b"))]  # fmt: skip
        rows += [(f"  {side.upper()} alone: {id}", "", "", "") for side in SIDES for id in ids[f"examples_{side}"]]
        yield "Documents", ("", "Documents", "", ""), rows
    if times := comparison.get("times"):
        longest = [step for step in times if max(step["a"], step["b"]) >= 0.01 * max(times[0]["a"], times[0]["b"])]
        rows = [
            (step["name"], *(format_seconds(step[side]) for side in SIDES), _change([step[side] for side in SIDES]))
            for step in longest
        ]
        yield "CPU time", heads, rows


def _change(values: Sequence[float]) -> str:
    if values[0] == values[1]:
        return "0"
    return f"{100 * (values[1] - values[0]) / values[0]:+.1f} %" if values[0] else "–"


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f} points" if abs(difference) >= 0.0005 else "<0.1 points" if difference else "0"


def _value(value: Any) -> str:
    return "absent" if value is None else "on" if value is True else "off" if value is False else str(value)


def render_comparison_text(comparison: Report) -> str:
    """The comparison for a terminal of 80 columns, ending in a newline."""
    lines = []
    for side in SIDES:
        lines.append(
            f"{side.upper()}  {comparison[side]['name']}{' (a sample)' * comparison[side]['is_sample']}  "
            f"{comparison[side]['id'][:12]}"
        )
    for title, heads, rows in comparison_tables(comparison):
        lines += ["", f"{title:<38}{heads[1]:>14}{heads[2]:>14}{heads[3]:>14}"]
        lines += [f"{cut(row[0], 37):<38}" + "".join(f"{cut(cell, 13):>14}" for cell in row[1:]) for row in rows]
        lines += [] if rows else ["none"]
    return "\n".join(printable(line).rstrip() for line in lines) + "\n"


def render_comparison(comparison: Report) -> str:
    """The page of a comparison: its tables, and the histograms of each rule one below the other, on one scale."""
    charts = []
    for rule in comparison["thresholds"]:
        pairs = [(side, entry) for side in SIDES for entry in rule[side]]
        limits = [entry["threshold"] for _, entry in pairs]
        axis = [*limits, *(edge for _, entry in pairs for edge in entry["histogram"]["edges"])]
        shown = [
            (f"{side.upper()}: {rule_name({**rule, **entry})} drops {share(entry['dropped'], entry['documents'])}",
             chart(entry["histogram"], [entry["threshold"]], (min(axis), max(axis))))
            for side, entry in pairs
        ]  # fmt: skip
        drops = " / ".join(share(entry["dropped"], entry["documents"]) for _, entry in pairs)
        differs = len(set(limits)) > 1
        is_idle = not differs and not any(entry["dropped"] for _, entry in pairs)
        name = f"{rule['stage']} · {rule['reason']}"
        charts.append({"name": name, "drops": drops, "charts": shown, "open": differs, "is_idle": is_idle})
    title = f"{comparison['a']['name']} and {comparison['b']['name']}"
    tables = [Table(*table) for table in comparison_tables(comparison) if table[2]]
    return render_page(title, "A and B: two reports of forebay prepare", tables, charts)
