"""What training-data files are, what is wrong with them, and what mends it.

`examine(paths, options)` reads and reports; `mend(path, out, options)` writes a mended copy. Nothing is changed in
place. Kinds are told by content; a suffix counts only where nothing else tells.
"""

from forebay.doctor.examine import examine, mend
from forebay.doctor.report import Finding, Options, Report

__all__ = ["Finding", "Options", "Report", "examine", "mend"]
