"""Outputs of tokens: a dataset, a report alone, or Megatron's files.

Datasets: encode, shuffle, slice, and the manifest last; for fine-tuning slices have rows in place of a stream of
tokens. Megatron's .bin and .idx, in `OUT/tokens`, are the tokens of a dataset as one pair of files, in the same order.
One task writes them, as each is one file: on the disk of its machine (in a bucket's case in TMPDIR), with a few pieces
of 4 Mi tokens in memory. `OUT/tokens.json` is written last.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from forebay.base import Json
from forebay.dataset.agreement import TOKENIZER_FILE
from forebay.dataset.chunks import CHUNKS_FILE, HashedPieces, chunk_size
from forebay.dataset.manifest import (
    DOCUMENTS_FILE,
    LENGTHS_FILE,
    MANIFEST_FILE,
    TABLE_FILE,
    TOKEN_DTYPES,
    Manifest,
    SliceTable,
)
from forebay.dataset.slices import hash_file
from forebay.errors import UsageError, printable
from forebay.formats.base import get_format
from forebay.formats.conversion import ConvertOptions, TokenPart, TokenSource
from forebay.formats.inputs import InputSplit
from forebay.formats.token_stream import MAX_TOKENS
from forebay.prepare.corpus import Corpus, examine_kept, write_ids
from forebay.prepare.documents import read_items
from forebay.prepare.extend import link_slices, parent_of
from forebay.prepare.outputs.base import MarkedOutput, Output, WrittenFile, conclude, counts_of, no_documents, put_file
from forebay.prepare.recipe import Recipe
from forebay.prepare.run import PrepareResult, PrepareRun
from forebay.prepare.sources import describe_position
from forebay.prepare.tasks.encode import EncodeTask, encode, left_out_rows
from forebay.prepare.tasks.keys import hash_json
from forebay.prepare.tasks.shuffle import EncodedPart, Shuffle, count_all, read_parts, shuffle_parts, write_parts
from forebay.prepare.tasks.slicing import (
    RowShape,
    gather,
    gather_tasks,
    plan_slices,
    slice_tasks,
    write_plan,
    write_slice,
)
from forebay.prepare.tokenize.encoders import EncoderSpec
from forebay.prepare.tokenize.tokenizers import TokenizerFile
from forebay.storage.store import Store

_DOCUMENTS_SCHEMA = pa.schema([("id", pa.string()), ("source", pa.string()), ("url", pa.string())])
_GROUP_ROWS = 1 << 16


class DatasetOutput(Output):
    """A dataset of tokens, or of rows where the recipe has `[rows]`."""

    name = "dataset"
    marker = MANIFEST_FILE
    needs_tokenizer = True
    stages = ("encode", "shuffle", "slice")

    def check(self, recipe: Recipe, document_ids: bool) -> None:
        if any(stage.name == "subset" for stage in recipe.stages):
            raise UsageError(
                "subset: expected --to parquet, got a dataset. Write the subsets as text, then prepare each folder."
            )
        if document_ids and recipe.rows is not None:
            raise UsageError("document ids: expected a dataset of tokens; rows and text keep theirs by --write-ids.")
        if recipe.fim is not None and recipe.rows is not None:
            raise UsageError("fim: expected a dataset of tokens, got [rows] too. Leave out one of the two.")

    def load(self, store: Store) -> tuple[str, str, Mapping[str, Any]]:
        manifest = Manifest.from_json(store.read(MANIFEST_FILE))
        return manifest.name, manifest.id, manifest.lineage

    def write(self, run: PrepareRun, corpus: Corpus, tokenizer: TokenizerFile, lineage: Json) -> PrepareResult:
        parts = shuffled(run, encode_corpus(run, corpus, tokenizer, run.store))
        files = {TOKENIZER_FILE: tokenizer.sha256}
        if run.recipe.dedup.signatures and corpus.dedup is not None:
            from forebay.prepare.dedup.signatures import write_signatures

            files |= write_signatures(corpus.dedup, run.recipe.dedup, run.work, run.store, run.map)
        table, lengths = _slice(run, parts, tokenizer)
        before = run.parent.num_slices if run.parent is not None else 0
        if run.document_ids:
            earlier = run.parent.file(DOCUMENTS_FILE) if run.parent is not None else None
            files[DOCUMENTS_FILE] = write_documents(run.store, corpus, parts, earlier)
        counts = counts_of(corpus, *count_all(parts), len(table) - before)
        run.store.write(TABLE_FILE, table.to_parquet())
        rows = run.recipe.rows is not None
        manifest = Manifest.of(
            table,
            {**lineage, "counts": counts, "files": files},
            name=run.recipe.name,
            layout="rows" if rows else "tokens",
            dtype="" if rows else tokenizer.dtype,
            tokenizer=tokenizer.description,
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            lengths=lengths,
        )
        commit = partial(run.store.write, MANIFEST_FILE, manifest.to_json())
        return conclude(run, corpus, manifest.id, counts, commit)


class ReportOutput(Output):
    """The report of a dataset that is not written; an earlier one is replaced."""

    name = "report"
    marker = ""
    needs_tokenizer = True
    stages = ("encode",)

    def check(self, recipe: Recipe, document_ids: bool) -> None:
        if document_ids:
            raise UsageError("document ids: expected a dataset of tokens, got a report; see --write-ids.")

    def load(self, store: Store) -> tuple[str, str, Mapping[str, Any]]:
        raise UsageError(f"{store.url}: expected a dataset, got a report alone. Choose another --to.")

    def write(self, run: PrepareRun, corpus: Corpus, tokenizer: TokenizerFile, lineage: Json) -> PrepareResult:
        parts = encode_corpus(run, corpus, tokenizer, run.work)
        run.end_of_tasks()
        counts = counts_of(corpus, *count_all(parts))
        token_bytes = sum(part.tokens * TOKEN_DTYPES[part.dtype].itemsize for part in parts)
        return conclude(run, corpus, "", counts, unwritten_bytes=token_bytes * (1 + run.recipe.slice.shuffle))


def encode_corpus(run: PrepareRun, corpus: Corpus, tokenizer: TokenizerFile, store: Store) -> list[EncodedPart]:
    """The kept documents as tokens, in parts with at least one; PrepareError if there is none."""
    examine_kept(run, corpus)
    run.progress.set_counts(corpus.stats)
    store.write(TOKENIZER_FILE, tokenizer.data)
    recipe = run.recipe
    spec = EncoderSpec.of(tokenizer, store)
    rendering = recipe.rows.conversations() if recipe.rows else recipe.fim
    if recipe.fim is not None:
        recipe.fim.sentinels(spec)  # fail now rather than in a worker
    if recipe.rows and (missing := recipe.rows.conversations().missing_tokens(spec)):
        run.on_message(
            f"rows.template: the tokenizer has no tokens {', '.join(missing)}, which become several each. Choose one "
            "that has them, or --set rows.template=plain."
        )
    occurrences: Counter[str] = Counter()
    tasks = []
    for text, filtered in zip(corpus.texts, corpus.parts()):
        part = text.part
        keys = Shuffle(recipe.slice.seed, occurrences[part.name]) if recipe.slice.shuffle else None
        occurrences[part.name] += 1
        if not part.documents:
            continue
        dedup = filtered.drop, filtered.cut, filtered.dedup_name
        tasks.append(EncodeTask(part, spec, run.work, *dedup, keys, run.document_ids, rendering))
    sizes = [text.bytes_out for text in corpus.texts if text.documents_out]
    encoded = run.map(encode, tasks, run.count_documents("encode", sizes), sizes)
    write_ids(run.write_ids, corpus, [left_out_rows(task) for task in tasks])
    count = corpus.stats.following("tokenize")
    count.documents_out = sum(result.documents_out for result in encoded)
    count.bytes_out = sum(result.text_bytes for result in encoded)
    for result in encoded:
        count.dropped.update({reason: n for reason, n in result.dropped.items() if reason != "duplicate"})
        count.changed.update(result.changed)
    parts = [result.part for result in encoded if result.documents_out]
    if not parts:
        raise no_documents(run, corpus)
    return parts


def shuffled(run: PrepareRun, parts: list[EncodedPart]) -> list[EncodedPart]:
    """The parts in the order of a dataset: shuffled, unless the recipe says otherwise."""
    if not run.recipe.slice.shuffle:
        return parts
    return shuffle_parts(
        parts,
        run.work,
        lambda do, tasks: run.map(do, tasks, run.count_tasks("shuffle", len(tasks), "bucket")),
    )


def _slice(
    run: PrepareRun, parts: Sequence[EncodedPart], tokenizer: TokenizerFile
) -> tuple[SliceTable, HashedPieces | None]:
    """Write the slices and what belongs to all of them: return their table, and of tokens the documents' lengths."""
    size, rows, shape = run.recipe.slice, run.recipe.rows, None
    if rows is not None:
        shape = RowShape(rows.max_tokens, tokenizer.dtype, tokenizer.eos_id or 0, rows.packed)
    count = size.tokens if rows is None else size.rows
    plans = plan_slices(parts, run.work, slice_bytes=size.bytes, count=count, shape=shape)
    parent = run.parent
    chunk_bytes = chunk_size(size.bytes) if parent is None else parent.table.chunk_bytes
    before = parent.num_slices if parent is not None else 0
    tasks = slice_tasks(plans, run.map(write_plan, plans), run.store, shape, chunk_bytes, before)
    _discard_other_plans(run, f"{hash_json([plan.name for plan in plans])} {parent_of(parent)}".encode())
    on_result = run.count_tasks("slice", len(tasks), "slice")
    infos = [*link_slices(run), *run.map(write_slice, tasks, on_result, is_valid=run.has_slice())]
    chunks, lengths = gather_tasks(tasks, "chunks"), gather_tasks(tasks if shape is None else (), "lengths")
    run.map(gather, [*chunks, *lengths])
    run.end_of_tasks()
    leaves = parent.all_leaves() if parent is not None else ()
    run.store.write(CHUNKS_FILE, chain(leaves, (run.work.read(task.object) for task in chunks)))
    pieces = None
    if shape is None:
        with parent.open_lengths() if parent is not None else BytesIO() as file:
            # The parent's file comes in pieces that end with the byte of a new line.
            pieces = HashedPieces(chain(file, (run.work.read(task.object) for task in lengths)))
            run.store.write(LENGTHS_FILE, pieces)
    names = {info.name for info in infos}
    run.store.remove(name for name in run.store.sizes("slices/") if name not in names)  # of another plan
    return SliceTable.from_rows(infos, chunk_bytes), pieces


