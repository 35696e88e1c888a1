"""Every write, flush and rename fails or is the last: the outcome is the old or the new state.

FOREBAY_FAULTS=all tries each of them, which takes some ten minutes; otherwise some of each scenario.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.paths import TESTS

HARNESS = TESTS / "support" / "faults.py"
SMALL = ("cache", "import", "ledger", "ledger-questions", "shards", "download", "convert")
PREPARE = ("prepare", "prepare-text", "prepare-mds", "prepare-megatron")
ALL = os.environ.get("FOREBAY_FAULTS") == "all"
pytestmark = [pytest.mark.timeout(3600)] if ALL else []  # The usual limit is scaled to this machine.


def assert_campaign_passes(*arguments: str) -> None:
    result = subprocess.run([sys.executable, HARNESS, *arguments], capture_output=True, text=True)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr[-5000:]


@pytest.mark.parametrize("scenarios, points", [(SMALL, "6"), (PREPARE, "5")], ids=str)
def test_one_fault_leaves_the_old_or_the_new_state(scenarios: tuple[str, ...], points: str) -> None:
    assert_campaign_passes(*scenarios, *([] if ALL else ["--points", points]))


def test_a_fault_while_an_output_is_replaced() -> None:
    assert_campaign_passes("convert-force", *([] if ALL else ["--points", "6"]))
