"""Every option of Forebay, found in the code: `options.py` prints how many each place has, and their sum.

`options.toml` beside this file says what each one serves; the page docs/reference/options.md shows both as one table.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PLACES = Path(__file__).with_suffix(".toml")
_INTERNAL = ("own", "on_progress", "on_skipped", "sink")  # Fields that no user sets.
_SHARED = {
    "--json",
    "--quiet",
    "--verbose",
    "--env-file",
    "--log-level",
    "--log-format",
    "--identity",
}  # Of all commands.


def places() -> dict[str, Mapping[str, str]]:
    """Return the options of each place: their names, and the help of a command's."""
    from forebay.cli import make_parser
    from forebay.cli.parser import walk

    found: dict[str, Mapping[str, str]] = {place: dict.fromkeys(_fields(kind), "") for place, kind in classes().items()}
    for path, parser in walk(make_parser()):
        shown: dict[str, str] = {}
        for action in parser._actions:
            name = action.option_strings[-1] if action.option_strings else action.dest
            is_shared = name in _SHARED and path and action.default == argparse.SUPPRESS
            if not is_shared and not isinstance(action, (argparse._SubParsersAction, argparse._HelpAction)):
                shown[name] = parser._get_formatter()._expand_help(action)
        found[" ".join(["forebay", *path])] = shown
    found["environment"] = dict.fromkeys(_variables(), "")
    return {place: names for place, names in found.items() if names}


def _fields(kind: Any) -> list[str]:
    skipped = (
        (*_INTERNAL, "dtype", "seq_len", "slice_bytes", "name") if kind.__name__ == "ConvertOptions" else _INTERNAL
    )
    names = [item.name for item in dataclasses.fields(kind) if item.init and item.name not in skipped]
    return [name for name in names if kind.__name__ != "Recipe" or not _table(typing.get_type_hints(kind)[name])]


def classes() -> dict[str, Any]:
    """Return the classes whose fields are options, by place."""
    from forebay.formats.conversion import ConvertOptions
    from forebay.load import options
    from forebay.plugins import load_plugin
    from forebay.prepare.recipe import STAGES, Recipe
    from forebay.prepare.scores.base import SCORERS
    from forebay.worker.config import WorkerConfig

    groups = ("OrderOptions", "CacheOptions", "NetworkOptions", "SampleOptions")
    tables = {item.name: _table(typing.get_type_hints(Recipe)[item.name]) for item in dataclasses.fields(Recipe)}
    return {
        "Loader": options.LoaderConfig,
        **{name: getattr(options, name) for name in groups},
        "recipe": Recipe,
        **{f"[{name}]": kind for name, kind in tables.items() if kind and name != "stages"},
        **{f"[{name}]": load_plugin("forebay.filters", name, STAGES) for name in STAGES},
        **{f"[score.NAME] {name}": load_plugin("forebay.scorers", name, SCORERS) for name in SCORERS},
        "convert --set": ConvertOptions,
        "worker": WorkerConfig,
    }


def _table(hint: Any) -> Any:
    """The class of a table among the types of a field; the stages are tables, too."""
    kinds = (hint, *typing.get_args(hint))
    return next(
        (kind for kind in kinds if dataclasses.is_dataclass(kind) or getattr(kind, "_is_protocol", False)), None
    )


def _variables() -> list[str]:
    import forebay

    source = "".join(path.read_text("utf-8") for path in Path(forebay.__path__[0]).rglob("*.py"))
    return sorted(set(re.findall(r"\bFOREBAY_[A-Z_]*[A-Z]\b", source)) | {"R2_DATASET_*", "DATASET_BINS_PATH"})


def served() -> dict[str, dict[str, str]]:
    """Return the need that each option serves, by place and name."""
    places = tomllib.loads(_PLACES.read_text("utf-8"))
    return {
        place: {name: need for need, names in needs.items() for name in names.split()}
        for place, needs in places.items()
    }


if __name__ == "__main__":
    counts = {place: len(names) for place, names in places().items()}
    for place, count in (*counts.items(), ("all", sum(counts.values()))):
        print(f"{count:4} {place}")
