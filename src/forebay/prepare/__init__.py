"""Raw text to datasets: read, clean, filter, deduplicate, tokenize, shuffle, slice.

`forebay.prepare_dataset` runs it all. Each name here is imported when it is first used: a worker imports what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.prepare.config import load_recipe
    from forebay.prepare.documents import Measure
    from forebay.prepare.forecast import Progress
    from forebay.prepare.recipe import Recipe
    from forebay.prepare.run import PrepareResult

__all__ = ["Measure", "PrepareResult", "Progress", "Recipe", "load_recipe"]

_MODULES = {
    "Measure": "documents", "PrepareResult": "run", "Progress": "forecast", "Recipe": "recipe", "load_recipe": "config",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
