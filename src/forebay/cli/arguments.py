"""Argument types, and printing of results."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from forebay.cli.parser import Parser
from forebay.errors import UsageError
from forebay.storage.hosts import parse_address
from forebay.units import parse_rate, parse_size

T = TypeVar("T")


def show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print a result: an object with `--json`, else a line for each field."""
    width = max(map(len, result), default=0)
    print_result(args, result, *(f"{key:<{width}}  {plain(x)}" for key, x in result.items()))


def print_result(args: argparse.Namespace, fields: Any, *lines: str) -> None:
    """Print a result at once: as JSON with `--json`, else these lines."""
    if text := json.dumps(fields) if args.json else "\n".join(lines):
        print(text, flush=True)


def print_note(text: str) -> None:
    """Print a note on stderr."""
    print(f"forebay: {text}", file=sys.stderr, flush=True)


def plain(value: Any) -> str:
    """A value as text."""
    match value:
        case bool():
            return "yes" if value else "no"
        case None | [] | {} if not value:  # `{}` alone fits any mapping
            return "none"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        case list():
            return ", ".join(map(str, value))
        case dict():
            return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)


def validate(kind: type[T], values: Mapping[str, Any], command: str) -> T:
    """A dataclass or model of pydantic with these fields; a field of a wrong type is a UsageError."""
    from pydantic import TypeAdapter, ValidationError

    from forebay.prepare.settings import requested

    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"{command}: {'.'.join(map(str, first['loc']))}: expected {requested(first)}, got {first['input']!r:.80}."
        ) from error


def address(text: str) -> tuple[str, int]:
    """`HOST:PORT` as a pair, as of `parse_address`; port 0 is a free one."""
    return parse_address(text, 0)


@dataclass(frozen=True)
class _ArgumentType(Generic[T]):
    """A type of values, which are called `metavar` in the help."""

    metavar: str
    parse: Callable[[str], T]
    expected: str
    is_valid: Callable[[T], bool] = lambda value: True

    def __call__(self, text: str) -> T:
        try:
            value = self.parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            value = None
        if value is None or not self.is_valid(value):
            raise argparse.ArgumentTypeError(f"expected {self.expected}, got {text!r}")
        return value


size = _ArgumentType("BYTES", parse_size, "bytes: 64MiB, 1GB, 4096")
rate = _ArgumentType("RATE", parse_rate, "bytes per second: 1Gb/s (bits), 125MB/s (bytes)")
seconds = _ArgumentType("S", float, "seconds above zero", lambda value: 0 < value < math.inf)
days = _ArgumentType("N", float, "days above zero, such as 7 or 0.5", lambda value: 0 < value <= 36500)
share = _ArgumentType("SHARE", float, "a number from 0 to 1", lambda value: 0 <= value <= 1)
file = _ArgumentType("FILE", Path, "a path")
folder = _ArgumentType("DIR", Path, "a path")
percentage = _ArgumentType(
    "SHARE",
    lambda text: float(text.removesuffix("%")) / (100 if text.endswith("%") else 1),
    "a share such as 2% or 0.02",
    lambda value: 0 < value <= 1,
)
public_key = _ArgumentType("HEX", bytes.fromhex, "a public key of 64 hex digits", lambda key: len(key) == 32)
positive = _ArgumentType("N", int, "a whole number above zero", lambda value: value > 0)


def index_range(text: str) -> tuple[int, int | None]:
    """`A:B`, from A until before B; either may be left out."""
    first, colon, last = text.partition(":")
    if not colon or not all(part == "" or part.isdigit() for part in (first, last)):
        raise argparse.ArgumentTypeError(f"expected a range A:B, such as 0:100, got {text!r}")
    return int(first or 0), int(last) if last else None


def add_settings(parser: Parser, example: str) -> None:
    """Add `--set`, whose texts `forebay.toml.parse_settings` reads."""
    parser.add_list("--set", f"a setting, such as {example}; may be repeated (default: none)", "KEY=VALUE")
