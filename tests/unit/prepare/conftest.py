"""What holds for every fast test of prepare: nothing of it starts a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


class InProcessWorker:
    """Runs the stages of a recipe as a `SandboxWorker` does, in this process and without limits."""

    def call(self, run: Callable[[Any, Any], Any], task: Any, data: Any, limits: tuple[float, int]) -> Any:
        return run(task, data)


@pytest.fixture(autouse=True)
def stages_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are not forked; `tests/slow/prepare/test_sandbox.py` has the forks."""
    monkeypatch.setattr("forebay.prepare.tasks.stages.worker_for", lambda stages, warm: InProcessWorker())
