"""What training-data files are, what is wrong with them, and what to do about it.

`examine(paths, options)` reads and reports; nothing is changed. Kinds are told by content; a suffix counts only where
nothing else tells.
"""

from forebay.doctor.examine import examine
from forebay.doctor.report import Finding, Options
from forebay.doctor.verdicts import Report

__all__ = ["Finding", "Options", "Report", "examine"]
