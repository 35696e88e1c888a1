"""SLICE tasks: parts of tokens, one after the other, to slices of a dataset. Slices begin and end inside documents.

Each 2^33 tokens or more are planned by one task, in one pass over their document ends; the last slice of each is as
short as it comes. A plan is two small objects (16 bytes a slice, and the list of parts), so that a task is a name and a
number. Writing a slice holds its tokens twice: slices of at most 256 MiB keep a process below 1 GB.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from forebay.arrays import I64, U32, Array
from forebay.dataset.lengths import encode_lengths
from forebay.dataset.manifest import TOKEN_DTYPES, SliceInfo
from forebay.dataset.slices import TOKEN_HEADER_BYTES, next_cut, write_rows_slice, write_token_slice
from forebay.errors import PrepareError, UsageError
from forebay.prepare.documents import read_items
from forebay.prepare.settings import Settings
from forebay.prepare.tasks.keys import hash_json
from forebay.prepare.tasks.shuffle import EncodedPart, read_parts, write_parts
from forebay.prepare.tokenize.renderings import TRAINED
from forebay.storage.store import Store

PLAN_VERSION = 3
MIN_SLICE_BYTES = 4096
_ENDS_AT_ONCE = 1 << 17
_GROUP_TOKENS = 1 << 33  # Of a plan, at least, but for the last.
_GATHERED = 256  # Slices whose parts are in one object.


MASKED = -100  # The label of a token that is not trained on.
_HEADER_BYTES = 1024


@dataclass(frozen=True)
class RowShape(Settings):
    """The tensors of a row: their width and types, the padding, and whether conversations share rows."""

    max_tokens: int
    dtype: Annotated[str, Field(pattern="^U(16|32)$")]
    pad_id: int = 0
    packed: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in a slice."""
        each = TOKEN_DTYPES[self.dtype].itemsize + 9 + (8 if self.packed else 0)
        return each * self.max_tokens

    def tensors(self, tokens: U32, document_ends: I64) -> dict[str, Array]:
        """The rows of these conversations, by name; `ends` are exclusive."""
        firsts = (
            _pack(document_ends, 0, self.max_tokens, len(document_ends))[0]
            if self.packed
            else np.arange(len(document_ends) + 1)
        )
        n, width = len(firsts) - 1, self.max_tokens
        edges = np.concatenate([[0], document_ends])
        row_starts = edges[firsts[:-1]]
        lengths = edges[firsts[1:]] - row_starts
        positions = np.arange(len(tokens)) + np.repeat(np.arange(n) * width - row_starts, lengths)
        ids = tokens & np.uint32(TRAINED - 1)
        trained = (tokens & np.uint32(TRAINED)) != 0

        def spread(values: Array, rest: int, dtype: Any) -> Array:
            out = np.full(n * width, rest, dtype)
            out[positions] = values
            return out.reshape(n, width)

        tensors = {
            "input_ids": spread(ids, self.pad_id, TOKEN_DTYPES[self.dtype]),
            "labels": spread(np.where(trained, ids.astype(np.int64), MASKED), MASKED, "<i8"),
            "attention_mask": spread(np.ones(len(tokens), np.uint8), 0, np.uint8),
        }
        if self.packed:
            counts = np.diff(edges)
            owner = np.repeat(np.arange(len(document_ends)), counts)
            row_of = np.repeat(np.arange(n), np.diff(firsts))
            tensors["position_ids"] = spread(np.arange(len(tokens)) - edges[owner], 0, np.int32)
            tensors["segment_ids"] = spread(owner - firsts[row_of[owner]] + 1, 0, np.int32)
        return tensors


