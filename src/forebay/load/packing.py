"""Which tokens of a slice make each of its samples: consecutive tokens, or whole documents that fit together.

`concat` cuts the stream of the remaining documents every seq_len tokens. `best_fit` puts whole documents into rows by
best fit, longest first, and pads the rest; a longer document is cut into whole rows and a remainder. A document that
continues in the next slice counts as two. `best_fit` packs each section of a slice by itself, so that a sample reads
some MiB at most, and numbers samples section after section. Cost of `best_fit`: about 0.5 us a document.
Source: best fit decreasing, Johnson 1973; at most 11/9 of the least number of rows and 1.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike

from forebay.arrays import I32, I64, U64
from forebay.dataset.slices import check_document_ends
from forebay.errors import DatasetError, UsageError
from forebay.order.step_index import check_integer

_SECTION_ROWS = 256
_MIN_SECTION_TOKENS = 1 << 19


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
        """Leave out the documents whose numbers a file lists.

        Args:
            path: A `.npy` file of integers, or text with one a line.
            min_tokens, max_tokens: As of the class.

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


class PackedRows(NamedTuple):
    """R rows of whole documents, as G ranges of tokens of a slice; what is missing to seq_len + 1 is padding."""

    first_ranges: I64  # [R + 1], the first range of each row.
    starts: I64  # [G], ascending in a row.
    lengths: I32  # [G]; seq_len + 1 for a document that continues in another row, where the label is.


def document_spans(
    document_ends: U64, num_tokens: int, documents: DocumentSubset | None = None,
    first_document: int = 0, tokens_before: int = 0, tokens_after: int = 0, start: int = 0,
) -> DocumentSpans:  # fmt: skip
    """The spans of a slice's documents that are in a subset; all without one.

    Token `start` of the slice begins document `first_document` or a part of it; the tokens from the last end [D] to
    `num_tokens` belong to document first_document + D. `tokens_before` and `tokens_after` are those of its first and
    last document in other slices.

    Raises:
        DatasetError: If the ends are damaged.
    """
    check_ends(document_ends, num_tokens)
    stops = np.append(document_ends.astype(np.int64), num_tokens)
    starts = np.concatenate([[start], stops[:-1]])
    chosen = stops > starts
    if documents is not None:
        low, high = np.searchsorted(documents.numbers, [first_document, first_document + len(stops)])
        chosen[documents.numbers[low:high] - first_document] = False
        if documents.by_length:
            lengths = stops - starts
            lengths[0] += tokens_before
            lengths[-1] += tokens_after
            chosen &= lengths >= documents.min_tokens
            if documents.max_tokens is not None:
                chosen &= lengths <= documents.max_tokens
    return DocumentSpans(starts[chosen], stops[chosen])


def check_ends(document_ends: U64, num_tokens: int) -> None:
    """Raise DatasetError if the document ends of a slice are damaged."""
    problem = check_document_ends(document_ends, num_tokens)
    if problem:
        raise DatasetError(f"document_ends of a slice: {problem}. Verify the dataset.")


def merge_spans(spans: DocumentSpans) -> DocumentSpans:
    """Adjacent spans as one."""
    starts, stops = spans
    if not len(starts):
        return spans
    apart = starts[1:] != stops[:-1]
    return DocumentSpans(starts[np.append(True, apart)], stops[np.append(apart, True)])


def section_tokens(seq_len: int) -> int:
    """Tokens of a section: a span is packed with those that end in the same one.

    The padding is within half a percent of all tokens of that of a whole slice: 0.2 to 0.4 % of documents of 90 to 900
    tokens (log-normal) at seq_len 2048.
    """
    return max(_SECTION_ROWS * seq_len, _MIN_SECTION_TOKENS)


def count_sections(spans: DocumentSpans, num_tokens: int, seq_len: int) -> I64:
    """The rows of each section of a slice of `num_tokens`, by packing `best_fit`."""
    size = section_tokens(seq_len)
    full, rest = np.divmod(spans.stops - spans.starts, seq_len)
    section = (spans.stops - 1) // size
    counts = np.bincount(section, full, -(-num_tokens // size)).astype(np.int64)
    # One number for each length in a section: in the order of sections, and of falling lengths.
    groups, items = np.unique((section * seq_len + (seq_len - rest))[rest > 0], return_counts=True)
    in_section, shortage = np.divmod(groups, seq_len)
    lengths, items_list = (seq_len - shortage).tolist(), items.tolist()
    edges = np.searchsorted(in_section, np.arange(len(counts) + 1)).tolist()
    for i, (low, high) in enumerate(pairwise(edges)):
        counts[i] += _best_fit(lengths[low:high], items_list[low:high], seq_len)[2]
    return counts


def pack_section(spans: DocumentSpans, seq_len: int) -> PackedRows:
    """Packing `best_fit` of the spans of one section: rows by their first token."""
    full, rest = np.divmod(spans.stops - spans.starts, seq_len)
    # Rows that a long span fills, then the fitted remainders.
    owner = np.repeat(np.arange(len(full)), full)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(full) - full, full)
    full_starts = spans.starts[owner] + nth * seq_len
    short = np.flatnonzero(rest)
    short = short[np.argsort(-rest[short], kind="stable")]
    groups, items = np.unique(-rest[short], return_counts=True)
    placed, taken, num_rows = _best_fit((-groups).tolist(), items.tolist(), seq_len)
    rows = np.concatenate([np.arange(len(owner)) + num_rows, np.repeat(np.array(placed, np.int64), taken)])
    starts = np.concatenate([full_starts, spans.stops[short] - rest[short]])
    lengths = np.concatenate([seq_len + (full_starts + seq_len < spans.stops[owner]), rest[short]]).astype(np.int32)
    by_start = np.argsort(starts)
    first_of_row = np.empty(num_rows + len(owner), np.int64)
    first_of_row[rows[by_start[::-1]]] = starts[by_start[::-1]]  # The last value that is written counts.
    order = np.lexsort((starts, first_of_row[rows]))
    edges = np.flatnonzero(np.diff(first_of_row[rows[order]], prepend=-1))
    return PackedRows(np.append(edges, len(order)), starts[order], lengths[order])


def _best_fit(lengths: Sequence[int], items: Sequence[int], seq_len: int) -> tuple[list[int], list[int], int]:
    """Put `items[i]` of `lengths[i]`, falling, into rows: each into the fullest that it fits.

    Returns:
        The row of each step, and how many items it takes; the number of rows.
    """
    rows: list[int] = []  # That are not full, as free tokens << 32 | row: ascending.
    placed, taken, num_rows = [], [], 0
    for length, remaining in zip(lengths, items):
        shifted = length << 32
        while remaining:
            i = bisect_left(rows, shifted)
            if i == len(rows):
                row = seq_len << 32 | num_rows
                num_rows += 1
            else:
                row = rows.pop(i)
            count = 1 if remaining == 1 else min(remaining, (row >> 32) // length)
            row -= count * shifted
            placed.append(row & 0xFFFFFFFF)
            taken.append(count)
            remaining -= count
            if row >> 32:
                insort(rows, row)
    return placed, taken, num_rows
