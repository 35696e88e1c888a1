"""Sequence classifiers: tiny models that are made here, of the library transformers."""

from typing import Any

import numpy as np
import pytest

from forebay.errors import UsageError
from forebay.prepare.scores.classifiers import Transformers
from support.batches import to_batch
from support.bert import WORDS, save_bert

TEXTS = ["w1 w2 w3", "w9", "w5 " * 30, "w7 " * 200, "nothing known", *(f"w{i} w{i + 1} w{i * 2}" for i in range(30))]


def logits(model: Any, text: str) -> Any:
    import torch

    ids = [WORDS.index(word) if word in WORDS else 1 for word in text.split()][:128]
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].numpy()


def test_a_regression_and_a_label(tmp_path):
    model = save_bert(tmp_path / "edu", 1)
    scorer = Transformers(str(tmp_path / "edu"))
    scores = scorer.score(to_batch(TEXTS))[""]
    assert scores.tolist() == pytest.approx([float(logits(model, text)[0]) for text in TEXTS], abs=1e-5)
    assert scores.std() > 0.01
    alone = [scorer.score(to_batch([text]))[""][0] for text in TEXTS]
    np.testing.assert_array_equal(scores, alone)  # a score does not depend on the documents beside it
    model = save_bert(tmp_path / "two", 2)
    high = Transformers(str(tmp_path / "two"), label="high").score(to_batch(TEXTS))[""]
    expected = [np.exp(x[1]) / np.exp(x).sum() for x in (logits(model, text) for text in TEXTS)]
    assert high.tolist() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UsageError, match="label: expected one of low, high, 0, 1, got 'x'"):
        Transformers(str(tmp_path / "two"), label="x").score(to_batch(["w1"]))
