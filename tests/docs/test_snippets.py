"""How a user meets the package: ten short programs, of which each runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import forebay
from forebay.data_node import DataNode
from forebay.network.client import Client
from forebay.network.pki.identity import create_network, join
from forebay.scheduler.server import SchedulerService
from support.local_discovery import LocalDiscovery
from support.paths import ROOT

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

SEQ_LEN, VOCAB = 16, 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, and three datasets of them."""
    base = tmp_path_factory.mktemp("snippets")
    (base / "text").mkdir()
    for i in range(60):
        (base / "text" / f"{i:02}.txt").write_text(f"document {i}\n" * (3 + i % 9))
    for name in ("wiki", "web", "code"):
        forebay.prepare_dataset([base / "text"], base / name, tokenizer="bytes", slice_bytes=4096)
    return base


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))


def loss_of(model: nn.Module, inputs: Any, labels: Any) -> Any:
    return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100)


def test_1_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    samples = forebay.SampleOptions(validation_fraction=0.1)
    train = forebay.Loader("wiki", seq_len=SEQ_LEN, global_batch_size=32, split="train", samples=samples)
    validation = forebay.Loader(
        "wiki", seq_len=SEQ_LEN, batch_size=8, split="validation", shuffle=False, samples=samples
    )
    print(train.describe())
    orders, evaluated = [], []
    for _ in range(3):
        orders.append([batch.sample_ids.tolist() for batch in train])
        evaluated.append([batch.sample_ids.tolist() for batch in validation.take(3)])
    assert "global batch" in capsys.readouterr().out
    assert sorted(chain(*orders[0])) == sorted(chain(*orders[1])) and orders[0] != orders[1] != orders[2]
    assert evaluated[0] == evaluated[1] == evaluated[2] and len(evaluated[0]) == 3


def test_2_ddp() -> None:
    """Two ranks in processes of their own are in `tests/slow/load/test_ddp.py`; here the loop, on one."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    loader = forebay.Loader("wiki", seq_len=SEQ_LEN, global_batch_size=32)
    for batch in loader.to_torch(device="cpu"):
        loss = batch.weight * loss_of(model, batch.inputs, batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(losses) == len(loader) and losses[-1] < losses[0]


def test_3_resume(tmp_path: Path) -> None:
    model = make_model()
    loader = forebay.Loader("wiki", seq_len=SEQ_LEN, global_batch_size=32)
    full = [b.sample_ids.tolist() for b in forebay.Loader("wiki", seq_len=SEQ_LEN, global_batch_size=32, epochs=3)]
    seen = []
    for batch in loader.to_torch():
        seen.append(batch.sample_ids.tolist())
        if loader.step == 5:
            break
    torch.save({"model": model.state_dict(), "data": loader.state_dict()}, tmp_path / "last.pt")

    saved = torch.load(tmp_path / "last.pt")
    loader = forebay.Loader("wiki", seq_len=SEQ_LEN, global_batch_size=32)
    model.load_state_dict(saved["model"])
    loader.load_state_dict(saved["data"])
    for _ in range(loader.epoch, 3):
        for batch in loader.to_torch():
            seen.append(batch.sample_ids.tolist())
    assert seen == full


def test_4_mixture() -> None:
    mixture = forebay.Mixture(
        {"web": "web", "code": "code", "wiki": "wiki"},
        weights=[(0, {"web": 8, "code": 1, "wiki": 1}), (50, {"web": 5, "code": 4, "wiki": 1})],
    )
    loader = forebay.Loader(mixture, seq_len=SEQ_LEN, global_batch_size=20, steps=100)
    assert "repeats" in loader.describe() and "web" in loader.describe()
    counts = np.zeros((2, 3), int)
    for batch in loader:
        counts[batch.step // 50] += np.bincount(batch.dataset_index, minlength=3)
    assert counts.tolist() == [[800, 100, 100], [500, 400, 100]]


def test_5_packing_for_flash_attention() -> None:
    loader = forebay.Loader("wiki", seq_len=128, batch_size=4, packing="best_fit", document_masks=True)
    for batch in loader.to_torch(device="cpu"):
        edges, longest = batch.cu_seqlens, batch.max_seqlen
        assert edges[0] == 0 and edges[-1] == batch.inputs.numel() and int(edges.diff().max()) == longest
        starts = edges[:-1].long()
        assert not batch.position_ids.flatten()[starts].any()  # Each document begins at position 0.
        inside = edges[1:].long()[edges[1:] % 128 != 0]  # A document that is cut continues in another row.
        assert (batch.labels.flatten()[inside - 1] == -100).all()


def test_6_text_tokenized_while_it_is_read() -> None:
    stream = forebay.TextStream("text", tokenizer="bytes", seq_len=SEQ_LEN, batch_size=8)
    seen = []
    for batch in stream.to_torch(device="cpu"):
        seen.append(batch.sample_ids.tolist())
        state = stream.state_dict()
        if stream.step == 4:
            break
    other = forebay.TextStream("text", tokenizer="bytes", seq_len=SEQ_LEN, batch_size=8)
    other.load_state_dict(state)
    seen += [batch.sample_ids.tolist() for batch in other.to_torch()]
    whole = forebay.TextStream("text", tokenizer="bytes", seq_len=SEQ_LEN, batch_size=8)
    assert seen == [batch.sample_ids.tolist() for batch in whole]


LEASED = """
import forebay, torch

