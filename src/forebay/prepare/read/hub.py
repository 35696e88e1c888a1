"""Datasets of the Hugging Face hub: `hf://datasets/NAME[/CONFIG][:SPLIT][@REVISION]`, or a directory as NAME.

Hides: how a name becomes files. Parquet, JSON, CSV, Arrow and text are read by this package alone, a file at a time, at
exact places; CONFIG may also be a folder or a glob of files. For all else (pictures, archives, a directory here) there
is the hub's library, which is imported then and not before (extra `hf`), and one dataset is one piece.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from forebay.errors import MissingPackageError, PrepareError
from forebay.formats.base import Format
from forebay.formats.inputs import InputFile as Source
from forebay.formats.inputs import InputSplit, ReadOptions
from forebay.formats.records import Record, to_record
from forebay.prepare.read.hub_api import TRIES, HubFile, Repo, find_repo, list_pages
from forebay.prepare.read.hub_files import fetch_range, file_url
from forebay.prepare.read.hub_rules import kind_of, matches, of_one_kind, parts_of
from forebay.storage.compression import COMPRESSIONS

PREFIX = "hf://datasets/"
_NAME = re.compile(r"([^/@:]+(?:/[^/@:]+)?)(?:@([^/@:]+))?(?:/([^@:]+))?(?::([^@:]+))?(?:@([^@:]+))?")


class HubName(NamedTuple):
    """What a URL asks for; a directory here has a name that begins with `/` or `.`."""

    name: str
    config: str | None = None
    split: str = "train"
    revision: str = "main"

    @property
    def is_local(self) -> bool:
        """Whether it is a directory."""
        return self.name.startswith(("/", "."))


class HubDataset:
    """The files of one split at one commit, in the order of their paths (beyond a page of 1000: by pages of the hub),
    listed as they are wanted. `url` names it for good, with its configuration and commit."""

    def __init__(self, repo: Repo, config: str, split: str, files: Iterator[HubFile]) -> None:
        self.repo, self.config, self.split = repo, config, split
        self.url = f"{PREFIX}{repo.name}{'/' if config else ''}{config}:{split}@{repo.commit}"
        self._listed: list[HubFile] = []
        self._more = files

    def file(self, index: int) -> HubFile | None:
        """The file of that number, None after the last; pages of the listing are asked for up to it."""
        while len(self._listed) <= index:
            found = next(self._more, None)
            if found is None:
                return None
            self._listed.append(found)
        return self._listed[index]

    def files(self) -> list[HubFile]:
        self._listed += self._more
        return self._listed

    def source(self, index: int) -> Source | None:
        """The file of that number as a source; its format is "" if its first bytes have to say."""
        found = self.file(index)
        if found is None:
            return None
        return hub_file_source(found, file_url(self.repo.kind, self.repo.name, self.repo.commit, found.path))


def hub_file_source(file: HubFile, path: str) -> Source:
    """A file of the hub as a source that lies at a path or URL."""
    compression = COMPRESSIONS.get("." + file.path.lower().rpartition(".")[2], "")
    kind = kind_of(file.path)
    return Source(path, file.path, "" if kind == "json" else kind, compression, file.size, file.version)


def parse_url(url: str) -> HubName:
    """The parts of `hf://datasets/NAME[@REVISION][/CONFIG][:SPLIT][@REVISION]`, with or without the prefix.

    A name has one slash, so the configuration is what follows a second one. A revision with a slash is quoted (%2F)
    where it stands before the configuration.
    """
    rest = url.removeprefix(PREFIX)
    if rest.startswith(("/", ".")):
        name, colon, split = rest.rpartition(":")
        return HubName(name, None, split) if colon else HubName(rest)
    found = _NAME.fullmatch(rest.strip("/"))
    if found is None or (found[2] and found[5]):
        raise PrepareError(f"{url}: expected {PREFIX}NAME[/CONFIG][:SPLIT][@REVISION]. Check the input.")
    revision = urllib.parse.unquote(found[2]) if found[2] else found[5] or "main"
    return HubName(found[1], found[3], found[4] or "train", revision)


def find_dataset(url: str, *, tries: int = TRIES) -> HubDataset | None:
    """The dataset that a URL stands for; None if it is not one that is read without the hub's library.

    Asks the hub two to four times, whatever the size.
    """
    name = parse_url(url)
    if name.is_local or re.search(r"[\[+]", name.split):
        return None
    repo = find_repo("datasets", name.name, name.revision, tries=tries)
    parts, config = parts_of(repo, name.config, name.split)
    if any("://" in part.folder for part in parts):
        return None
    found = HubDataset(repo, config, name.split, of_one_kind(matches(repo, parts)))
    first = found.file(0)
    if first is None:
        raise PrepareError(
            f"{repo.what}: expected files of split {name.split!r}, got none that is data ({found.url}). Check the "
            "dataset's page."
        )
    if not kind_of(first.path):
        _refuse_script(repo)
        return None
    if repo.gated:  # said now, not at the first batch
        url = file_url(repo.kind, repo.name, repo.commit, first.path)
        fetch_range(url, 0, min(1, first.size), len)
    return found


def _refuse_script(repo: Repo) -> None:
    """PrepareError if the data of a repository are what a Python program of its own makes."""
    script = f"{repo.name.rpartition('/')[2]}.py"
    if any(file.path == script for files, _ in list_pages(repo, "", recursive=False) for file in files):
        raise PrepareError(
            f"{repo.what}: expected data files, got a loading script ({script}), which is not run here, nor by the "
            "package datasets since version 4. Take the copy that the hub made of it, if it has one: "
            f"{repo.name}@refs%2Fconvert%2Fparquet; or another repository of the same data."
        )


def hub_source(url: str) -> Source:
    """The source that a URL of the hub stands for where the hub's library reads it; nothing is asked of the hub yet."""
    if not url.startswith(PREFIX) or not url.removeprefix(PREFIX).strip("/"):
        raise PrepareError(f"{url}: expected {PREFIX}NAME[/CONFIG][:SPLIT]. Check the input.")
    return Source(url, url.removeprefix(PREFIX).strip("/"), "hub", "", 0, "")


class Hub(Format):
    """A dataset that the hub's library reads."""

    name = "hub"

    def read_text(self, split: InputSplit, options: ReadOptions) -> Iterator[Record]:
        url = split.files[0].path
        index = -1
        try:
            for index, row in enumerate(open_hub(url)):
                yield to_record(index, row, options) if isinstance(row, Mapping) else Record(index, problem="no row")
        except (PrepareError, MissingPackageError):
            raise
        except Exception as error:  # file systems raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            raise PrepareError(
                f"{url}: cannot read input after {index + 1} rows: {reason}. Check name and network."
            ) from error


def open_hub(url: str) -> Any:
    """The dataset that a URL of the hub stands for, as the hub's library streams it."""
    try:
        import datasets
    except ImportError as error:
        raise missing_packages(f"{url} has files that are not read without them") from error
    name = parse_url(url)
    revision = None if name.is_local else name.revision
    return datasets.load_dataset(name.name, name.config, split=name.split, revision=revision, streaming=True)


def missing_packages(why: str) -> MissingPackageError:
    """What to raise where the hub's own libraries are needed."""
    return MissingPackageError(
        f"HuggingFace datasets and transformers are required. Install with: pip install datasets transformers ({why}.)"
    )


HUB = Hub()
