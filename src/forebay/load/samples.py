"""Which samples a run sees of a dataset: how many each slice has, under a packing, a filter and a split.

Hides: what must be read to know it. Consecutive tokens of whole slices need the table alone; excluded documents need
the ends of the slices that they lie in; packing by documents, and bounds on their lengths, need those of all slices
(8 bytes a document, read once in threads: let `read_ends` remember them).

A split is made of whole slices, by a permutation that depends on nothing but their number, and at most one slice is
cut; so reading a hundredth of the samples fetches about a hundredth of the slices, and a longer validation part
contains a shorter one.
"""

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.manifest import SliceInfo
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import Slice, locate_tensors
from forebay.errors import DatasetError, NetworkError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.load.packing import DocumentFilter, Pieces, count_fit, kept_pieces
from forebay.order.bijection import derive_key, permute
from forebay.order.plan import samples_per_slice
from forebay.order.rendezvous import assign_owners
from forebay.storage.base import Origin, read_small
from forebay.storage.remote_dataset import RemoteDataset

Array: TypeAlias = NDArray[Any]
I64 = NDArray[np.int64]
ReadEnds = Callable[[int], NDArray[np.uint64]]
PACKINGS = ("chunk", "fit")
SPLITS = (None, "train", "validation")
SHARDINGS = ("order", "hash")
SLACK = 0.1
"""A worker owns at most this part more slices than the mean, rounded up to a whole slice: with few slices a worker much
more than a tenth (81 slices on 8 workers: at most 12, 1.19 times the mean)."""
_READERS = 8  # Threads: reading ends waits for disks and networks.
_COUNTING_VERSION = 1  # Of what is remembered.


@dataclass(frozen=True, eq=False)
class View:
    """The samples that a run sees of one dataset. Arrays are int64 [S], one value a slice."""

    layout: str  # `tokens` or `rows`.
    seq_len: int | None  # L; None for rows.
    packing: str  # `chunk` or `fit`.
    documents: DocumentFilter | None  # What is left out; None for nothing.
    counts: I64  # Samples of the view in each slice.
    offsets: I64  # The first of them, counted in the slice.
    bases: I64  # The global number of each slice's sample 0, over the whole dataset: splits share no number.
    first_documents: I64  # The global number of the first document of each slice.
    before: I64 | None  # Tokens, in other slices, of the document that a slice begins in; None unless lengths matter.
    after: I64 | None  # The same of the document that it ends in.
    pad_id: int  # What pads a row: EOS, or 0.
    split: tuple[str, float] | None  # `(name, validation)`, or None.
    tail_tokens: int  # Tokens of the whole dataset that are in no sample, being fewer than seq_len at a slice's end.
    padding_tokens: int  # Padding in all samples of the whole dataset (packing `fit`).
    excluded_tokens: int  # Tokens that the filter leaves out, of the whole dataset.

    @property
    def num_samples(self) -> int:
        """Samples of the view."""
        return int(self.counts.sum())

    def describe(self) -> dict[str, Any]:
        """What decides the view, besides dataset and seq_len, as plain JSON: for a state."""
        return {
            "packing": self.packing,
            "documents": None if self.documents is None else self.documents.digest(),
            "split": None if self.split is None else list(self.split),
        }

    def pieces(self, index: int, ends: NDArray[np.uint64], num_tokens: int) -> Pieces:
        """What the filter leaves of slice `index`, whose document ends and tokens are these."""
        before = 0 if self.before is None else int(self.before[index])
        after = 0 if self.after is None else int(self.after[index])
        return kept_pieces(ends, num_tokens, self.documents, int(self.first_documents[index]), before, after)


