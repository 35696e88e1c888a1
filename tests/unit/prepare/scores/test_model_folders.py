"""Folders that hold no sequence classifier; real ones, whose libraries are large, are in slow/prepare/scores."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.prepare.scores.transformers import Onnx, Transformers
from support.batches import to_batch


@pytest.mark.parametrize("scorer", [Onnx, Transformers])
def test_folders_without_a_model(scorer: type[Onnx] | type[Transformers], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="model: expected the folder"):
        scorer()
    with pytest.raises(UsageError, match=r"model: expected a folder with config\.json"):
        scorer(str(tmp_path / "none")).files()
    with pytest.raises(UsageError, match=r"model: expected a tokenizer at .*tokenizer\.json"):
        scorer(str(tmp_path)).score(to_batch(["text"]))
    with pytest.raises(UsageError, match="device: "):
        scorer(str(tmp_path), device="tpu")
