"""Datasets of the hub by name, `hf://datasets/NAME[/CONFIG][:SPLIT][@REVISION]`: which files are a split.

As `datasets` decides it: by the configurations of the repository's card, else by names (`data/SPLIT-00000-of-00009.*`;
a directory named for a split; a file named for one; else all files are `train`). Files that a card names by globs are
listed as they are read, so that a repository of 25,000 files opens at once; without a card all files are listed.
"""

import re
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

from forebay.errors import PrepareError, PrintableUrl, UsageError, printable_url
from forebay.storage.addresses import fixed_folder, glob_matcher, is_ignored
from forebay.storage.hub import API_TRIES, HubFile, HubRepo, fetch_range, find_repo

PREFIX = "hf://datasets/"
_NAME = re.compile(r"([^/@:]+(?:/[^/@:]+)?)(?:@([^/@:]+))?(?:/([^@:]+))?(?::([^@:]+))?(?:@([^@:]+))?")
KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words that name a split in a path, delimited by its ends or by these: `- . _`, a space, a digit. As in `datasets`."""
_DELIMITER = r"[-._ 0-9]"
_METADATA = frozenset(
    ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json")
)
_SHARD = re.compile(r"^([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*$")
FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".txt": "lines", ".csv": "csv", ".tsv": "csv", ".json": "json"}
FORMATS |= {".jsonl": "jsonl", ".ndjson": "jsonl"}
"""The format of a suffix; `.json` may be JSON or JSON lines, and `.txt` has a document a line, as in `datasets`."""
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".lz4")
_NUM_SAMPLED = 10  # files whose most common suffix is the repository's


class HubName(NamedTuple):
    """The parts of a dataset's URL. The name of a directory on this machine begins with `/` or `.`."""

    name: str
    config: str | None = None
    split: str = "train"
    revision: str = "main"

    @property
    def is_local(self) -> bool:
        """Whether it is a directory on this machine."""
        return self.name.startswith(("/", "."))


@dataclass(eq=False)
class HubSplit:
    """The files of one split at one commit, listed as they are requested, by path within each page of the hub's
    listing. `url` names them for good, with configuration and commit."""

    repo: HubRepo
    config: str
    split: str
    _unlisted: Iterator[HubFile]
    _listed: list[HubFile] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"{PREFIX}{self.repo.name}{'/' if self.config else ''}{self.config}:{self.split}@{self.repo.commit}"

    def file(self, index: int) -> HubFile | None:
        """The file of that number, None after the last."""
        self._listed += islice(self._unlisted, max(0, index + 1 - len(self._listed)))
        return self._listed[index] if index < len(self._listed) else None

    def location(self, index: int) -> PrintableUrl:
        """The URL of the file of that number."""
        return self.repo.file_url(self._listed[index].path)

    def files(self) -> list[HubFile]:
        """All files; the whole listing is requested."""
        self._listed += self._unlisted
        return self._listed


def parse_url(url: str) -> HubName:
    """The parts of `hf://datasets/NAME[@REVISION][/CONFIG][:SPLIT][@REVISION]`, with or without the prefix.

    A name has one slash, so the configuration begins after the second one. A revision with a slash is quoted (%2F)
    where it stands before the configuration.
    """
    rest = url.removeprefix(PREFIX)
    if rest.startswith(("/", ".")):
        name, colon, split = rest.rpartition(":")
        return HubName(name, None, split) if colon else HubName(rest)
    match = _NAME.fullmatch(rest.strip("/"))
    if match is None or (match[2] and match[5]):
        raise PrepareError(f"{printable_url(url)}: expected {PREFIX}NAME[/CONFIG][:SPLIT][@REVISION]. Check the input.")
    revision = urllib.parse.unquote(match[2]) if match[2] else match[5] or "main"
    return HubName(match[1], match[3], match[4] or "train", revision)


def find_split(url: str, *, tries: int = API_TRIES, repo: HubRepo | None = None) -> HubSplit | None:
    """The split that a URL names; None if only the package `datasets` reads its files.

    Sends the hub two or three requests, and one for each 1000 files if the card names none.
    """
    name = parse_url(url)
    if name.is_local or re.search(r"[\[+]", name.split):
        return None
    repo = repo or find_repo("dataset", name.name, name.revision, tries=tries)
    matches, config = _find_files(repo, name.config, name.split)
    if matches is None:
        return None
    files = HubSplit(repo, config, name.split, _of_one_format(matches))
    first = files.file(0)
    if first is None:
        raise PrepareError(
            f"{repo.label}: expected files of split {name.split!r}, got none that is data ({files.url}). Check the "
            "dataset's page."
        )
    if not format_of(first.path):
        script = f"{repo.name.rpartition('/')[2]}.py"
        if any(file.path == script for file in repo.files(recursive=False)):
            raise PrepareError(
                f"{repo.label}: expected data files, got a loading script ({script}), which is not run here, nor by "
                "the package datasets since version 4. Take the copy that the hub made of it, if it has one: "
                f"{repo.name}@refs%2Fconvert%2Fparquet; or another repository of the same data."
            )
        return None
    if repo.gated:  # An error now, not at the first batch.
        list(fetch_range(repo.file_url(first.path), 0, min(1, first.size)))
    return files


def format_of(path: str) -> str:
    """The format of a file by its suffix, before that of a compression; "" if it is none of ours."""
    return FORMATS.get(_suffix(path), "")


