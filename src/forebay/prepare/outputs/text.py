"""Outputs without tokens: the kept text as files of a format in `OUT/text`, or a language model, `OUT/model.arpa`.

Duplicates are left out and repeated lines cut here. `OUT/text.json` or `OUT/lm.json` is written last: it names each
file with its hash, and how they were made. A task a split writes text, so files are numbered by split; the library of a
format reads `OUT/text` as one dataset.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.arrays import I64
from forebay.base import Json
from forebay.formats.base import get_format
from forebay.formats.blocks import INDEX_FILE, merge_indexes
from forebay.formats.conversion import ConvertOptions
from forebay.formats.inputs import RESERVED_COLUMNS, InputSplit
from forebay.formats.layout import KEY
from forebay.formats.parquet import COLUMNS_KEY
from forebay.formats.sources import table_of_stream
from forebay.prepare.corpus import Corpus, examine_kept, write_ids
from forebay.prepare.documents import part_batches
from forebay.prepare.outputs.base import MarkedOutput, WrittenFile, counts_of, put_file
from forebay.prepare.run import PrepareResult, PrepareRun
from forebay.prepare.scores.base import recorded_scores
from forebay.prepare.scores.columns import COPIES, Subset
from forebay.prepare.sources import source_id
from forebay.prepare.stats import is_score
from forebay.prepare.tasks.keys import hash_json
from forebay.prepare.tasks.statistics import FilteredPart
from forebay.prepare.tokenize.tokenizers import TokenizerFile
from forebay.storage.store import Store

MODEL_FILE = "model.arpa"
SUFFIXES = {
    "parquet": ".parquet", "jsonl": ".jsonl.zst", "arrow": ".arrow", "webdataset": ".tar", "mds": "", "litdata": "",
}  # fmt: skip
"""The formats of text, and the suffix of a task's file; "" where a task writes several files and their index."""
_VERSION = 2  # Changed when the same documents would give other files.


class TextOutput(MarkedOutput):
    """The kept text as files of a format, `OUT/text`: for other tools, or for a later preparation that tokenizes."""

    marker = "text.json"
    stages = ("text out",)

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, run: PrepareRun, corpus: Corpus, tokenizer: TokenizerFile, lineage: Json) -> PrepareResult:
        examine_kept(run, corpus)
        content = {"files": [asdict(file) for file in export_files(run, corpus, self.name)]}
        return self.conclude(run, corpus, content, counts_of(corpus, corpus.stats.last.documents_out), lineage)


class LanguageModelOutput(MarkedOutput):
    """An n-gram model in ARPA format for the filter `perplexity`, trained in this process."""

    name = "lm"
    marker = "lm.json"

    def write(self, run: PrepareRun, corpus: Corpus, tokenizer: TokenizerFile, lineage: Json) -> PrepareResult:
        from forebay.prepare.kneser_ney import train_lm  # which needs numba

        examine_kept(run, corpus)
        run.end_of_tasks()
        with run.work.scratch() as folder:
            path = folder / MODEL_FILE
            model = train_lm(_texts(corpus), path)
            sha256 = put_file(run.store, MODEL_FILE, path).sha256
        content = {"model": {**asdict(model), "sha256": sha256}}
        return self.conclude(run, corpus, content, counts_of(corpus, corpus.stats.last.documents_out), lineage)


def _texts(corpus: Corpus) -> Iterator[str]:
    for part in corpus.parts():
        codes = part.drop_codes()
        for start, batch in part_batches(corpus.store, part.arrow, ["text", COPIES]):
            texts = part.cut.cut(batch.column("text"), start) if part.cut is not None else batch.column("text")
            rows = _repeated(batch, np.flatnonzero(codes[start : start + batch.num_rows] == 0))
            yield from texts.take(pa.array(rows)).to_pylist()


def _repeated(batch: pa.RecordBatch, rows: I64) -> I64:
    """Return rows of a batch, each as often as its document is written."""
    return np.repeat(rows, batch.column(COPIES).to_numpy()[rows]) if COPIES in batch.schema.names else rows


@dataclass(frozen=True)
class ExportTask:
    """The kept documents of one split to `out/text/INDEX.parquet`, or the files of another format.

    With `subsets` each has a folder: `out/text/SUBSET/INDEX.parquet`. `recorded` says what made the columns of scores.
    """

    format: str
    part: FilteredPart
    work: Store
    out: Store
    index: int
    subsets: tuple[str, ...]
    recorded: str

    @property
    def split(self) -> InputSplit:
        return self.part.split

    @property
    def label(self) -> str:
        return f"text of {self.split.files[0].path}"

    @property
    def stem(self) -> str:
        """What the names of its files begin with."""
        return f"{self.index:06d}"

    @cached_property
    def name(self) -> str:
        """A hash of all that the result depends on."""
        part = self.part
        fields = [_VERSION, part.arrow, part.first_row, part.dedup_name, self.index, self.subsets, self.recorded]
        return hash_json([*fields, self.format])

    @property
    def left_out(self) -> str:
        """The name of the rows, u32, that are no duplicates and yet have no text."""
        return f"text/{self.name}.left"


@dataclass
class ExportResult:
    """What an ExportTask wrote; documents whose text was empty are `left_out`, `text_bytes` is UTF-8.

    `indexes` has, by subset, the index of its files, of formats that have one; names in it lack `TASK.stem` and a dot.
    """

    files: list[WrittenFile] = field(default_factory=list)
    documents: int = 0
    left_out: int = 0
    text_bytes: int = 0
    indexes: dict[str, Json] = field(default_factory=dict)


