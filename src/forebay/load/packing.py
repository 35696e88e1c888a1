"""Which tokens of a slice make each of its samples: consecutive tokens, or whole documents that fit together.

`concat` cuts the stream of the remaining documents every seq_len tokens. `best_fit` puts whole documents into rows by
best fit, longest first, and pads the rest; a longer document is cut into whole rows and a remainder. A document that
continues in the next slice counts as two. Cost of `best_fit`: O(n log n), 65 000 documents at seq_len 2048 in 30 ms.
Source: best fit decreasing, Johnson 1973; at most 11/9 of the least number of rows and 1.
"""

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.dataset.slices import check_document_ends
from forebay.errors import DatasetError, UsageError
from forebay.order.step_index import check_integer

I64 = NDArray[np.int64]


class DocumentSubset:
    """The documents of a dataset that a run reads: all but some. Equal subsets have equal digests.

    A document's number counts the document ends of the dataset, from 0, slice after slice. Its length is that of the
    whole document, also if it spans several slices.

    Args:
        exclude: Numbers of documents to leave out, in any order.
        min_tokens: Leave out shorter documents.
        max_tokens: Leave out longer documents; None for no limit.

    Raises:
        UsageError: If a number or limit is negative or no integer, or min_tokens is above max_tokens.
    """

    def __init__(self, exclude: ArrayLike = (), min_tokens: int = 0, max_tokens: int | None = None) -> None:
        numbers = np.asarray(exclude)
        if numbers.ndim != 1 or (
            len(numbers) and (numbers.dtype.kind not in "iu" or int(numbers.min()) < 0 or int(numbers.max()) >> 63)
        ):
            raise UsageError(f"exclude: expected document numbers from 0 in one dimension, got {numbers!r:.100}.")
        self.numbers: I64 = np.unique(numbers.astype(np.int64))
        """The excluded documents, ascending and distinct; read-only."""
        self.numbers.flags.writeable = False
        check_integer("min_tokens", -1 if min_tokens is None else min_tokens, 0)
        check_integer("max_tokens", max_tokens, min_tokens)
        self.min_tokens, self.max_tokens = min_tokens, max_tokens

    @classmethod
    def from_file(cls, path: str | Path, min_tokens: int = 0, max_tokens: int | None = None) -> Self:
        """Leave out the documents whose numbers a file lists: a `.npy` file of integers, or text with one a line.

        Raises:
            UsageError: If the file cannot be read, or has other contents.
        """
        try:
            if str(path).endswith(".npy"):
                numbers = np.load(path, allow_pickle=False)
            else:
                lines = Path(path).read_text(encoding="utf-8").split()
                numbers = np.array([int(line) for line in lines], np.int64)
        except (OSError, ValueError, OverflowError) as error:
            raise UsageError(f"{path}: expected document numbers, one a line, or a .npy file, got: {error}.") from error
        return cls(numbers, min_tokens, max_tokens)

    def __repr__(self) -> str:
        return f"DocumentSubset({len(self.numbers):,} excluded, tokens {self.min_tokens} to {self.max_tokens})"

    @property
    def by_length(self) -> bool:
        """Whether lengths decide."""
        return self.min_tokens > 0 or self.max_tokens is not None

    def digest(self) -> str:
        """The sha256 of limits and numbers, in hex."""
        limits = f"{self.min_tokens};{'' if self.max_tokens is None else self.max_tokens};"
        return hashlib.sha256(limits.encode() + self.numbers.astype("<i8").tobytes()).hexdigest()


class DocumentSpans(NamedTuple):
    """The parts of a slice that belong to one document each: tokens [starts, stops), int64 [P], none empty."""

    starts: I64
    stops: I64

    @property
    def num_tokens(self) -> int:
        return int((self.stops - self.starts).sum())


@dataclass(frozen=True, eq=False, slots=True)
class SampleSegments:
    """The samples of a slice, R rows of seq_len tokens, as G segments: runs of tokens of the slice."""

    first_segments: I64  # [R + 1], the first segment of each row.
    starts: I64  # [G], the first token of a segment; -1 for padding.
    lengths: I64  # [G]
    last_labels: I64  # [G], index of the token that is the label of a segment's last token; -1 for none.

    def __len__(self) -> int:
        return len(self.first_segments) - 1


