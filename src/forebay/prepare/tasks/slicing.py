"""SLICE tasks: parts of tokens, one after the other, to slices of a dataset. Slices begin and end inside documents.

The plan is one pass over the document ends; it is in two small files (32 bytes a slice, and the list of parts), so that
a task is a path and a number. Writing a slice holds its tokens twice: slices of at most 256 MiB keep a process below
1 GB.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.manifest import TOKEN_DTYPES, SliceInfo
from forebay.dataset.slices import TOKEN_HEADER_BYTES, next_cut, write_rows_slice, write_token_slice
from forebay.errors import PrepareError, UsageError
from forebay.files import atomic_write
from forebay.prepare.tasks.keys import hash_json
from forebay.prepare.tasks.shuffle import TokenPart

PLAN_VERSION = 1
MIN_SLICE_BYTES = 4096
_ENDS_AT_ONCE = 1 << 17
Cutter = Callable[["DocumentEnds", int], tuple[int, int]]


class Shape(Protocol):
    """Turns tokens into the tensors of a slice of rows."""

    def tensors(self, tokens: NDArray[np.uint32], document_ends: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """The tensors by name; `ends` are the exclusive ends of documents."""


@dataclass(frozen=True)
class SliceTask:
    """Slice `index` of the plan at `plan` (a path without its ending), to `out/slices/`; of rows with a `shape`."""

    plan: str
    index: int
    out: str
    shape: Shape | None = None

    @property
    def name(self) -> str:
        """The slice's path within the dataset."""
        return f"slices/{self.index:06d}.safetensors"

    @property
    def mark(self) -> Path:
        """The file that commits it."""
        return Path(f"{self.plan}-{self.index:06d}.json")


@dataclass(frozen=True)
class SlicePlan:
    """How parts are cut: the path of the plan's files without their ending, and how many slices it has."""

    path: str
    slices: int

    def tasks(self, out: Path | str, shape: Shape | None = None) -> Sequence[SliceTask]:
        """One a slice, in order; into a dataset's directory."""
        return [SliceTask(self.path, index, str(out), shape) for index in range(self.slices)]


