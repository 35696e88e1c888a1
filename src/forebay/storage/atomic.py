"""Atomic files: a crash at any moment leaves the old file, none, or the whole new one, never a part of it.

The bytes go to a temporary file beside the target, whose name no other process or machine uses; it is flushed to disk
(fsync), renamed, and the directory is flushed, so that a power cut does not leave an empty file under the final name.
Cost: two fsync calls a file.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_HOST = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:32] or "host"
_TEMPORARY = re.compile(r"\.(?P<stem>.+)\.(?P<host>[A-Za-z0-9-]+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.tmp")


def temporary_path(path: Path) -> Path:
    """A name beside `path` that no other writer has: host, process and a random part are in it."""
    tail = f".{_HOST}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    stem = path.name.encode()[: 254 - len(tail)].decode(errors="ignore")  # File names have at most 255 bytes.
    return path.with_name(f".{stem}{tail}")


@contextmanager
def open_atomic(path: str | Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its name when the block ends without an exception.

    Args:
        path: The final name; an existing file is replaced.
        mode: Permissions of the new file, less the umask. They hold from the first byte on.

    Yields:
        A binary file, readable and writable.

    Raises:
        OSError: As the file system says (full, read-only, missing directory). The old file is then untouched.
    """
    path = Path(path)
    temporary = temporary_path(path)
    try:
        with open(temporary, "x+b", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            if not file.closed:  # Some writers close the file that they are given.
                file.flush()
        sync_file(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def atomic_write(path: str | Path, data: bytes | Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Write `data` to `path` atomically. Raises OSError, as `open_atomic` does."""
    with open_atomic(path, mode) as file:
        for chunk in [data] if isinstance(data, bytes) else data:
            file.write(chunk)


def sync_file(path: str | Path) -> None:
    """Flush a file's bytes to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: str | Path) -> None:
    """Make the names in a directory survive a power cut. Raises OSError."""
    sync_file(path)


def remove_stale(directory: Path) -> None:
    """Delete the temporary files of processes of this machine that are gone; those of others are left."""
    for path in directory.glob(".*.tmp"):
        found = _TEMPORARY.fullmatch(path.name)
        if found and found["host"] == _HOST and not _is_running(int(found["pid"])):
            path.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # Another user's, so it runs.
        return True
    return True
