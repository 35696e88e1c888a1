"""Argument types, and printing of results."""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar

from forebay.errors import UsageError
from forebay.units import parse_rate, parse_size

T = TypeVar("T")


def show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    width = max(map(len, result), default=0)
    for key, value in result.items():
        print(f"{key:<{width}}  {plain(value)}")


def plain(value: Any) -> str:
    """A value as text."""
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


def _kind(
    parse: Callable[[str], T], expected: str, fits: Callable[[T], bool] = lambda value: True
) -> Callable[[str], T]:
    """An argument type: the result of `parse`, if `fits` accepts it."""

    def kind(text: str) -> T:
        try:
            value = parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return kind


size = _kind(parse_size, "bytes: 64MiB, 1GB, 4096")
rate = _kind(parse_rate, "bytes per second: 1Gb/s (bits), 125MB/s (bytes)")
seconds = _kind(float, "seconds above zero", lambda value: 0 < value < math.inf)
days = _kind(float, "days above zero, such as 7 or 0.5", lambda value: 0 < value <= 36500)
share = _kind(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)
positive = _kind(int, "a whole number above zero", lambda value: value > 0)
whole_number = _kind(int, "a whole number of at least zero", lambda value: value >= 0)


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the option for limits of members and organisations."""
    parser.add_argument(
        "--limit", action="append", default=[], metavar="NAME=NUMBER",
        help="limits of members: connections_per_peer, requests_per_peer, requests_per_s, bytes_per_s, "
        "connections_per_organisation … (docs/reference/http-api.md has all and their defaults); may be repeated",
    )  # fmt: skip


def add_from_urls(parser: argparse.ArgumentParser) -> None:
    """Add the option that allows reading from URLs that peers name."""
    parser.add_argument(
        "--from-urls", choices=["public", "any"],
        help="also read from URLs that data nodes name: public (https and public buckets, never with your "
        "credentials), or any (also http and private addresses); default: none",
    )  # fmt: skip
