"""The report of a prepared dataset: what was read, what was dropped and why, with samples.

A dict of JSON without times, embedded in one HTML page that loads nothing.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.errors import DatasetError
from forebay.files import atomic_write
from forebay.prepare.report.figures import bar, count, share, short
from forebay.prepare.report.page import JSON_OPENING, render, sums
from forebay.units import format_bytes

_WIDTH = 80
_NAME, _COUNT = 20, 13


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write the page, whole or not at all."""
    atomic_write(path, render(report).encode("utf-8"))


def load_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The dict that a page, or the `report.html` in a dataset's folder, was written from."""
    file = Path(path)
    if file.is_dir():
        file = file / "report.html"
    try:
        text = file.read_text("utf-8")
        start = text.index(JSON_OPENING) + len(JSON_OPENING)
        report = json.loads(text[start : text.index("</script>", start)])
    except FileNotFoundError:
        raise DatasetError(f"{file}: there is no report. `forebay prepare` writes one with each dataset.") from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file}: expected a report of forebay prepare, got something else ({error}).") from error
    if not isinstance(report, dict):
        raise DatasetError(f"{file}: expected a report of forebay prepare, got {type(report).__name__}.")
    return report


def render_text(report: Mapping[str, Any]) -> str:
    """The funnel for a terminal of 80 columns, ending in a newline."""
    totals = report.get("totals", {})
    funnel = report.get("funnel", [])
    total = funnel[0].get("documents_in", 0) if funnel else totals.get("documents_in", 0)
    documents = totals.get("documents_out", 0)
    lines = [
        _cut(_plain(report.get("name") or "dataset"), _WIDTH),
        f"{count(documents)} of {count(total)} documents kept ({share(documents, total)})",
        f"{format_bytes(totals.get('bytes_out', 0))} of text, {short(totals.get('tokens', 0))} tokens, "
        f"{count(totals.get('slices', 0))} slices, {count(totals.get('malformed', 0))} malformed",
        "",
    ]
    for stage, wrong in zip(funnel, sums(funnel)):
        lines += _stage_lines(stage, total)
        if wrong:
            lines.append(_cut(f"  !! does not add up: {wrong}", _WIDTH))
    for name, subset in totals.get("subsets", {}).items():
        counts = f"{count(subset.get('documents', 0))} documents, {short(subset.get('tokens', 0))} tokens"
        lines.append(_cut(f"subset {_plain(name)}: {counts}", _WIDTH))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _stage_lines(stage: Mapping[str, Any], total: int) -> list[str]:
    remaining = stage.get("documents_out", 0)
    width = _WIDTH - _NAME - _COUNT - 10
    name = _cut(_plain(stage.get("stage", "")), _NAME - 1).ljust(_NAME)
    filled = bar(remaining / total if total else 0, width)
    lines = [f"{name}{filled} {count(remaining):>{_COUNT}} {share(remaining, total):>8}"]
    dropped = sorted(stage.get("dropped", {}).items(), key=lambda item: (-item[1], item[0]))
    for reason, n in dropped:
        if n:
            reason = _cut(_plain(reason), _WIDTH - _COUNT - 14)
            lines.append(f"  − {reason:<{_WIDTH - _COUNT - 13}}{count(n):>{_COUNT - 1}} {share(n, total):>8}")
    changed = [f"{_plain(k)} {count(n)}" for k, n in sorted(stage.get("changed", {}).items()) if n]
    if changed:
        lines.append(_cut("  ~ " + ", ".join(changed), _WIDTH))
    return lines


def _plain(text: object) -> str:
    """Without what a terminal would obey: control characters, and those that turn the direction of writing."""
    return "".join(c if c.isprintable() else "�" for c in str(text))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
