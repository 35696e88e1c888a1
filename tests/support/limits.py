"""What the fast tests may not do, and what each test costs."""

import os
import sys
import time
from collections import Counter
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

from support.paths import TESTS

SLOW = f"{TESTS / 'slow'}{os.sep}"
PROCESSES = tuple(f"{TESTS / folder}{os.sep}" for folder in ("slow", "e2e", "docs"))  # These may start processes.
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "multiprocessing.spawn"}
NUM_SHOWN = 20

_sleep, _spawn = time.sleep, util.spawnv_passfds
_running = ""  # the file of the test that runs
_violations = []


def install() -> None:
    """Watch this process from now on: a fast test that sleeps or starts a process fails."""
    time.sleep, util.spawnv_passfds = _guarded_sleep, _guarded_spawn
    sys.addaudithook(_audit)


def _forbid(message):
    _violations.append(message)  # What runs may catch the error: the test fails all the same.
    raise AssertionError(message)


def _guarded_sleep(seconds):
    caller = sys._getframe(1).f_code.co_filename
    if _running and not _running.startswith(SLOW) and caller.startswith(str(TESTS)):
        _forbid(f"time.sleep in a fast test ({caller}): wait for an event, or move the test to tests/slow")
    _sleep(seconds)


def _guarded_spawn(*args):
    """How `multiprocessing` starts a process but by a fork: no event tells of it."""
    _audit("multiprocessing.spawn", args)
    return _spawn(*args)


def _audit(event, args):
    if _running and event in STARTS and not _running.startswith(PROCESSES):
        _forbid(f"{event} in a fast test: call main(argv), or move the test to tests/slow or tests/e2e")


def cpu_s() -> float:
    """Seconds of CPU of this process and of the children that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CostPlugin:
    """Count the CPU seconds of each test; show the dearest ones and the sum of each folder at the end."""

    def __init__(self) -> None:
        self.started_at = 0.0
        self.costs = Counter[str]()

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
        if _violations and not report.failed:
            report.outcome, report.longrepr = "failed", _violations[0]
        _violations.clear()
        if report.when == "teardown":
            report.user_properties.append(("cpu_s", cpu_s() - self.started_at))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cpu_s":
                self.costs[report.nodeid] = value

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if not self.costs:
            return
        if config.getoption("--cov", None) and hasattr(config, "cache"):  # `make mutants` needs them, and contexts.
            config.cache.set("costs", self.costs)
        folders = Counter[str]()
        for test, value in self.costs.items():
            folders["/".join(Path(test.partition("::")[0]).parts[:3])] += value
        terminalreporter.section(f"CPU seconds of {len(self.costs)} tests: {sum(folders.values()):.0f}")
        for counts in (folders, self.costs):
            for name, value in counts.most_common(NUM_SHOWN):
                terminalreporter.line(f"{value:8.2f}  {name}")
            terminalreporter.line("")
