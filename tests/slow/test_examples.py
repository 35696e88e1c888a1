"""Every example runs as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.paths import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS: dict[str, tuple[str, ...]] = {
    "inference": ("libtorrent",),
    "hf_trainer": ("torch", "transformers", "accelerate"),
    "jax_train": ("jax",),
    "leased_ddp": ("torch", "libtorrent"),
    "lightning_module": ("torch", "lightning"),
    "train_ddp": ("torch",),
    "train_fsdp": ("torch",),
    "train_gpt": ("torch",),
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path: Path) -> None:
    missing = [name for name in NEEDS.get(path.stem, ()) if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