def _discard_other_plans(run: PrepareRun, plan: bytes) -> None:
    """Remove the slices of another plan, which this one would replace."""
    with suppress(FileNotFoundError):
        if run.work.read("plans/current") == plan:
            return
    run.store.remove(run.store.sizes("slices/"))
    run.work.write("plans/current", plan)


def write_documents(store: Store, corpus: Corpus, parts: Sequence[EncodedPart], parent: Path | None) -> str:
    """Write the index of these parts' documents, in their order: source ids and files. Returns its SHA-256.

    The rows of the file `parent` come first.
    """
    splits: dict[str, tuple[InputSplit, int]] = {}
    for filtered in corpus.parts():
        splits.setdefault(filtered.key, (filtered.split, filtered.first_row))
    with store.open(DOCUMENTS_FILE, replace=True) as file:
        with pq.ParquetWriter(file, _DOCUMENTS_SCHEMA, compression="zstd") as table:
            if parent is not None:
                with pq.ParquetFile(parent) as earlier:
                    for group in range(earlier.num_row_groups):
                        table.write_table(earlier.read_row_group(group).cast(_DOCUMENTS_SCHEMA), _GROUP_ROWS)
            documents = _documents(corpus.store, splits, parts)
            while rows := list(islice(documents, _GROUP_ROWS)):
                columns = [pa.array(column) for column in zip(*rows)]
                table.write_table(pa.table(columns, schema=_DOCUMENTS_SCHEMA), _GROUP_ROWS)
        return hash_file(file)


