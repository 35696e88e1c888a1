"""Strangers' machines lease slices of one scheduler."""

from __future__ import annotations

from millrace.simulate.result import Result
from millrace.simulate.settings import Settings
from millrace.simulate.trace import Progress


def run(settings: Settings, progress: Progress | None = None) -> Result:
    """Runs until every sample is acknowledged."""
    raise NotImplementedError
