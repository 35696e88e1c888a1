"""Scorers with a classifier: `fasttext`; and `transformers`, of sequences (FineWeb-Edu's kind).

A fastText model is read and run by `fasttext_model`, which needs the compiler. The others are local folders; nothing is
downloaded, and no code of a model runs (safetensors alone). Documents are scored in groups of one padded length
and a fixed size, so that a score does not depend on the documents beside it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from forebay.arrays import F32, I64
from forebay.errors import UsageError, package_for
from forebay.prepare.scores.base import Scorer
from forebay.prepare.settings import Count


@dataclass(frozen=True)
class FastText(Scorer):
    """A fastText classifier (`.bin`, or quantised `.ftz`), as DCLM and FineWeb use them.

    Args:
        model: Path of the model.
        label: The column is the probability of this label, with or without `__label__`. Empty: the column is the
            likeliest label, and `NAME_score` is its probability.
        max_chars: Only so many characters of a document count; 0: all.

    Source: Joulin et al. 2016; Li et al. 2024 (DCLM), section 4.4. The same scores as the library, at most 1.
    """

    model: str = ""
    label: str = ""
    max_chars: Count = 0

    name = "fasttext"
    version = 1
    seconds_per_mb = 0.03
    required = ("model", "the path of a fastText model")

    @property
    def columns(self) -> Mapping[str, str]:
        return {"": "number"} if self.label else {"": "text", "score": "number"}

    def files(self) -> tuple[str, ...]:
        return (self.model,)

    def score(self, batch: pa.RecordBatch) -> Mapping[str, Any]:
        from forebay.prepare.scores.fasttext_model import load_model

        model = load_model(self.model)
        scores = model.probabilities(batch.column("text"), self.max_chars)
        if self.label:
            return {"": scores[:, model.label_index(self.label)]}
        best = np.where(np.isnan(scores[:, 0]), -1, scores.argmax(1))
        labels = [model.labels[index] if index >= 0 else "" for index in best.tolist()]
        return {"": pa.array(labels, pa.large_string()), "score": scores.max(1, initial=0.0)}


_MIN_LENGTH = 32
_CHARS_PER_TOKEN = 32  # So many characters of a text are tokenized for a token that the model sees.


_Runner = Callable[[I64, I64], F32]
"""Ids and mask, int64 [rows, tokens], to logits, float32 [rows, labels]."""


@dataclass(frozen=True)
class Transformers(Scorer):
    """A sequence classifier of the library transformers, from `model.safetensors`.

    Args:
        model: Folder of the model: `config.json`, `tokenizer.json`, `model.safetensors`.
        label: The column is the probability of this label, by its name in `config.json` or its number. Empty: a model
            with one output is a regression, whose column is the output.
        device: `cpu`, or `cuda`, `cuda:1`.

    At most 512 tokens of a document count, and no more than the model has positions.

    Source: Penedo et al. 2024, section 4: FineWeb-Edu's classifier, a regression from 0 to 5.
    """

    model: str = ""
    label: str = ""
    max_tokens: int = field(default=512, init=False)  # The positions of BERT and its kin.
    batch: int = field(default=16, init=False)
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"

    name = "transformers"
    libraries = ("torch", "transformers", "tokenizers")
    version = 1
    seconds_per_mb = 400.0  # BERT-base on a CPU
    forks = False
    required = ("model", "the folder of a model")

    def files(self) -> tuple[str, ...]:
        folder = Path(self.model)
        if not folder.is_dir():
            raise UsageError(f"model: expected a folder with config.json and tokenizer.json, got {self.model!r}")
        suffixes = (".json", ".safetensors")
        return tuple(str(path) for path in sorted(folder.iterdir()) if path.suffix in suffixes)

    def score(self, batch: pa.RecordBatch) -> Mapping[str, F32]:
        tokenizer, (labels, positions) = _load_tokenizer(self.model), _load_config(self.model)
        max_tokens = min(self.max_tokens, positions)
        tokenizer.enable_truncation(max_tokens)
        limit = max_tokens * _CHARS_PER_TOKEN
        encoded = tokenizer.encode_batch([text[:limit] for text in batch.column("text").to_pylist()])
        lengths = np.array([len(item.ids) for item in encoded], np.int64)
        padded = np.maximum(_MIN_LENGTH, 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64))
        padded = np.minimum(padded, max_tokens)
        run, out = _load_torch(self.model, self.device), np.full(len(encoded), np.nan, np.float32)
        for length in np.unique(padded).tolist():
            rows = np.flatnonzero(padded == length)
            for start in range(0, len(rows), self.batch):
                group = rows[start : start + self.batch]
                ids = np.zeros((self.batch, length), np.int64)
                mask = np.zeros((self.batch, length), np.int64)
                mask[:, 0] = 1  # of rows that fill the group
                for row, document in enumerate(group.tolist()):
                    ids[row, : lengths[document]] = encoded[document].ids
                    mask[row, : lengths[document]] = 1
                out[group] = self._column(run(ids, mask)[: len(group)], labels)
        return {"": out}

    def _column(self, logits: F32, labels: Sequence[str]) -> F32:
        if logits.shape[1] == 1:
            return logits[:, 0]
        names = [*labels, *map(str, range(logits.shape[1]))]
        if self.label not in names:
            raise UsageError(f"label: expected one of {', '.join(names[:20])}, got {self.label!r}")
        odds = np.exp(logits - logits.max(1, keepdims=True))
        column = names.index(self.label) % logits.shape[1]
        return np.asarray(odds[:, column] / odds.sum(1))


@lru_cache(4)
def _load_tokenizer(model: str) -> Any:
    from tokenizers import Tokenizer

    path = Path(model, "tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises Exception itself.
        raise UsageError(f"model: expected a tokenizer at {path}, got: {error}") from error
    tokenizer.no_padding()
    return tokenizer


@lru_cache(4)
def _load_config(model: str) -> tuple[tuple[str, ...], int]:
    """The labels of a model, and how many tokens it has positions for."""
    path = Path(model, "config.json")
    try:
        config = json.loads(path.read_bytes())
        names = config.get("id2label", {})
        labels = tuple(str(names[key]) for key in sorted(names, key=int))
        positions = int(config.get("max_position_embeddings") or 1 << 17)
        if "roberta" in str(config.get("model_type")):  # Its positions begin after that of the padding.
            positions -= int(config.get("pad_token_id") or 1) + 1
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise UsageError(f"model: expected the settings of a model at {path}, got: {error}") from error
    return labels, max(1, positions)


@lru_cache(2)
def _load_torch(model: str, device: str) -> _Runner:
    with package_for("transformers: a classifier"):
        import torch
        import transformers
    transformers.utils.logging.disable_progress_bar()
    if device == "cpu":
        torch.set_num_threads(1)  # There is a process for each core, and sums do not depend on the machine's cores.
    try:
        network = transformers.AutoModelForSequenceClassification.from_pretrained(
            model, use_safetensors=True, trust_remote_code=False, local_files_only=True, torch_dtype=torch.float32
        )
        network = network.to(device).eval()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UsageError(f"model: expected a sequence classifier in safetensors at {model}, got: {error}") from error

    def run(ids: I64, mask: I64) -> F32:
        with torch.inference_mode():
            tensors = (torch.from_numpy(array).to(device) for array in (ids, mask))
            logits = network(**dict(zip(("input_ids", "attention_mask"), tensors))).logits
        return np.asarray(logits.float().cpu().numpy())

    return run
