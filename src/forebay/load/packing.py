"""Which tokens of a slice make each of its samples: consecutive ones, or whole documents that fit together.

Pure: a function of the slice's document ends, its number of tokens, seq_len and the filter; nothing is read here.

`chunk` cuts the stream of the documents that are kept every seq_len tokens; nothing is padded, and a tail shorter than
seq_len is in no sample. `fit` puts whole documents into rows of seq_len by best fit, longest first; a document longer
than a row is cut into whole rows and a rest, which is fitted as a document is; what room is left is padding, and every
kept token is in exactly one sample. Rows are numbered by their lowest token.

Cost of `fit`: O(n log n). Documents of one length go into all rows of one room at once, so that the steps are counted
by distinct lengths rather than documents: a slice of 65 000 documents at seq_len 2048 takes some 10 ms to count and 30
to lay out. A document is where it is in its slice: one that goes on in the next slice is two pieces here.

Source: best fit decreasing, Johnson 1973; at most 11/9 of the least number of rows and 1.
"""

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.dataset.slices import check_document_ends
from forebay.errors import DatasetError, UsageError

I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DocumentFilter:
    """Documents that a run leaves out: they are in no sample. Equal filters have equal digests.

    A document's number counts the document ends of the dataset, from 0, slice after slice. Its length is that of the
    whole document, also where it lies in several slices.

    Args:
        exclude: Numbers, each from 0; any order.
        min_tokens: Leave out shorter ones.
        max_tokens: Leave out longer ones; None for no bound.

    Raises:
        UsageError: If a number or bound is none, or min_tokens is above max_tokens.
    """

    exclude: ArrayLike = ()
    min_tokens: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        numbers = np.asarray(self.exclude)
        if numbers.ndim != 1 or (
            len(numbers) and (numbers.dtype.kind not in "iu" or int(numbers.min()) < 0 or int(numbers.max()) >> 63)
        ):
            raise UsageError(f"exclude: expected document numbers from 0 in one dimension, got {numbers!r:.100}.")
        for name, bound in (("min_tokens", self.min_tokens), ("max_tokens", self.max_tokens)):
            if bound is None and name == "max_tokens":
                continue
            if isinstance(bound, bool) or not isinstance(bound, (int, np.integer)) or bound < 0:
                raise UsageError(f"{name}: expected an integer from 0, got {bound!r}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens: expected at most max_tokens {self.max_tokens}, got {self.min_tokens}.")
        numbers = np.unique(numbers.astype(np.int64))
        numbers.flags.writeable = False
        object.__setattr__(self, "exclude", numbers)

    @property
    def numbers(self) -> I64:
        """The excluded documents, rising."""
        return np.asarray(self.exclude, np.int64)

    @property
    def by_length(self) -> bool:
        """Whether lengths matter."""
        return self.min_tokens > 0 or self.max_tokens is not None

    def digest(self) -> str:
        """The sha256 of what it says, in hex."""
        bounds = f"{int(self.min_tokens)};{'' if self.max_tokens is None else int(self.max_tokens)};"
        return hashlib.sha256(bounds.encode() + self.numbers.astype("<i8").tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DocumentFilter) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """The parts of a slice that belong to one document each: tokens [starts, stops), int64 [P], none empty."""

    starts: I64
    stops: I64

    @property
    def num_tokens(self) -> int:
        """In all of them."""
        return int((self.stops - self.starts).sum())


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """The samples of a slice as segments: runs of its tokens, one after another, that fill each row to seq_len."""

    firsts: I64  # [R + 1], the first segment of each row.
    starts: I64  # [G], the token that a segment begins with; -1 for padding.
    lengths: I64
    follows: I64  # [G], the token that is the label of a segment's last one; -1 for none.

    def __len__(self) -> int:
        return len(self.firsts) - 1


