"""`forebay demo` on a small text of the test, as a process."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

# Numbered below, so that no two slices are alike: alike slices travel once.
TEXT = "The mill race turns the wheel, and the wheel turns the stone. "


def start_demo(
    directory: Path, *more: object, lines: int = 400, program: Sequence[str] = ("-m", "forebay")
) -> subprocess.Popen[str]:
    """Start the demo on 40 files of so many lines; its temporary files go to `directory`/tmp."""
    corpus = directory / "corpus"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i:02}.txt").write_text("".join(f"{i}.{j} {TEXT}" for j in range(lines)))
    (directory / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, *program, "demo", "--input", str(corpus), *map(str, more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(directory / "tmp")},
    )


def remaining(directory: Path) -> list[str]:
    """Return processes and files that the demo should have taken with it."""
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    files = map(str, (directory / "tmp").iterdir())
    return [*(command for command in commands if str(directory) in command), *files]
