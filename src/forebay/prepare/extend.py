"""Extend a dataset: the child has all slices of its parent first, and slices of new documents after them.

The parent's slices keep their ids; they are hard links, or copies where the file system has none, and are verified. The
new documents are shuffled and cut into slices by themselves. Deduplication compares them with the parent's documents,
by their signatures where the parent has them (`[dedup] signatures`), else by the text of its tokens: what the parent's
run dropped (or, of text, cut) is not compared. The latter costs a pass over the parent's tokens, and its text (LZ4) on
disk until the run ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow.parquet as pq

from forebay.base import Json
from forebay.dataset.agreement import TOKENIZER_FILE, differences, token_traits
from forebay.dataset.chunks import hash_slice
from forebay.dataset.manifest import DOCUMENTS_FILE, SliceInfo
from forebay.dataset.reader import Dataset, open_dataset
from forebay.errors import ForebayError, PrepareError, UsageError
from forebay.formats.inputs import ReadOptions
from forebay.prepare.dedup.methods import Dedup, Signed
from forebay.prepare.recipe import Recipe
from forebay.prepare.run import PrepareRun
from forebay.prepare.sources import source_splits
from forebay.prepare.tasks import keys
from forebay.prepare.tasks.text import TextTask, process_split, task_key
from forebay.prepare.tokenize.tokenizers import TokenizerFile, load_tokenizer, parse
from forebay.storage.store import Store

_PART_TOKENS = 1 << 25
_DECODED_AT_ONCE = 256
_PROBE = "  Aa\tb \r\n\n e\u0301 \ufb01 Ⅳ \u65e5\u672c\u8a9e \u00a0 don't . <x> \U0001f600 \u200b\x00\ufffd "


def open_parent(path: Path | str, out: Store) -> Dataset:
    """Open the dataset that is extended. Raises DatasetError, or UsageError if it cannot be."""
    parent = open_dataset(path)
    if parent.path.resolve().as_uri() == out.as_uri():
        _refuse(
            parent, "another --out", "the directory of the dataset itself: a dataset never changes. Its slices are "
            "hard-linked, so that another directory on its disk needs no space for them",
        )  # fmt: skip
    names = [f"slices/{index:06d}.safetensors" for index in range(parent.num_slices)]
    if parent.table.names.to_pylist() != names:
        _refuse(parent, "slices with the names that prepare gives", f"{parent.table.names[:1].to_pylist()}")
    return parent


def parent_tokenizer(parent: Dataset, recipe: Recipe) -> TokenizerFile:
    """The tokenizer of a dataset, loaded with the recipe's EOS and BOS."""
    policy, description = recipe.tokenize, parent.manifest.tokenizer
    if TOKENIZER_FILE not in parent.manifest.listed_files:
        _refuse(parent, f"a dataset with its {TOKENIZER_FILE}", "none. Prepare it again")
    spec = description if description == "bytes" else str(parent.file(TOKENIZER_FILE))
    return replace(load_tokenizer(spec, eos=policy.eos, bos=policy.bos), description=description)


def check_extension(parent: Dataset, recipe: Recipe, tokenizer: TokenizerFile | None, document_ids: bool) -> None:
    """Raise UsageError if documents prepared so cannot follow those of the parent."""
    manifest, files = parent.manifest, parent.manifest.listed_files
    if tokenizer is None:
        _refuse(parent, "its own tokenizer", f"{recipe.tokenize.tokenizer}. Leave out --tokenizer")
    before, theirs = manifest.lineage.get("recipe", {}), token_traits(manifest)
    theirs |= {"tokenizer": theirs["tokenizer"] or "none", "rows": before.get("rows", {})}
    ours: Json = {"layout": "tokens" if recipe.rows is None else "rows", "tokenizer": tokenizer.sha256[:12]}
    ours |= {"vocab_size": tokenizer.vocab_size, "eos_id": "none" if tokenizer.eos_id is None else tokenizer.eos_id}
    ours |= {"dtype": tokenizer.dtype, "rows": recipe.to_json().get("rows", {}), "bos": recipe.tokenize.bos}
    theirs["bos"] = before.get("tokenize", {}).get("bos")
    for name, _, expected, _, got in differences({"parent": theirs, "child": ours}):
        _refuse(parent, f"its {name} {expected!r}", f"{got!r}. Use the recipe and tokenizer that made it")
    if document_ids and DOCUMENTS_FILE not in files:
        _refuse(parent, f"a dataset with {DOCUMENTS_FILE} for --document-ids", "none. Leave out --document-ids")
    if manifest.layout == "tokens" and parent.num_slices:
        last = parent.open_slice(parent.num_slices - 1)
        if not len(last.document_ends) or int(last.document_ends[-1]) != len(last.tokens):
            _refuse(parent, "a last slice that ends with a document", "tokens after its last end")
    if recipe.dedup.active:
        _check_dedup(parent, recipe.dedup)


