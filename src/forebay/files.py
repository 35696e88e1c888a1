"""Atomic files: a crash at any moment leaves the old file, none, or the whole new one, never a part of it.

The bytes go to a temporary file beside the target, whose name no other process or machine uses; it is flushed to disk
(fsync), renamed, and the directory is flushed, so that a power cut does not leave an empty file under the final name.
Cost: an fsync call a file and one a directory. What a killed process leaves behind, `remove_stale` deletes.
"""

import contextlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def _host() -> str:
    """This machine's name; in a container also which one, since process numbers mean nothing outside it."""
    name = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:32] or "host"
    with contextlib.suppress(OSError):
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        return name if namespace == _FIRST_NAMESPACE else f"{name}-{namespace}"
    return name


_FIRST_NAMESPACE = 0xEFFFFFFC  # Linux's PROC_PID_INIT_INO: the machine's own processes.
_HOST = _host()
_TEMPORARY = re.compile(r"\.(?P<stem>.+)\.(?P<host>[A-Za-z0-9-]+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.tmp")


def temporary_path(path: Path) -> Path:
    """A name beside `path` that no other writer has: host, process and a random part are in it."""
    tail = f".{_HOST}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    stem = path.name.encode()[: 254 - len(tail)].decode(errors="ignore")  # File names have at most 255 bytes.
    return path.with_name(f".{stem}{tail}")


@contextmanager
def temporary_directory(path: Path) -> Iterator[Path]:
    """An empty directory beside `path`, deleted with all that is in it when the block ends. Raises OSError."""
    directory = temporary_path(path)
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def open_atomic(path: str | Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a binary file, readable and writable, that takes its name when the block ends without an exception.

    An existing file is replaced; after an exception it is untouched. `mode`, less the umask, holds from the first byte
    on. The block may close the file.
    """
    path = Path(path)
    temporary = temporary_path(path)
    try:
        with open(temporary, "x+b", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        commit_files({temporary: path})
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def atomic_write(path: str | Path, data: bytes | Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Write `data` to `path` atomically. Raises OSError, as `open_atomic` does."""
    with open_atomic(path, mode) as file:
        for chunk in [data] if isinstance(data, bytes) else data:
            file.write(chunk)


def commit_files(files: Mapping[Path, Path]) -> None:
    """Give written files their final names: flush all, then rename all, then flush each directory once.

    Each file is atomic, the group is not: write a file last that says that the others are whole. `files` maps each to
    its final name, on the same file system. After an OSError, those that were not renamed yet keep their first names.
    """
    for path in files:
        sync_file(path)
    for path, final in files.items():
        path.replace(final)
    for directory in {final.parent for final in files.values()}:
        sync_directory(directory)


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
    """Delete what processes of this machine that are gone left there of temporary files; others' are left alone."""
    for path in directory.glob(".*.tmp"):
        found = _TEMPORARY.fullmatch(path.name)
        if found and found["host"] == _HOST and not is_running(int(found["pid"])):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()


def is_running(pid: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # Another user's, so it runs.
        return True
    return True
