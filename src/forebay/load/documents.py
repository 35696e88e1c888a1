"""Batches of documents: rows made of segments, with labels that stay inside them and the masks that attention needs.

Hides how a batch is laid out without a Python loop over tokens or documents: a plan is a list of segments (address,
length, the label of the last token), padding among them as segments of a row of padding that the maker owns; a batch is
those of its rows, spread over its B * L positions by `repeat`. Some 100 us for 8 x 2048 tokens; an open slice costs 24
bytes a segment beside its map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.slices import Slice
from forebay.errors import DatasetError, UsageError
from forebay.load.batch import IGNORE_INDEX
from forebay.load.gather import Flat
from forebay.load.packing import Rows, chunk_rows, fit_rows
from forebay.load.samples import I64, Array, KeyedViews, Made, View


@dataclass(frozen=True, eq=False, slots=True)
class _Open:
    tokens: Array
    rows: Rows
    padding: Array  # The tokens' type, [L].


@dataclass(frozen=True, eq=False, slots=True)
class DocumentPlan:
    """Segments of the planned rows; arrays are [G] but for the first.

    Attributes:
        firsts: The first segment of each row, [K + 1].
        types: Of the tokens, by kind.
        kinds: Of each segment's tokens, an index of `types`; None if there is one type.
        steps: From a token's place to the next one's: 1 where places count tokens, else the bytes of a token; one
            number, or one a segment where there are kinds.
        places: Where a segment's first token is.
        lengths: Tokens.
        follows: Where the label of its last token is, or -1.
        documents: int32, the number within its row; -1 for padding.
        padded: Whether there is any padding.
        held: What must outlive the plan.
    """

    firsts: list[int]
    types: list[np.dtype[Any]]
    kinds: I64 | None
    steps: int | I64
    places: I64
    lengths: I64
    follows: I64
    documents: NDArray[np.int32]
    padded: bool
    held: tuple[_Open, ...]


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
        self._open: dict[int, _Open] = {}
        self._flats: dict[np.dtype[Any], Flat] = {}
        self._padding: dict[tuple[np.dtype[Any], int], Array] = {}
        self._spread = np.empty(0, np.int64)

    def open(self, key: int, slice_index: int, one: Slice) -> None:
        """As `Maker.open`. Lays the slice out."""
        view = self._views.view_of(key, slice_index)
        tokens = np.ascontiguousarray(one.tokens)
        pieces = view.pieces(slice_index, one.document_ends, len(tokens))
        fit = view.packing == "fit"
        rows = fit_rows(pieces, self._seq_len) if fit else chunk_rows(pieces, self._seq_len, masks=self._masks)
        self._views.check(key, one, len(rows))
        pad_id = view.pad_id if self._pad_id is None else self._pad_id
        self._open[key] = _Open(tokens, rows, self._padding_of(tokens.dtype, pad_id))

    def close(self, key: int) -> None:
        """As `Maker.close`."""
        self._open.pop(key, None)

    def _padding_of(self, dtype: np.dtype[Any], pad_id: int) -> Array:
        if (dtype, pad_id) not in self._padding:
            if not 0 <= pad_id <= np.iinfo(dtype).max:
                raise UsageError(f"pad_id: expected a token that {dtype} can hold, got {pad_id}.")
            self._padding[dtype, pad_id] = np.full(self._seq_len, pad_id, dtype)
        return self._padding[dtype, pad_id]

    def plan(self, keys: I64, samples: I64) -> DocumentPlan:
        """As `Maker.plan`."""
        samples = self._views.in_slices(keys, samples)
        distinct, which = np.unique(keys, return_inverse=True)
        for key in distinct.tolist():
            if key not in self._open:
                raise DatasetError(f"sample of slice {key}: expected an open slice. Open it first.")
        held = tuple(self._open[key] for key in distinct.tolist())
        types = list(dict.fromkeys(source.tokens.dtype for source in held)) or [np.dtype(np.uint16)]
        firsts, counts = np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
        parts = [np.empty((5, 0), np.int64)]
        total = 0
        by_slice = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which, minlength=1))[:-1])
        for source, mine in zip(held, by_slice):
            first = source.rows.firsts.take(samples[mine])
            number = source.rows.firsts.take(samples[mine] + 1) - first
            firsts[mine] = total + np.cumsum(number) - number
            counts[mine] = number
            total += int(number.sum())
            parts.append(_segments(source, _ragged(first, number), types.index(source.tokens.dtype)))
        # From slice by slice to the plan's order.
        found = np.concatenate(parts, axis=1)[:, _ragged(firsts, counts)]
        addresses, lengths, follows, documents, kinds = found
        edges = np.concatenate([[0], np.cumsum(counts)])
        nth = np.arange(len(addresses)) - np.repeat(edges[:-1], counts)
        numbers = np.where(documents < 0, -1, nth).astype(np.int32)
        padded = bool((documents < 0).any())
        for kind in types:
            self._flats.setdefault(kind, Flat(kind))
        widths = np.array([kind.itemsize for kind in types])
        flat = self._flats[types[0]]
        aligned = len(types) == 1 and flat.aligned(addresses)
        several = kinds if len(types) > 1 else None
        steps = 1 if aligned else int(widths[0]) if several is None else widths.take(kinds)
        places = flat.places(addresses, aligned)
        follows = np.where(follows < 0, -1, flat.places(follows, aligned))
        return DocumentPlan(edges.tolist(), types, several, steps, places, lengths, follows, numbers, padded, held)

    def make(self, plan: DocumentPlan, start: int, stop: int) -> Made:
        """As `Maker.make`."""
        first, last = plan.firsts[start], plan.firsts[stop]
        shape = (stop - start, self._seq_len)
        size = shape[0] * shape[1]
        if size > len(self._spread):
            self._spread = np.arange(size, dtype=np.int64)
        spread = self._spread[:size]
        lengths = plan.lengths[first:last]
        ends = np.cumsum(lengths)
        begins = ends - lengths
        places, kinds = plan.places[first:last], None if plan.kinds is None else plan.kinds[first:last]
        if isinstance(plan.steps, int):
            where = np.repeat(places - plan.steps * begins, lengths)
            where += spread if plan.steps == 1 else spread * plan.steps
        else:
            steps = plan.steps[first:last]
            where = np.repeat(places - steps * begins, lengths) + np.repeat(steps, lengths) * spread
        tokens = self._read(plan, where, None if kinds is None else np.repeat(kinds, lengths))
        inputs = tokens.astype(self._dtype)
        labels = np.empty(size, self._dtype)
        labels[:-1] = inputs[1:]
        follows = plan.follows[first:last]
        given = np.flatnonzero(follows >= 0)
        labels[ends - 1] = IGNORE_INDEX
        labels[ends[given] - 1] = self._read(plan, follows[given], None if kinds is None else kinds[given])
        numbers = plan.documents[first:last]
        if plan.padded:
            for at in np.flatnonzero(numbers < 0).tolist():
                labels[begins[at] : ends[at]] = IGNORE_INDEX
        if not self._masks:
            return inputs.reshape(shape), labels.reshape(shape), {}, None, None, None
        positions = spread - np.repeat(begins, lengths)
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

    def _read(self, plan: DocumentPlan, places: I64, kinds: I64 | None) -> Array:
        """Tokens at places, each of its kind."""
        if kinds is None:
            return self._flats[plan.types[0]].take(places, plan.steps == 1)
        out = np.empty(len(places), self._dtype)
        for kind, dtype in enumerate(plan.types):
            at = np.flatnonzero(kinds == kind)
            out[at] = self._flats[dtype].take(places[at], False)
        return out


def _segments(source: _Open, at: I64, kind: int) -> I64:
    """[5, n] of segments `at` of a slice: address, length, address of the last label or -1, -1 for padding, kind."""
    rows, tokens = source.rows, source.tokens
    starts, follows = rows.starts[at], rows.follows[at]
    base, width = tokens.ctypes.data, tokens.itemsize
    addresses = np.where(starts < 0, source.padding.ctypes.data, base + starts * width)
    lasts = np.where(follows < 0, -1, base + follows * width)
    return np.stack([addresses, rows.lengths[at], lasts, np.where(starts < 0, -1, 0), np.full(len(at), kind)])


def _ragged(firsts: I64, counts: I64) -> I64:
    """The numbers [firsts[i], firsts[i] + counts[i]) of each i, one after another."""
    ends = np.cumsum(counts)
    return np.repeat(firsts - (ends - counts), counts) + np.arange(int(ends[-1]) if len(ends) else 0)
