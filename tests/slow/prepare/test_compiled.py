"""Compiled code is kept where it can be written, by the sources that it was compiled from; each in its own process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import forebay

PROGRAM = """
import logging; logging.basicConfig()
import numpy as np
from forebay.prepare.compiled import kernel_directory
from forebay.prepare.clean.pii_phone import digit
print(digit(np.uint8(52)), digit(np.uint8(97)), kernel_directory() or "none")
"""


def run(program: str, package: Path, prefix: tuple[str, ...] = (), cwd: Path | None = None, **environment: str) -> str:
    retained = {
        key: value for key, value in os.environ.items() if key not in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "HOME")
    }
    done = subprocess.run(
        [*prefix, sys.executable, "-B", "-c", program],
        env={**retained, "PYTHONPATH": str(package), **environment}, capture_output=True, text=True, check=False,
        cwd=cwd,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def package(tmp_path) -> Path:
    """A copy of what is installed."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(forebay.__file__).parent, tmp_path / "lib/forebay", ignore=ignore)
    return tmp_path / "lib"


def test_the_directory_is_that_of_the_sources(tmp_path, package: Path):
    """numba itself does not see that a function which another file inlines has changed."""
    first = run(PROGRAM, package, XDG_CACHE_HOME=str(tmp_path / "cache"), HOME="/nowhere")
    assert first.startswith(f"True False {tmp_path}/cache/forebay/kernels-")
    source = package / "forebay/prepare/clean/pii_phone.py"
    stat, text = source.stat(), source.read_text()
    changed = text.replace("48 <= b <= 57", "48 <= b <= 97")
    assert changed != text
    source.write_text(changed)
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = run(PROGRAM, package, XDG_CACHE_HOME=str(tmp_path / "cache"), HOME="/nowhere")
    assert second.startswith("True True ") and second.split()[2] != first.split()[2]


def test_a_first_run_compiles_before_its_tasks(tmp_path, package: Path):
    """All kernels are there when the first task starts; the record has the CPU seconds apart from the stages'."""
    program = """
from pathlib import Path
import forebay
from forebay.prepare.clean.pii import Pii
from forebay.prepare.compiled import kernel_directory
from forebay.prepare.progress import read_progress
for name in ("a", "b"):
    lines = (f"Line {i} of text {name} has words, and mail a{i}@example.com. " for i in range(40))
    Path(f"{name}.txt").write_text(chr(10).join(lines))
def kept():
    return len(list(Path(kernel_directory()).rglob("*.nbc")))
emails = [Pii(kinds=("email",)), "c4"]
for out, filters in ("one", ["pii", "c4"]), ("two", ["pii", "c4"]), ("three", emails), ("four", emails):
    seen = {}
    forebay.prepare_dataset(
        ["a.txt", "b.txt"], out, tokenizer="bytes", filters=filters, dedup=["minhash", "exact"], workers=2,
        on_progress=lambda progress: seen.setdefault(progress.stage, kept()),
    )
    print(next(iter(seen)), kept() - seen["text"], read_progress(out)["cpu_s"].get("kernels", 0) > 0)
"""
    shown = run(program, package, XDG_CACHE_HOME=str(tmp_path / "cache"), HOME="/nowhere", cwd=tmp_path)
    assert shown.splitlines() == ["kernels 0 True", "text 0 False", "kernels 0 True", "text 0 False"]


def test_one_process_compiles_a_kernel(tmp_path, package: Path):
    """Also after the process that compiled it was killed; the others load what it made."""
    program = f"""
import os, subprocess, sys
from pathlib import Path
import numpy as np
from forebay.prepare import dispatcher
from forebay.prepare.compiled import kernel_directory
from forebay.prepare.clean.pii_phone import digit
from forebay.storage.locks import try_acquire
make = dispatcher.Dispatcher._make
def counted(self, sig):
    Path({str(tmp_path)!r}, f"made-{{os.getpid()}}").touch()
    if "die" in os.environ:
        os._exit(9)
    return make(self, sig)
dispatcher.Dispatcher._make = counted
print(digit(np.uint8(52)))
"""
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": "/nowhere", "PYTHONPATH": str(package)}
    command = [sys.executable, "-B", "-c", program]
    killed = subprocess.run(command, env={**os.environ, **environment, "die": "1"}, check=False)
    assert killed.returncode == 9
    processes = [subprocess.Popen(command, env={**os.environ, **environment}) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(list(tmp_path.glob("made-*"))) == 2  # the killed one and its successor


def test_nothing_can_be_written(tmp_path, package: Path):
    """Permissions do not bind root: a mount that is read-only does."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare -m is not allowed here")
    mounts = f'mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path} && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", mounts, "sh")
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    home = str(tmp_path / "home")
    assert "/forebay-" in run(PROGRAM, package, prefix, HOME=home)  # in the temporary directory
    nowhere = f"import tempfile; tempfile.tempdir = {str(tmp_path / 'tmp')!r}\n{PROGRAM}"
    message = run(nowhere, package, prefix, HOME=home)
    assert "True False none" in message and message.count("no directory can be written") == 1


def test_kernels_do_not_import_what_extends_numba(package: Path):
    """Somebody else's functions still do."""
    distribution = package / "slow_extension-1.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: slow_extension\nVersion: 1\n")
    (distribution / "entry_points.txt").write_text("[numba_extensions]\ninit = slow_extension:init\n")
    (package / "slow_extension.py").write_text("def init():\n    print('imported')\n")
    program = f"{PROGRAM}\nimport numba\nnumba.njit(lambda x: x + 1)(1)\n"
    assert run(program, package).splitlines()[0].startswith("True False ")
    assert run(program, package).splitlines()[1:] == ["imported"]