def plan_slices(
    parts: Sequence[TokenPart], folder: Path | str, *, slice_bytes: int = 64 << 20, slice_tokens: int = 0
) -> SlicePlan:
    """Cut the parts, as one stream, into slices; the plan is written to `folder` unless it exists.

    Each slice but the last has `slice_tokens`, or is as large as fits in `slice_bytes`: header, tokens, 8 bytes a
    document end.
    """
    if slice_bytes < MIN_SLICE_BYTES or slice_tokens < 0:
        raise UsageError(f"slice size: expected at least {MIN_SLICE_BYTES} bytes or 1 token, got {slice_bytes}.")
    kinds = {part.dtype for part in parts} or {"U16"}
    if len(kinds) > 1:
        raise UsageError(f"slices: expected parts of one type of token, got {sorted(kinds)}.")
    itemsize = TOKEN_DTYPES[kinds.pop()].itemsize

    def cut(document_ends: DocumentEnds, start: int) -> tuple[int, int]:
        if slice_tokens:
            stop = min(document_ends.total, start + slice_tokens)
            return stop, document_ends.first + int(np.searchsorted(document_ends.until(stop, 1 << 62), stop, "right"))
        budget = slice_bytes - TOKEN_HEADER_BYTES
        near = document_ends.until(min(document_ends.total, start + budget // itemsize), budget // 8 + 1)
        stop, inside = next_cut(near, start, 0, document_ends.total, itemsize, slice_bytes)
        return stop, document_ends.first + inside

    return write_plan(parts, folder, ["tokens", slice_tokens or 0, 0 if slice_tokens else slice_bytes], cut)


def write_plan(parts: Sequence[TokenPart], folder: Path | str, settings: list[Any], cut: Cutter) -> SlicePlan:
    """Cut from 0 to the end by `cut(ends, start) -> (stop, index after the last document end until there)`."""
    name = hash_json([PLAN_VERSION, settings, [{**asdict(part), "folder": ""} for part in parts]])
    path = Path(folder) / f"slices-{name}"
    data = json.dumps([asdict(part) for part in parts]).encode()
    cuts = path.with_suffix(".cuts")
    if not cuts.exists() or path.with_suffix(".parts").read_bytes() != data:
        atomic_write(path.with_suffix(".parts"), data)
        atomic_write(cuts, _cuts(DocumentEnds(parts), cut))
    return SlicePlan(str(path), cuts.stat().st_size // 16 - 1)


def _cuts(document_ends: DocumentEnds, cut: Cutter) -> Iterator[bytes]:
    start = 0
    yield np.zeros(2, "<i8").tobytes()
    while start < document_ends.total:
        start, last_end = cut(document_ends, start)
        document_ends.discard(last_end)
        yield np.array([start, last_end], "<i8").tobytes()


class DocumentEnds:
    """The document ends of all parts as one rising sequence, read as they are needed, discarded when they are cut off.

    `first` is the index of the first end that is not discarded, `total` the tokens in all parts.
    """

    def __init__(self, parts: Sequence[TokenPart]) -> None:
        self.first, self.total = 0, sum(part.tokens for part in parts)
        self._near = np.empty(0, np.int64)
        self._unread = self._read(parts)

    @staticmethod
    def _read(parts: Sequence[TokenPart]) -> Iterator[NDArray[np.int64]]:
        base = 0
        for part in parts:
            sizes = [part.file(kind).stat().st_size for kind in ("ends", "tokens")]
            if sizes != [8 * part.documents, part.itemsize * part.tokens]:
                raise PrepareError(
                    f"{part.file('ends')}: expected {part.documents} documents of {part.tokens} tokens of an earlier "
                    f"run, got files of {sizes} bytes. Remove .work and run again."
                )
            with part.file("ends").open("rb") as file:
                while len(block := np.fromfile(file, "<u8", count=_ENDS_AT_ONCE)):
                    yield block.astype(np.int64) + base
            base += part.tokens

    def until(self, token: int, limit: int) -> NDArray[np.int64]:
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


@dataclass(frozen=True)
class TokenRange:
    """A slice's share of the stream: tokens [start, stop), document ends [first_end, last_end)."""

    parts: Sequence[TokenPart]
    token_starts: NDArray[np.int64]
    document_starts: NDArray[np.int64]
    start: int
    stop: int
    first_end: int
    last_end: int

    def read_tokens(self) -> NDArray[Any]:
        arrays = [
            np.fromfile(part.file("tokens"), TOKEN_DTYPES[part.dtype], count=b - a, offset=a * part.itemsize)
            for part, a, b in ((self.parts[i], a, b) for i, a, b in _overlaps(self.token_starts, self.start, self.stop))
        ]
        return self._joined(arrays, self.stop - self.start, TOKEN_DTYPES[self.parts[0].dtype])

    def read_ends(self) -> NDArray[Any]:
        """The ends of the documents that end in it, U64, counted from its start."""
        arrays = []
        for index, a, b in _overlaps(self.document_starts, self.first_end, self.last_end):
            document_ends = np.fromfile(self.parts[index].file("ends"), "<u8", count=b - a, offset=8 * a)
            arrays.append((document_ends.astype(np.int64) + (int(self.token_starts[index]) - self.start)).astype("<u8"))
        return self._joined(arrays, self.last_end - self.first_end, np.dtype("<u8"))

    def _joined(self, arrays: list[NDArray[Any]], count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        joined = arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, dtype), *arrays])
        if len(joined) != count:
            raise PrepareError(
                f"{self.parts[0].folder}: expected the tokens of an earlier run, got fewer. Remove .work and run again."
            )
        return joined


def _overlaps(starts: NDArray[np.int64], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Each part that overlaps [start, stop), and which of its own items do."""
    index = int(np.searchsorted(starts, start, "right")) - 1
    while index < len(starts) - 1 and starts[index] < stop:
        base = int(starts[index])
        first, last = max(start, base) - base, min(stop, int(starts[index + 1])) - base
        if last > first:
            yield index, first, last
        index += 1


def read_range(task: SliceTask) -> TokenRange:
    """The range of the stream that the plan gives this slice."""
    parts, token_starts, document_starts = _parts(f"{task.plan}.parts")
    edges = np.fromfile(f"{task.plan}.cuts", "<i8", count=4, offset=16 * task.index).tolist()
    return TokenRange(parts, token_starts, document_starts, edges[0], edges[2], edges[1], edges[3])


@lru_cache(maxsize=2)
def _parts(path: str) -> tuple[list[TokenPart], NDArray[np.int64], NDArray[np.int64]]:
    parts = [TokenPart(**plain) for plain in json.loads(Path(path).read_bytes())]
    tokens = np.cumsum([0, *[part.tokens for part in parts]], dtype=np.int64)
    return parts, tokens, np.cumsum([0, *[part.documents for part in parts]], dtype=np.int64)


def write_slice(task: SliceTask, scale: int = 0) -> SliceInfo:
    """Write the slice unless it is finished. `scale` changes nothing: a slice is written at once."""
    if (done := finished_slice(task)) is not None:
        return done
    tokens_range = read_range(task)
    path, tokens, document_ends = Path(task.out) / task.name, tokens_range.read_tokens(), tokens_range.read_ends()
    if task.shape is None:
        size, sha256 = write_token_slice(path, tokens, document_ends)
        count, documents = len(tokens), len(document_ends)
    else:
        tensors = task.shape.tensors(tokens, document_ends.astype(np.int64))
        size, sha256 = write_rows_slice(path, tensors)
        count, documents = len(tensors["input_ids"]), 0
    info = SliceInfo(task.index, task.name, size, sha256, count, documents)
    atomic_write(task.mark, json.dumps(asdict(info)).encode())
    return info


def finished_slice(task: SliceTask) -> SliceInfo | None:
    """The slice if an earlier run of the same plan committed it, and its file has that size."""
    try:
        info = SliceInfo(**json.loads(task.mark.read_bytes()))
        if (Path(task.out) / task.name).stat().st_size == info.bytes:
            return info
    except (OSError, ValueError, TypeError):
        pass
    return None
