"""Slow tests: processes, clusters, kills and real time. Limits of time in them follow the speed of the machine."""

import pytest

from support import calibration

TIMEOUT_S = 900.0


def pytest_configure(config: pytest.Config):
    calibration.watch()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    timeout_s = max(TIMEOUT_S, config.getoption("timeout") or 0)  # The long profile sets the option.
    for item in items:
        if "slow" in item.path.parts and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(timeout_s))
