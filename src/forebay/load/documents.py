"""Batches of documents: rows of segments, with labels inside a document and what attention masks need.

No Python loop runs over tokens or documents. A plan is a list of segments (source, first token, length, label of the
last token); padding is a segment of an array of padding. A batch copies the segments of its rows in one call.
Cost: some 50 us for 8 x 2048 tokens; 24 bytes a segment of each open slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.slices import Slice
from forebay.errors import UsageError
from forebay.load.batch import IGNORE_INDEX
from forebay.load.collate import BatchArrays, Collator, MappedArray, TokenCopier, copy_array
from forebay.load.packing import SampleSegments, concat_segments, document_spans, fit_segments
from forebay.load.samples import I64, SampleIndex


@dataclass(frozen=True, eq=False, slots=True)
class _OpenSlice:
    tokens: MappedArray
    padding: MappedArray  # [L], of the tokens' type.
    segments: SampleSegments


@dataclass(frozen=True, eq=False, slots=True)
class _Plan:
    first_segments: list[int]  # Of each row, [K + 1].
    tokens: TokenCopier
    lengths: I64  # In tokens.
    labels: TokenCopier  # The label of each segment's last token, where it has one.
    has_label: NDArray[np.bool_]
    document_ids: NDArray[np.int32]  # Number within the row; -1 for padding.
    padded: bool


class DocumentCollator(Collator):
    """Inputs and labels [B, L]; labels are -100 on padding and, with masks, at the ends of documents.

    The last label of a document that continues in the next sample of its slice is its next token. Without masks (with
    a document filter alone) labels are the next tokens of the filtered stream.
    """

    def __init__(
        self, indexes: Sequence[SampleIndex], *, dtype: Any = np.int64, document_masks: bool = True,
        pad_id: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(indexes)
        assert indexes[0].seq_len is not None
        self._seq_len = indexes[0].seq_len
        self._dtype = np.dtype(dtype)
        self._masks = document_masks or indexes[0].packing == "best_fit"
        self._pad_id = pad_id
        self._padding: dict[tuple[np.dtype[Any], int], MappedArray] = {}
        self._arange = np.empty(0, np.int64)

    def _open(self, index: SampleIndex, slice_index: int, slice_: Slice) -> tuple[int, _OpenSlice]:
        tokens = slice_.tokens
        document_ends, first = copy_array(slice_.document_ends, slice_.path), int(index.first_documents[slice_index])
        beyond = index.tokens_beyond[:, slice_index].tolist()
        spans = document_spans(document_ends, len(tokens), index.documents, first, *beyond)
        if index.packing == "best_fit":
            segments = fit_segments(spans, self._seq_len)
        else:
            segments = concat_segments(spans, self._seq_len, masks=self._masks)
        pad_id = index.pad_id if self._pad_id is None else self._pad_id
        padding = self._padding_array(tokens.dtype, pad_id)
        return len(segments), _OpenSlice(MappedArray(tokens, slice_.path), padding, segments)

    def _padding_array(self, dtype: np.dtype[Any], pad_id: int) -> MappedArray:
        if (dtype, pad_id) not in self._padding:
            if not 0 <= pad_id <= np.iinfo(dtype).max:
                raise UsageError(f"pad_id: expected a token that {dtype} can hold, got {pad_id}.")
            self._padding[dtype, pad_id] = MappedArray(np.full(self._seq_len, pad_id, dtype), "")
        return self._padding[dtype, pad_id]

    def _plan(self, opened: list[_OpenSlice], which: I64, samples: I64) -> _Plan:
        by_slice = np.argsort(which, kind="stable")
        rows_of = np.split(by_slice, np.cumsum(np.bincount(which, minlength=1))[:-1])
        counts = np.zeros(len(which), np.int64)
        parts = [np.empty((4, 0), np.int64)]
        for i, (slice_, rows) in enumerate(zip(opened, rows_of)):
            segments = slice_.segments
            firsts = segments.first_segments.take(samples[rows])
            counts[rows] = segments.first_segments.take(samples[rows] + 1) - firsts
            chosen = _ranges(firsts, counts[rows])
            starts = segments.starts[chosen]
            source = np.where(starts < 0, i + len(opened), i)
            parts.append(np.stack([source, starts, segments.lengths[chosen], segments.last_labels[chosen]]))
        # The segments are in the order of slices; put them in the order of rows.
        firsts = np.empty_like(counts)
        firsts[by_slice] = np.cumsum(counts[by_slice]) - counts[by_slice]
        source, starts, lengths, last_labels = np.concatenate(parts, axis=1)[:, _ranges(firsts, counts)]
        edges = np.concatenate([[0], np.cumsum(counts)])
        document_ids = np.arange(len(starts)) - np.repeat(edges[:-1], counts)
        document_ids[starts < 0] = -1
        has_label = last_labels >= 0
        first_labels = np.concatenate([[0], np.cumsum(has_label)])[edges].tolist()
        sources = [*(slice_.tokens for slice_ in opened), *(slice_.padding for slice_ in opened)]
        ones = np.ones(first_labels[-1], np.int64)
        return _Plan(
            edges.tolist(),
            TokenCopier(sources, source, np.maximum(starts, 0), lengths, edges.tolist(), self._dtype),
            lengths,
            TokenCopier(sources, source[has_label], last_labels[has_label], ones, first_labels, self._dtype),
            has_label,
            document_ids.astype(np.int32),
            bool((starts < 0).any()),
        )

    def make(self, plan: _Plan, start: int, stop: int) -> BatchArrays:
        first, last = plan.first_segments[start], plan.first_segments[stop]
        shape = (stop - start, self._seq_len)
        lengths, document_ids = plan.lengths[first:last], plan.document_ids[first:last]
        stops = np.cumsum(lengths)
        starts = stops - lengths
        inputs = plan.tokens.read(start, stop)
        labels = np.empty(inputs.size, self._dtype)
        labels[:-1] = inputs[1:]
        labels[stops - 1] = IGNORE_INDEX
        labels[stops[plan.has_label[first:last]] - 1] = plan.labels.read(start, stop)
        if plan.padded:
            for i in np.flatnonzero(document_ids < 0).tolist():
                labels[starts[i] : stops[i]] = IGNORE_INDEX
        if not self._masks:
            return BatchArrays(inputs.reshape(shape), labels.reshape(shape), {})
        if inputs.size > len(self._arange):
            self._arange = np.arange(inputs.size, dtype=np.int64)
        positions = self._arange[: inputs.size] - np.repeat(starts, lengths)
        return BatchArrays(
            inputs.reshape(shape), labels.reshape(shape), {}, np.repeat(document_ids, lengths).reshape(shape),
            positions.astype(self._dtype, copy=False).reshape(shape), np.concatenate([[0], stops]).astype(np.int32),
        )  # fmt: skip


def _ranges(firsts: I64, counts: I64) -> I64:
    stops = np.cumsum(counts)
    return np.repeat(firsts - (stops - counts), counts) + np.arange(int(stops[-1]) if len(stops) else 0)
