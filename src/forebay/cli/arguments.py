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


def add_limits(parser: argparse.ArgumentParser) -> None:
    """The option for what one member, and one organisation, may take of a server."""
    parser.add_argument(
        "--limit", action="append", default=[], metavar="NAME=NUMBER",
        help="of members: connections_per_peer, requests_per_peer, requests_per_s, bytes_per_s, "
        "connections_per_organisation … (docs/network.md has all and their defaults); may be repeated",
    )  # fmt: skip


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
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


def add_from_urls(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that allows reading from where peers point to, outside the network."""
    parser.add_argument(
        "--from-urls", choices=["public", "any"],
        help="read also from URLs that data nodes stand for: public (https and public buckets, never with credentials "
        "of yours), or any (also http and private addresses); default: none",
    )  # fmt: skip
