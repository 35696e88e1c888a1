"""What the fast tests may not do, and what each test costs."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.paths import TESTS

SLOW = f"{TESTS / 'slow'}{os.sep}"
PROCESSES = tuple(f"{TESTS / folder}{os.sep}" for folder in ("slow", "e2e", "docs"))  # These may start processes.
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
NUM_SHOWN = 20

_sleep = time.sleep
_running = ""  # the file of the test that runs


def install() -> None:
    """Watch this process from now on: a fast test that sleeps or starts a process fails."""
    time.sleep = _guarded_sleep
    sys.addaudithook(_audit)


def _guarded_sleep(seconds: float) -> None:
    caller = sys._getframe(1).f_code.co_filename
    if _running and not _running.startswith(SLOW) and caller.startswith(str(TESTS)):
        raise AssertionError(f"time.sleep in a fast test ({caller}): wait for an event, or move the test to tests/slow")
    _sleep(seconds)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _running and event in STARTS and not _running.startswith(PROCESSES):
        raise AssertionError(f"{event} in a fast test: call main(argv), or move the test to tests/slow or tests/e2e")


def cpu_s() -> float:
    """Seconds of CPU of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CostPlugin:
    """Count the CPU seconds of each test; show the dearest ones and the sum of each folder at the end."""

    def __init__(self) -> None:
        self.started_at = 0.0
        self.costs: list[tuple[float, str]] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        global _running
        self.started_at, _running = cpu_s(), str(item.path)
        try:
            return (yield)
        finally:
            _running = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.when == "teardown":
            report.user_properties.append(("cpu_s", cpu_s() - self.started_at))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.costs += [(value, report.nodeid) for name, value in report.user_properties if name == "cpu_s"]

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if not self.costs:
            return
        if getattr(config, "cache", None) is not None:
            config.cache.set("costs", {name: value for value, name in self.costs})
        folders = Counter[str]()
        for value, test in self.costs:
            folders["/".join(Path(test.partition("::")[0]).parts[:3])] += value
        terminalreporter.section(f"CPU seconds of {len(self.costs)} tests: {sum(folders.values()):.0f}")
        shown = (
            [(value, name) for name, value in folders.most_common(NUM_SHOWN)],
            sorted(self.costs)[: -NUM_SHOWN - 1 : -1],
        )
        for rows in shown:
            for value, name in rows:
                terminalreporter.line(f"{value:8.2f}  {name}")
            terminalreporter.line("")
