"""Raw text to a dataset."""

from millrace.prepare.recipe import PrepareSummary, Progress, prepare

__all__ = ["PrepareSummary", "Progress", "prepare"]
