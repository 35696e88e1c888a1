"""Replacing an output: the old one or the new one is there, whatever fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forebay.convert import convert
from forebay.errors import UsageError
from forebay.formats.conversion import ConvertOptions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "t.npy", np.arange(1000, dtype=np.uint16))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("old")
    return tmp_path


def names_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize("failing", [{1}, {2}, {2, 3}])
def test_each_rename_may_fail_and_the_old_output_stays(
    folder: Path, failing: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert names_below(folder) == ["out", "precious.txt", "t.npy"]
    convert(folder / "t.npy", folder / "out", "forebay", ConvertOptions(), force=True)
    names = names_below(folder)
    assert "manifest.json" in names and "precious.txt" not in names
    assert sorted(path.name for path in folder.iterdir()) == ["out", "t.npy"]
