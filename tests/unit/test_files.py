"""The one writer of files, and that there is no other."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import forebay
from forebay import files as atomic
from forebay.files import (
    atomic_write,
    commit_files,
    open_atomic,
    remove_stale,
    temporary_directory,
    temporary_path,
)

SRC = Path(forebay.__file__).parent
RENAMES = {"rename", "replace", "renames", "move"}
ALLOWED = {
    "files.py": {"replace"},
    "convert.py": {"rename"},  # A directory that is complete and synced takes its name.
}
TEMPORARY = {
    "load/shared_memory.py": {"mkstemp"},  # The memory that processes share: never a file that stays.
}


def is_text(call: ast.Call) -> bool:
    """Whether `a.replace(…)` cannot be of a path: that takes one argument."""
    assert isinstance(call.func, ast.Attribute)
    value = call.func.value
    is_module = isinstance(value, ast.Name) and value.id in ("os", "shutil")
    return not is_module and call.func.attr == "replace" and (len(call.args) != 1 or bool(call.keywords))


def test_nothing_else_renames_files_or_names_temporary_ones() -> None:
    result: dict[str, set[str]] = {}
    temporary: dict[str, set[str]] = {}
    for path in sorted(SRC.rglob("*.py")):
        name = path.relative_to(SRC).as_posix()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            attribute, value = node.func.attr, node.func.value
            of = value.id if isinstance(value, ast.Name) else ""
            if attribute in RENAMES and of != "dataclasses" and not is_text(node):
                result.setdefault(name, set()).add(attribute)
            if of == "tempfile" and attribute in ("mkstemp", "mktemp", "NamedTemporaryFile"):
                temporary.setdefault(name, set()).add(attribute)
    assert result == ALLOWED, "write files by forebay.files"
    assert temporary == TEMPORARY, "write files by forebay.files"


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 126)
    atomic_write(path, b"old")
    with pytest.raises(ZeroDivisionError), open_atomic(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    with pytest.raises(IsADirectoryError):
        atomic_write(tmp_path, b"new")
    with temporary_directory(path) as folder:
        (folder / "scratch").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"
    with open_atomic(path, 0o600) as file:
        file.write(b"new")
        file.close()
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600


def test_files_are_flushed_then_renamed_then_their_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        events.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        events.append(f"rename {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    for name in ("1", "2"):
        (tmp_path / name).write_bytes(b"")
    commit_files({tmp_path / "1": tmp_path / "a", tmp_path / "2": tmp_path / "b"})
    assert events == ["sync 1", "sync 2", "rename a", "rename b", f"sync {tmp_path.name}"]


def test_only_what_dead_processes_of_this_machine_left_is_removed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from forebay.files import *\n"
        "folder = Path(sys.argv[1])\n"
        "with temporary_directory(folder / 'b') as scratch, open_atomic(folder / 'a') as file:\n"
        "    (scratch / 'c').touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path]).returncode == -9
    remaining = {path.name for path in tmp_path.iterdir()}
    assert len(remaining) == 2 and all(socket.gethostname()[:8] in name for name in remaining)
    ours = temporary_path(tmp_path / "mine")
    theirs = ours.with_name(ours.name.replace(f".{atomic.HOST}.{os.getpid()}.", ".elsewhere.1999999999."))
    others = [ours, theirs, tmp_path / ".a.tmp", tmp_path / "a.tmp", tmp_path / f".a.{atomic.HOST}.x.tmp"]
    for path in others:
        path.touch()
    remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(others)
    remove_stale(tmp_path / "absent")
