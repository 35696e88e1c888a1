"""Raw text to datasets: read, clean, filter, deduplicate, tokenize, shuffle, slice.

What is named here is imported when it is first asked for: a process that runs one kind of task pays for that alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.prepare.driver import PrepareSummary, Progress, prepare
    from forebay.prepare.recipe import Recipe, load_recipe

__all__ = ["PrepareSummary", "Progress", "Recipe", "load_recipe", "prepare"]

_MODULES = {"Recipe": "recipe", "load_recipe": "recipe"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'driver')}"), name)
