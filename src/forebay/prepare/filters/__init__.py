"""Rules that say which documents are worth training on; each is a stage.

A stage is imported when it is first asked for: most need numba, which compiles a kernel at its first use and caches it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.prepare.filters.c4 import C4
    from forebay.prepare.filters.code import Code
    from forebay.prepare.filters.fineweb import FineWeb
    from forebay.prepare.filters.gopher import GopherQuality, GopherRepetition
    from forebay.prepare.filters.language import Language
    from forebay.prepare.filters.length import Length
    from forebay.prepare.filters.perplexity import Perplexity
    from forebay.prepare.filters.url import Url

__all__ = ["C4", "Code", "FineWeb", "GopherQuality", "GopherRepetition", "Language", "Length", "Perplexity", "Url"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "gopher" if name.startswith("Gopher") else name.lower()
    return getattr(import_module(f"{__name__}.{module}"), name)
