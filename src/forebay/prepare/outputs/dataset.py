"""From kept documents to datasets: encode, shuffle, slice, and the manifests, the main one last.

Hides: that each named subset is a dataset of its own, and that fine-tuning has rows where pre-training has tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from forebay.dataset.manifest import (
    DOCUMENTS_FILE,
    MANIFEST_FILE,
    TABLE_FILE,
    Manifest,
    SliceTable,
    dataset_id,
)
from forebay.dataset.slices import hash_file
from forebay.files import atomic_write, open_atomic, remove_stale, sync_directory
from forebay.prepare.corpus import Corpus, collect, conclude, nothing_left, write_ids
from forebay.prepare.read.base import Piece
from forebay.prepare.read.listing import shown_path
from forebay.prepare.stats import Tally
from forebay.prepare.subsets import TRAIN
from forebay.prepare.tasks.encode import Encoded, EncodeTask, encode, finished, left_out_file
from forebay.prepare.tasks.shuffle import Shuffle, TokenPart, finished_shuffle, plan_shuffle, shuffle
from forebay.prepare.tasks.slicing import finished_slice, plan_slices, write_slice
from forebay.prepare.tasks.text import place_name
from forebay.prepare.tokenize.conversations import RowShape, plan_row_slices
from forebay.prepare.tokenize.encoders import CoderSpec
from forebay.prepare.tokenize.tokenizers import TokenizerFile

if TYPE_CHECKING:
    from forebay.prepare.driver import PrepareSummary, Run


TOKENIZER_FILE, SIGNATURES = "tokenizer.json", "signatures"


@dataclass(frozen=True)
class Made:
    """One dataset that was written, but for its manifest. `files`: what lies beside the slices, with its sha256."""

    name: str
    folder: Path
    documents: int
    tokens: int
    table: SliceTable
    files: Mapping[str, str] = field(default_factory=dict)

    def facts(self, whole: bytes) -> dict[str, Any]:
        """What the summary says of a subset."""
        found = {"id": dataset_id(whole), "documents": self.documents, "tokens": self.tokens}
        return {**found, "slices": len(self.table)}


def finish(run: Run, corpus: Corpus, used: TokenizerFile, tally: Tally, lineage: dict[str, Any]) -> PrepareSummary:
    """Write all datasets of the run, and what people look at; the main manifest makes it final."""
    collect(run, corpus, tally)
    encoded = _encode(run, corpus, used)
    _count(tally, encoded)
    made = [_slice(run, corpus, encoded, used, name) for name in run.recipe.subsets.names]
    main, others = made[0], [one for one in made[1:] if one.documents]
    if not main.documents:
        raise nothing_left(run, corpus, tally)
    if corpus.dedup is not None:
        from forebay.prepare.dedup.corpus import store_signatures

        store_signatures(corpus.signed, corpus.dedup, run.recipe.dedup, run.out / SIGNATURES)
    counts: dict[str, Any] = {
        "documents_in": corpus.documents_in,
        "documents_out": sum(one.documents for one in made),
        "tokens": sum(one.tokens for one in made),
        "slices": sum(len(one.table) for one in made),
        "dropped": tally.dropped(),
    }
    subsets = {one.name: one.facts(_write_manifest(run, one, used, {**lineage, "counts": counts})) for one in others}
    lineage = {**lineage, "counts": {**counts, "subsets": subsets}}
    whole = _manifest(run, main, used, lineage).to_json()
    if subsets:
        subsets = {TRAIN: main.facts(whole), **subsets}
    commit = partial(_write_manifest, run, main, used, lineage)
    return conclude(run, corpus, tally, dataset_id(whole), counts, subsets, commit)


def _encode(run: Run, corpus: Corpus, used: TokenizerFile) -> list[Encoded]:
    atomic_write(run.out / TOKENIZER_FILE, used.data)
    recipe = run.recipe
    spec = CoderSpec.of(used, run.out / TOKENIZER_FILE)
    rendering = recipe.rows.conversations() if recipe.rows else None
    seen: dict[str, int] = {}
    tasks = []
    for index, text in enumerate(corpus.texts):
        part = text.part(str(run.tasks))
        occurrence = seen.get(part.name, 0)
        seen[part.name] = occurrence + 1
        drop, cut, name = corpus.marks(index, recipe.dedup)
        tasks.append(
            EncodeTask(
                part=part,
                spec=spec,
                folder=str(run.tasks),
                subsets=recipe.subsets,
                drop=drop,
                cut=cut,
                dedup_name=name,
                shuffle=Shuffle(recipe.slice.seed, occurrence) if recipe.slice.shuffle else None,
                rendering=rendering,
                with_ids=run.document_ids,
            )
        )
    sizes = [text.bytes_out for text in corpus.texts]
    encoded = run.map(encode, tasks, finished, run.counted_documents("encode", sizes), sizes)
    write_ids(run, corpus, [left_out_file(task) for task in tasks])
    return encoded


def _count(tally: Tally, encoded: Sequence[Encoded]) -> None:
    """The last step of the funnel; duplicates are counted, by kind, where they were found."""
    last = next(reversed(tally.funnel.values()))
    count = tally.stage("tokenize")
    count.documents_in, count.bytes_in = last.documents_out, last.bytes_out
    count.documents_out = sum(result.documents_out for result in encoded)
    count.bytes_out = sum(result.text_bytes for result in encoded)
    for result in encoded:
        count.dropped.update({reason: n for reason, n in result.dropped.items() if reason != "duplicate"})
        count.changed.update(result.changed)


def _slice(run: Run, corpus: Corpus, encoded: Sequence[Encoded], used: TokenizerFile, subset: str) -> Made:
    folder = run.out if subset == TRAIN else run.out / subset
    (folder / "slices").mkdir(parents=True, exist_ok=True)
    parts = [result.subsets[subset] for result in encoded if subset in result.subsets]
    documents, tokens = sum(part.documents for part in parts), sum(part.tokens for part in parts)
    if run.recipe.slice.shuffle:
        tasks = plan_shuffle(parts, run.tasks)
        parts = run.map(shuffle, tasks, finished_shuffle, run.counted("shuffle", len(tasks), " buckets"))
    plans = run.work / "plans"
    plans.mkdir(exist_ok=True)
    size = run.recipe.slice
    rows, shape = run.recipe.rows, None
    if rows is not None:
        shape = RowShape(rows.max_tokens, used.dtype, used.eos_id or 0, rows.labels, rows.packed)
        plan = plan_row_slices(parts, plans, shape, slice_bytes=size.bytes, slice_rows=size.rows or 0)
    else:
        plan = plan_slices(parts, plans, slice_bytes=size.bytes, slice_tokens=size.tokens or 0)
    note = run.counted("slice", plan.slices, " slices")
    infos = run.map(write_slice, plan.tasks(folder, shape), finished_slice, note)
    sync_directory(folder / "slices")
    _forget_other_slices(folder, len(infos))
    files = {DOCUMENTS_FILE: write_documents(folder / DOCUMENTS_FILE, corpus, parts)} if run.document_ids else {}
    return Made(subset, folder, documents, tokens, SliceTable.from_rows(infos), files)


def _manifest(run: Run, made: Made, used: TokenizerFile, lineage: dict[str, Any]) -> Manifest:
    rows = run.recipe.rows is not None
    atomic_write(made.folder / TABLE_FILE, made.table.to_parquet())
    return Manifest.of(
        made.table,
        {**lineage, "subset": made.name, "files": {TOKENIZER_FILE: used.sha256, **made.files}},
        name=run.recipe.name if made.name == TRAIN else f"{run.recipe.name}-{made.name}",
        layout="rows" if rows else "tokens",
        dtype="" if rows else used.dtype,
        tokenizer=used.description,
        vocab_size=used.vocab_size,
        eos_id=used.eos_id,
    )


def _write_manifest(run: Run, made: Made, used: TokenizerFile, lineage: dict[str, Any]) -> bytes:
    """The manifest of a dataset, on disk: from here on it is one."""
    whole = _manifest(run, made, used, lineage).to_json()
    atomic_write(made.folder / TOKENIZER_FILE, used.data)
    remove_stale(made.folder)
    atomic_write(made.folder / MANIFEST_FILE, whole)
    return whole


def _forget_other_slices(folder: Path, count: int) -> None:
    """Remove what an earlier, unfinished run left: slices of another plan, temporary files."""
    wanted = {f"{index:06d}.safetensors" for index in range(count)}
    for path in (folder / "slices").iterdir():
        if path.name not in wanted:
            path.unlink()


SCHEMA = pa.schema([("id", pa.string()), ("source", pa.string()), ("url", pa.string())])
_ROWS = 1 << 16


def write_documents(path: Path, corpus: Corpus, parts: Sequence[TokenPart]) -> str:
    """Write the table of these parts' documents, in their order; its sha256 in hex."""
    pieces: dict[str, tuple[Piece, int]] = {}
    for piece, text, base in zip(corpus.pieces, corpus.texts, corpus.bases):
        pieces.setdefault(text.part(corpus.folder).name, (piece, base))
    with open_atomic(path) as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as table:
        found = _rows(pieces, parts)
        while rows := list(islice(found, _ROWS)):
            table.write_table(pa.table([pa.array(column) for column in zip(*rows)], schema=SCHEMA), _ROWS)
    return hash_file(path)


def _rows(pieces: dict[str, tuple[Piece, int]], parts: Sequence[TokenPart]) -> Iterator[tuple[str, str, str]]:
    for part in parts:
        with part.file("ids").open("rb") as lines:
            for line in lines:
                name, place, given, url, inner = json.loads(line)
                piece, base = pieces[name]
                source = piece.sources[place if len(piece.sources) > 1 else 0]
                # As the input is named in the lineage: not where it lay.
                there = source.name + place_name(piece, place, inner, base).removeprefix(shown_path(source.path))
                yield given or there, source.name, url
