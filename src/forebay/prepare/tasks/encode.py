"""ENCODE tasks: the kept documents of one part to tokens.

Memory: a record batch and its tokens. With a shuffle, `shuffle` then sorts the documents by their keys, in the files.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.arrays import I64, Array
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.errors import PrepareError
from forebay.prepare.documents import part_batches
from forebay.prepare.tasks.keys import hash_json
from forebay.prepare.tasks.shuffle import EncodedPart, Shuffle, document_keys, sort_part
from forebay.prepare.tokenize.encoders import LONG_CHARS, EncoderSpec, encode_column, encode_long
from forebay.prepare.tokenize.tokenizers import SAMPLE_BYTES
from forebay.storage.store import FolderStore, Store

if TYPE_CHECKING:
    from forebay.prepare.dedup.cutting import Cutter, Flags
    from forebay.prepare.tokenize.renderings import Conversations, FillInTheMiddle


TASK_VERSION = 5  # Changed when the same part would give other tokens, so that old results are not used.
_BATCH_BYTES = 4 << 20
_CHANGES = ("truncated", "fill_in_the_middle")  # What a rendering counts of documents that it keeps.


@dataclass(frozen=True)
class TextPart:
    """Kept documents of a split: an Arrow file of `documents` rows, by its name in the store.

    `name` is the key of random choices: a hash of the input and the recipe, without library versions.
    """

    arrow: str
    documents: int
    name: str


@dataclass(frozen=True)
class EncodeTask:
    """One part to encode.

    Args:
        drop: A byte a document, 0 for those to keep. None keeps all.
        cut: Cuts duplicated lines out, if given.
        dedup_name: A hash of all that `drop` and `cut` depend on.
        shuffle: If given, documents are written in the order of their keys.
        with_ids: Whether `ids` files are written: a JSON line `[part's name, place, id, url, where]` a document.
        rendering: If given, encodes in place of `encode_column`.
    """

    part: TextPart
    spec: EncoderSpec
    store: Store
    drop: "Flags | None" = None
    cut: "Cutter | None" = None
    dedup_name: str = ""
    shuffle: Shuffle | None = None
    with_ids: bool = False
    rendering: "Conversations | FillInTheMiddle | None" = None

    @property
    def dtype(self) -> str:
        """`U16` or `U32`: the type of the tokens in its files."""
        return (self.rendering.dtype if self.rendering else "") or self.spec.dtype

    @cached_property
    def name(self) -> str:
        """A hash of all that the result depends on, and of nothing else (no path)."""
        library = version("tokenizers") if self.spec.kind != "bytes" else ""
        rendering = self.rendering.fields if self.rendering else None
        fields = [
            TASK_VERSION, library, self.part.name, self.part.arrow, self.spec.fields, self.dedup_name,
            asdict(self.shuffle) if self.shuffle else None, self.with_ids, rendering,
        ]  # fmt: skip
        return hash_json(fields)


@dataclass
class EncodeResult:
    """The result of an EncodeTask: counts, and the tokens.

    `dropped` is by reason (`duplicate`, `empty`, and the reasons of the rendering); `changed` counts what the rendering
    keeps (`truncated`, `fill_in_the_middle`); `text_bytes` is what was encoded.
    """

    part: EncodedPart
    documents_in: int = 0
    text_bytes: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)

    @property
    def documents_out(self) -> int:
        return self.part.documents


def encode(task: EncodeTask, scale: int = 0) -> EncodeResult:
    """Run the task. Memory is about 40 batches of 4 MiB, a quarter a scale."""
    with ExitStack() as stack:
        part = EncodedPart(f"tokens/{task.name}", 0, 0, task.dtype, task.shuffle is not None, task.with_ids)
        result, outputs = EncodeResult(part), _Outputs(task, part, stack)
        for batch, first_row in _batches(task, max(_BATCH_BYTES >> (2 * scale), 1 << 16)):
            _encode_batch(task, result, outputs, batch, first_row)
        if result.documents_in != task.part.documents:
            raise PrepareError(
                f"{task.part.arrow}: expected {task.part.documents} documents of an earlier run, got "
                f"{result.documents_in}. Remove .work and run again."
            )
        result.part = outputs.commit()
    return result


def left_out_rows(task: EncodeTask) -> str:
    """The name of the rows, u32, that are no duplicates and yet have no tokens."""
    return f"tokens/{task.name}.left"


def _batches(task: EncodeTask, batch_bytes: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    for row, batch in part_batches(task.store, task.part.arrow):
        sizes = np.cumsum(pc.binary_length(batch.column("text")).to_numpy(zero_copy_only=False))
        start = 0
        while start < len(batch):
            reached = int(sizes[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(sizes, reached + batch_bytes, "right")))
            yield batch.slice(start, stop - start), row + start
            start = stop


def _encode_batch(
    task: EncodeTask, result: EncodeResult, outputs: "_Outputs", batch: pa.RecordBatch, first_row: int
) -> None:
    rows = np.arange(first_row, first_row + len(batch))
    result.documents_in += len(batch)
    if task.drop is not None:
        drop = task.drop.load(first_row, len(batch))
        _count(result.dropped, {"duplicate": int((drop != 0).sum())})
    texts = batch.column("text")
    if task.cut is not None:
        texts = task.cut.cut(texts, first_row)
    if task.drop is not None and drop.any():
        texts, batch, rows = _taken(np.flatnonzero(drop == 0), texts, batch, rows)
    keys = rows
    if "copies" in batch.schema.names:
        copies = batch.column("copies").to_numpy()
        index = np.repeat(np.arange(len(rows)), copies)
        number = np.arange(len(index)) - np.repeat(np.cumsum(copies) - copies, copies)
        texts, batch, rows = _taken(index, texts, batch, rows)
        keys = rows + (number << 40)
    result.text_bytes += int(pc.sum(pc.binary_length(texts)).as_py() or 0)
    if task.rendering is None and len(set(rows)) == 1 and pc.binary_length(texts)[0].as_py() > LONG_CHARS:
        # One giant document (and its copies) in several arrays: its tokens alone may be half a gigabyte.
        for copy in range(len(rows)):
            for tokens in encode_long(task.spec, texts[0].as_py()):
                outputs.write(tokens, np.empty(0, np.int64), keys[:0], [])
            lines = _id_lines(task, batch.slice(copy, 1), pa.array([True]))
            outputs.write(tokens[:0], np.zeros(1, np.int64), keys[copy : copy + 1], lines)
        return
    if task.rendering is not None:
        tokens, lengths, counts = task.rendering.encode(task.spec, texts)
        _count(result.changed, {kind: n for kind, n in counts.items() if kind in _CHANGES})
        _count(result.dropped, {kind: n for kind, n in counts.items() if kind not in _CHANGES})
    else:
        tokens, lengths = encode_column(task.spec, texts)
        _count(result.dropped, {"empty": int((lengths == 0).sum())})
    outputs.left_out.append(rows[lengths == 0])
    present = lengths > 0
    outputs.write(tokens, lengths[present], keys[present], _id_lines(task, batch, pa.array(present)))


def _taken(index: I64, texts: pa.Array, batch: pa.RecordBatch, rows: I64) -> tuple[pa.Array, pa.RecordBatch, I64]:
    return texts.take(pa.array(index)), batch.take(pa.array(index)), rows[index]


def _id_lines(task: EncodeTask, batch: pa.RecordBatch, present: pa.BooleanArray) -> list[bytes]:
    if not task.with_ids:
        return []
    names = [name for name in ("place", "id", "url", "where") if name in batch.schema.names]
    rows = zip(*batch.select(names).filter(present).to_pydict().values())
    return [json.dumps([task.part.name, *row], ensure_ascii=False).encode() + b"\n" for row in rows]


def _count(counts: dict[str, int], more: dict[str, int]) -> None:
    for kind, n in more.items():
        if n:
            counts[kind] = counts.get(kind, 0) + n


class _Outputs:
    def __init__(self, task: EncodeTask, part: EncodedPart, stack: ExitStack) -> None:
        self._task, self._part, self._id_bytes = task, part, 0
        # Those of a part that is still to be sorted are files of this task alone.
        self._store: Store = task.store
        if task.shuffle is not None:
            self._store = FolderStore(str(stack.enter_context(task.store.scratch())))
        self._stack = stack.enter_context(ExitStack())
        self._files = {kind: self._stack.enter_context(self._store.open(part.object(kind))) for kind in part.kinds}
        self.left_out: list[I64] = [np.empty(0, np.int64)]

    def write(self, tokens: Array, lengths: I64, rows: I64, ids: list[bytes]) -> None:
        part = self._part
        columns = {"tokens": tokens.astype(TOKEN_DTYPES[part.dtype], copy=False)}
        columns["ends"] = (np.cumsum(lengths) + part.tokens).astype("<u8")
        if part.with_ids:
            columns["ids"] = np.array(bytearray(b"".join(ids)), np.uint8)
            columns["id_ends"] = (np.cumsum([len(line) for line in ids], dtype=np.int64) + self._id_bytes).astype("<u8")
            self._id_bytes += len(columns["ids"])
        if self._task.shuffle is not None:
            columns["keys"] = document_keys(self._task.shuffle, self._task.part.name, rows)
        for kind, column in columns.items():
            self._files[kind].write(np.ascontiguousarray(column).data)
        self._part = replace(part, documents=part.documents + len(lengths), tokens=part.tokens + len(tokens))

    def commit(self) -> EncodedPart:
        self._stack.close()
        if self._part.with_keys:
            sort_part(self._part, self._store, self._task.store)
        left_out = np.concatenate(self.left_out).astype("<u4")
        self._task.store.write(left_out_rows(self._task), left_out.tobytes())
        return self._part


_PART_BYTES = 4 << 20


def sample_texts(store: Store, parts: Sequence[TextPart], seed: int, limit: int = SAMPLE_BYTES) -> Iterator[str]:
    """Texts of at most `limit` bytes: parts in the order of a keyed hash, and of each the first 4 MiB, or an equal
    share of the limit if that is more. A function of the parts' names and contents, the seed and the limit.
    """

    def key(part: TextPart) -> bytes:
        return hashlib.sha256(f"forebay sample {seed} {part.name}".encode()).digest()

    share, remaining = max(_PART_BYTES, limit // max(1, len(parts))), limit
    for part in sorted(parts, key=key):
        here = min(share, remaining)
        batches = part_batches(store, part.arrow, ["text"])
        for text in (text for _, batch in batches for text in batch.column("text").to_pylist()):
            data = text.encode()[:here]
            excerpt = data.decode("utf-8", "ignore")
            here, remaining = here - len(data), remaining - len(data)
            if excerpt:
                yield excerpt
            if here <= 0:
                break
        if remaining <= 0:
            return
