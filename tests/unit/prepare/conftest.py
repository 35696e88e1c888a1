"""Set-up of every fast test of prepare: nothing of it starts a process."""

import pytest

from support.preparing import stay_in_process


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    stay_in_process(monkeypatch)
