"""Tiny classifiers of sequences, of the library transformers."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(62))]


def save_tokenizer(folder: Path) -> None:
    """Save the tokenizer of WORDS."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def save_bert(folder: Path, labels: int) -> Any:
    """Save a classifier with random weights and its tokenizer of words; skips the test without the library."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=128, num_labels=labels, initializer_range=0.5,
        **({"id2label": {0: "low", 1: "high"}, "label2id": {"low": 0, "high": 1}} if labels == 2 else {}),
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    folder.mkdir()
    model.save_pretrained(folder, safe_serialization=True)
    save_tokenizer(folder)
    return model
