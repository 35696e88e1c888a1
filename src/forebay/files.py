"""Atomic files: a crash leaves the old file, no file, or the complete new one.

The bytes are written to a temporary file beside the target, with a name that no other process or machine uses; it is
flushed to disk (fsync) and renamed, and the directory is flushed. `remove_stale` deletes the temporary files of killed
processes. Cost: one fsync per file and one per directory.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from forebay.errors import DatasetError, did_you_mean


def _host() -> str:
    """Return the name of this machine; in a container with its PID namespace, as process ids are valid only there."""
    name = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:32] or "host"
    with contextlib.suppress(OSError):
        namespace = Path("/proc/self/ns/pid").stat().st_ino
        return name if namespace == _FIRST_NAMESPACE else f"{name}-{namespace}"
    return name


_FIRST_NAMESPACE = 0xEFFFFFFC  # Linux's PROC_PID_INIT_INO: not in a container
HOST = _host()
_TEMPORARY = re.compile(r"\.(?P<stem>.+)\.(?P<host>[A-Za-z0-9-]+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.tmp")


_LINK = (
    "a link, which is not followed, as it may lead to any file of this machine. Copy the directory with files in place "
    "of links (cp -rL)"
)


def temporary_path(path: Path) -> Path:
    """Return a unique path beside `path`: with host, process and a random part."""
    tail = f".{HOST}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    stem = path.name.encode()[: 254 - len(tail)].decode(errors="ignore")  # a file name has at most 255 bytes
    return path.with_name(f".{stem}{tail}")


@contextmanager
def temporary_directory(path: Path) -> Iterator[Path]:
    """Create an empty directory beside `path`; it is deleted when the block ends. Raises OSError."""
    directory = temporary_path(path)
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def open_atomic(path: str | Path, mode: int = 0o666, *, flush: bool = True) -> Iterator[BinaryIO]:
    """Open a binary file, readable and writable, that gets its name when the block ends without an exception.

    An existing file is replaced; after an exception it is unchanged. `mode`, less the umask, is that of the temporary
    file too. The block may close the file. `flush=False`: after a crash of the machine the file may be empty.
    """
    path = Path(path)
    temporary = temporary_path(path)
    try:
        with open(temporary, "x+b", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        if flush:
            commit_files({temporary: path})
        else:
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def atomic_write(
    path: str | Path, data: bytes | Iterable[bytes | memoryview], mode: int = 0o666, *, flush: bool = True
) -> None:
    """Write `data` to `path` atomically. Raises OSError, as `open_atomic` does."""
    with open_atomic(path, mode, flush=flush) as file:
        for chunk in [data] if isinstance(data, bytes) else data:
            file.write(chunk)


def commit_files(files: Mapping[Path, Path]) -> None:
    """Rename written files: flush all, then rename all, then flush each directory once.

    Each rename is atomic, the group is not: rename a file last that marks the others as complete. `files` maps each
    path to the final one, on the same file system. After an OSError, some files may keep their first names.
    """
    for path in files:
        sync_file(path)
    for path, final in files.items():
        path.replace(final)
    for directory in {final.parent for final in files.values()}:
        sync_file(directory)


def open_below(folder: Path, name: str) -> BinaryIO:
    """Open a regular file of a directory that somebody else made, for reading. No link below it is followed.

    Raises OSError; PermissionError for a link, or what is not a file.
    """
    flags, path = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, str(folder / name)
    descriptor = os.open(folder, flags | os.O_DIRECTORY)
    for part in name.split("/"):
        above = descriptor
        try:
            descriptor = os.open("" if part == ".." else part, flags | os.O_NOFOLLOW, dir_fd=above)
        except OSError as error:
            error.filename = path
            if error.errno == errno.ELOOP:
                raise PermissionError(errno.EPERM, _LINK, path) from error
            raise
        finally:
            os.close(above)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "no regular file", path)
    return os.fdopen(descriptor, "rb")


def path_below(folder: Path, name: str) -> Path:
    """Return the path of a file that `open_below` opens, for what opens it itself. Raises DatasetError."""
    path = folder / name
    try:
        open_below(folder, name).close()
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}. Fetch or prepare it again.") from error
    return path


def nothing_there(path: str | Path, advice: str = "Check the path.") -> str:
    """Return the end of an error about a path where nothing is: similar names beside it, else an advice."""
    folder, slash, name = str(path).rstrip("/").rpartition("/")
    names = sorted(beside.name for beside in Path(folder or slash).glob("*"))
    return f"nothing there. {did_you_mean(name, names, folder + slash).strip() or advice}"


def sync_file(path: str | Path) -> None:
    """Flush a file, or the names in a directory, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_stale(directory: Path) -> None:
    """Delete the temporary files of dead processes of this machine; those of other machines are kept."""
    for path in directory.glob(".*.tmp"):
        match = _TEMPORARY.fullmatch(path.name)
        if match and match["host"] == HOST and not is_running(int(match["pid"])):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()


def is_running(pid: int) -> bool:
    """Return whether a process with this id runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # Not Linux; or it ended just now.
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
            return not state.startswith((b" Z", b" X"))
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # of another user, so it exists
        return True
    return True
