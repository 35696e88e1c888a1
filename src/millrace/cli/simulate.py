"""The command that runs a whole network in virtual time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    """Adds the verbs of this module."""
