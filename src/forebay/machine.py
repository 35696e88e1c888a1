"""What this process may use of its machine: cores, memory, a directory for its cache."""

import functools
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from forebay.errors import UsageError

log = logging.getLogger("forebay.cache")
_ROOT = Path("/")


def num_cores(root: Path = _ROOT) -> int:
    """Return how many threads of this process can run at once: by its affinity, and its container's share of time."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _control_groups("cpu", root):
        quota, period = (_read(folder / "cpu.max") or "max 1").split()
        if quota == "max":
            quota, period = (_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal():
            count = min(count, max(1, round(int(quota) / int(period))))
    return count


def memory_bytes(root: Path = _ROOT) -> int:
    """Return the memory of the machine, or of this process' container if that has less."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _control_groups("memory", root):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        size = min(size, int(limit)) if limit.isdecimal() else size
    return size


def home_directory() -> Path:
    """Return the user's home; of a user who has none, as in many containers, a directory among temporary files."""
    try:
        return Path.home()
    except RuntimeError:
        home = Path(tempfile.gettempdir(), f"home-{os.getuid()}")
        with suppress(OSError):
            own_directory(home, "HOME")
        return home


def own_directory(path: Path, variable: str = "its option") -> Path:
    """Make a directory (0700) in which only this user and root can put files: those of others may mislead.

    One of this user to which others may write is closed to them, with a warning, if all in it is this user's; but not
    one like /tmp, or one that gives its files to a group. Other users may not rename what leads to it.

    Raises:
        OSError: If it cannot be made.
        UsageError: If it, or a link that leads to it, is another user's, or others may write to it. The message names
            `variable`, which sets the path.
    """
    for folder in reversed([path, *path.parents]):
        folder.mkdir(0o700, exist_ok=True)
    status, own = path.stat(), os.getuid()
    for above in (path.absolute(), path.resolve()):
        _check_parents(above)
    users, is_open = {path.lstat().st_uid, status.st_uid} - {0, own}, status.st_mode & 0o022
    if is_open and status.st_uid == own and not status.st_mode & (stat.S_ISVTX | stat.S_ISGID):
        with os.scandir(path) as entries:
            users |= {entry.stat(follow_symlinks=False).st_uid for entry in entries} - {own}
        if not users:
            path.chmod(stat.S_IMODE(status.st_mode) & ~0o022)
            log.warning("%s had mode %o. Others may not write to it any more.", path, stat.S_IMODE(status.st_mode))
            return path
    if users:
        with suppress(OSError), tempfile.TemporaryFile(dir=path) as probe:  # The file system may map users.
            users.discard(os.fstat(probe.fileno()).st_uid)
    if users or is_open:
        raise UsageError(
            f"{path}: expected a directory that only this user can change, got mode {status.st_mode & 0o7777:o}, and "
            f"other users {sorted(users)}. Set {variable} to {path}/forebay-{own}, which is then made, or elsewhere."
        )
    return path


def _check_parents(path: Path) -> None:
    """Raise UsageError if any user can replace a directory above a path: by its mode, and without the sticky bit.

    Not below one that others cannot enter; nor for a volume of a pod, which Kubernetes makes with mode 777.
    """
    for folder in reversed(path.parents):
        mode = folder.stat().st_mode
        if not mode & 0o001:
            return
        if mode & 0o1002 == 0o002 and not ("KUBERNETES_SERVICE_HOST" in os.environ and folder.resolve().is_mount()):
            raise UsageError(
                f"{path}: expected a directory that only this user can move, got one below {folder} (mode "
                f"{mode & 0o7777:o}). Set its sticky bit (chmod +t {folder}), or name a directory elsewhere."
            )


def open_own(path: str, flags: int) -> int:
    """Open a file of an `own_directory`: the `opener` of `open`. A link is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def user_cache() -> Path:
    """Return the directory of the user's cache, an `own_directory`: `$FOREBAY_CACHE`, or `forebay` in `cache_home`."""
    path = Path(os.environ.get("FOREBAY_CACHE") or cache_home() / "forebay")
    with suppress(OSError):  # Its user reports what cannot be written.
        own_directory(path, "FOREBAY_CACHE")
    return path


def hint_directory(name: str) -> Path:
    """Make a directory of `user_cache` for what can be done without. Raises OSError, once with a warning."""
    try:
        return own_directory(user_cache() / name)
    except UsageError as error:
        _warn_once(f"What is remembered for the next process is not read or written. {error}")
        raise PermissionError(str(error)) from error


_warn_once = functools.cache(log.warning)


def cache_home() -> Path:
    """Return the directory of all programs' caches: `$XDG_CACHE_HOME` or `~/.cache`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    return Path(configured) if configured.startswith("/") else home_directory() / ".cache"


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the directories of this process' control groups, inner ones first. Source: Linux, cgroups(7)."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if names else "")
        group = base / path.strip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(base))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
