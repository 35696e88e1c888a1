"""`millrace convert`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    del verb, group