def kept_pieces(
    ends: NDArray[np.uint64],
    num_tokens: int,
    documents: DocumentFilter | None = None,
    first_document: int = 0,
    before: int = 0,
    after: int = 0,
) -> Pieces:
    """The pieces of a slice that the filter leaves.

    It begins in document `first_document`; what lies after the last of its ends [D] belongs to document
    first_document + D. `before` and `after` are tokens of its first and last document in other slices.
    """
    problem = check_document_ends(ends, num_tokens)
    if problem:
        raise DatasetError(f"document_ends of a slice: {problem}. Verify the dataset.")
    stops = np.append(ends.astype(np.int64), num_tokens)
    starts = np.concatenate([[0], stops[:-1]])
    keep = stops > starts
    if documents is not None:
        numbers = documents.numbers
        low, high = np.searchsorted(numbers, [first_document, first_document + len(stops)])
        keep[numbers[low:high] - first_document] = False
        if documents.by_length:
            lengths = stops - starts
            lengths[0] += before
            lengths[-1] += after
            keep &= lengths >= documents.min_tokens
            if documents.max_tokens is not None:
                keep &= lengths <= documents.max_tokens
    return Pieces(starts[keep], stops[keep])


def chunk_rows(pieces: Pieces, seq_len: int, *, masks: bool) -> Rows:
    """The stream of all pieces, cut every seq_len tokens.

    With masks a piece is a segment of its own, whose last token has no label; else pieces that follow one another in
    the slice are one, and the label is the next token of the stream.
    """
    starts, stops = pieces.starts, pieces.stops
    if not masks and len(starts):
        apart = starts[1:] != stops[:-1]
        starts, stops = starts[np.append(True, apart)], stops[np.append(apart, True)]
    stream_ends = np.cumsum(stops - starts)
    rows = int(stream_ends[-1]) // seq_len if len(stream_ends) else 0
    row_edges = np.arange(rows + 1, dtype=np.int64) * seq_len
    inside = stream_ends[: np.searchsorted(stream_ends, rows * seq_len)]
    edges = np.concatenate([row_edges, inside])
    edges.sort(kind="stable")  # Two rising runs: merged, not sorted.
    edges = edges[np.append(True, edges[1:] != edges[:-1])]
    piece = np.searchsorted(stream_ends, edges[:-1], "right")
    shift = stops - stream_ends  # From a place in the stream to the token there.
    begins, ends = edges[:-1] + shift[piece], edges[1:] + shift[piece]
    after = np.full(len(stops), -1) if masks else np.append(starts, -1)[1:]
    follows = np.where(ends < stops[piece], ends, after[piece])
    return Rows(np.searchsorted(edges, row_edges), begins, ends - begins, follows)


def fit_rows(pieces: Pieces, seq_len: int) -> Rows:
    """Whole pieces, fitted together; padding is the last segment of a row that has room left."""
    sizes = pieces.stops - pieces.starts
    whole, rest = np.divmod(sizes, seq_len)
    short = np.flatnonzero(rest)
    bins, num_bins = _best_fit(rest[short], seq_len)
    # Segments: the rows that a long piece fills, then what is fitted, then padding; each knows its row.
    owner = np.repeat(np.arange(len(sizes)), whole)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(whole) - whole, whole)
    full_starts = pieces.starts[owner] + nth * seq_len
    full_stops = full_starts + seq_len
    short_starts = pieces.stops[short] - rest[short]
    room = np.full(num_bins, seq_len)
    np.subtract.at(room, bins, rest[short])
    padded = np.flatnonzero(room)
    lowest = np.full(num_bins, np.iinfo(np.int64).max)
    np.minimum.at(lowest, bins, short_starts)
    number = np.empty(len(owner) + num_bins, np.int64)
    number[np.argsort(np.concatenate([full_starts, lowest]), kind="stable")] = np.arange(len(number))
    rows = np.concatenate([number[: len(owner)], number[len(owner) + bins], number[len(owner) + padded]])
    starts = np.concatenate([full_starts, short_starts, np.full(len(padded), -1)])
    lengths = np.concatenate([np.full(len(owner), seq_len), rest[short], room[padded]])
    goes_on = np.where(full_stops < pieces.stops[owner], full_stops, -1)
    follows = np.concatenate([goes_on, np.full(len(short) + len(padded), -1)])
    order = _order(rows, len(number))  # Pieces stay in their order, padding comes last.
    firsts = np.searchsorted(rows[order], np.arange(len(number) + 1))
    return Rows(firsts, starts[order], lengths[order], follows[order])


