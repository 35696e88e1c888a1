"""Raw text to datasets: read, clean, filter, deduplicate, tokenize, shuffle, slice."""

from millrace.prepare.pipeline import PrepareSummary, Progress, prepare
from millrace.prepare.recipe import Recipe, load_recipe

__all__ = ["PrepareSummary", "Progress", "Recipe", "load_recipe", "prepare"]
