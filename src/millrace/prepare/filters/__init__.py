"""Rules that say which documents are worth training on; each is a stage.

`FILTERS` maps the names of their tables in a recipe to the stages. Importing this compiles nothing; numba compiles a
kernel at its first use and caches it.
"""

from __future__ import annotations

from millrace.prepare.filters.c4 import C4
from millrace.prepare.filters.fineweb import FineWeb
from millrace.prepare.filters.gopher import GopherQuality, GopherRepetition
from millrace.prepare.filters.language import Language
from millrace.prepare.filters.length import Length
from millrace.prepare.filters.perplexity import Perplexity

FILTERS = {stage.name: stage for stage in (Length, GopherQuality, GopherRepetition, C4, FineWeb, Language, Perplexity)}

__all__ = ["C4", "FILTERS", "FineWeb", "GopherQuality", "GopherRepetition", "Language", "Length", "Perplexity"]
