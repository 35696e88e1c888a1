"""A short round of every target; FOREBAY_FUZZ_S=60 makes each longer, FOREBAY_FUZZ_SEED begins elsewhere.

An input that kills the process ends a worker of pytest-xdist (`-n 2`), which names the target.
"""

import os
import random

import pytest

pytest.importorskip("libtorrent")

from .engine import fuzz
from .targets import TARGETS, make_target

SECONDS = float(os.environ.get("FOREBAY_FUZZ_S", "0.02"))
SEED = int(os.environ.get("FOREBAY_FUZZ_SEED", "0"))


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_strangers_bytes_end_in_errors_of_ours(name, tmp_path):
    target = make_target(name, tmp_path)
    try:
        done = fuzz(target, SECONDS, random.Random(SEED))
    finally:
        target.close()
    assert done.faults == {} and done.executions >= len(target.seeds)
