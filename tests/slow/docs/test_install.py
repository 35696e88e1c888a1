"""The installation that README shows: a wheel, in an environment of its own, runs README's first command."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from support.paths import ROOT


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment,
    )  # fmt: skip


def test_a_wheel_installs_and_prepares(tmp_path):
    """The dependencies are those of this interpreter, by a path file: nothing but the build back end is downloaded."""
    wheel = ["-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", "dist", str(ROOT)]
    for _ in range(3):
        built = run(sys.executable, *wheel, cwd=tmp_path)
        if built.returncode == 0:
            break
    else:
        if "hatchling" in built.stderr and "error" in built.stderr.lower():
            pytest.skip(f"the build back end (hatchling) cannot be downloaded: {built.stderr.strip()[-200:]}")
        pytest.fail(built.stderr)
    (file,) = (tmp_path / "dist").glob("forebay-*.whl")
    venv = tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path).returncode == 0
    python = venv / "bin" / "python"
    installed = run(
        sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", file, cwd=tmp_path
    )
    assert installed.returncode == 0, installed.stderr
    site = next((venv / "lib").glob("python*/site-packages"))
    # Packages of this interpreter come after, and without its path files, so that its own Forebay is not among them.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"Text {i} of the mill race that turns the wheel. " * 20)
    location = run(python, "-c", "import forebay; print(forebay.__file__)", cwd=tmp_path).stdout
    assert location.startswith(str(venv)), location
    prepared = run(
        venv / "bin" / "forebay", "prepare", "texts/", "--out", "wiki", "--tokenizer", "train:300", cwd=tmp_path
    )
    assert prepared.returncode == 0, prepared.stderr
    verified = run(venv / "bin" / "forebay", "verify", "wiki", cwd=tmp_path)
    assert verified.returncode == 0 and verified.stdout.startswith("ok"), verified.stdout + verified.stderr
    counted = run(
        python, "-c",
        "import forebay; print(sum(len(b.sample_ids) for b in forebay.Loader('wiki', seq_len=16, batch_size=4)))",
        cwd=tmp_path,
    )  # fmt: skip
    assert int(counted.stdout) > 20, counted.stderr
