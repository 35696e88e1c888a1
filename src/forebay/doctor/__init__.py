"""Finds what training-data files are, what is wrong with them, and what to do about it.

`examine(paths, options)` reads and reports; nothing is changed. Formats are detected by content; a suffix counts only
where the content says nothing.
"""

from forebay.doctor.examine import examine
from forebay.formats.report import CheckOptions, Finding, Report

__all__ = ["CheckOptions", "Finding", "Report", "examine"]
