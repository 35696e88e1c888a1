"""Slow tests: processes, clusters, kills and real time. Limits of time in them follow the speed of the machine."""

from __future__ import annotations

import pytest

from support import calibration

TIMEOUT_S = 900.0


def pytest_configure(config: pytest.Config) -> None:
    calibration.watch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "slow" in item.path.parts and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