@dataclass
class _Counting:
    """How many samples each slice has; reads no more ends than that takes."""

    dataset: Dataset
    seq_len: int
    fit: bool
    documents: DocumentFilter | None
    first_documents: I64
    read: ReadEnds
    before: I64 | None = None
    after: I64 | None = None

    def count(self, counts: I64, remember: Path | None) -> int:
        """Put the samples of slices that the table alone cannot tell into `counts`; all kept tokens."""
        chosen = self._concerned()
        if not len(chosen):
            return int(self.dataset.table.count.sum())
        path = None if remember is None else remember / f"samples-{self._digest()}.counts"
        found = self._remembered(path)
        if found is None:
            found = np.stack([counts, self.dataset.table.count, np.zeros_like(counts), np.zeros_like(counts)])
            with ThreadPoolExecutor(_READERS) as pool:
                if self._by_length:
                    found[2], found[3] = self._lengths_beyond(pool)
                    self.before, self.after = found[2], found[3]
                found[:2, chosen] = np.array(list(pool.map(self._count_one, chosen.tolist()))).T
            if path is not None:
                with contextlib.suppress(OSError):  # Full or read-only: it is counted again next time.
                    path.parent.mkdir(parents=True, exist_ok=True)
                    remove_stale(path.parent)
                    atomic_write(path, found.astype("<i8").tobytes())
        if self._by_length:
            self.before, self.after = found[2], found[3]
        counts[:] = found[0]
        return int(found[1].sum())

    @property
    def _by_length(self) -> bool:
        return self.documents is not None and self.documents.by_length

    def _digest(self) -> str:
        documents = "" if self.documents is None else self.documents.digest()
        text = f"{_COUNTING_VERSION};{self.dataset.id};{self.seq_len};{self.fit};{documents}"
        return hashlib.sha256(text.encode()).hexdigest()

    def _remembered(self, path: Path | None) -> I64 | None:
        """Samples, kept tokens, tokens before and after of each slice, int64 [4, S], if they were counted before."""
        try:
            data = b"" if path is None else path.read_bytes()
        except FileNotFoundError:
            return None
        size = len(self.dataset.table)
        return np.frombuffer(data, "<i8").reshape(4, size).astype(np.int64) if len(data) == 32 * size else None

    def _concerned(self) -> I64:
        if self.fit or self._by_length:
            return np.arange(len(self.dataset.table), dtype=np.int64)
        if self.documents is None:
            return np.empty(0, np.int64)
        low = np.searchsorted(self.documents.numbers, self.first_documents)
        # The document after a slice's last end may lie in it, too.
        high = np.searchsorted(self.documents.numbers, self.first_documents + self.dataset.table.documents, "right")
        return np.flatnonzero(high > low)

    def _lengths_beyond(self, pool: ThreadPoolExecutor) -> tuple[I64, I64]:
        """Of the documents that a slice begins and ends in: the tokens in other slices."""
        size = len(self.dataset.table)
        edges = list(pool.map(self._edges, range(size)))
        before, after = np.zeros(size, np.int64), np.zeros(size, np.int64)
        for index in range(1, size):
            through = int(before[index - 1]) if self.dataset.table.documents[index - 1] == 0 else 0
            before[index] = edges[index - 1][1] + through
        for index in range(size - 2, -1, -1):
            through = int(after[index + 1]) if self.dataset.table.documents[index + 1] == 0 else 0
            after[index] = edges[index + 1][0] + through
        return before, after

    def _edges(self, index: int) -> tuple[int, int]:
        """Tokens until the first end of a slice, and after the last."""
        ends, size = self.read(index), int(self.dataset.table.count[index])
        return (int(ends[0]), size - int(ends[-1])) if len(ends) else (size, size)

    def _count_one(self, index: int) -> tuple[int, int]:
        """(samples, kept tokens) of a slice."""
        before = 0 if self.before is None else int(self.before[index])
        after = 0 if self.after is None else int(self.after[index])
        first, size = int(self.first_documents[index]), int(self.dataset.table.count[index])
        pieces = kept_pieces(self.read(index), size, self.documents, first, before, after)
        samples = count_fit(pieces, self.seq_len) if self.fit else pieces.num_tokens // self.seq_len
        return samples, pieces.num_tokens


