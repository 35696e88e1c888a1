"""HTML cards for notebooks. All text is escaped."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_MAX_CHARS = 400
_STYLE = "border:1px solid #8884;border-radius:6px;padding:8px;margin:4px 0;font-family:monospace;max-width:100ch"


def card(title: str, fields: Mapping[str, Any], body: str = "") -> str:
    """A box with a title, a table of fields (text), and a body (HTML)."""
    rows = "".join(f"<tr><th>{escape(str(name))}</th><td>{escape(str(v))}</td></tr>" for name, v in fields.items())
    return f'<div style="{_STYLE}"><b>{escape(title)}</b><table>{rows}</table>{body}</div>'


def coloured(rows: Sequence[Sequence[str]]) -> str:
    """A line for each row, in which each part has another colour than its neighbours."""
    lines = []
    for i, parts in enumerate(rows):
        spans = [
            f'<span style="background:hsl({(137 * (7 * i + j)) % 360} 70% 50% / 0.25)">{escape(part[:_MAX_CHARS])}'
            f"{'…' if len(part) > _MAX_CHARS else ''}</span>"
            for j, part in enumerate(parts)
        ]
        lines.append(f'<div style="white-space:pre-wrap;margin:2px 0">{"".join(spans)}</div>')
    return "".join(lines)
