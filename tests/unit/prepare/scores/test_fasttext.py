"""fastText classifiers, beside fastText's own library: every loss, dense and quantised; and files that are damaged."""

import json
import random

import numpy as np
import pyarrow as pa
import pytest

from forebay.errors import UsageError
from forebay.prepare.scores.classifiers import FastText
from forebay.prepare.scores.fasttext_model import load_model
from support.batches import to_batch
from support.paths import GOLDEN as GOLDEN_FILES

GOLDEN = GOLDEN_FILES / "fasttext"
EXPECTED = json.loads((GOLDEN / "scores.json").read_text("utf-8"))
TEXTS = EXPECTED["texts"]
MODELS = sorted(EXPECTED["scores"])


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_library_whatever_texts_are_beside(name):
    model = load_model(str(GOLDEN / name))
    scores = model.probabilities(pa.array(TEXTS, pa.large_string()))
    for text, row, expected in zip(TEXTS, scores, EXPECTED["scores"][name], strict=True):
        (alone,) = model.probabilities(pa.array([text], pa.large_string()))
        np.testing.assert_array_equal(row, alone)
        if expected:
            assert dict(zip(model.labels, row.tolist(), strict=True)) == pytest.approx(expected, abs=2e-5), text
        else:
            assert np.isnan(row).all(), text


def test_columns_of_the_scorer():
    path = str(GOLDEN / "0.bin")
    expected = EXPECTED["scores"]["0.bin"]
    labelled = FastText(path, label="__label__l0").score(to_batch(TEXTS[:2]))
    assert labelled[""].tolist() == pytest.approx([scores["l0"] for scores in expected[:2]], abs=1e-5)
    best = FastText(path).score(to_batch([*TEXTS[:2], " "]))
    assert best[""].to_pylist() == [max(scores, key=scores.__getitem__) for scores in expected[:2]] + [""]
    assert best["score"].tolist()[:2] == pytest.approx([max(scores.values()) for scores in expected[:2]], abs=1e-5)
    with pytest.raises(UsageError, match=r"label: expected one of the model's labels \(l.*, got 'other'"):
        FastText(path, label="other").score(to_batch(["w1é"]))


def test_damaged_files_are_errors(tmp_path):
    """Cut anywhere, or with any of the numbers of its header and dictionary changed: an error or scores, no crash."""
    rng = random.Random(0)
    for model in MODELS:
        data = (GOLDEN / model).read_bytes()
        for number in range(16):
            damaged = bytearray(data)
            if number < 6:
                damaged = damaged[: rng.randrange(len(data))]
            else:
                start = rng.choice(
                    [rng.randrange(8, 120), rng.randrange(len(data) - 8), len(data) - rng.randrange(9, 99)]
                )
                damaged[start : start + 4] = rng.choice([b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f", rng.randbytes(4)])
            file = tmp_path / f"{model}-{number}"
            file.write_bytes(damaged)
            try:
                scores = load_model(str(file)).probabilities(pa.array(TEXTS, pa.large_string()))
            except UsageError as error:
                assert str(error).startswith("model: expected a fastText model")
            else:
                assert scores.shape[0] == len(TEXTS)
    for name, content in (("none", None), ("empty", b""), ("other", b"not a model at all")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match="model: expected a fastText model"):
            load_model(str(tmp_path / name))
