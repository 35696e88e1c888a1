"""Sequence classifiers: tiny models that are made here, of the library transformers and of ONNX."""

from typing import Any

import numpy as np
import pytest

from forebay.errors import UsageError
from forebay.prepare.scores.classifiers import Onnx, Transformers
from support.batches import to_batch
from support.bert import WORDS, save_bert, save_tokenizer

TEXTS = ["w1 w2 w3", "w9", "w5 " * 30, "w7 " * 200, "nothing known", *(f"w{i} w{i + 1} w{i * 2}" for i in range(30))]


def logits(model: Any, text: str) -> Any:
    import torch

    ids = [WORDS.index(word) if word in WORDS else 1 for word in text.split()][:128]
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].numpy()


def test_a_regression_and_a_label(tmp_path):
    model = save_bert(tmp_path / "edu", 1)
    scorer = Transformers(str(tmp_path / "edu"), max_tokens=128)
    scores = scorer.score(to_batch(TEXTS))[""]
    assert scores.tolist() == pytest.approx([float(logits(model, text)[0]) for text in TEXTS], abs=1e-5)
    assert scores.std() > 0.01
    alone = [scorer.score(to_batch([text]))[""][0] for text in TEXTS]
    np.testing.assert_array_equal(scores, alone)  # a score does not depend on the documents beside it
    model = save_bert(tmp_path / "two", 2)
    high = Transformers(str(tmp_path / "two"), label="high", max_tokens=128).score(to_batch(TEXTS))[""]
    expected = [np.exp(x[1]) / np.exp(x).sum() for x in (logits(model, text) for text in TEXTS)]
    assert high.tolist() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UsageError, match="label: expected one of low, high, 0, 1, got 'x'"):
        Transformers(str(tmp_path / "two"), label="x").score(to_batch(["w1"]))


def test_an_onnx_model(tmp_path):
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    # The logit is the mean of a number of each token.
    weights = np.linspace(-1, 2, len(WORDS), dtype=np.float32).reshape(-1, 1)
    nodes = [
        helper.make_node("Gather", ["weights", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=kinds.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["wide"]),
        helper.make_node("Mul", ["rows", "wide"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "middle"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["wide", "middle"], ["count"], keepdims=0),
        helper.make_node("Div", ["sum", "count"], ["logits"]),
    ]
    constants = {"weights": weights, "last": np.array([2]), "middle": np.array([1])}
    graph = helper.make_graph(
        nodes, "mean",
        [helper.make_tensor_value_info(n, kinds.INT64, ["b", "t"]) for n in ("input_ids", "attention_mask")],
        [helper.make_tensor_value_info("logits", kinds.FLOAT, ["b", 1])],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(tmp_path / "model.onnx"))
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    scores = Onnx(str(tmp_path)).score(to_batch(TEXTS))[""]
    expected = [np.mean([weights[WORDS.index(w) if w in WORDS else 1] for w in text.split()]) for text in TEXTS]
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)
    (tmp_path / "model.onnx").write_bytes(b"no model")
    other = tmp_path.with_name("other")
    tmp_path.rename(other)
    with pytest.raises(UsageError, match="model: expected an ONNX model"):
        Onnx(str(other)).score(to_batch(["w1"]))