def _documents(
    store: Store, splits: dict[str, tuple[InputSplit, int]], parts: Sequence[EncodedPart]
) -> Iterator[tuple[str, str, str]]:
    for part in parts:
        with store.local(part.object("ids")) as path, path.open("rb") as lines:
            for line in lines:
                name, index, own_id, url, inner = json.loads(line)
                split, first_row = splits[name]
                source = split.files[index if len(split.files) > 1 else 0]
                # By the name that the lineage has, without the path.
                position = describe_position(split, index, inner, first_row).removeprefix(printable(source.path))
                yield own_id or source.name + position, source.name, url


_VERSION = 1  # Changed when the same tokens would give other files.


class MegatronOutput(MarkedOutput):
    """A pair of Megatron's files, and the tokenizer."""

    name = "megatron"
    marker = "tokens.json"
    needs_tokenizer = True
    stages = ("encode", "shuffle", "tokens out")

    def check(self, recipe: Recipe, document_ids: bool) -> None:
        super().check(recipe, document_ids)
        if recipe.rows is not None:
            raise UsageError("rows: expected --to dataset, got megatron, which has tokens. Leave out [rows].")
        if any(stage.name == "subset" for stage in recipe.stages):
            raise UsageError("subset: expected --to parquet, got megatron. Write text, then prepare each folder of it.")

    def write(self, run: PrepareRun, corpus: Corpus, tokenizer: TokenizerFile, lineage: Json) -> PrepareResult:
        parts = shuffled(run, encode_corpus(run, corpus, tokenizer, run.store))
        plan = write_parts(run.work, "plans/megatron", parts)
        sizes = run.store.sizes("tokens/")
        is_valid = lambda files: all(sizes.get(file.file) == file.bytes for file in files)  # noqa: E731
        task = MegatronTask(plan, run.recipe.name, run.work, run.store)
        (files,) = run.map(write_megatron, [task], run.count_tasks("tokens out", 1, "file"), is_valid=is_valid)
        run.end_of_tasks()
        run.store.remove(sizes.keys() - {file.file for file in files})  # of another name
        counts = counts_of(corpus, *count_all(parts))
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
    documents, tokens = count_all(parts)
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
