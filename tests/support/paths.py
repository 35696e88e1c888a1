"""Where the project, its tests and their golden files are."""

import tomllib
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"


def read_cases(name: str) -> dict[str, Any]:
    """Return the tables of golden/NAME.toml."""
    return tomllib.loads((GOLDEN / f"{name}.toml").read_text("utf-8"))