def document_spans(
    document_ends: NDArray[np.uint64], num_tokens: int, documents: DocumentSubset | None = None,
    first_document: int = 0, tokens_before: int = 0, tokens_after: int = 0,
) -> DocumentSpans:  # fmt: skip
    """The spans of a slice's documents that are in a subset; all without one.

    The slice begins in document `first_document`; the tokens after its last end [D] belong to document first_document +
    D. `tokens_before` and `tokens_after` are those of its first and last document in other slices.

    Raises:
        DatasetError: If the ends are damaged.
    """
    problem = check_document_ends(document_ends, num_tokens)
    if problem:
        raise DatasetError(f"document_ends of a slice: {problem}. Verify the dataset.")
    stops = np.append(document_ends.astype(np.int64), num_tokens)
    starts = np.concatenate([[0], stops[:-1]])
    chosen = stops > starts
    if documents is not None:
        low, high = np.searchsorted(documents.numbers, [first_document, first_document + len(stops)])
        chosen[documents.numbers[low:high] - first_document] = False
        lengths = stops - starts
        lengths[0] += tokens_before
        lengths[-1] += tokens_after
        chosen &= lengths >= documents.min_tokens
        if documents.max_tokens is not None:
            chosen &= lengths <= documents.max_tokens
    return DocumentSpans(starts[chosen], stops[chosen])


def concat_segments(spans: DocumentSpans, seq_len: int, *, masks: bool) -> SampleSegments:
    """Packing `concat`: the stream of all spans, cut every seq_len tokens.

    With masks each span is a segment of its own, whose last token has no label; without, adjacent spans are one
    segment, and the label is the next token of the stream.
    """
    starts, stops = spans
    if not masks and len(starts):
        apart = starts[1:] != stops[:-1]
        starts, stops = starts[np.append(True, apart)], stops[np.append(apart, True)]
    stream_ends = np.cumsum(stops - starts)
    rows = int(stream_ends[-1]) // seq_len if len(stream_ends) else 0
    row_edges = np.arange(rows + 1, dtype=np.int64) * seq_len
    inside = stream_ends[: np.searchsorted(stream_ends, rows * seq_len)]
    edges = np.concatenate([row_edges, inside])
    edges.sort(kind="stable")  # Merges two ascending runs.
    edges = edges[np.append(True, edges[1:] != edges[:-1])]
    span = np.searchsorted(stream_ends, edges[:-1], "right")
    shift = stops - stream_ends  # From a position in the stream to the token there.
    segment_starts, segment_stops = edges[:-1] + shift[span], edges[1:] + shift[span]
    next_starts = np.full(len(stops), -1) if masks else np.append(starts, -1)[1:]
    last_labels = np.where(segment_stops < stops[span], segment_stops, next_starts[span])
    lengths = segment_stops - segment_starts
    return SampleSegments(np.searchsorted(edges, row_edges), segment_starts, lengths, last_labels)


def fit_segments(spans: DocumentSpans, seq_len: int) -> SampleSegments:
    """Packing `best_fit`: whole spans, fitted together; padding is the last segment of a row that is not full."""
    full, rest = np.divmod(spans.stops - spans.starts, seq_len)
    short = np.flatnonzero(rest)
    bins, num_bins = _best_fit(rest[short], seq_len)
    # Three kinds of segments: the rows that a long span fills, then fitted remainders, then padding.
    owner = np.repeat(np.arange(len(full)), full)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(full) - full, full)
    full_starts = spans.starts[owner] + nth * seq_len
    full_stops = full_starts + seq_len
    short_starts = spans.stops[short] - rest[short]
    free = np.full(num_bins, seq_len)
    np.subtract.at(free, bins, rest[short])
    padded = np.flatnonzero(free)
    lowest = np.full(num_bins, np.iinfo(np.int64).max)
    np.minimum.at(lowest, bins, short_starts)
    row_number = np.empty(len(owner) + num_bins, np.int64)
    row_number[np.argsort(np.concatenate([full_starts, lowest]), kind="stable")] = np.arange(len(row_number))
    rows = row_number[np.concatenate([np.arange(len(owner)), len(owner) + bins, len(owner) + padded])]
    starts = np.concatenate([full_starts, short_starts, np.full(len(padded), -1)])
    lengths = np.concatenate([np.full(len(owner), seq_len), rest[short], free[padded]])
    continued = np.where(full_stops < spans.stops[owner], full_stops, -1)
    last_labels = np.concatenate([continued, np.full(len(short) + len(padded), -1)])
    order = _stable_order(rows, len(row_number))  # Spans keep their order; padding comes last.
    first_segments = np.searchsorted(rows[order], np.arange(len(row_number) + 1))
    return SampleSegments(first_segments, starts[order], lengths[order], last_labels[order])


