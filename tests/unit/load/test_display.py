"""The descriptions that objects show: lines, cards for notebooks with escaped text, documents behind a batch."""

import numpy as np
import pytest

import forebay
from forebay import DocumentSubset, Loader, Mixture, OrderOptions, SampleOptions
from forebay.errors import UsageError
from forebay.prepare.run import PrepareResult
from support.feeding import make_dataset

TEXTS = [f"<b>document</b> {i} " + "word " * (i % 7) for i in range(200)]


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> PrepareResult:
    folder = tmp_path_factory.mktemp("text")
    for i, text in enumerate(TEXTS):
        (folder / f"{i:03}.txt").write_text(text)
    return forebay.prepare_dataset([folder], folder / "out", tokenizer="bytes", slice_bytes=4096, workers=1)


def test_a_description_has_the_order_the_cache_and_the_position(tmp_path):
    data = make_dataset(tmp_path / "data", 4, 16, 8)
    loader = Loader(data, seq_len=8, batch_size=4, cache_dir=tmp_path / "cache", cache_bytes=1 << 20, epochs=2)
    next(iter(loader))
    lines = dict(line.split(":", 1) for line in loader.describe().splitlines())
    assert "4 slices" in lines["dataset"] and "64 samples of 8 tokens" in lines["dataset"]
    assert "epoch 0, step 1" in lines["position"] and "16 an epoch; epochs in a pass: 2" in lines["steps"]
    assert "by all 1.00 times the dataset" in lines["fetched"] and "1.05 MB" in lines["cache"]
    assert repr(loader).startswith("Loader(dataset='") and "seq_len=8" in repr(loader) and "step 1," in repr(loader)
    loader.close()


def test_a_description_of_a_mixture_says_how_often_each_dataset_repeats(tmp_path):
    small, large = make_dataset(tmp_path / "small", 2, 16, 8), make_dataset(tmp_path / "large", 8, 16, 8)
    mixture = Mixture({"small": small, "large": large}, [(0, {"small": 1, "large": 1}), (10, {"large": 1})])
    loader = Loader(mixture, seq_len=8, batch_size=8, steps=30)
    assert "small 1.25 times, large 1.56 times" in loader.describe()
    assert "steps=30" in loader.settings in repr(loader)
    card = mixture._repr_html_()
    assert "from step 10" in card and "large 1" in card and str(small) in card


def test_cards_escape_what_they_show(result):
    dataset = result.open()
    loader = Loader(dataset, seq_len=32, batch_size=4, document_masks=True)
    batch = next(iter(loader.take(1)))
    for shown in (dataset, batch, loader, result, result.report):
        card = shown._repr_html_()
        assert card.startswith("<div") and "<b>document</b>" not in card and "<script" not in card
    assert "&lt;/b&gt;" in batch._repr_html_()
    assert "&lt;b&gt;document&lt;/b&gt; 0" in dataset._repr_html_() and f"{result.tokens:,}" in result._repr_html_()
    assert batch._repr_html_().count("<span") >= len(batch.inputs) and "4 an epoch" not in batch._repr_html_()
    hostile = Mixture({"<script>": result.path}, {"<script>": 1})
    assert "<script>" not in hostile._repr_html_() and "&lt;script&gt;" in hostile._repr_html_()


def test_a_card_of_rows_has_their_shapes():
    batch = forebay.RowBatch(
        tensors={"<x>": np.zeros((2, 3), np.uint8)}, sample_ids=np.arange(2), epoch=0, step=0, epoch_step=0
    )
    assert "&lt;x&gt;" in batch._repr_html_() and "uint8 [2, 3]" in batch._repr_html_()


@pytest.mark.parametrize("packing, split", [("concat", None), ("best_fit", "train")])
def test_the_documents_of_a_batch(result, packing, split):
    dataset = result.open()
    samples = SampleOptions(
        documents=DocumentSubset(exclude=[3, 4, 11]), validation_fraction=0.3 if split else 0.0, pad_id=0
    )
    loader = Loader(
        dataset, seq_len=48, batch_size=4, packing=packing, split=split, samples=samples, document_masks=True,
        order=OrderOptions(lanes=1),
    )  # fmt: skip
    numbers = set()
    for batch in loader:
        rows = loader.documents(batch)
        assert len(rows) == len(batch)
        for documents, row, ids in zip(rows, batch.inputs, batch.document_ids):
            assert len(documents) == ids.max() + 1
            for index, document in enumerate(documents):
                tokens = row[ids == index].tolist()
                full = document.tokens.tolist()
                assert any(full[i : i + len(tokens)] == tokens for i in range(len(full)))
                assert document.text.startswith("<b>document</b>")
                numbers.add(document.index)
    assert not numbers & {3, 4, 11} and len(numbers) > 10


def test_a_subset_of_a_file(tmp_path):
    (tmp_path / "ids.txt").write_text("17\n3\n3\n")
    np.save(tmp_path / "ids.npy", np.array([3, 17]))
    subsets = [DocumentSubset.from_file(tmp_path / f"ids.{kind}", min_tokens=2) for kind in ("txt", "npy")]
    assert {subset.digest() for subset in subsets} == {DocumentSubset([3, 17], min_tokens=2).digest()}
    others = [((3,), 2), ((3, 17), 1), ((3, 17), 2, 9)]
    assert len({subsets[0].digest(), *(DocumentSubset(*other).digest() for other in others)}) == 4
    (tmp_path / "ids.txt").write_text("17 x")
    for wrong in ("ids.txt", "none.txt"):
        with pytest.raises(UsageError, match=f"{wrong}: expected document numbers"):
            DocumentSubset.from_file(tmp_path / wrong)