def count_fit(pieces: Pieces, seq_len: int) -> int:
    """`len(fit_rows(pieces, seq_len))`, in a third of the time."""
    whole, rest = np.divmod(pieces.stops - pieces.starts, seq_len)
    return int(whole.sum()) + sum(move.bins for move in _moves(rest[rest > 0], seq_len) if move.fresh)


class _Move(NamedTuple):
    """`items` of one length into `bins` rows with `room` left, at most `each` to a row."""

    length: int
    items: int
    room: int
    bins: int
    each: int
    fresh: bool


def _moves(lengths: I64, seq_len: int) -> Sequence[_Move]:
    """Best fit, longest first: what goes where, as counts. The tightest row that has room takes as many as it holds."""
    counts = np.bincount(lengths, minlength=1)
    present = np.flatnonzero(counts)[::-1]
    rooms: list[int] = []  # Rising; the rooms of which there is some row, and how many.
    free: dict[int, int] = {}
    moves = []

    def put(room: int, bins: int) -> None:
        if room and bins:
            if room not in free:
                insort(rooms, room)
            free[room] = free.get(room, 0) + bins

    for length, left in zip(present.tolist(), counts[present].tolist()):
        while left:
            at = bisect_left(rooms, length)
            fresh = at == len(rooms)
            room = seq_len if fresh else rooms[at]
            each = room // length
            bins = -(-left // each) if fresh else min(-(-left // each), free[room])
            items = min(left, bins * each)
            moves.append(_Move(length, items, room, bins, each, fresh))
            if not fresh:
                if bins == free[room]:
                    del free[room], rooms[at]
                else:
                    free[room] -= bins
            last = items - (bins - 1) * each
            put(room - each * length, bins - 1)
            put(room - last * length, 1)
            left -= items
    return moves


def _best_fit(lengths: I64, seq_len: int) -> tuple[I64, int]:
    """The row of each length, int64 [n], and how many rows: `_moves` with names given to rows."""
    order = _order(seq_len - lengths, seq_len)
    placed = np.empty(len(lengths), np.int64)
    pools: defaultdict[int, list[I64]] = defaultdict(list)
    at = num_bins = 0
    for move in _moves(lengths, seq_len):
        if move.fresh:
            bins = np.arange(num_bins, num_bins + move.bins)
            num_bins += move.bins
        else:
            pool = pools.pop(move.room)
            every = pool[0] if len(pool) == 1 else np.concatenate(pool)
            bins = every[: move.bins]
            if move.bins < len(every):
                pools[move.room].append(every[move.bins :])
        full = move.bins - 1  # Rows that take `each`; the last one may take fewer.
        last = move.items - full * move.each
        placed[at : at + move.items] = bins if move.each == 1 else bins.repeat(move.each)[: move.items]
        if last == move.each:
            pools[move.room - last * move.length].append(bins)
        else:
            pools[move.room - last * move.length].append(bins[full:])
            if full:
                pools[move.room - move.each * move.length].append(bins[:full])
        at += move.items
    out = np.empty(len(lengths), np.int64)
    out[order] = placed
    return out, num_bins


def _order(values: I64, most: int) -> I64:
    """The stable order of values in [0, most]."""
    return np.argsort(values.astype(np.uint16) if most < 1 << 16 else values, kind="stable")  # 16 bits: by radix.
