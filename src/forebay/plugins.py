"""Objects of other packages, by the name of an entry point or by `module:Name`.

The groups are `forebay.dedup`, `forebay.engines`, `forebay.extractors`, `forebay.filters`, `forebay.formats`,
`forebay.origins`, `forebay.scorers`, `forebay.sources` and `forebay.tokenizers`. Nothing of another package is imported
before one of its names is asked for. Nothing else in Forebay imports what a text names.
"""

import importlib
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from forebay.errors import UsageError, package_for


@cache
def plugins(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group that are installed, by name; of several with one name the last."""
    return {entry.name: entry for entry in entry_points(group=group)}


def check_code(name: str, allow_code: bool, setting: str = "") -> bool:
    """Return whether a name, which may also be a path, is `module:Name`. UsageError if it is and may not run.

    `setting`: what the message begins with.
    """
    if re.fullmatch(r"(?!train:)[\w.]+:[A-Za-z_][\w.]*", name) is None:
        return False
    if not allow_code:
        raise UsageError(
            f"{setting}names code, {name!r}, which a recipe may run only with --allow-code (allow_code=True in "
            "Python). Read it first if the recipe is not yours"
        )
    return True


def load_plugin(
    group: str, name: str, built_in: Mapping[str, str] = MappingProxyType({}), *, allow_code: bool = False
) -> Any:
    """Return the object that Forebay or an entry point of `group` has under a name, or that `module:Name` names.

    Args:
        built_in: Forebay's own objects: `module:Name`, by name.
        allow_code: Whether `name` may be `module:Name`: only if the user of this process gave it, or leave for it.

    Raises:
        UsageError: If there is none of that name, or importing it fails.
    """
    try:
        if name not in built_in and not check_code(name, allow_code):
            entry = plugins(group).get(name)
            if entry is None:
                installed = ", ".join(sorted(plugins(group))) or "none"
                raise UsageError(
                    f"{name}: expected an entry point of {group} ({installed}) or module:Name, got {name!r}. Install "
                    "the package that has it."
                )
            return entry.load()
        module, _, attributes = built_in.get(name, name).partition(":")
        with package_for(name) if name in built_in else nullcontext():
            item: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            item = getattr(item, attribute)
        return item
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"expected module:Name, got {name!r}: {error}") from error
    except UsageError:
        raise
    except Exception as error:
        looked = ", ".join(path or "the working directory" for path in sys.path[:3])
        searched = f". It was looked for in {looked}, …" if isinstance(error, ModuleNotFoundError) else ""
        raise UsageError(f"cannot import {name!r}: {type(error).__name__}: {error}{searched}") from error
