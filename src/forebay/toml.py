"""TOML files, read in one way: whatever is wrong with one is a UsageError that names the file and the line."""

import re
import tomllib
from pathlib import Path
from typing import Any

from forebay.errors import UsageError


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a file. Raises UsageError if it cannot be read or is not TOML."""
    return parse_toml(read_text(path), path)


def read_text(path: str | Path) -> str:
    """A file's text, with LF alone, for `parse_toml`. Raises UsageError if it cannot be read or is not UTF-8."""
    try:
        return decode(Path(path).read_bytes(), path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}. Check the path.") from error


def decode(data: bytes, file: object) -> str:
    """The same of bytes."""
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: expected TOML in UTF-8: {error.reason} at byte {error.start}.") from error


def parse_toml(text: str, file: object) -> dict[str, Any]:
    """The tables of a text; `file` is named in errors. Raises UsageError if it is not TOML."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        where = re.search(r" \(at line (\d+), column (\d+)\)$", str(error))
        line = where.group(1) if where else str(text.count("\n", 0, len(text.rstrip())) + 1)
        reason = str(error)[: where.start()] if where else str(error).replace(" (at end of document)", " at the end")
        raise UsageError(f"{file}:{line}: expected TOML: {reason}.") from error
