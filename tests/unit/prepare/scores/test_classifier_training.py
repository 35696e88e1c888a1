"""The classifier that is trained here: its curve on real text, the same bytes again, and fastText's own scores."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from forebay.cli import main
from forebay.errors import PrepareError
from forebay.prepare.scores.fasttext_model import load_model
from forebay.prepare.scores.train import _curve, train_classifier
from support.preparing import read_lines, write_jsonl
from support.shared_data import shared_data


@pytest.fixture
def sides(tmp_path) -> list[Path]:
    """Prose and verse, a passage a document."""
    paths = []
    for names in (("austen-emma", "melville-moby_dick"), ("milton-paradise", "whitman-leaves")):
        books = [(shared_data("books/gutenberg_en") / f"{name}.txt").read_text("utf-8", "replace") for name in names]
        passages = [book[i : i + 500] for book in books for i in range(1000, 61_000, 500)]
        paths.append(write_jsonl(tmp_path / f"{names[0]}.jsonl", passages))
    return paths


def test_a_classifier_of_real_text_is_one_of_the_library(sides: list[Path], tmp_path, capsys):
    good, other = sides
    command = ["classifier", "train", "--good", str(good), "--bad", str(other), "--set", "held_out=0.2"]
    assert main([*command, "--out", str(tmp_path / "m"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((tmp_path / "m/curve.json").read_text())
    assert result["roc_auc"] > 0.94 and result["average_precision"] > 0.92
    assert 25 < result["documents"]["good"]["held_out"] < 70
    recalls = [point["recall"] for point in result["curve"]]
    assert recalls == sorted(recalls, reverse=True) and recalls[0] > recalls[-1]
    assert main([*command, "--out", str(tmp_path / "n")]) == 0
    assert "ROC AUC" in capsys.readouterr().out
    file = tmp_path / "m/model.bin"
    assert file.read_bytes() == (tmp_path / "n/model.bin").read_bytes()
    model, library = load_model(str(file)), pytest.importorskip("fasttext").load_model(str(file))
    texts = [row["text"] for path in sides for row in read_lines(path)[:100]]
    for text, row in zip(texts, model.probabilities(pa.array(texts, pa.large_string())), strict=True):
        pairs = library.f.predict(text.replace("\n", " ") + "\n", -1, 0.0, "replace")
        expected = {label.removeprefix("__label__"): min(score, 1.0) for score, label in pairs}
        assert dict(zip(model.labels, row.tolist(), strict=True)) == pytest.approx(expected, abs=1e-5)


def test_a_curve_has_areas_and_a_threshold_for_each_share_however_close_the_scores_are():
    result = _curve(np.array([0.9, 0.5, 0.1]), np.array([0.5, 0.3]))
    assert result["roc_auc"] == pytest.approx((2 + 1.5 + 0) / 6)
    assert result["average_precision"] == pytest.approx(1 / 3 * 1 + 1 / 3 * 2 / 3 + 1 / 3 * 3 / 5)
    points = _curve(0.5 + np.arange(100) / 1e6, 0.5 + np.arange(50, 60) / 1e6)["curve"]
    assert [round(point["recall"], 2) for point in points][:5] == [1, 0.99, 0.98, 0.95, 0.9]
    half = next(point for point in points if point["recall"] == 0.5)
    assert half == {"threshold": 0.50005, "precision": 50 / 60, "recall": 0.5, "bad_kept": 1.0}


def test_too_few_documents_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n')
    with pytest.raises(PrepareError, match="classifier: expected good documents to train on"):
        train_classifier([path], [path], tmp_path / "m")
