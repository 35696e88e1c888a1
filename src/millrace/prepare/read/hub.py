"""Datasets of the Hugging Face hub, streamed: `hf://datasets/NAME[/CONFIG][:SPLIT]`, or a directory as NAME.

Hides: the library, which is imported when a dataset is read and not before (extra `hf`). One dataset is one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from millrace.errors import PrepareError
from millrace.prepare.documents import Record
from millrace.prepare.read.base import Format, Piece, ReadOptions, Source
from millrace.prepare.read.fields import to_record

PREFIX = "hf://datasets/"


def hub_source(url: str) -> Source:
    """The source that a URL of the hub stands for; nothing is asked of the hub yet."""
    if not url.startswith(PREFIX) or not url.removeprefix(PREFIX).strip("/"):
        raise PrepareError(f"{url}: expected {PREFIX}NAME[/CONFIG][:SPLIT]. Check the input.")
    return Source(url, url.removeprefix(PREFIX).strip("/"), "hub", "", 0, "")


def parse_url(url: str) -> tuple[str, str | None, str]:
    """Name (with its owner; or a directory, if it begins with `/` or `.`), configuration, and split.

    A name has one slash, so the configuration is what follows a second one.
    """
    name, colon, split = url.removeprefix(PREFIX).rpartition(":")
    if not colon:
        name, split = split, "train"
    if name.startswith(("/", ".")):
        return name, None, split
    parts = name.strip("/").split("/", 2)
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split


def _read(piece: Piece, options: ReadOptions) -> Iterator[Record]:
    url = piece.sources[0].path
    place = -1
    try:
        for place, row in enumerate(open_hub(url)):
            yield to_record(place, row, options) if isinstance(row, Mapping) else Record(place, problem="no row")
    except PrepareError:
        raise
    except Exception as error:  # file systems raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise PrepareError(
            f"{url}: cannot read input after {place + 1} rows: {why}. Check name and network."
        ) from error


def open_hub(url: str) -> Any:
    """The dataset that a URL of the hub stands for, as the library streams it."""
    try:
        import datasets
    except ImportError as error:
        raise PrepareError(
            f"{url}: reading from the hub needs the package datasets. Install it with: pip install 'millrace[hf]'"
        ) from error
    name, config, split = parse_url(url)
    return datasets.load_dataset(name, config, split=split, streaming=True)


def _never(head: bytes) -> bool:
    return False


HUB = Format("hub", (), _never, _read)