def plan_samples(
    dataset: Dataset,
    seq_len: int | None,
    *,
    packing: str = "chunk",
    documents: DocumentFilter | None = None,
    split: str | None = None,
    validation: float = 0.0,
    read_ends: ReadEnds | None = None,
    remember: Path | None = None,
) -> View:
    """The view of a dataset that these settings, those of the Loader, ask for: a function of both alone.

    Manifest and table are read, and slices by `read_ends` alone.

    Args:
        validation: The part of all samples that is for validation: round(validation * N) of them, to the sample.
        read_ends: The document ends of a slice, U64; called from several threads. By default `ends_reader`'s.
        remember: A directory in which what was counted is kept, 32 bytes a slice, for the next time.
    """
    layout = dataset.manifest.layout
    _check_settings(layout, packing, documents, split, validation)
    table = dataset.table
    tail = padding = excluded = 0
    before = after = None
    first_documents = np.cumsum(table.documents) - table.documents
    counts = samples_per_slice(table.count, seq_len, layout)
    if layout == "tokens":
        assert seq_len is not None
        counts = counts.copy()
        read = read_ends or ends_reader(dataset)
        found = _Counting(dataset, seq_len, packing == "fit", documents, first_documents, read)
        kept = found.count(counts, remember)
        before, after = found.before, found.after
        excluded = dataset.num_tokens - kept
        tail = max(0, kept - int(counts.sum()) * seq_len) if packing == "chunk" else 0
        padding = int(counts.sum()) * seq_len - kept if packing == "fit" else 0
    bases = np.cumsum(counts) - counts
    offsets = np.zeros(len(counts), np.int64)
    if split is not None:
        counts, offsets = _split(counts, split, validation)
    if not counts.any():
        raise UsageError(
            f"{dataset.name}: expected at least one sample, got none of {seq_len} tokens (packing {packing}, split "
            f"{split}, {excluded} tokens left out). Ask for shorter samples, or leave out less."
        )
    return View(
        layout, seq_len if layout == "tokens" else None, packing, documents, counts, offsets, bases, first_documents,
        before, after, dataset.manifest.eos_id or 0, None if split is None else (split, float(validation)),
        tail, padding, excluded,
    )  # fmt: skip


def _check_settings(
    layout: str, packing: str, documents: DocumentFilter | None, split: str | None, validation: float
) -> None:
    if packing not in PACKINGS:
        raise UsageError(f"packing: expected one of {PACKINGS}, got {packing!r}.")
    if layout == "rows" and (packing != "chunk" or documents is not None):
        raise UsageError("packing, documents: expected a dataset of layout 'tokens', got 'rows'. Leave them out.")
    if documents is not None and not isinstance(documents, DocumentFilter):
        raise UsageError(f"documents: expected a DocumentFilter, got {type(documents).__name__}.")
    if split not in SPLITS:
        raise UsageError(f"split: expected 'train', 'validation' or None, got {split!r}.")
    if (
        isinstance(validation, bool)
        or not isinstance(validation, (int, float, np.floating))
        or not 0 <= validation <= 1
    ):
        raise UsageError(f"validation: expected a part in [0, 1], got {validation!r}.")
    if split is None and validation:
        raise UsageError(f"validation: expected a split with it, got {validation} and none. Say split='train'.")


def _split(counts: I64, split: str, validation: float) -> tuple[I64, I64]:
    """(counts, offsets) of a split: whole slices in permuted order, and the beginning of the one that is cut."""
    total = int(counts.sum())
    wanted = round(validation * total)
    taken = np.zeros_like(counts)
    if len(counts):
        order = permute(np.arange(len(counts), dtype=np.uint64), len(counts), derive_key(0, "split")).astype(np.int64)
        ends = np.cumsum(counts[order])
        taken[order] = np.clip(wanted - (ends - counts[order]), 0, counts[order])
    if split == "validation":
        return taken, np.zeros_like(counts)
    return counts - taken, taken


class KeyedViews:
    """The samples of several views by key: where each slice's begin, and how many there are."""

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views
        self._bases = np.cumsum([0, *(len(view.counts) for view in views)])
        self._counts = np.concatenate([view.counts for view in views])
        offsets = np.concatenate([view.offsets for view in views])
        self._offsets = offsets if offsets.any() else None

    def view_of(self, key: int, slice_index: int) -> View:
        """The view that a key belongs to."""
        source = int(np.searchsorted(self._bases, key, "right")) - 1
        if not 0 <= key < len(self._counts) or key - int(self._bases[source]) != slice_index:
            raise UsageError(f"slice key: expected one in [0, {len(self._counts)}), got {key} of slice {slice_index}.")
        return self._views[source]

    def in_slices(self, keys: I64, samples: I64) -> I64:
        """Samples as the slices count them. Raises DatasetError if one is not of the view."""
        if len(keys) and bool(((samples < 0) | (samples >= self._counts.take(keys))).any()):
            at = int(np.flatnonzero((samples < 0) | (samples >= self._counts.take(keys)))[0])
            raise DatasetError(
                f"sample of slice {keys[at]}: expected one of {self._counts[keys[at]]}, got {samples[at]}."
            )
        return samples if self._offsets is None else samples + self._offsets.take(keys)

    def check(self, key: int, one: Slice, got: int) -> None:
        """Raise DatasetError if a slice has fewer samples than the view needs."""
        wanted = int(self._counts[key]) + (0 if self._offsets is None else int(self._offsets[key]))
        if got < wanted:
            raise DatasetError(
                f"{one.path}: expected at least {wanted} samples, got {got}. The dataset changed since it was opened; "
                "verify it."
            )