def _check_dedup(parent: Dataset, dedup: Dedup) -> None:
    """Raise UsageError for what cannot be compared with a parent's documents, which are text and never dropped."""
    before, advice = parent.manifest.lineage.get("recipe", {}), "Leave out deduplication, or prepare all in one run"
    if dedup.keep != "first":
        _refuse(parent, "dedup.keep = 'first', as its documents stay", f"{dedup.keep!r}. Set keep, or {advice.lower()}")
    from forebay.prepare.dedup.signatures import signature_files  # which needs numba

    if signature_files(parent, dedup):
        return
    if dedup.own:
        _refuse(parent, "methods that compare text", f"{', '.join(method.name for method in dedup.own)}. {advice}")
    if dedup.url and DOCUMENTS_FILE not in parent.manifest.listed_files:
        _refuse(parent, f"a dataset with {DOCUMENTS_FILE}, which has the addresses", f"none. {advice}")
    if parent.manifest.layout == "rows" or "fim" in before:
        _refuse(parent, "a dataset of plain text to compare with", f"{'fim' if 'fim' in before else 'rows'}. {advice}")
    if not _is_lossless(parent):
        _refuse(parent, "a tokenizer whose ids decode to the same text", f"{parent.manifest.tokenizer!r}. {advice}")


def _is_lossless(parent: Dataset) -> bool:
    try:
        tokenizer = parse(parent.file(TOKENIZER_FILE).read_bytes(), TOKENIZER_FILE)
    except (ForebayError, OSError):
        return False
    ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    return bool(tokenizer.decode(ids, skip_special_tokens=True) == _PROBE)


def _refuse(parent: Dataset, expected: str, actual: str) -> NoReturn:
    raise UsageError(f"prepare --extend {parent.path}: expected {expected}, got {actual}.")


@dataclass
class ParentDocuments:
    """The documents of a dataset as a source of text: each part is those that end in slices [first, last)."""

    path: str
    version: str  # the dataset's id
    with_urls: bool
    name: str = "parent"

    def parts(self) -> Sequence[str]:
        stops = np.cumsum(open_dataset(self.path).table.count)
        edges = np.searchsorted(stops, np.arange(0, int(stops[-1]) if len(stops) else 0, _PART_TOKENS), "right")
        edges = np.unique([*edges, len(stops)])
        return [f"{first}-{last}" for first, last in zip(edges[:-1].tolist(), edges[1:].tolist())]

    def read(self, part: str) -> Iterator[Mapping[str, str]]:
        first, last = map(int, part.split("-"))
        dataset = _opened(self.path)
        tokenizer = parse(dataset.file(TOKENIZER_FILE).read_bytes(), TOKENIZER_FILE)
        documents, urls = self._tokens(dataset, first, last), self._urls(dataset, first)
        while batch := list(islice(documents, _DECODED_AT_ONCE)):
            for text in tokenizer.decode_batch(batch, skip_special_tokens=True):
                yield {"text": text, "url": next(urls, "")}

    @staticmethod
    def _tokens(dataset: Dataset, first: int, last: int) -> Iterator[list[int]]:
        started: list[int] = []  # of the next document, which began in earlier slices
        for index in range(first - 1, -1, -1):
            opened = dataset.open_slice(index)
            last_end = int(opened.document_ends[-1]) if len(opened.document_ends) else 0
            started = opened.tokens[last_end:].tolist() + started
            if len(opened.document_ends):
                break
        for index in range(first, last):
            opened, start = dataset.open_slice(index), 0
            for stop in opened.document_ends.tolist():
                yield started + opened.tokens[start:stop].tolist()
                started, start = [], stop
            started += opened.tokens[start:].tolist()

    def _urls(self, dataset: Dataset, first: int) -> Iterator[str]:
        if not self.with_urls:
            return
        skipped = int(dataset.table.documents[:first].sum())
        with pq.ParquetFile(dataset.file(DOCUMENTS_FILE)) as file:
            for batch in file.iter_batches(columns=["url"]):
                if skipped < len(batch):
                    yield from batch.slice(skipped).column("url").to_pylist()
                skipped = max(0, skipped - len(batch))


