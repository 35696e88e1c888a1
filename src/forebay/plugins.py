"""Objects of other packages, by the name of an entry point or by `module:Name`.

The groups are `forebay.dedup`, `forebay.engines`, `forebay.extractors`, `forebay.filters`, `forebay.formats`,
`forebay.origins`, `forebay.scorers`, `forebay.sources` and `forebay.tokenizers`. Nothing of another package is imported
before one of its names is asked for.
"""

import importlib
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from forebay.errors import UsageError


@cache
def plugins(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group that are installed, by name; of several with one name the last."""
    return {entry.name: entry for entry in entry_points(group=group)}


def load_plugin(group: str, name: str) -> Any:
    """The object of an entry point of `group`; or the one that `module:Name` names.

    Raises UsageError if there is none of that name, or importing it fails.
    """
    try:
        if ":" not in name:
            entry = plugins(group).get(name)
            if entry is None:
                installed = ", ".join(sorted(plugins(group))) or "none"
                raise UsageError(
                    f"{name}: expected an entry point of {group} ({installed}) or module:Name, got {name!r}. Install "
                    "the package that has it."
                )
            return entry.load()
        module, _, attributes = name.partition(":")
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