losses = []
table = torch.zeros(512, 512, requires_grad=True)
loader = forebay.Loader()  # dataset, scheduler, identity, sizes from the environment
for batch in loader.to_torch():
    loss = torch.nn.functional.cross_entropy(table[batch.inputs].flatten(0, 1), batch.labels.flatten())
    (gradient,) = torch.autograd.grad(batch.weight * loss, table)
    table.data -= 100 * gradient
    losses.append(loss.item())
    loader.commit()  # optional: used now, not at the next batch
print(loader.stats()["scheduler_s"] > 0, losses[-1] < losses[0])
"""


def test_7_leases(folder: Path, tmp_path: Path) -> None:
    """`forebay worker -- python train.py`, with a data node and a scheduler."""
    create_network(tmp_path / "network", "lab")
    data, lender, carol = (join(tmp_path / "network", tmp_path / name, name) for name in ("data", "lender", "carol"))
    (tmp_path / "train.py").write_text(LEASED)
    discovery = LocalDiscovery()
    with DataNode(data, [forebay.open_dataset("wiki")], "127.0.0.1", 0, discovery, ttl_s=30), Client(lender) as client:
        service = SchedulerService(lender, "wiki", discovery, client, tmp_path / "state", seq_len=SEQ_LEN)
        service.start()
        try:
            command = [sys.executable, "-m", "forebay", "worker", "--scheduler", service.address, "--json"]
            command += ["--identity", str(carol.node_dir), "--cache-dir", str(tmp_path / "cache")]
            done = subprocess.run(
                [*command, "--", sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            printed, last = done.stdout.splitlines()
            assert printed == "True True" and service.is_done()
            assert json.loads(last)["report"]["samples"] == service.status()["samples_used"] > 100
        finally:
            service.stop()


@forebay.text_filter("enough_lines", version="1")
def enough_lines(batch: pa.RecordBatch, min_lines: int = 3) -> pa.Array:
    return pc.greater_equal(pc.count_substring(batch["text"], "\n"), min_lines - 1)


def test_8_prepare_with_a_filter(tmp_path: Path) -> None:
    result = forebay.prepare_dataset(
        ["text"], tmp_path / "filtered", tokenizer="bytes", filters=[enough_lines(min_lines=9)], seed=0
    )
    assert result.dropped.get("enough_lines", 0) > 10
    assert len(result.open()) == 60 - sum(result.dropped.values())


@pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed")
def test_9_jax() -> None:
    import jax

    loader = forebay.Loader(
        "wiki", seq_len=SEQ_LEN, global_batch_size=32, rank=jax.process_index(), world_size=jax.process_count()
    )
    shapes = {(batch.inputs.shape, str(batch.inputs.dtype)) for batch in loader.to_jax()}
    assert shapes == {((32, SEQ_LEN), "int32")}


def test_10_notebook() -> None:
    dataset = forebay.open_dataset("web")
    assert "document 0" in dataset._repr_html_()
    assert len(dataset[0][:8]) == 8 and len(dataset) == 60 and dataset.document(7).text.startswith("document 7")
    loader = forebay.Loader(dataset, seq_len=SEQ_LEN, batch_size=8)
    batch = next(iter(loader.take(1)))
    assert "document" in batch._repr_html_() and loader.step == 0
    assert [len(row) > 0 for row in loader.documents(batch)] == [True] * 8


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


def test_a_users_code_is_typed_strictly(tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "mypy.ini").write_text(MYPY)
    options = ["--strict", "--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", os.devnull]
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
