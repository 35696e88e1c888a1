"""Compiled code is kept where no other user may write. `tests/slow/prepare/test_compiled.py` compiles some."""

from pathlib import Path

from forebay.prepare import compiled


def test_what_others_may_write_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    inner = compiled.kernel_directory.__wrapped__
    result = Path(inner())
    assert result.parent == tmp_path / "forebay"
    result.chmod(0o1777)
    assert Path(inner()).parent != tmp_path / "forebay"
