"""Numbers as text: counts, shares, bars of characters; and a recipe as TOML."""

import json
from collections.abc import Mapping
from typing import Any

_EIGHTHS = " ▏▎▍▌▋▊▉"


def count(value: float) -> str:
    """All digits, in groups: `12,345`."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Three significant digits: `12.3 k`, `4.56 M`; all of it below 10 000."""
    if abs(value) < 10_000:
        return count(value)
    units, step = ("", " k", " M", " G", " T", " P"), 0
    while abs(value) >= 999.5 and step < len(units) - 1:
        value /= 1000
        step += 1
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{units[step]}"


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


def bar(fraction: float, width: int) -> str:
    """A bar of `width` characters, of which the fraction is filled, to an eighth of a character."""
    eighths = round(8 * width * min(1.0, max(0.0, fraction)))
    if fraction > 0:
        eighths = max(1, eighths)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def toml(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """A nested configuration as TOML."""
    blocks = [_toml_block(table, "")]
    for key, value in table.items():
        full_path = (*path, key)
        name = ".".join(map(_key, full_path))
        if isinstance(value, Mapping):
            own = _toml_block(value, f"[{name}]\n")
            blocks += [own if own.count("\n") > 1 or not value else "", toml(_tables(value), full_path)]
        elif _nested(value):
            blocks += [_toml_block(item, f"[[{name}]]\n") + toml(_tables(item), full_path) for item in value]
    return "\n".join(block for block in blocks if block)


def _nested(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)
    )


def _tables(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if _nested(value)}


def _toml_block(table: Mapping[str, Any], head: str) -> str:
    pairs = [(key, value) for key, value in table.items() if value is not None and not _nested(value)]
    return head + "".join(f"{_key(key)} = {_toml_value(value)}\n" for key, value in pairs)


def _key(key: str) -> str:
    return key if key.replace("-", "_").isidentifier() and key.isascii() else json.dumps(key, ensure_ascii=False)


def _toml_value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_toml_value(item)}" for key, item in value.items()) + " }"
    return (
        json.dumps(value, ensure_ascii=False) if isinstance(value, (str, bool, int, float)) else json.dumps(str(value))
    )
