"""Which files of a repository are a split: by its card's configurations, else by the hub's own rules about names.

Hides: globs, the rules (`data/SPLIT-00000-of-00009.*`; a directory named for a split; a file named for one; else all
are `train`), and which files are no data. Everything is decided from one or two pages of the listing, so that a
repository of 25 000 files is begun at once; only a split that these pages do not show has the rest listed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

from forebay.errors import UsageError
from forebay.prepare.read.hub_api import HubFile, Repo, list_pages
from forebay.storage.compression import COMPRESSIONS

KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""What names a split in a path: between the path's ends or these: `- . _`, a space, a digit. As `datasets` has it."""
_BETWEEN = r"[-._ 0-9]"
_NO_DATA = frozenset(
    ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json")
)
_SHARD = re.compile(r"([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
KINDS = {".parquet": "parquet", ".arrow": "arrow", ".txt": "lines", ".csv": "csv", ".tsv": "csv", ".json": "json"}
KINDS |= {".jsonl": "jsonl", ".ndjson": "jsonl"}
"""The format that a suffix stands for; `.json` may be either of two, and `.txt` has a document a line, as there."""
_FAMILY = {"jsonl": "json"}
_JUDGED_BY = 10  # files whose most common suffix is the repository's


@dataclass(frozen=True)
class Part:
    """Files below a folder whose path fits."""

    folder: str
    recursive: bool
    fits: Callable[[str], object]


@dataclass(frozen=True)
class Glob:
    """`Part.fits` of a glob: `*` and `?` do not cross a slash, `**` does; hidden files only if it names them."""

    pattern: str

    def __call__(self, path: str) -> bool:
        hidden = _is_hidden(path) and not _is_hidden(self.pattern)
        return not hidden and re.fullmatch(_expression(self.pattern), path) is not None


def kind_of(path: str) -> str:
    """The format of a file by its suffix, without the compression's; "" if it is none of ours."""
    return KINDS.get(_suffix(path), "")


def parts_of(repo: Repo, config: str | None, split: str) -> tuple[tuple[Part, ...], str]:
    """Where the files of a split are, and the configuration that was chosen ("" if the repository has none).

    `config`: a configuration of the card, or a folder or glob of files; None: the card's default.
    """
    configs = _configs(repo.card)
    if config is not None and config not in configs and _is_path(config):
        if _suffix(config) or re.search(r"[*?\[]", config):
            return (_glob(config),), config
        return _by_rules(repo, config, split), config
    chosen = _choose(repo, configs, config)
    told = configs.get(chosen, {})
    base = str(told.get("data_dir") or "").strip("/")
    if "data_files" not in told:
        return _by_rules(repo, base, split), chosen if chosen in configs else ""
    splits = _data_files(told["data_files"])
    if split not in splits:
        raise _no_split(repo, split, splits, chosen)
    return tuple(_glob(f"{base}/{path}" if base else path) for path in splits[split]), chosen


def matches(repo: Repo, parts: tuple[Part, ...]) -> Iterator[HubFile]:
    """The files of all parts, once each, in order, listed as they are wanted."""
    for number, part in enumerate(parts):
        for files, _ in list_pages(repo, part.folder, recursive=part.recursive):
            for file in files:
                fits = part.fits(file.path) and file.path.rpartition("/")[2] not in _NO_DATA
                if fits and not any(before.fits(file.path) for before in parts[:number]):
                    yield file


def of_one_kind(files: Iterator[HubFile]) -> Iterator[HubFile]:
    """Those with the suffix that most of the first ten have; the others describe them. Asks for ten at once."""
    first = list(islice(files, _JUDGED_BY))
    if not first:
        return
    common = Counter(_family(file.path) for file in first).most_common(1)[0][0]
    yield from (file for file in chain(first, files) if _family(file.path) == common)


def _suffix(path: str) -> str:
    name = path.rpartition("/")[2].lower()
    stem, dot, last = name.rpartition(".")
    if dot and f".{last}" in COMPRESSIONS:
        stem, dot, last = stem.rpartition(".")
    return f".{last}" if dot and stem else ""


def _family(path: str) -> str:
    """Which suffixes go together: that of its kind, or its own."""
    kind = kind_of(path)
    return _FAMILY.get(kind, kind) or _suffix(path)


def _is_path(config: str) -> bool:
    return "/" in config or bool(_suffix(config)) or re.search(r"[*?\[]", config) is not None


def _is_hidden(path: str) -> bool:
    parts = path.split("/")
    return any(part.startswith(".") for part in parts) or any(part.startswith("__") for part in parts[:-1])


def _configs(card: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    told = card.get("configs")
    listed = told if isinstance(told, list) else [told]
    return {str(one["config_name"]): one for one in listed if isinstance(one, Mapping) and one.get("config_name")}


def _choose(repo: Repo, configs: Mapping[str, Mapping[str, Any]], config: str | None) -> str:
    if config is not None:
        if config in configs or (not configs and config == "default"):
            return config
        got = ", ".join(sorted(configs)) or "default alone"
        raise UsageError(f"{repo.what}: expected a configuration among {got}, got {config!r}. Choose one of them.")
    marked = [name for name, told in configs.items() if told.get("default") is True]
    if marked or "default" in configs or len(configs) <= 1:
        return (marked or (["default"] if "default" in configs else list(configs)) or ["default"])[0]
    raise UsageError(
        f"{repo.what}: expected a configuration, as it has several and no default: {', '.join(sorted(configs))}. Name "
        f"one: hf:{repo.name}/{min(configs)}."
    )


def _data_files(told: Any) -> dict[str, list[str]]:
    """Patterns by split, in each of the forms in which a card may have them."""
    if isinstance(told, Mapping):
        return {str(split): _listed(paths) for split, paths in told.items()}
    listed = _listed_any(told)
    if any(isinstance(one, Mapping) for one in listed):
        splits = [one for one in listed if isinstance(one, Mapping)]
        return {str(one.get("split", "train")): _listed(one.get("path")) for one in splits}
    return {"train": _listed(told)}


def _listed_any(told: Any) -> list[Any]:
    return told if isinstance(told, list) else [told]


def _listed(told: Any) -> list[str]:
    return [str(one).removeprefix("./") for one in _listed_any(told) if one]


def _glob(pattern: str) -> Part:
    """The part that a glob stands for: its folder is what comes before the first wildcard."""
    steps = pattern.split("/")
    fixed = next((i for i, step in enumerate(steps) if re.search(r"[*?\[]", step)), len(steps) - 1)
    rest = steps[fixed:]
    return Part("/".join(steps[:fixed]), len(rest) > 1 or "**" in rest[0], Glob(pattern))


def _expression(pattern: str) -> str:
    steps, found = pattern.split("/"), ""
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        if step == "**":
            found += ".*" if last else "(?:.+/)?"
            continue
        for piece in re.split(r"(\*+|\?|\[[^\]]+\])", step):
            if piece.startswith("*"):
                found += "[^/]*"
            elif piece == "?":
                found += "[^/]"
            elif piece.startswith("[") and piece.endswith("]"):
                found += "[" + piece[1:-1].replace("\\", r"\\").replace("!", "^", 1) + "]"
            else:
                found += re.escape(piece)
        found += "" if last else "/"
    return found


def _by_rules(repo: Repo, base: str, split: str) -> tuple[Part, ...]:
    """The split by the names of files and folders; the first rule that any file follows holds for all."""
    root, folders = next(list_pages(repo, base), ([], []))
    data = f"{base}/data" if base else "data"
    if data in folders:
        pages = list_pages(repo, data)
        names = {found[1] for file in next(pages, ([], []))[0] if (found := _shard(file.path))}
        if names and split not in names:
            names |= {found[1] for files, _ in pages for file in files if (found := _shard(file.path))}
        if names:
            if split not in names:
                raise _no_split(repo, split, names)
            return (Part(data, False, lambda path: (found := _shard(path)) and found[1] == split),)
    pages = list_pages(repo, base, recursive=True)
    seen = [file.path for file in [*root, *next(pages, ([], []))[0]] if not _is_hidden(file.path)]
    seen = [path for path in seen if path.rpartition("/")[2] not in _NO_DATA]
    for rule in (_by_folder, _by_file):
        probes = seen + ([f"{folder}/-" for folder in folders] if rule is _by_folder else [])
        if any(rule(path.removeprefix(base)) for path in probes):
            names = {name for path in probes for name in rule(path.removeprefix(base))}
            if split not in names:
                names |= {name for files, _ in pages for file in files for name in rule(file.path.removeprefix(base))}
            if split not in names:
                raise _no_split(repo, split, names)
            return (Part(base, True, partial(_is_of, rule, base, split)),)
    if split != "train":
        raise _no_split(repo, split, ["train"])

    def unnamed(path: str) -> bool:
        """Whether no page further on names it for validation or test: held out is held out."""
        names = {*_by_folder(path.removeprefix(base)), *_by_file(path.removeprefix(base))}
        return not _is_hidden(path) and (not names or "train" in names)

    return (Part(base, True, unnamed),)


def _is_of(rule: Callable[[str], list[str]], base: str, split: str, path: str) -> bool:
    return not _is_hidden(path) and split in rule(path.removeprefix(base))


def _shard(path: str) -> re.Match[str] | None:
    return _SHARD.fullmatch(path.rpartition("/")[2])


def _by_folder(path: str) -> list[str]:
    return _named_in(path.split("/")[:-1], rf"(.*{_BETWEEN})?(%s)({_BETWEEN}.*)?")


def _by_file(path: str) -> list[str]:
    return _named_in(path.split("/")[-1:], rf"(.*{_BETWEEN})?(%s){_BETWEEN}.*")


def _named_in(steps: list[str], pattern: str) -> list[str]:
    """The splits of which a word stands in any of these names."""
    return [
        split
        for split, words in KEYWORDS.items()
        if any(re.fullmatch(pattern % "|".join(words), step) for step in steps)
    ]


def _no_split(repo: Repo, split: str, names: Any, config: str = "") -> UsageError:
    where = f" (configuration {config!r})" if config else ""
    got = ", ".join(sorted(map(str, names)))
    return UsageError(
        f"{repo.what}{where}: expected a split among {got}, got {split!r}. Name one: hf:NAME:{min(names)}."
    )