@dataclass(frozen=True)
class SliceTask:
    """Slice `index` of a plan, to `slices/` in `out`; of rows with a `shape`.

    `first` is the number of the dataset's slices before the plan's; `work` is the store of the plan.
    """

    plan: str
    index: int
    work: Store
    out: Store
    shape: RowShape | None
    chunk_bytes: int
    first: int

    @property
    def name(self) -> str:
        """Of the plan and its number there, as its bytes depend on both."""
        return f"{self.plan.rpartition('/')[2]}-{self.first}-{self.index:06d}"

    @property
    def slice_name(self) -> str:
        """The slice's path within the dataset."""
        return f"slices/{self.first + self.index:06d}.safetensors"

    def part(self, kind: str) -> str:
        """The name in `work` of its part of `chunks.sha256` ("chunks") or `lengths.zst` ("lengths")."""
        return f"plans/{self.name}.{kind}"


@dataclass(frozen=True)
class TokenCut:
    """Slices of `slice_tokens` tokens, or as large as fits in `slice_bytes`: header, tokens, 8 bytes a document end."""

    slice_bytes: int
    slice_tokens: int
    dtype: str

    def next(self, document_ends: "DocumentEnds", start: int) -> tuple[int, int]:
        """Where a slice ends that begins at a token, and the index after the last document end until there."""
        itemsize = TOKEN_DTYPES[self.dtype].itemsize
        if self.slice_tokens:
            stop = min(document_ends.total, start + self.slice_tokens)
            return stop, document_ends.first + int(np.searchsorted(document_ends.until(stop, 1 << 62), stop, "right"))
        budget = self.slice_bytes - TOKEN_HEADER_BYTES
        near = document_ends.until(min(document_ends.total, start + budget // itemsize), budget // 8 + 1)
        stop, inside = next_cut(near, start, document_ends.total, itemsize, self.slice_bytes)
        return stop, document_ends.first + inside


@dataclass(frozen=True)
class RowCut:
    """Slices of `rows` rows, the last of which may have fewer. Conversations stay whole."""

    shape: RowShape
    rows: int

    def next(self, document_ends: "DocumentEnds", start: int) -> tuple[int, int]:
        """As of TokenCut."""
        # A row has at most `max_tokens` tokens, so that a window of ends is enough.
        rows, shape = self.rows, self.shape
        max_ends = rows + 1 if not shape.packed else 1 << 62
        near = document_ends.until(min(document_ends.total, start + (rows + 1) * shape.max_tokens), max_ends)
        taken = len(near[:rows]) if not shape.packed else _pack(near, start, shape.max_tokens, rows)[1]
        return int(near[taken - 1]), document_ends.first + taken


@dataclass(frozen=True)
class PlanTask:
    """A list of parts to `NAME.cuts`, i64 [slices + 1, 2]: where slices begin, in tokens and in document ends.

    `name` is that of the list, which is also a hash of the settings.
    """

    name: str
    cut: TokenCut | RowCut
    store: Store


def plan_slices(
    parts: Sequence[EncodedPart],
    store: Store,
    *,
    slice_bytes: int = 64 << 20,
    count: int | None = None,
    shape: RowShape | None = None,
) -> list[PlanTask]:
    """Tasks that cut the parts, as one stream, into slices of `count` tokens, or of rows with a shape.

    Without a count, slices are as large as fits in `slice_bytes`.
    """
    kinds = {part.dtype for part in parts} or {"U16"}
    if len(kinds) > 1:
        raise UsageError(f"slices: expected parts of one type of token, got {sorted(kinds)}.")
    cut: TokenCut | RowCut
    if shape is None:
        if slice_bytes < MIN_SLICE_BYTES:
            raise UsageError(f"slice size: expected at least {MIN_SLICE_BYTES} bytes or 1 token, got {slice_bytes}.")
        cut = TokenCut(0 if count else slice_bytes, count or 0, kinds.pop())
    else:
        cut = RowCut(shape, count or (slice_bytes - _HEADER_BYTES) // shape.row_bytes)
        if cut.rows < 1:
            raise UsageError(
                f"slice_bytes: expected at least a row ({shape.row_bytes + _HEADER_BYTES}), got {slice_bytes}."
            )
    return [
        PlanTask(write_parts(store, "plans/slices", group, [PLAN_VERSION, asdict(cut)]), cut, store)
        for group in _groups(parts)
    ]


def _groups(parts: Sequence[EncodedPart]) -> Iterator[Sequence[EncodedPart]]:
    start = tokens = 0
    for index, part in enumerate(parts, 1):
        tokens += part.tokens
        if tokens >= _GROUP_TOKENS or index == len(parts):
            yield parts[start:index]
            start, tokens = index, 0


def write_plan(task: PlanTask, scale: int = 0) -> int:
    """Run a PlanTask. Returns the number of slices. `scale` changes nothing."""
    document_ends = DocumentEnds(task.store, read_parts(task.store, task.name))
    task.store.write(f"{task.name}.cuts", _cuts(document_ends, task.cut))
    return task.store.size(f"{task.name}.cuts") // 16 - 1


def _cuts(document_ends: "DocumentEnds", cut: TokenCut | RowCut) -> Iterator[bytes]:
    start = 0
    yield np.zeros(2, "<i8").tobytes()
    while start < document_ends.total:
        start, last_end = cut.next(document_ends, start)
        document_ends.discard(last_end)
        yield np.array([start, last_end], "<i8").tobytes()


def slice_tasks(
    plans: Sequence[PlanTask], slices: Sequence[int], out: Store, shape: RowShape | None, chunk_bytes: int, first: int
) -> list[SliceTask]:
    """A task for each slice of the plans, in order; into a dataset's directory, after its `first` slices."""
    tasks: list[SliceTask] = []
    for plan, count in zip(plans, slices):
        before = first + len(tasks)
        tasks += [SliceTask(plan.name, i, plan.store, out, shape, chunk_bytes, before) for i in range(count)]
    return tasks


@dataclass(frozen=True)
class GatherTask:
    """The parts of up to 256 slices, by their objects, to one."""

    parts: tuple[str, ...]
    store: Store

    @property
    def name(self) -> str:
        return hash_json(self.parts)

    @property
    def object(self) -> str:
        """The name of the parts of all of them."""
        return f"plans/{self.name}.parts"


def gather_tasks(tasks: Sequence[SliceTask], kind: str) -> list[GatherTask]:
    """Tasks that gather the parts that the tasks of slices left."""
    groups = (tasks[start : start + _GATHERED] for start in range(0, len(tasks), _GATHERED))
    return [GatherTask(tuple(task.part(kind) for task in group), group[0].work) for group in groups]


def gather(task: GatherTask, scale: int = 0) -> int:
    """Run a GatherTask. Returns the number of slices. `scale` changes nothing."""
    task.store.write(task.object, b"".join(task.store.each(task.store.read, task.parts)))
    return len(task.parts)


class DocumentEnds:
    """The document ends of all parts as one rising sequence, read as they are needed, discarded when they are cut off.

    `first` is the index of the first end that is not discarded, `total` the tokens in all parts.
    """

    def __init__(self, store: Store, parts: Sequence[EncodedPart]) -> None:
        self.first, self.total = 0, sum(part.tokens for part in parts)
        self._near = np.empty(0, np.int64)
        self._unread = self._read(store, parts)

    @staticmethod
    def _read(store: Store, parts: Sequence[EncodedPart]) -> Iterator[I64]:
        base = 0
        for part in parts:
            for start in range(0, part.documents, _ENDS_AT_ONCE):
                count = min(_ENDS_AT_ONCE, part.documents - start)
                block = read_items(store, part.object("ends"), "<u8", count, start).astype(np.int64)
                if start + count == part.documents and block[-1] != part.tokens:
                    raise PrepareError(
                        f"{store.url}/{part.object('ends')}: expected {part.documents} documents of {part.tokens} "
                        f"tokens of an earlier run, got {block[-1]} tokens. Remove .work and run again."
                    )
                yield block + base
            base += part.tokens

    def until(self, token: int, limit: int) -> I64:
        """The ends from `first` on: at least all up to `token`, or `limit` of them, or all."""
        blocks = [self._near]
        count, last = len(self._near), int(self._near[-1]) if len(self._near) else -1
        while last < token and count < limit and (block := next(self._unread, None)) is not None:
            blocks.append(block)
            count, last = count + len(block), int(block[-1])
        if len(blocks) > 1:
            self._near = np.concatenate(blocks)
        return self._near

    def discard(self, index: int) -> None:
        """Discard all ends before `index`."""
        self._near = self._near[index - self.first :]
        self.first = index


def _overlaps(starts: I64, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    index = int(np.searchsorted(starts, start, "right")) - 1
    while index < len(starts) - 1 and starts[index] < stop:
        base = int(starts[index])
        first, last = max(start, base) - base, min(stop, int(starts[index + 1])) - base
        if last > first:
            yield index, first, last
        index += 1


def read_range(task: SliceTask) -> tuple[Array, Array]:
    """The slice's tokens, and the ends (U64, from its start) of the documents that end in it."""
    store = task.work
    parts, token_starts, document_starts = _parts(store, task.plan)
    start, first_end, stop, last_end = read_items(store, f"{task.plan}.cuts", "<i8", 4, 2 * task.index).tolist()
    dtype = TOKEN_DTYPES[parts[0].dtype]
    tokens, document_ends = [np.empty(0, dtype)], [np.empty(0, "<u8")]
    for i, a, b in _overlaps(token_starts, start, stop):
        tokens.append(read_items(store, parts[i].object("tokens"), dtype, b - a, a))
    for i, a, b in _overlaps(document_starts, first_end, last_end):
        part_ends = read_items(store, parts[i].object("ends"), "<u8", b - a, a)
        document_ends.append((part_ends.astype(np.int64) + (int(token_starts[i]) - start)).astype("<u8"))
    # One part's tokens are not copied.
    return tokens[1] if len(tokens) == 2 else np.concatenate(tokens), np.concatenate(document_ends)


@lru_cache(maxsize=2)
def _parts(store: Store, name: str) -> tuple[tuple[EncodedPart, ...], I64, I64]:
    parts = read_parts(store, name)
    tokens = np.cumsum([0, *[part.tokens for part in parts]], dtype=np.int64)
    return parts, tokens, np.cumsum([0, *[part.documents for part in parts]], dtype=np.int64)


def write_slice(task: SliceTask, scale: int = 0) -> SliceInfo:
    """Write the slice. `scale` changes nothing: a slice is written at once."""
    tokens, document_ends = read_range(task)
    with task.out.open(task.slice_name) as file:
        if task.shape is None:
            written = write_token_slice(file, tokens, document_ends, task.chunk_bytes)
            count, documents = len(tokens), len(document_ends)
            task.work.write(task.part("lengths"), encode_lengths(document_ends, count))
        else:
            tensors = task.shape.tensors(tokens, document_ends.astype(np.int64))
            written = write_rows_slice(file, tensors, chunk_bytes=task.chunk_bytes)
            count, documents = len(tensors["input_ids"]), 0
    task.work.write(task.part("chunks"), written.leaves)
    return SliceInfo(task.first + task.index, task.slice_name, written.size, written.sha256, count, documents)


def _pack(document_ends: I64, start: int, width: int, rows: int) -> tuple[I64, int]:
    """Whole conversations into rows, in order: the first conversation of each row and the end, and how many."""
    firsts, count = [0], 0
    while count < len(document_ends) and len(firsts) <= rows:
        begin = int(document_ends[count - 1]) if count else start
        count = max(count + 1, int(np.searchsorted(document_ends, begin + width, "right")))
        firsts.append(count)
    return np.array(firsts), count
