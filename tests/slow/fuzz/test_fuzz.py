"""A short round of every target; FOREBAY_FUZZ_S=5 makes each longer. `python -m tests.slow.fuzz` is the long one."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from support.calibration import scaled

pytest.importorskip("libtorrent")

from .engine import HANG_S, fuzz
from .targets import TARGETS, make_target

SECONDS = float(os.environ.get("FOREBAY_FUZZ_S", "0.02"))


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_strangers_bytes_end_in_errors_of_ours(name: str, tmp_path: Path) -> None:
    target = make_target(name, tmp_path)
    try:
        done = fuzz(target, SECONDS, random.Random(0), hang_s=scaled(HANG_S))
    finally:
        target.close()
    assert not done.faults
    assert done.executions >= 1 and done.slowest_s < scaled(HANG_S)
