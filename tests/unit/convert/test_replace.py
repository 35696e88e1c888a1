"""Replacing an output: the old one or the new one is there, whatever fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forebay.convert import convert
from forebay.errors import UsageError
from forebay.formats.conversion import ConvertOptions

RUN = """
import os, signal, sys
from pathlib import Path
from forebay import convert as module
from forebay.formats.conversion import ConvertOptions
folder, moment = Path(sys.argv[1]), int(sys.argv[2])
real, calls = Path.rename, []
def rename(self, target):
    calls.append(target)
    if len(calls) == moment:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, target)
def removed(path, ignore_errors=False):
    os.kill(os.getpid(), signal.SIGKILL)
Path.rename = rename
if moment == 0:
    module._remove = module.shutil.rmtree = removed
module.convert(folder / "t.npy", folder / "out", "forebay", ConvertOptions(), force=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "t.npy", np.arange(1000, dtype=np.uint16))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("old")
    return tmp_path


def held(folder: Path) -> str:
    """Which output has the name; a part of one is neither."""
    names = sorted(path.name for path in (folder / "out").iterdir())
    if names == ["precious.txt"]:
        return "old"
    assert "manifest.json" in names and "precious.txt" not in names, names
    return "new"


def test_the_old_output_is_replaced_and_removed(folder: Path) -> None:
    convert(folder / "t.npy", folder / "out", "forebay", ConvertOptions(), force=True)
    assert held(folder) == "new"
    assert sorted(path.name for path in folder.iterdir()) == ["out", "t.npy"]


@pytest.mark.parametrize("failing", [{1}, {2}, {2, 3}])
def test_each_rename_may_fail(folder: Path, failing: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Path.rename, []

    def rename(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) in failing:
            raise OSError(5, "injected", str(self))
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(OSError, match="injected"):
            convert(folder / "t.npy", folder / "out", "forebay", ConvertOptions(), force=True)
    with pytest.raises(UsageError, match="path that is free"):  # The next run gives the old one its name again.
        convert(folder / "t.npy", folder / "out", "forebay", ConvertOptions())
    assert held(folder) == "old"
    assert sorted(path.name for path in folder.iterdir()) == ["out", "t.npy"]


@pytest.mark.parametrize(("moment", "left"), [(1, "old"), (2, "old"), (0, "new")])
def test_a_kill_at_any_moment(folder: Path, moment: int, left: str) -> None:
    """Before each rename, and (0) before the old output is removed."""
    command = [sys.executable, "-c", RUN, str(folder), str(moment)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    with pytest.raises(UsageError, match="path that is free"):
        convert(folder / "t.npy", folder / "out", "forebay", ConvertOptions())
    assert held(folder) == left
    convert(folder / "t.npy", folder / "out", "forebay", ConvertOptions(), force=True)
    assert held(folder) == "new"
    assert sorted(path.name for path in folder.iterdir()) == ["out", "t.npy"]
