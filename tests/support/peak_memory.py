"""How much memory something takes at most, in this process."""

import re
from collections.abc import Callable
from pathlib import Path

PROCESS = Path("/proc/self")


def _mib(name):
    match = re.search(rf"{name}:\s*(\d+) kB", (PROCESS / "status").read_text())
    return int(match[1]) >> 10


def peak_growth_mib(run: Callable[[], object]) -> int:
    """Return by how many MiB the resident memory grew at most while `run` ran."""
    (PROCESS / "clear_refs").write_text("5")  # The peak is the current size from here on.
    before = _mib("VmRSS")
    run()
    return _mib("VmHWM") - before