def _find_files(repo: HubRepo, config: str | None, split: str) -> tuple[Iterator[HubFile] | None, str]:
    """The files of a split, and the configuration that was chosen ("" if the repository has none).

    None in place of the files: they are outside the hub. `config`: a configuration of the card, or a folder or glob of
    files; None: the card's default.
    """
    configs = _configs(repo.card)
    if config is not None and config not in configs:
        if _suffix(config) or fixed_folder(config) is not None:
            return _list_matches(repo, [config]), config
        if "/" in config or next(repo.files(config), None) is not None:
            return _list_by_names(repo, config, split), config
    chosen = _choose_config(repo, configs, config)
    settings = configs.get(chosen, {})
    folder = str(settings.get("data_dir") or "").strip("/")
    if "data_files" not in settings:
        return _list_by_names(repo, folder, split), chosen if chosen in configs else ""
    splits = _data_files(settings["data_files"])
    _check_split(repo, split, splits, chosen)
    if any("://" in path for path in splits[split]):
        return None, chosen
    return _list_matches(repo, [f"{folder}/{path}" if folder else path for path in splits[split]]), chosen


def _list_matches(repo: HubRepo, globs: list[str]) -> Iterator[HubFile]:
    """The data files of all globs, once each, in order; pages of the listing are requested as they are needed."""
    matchers = [glob_matcher(glob) for glob in globs]

    def files_of(number: int) -> Iterator[HubFile]:
        above = fixed_folder(globs[number])
        folder = globs[number].rpartition("/")[0] if above is None else above
        below = globs[number].removeprefix(folder).removeprefix("/")
        for file in repo.files(folder, recursive="/" in below or "**" in below):
            is_first = not any(matches(file.path) for matches in matchers[:number])
            if is_first and matchers[number](file.path) and _basename(file.path) not in _METADATA:
                yield file

    return chain.from_iterable(map(files_of, range(len(globs))))


def _list_by_names(repo: HubRepo, base: str, split: str) -> Iterator[HubFile]:
    """The split by the names of files and folders; the first rule that any file follows holds for all."""
    files = [f for f in repo.files(base) if not is_ignored(f.path) and _basename(f.path) not in _METADATA]
    data = f"{base}/data/" if base else "data/"
    rules: tuple[Callable[[str], list[str]], ...] = (
        lambda path: _SHARD.findall(path.removeprefix(data)),
        lambda path: _by_keyword(path.removeprefix(base).split("/")[:-1], rf"({_DELIMITER}.*)?"),
        lambda path: _by_keyword(path.split("/")[-1:], rf"{_DELIMITER}.*"),
    )
    for rule in rules:
        splits = [rule(file.path) for file in files]
        if names := {name for each in splits for name in each}:
            _check_split(repo, split, names)
            return (file for file, each in zip(files, splits) if split in each)
    _check_split(repo, split, {"train"})
    return iter(files)


def _of_one_format(files: Iterator[HubFile]) -> Iterator[HubFile]:
    """The files with the suffix that most of the first ten have; the others describe them."""
    first = list(islice(files, _NUM_SAMPLED))
    if first:
        common = Counter(_family(file.path) for file in first).most_common(1)[0][0]
        yield from (file for file in chain(first, files) if _family(file.path) == common)


def _basename(path: str) -> str:
    return path.rpartition("/")[2]


def _suffix(path: str) -> str:
    name = _basename(path).lower()
    stem, dot, last = name.rpartition(".")
    if dot and f".{last}" in _COMPRESSIONS:
        stem, dot, last = stem.rpartition(".")
    return f".{last}" if dot and stem else ""


def _family(path: str) -> str:
    """Which suffixes belong together: those of a format, of JSON and JSON lines, or the suffix itself."""
    return {"jsonl": "json"}.get(format_of(path), format_of(path)) or _suffix(path)


def _configs(card: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    configs = [config for config in _as_list(card.get("configs")) if isinstance(config, Mapping)]
    return {str(config["config_name"]): config for config in configs if config.get("config_name")}


def _choose_config(repo: HubRepo, configs: Mapping[str, Mapping[str, Any]], config: str | None) -> str:
    if config is not None:
        if config in configs or (not configs and config == "default"):
            return config
        names = ", ".join(sorted(configs)) or "default alone"
        raise UsageError(f"{repo.label}: expected a configuration among {names}, got {config!r}. Choose one of them.")
    marked = [name for name, settings in configs.items() if settings.get("default") is True]
    if marked or "default" in configs or len(configs) <= 1:
        return (marked or (["default"] if "default" in configs else list(configs)) or ["default"])[0]
    raise UsageError(
        f"{repo.label}: expected a configuration, as it has several and no default: {', '.join(sorted(configs))}. Name "
        f"one: hf:{repo.name}/{min(configs)}."
    )


def _data_files(entry: Any) -> dict[str, list[str]]:
    if isinstance(entry, Mapping):
        return {str(split): _globs(paths) for split, paths in entry.items()}
    splits = [item for item in _as_list(entry) if isinstance(item, Mapping)]
    return {str(item.get("split", "train")): _globs(item.get("path")) for item in splits} or {"train": _globs(entry)}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _globs(value: Any) -> list[str]:
    return [str(path).removeprefix("./") for path in _as_list(value) if path]


def _by_keyword(steps: list[str], end: str) -> list[str]:
    """The splits of which a keyword, then `end`, occurs in any of these names."""
    patterns = {split: rf"(.*{_DELIMITER})?({'|'.join(words)}){end}" for split, words in KEYWORDS.items()}
    return [split for split, pattern in patterns.items() if any(re.fullmatch(pattern, step) for step in steps)]


def _check_split(repo: HubRepo, split: str, names: Iterable[str], config: str = "") -> None:
    if split not in names:
        suffix = f" (configuration {config!r})" if config else ""
        raise UsageError(
            f"{repo.label}{suffix}: expected a split among {', '.join(sorted(names))}, got {split!r}. Name one: "
            f"hf:NAME:{min(names)}."
        )
