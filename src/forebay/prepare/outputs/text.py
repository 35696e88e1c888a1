"""Outputs without tokens: the kept text as Parquet files in `OUT/text`, or a language model of it, `OUT/model.arpa`.

Duplicates are left out and repeated lines cut here. `OUT/text.json` or `OUT/lm.json` is written last: it names each
file with its hash, and how they were made.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from forebay.dataset.slices import hash_file
from forebay.errors import PrepareError, UsageError
from forebay.formats.inputs import RESERVED_COLUMNS, InputSplit
from forebay.formats.parquet import COLUMNS_KEY
from forebay.prepare.corpus import Corpus, examine_kept, write_ids
from forebay.prepare.documents import part_batches
from forebay.prepare.outputs.base import Output, conclude, counts_of
from forebay.prepare.recipe import LanguageModel, Recipe
from forebay.prepare.run import PrepareResult, PrepareRun
from forebay.prepare.scores.base import recorded_scores
from forebay.prepare.scores.columns import COPIES, Subset
from forebay.prepare.sources import source_id
from forebay.prepare.stats import is_score
from forebay.prepare.tasks.keys import hash_json
from forebay.prepare.tokenize.tokenizers import TokenizerFile
from forebay.storage.store import FolderStore, Store

if TYPE_CHECKING:
    from forebay.prepare.dedup.cutting import Cutter, Flags

MODEL_FILE = "model.arpa"
_VERSION = 1  # Changed when the same documents would give other files.


class _MarkedOutput(Output):
    needs_tokenizer: ClassVar[bool] = False

    def check(self, recipe: Recipe, document_ids: bool) -> None:
        if document_ids:
            raise UsageError(f"document ids: expected a dataset of tokens, got {self.name}; see --write-ids.")

    def load(self, store: Store) -> tuple[str, str, Mapping[str, Any]]:
        data = store.read(self.marker)
        try:
            content = json.loads(data)
            return content["name"], hashlib.sha256(data).hexdigest(), content["lineage"]
        except (ValueError, KeyError, TypeError) as error:
            raise PrepareError(
                f"{store.url}/{self.marker}: damaged. Choose another directory, or remove this one."
            ) from error

    def write(
        self, run: PrepareRun, corpus: Corpus, tokenizer: TokenizerFile | None, lineage: dict[str, Any]
    ) -> PrepareResult:
        examine_kept(corpus, run.recipe.dedup, run.map)
        content = self.write_content(run, corpus)
        counts = counts_of(corpus, corpus.stats.last.documents_out)
        content |= {"name": run.recipe.name, "lineage": {**lineage, "counts": counts}}
        data = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"
        commit = partial(run.store.write, self.marker, data)
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

        run.end_of_tasks()
        settings = run.recipe.lm or LanguageModel()
        with run.work.scratch() as folder:
            path = folder / MODEL_FILE
            model = train_lm(_texts(run, corpus), path, order=settings.order, vocab_limit=settings.vocab_limit)
            sha256 = hash_file(path)
            run.store.put(MODEL_FILE, path)
        return {"model": {**asdict(model), "sha256": sha256}}


def _texts(run: PrepareRun, corpus: Corpus) -> Iterator[str]:
    for index in range(len(corpus.texts)):
        codes = corpus.drop_codes(index)
        _, cut, _ = corpus.duplicates(index)
        for start, batch in part_batches(corpus.store, corpus.arrow(index), ["text", COPIES]):
            texts = cut.cut(batch.column("text"), start) if cut is not None else batch.column("text")
            rows = np.flatnonzero(codes[start : start + batch.num_rows] == 0)
            if COPIES in batch.schema.names:
                rows = np.repeat(rows, batch.column(COPIES).to_numpy()[rows])
            yield from texts.take(pa.array(rows)).to_pylist()


@dataclass(frozen=True)
class ExportTask:
    """The kept documents of one split to `out/text/INDEX.parquet`; `first_row` is `source_ids.first_rows`.

    With `subsets` each has a folder: `out/text/SUBSET/INDEX.parquet`. `recorded` says what made the columns of scores.
    `dedup_name` is a hash of all that `drop` and `cut` depend on.
    """

    arrow: str
    documents: int
    split: InputSplit
    first_row: int
    drop: Flags | None
    cut: Cutter | None
    dedup_name: str
    work: Store
    out: Store
    index: int
    subsets: tuple[str, ...] = ()
    recorded: str = "{}"

    @property
    def label(self) -> str:
        return f"text of {self.split.files[0].path}"

    def file(self, subset: str) -> str:
        return f"text/{subset}{'/' if subset else ''}{self.index:06d}.parquet"

    @cached_property
    def name(self) -> str:
        """A hash of all that the result depends on."""
        fields = [_VERSION, self.arrow, self.first_row, self.dedup_name, self.index, self.subsets, self.recorded]
        return hash_json(fields)

    @property
    def left_out(self) -> str:
        """The name of the rows, u32, that are no duplicates and yet have no text."""
        return f"text/{self.name}.left"


@dataclass(frozen=True)
class ExportedFile:
    """A file of text."""

    file: str
    documents: int
    bytes: int
    sha256: str


def export_files(run: PrepareRun, corpus: Corpus) -> list[ExportedFile]:
    """Write `OUT/text/`, and the ids that the run asks for; count the documents that became empty."""
    names = dict.fromkeys(stage.subset for stage in run.recipe.stages if isinstance(stage, Subset))
    subsets = tuple(dict.fromkeys([*names, "rest"])) if names else ()
    if isinstance(run.store, FolderStore):  # also of a subset without documents
        for subset in subsets:
            run.store.directory(f"text/{subset}")
    recorded = json.dumps({**run.recorded, **recorded_scores(run.recipe.stages)}, sort_keys=True)
    tasks = []
    for index, (text, first_row) in enumerate(zip(corpus.texts, corpus.first_rows)):
        drop, cut, name = corpus.duplicates(index)
        tasks.append(
            ExportTask(
                corpus.arrow(index), text.documents_out, corpus.splits[index], first_row, drop, cut, name, run.work,
                run.store, index, subsets, recorded,
            )
        )  # fmt: skip
    on_result = run.count_tasks("text out", len(tasks), " files")
    sizes = run.store.sizes("text/")
    is_valid = lambda result: all(sizes.get(file.file) == file.bytes for file in result[0])  # noqa: E731
    results = run.map(export_split, tasks, on_result, is_valid=is_valid)
    run.end_of_tasks()
    files = [file for exported, _, _ in results for file in exported]
    write_ids(run.write_ids, corpus, [task.left_out for task in tasks])
    current = {file.file for file in files}
    run.store.remove(name for name in run.store.sizes("text/") if name not in current)  # of another recipe
    written, empty = sum(file.documents for file in files), sum(left_out for _, left_out, _ in results)
    if corpus.stats.last.documents_out != written or empty:
        count = corpus.stats.following("text")
        count.documents_out, count.bytes_out = written, sum(text_bytes for _, _, text_bytes in results)
        if empty:
            count.dropped["empty"] = empty
    return files


def export_split(task: ExportTask, scale: int = 0) -> tuple[list[ExportedFile], int, int]:
    """Write the files, also how many documents had no text, and the bytes of text.

    One batch of a split, as it was written, is in memory at a time.
    """
    drop = task.drop.load() if task.drop is not None else np.zeros(task.documents, np.uint8)
    documents: Counter[str] = Counter()
    text_bytes = 0
    writers: dict[str, pq.ParquetWriter] = {}
    opened: dict[str, BinaryIO] = {}
    left_out = [np.empty(0, np.int64)]
    with ExitStack() as stack:
        for start, batch in part_batches(task.work, task.arrow):
            ids = [source_id(task.split, batch, row, task.first_row) for row in range(batch.num_rows)]
            texts = task.cut.cut(batch.column("text"), start) if task.cut is not None else batch.column("text")
            retained = drop[start : start + batch.num_rows] == 0
            empty = pc.equal(texts, "").to_numpy(zero_copy_only=False)  # all of whose lines were cut
            left_out.append(start + np.flatnonzero(retained & empty))
            columns = {"id": pa.array(ids, pa.large_string()), "url": batch.column("url"), "text": texts}
            others = [name for name in batch.schema.names if name not in RESERVED_COLUMNS]
            columns |= {name: batch.column(name) for name in others}
            rows, lengths = np.flatnonzero(retained & ~empty), pc.binary_length(texts).to_numpy(zero_copy_only=False)
            if COPIES in batch.schema.names:
                rows = np.repeat(rows, batch.column(COPIES).to_numpy()[rows])
            table = _with_record(pa.table(columns), others, task.recorded)
            of_rows = np.array(batch.column("subset").to_pylist())[rows] if task.subsets else np.full(len(rows), "")
            for subset in task.subsets or ("",):
                if not len(chosen := rows[of_rows == subset]):
                    continue
                if subset not in writers:
                    file = stack.enter_context(task.out.open(task.file(subset), replace=True))
                    opened[subset] = file
                    writers[subset] = stack.enter_context(pq.ParquetWriter(file, table.schema, compression="zstd"))
                writers[subset].write_table(table.take(pa.array(chosen)))
                documents[subset] += len(chosen)
                text_bytes += int(lengths[chosen].sum())
        files = []
        for subset, number in documents.items():
            writers[subset].close()
            size = opened[subset].seek(0, os.SEEK_END)
            files.append(ExportedFile(task.file(subset), number, size, hash_file(opened[subset])))
    task.work.write(task.left_out, np.concatenate(left_out).astype("<u4").tobytes())
    return files, sum(map(len, left_out)), text_bytes


def _with_record(table: pa.Table, names: Sequence[str], recorded: str) -> pa.Table:
    """The table with a description of its columns, which a later preparation reads (`recorded_columns`)."""
    scorers = json.loads(recorded)
    columns = {}
    for name in names:
        columns[name] = {"kind": "number" if is_score(table.schema.field(name)) else "text"}
        if name in scorers:
            columns[name]["scorer"] = scorers[name]
    return table.replace_schema_metadata({COLUMNS_KEY: json.dumps(columns, sort_keys=True)} if columns else None)
