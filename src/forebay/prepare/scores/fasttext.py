"""The scorer `fasttext`; the model is read and run by `fasttext_model`, which needs the compiler."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

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
