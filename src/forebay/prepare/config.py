"""Layers of settings: a shipped recipe, a user's file, the command line; each laid over the one before.

Hides: on which line of its file a setting stands, which tomllib does not say.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.toml import decode, parse_toml

Keys = tuple[str | int, ...]
"""Keys from the outermost table in; a number is that of a table in an array of tables."""

_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|'
    r"'''.*?'{3,5}|"
    r'"(?:[^"\\\n]|\\.)*"|'
    r"'[^'\n]*'|#[^\n]*|[^\s\[\]{}=\"'#]+|.",
    re.DOTALL,
)
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|[^\s.\[\]"\']+')


@dataclass(frozen=True)
class Layer:
    """One source of settings: its tables, and the line of each key. `file` is "" for the command line."""

    file: str
    tables: dict[str, Any]
    lines: dict[Keys, int]


def parse_layer(data: bytes, file: str) -> Layer:
    """The settings in a TOML file."""
    text = decode(data, file)
    return Layer(file, parse_toml(text, file), dict(key_lines(text)))


def key_lines(text: str) -> Iterator[tuple[Keys, int]]:
    """Where each key of a TOML document stands. Keys of inline tables have the line of the table."""
    table: Keys = ()
    numbers: dict[Keys, int] = {}
    head, in_value, depth, line = "", False, 0, 1
    for token in _TOKEN.findall(text + "\n"):
        if in_value:
            depth += (token in ("[", "{")) - (token in ("]", "}"))
        elif token == "=":
            yield (*table, *_parts(head)), line
            in_value = True
        elif token[0] != "#":
            head += token
        if token == "\n" and not depth:
            if not in_value and head.strip():
                table = _table(head.strip(), numbers)
                yield table, line
            head, in_value = "", False
        line += token.count("\n")


def _table(header: str, numbers: dict[Keys, int]) -> Keys:
    """The path of `[a.b]`, or of the next `[[a.b]]`; a table within one of an array is in the last of it."""
    path: Keys = ()
    parts = _parts(header)
    for part in parts[:-1]:
        path = (*path, part)
        path = (*path, numbers[path]) if path in numbers else path
    path = (*path, parts[-1])
    if header.startswith("[["):
        numbers[path] = numbers.get(path, -1) + 1
        return (*path, numbers[path])
    return path


def _parts(keys: str) -> Keys:
    return tuple(part.strip("\"'") for part in _PART.findall(keys))


def place_of(layers: Sequence[Layer], path: Keys) -> str:
    """`file:line: ` of the setting that came last, or of the nearest table around it; "" on the command line."""
    for length in range(len(path), 0, -1):
        for layer in reversed(layers):
            if _holds(layer.tables, path[:length]):
                lines = (layer.lines[path[:known]] for known in range(length, 0, -1) if path[:known] in layer.lines)
                line = next(lines, None)
                return "" if not layer.file else f"{layer.file}:{line}: " if line else f"{layer.file}: "
    return ""


def _holds(tables: Any, path: Keys) -> bool:
    for key in path:
        if isinstance(key, int):
            if not isinstance(tables, list) or key >= len(tables):
                return False
        elif not isinstance(tables, dict) or key not in tables:
            return False
        tables = tables[key]
    return True


def merge(below: Any, above: Any) -> Any:
    """Nested tables with those of `above` laid over them, key by key."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {**below, **{key: merge(below.get(key), value) for key, value in above.items()}}
    return above
