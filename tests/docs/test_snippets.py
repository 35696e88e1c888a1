"""How a user meets the package: short programs."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import forebay

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

SEQ_LEN = 16


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


def test_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_mixture() -> None:
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


def test_packing_for_flash_attention() -> None:
    loader = forebay.Loader("wiki", seq_len=128, batch_size=4, packing="best_fit", document_masks=True)
    for batch in loader.to_torch(device="cpu"):
        edges, longest = batch.cu_seqlens, batch.max_seqlen
        assert edges[0] == 0 and edges[-1] == batch.inputs.numel() and int(edges.diff().max()) == longest
        starts = edges[:-1].long()
        assert not batch.position_ids.flatten()[starts].any()  # Each document begins at position 0.
        inside = edges[1:].long()[edges[1:] % 128 != 0]  # A document that is cut continues in another row.
        assert (batch.labels.flatten()[inside - 1] == -100).all()


@forebay.text_filter("enough_lines", version="1")
def enough_lines(batch: pa.RecordBatch, min_lines: int = 3) -> pa.Array:
    return pc.greater_equal(pc.count_substring(batch["text"], "\n"), min_lines - 1)


def test_prepare_with_a_filter(tmp_path: Path) -> None:
    result = forebay.prepare_dataset(
        ["text"], tmp_path / "filtered", tokenizer="bytes", filters=[enough_lines(min_lines=9)], seed=0
    )
    assert result.dropped.get("enough_lines", 0) > 10
    assert len(result.open()) == 60 - sum(result.dropped.values())


def test_notebook() -> None:
    dataset = forebay.open_dataset("web")
    assert "document 0" in dataset._repr_html_()
    assert len(dataset[0][:8]) == 8 and len(dataset) == 60 and dataset.document(7).text.startswith("document 7")
    loader = forebay.Loader(dataset, seq_len=SEQ_LEN, batch_size=8)
    batch = next(iter(loader.take(1)))
    assert "document" in batch._repr_html_() and loader.step == 0
    assert [len(row) > 0 for row in loader.documents(batch)] == [True] * 8