Made: TypeAlias = tuple[
    Array | None, Array | None, Mapping[str, Array], NDArray[np.int32] | None, Array | None, NDArray[np.int32] | None
]
"""inputs, labels, tensors, document_ids, position_ids, cu_seqlens: as in Batch."""


class Maker(Protocol):
    """What makes batches. Keys number the slices of all views of the run, one view after another."""

    def open(self, key: int, slice_index: int, one: Slice) -> None:
        """Slice `slice_index` of its view is to be read. Raises DatasetError if it lacks samples of the view."""

    def close(self, key: int) -> None:
        """Let go of a slice; it need not be open."""

    def plan(self, keys: I64, samples: I64) -> Any:
        """What `make` reads: samples `samples[i]`, as the view counts, of slices `keys[i]`, all open; [K]."""

    def make(self, plan: Any, start: int, stop: int) -> Made:
        """The batch of the plan's samples [start, stop), in arrays of its own."""


def share_of(
    dataset: Dataset, view: View, rank: int, world_size: int, workers: Sequence[str] | None
) -> tuple[View, list[int], list[str]]:
    """What a rank owns by rendezvous hashing of the slices' hashes: its view, each rank's samples, the names by rank.

    `workers` are names by rank, which decide; by default the ranks' numbers.
    """
    names = list(map(str, range(world_size) if workers is None else workers))
    if len(names) != world_size:
        raise UsageError(f"workers: expected a name for each of {world_size} ranks, got {len(names)}.")
    homes = assign_owners(dataset.table.sha256, names, SLACK)
    owned = np.bincount(homes, weights=view.counts, minlength=world_size).astype(np.int64)
    if not owned.all():
        raise UsageError(
            f"sharding='hash': expected samples for each of {world_size} workers, got none for "
            f"{names[int(owned.argmin())]!r}: {np.count_nonzero(view.counts)} slices are too few. Prepare smaller "
            "slices (--slice-bytes), or use sharding='order'."
        )
    return replace(view, counts=np.where(homes == rank, view.counts, 0)), owned.tolist(), names


_HEAD_BYTES = 64 << 10


def ends_reader(dataset: Dataset) -> ReadEnds:
    """What reads the ends of slice i, U64 [D]; threads may share it. It raises DatasetError or NetworkError.

    A slice that lies elsewhere is not fetched for them: its head says where they are, and in our own slices mostly
    holds them. These bytes are not verified, as a hash is that of a whole slice: they decide how many samples are
    planned, and a slice that then has fewer is refused when it is opened.
    """
    if not isinstance(dataset, RemoteDataset):
        return lambda index: dataset.open_slice(index).document_ends
    origin = dataset.origin
    return lambda index: _remote_ends(origin, dataset.table.row(index))


def _remote_ends(origin: Origin, row: SliceInfo) -> NDArray[np.uint64]:
    head = _read(origin, row.name, 0, min(_HEAD_BYTES, row.bytes))
    at = 0

    def next_bytes(count: int) -> bytes:
        nonlocal head, at
        if at + count > len(head):
            head += _read(origin, row.name, len(head), min(at + count, row.bytes))
        at += count
        return head[at - count : at]

    places = locate_tensors(next_bytes, row.bytes)
    kind, shape, start, stop = places.get("document_ends", ("", (), 0, 0))
    if (kind, shape) != ("U64", (row.documents,)):
        raise DatasetError(
            f"{row.name} of {origin.url}: expected document_ends U64 [{row.documents}], got {kind} {list(shape)}. "
            "Publish the dataset again."
        )
    data = head[start:stop]
    if len(data) < stop - start:
        data += _read(origin, row.name, start + len(data), stop)
    return np.frombuffer(data, "<u8")


def _read(origin: Origin, name: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of an object, from the first of the origin's sources that gives them."""
    if start >= stop:
        return b""
    failed: DatasetError | NetworkError | None = None
    for source in origin.sources():
        try:
            return read_small(source, name, stop - start, start=start)
        except (DatasetError, NetworkError) as error:
            failed = error
    raise failed or NetworkError(f"{name} of {origin.url}: nobody has it now. Start a node that serves it.")
