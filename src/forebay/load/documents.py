"""Batches of documents: rows made of segments, with labels that stay inside them and the masks that attention needs.

Hides how a batch is laid out without a Python loop over tokens or documents: a plan is a list of segments (source,
first token, length, the label of the last token), padding among them as segments of a row of padding that the maker
owns; a batch is those of its rows, copied in one call. Some 50 us for 8 x 2048 tokens; an open slice costs 24 bytes a
segment beside its map.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.slices import Slice
from forebay.errors import UsageError
from forebay.load.batch import IGNORE_INDEX
from forebay.load.copying import Source, TokenRows, copy_of, open_sources
from forebay.load.packing import Rows, chunk_rows, fit_rows
from forebay.load.samples import I64, KeyedViews, Made, View


@dataclass(frozen=True, eq=False, slots=True)
class _Laid:
    rows: Rows
    padding: Source  # The tokens' type, [L].


@dataclass(frozen=True, eq=False, slots=True)
class DocumentPlan:
    """Segments of the planned rows; arrays are [G]."""

    firsts: list[int]  # The first segment of each row, [K + 1].
    tokens: TokenRows
    lengths: I64  # Tokens.
    labels: TokenRows  # Of the last token of each segment that has a label of its own, by row.
    labelled: NDArray[np.bool_]  # Which segments those are.
    documents: NDArray[np.int32]  # int32, the number within its row; -1 for padding.
    padded: bool


class DocumentMaker:
    """Inputs and labels in arrays of their own, [B, L]; labels are -100 on padding and, with masks, at documents' ends.

    A document that goes on in the next sample of its slice has the next token as its last label. Without masks (a
    filter alone) labels are the next tokens of the stream that is left.
    """

    def __init__(
        self, views: Sequence[View], *, dtype: Any = np.int64, document_masks: bool = True, pad_id: int | None = None
    ) -> None:
        seq_len = views[0].seq_len
        assert seq_len is not None
        self._views = KeyedViews(views)
        self._seq_len = seq_len
        self._dtype = np.dtype(dtype)
        self._masks = document_masks or views[0].packing == "fit"
        self._pad_id = pad_id
        self._open: dict[int, Source] = {}
        self._laid: dict[int, _Laid] = {}
        self._padding: dict[tuple[np.dtype[Any], int], Source] = {}
        self._spread = np.empty(0, np.int64)

    def open(self, key: int, slice_index: int, one: Slice) -> None:
        """Lay the slice out."""
        view = self._views.view_of(key, slice_index)
        tokens = one.tokens
        pieces = view.pieces(slice_index, copy_of(one.document_ends, one.path), len(tokens))
        fit = view.packing == "fit"
        rows = fit_rows(pieces, self._seq_len) if fit else chunk_rows(pieces, self._seq_len, masks=self._masks)
        self._views.check(key, one, len(rows))
        pad_id = view.pad_id if self._pad_id is None else self._pad_id
        self._open[key] = Source(tokens, one.path)
        self._laid[key] = _Laid(rows, self._padding_of(tokens.dtype, pad_id))

    def close(self, key: int) -> None:
        self._open.pop(key, None)
        self._laid.pop(key, None)

    def _padding_of(self, dtype: np.dtype[Any], pad_id: int) -> Source:
        if (dtype, pad_id) not in self._padding:
            if not 0 <= pad_id <= np.iinfo(dtype).max:
                raise UsageError(f"pad_id: expected a token that {dtype} can hold, got {pad_id}.")
            self._padding[dtype, pad_id] = Source(np.full(self._seq_len, pad_id, dtype), "")
        return self._padding[dtype, pad_id]

    def plan(self, keys: I64, samples: I64) -> DocumentPlan:
        samples = self._views.in_slices(keys, samples)
        sources, which = open_sources(self._open, keys)
        laid = [self._laid[key] for key in np.unique(keys).tolist()]
        firsts, counts = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
        parts = [np.empty((4, 0), np.int64)]
        total = 0
        by_slice = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which, minlength=1))[:-1])
        for index, (one, mine) in enumerate(zip(laid, by_slice)):
            first = one.rows.firsts.take(samples[mine])
            number = one.rows.firsts.take(samples[mine] + 1) - first
            firsts[mine] = total + np.cumsum(number) - number
            counts[mine] = number
            total += int(number.sum())
            at = _ragged(first, number)
            starts = one.rows.starts[at]
            source = np.where(starts < 0, index + len(sources), index)
            parts.append(np.stack([source, starts, one.rows.lengths[at], one.rows.follows[at]]))
        # From slice by slice to the plan's order.
        source, starts, lengths, follows = np.concatenate(parts, axis=1)[:, _ragged(firsts, counts)]
        edges = np.concatenate([[0], np.cumsum(counts)])
        nth = np.arange(len(starts)) - np.repeat(edges[:-1], counts)
        numbers = np.where(starts < 0, -1, nth).astype(np.int32)
        labelled = follows >= 0
        label_firsts = np.concatenate([[0], np.cumsum(labelled)])[edges].tolist()
        ones = np.ones(label_firsts[-1], np.int64)
        every = [*sources, *(one.padding for one in laid)]
        return DocumentPlan(
            edges.tolist(),
            TokenRows(every, source, np.maximum(starts, 0), lengths, edges.tolist(), self._dtype),
            lengths,
            TokenRows(every, source[labelled], follows[labelled], ones, label_firsts, self._dtype),
            labelled,
            numbers,
            bool((numbers < 0).any()),
        )

    def make(self, plan: DocumentPlan, start: int, stop: int) -> Made:
        first, last = plan.firsts[start], plan.firsts[stop]
        shape = (stop - start, self._seq_len)
        size = shape[0] * shape[1]
        lengths = plan.lengths[first:last]
        ends = np.cumsum(lengths)
        begins = ends - lengths
        inputs = plan.tokens.read(start, stop)
        labels = np.empty(size, self._dtype)
        labels[:-1] = inputs[1:]
        labels[ends - 1] = IGNORE_INDEX
        labels[ends[plan.labelled[first:last]] - 1] = plan.labels.read(start, stop)
        numbers = plan.documents[first:last]
        if plan.padded:
            for at in np.flatnonzero(numbers < 0).tolist():
                labels[begins[at] : ends[at]] = IGNORE_INDEX
        if not self._masks:
            return inputs.reshape(shape), labels.reshape(shape), {}, None, None, None
        if size > len(self._spread):
            self._spread = np.arange(size, dtype=np.int64)
        positions = self._spread[:size] - np.repeat(begins, lengths)
        edges = np.empty(len(ends) + 1, np.int32)
        edges[0], edges[1:] = 0, ends
        return (
            inputs.reshape(shape),
            labels.reshape(shape),
            {},
            np.repeat(numbers, lengths).reshape(shape),
            positions.astype(self._dtype, copy=False).reshape(shape),
            edges,
        )


def _ragged(firsts: I64, counts: I64) -> I64:
    """The numbers [firsts[i], firsts[i] + counts[i]) of each i, one after another."""
    ends = np.cumsum(counts)
    return np.repeat(firsts - (ends - counts), counts) + np.arange(int(ends[-1]) if len(ends) else 0)
