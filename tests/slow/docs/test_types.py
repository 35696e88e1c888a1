"""A program of a user is typed strictly, and wrong arguments are errors of mypy."""

import os
import subprocess
import sys

from support.paths import ROOT

TYPED = """
from typing import Any

import numpy as np
from numpy.typing import NDArray
import torch
import forebay

train = forebay.Loader("wiki", seq_len=2048, global_batch_size=512, split="train")
for epoch in range(3):
    for batch in train:
        inputs: NDArray[Any] = batch.inputs
        total: int = batch.num_labels
        reveal_type(batch)
for first in train.take(50):
    reveal_type(first)
for tensors in train.to_torch(device="cuda"):
    loss = tensors.weight * torch.ones(1)
    reveal_type(tensors)
images = forebay.Loader("mnist", batch_size=8)
for rows in images:
    pixels: NDArray[Any] = rows["images"]
    reveal_type(rows)
for named in train.to_torch(style="plain"):
    reveal_type(named)
"""
WRONG = """
import forebay

images = forebay.Loader("mnist", batch_size=8)
for rows in images:
    rows.cu_seqlens
forebay.Loader("wiki", seq_len=2048, batch_size=8, packing="chunk")
forebay.OrderOptions(assignment="hash")
"""


# Types that a user sees are Forebay's, NumPy's and PyTorch's: analysing all that these import takes five times as long.
MYPY = """
[mypy]
follow_imports = skip
[mypy-forebay.*,numpy.*,torch,torch._tensor]
follow_imports = silent
"""


def test_a_users_code_is_typed_strictly(tmp_path):
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "mypy.ini").write_text(MYPY)
    options = f"--strict --config-file {tmp_path}/mypy.ini --cache-dir {os.devnull}".split()
    command = [sys.executable, "-m", "mypy", *options, "--ignore-missing-imports"]
    examples = [str(ROOT / "examples" / name) for name in ("numpy_loop.py", "resume_elsewhere.py")]
    done = subprocess.run([*command, "typed.py", "wrong.py", *examples], capture_output=True, text=True, cwd=tmp_path)
    types = [line.partition('"')[2].rstrip('"') for line in done.stdout.splitlines() if "Revealed type" in line]
    array, tensor = "numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]", "torch._tensor.Tensor"
    assert [name.replace("forebay.load.batch.", "").replace("builtins.", "") for name in types] == [
        f"TokenBatch[{array}]", f"TokenBatch[{array}]", f"TokenBatch[{tensor}]", f"RowBatch[{array}]",
        "dict[str, Any]",
    ], done.stdout  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 3 and all(line.startswith("wrong.py") for line in errors), done.stdout
