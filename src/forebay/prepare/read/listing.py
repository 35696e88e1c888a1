"""The files below a folder, for prepare, stream and convert: `list_files` gives each, or says why it is left out.

Hides: links, loops of links, hidden and special files, and which files only describe a dataset that lies beside them.
A link is followed if what it leads to lies below the folder; others only if asked. Nothing of /proc, /sys and /dev is
an input, whatever leads there: a corpus would else hold the keys in a process's environment.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from forebay.formats import arrow

LINK = "a link that leads out of the input folder (--follow-links reads it)"
_SYSTEM = ("/proc", "/sys", "/dev")
_OF_TEXT = ("text.json", "rejects.jsonl", "skipped.jsonl", "report.html", "clusters.parquet")


class Skipped(NamedTuple):
    """A file or folder that is not read; `status` is `failed` if it should have been and could not."""

    path: str
    reason: str
    status: str = "skipped"


def list_files(folder: Path, *, follow_links: bool = False, leave_out: Path | None = None) -> Iterator[Path | Skipped]:
    """Every file below a folder, in the order of its path's parts: its path, or why it is left out.

    A folder that is left out is one entry; `leave_out`, where the output goes, is none. `follow_links`: also to what
    lies elsewhere.
    """
    root, ours = os.path.realpath(folder), os.path.realpath(leave_out) if leave_out is not None else ""
    if ours and Path(root).is_relative_to(ours):
        return
    seen = {_identity(Path(root).stat())}
    stack = [_entries(str(folder))]
    while stack:
        found = next(stack[-1], None)
        if found is None:
            stack.pop()
            continue
        if isinstance(found, Skipped):
            yield found
            continue
        why, target = "", found.path
        try:
            facts = found.stat()
            if found.is_symlink():
                target = os.path.realpath(found.path)
                inside = Path(target).is_relative_to(root)
                if not inside and not follow_links:
                    why = LINK
                elif inside and stat.S_ISDIR(facts.st_mode):
                    why = "a link to a folder that is read already"
        except OSError as error:
            yield Skipped(
                found.path, "a link that leads nowhere" if found.is_symlink() else error.strerror or str(error)
            )
            continue
        if any(Path(target).is_relative_to(place) for place in _SYSTEM):
            why = "a file of the operating system"
        elif found.name.startswith("."):
            why = "hidden"
        elif stat.S_ISDIR(facts.st_mode):
            if _identity(facts) in seen:
                why = why or "a link to a folder that is read already"
            elif not why and not (ours and os.path.realpath(found.path) == ours):
                seen.add(_identity(facts))
                stack.append(_entries(found.path))
            if not why:
                continue
        elif not stat.S_ISREG(facts.st_mode):
            why = "no regular file (a device, socket or pipe)"
        yield Skipped(found.path, why) if why else Path(found.path)


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


def _entries(folder: str) -> Iterator[os.DirEntry[str] | Skipped]:
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        yield Skipped(folder, f"cannot be read: {error.strerror or error}", "failed")
        return
    side = _side_files(Path(folder), {entry.name for entry in entries})
    for entry in entries:
        yield Skipped(entry.path, "describes a dataset that lies beside it") if entry.name in side else entry


def _side_files(folder: Path, names: set[str]) -> set[str]:
    """Files that describe what lies beside them: a dataset saved by `datasets`, prepared text, a fetched API."""
    side: set[str] = set()
    if "state.json" in names and arrow.is_saved(folder):
        side |= {"state.json", "dataset_info.json"}
    if "dataset_dict.json" in names and any(arrow.is_saved(folder / name) for name in names):
        side.add("dataset_dict.json")
    if {"items.jsonl", "cursor.json", "lock"} <= names:
        side |= {"cursor.json", "lock"}
    if {"text.json", "text"} <= names and (folder / "text").is_dir():
        side |= set(_OF_TEXT)
    return side


def count_reasons(skipped: Iterable[Skipped]) -> dict[str, int]:
    """How many were left out, by reason."""
    return dict(sorted(Counter(one.reason for one in skipped).items()))


def describe_skipped(skipped: Iterable[Skipped]) -> list[str]:
    """A line a reason, with the first names, as a terminal may show it."""
    lines = []
    by_reason: dict[str, list[str]] = {}
    for one in skipped:
        by_reason.setdefault(one.reason, []).append(one.path)
    for reason, paths in sorted(by_reason.items()):
        shown = ", ".join(shown_path(path) for path in paths[:3]) + (", …" if len(paths) > 3 else "")
        lines.append(f"left out {len(paths):,}: {reason} ({shown})")
    return lines


def shown_path(path: str) -> str:
    """A path, which may be any bytes, as text that can be written down."""
    return "".join(c if c.isprintable() else "\ufffd" for c in path)
