"""Megatron's .bin and .idx, in `OUT/tokens`: the tokens of a dataset as one pair of files, in the same order.

One task writes them, as each is one file: on the disk of its machine (in a bucket's case in TMPDIR), with a few pieces
of 4 Mi tokens in memory. `OUT/tokens.json` is written last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.errors import UsageError
from forebay.formats.base import get_format
from forebay.formats.conversion import ConvertOptions, TokenPart, TokenSource
from forebay.formats.token_stream import MAX_TOKENS
from forebay.prepare.corpus import Corpus
from forebay.prepare.documents import read_items
from forebay.prepare.outputs.base import MarkedOutput, WrittenFile, counts_of, put_file
from forebay.prepare.outputs.dataset import encode_corpus, shuffled
from forebay.prepare.recipe import Recipe
from forebay.prepare.run import PrepareResult, PrepareRun
from forebay.prepare.tasks.keys import hash_json
from forebay.prepare.tasks.shuffle import EncodedPart, read_parts, write_parts
from forebay.prepare.tokenize.tokenizers import TokenizerFile
from forebay.storage.store import Store

_VERSION = 1  # Changed when the same tokens would give other files.


class MegatronOutput(MarkedOutput):
    """A pair of Megatron's files, and the tokenizer."""

    name = "megatron"
    marker = "tokens.json"
    needs_tokenizer = True

    def check(self, recipe: Recipe, document_ids: bool) -> None:
        super().check(recipe, document_ids)
        if recipe.rows is not None:
            raise UsageError("rows: expected --to dataset, got megatron, which has tokens. Leave out [rows].")
        if any(stage.name == "subset" for stage in recipe.stages):
            raise UsageError("subset: expected --to parquet, got megatron. Write text, then prepare each folder of it.")

    def write(
        self, run: PrepareRun, corpus: Corpus, tokenizer: TokenizerFile | None, lineage: dict[str, Any]
    ) -> PrepareResult:
        assert tokenizer is not None
        parts = shuffled(run, encode_corpus(run, corpus, tokenizer, run.store))
        plan = write_parts(run.work, "plans/megatron", parts)
        sizes = run.store.sizes("tokens/")
        is_valid = lambda files: all(sizes.get(file.file) == file.bytes for file in files)  # noqa: E731
        task = MegatronTask(plan, run.recipe.name, run.work, run.store)
        (files,) = run.map(write_megatron, [task], run.count_tasks("tokens out", 1, " files"), is_valid=is_valid)
        run.end_of_tasks()
        run.store.remove(sizes.keys() - {file.file for file in files})  # of another name
        counts = counts_of(corpus, sum(part.documents for part in parts), sum(part.tokens for part in parts))
        return self.conclude(run, corpus, {"files": [asdict(file) for file in files]}, counts, lineage)


@dataclass(frozen=True)
class MegatronTask:
    """All tokens to `out/tokens/DATASET_text_document.bin` and `.idx`. The object `plan` lists the parts."""

    plan: str
    dataset: str
    work: Store
    out: Store

    @cached_property
    def name(self) -> str:
        """A hash of the parts and of the name."""
        return hash_json([_VERSION, self.plan, self.dataset])


def write_megatron(task: MegatronTask, scale: int) -> list[WrittenFile]:
    """Write the files: first on this machine, then into the store."""
    parts = read_parts(task.work, task.plan)
    tokens, documents = sum(part.tokens for part in parts), sum(part.documents for part in parts)
    source = TokenSource("megatron", parts[0].dtype, tokens, documents, partial(_tokens, task.work, parts))
    with task.work.scratch() as folder:
        out = folder / "tokens"
        written = get_format("megatron").write_tokens(source, out, ConvertOptions(name=task.dataset))
        return [put_file(task.out, f"tokens/{path}", out / path) for path in written.files]


def _tokens(store: Store, parts: Sequence[EncodedPart]) -> Iterator[TokenPart]:
    for part in parts:
        document_ends = read_items(store, part.object("ends"), "<u8", part.documents)
        for start in range(0, part.tokens, MAX_TOKENS):
            stop = min(start + MAX_TOKENS, part.tokens)
            tokens = read_items(store, part.object("tokens"), TOKEN_DTYPES[part.dtype], stop - start, start)
            first, last = np.searchsorted(document_ends, np.array([start, stop], "<u8"), "right")
            yield TokenPart(tokens, document_ends[first:last] - np.uint64(start))
