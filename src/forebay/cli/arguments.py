"""Kinds of argument, and how results are shown."""

import argparse
import json
from typing import Any

from forebay.errors import UsageError
from forebay.sizes import parse_rate, parse_size


def show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    width = max(map(len, result), default=0)
    for key, value in result.items():
        print(f"{key:<{width}}  {plain(value)}")


def plain(value: Any) -> str:
    """A value as a person reads it."""
    match value:
        case bool():
            return "yes" if value else "no"
        case None | []:
            return "none"
        case {} if not value:  # The pattern alone fits any mapping.
            return "none"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        case dict():
            return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)


def address(text: str) -> tuple[str, int]:
    """`HOST:PORT` as a pair; IPv6 in brackets, and without them in the pair."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare) != (bare != host) or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"{text!r} is not an address: expected HOST:PORT, such as 127.0.0.1:7410 or [::1]:7410")
    return bare, int(port)


def size(text: str) -> int:
    """Bytes from `64MiB`, `1GB`, `4096` …; decimal and binary units."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rate(text: str) -> float:
    """Bytes per second from `1Gb/s` (bits) or `125MB/s` (bytes)."""
    try:
        return parse_rate(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds(text: str) -> float:
    """Seconds above zero."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a time above zero")
    return value


def positive(text: str) -> int:
    return whole_number(text, 1)


def whole_number(text: str, least: int = 0) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is not {'above' if least else 'at least'} zero")
    return value
