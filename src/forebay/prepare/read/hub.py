"""Datasets of the Hugging Face hub as sources: file by file, or as one piece that the package `datasets` reads.

`forebay.storage.hub_splits` says which files a name stands for. Parquet, JSON, CSV, Arrow and text are read like local
files. For all else (pictures, archives, a directory of a saved dataset) `datasets` (extra `hf`) is imported on use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forebay.errors import MissingPackageError, PrepareError
from forebay.formats.base import Format
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
from forebay.formats.records import Record, to_record
from forebay.storage.compression import COMPRESSIONS
from forebay.storage.hub import missing_packages
from forebay.storage.hub_copies import HubCopy
from forebay.storage.hub_splits import PREFIX, HubSplit, format_of, parse_url


def source_at(dataset: HubSplit | HubCopy, index: int) -> InputFile | None:
    """The file of that number as a source, None after the last; its format is "" if its first bytes have to say."""
    file = dataset.file(index)
    if file is None:
        return None
    compression = COMPRESSIONS.get("." + file.path.lower().rpartition(".")[2], "")
    format = format_of(file.path)
    return InputFile(
        dataset.location(index), file.path, "" if format == "json" else format, compression, file.size, file.version
    )


def library_source(url: str) -> InputFile:
    """A dataset of the hub as one source, which the package `datasets` reads. Sends no request."""
    if not url.startswith(PREFIX) or not url.removeprefix(PREFIX).strip("/"):
        raise PrepareError(f"{url}: expected {PREFIX}NAME[/CONFIG][:SPLIT]. Check the input.")
    return InputFile(url, url.removeprefix(PREFIX).strip("/"), "hub", "", 0, "")


class Hub(Format):
    """A dataset that the package `datasets` reads."""

    name = "hub"

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        url = split.files[0].path
        index = -1
        try:
            for index, row in enumerate(open_with_library(url)):
                yield to_record(index, row, options) if isinstance(row, Mapping) else Record(index, problem="no row")
        except (PrepareError, MissingPackageError):
            raise
        except Exception as error:  # file systems raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            raise PrepareError(
                f"{url}: cannot read input after {index + 1} rows: {reason}. Check name and network."
            ) from error


def open_with_library(url: str) -> Any:
    """The dataset of a URL as the package `datasets` streams it."""
    try:
        import datasets
    except ImportError as error:
        raise missing_packages(f"{url} has files that are not read without them") from error
    name = parse_url(url)
    revision = None if name.is_local else name.revision
    return datasets.load_dataset(name.name, name.config, split=name.split, revision=revision, streaming=True)


HUB = Hub()
