"""Real corpora that tests use where they are."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("FOREBAY_TEST_DATA") or Path(__file__).parents[3] / "shared/data")


def shared_data(name: str = "") -> Path:
    """The path of real data, a file or folder of FOREBAY_TEST_DATA; skips the test where it is missing."""
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"no real data: set FOREBAY_TEST_DATA to a folder that holds {name or 'it'}")
    return path
