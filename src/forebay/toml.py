"""Read TOML files; every fault is a UsageError that names the file and the line."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forebay.base import Json
from forebay.errors import UsageError


def read_toml(path: str | Path) -> Json:
    """Tables of a TOML file. Raises UsageError if it cannot be read or parsed."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}. Check the path.") from error
    return parse_toml(decode(data, path), path)


def decode(data: bytes, file: object) -> str:
    """TOML bytes as text with LF line ends, for `parse_toml`. Raises UsageError if they are not UTF-8."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: expected TOML in UTF-8: {error.reason} at byte {error.start}.") from error


def parse_toml(text: str, file: object) -> Json:
    """Tables of a TOML text; errors name `file`. Raises UsageError if it cannot be parsed."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        match = re.search(r" \(at line (\d+), column (\d+)\)$", str(error))
        line = match.group(1) if match else str(text.count("\n", 0, len(text.rstrip())) + 1)
        reason = str(error)[: match.start()] if match else str(error).replace(" (at end of document)", " at the end")
        raise UsageError(f"{file}:{line}: expected TOML: {reason}.") from error


def parse_settings(texts: Iterable[str]) -> Json:
    """`KEY=VALUE` texts as nested tables: dots separate keys; a value is TOML, or else a string."""
    tables: Json = {}
    for text in texts:
        keys, equals, value = text.partition("=")
        if not equals or not keys.strip():
            raise UsageError(f"--set: expected KEY=VALUE, such as gopher_quality.min_words=20, got {text!r}.")
        try:
            setting: Any = tomllib.loads(f"value = {value}")["value"]
        except (tomllib.TOMLDecodeError, RecursionError):
            setting = value.strip()
        *path, last = keys.strip().split(".")
        table = tables
        for key in path:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise UsageError(f"--set: expected one kind of value for {key!r}, got {text!r}.")
        table[last] = setting
    return tables
