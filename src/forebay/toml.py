"""Read TOML files; every fault is a UsageError that names the file and the line."""

import re
import tomllib
from pathlib import Path
from typing import Any

from forebay.errors import UsageError


def read_toml(path: str | Path) -> dict[str, Any]:
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


def parse_toml(text: str, file: object) -> dict[str, Any]:
    """Tables of a TOML text; errors name `file`. Raises UsageError if it cannot be parsed."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        match = re.search(r" \(at line (\d+), column (\d+)\)$", str(error))
        line = match.group(1) if match else str(text.count("\n", 0, len(text.rstrip())) + 1)
        reason = str(error)[: match.start()] if match else str(error).replace(" (at end of document)", " at the end")
        raise UsageError(f"{file}:{line}: expected TOML: {reason}.") from error
