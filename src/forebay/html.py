"""HTML cards for notebooks. All text is escaped."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_MAX_CHARS = 400
_STYLE = (
    "border:1px solid #8884;border-radius:6px;padding:8px 12px;margin:4px 0;max-width:110ch;overflow-x:auto;"
    "font:13px/1.45 system-ui,sans-serif"
)
_LINE = "white-space:pre-wrap;overflow-wrap:anywhere;margin:6px 0 0;font-family:monospace"
_CELL = "padding:1px 16px 1px 0;border:0;text-align:left;vertical-align:top;white-space:pre-wrap;overflow-wrap:anywhere"


def card(title: str, fields: Mapping[str, Any], body: str = "") -> str:
    """A box with a title, a table of fields (text), and a body (HTML)."""
    rows = [(k, f"{v:,}" if type(v) is int else v) for k, v in fields.items() if v not in ("", None)]
    return f'<div style="{_STYLE}"><b>{escape(title)}</b>{table((), rows) if rows else ""}{body}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of text that looks the same in light and dark notebooks; the first column is of names."""

    def row(cells: Sequence[Any], tags: Sequence[str]) -> str:
        items = (f'<{tag} style="{_CELL}">{escape(str(c))}</{tag}>' for c, tag in zip(cells, tags))
        return f'<tr style="background:none">{"".join(items)}</tr>'

    lines = [row(heads, ["th"] * len(heads))] if heads else []
    lines += [row(cells, ["th", *["td"] * len(cells)]) for cells in rows]
    return f'<table style="border:0;margin:6px 0 0;font-size:inherit">{"".join(lines)}</table>'


def coloured(rows: Sequence[Sequence[str]]) -> str:
    """A line for each row, in which each part has another colour than its neighbours."""
    lines = []
    for i, parts in enumerate(rows):
        spans = [
            f'<span style="background:hsl({(137 * (7 * i + j)) % 360} 70% 50% / 0.22)">{escape(part[:_MAX_CHARS])}'
            f"{'…' if len(part) > _MAX_CHARS else ''}</span>"
            for j, part in enumerate(parts)
        ]
        lines.append(f'<div dir="auto" style="{_LINE}">{"".join(spans)}</div>')
    return "".join(lines)
