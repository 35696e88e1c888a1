"""The one writer of files."""

import os
from pathlib import Path

import pytest

from forebay import files as atomic
from forebay.files import (
    atomic_write,
    commit_files,
    open_atomic,
    remove_stale,
    temporary_directory,
    temporary_path,
)


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path):
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


def test_files_are_flushed_then_renamed_then_their_directories(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        events.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def record_replace(source, target):
        events.append(f"rename {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    for name in ("1", "2"):
        (tmp_path / name).write_bytes(b"")
    commit_files({tmp_path / "1": tmp_path / "a", tmp_path / "2": tmp_path / "b"})
    assert events == ["sync 1", "sync 2", "rename a", "rename b", f"sync {tmp_path.name}"]


def test_only_what_dead_processes_of_this_machine_left_is_removed(tmp_path):
    ours = temporary_path(tmp_path / "mine")
    dead = ours.with_name(ours.name.replace(f".{os.getpid()}.", f".{2**22 + 1}."))  # above all ids of processes
    dead.touch()
    dead.with_name(dead.name.replace("mine", "folder")).mkdir()
    theirs = ours.with_name(ours.name.replace(f".{atomic.HOST}.{os.getpid()}.", ".elsewhere.1999999999."))
    others = [ours, theirs, tmp_path / ".a.tmp", tmp_path / "a.tmp", tmp_path / f".a.{atomic.HOST}.x.tmp"]
    for path in others:
        path.touch()
    remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(others)
    remove_stale(tmp_path / "absent")
