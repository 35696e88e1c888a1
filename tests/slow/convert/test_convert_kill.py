"""A conversion that is killed at any moment: the old output or the new one has the name, and the next run succeeds.

The process kills itself at a call, so nothing depends on time.
"""

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
folder, moment = Path(sys.argv[1]), sys.argv[2]
rename, calls = Path.rename, []
def kill(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)
def counted(self, target):
    calls.append(target)
    return kill() if moment == f"rename {len(calls)}" else rename(self, target)
Path.rename = counted
if moment == "removal":
    module._remove = module.shutil.rmtree = kill
options = ConvertOptions(**{"on_progress": kill} if moment == "write" else {})
module.convert(folder / "t.npy", folder / "out", "forebay", options, force=True)
"""


def is_new(out: Path) -> bool:
    """Return whether the whole new output has the name; if not, it is the whole old one."""
    names = sorted(path.name for path in out.iterdir())
    assert names == ["precious.txt"] or ("manifest.json" in names and "precious.txt" not in names)
    return "manifest.json" in names


@pytest.mark.parametrize("moment", ["write", "rename 1", "rename 2", "removal"])
def test_a_kill_at_any_moment(tmp_path, moment):
    source, out = tmp_path / "t.npy", tmp_path / "out"
    np.save(source, np.arange(1000, dtype=np.uint16))
    out.mkdir()
    (out / "precious.txt").write_text("old")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path), moment], env=environment)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(UsageError, match="path that is free"):
        convert(source, out, "forebay", ConvertOptions())
    assert is_new(out) is (moment == "removal")
    convert(source, out, "forebay", ConvertOptions(), force=True)
    assert is_new(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "t.npy"]
