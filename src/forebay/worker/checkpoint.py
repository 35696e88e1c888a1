"""What a run goes on from after an interruption: one file with the trainer's state and the place in the data.

A file of a zip's form with `state.json` and `trainer.bin`; written beside the old one and then put in its place, so
that a kill leaves one or the other.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from forebay.errors import StateError
from forebay.storage.atomic import open_atomic, remove_stale

NAME = "checkpoint.zip"


def write_checkpoint(directory: Path, state: dict[str, Any], trainer: bytes) -> None:
    """Keep `state` (plain JSON values) and a trainer's bytes in place of what was kept before."""
    directory.mkdir(parents=True, exist_ok=True)
    with open_atomic(directory / NAME) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("state.json", json.dumps(state))
        archive.writestr("trainer.bin", trainer)


def read_checkpoint(directory: Path) -> tuple[dict[str, Any], bytes] | None:
    """What was kept, or None.

    Raises:
        StateError: If it is damaged.
    """
    path = directory / NAME
    remove_stale(directory)
    if not path.exists():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            state = json.loads(archive.read("state.json"))
            if not isinstance(state, dict):
                raise ValueError(f"expected an object, got {type(state).__name__}")
            return state, archive.read("trainer.bin")
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise StateError(f"checkpoint {path}: cannot be read: {error}. Remove it to start anew.") from error
