"""A language model of the kept text, for the filter `perplexity`: `OUT/model.arpa`, and `OUT/lm.json`, written last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from forebay.dataset.slices import hash_file
from forebay.errors import UsageError
from forebay.files import atomic_write
from forebay.prepare.corpus import Corpus, examine_kept
from forebay.prepare.documents import part_batches
from forebay.prepare.outputs.base import conclude
from forebay.prepare.outputs.text import load_marker
from forebay.prepare.recipe import LanguageModel, Recipe
from forebay.prepare.run import PrepareResult, Run
from forebay.prepare.stats import StageStats
from forebay.prepare.tokenize.tokenizers import TokenizerFile

MODEL_FILE, LM_FILE = "model.arpa", "lm.json"


class LanguageModelOutput:
    """An n-gram model in ARPA format, trained in this process. Its settings are `[lm]`."""

    name: ClassVar[str] = "lm"
    marker: ClassVar[str] = LM_FILE
    needs_tokenizer: ClassVar[bool] = False

    def check(self, recipe: Recipe, document_ids: bool) -> None:
        if document_ids:
            raise UsageError("document ids: expected a dataset of tokens, got a language model.")

    def load(self, out: Path) -> tuple[str, str, Mapping[str, Any]]:
        return load_marker(out / LM_FILE)

    def write(
        self, run: Run, corpus: Corpus, tokenizer: TokenizerFile | None, stats: StageStats, lineage: dict[str, Any]
    ) -> PrepareResult:
        from forebay.prepare.kneser_ney import train_lm  # which needs numba

        examine_kept(corpus, run.recipe.dedup, stats, run.out / "clusters.parquet")
        settings = run.recipe.lm or LanguageModel()
        texts = _texts(run, corpus)
        model = train_lm(texts, run.out / MODEL_FILE, order=settings.order, vocab_limit=settings.vocab_limit)
        counts: dict[str, Any] = {
            "documents_in": corpus.documents_in,
            "documents_out": next(reversed(stats.funnel.values())).documents_out,
            "tokens": 0,
            "slices": 0,
            "dropped": stats.dropped(),
        }
        content = {
            "name": run.recipe.name,
            "model": {**asdict(model), "sha256": hash_file(run.out / MODEL_FILE)},
            "lineage": {**lineage, "counts": counts},
        }
        data = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
        commit = partial(atomic_write, run.out / LM_FILE, data)
        return conclude(run, corpus, stats, hashlib.sha256(data).hexdigest(), counts, {}, commit)


def _texts(run: Run, corpus: Corpus) -> Iterator[str]:
    for index in range(len(corpus.texts)):
        codes = corpus.drop_codes(index)
        _, cut, _ = corpus.duplicates(index, run.recipe.dedup)
        for start, batch in part_batches(corpus.arrow(index), ["text"]):
            texts = cut.cut(batch.column("text"), start) if cut is not None else batch.column("text")
            yield from texts.filter(pa.array(codes[start : start + batch.num_rows] == 0)).to_pylist()