def sign_parent(run: PrepareRun) -> list[Signed]:
    """Write and sign the documents of the parent, for `deduplicate`."""
    parent, dedup, read = run.parent, run.recipe.dedup, ReadOptions()
    if parent is None:
        return []
    from forebay.prepare.dedup.signatures import LoadTask, load_signatures, signature_files

    if files := signature_files(parent, dedup):
        loading = [LoadTask(str(parent.file(name)), sha256, dedup, run.work) for name, sha256 in files.items()]
        return run.map(load_signatures, loading, run.count_tasks("parent", len(loading), "file"))
    source = ParentDocuments(str(parent.path), parent.id, dedup.url)
    key = task_key(keys.content_key(read, (), (), 1.0), source.name, (), dedup)
    tasks = [
        TextTask(split, (), (), dedup, run.work, key, run.recipe.limits, read, 1.0, source, hashes=False)
        for split in source_splits(source)
    ]
    on_result = run.count_tasks("parent", len(tasks), "part")
    texts = run.map(process_split, tasks, on_result)
    if (read_documents := sum(text.documents_out for text in texts)) != parent.manifest.documents:
        raise PrepareError(
            f"{parent.path}: expected the text of {parent.manifest.documents} documents, got {read_documents}. The "
            "others are empty or too large; leave out deduplication."
        )
    return [text.signed for text in texts if text.signed is not None]


@dataclass(frozen=True)
class LinkTask:
    """Slice `index` of the dataset at `parent`, of that id, to the dataset at `out`."""

    parent: str
    id: str
    out: Store
    index: int

    @property
    def name(self) -> str:
        return f"{self.id}-{self.index:06d}"


def link_slices(run: PrepareRun) -> list[SliceInfo]:
    """Link all slices of the parent into the output; their rows of the table. Raises DatasetError if one is damaged."""
    parent = run.parent
    if parent is None:
        return []
    tasks = [LinkTask(str(parent.path), parent.id, run.store, index) for index in range(parent.num_slices)]
    on_result = run.count_tasks("link", len(tasks), "slice")
    return run.map(link_slice, tasks, on_result, is_valid=run.has_slice())


def link_slice(task: LinkTask, scale: int) -> SliceInfo:
    """Run a LinkTask. `scale` changes nothing."""
    dataset = _opened(task.parent)
    row, source = dataset.table.row(task.index), dataset.slice_path(task.index)
    dataset.read_slice(task.index)  # hashes it unless it was
    if task.out.copy(row.name, source):
        with task.out.local(row.name) as copied:
            if hash_slice(copied, row.chunk_bytes)[0] != row.sha256:
                raise PrepareError(f"{source}: changed while it was copied. Verify the dataset.")
    return row


@lru_cache(maxsize=1)
def _opened(path: str) -> Dataset:
    return open_dataset(path)


def parent_of(parent: Dataset | None) -> Json:
    """The part of a lineage that names the parent, and the datasets that this extends, the nearest first."""
    if parent is None:
        return {}
    own, earlier = {"id": parent.id, "slices": parent.num_slices}, parent.manifest.lineage.get("parent")
    if not earlier:
        return {"parent": own}
    ancestors = [{name: earlier[name] for name in own}, *earlier.get("ancestors", [])]
    return {"parent": {**own, "ancestors": ancestors}}