def count_fit(spans: DocumentSpans, seq_len: int) -> int:
    """`len(fit_segments(spans, seq_len))`, in a third of the time."""
    full, rest = np.divmod(spans.stops - spans.starts, seq_len)
    return int(full.sum()) + sum(step.bins for step in _placements(rest[rest > 0], seq_len) if step.is_new)


class _Placement(NamedTuple):
    """`items` of one length go into `bins` rows of which each has `free` tokens left, at most `per_bin` into one."""

    length: int
    items: int
    free: int
    bins: int
    per_bin: int
    is_new: bool


def _placements(lengths: I64, seq_len: int) -> Sequence[_Placement]:
    """Best fit, longest first, as counts: the fullest row that an item fits takes as many as it holds."""
    counts = np.bincount(lengths, minlength=1)
    present = np.flatnonzero(counts)[::-1]
    frees: list[int] = []  # The keys of `num_bins`, ascending.
    num_bins: dict[int, int] = {}  # By free tokens.
    placements = []

    def put(free: int, bins: int) -> None:
        if free and bins:
            if free not in num_bins:
                insort(frees, free)
            num_bins[free] = num_bins.get(free, 0) + bins

    for length, remaining in zip(present.tolist(), counts[present].tolist()):
        while remaining:
            i = bisect_left(frees, length)
            is_new = i == len(frees)
            free = seq_len if is_new else frees[i]
            per_bin = free // length
            bins = -(-remaining // per_bin) if is_new else min(-(-remaining // per_bin), num_bins[free])
            items = min(remaining, bins * per_bin)
            placements.append(_Placement(length, items, free, bins, per_bin, is_new))
            if not is_new:
                if bins == num_bins[free]:
                    del num_bins[free], frees[i]
                else:
                    num_bins[free] -= bins
            last = items - (bins - 1) * per_bin
            put(free - per_bin * length, bins - 1)
            put(free - last * length, 1)
            remaining -= items
    return placements


def _best_fit(lengths: I64, seq_len: int) -> tuple[I64, int]:
    order = _stable_order(seq_len - lengths, seq_len)
    placed = np.empty(len(lengths), np.int64)
    pools: defaultdict[int, list[I64]] = defaultdict(list)  # Rows by free tokens.
    start = num_bins = 0
    for step in _placements(lengths, seq_len):
        if step.is_new:
            bins = np.arange(num_bins, num_bins + step.bins)
            num_bins += step.bins
        else:
            arrays = pools.pop(step.free)
            pool = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            bins = pool[: step.bins]
            if step.bins < len(pool):
                pools[step.free].append(pool[step.bins :])
        stop = start + step.items
        placed[start:stop] = bins.repeat(step.per_bin)[: step.items]
        last = step.items - (step.bins - 1) * step.per_bin  # Items of the last row; the others have `per_bin`.
        if step.bins > 1:
            pools[step.free - step.per_bin * step.length].append(bins[:-1])
        pools[step.free - last * step.length].append(bins[-1:])
        start = stop
    out = np.empty(len(lengths), np.int64)
    out[order] = placed
    return out, num_bins


def _stable_order(values: I64, maximum: int) -> I64:
    return np.argsort(values.astype(np.uint16) if maximum < 1 << 16 else values, kind="stable")
