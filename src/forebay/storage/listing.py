"""The files below a folder: `list_files` yields each one, or the reason why it is left out.

Hides: links, loops of links, hidden and special files, and files that only describe a dataset beside them. A link is
followed if its target is below the folder; others only on request. Files of /proc, /sys and /dev (but for
/dev/shm) are never inputs: a corpus would otherwise hold the keys in a process's environment.
"""

import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from forebay.errors import printable
from forebay.storage.addresses import is_hidden

LINK = "a link that leads out of the input folder (--follow-links reads it)"
OUTPUT = "an output of Forebay: a dataset (forebay.Loader reads it) or a report"
_SYSTEM = ("/proc/", "/sys/", "/dev/")
_MAX_STATE_BYTES = 64 << 20
_OF_TEXT = (
    "text.json", "rejects.jsonl", "skipped.jsonl", "contamination.jsonl", "report.html", "report.json",
    "clusters.parquet",
)  # fmt: skip


class Skipped(NamedTuple):
    """A file or folder that is not read, or the rest of a file.

    `status` is `failed` if reading it was tried and failed: then `bytes` of it are missing, -1 if that is not known.
    """

    path: str
    reason: str
    status: str = "skipped"
    bytes: int = 0


def list_files(folder: Path, *, follow_links: bool = False, leave_out: Path | None = None) -> Iterator[Path | Skipped]:
    """Yield every file below a folder, in the order of its path's parts: its path, or why it is left out.

    A folder that is left out is one entry; `leave_out`, where the output goes, is none. `follow_links`: also links
    that lead elsewhere.
    """
    root, output = os.path.realpath(folder), os.path.realpath(leave_out) if leave_out is not None else ""
    if output and Path(root).is_relative_to(output):
        return
    visited = {_identity(Path(root).stat())}
    stack = [_entries(str(folder))]
    while stack:
        entry = next(stack[-1], None)
        if entry is None:
            stack.pop()
            continue
        if isinstance(entry, Skipped):
            yield entry
            continue
        reason, target = "", entry.path
        try:
            stat_result = entry.stat()
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                is_inside = Path(target).is_relative_to(root)
                if not is_inside and not follow_links:
                    reason = LINK
                elif is_inside and stat.S_ISDIR(stat_result.st_mode):
                    reason = "a link to a folder that is read already"
        except OSError as error:
            if entry.is_symlink() and error.errno in (errno.ENOENT, errno.ELOOP):
                yield Skipped(entry.path, "a link that leads nowhere")
            else:
                yield Skipped(entry.path, f"cannot be read: {error.strerror or error}", "failed", -1)
            continue
        if f"{target}/".startswith(_SYSTEM) and not target.startswith("/dev/shm/"):
            reason = "a file of the operating system"
        elif is_hidden(entry.name):
            reason = "hidden"
        elif stat.S_ISDIR(stat_result.st_mode):
            if _identity(stat_result) in visited:
                reason = reason or "a link to a folder that is read already"
            elif not reason and not (output and os.path.realpath(entry.path) == output):
                visited.add(_identity(stat_result))
                stack.append(_entries(entry.path))
            if not reason:
                continue
        elif not stat.S_ISREG(stat_result.st_mode):
            reason = "no regular file (a device, socket or pipe)"
        yield Skipped(entry.path, reason) if reason else Path(entry.path)


def _identity(stat_result: os.stat_result) -> tuple[int, int]:
    return stat_result.st_dev, stat_result.st_ino


def _entries(folder: str) -> Iterator[os.DirEntry[str] | Skipped]:
    try:
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError as error:
        yield Skipped(f"{folder.rstrip('/')}/", f"cannot be read: {error.strerror or error}", "failed", -1)
        return
    path, names = Path(folder), {entry.name for entry in entries}
    is_run = ".progress.json" in names or (".work" in names and (path / ".work/run.json").exists())
    if {"manifest.json", "slices.parquet"} <= names or (is_run and "text.json" not in names):
        yield Skipped(folder, OUTPUT)
        return
    side = _side_files(path, names)
    for entry in entries:
        yield Skipped(entry.path, "describes a dataset that lies beside it") if entry.name in side else entry


def is_saved_dataset(folder: Path) -> bool:
    """Return whether a directory was written by `save_to_disk` of Hugging Face datasets, by its state.json."""
    state = folder / "state.json"
    if not state.is_file():
        return False
    with state.open("rb") as file:
        return b'"_data_files"' in file.read(_MAX_STATE_BYTES)


def _side_files(folder: Path, names: set[str]) -> set[str]:
    """Files that describe what lies beside them: a dataset saved by `datasets`, prepared text, a fetched API."""
    side = set()
    if "state.json" in names and is_saved_dataset(folder):
        side |= {"state.json", "dataset_info.json"}
    if "dataset_dict.json" in names and any(is_saved_dataset(folder / name) for name in names):
        side.add("dataset_dict.json")
    if {"items.jsonl", "cursor.json", "lock"} <= names:
        side |= {"cursor.json", "lock"}
    if {"text.json", "text"} <= names and (folder / "text").is_dir():
        side |= set(_OF_TEXT)
    return side


def count_reasons(skipped: Iterable[Skipped]) -> dict[str, int]:
    """Return how many were left out, by the first reason of each cause."""
    counts = Counter[str]()
    for files in by_cause(skipped):
        counts[files[0].reason] += len(files)
    return dict(sorted(counts.items()))


def by_cause(skipped: Iterable[Skipped]) -> list[list[Skipped]]:
    """Return what is left out in groups: the reasons of a group differ in what they got alone."""
    groups: dict[tuple[bool, str], list[Skipped]] = {}
    for file in skipped:
        cause = re.sub(r", got .*?(?=\. [A-Z]|$)", "", file.reason, count=1)
        groups.setdefault((file.status == "failed", cause), []).append(file)
    return [files for _, files in sorted(groups.items())]


def first_paths(files: Sequence[Skipped]) -> str:
    """Return the first names, safe to print on a terminal."""
    return ", ".join(printable(file.path) for file in files[:3]) + ", …" * (len(files) > 3)


def describe_skipped(skipped: Iterable[Skipped]) -> list[str]:
    """Return a line for each cause, with the first reason and the first names."""
    return [
        f"left out {len(files):,}{' that failed' * (files[0].status == 'failed')}"
        f"{', the first because' * (len({file.reason for file in files}) > 1)}: {files[0].reason} "
        f"({first_paths(files)})"
        for files in by_cause(skipped)
    ]
