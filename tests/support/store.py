"""One store of prepared fixtures for all tests and all processes of a run."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

VARIABLE = "FOREBAY_TEST_STORE"


def stored(make: Callable, *args: object) -> Path:
    """Return the folder that `make(folder, *args)` filled, once per run; no test may write to it.

    Args:
        make: A function of a module; its name and the `repr` of `args` are the address of the folder.
    """
    address = hashlib.sha256(repr((make.__module__, make.__qualname__, args)).encode()).hexdigest()[:16]
    folder = Path(os.environ[VARIABLE], f"{make.__qualname__}-{address}")
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = Path(f"{folder}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished, *args)
            for path in unfinished.rglob("*"):
                if path.is_file():  # What is in a folder that is read-only cannot be removed at the end of the run.
                    path.chmod(0o444)
            unfinished.rename(folder)
    return folder
