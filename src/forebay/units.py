"""Parse and format sizes, rates and durations as people write them."""

import re
from typing import TypeVar

from forebay.errors import UsageError

T = TypeVar("T")
_UNITS = {"": 1, "B": 1} | {f"{u}{s}": 1 << 10 * i for i, u in enumerate("KMGT", 1) for s in ("", "IB")}
_UNITS |= {f"{u}B": 1000**i for i, u in enumerate("KMGT", 1)}


def parse_size(text: str) -> int:
    """Bytes from `64MiB`, `1 GB` or `4096`; above zero."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not match or match.group(2).upper() not in _UNITS:
        raise UsageError(f"{text!r} is not a size: try 64MiB, 1GB or 4096")
    size = int(float(match.group(1)) * _UNITS[match.group(2).upper()])
    if size <= 0:
        raise UsageError(f"{text!r}: a size must be above zero")
    return size


def as_size(size: T | str) -> T | int:
    """Return a number of bytes, which may be text as of `parse_size`."""
    return parse_size(size) if isinstance(size, str) else size


def parse_sizes(settings: object) -> None:
    """Replace texts of a dataclass's fields named `x_bytes` or `x_bytes_per_s` by numbers of bytes."""
    for name, value in list(vars(settings).items()):
        if "_bytes" in name and isinstance(value, str):
            try:
                object.__setattr__(settings, name, parse_size(value))
            except UsageError as error:
                raise UsageError(f"{name}: {error}.") from None


def parse_rate(text: str) -> float:
    """Bytes per second from `1Gb/s`, `10 Gbit/s`, `179MB/s` or `100 MiB/s`; a small b is a bit. Above zero."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)(b|bit|B)(?:/s|ps)", text.strip())
    if not match or (match.group(3) and not match.group(2)):
        raise UsageError(f"{text!r} is not a rate: try 1Gb/s (bits), 125MB/s (bytes) or 100MiB/s")
    value, prefix, binary, unit = match.groups()
    power = " KMGT".index(prefix.upper()) if prefix else 0
    rate: float = float(value) * (1024 if binary else 1000) ** power / (1 if unit == "B" else 8)
    if rate <= 0:
        raise UsageError(f"{text!r}: a rate must be above zero")
    return rate


def format_bytes(num_bytes: float) -> str:
    """`1.2 GB`, `215 GB`, `12 B`: decimal, three digits."""
    for unit, power in (("PB", 15), ("TB", 12), ("GB", 9), ("MB", 6), ("kB", 3)):
        if num_bytes >= 10**power:
            return f"{num_bytes / 10**power:.3g} {unit}" if num_bytes < 10 ** (power + 3) else f"{num_bytes:.3g} B"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """`151 k`, `1.2 M`, `12`: decimal, three digits."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= 0.9995 * size:
            return f"{count / size:.3g} {prefix}"
    return f"{count:.3g}"


def numbered(number: int, noun: str) -> str:
    """`1 slice`, `2,000 slices`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_rate(bytes_per_s: float) -> str:
    """`125 MB/s (1 Gb/s)`."""
    return f"{format_bytes(bytes_per_s)}/s ({bytes_per_s * 8 / 1e9:.3g} Gb/s)"


def format_seconds(seconds: float) -> str:
    """`1.5 h`, `28.7 min`, `3.2 s`, `12 ms`."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            count = seconds / size
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1e3:.3g} ms"
