"""What a preparation wrote, without times: all that is the same for the same input and recipe."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

RECORD = ".progress.json"
"""The record of a run, which has times alone."""


def content(path: Path) -> bytes:
    """A file's bytes; of a report's page without the section of times."""
    data = path.read_bytes()
    return re.sub(rb'<section id="times">.*?</section>', b"", data, flags=re.S) if path.name == "report.html" else data


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a directory by its path from there, without the record of the run."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    return {path.relative_to(folder).as_posix(): content(path) for path in files}


def hashes(folder: Path) -> dict[str, str]:
    """The same as SHA-256."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in contents(folder).items()}