def export_files(run: PrepareRun, corpus: Corpus, format: str) -> list[WrittenFile]:
    """Write `OUT/text/`, and the ids that the run asks for; count the documents that became empty."""
    names = dict.fromkeys(stage.subset for stage in run.recipe.stages if isinstance(stage, Subset))
    subsets = tuple(dict.fromkeys([*names, "rest"])) if names else ()
    if run.store.folder is not None:  # also of a subset without documents
        for subset in subsets:
            run.store.directory(f"text/{subset}")
    recorded = json.dumps({**run.recorded, **recorded_scores(run.recipe.stages)}, sort_keys=True)
    tasks = [
        ExportTask(format, part, run.work, run.store, index, subsets, recorded)
        for index, part in enumerate(corpus.parts())
    ]
    on_result = run.count_tasks("text out", len(tasks), "file")
    sizes = run.store.sizes("text/")
    is_valid = lambda result: all(sizes.get(file.file) == file.bytes for file in result.files)  # noqa: E731
    results = run.map(export_split, tasks, on_result, is_valid=is_valid)
    run.end_of_tasks()
    files = [file for result in results for file in result.files]
    files += _write_indexes(run.store, tasks, results)
    write_ids(run.write_ids, corpus, [task.left_out for task in tasks if task.part.documents])
    current = {file.file for file in files}
    run.store.remove(name for name in run.store.sizes("text/") if name not in current)  # of another recipe
    written, empty = sum(result.documents for result in results), sum(result.left_out for result in results)
    if corpus.stats.last.documents_out != written or empty:
        count = corpus.stats.following("text")
        count.documents_out, count.bytes_out = written, sum(result.text_bytes for result in results)
        if empty:
            count.dropped["empty"] = empty
    return files


def _write_indexes(store: Store, tasks: Sequence[ExportTask], results: Sequence[ExportResult]) -> Iterator[WrittenFile]:
    for subset in dict.fromkeys(subset for result in results for subset in result.indexes):
        parts = {f"{t.stem}.": r.indexes[subset] for t, r in zip(tasks, results) if subset in r.indexes}
        name, data = f"{_folder(subset)}{INDEX_FILE}", merge_indexes(parts)
        store.write(name, data)
        yield WrittenFile(name, len(data), hashlib.sha256(data).hexdigest())


def _folder(subset: str) -> str:
    return f"text/{subset}/" if subset else "text/"


def export_split(task: ExportTask, scale: int) -> ExportResult:
    """Write the files: first on this machine, then into the store.

    One batch of a split, as it was written, is in memory at a time. With subsets the split is read once for each.
    """
    result, left_out = ExportResult(), [np.empty(0, np.int64)]
    suffix = SUFFIXES[task.format]
    for subset in task.subsets or ("",):
        rows = _rows(task, subset, result, left_out)
        if (first := next(rows, None)) is None:
            continue
        source = table_of_stream(first.schema, chain([first], rows), task.format)
        with task.work.scratch() as folder:
            out = folder / f"{task.stem}{suffix}"
            written = get_format(task.format).write_rows(source, out, ConvertOptions())
            for path in written.files:
                if path.name == INDEX_FILE:
                    result.indexes[subset] = json.loads((out / path).read_bytes())
                    continue
                name = f"{_folder(subset)}{task.stem}{suffix or f'.{path}'}"
                result.files.append(put_file(task.out, name, out / path))
    rows_left_out = np.sort(np.concatenate(left_out))
    result.left_out = len(rows_left_out)
    task.work.write(task.left_out, rows_left_out.astype("<u4").tobytes())
    return result


def _rows(task: ExportTask, subset: str, result: ExportResult, left_out: list[I64]) -> Iterator[pa.RecordBatch]:
    """The documents of a subset with their columns, batch by batch; they are counted in the result."""
    part, drop, count = task.part, task.part.drop_codes(), 0
    for start, batch in part_batches(task.work, part.arrow):
        retained = drop[start : start + batch.num_rows] == 0
        if task.subsets:
            retained &= np.asarray(pc.equal(batch.column("subset"), subset))
        texts = part.cut.cut(batch.column("text"), start) if part.cut is not None else batch.column("text")
        empty = np.asarray(pc.equal(texts, ""))  # all of whose lines were cut
        left_out.append(start + np.flatnonzero(retained & empty))
        rows = _repeated(batch, np.flatnonzero(retained & ~empty))
        if not len(rows):
            continue
        chosen, texts = batch.take(pa.array(rows)), texts.take(pa.array(rows))
        ids = [source_id(part.split, batch, row, part.first_row) for row in rows.tolist()]
        columns = {"id": pa.array(ids, pa.large_string()), "url": chosen.column("url"), "text": texts}
        others = [name for name in batch.schema.names if name not in RESERVED_COLUMNS]
        columns |= {name: chosen.column(name) for name in others}
        if task.format == "webdataset":  # whose readers tell samples by their keys, also across files
            columns[KEY] = pa.array([f"{task.stem}-{number:09d}" for number in range(count, count + len(rows))])
        count += len(rows)
        result.documents += len(rows)
        result.text_bytes += int(pc.sum(pc.binary_length(texts)).as_py())
        yield _with_record(pa.RecordBatch.from_pydict(columns), others, task.recorded)


def _with_record(batch: pa.RecordBatch, names: Sequence[str], recorded: str) -> pa.RecordBatch:
    """The batch with a description of its columns, which a later preparation reads (`recorded_columns`)."""
    scorers = json.loads(recorded)
    columns = {}
    for name in names:
        columns[name] = {"kind": "number" if is_score(batch.schema.field(name)) else "text"}
        if name in scorers:
            columns[name]["scorer"] = scorers[name]
    return batch.replace_schema_metadata({COLUMNS_KEY: json.dumps(columns, sort_keys=True)} if columns else None)
