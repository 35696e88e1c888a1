"""Outputs without tokens: the kept text as Parquet files in `OUT/text`, or a language model of it, `OUT/model.arpa`.

Duplicates are left out and repeated lines cut here. `OUT/text.json` or `OUT/lm.json` is written last: it names each
file with its hash, and how they were made.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.dataset.slices import hash_file
from forebay.errors import PrepareError, UsageError
from forebay.files import atomic_write, open_atomic
from forebay.formats.inputs import RESERVED_COLUMNS, InputSplit
from forebay.prepare.corpus import Corpus, examine_kept, write_ids
from forebay.prepare.documents import part_batches
from forebay.prepare.outputs.base import Output, conclude
from forebay.prepare.recipe import LanguageModel, Recipe
from forebay.prepare.run import PrepareResult, PrepareRun
from forebay.prepare.sources import source_id
from forebay.prepare.tokenize.tokenizers import TokenizerFile

if TYPE_CHECKING:
    from forebay.prepare.dedup.cutting import Cutter, Flags

MODEL_FILE = "model.arpa"
_COLUMNS = ("url", "text", "language", "language_score", "perplexity")


class _MarkedOutput(Output):
    needs_tokenizer: ClassVar[bool] = False

    def check(self, recipe: Recipe, document_ids: bool) -> None:
        if document_ids:
            raise UsageError(f"document ids: expected a dataset of tokens, got {self.name}; see --write-ids.")

    def load(self, out: Path) -> tuple[str, str, Mapping[str, Any]]:
        data = (out / self.marker).read_bytes()
        try:
            content = json.loads(data)
            return content["name"], hashlib.sha256(data).hexdigest(), content["lineage"]
        except (ValueError, KeyError, TypeError) as error:
            raise PrepareError(
                f"{out / self.marker}: damaged. Choose another directory, or remove this one."
            ) from error

    def write(
        self, run: PrepareRun, corpus: Corpus, tokenizer: TokenizerFile | None, lineage: dict[str, Any]
    ) -> PrepareResult:
        examine_kept(corpus, run.recipe.dedup)
        content = self.write_content(run, corpus)
        documents_out = next(reversed(corpus.stats.funnel.values())).documents_out
        counts: dict[str, Any] = {"documents_in": corpus.documents_in, "documents_out": documents_out, "tokens": 0}
        counts |= {"slices": 0, "dropped": corpus.stats.dropped()}
        content |= {"name": run.recipe.name, "lineage": {**lineage, "counts": counts}}
        data = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
        commit = partial(atomic_write, run.out / self.marker, data)
        return conclude(run, corpus, hashlib.sha256(data).hexdigest(), counts, commit)

    @abstractmethod
    def write_content(self, run: PrepareRun, corpus: Corpus) -> dict[str, Any]:
        """Write the files and return what the marker says about them."""


class TextOutput(_MarkedOutput):
    """Parquet files of the kept text: for other tools, or for a later preparation that only tokenizes."""

    name: ClassVar[str] = "text"
    marker: ClassVar[str] = "text.json"

    def write_content(self, run: PrepareRun, corpus: Corpus) -> dict[str, Any]:
        return {"files": [asdict(file) for file in export_files(run, corpus)]}


class LanguageModelOutput(_MarkedOutput):
    """An n-gram model in ARPA format for the filter `perplexity`, trained in this process. Its settings are `[lm]`."""

    name: ClassVar[str] = "lm"
    marker: ClassVar[str] = "lm.json"

    def write_content(self, run: PrepareRun, corpus: Corpus) -> dict[str, Any]:
        from forebay.prepare.kneser_ney import train_lm  # which needs numba

        settings, path = run.recipe.lm or LanguageModel(), run.out / MODEL_FILE
        model = train_lm(_texts(run, corpus), path, order=settings.order, vocab_limit=settings.vocab_limit)
        return {"model": {**asdict(model), "sha256": hash_file(path)}}


def _texts(run: PrepareRun, corpus: Corpus) -> Iterator[str]:
    for index in range(len(corpus.texts)):
        codes = corpus.drop_codes(index)
        _, cut, _ = corpus.duplicates(index)
        for start, batch in part_batches(corpus.arrow(index), ["text"]):
            texts = cut.cut(batch.column("text"), start) if cut is not None else batch.column("text")
            yield from texts.filter(pa.array(codes[start : start + batch.num_rows] == 0)).to_pylist()


@dataclass(frozen=True)
class ExportTask:
    """The kept documents of one split to `out/text/INDEX.parquet`; `first_row` is `source_ids.first_rows`."""

    arrow: str
    documents: int
    split: InputSplit
    first_row: int
    drop: Flags | None
    cut: Cutter | None
    out: str
    index: int

    @property
    def label(self) -> str:
        return f"text of {self.split.files[0].path}"

    @property
    def file(self) -> str:
        return f"text/{self.index:06d}.parquet"

    @property
    def left_out(self) -> Path:
        """The file of the rows, u32, that are no duplicates and yet have no text."""
        return Path(self.arrow).with_name(f"{self.index:06d}.left")


@dataclass(frozen=True)
class ExportedFile:
    """A file of text; a split without kept documents has none."""

    file: str
    documents: int
    bytes: int
    sha256: str


def export_files(run: PrepareRun, corpus: Corpus) -> list[ExportedFile]:
    """Write `OUT/text/`, and the ids that the run asks for; count the documents that became empty."""
    (run.out / "text").mkdir(exist_ok=True)
    tasks = []
    for index, (text, first_row) in enumerate(zip(corpus.texts, corpus.first_rows)):
        drop, cut, _ = corpus.duplicates(index)
        tasks.append(
            ExportTask(
                corpus.arrow(index), text.documents_out, corpus.splits[index], first_row, drop, cut, str(run.out), index
            )
        )
    on_result = run.count_tasks("text out", len(tasks), " files")
    files = [result for result in run.map(export_split, tasks, on_result=on_result) if result.documents]
    write_ids(run.write_ids, corpus, [task.left_out for task in tasks])
    for path in (run.out / "text").iterdir():
        if f"text/{path.name}" not in {file.file for file in files}:
            path.unlink()
    documents_in = next(reversed(corpus.stats.funnel.values())).documents_out
    documents_out = sum(file.documents for file in files)
    if documents_in != documents_out:
        count = corpus.stats.stage("text")
        count.documents_in, count.documents_out = documents_in, documents_out
        count.dropped["empty"] = documents_in - documents_out
    return files


def export_split(task: ExportTask, scale: int = 0) -> ExportedFile:
    """Write the file; one batch of a split, as it was written, is in memory at a time."""
    path = Path(task.out) / task.file
    drop = task.drop.load() if task.drop is not None else np.zeros(task.documents, np.uint8)
    documents = 0
    left_out = [np.empty(0, np.int64)]
    with ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        for start, batch in part_batches(task.arrow):
            ids = [source_id(task.split, batch, row, task.first_row) for row in range(batch.num_rows)]
            texts = task.cut.cut(batch.column("text"), start) if task.cut is not None else batch.column("text")
            retained = drop[start : start + batch.num_rows] == 0
            empty = pc.equal(texts, "").to_numpy(zero_copy_only=False)  # all of whose lines were cut
            left_out.append(start + np.flatnonzero(retained & empty))
            columns = {"id": pa.array(ids, pa.large_string())}
            others = [name for name in batch.schema.names if name not in RESERVED_COLUMNS]
            columns |= {name: batch.column(name) for name in (*_COLUMNS, *others) if name in batch.schema.names}
            table = pa.table({**columns, "text": texts}).filter(pa.array(retained & ~empty))
            if table.num_rows and writer is None:
                file = stack.enter_context(open_atomic(path))
                writer = stack.enter_context(pq.ParquetWriter(file, table.schema, compression="zstd"))
            if writer is not None:
                writer.write_table(table)
            documents += table.num_rows
    atomic_write(task.left_out, np.concatenate(left_out).astype("<u4").tobytes())
    if not documents:
        return ExportedFile("", 0, 0, "")
    return ExportedFile(task.file, documents, path.stat().st_size, hash_file(path))
