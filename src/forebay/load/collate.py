"""Batches out of open slices: consecutive tokens, documents with their masks, or rows.

A maker is told which slices are open, plans many samples at once, and makes batches of runs of them; a plan holds the
arrays that it reads, so that a slice may be closed while batches of it are still to be made. For one thread at a time.

Costs, 8 x 2048 U16 tokens to int64 on one core: `ChunkMaker` 10 us a batch, `DocumentMaker` some 50 us.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.dataset.slices import Slice
from forebay.errors import UsageError
from forebay.load.batch import IGNORE_INDEX
from forebay.load.copying import Source, TokenRows, open_sources
from forebay.load.documents import DocumentMaker
from forebay.load.rows import RowMaker
from forebay.load.samples import I64, KeyedViews, Made, Maker, View


def make_maker(
    views: Sequence[View],
    *,
    dtype: Any = np.int64,
    document_masks: bool = False,
    pad_id: int | None = None,
    trim: bool = False,
) -> Maker:
    """The maker for these views, one a dataset, all of one layout and seq_len; options as the Loader's.

    `dtype`: of token ids, labels and positions, int64 or int32. Packing `fit` has document masks always.
    """
    kinds = {(view.layout, view.seq_len, view.packing) for view in views}
    if len(kinds) != 1:
        raise UsageError(
            f"datasets of a mixture: expected one layout, seq_len and packing, got {sorted(map(str, kinds))}."
        )
    layout, _, packing = kinds.pop()
    if layout == "rows":
        if document_masks:
            raise UsageError("document_masks: expected a dataset of layout 'tokens', got 'rows'. Leave it out.")
        return RowMaker(views, pad_id=pad_id, trim=trim)
    if trim:
        raise UsageError("trim: expected a dataset of layout 'rows', got 'tokens'. Leave it out.")
    if packing == "chunk" and not document_masks and all(view.documents is None for view in views):
        return ChunkMaker(views, dtype=dtype)
    return DocumentMaker(views, dtype=dtype, document_masks=document_masks, pad_id=pad_id)


class ChunkMaker:
    """Consecutive tokens: inputs and labels are two views of one array [B, L + 1], one copy from map to batch."""

    def __init__(self, views: Sequence[View], *, dtype: Any = np.int64) -> None:
        seq_len = views[0].seq_len
        assert seq_len is not None
        self._views = KeyedViews(views)
        self._seq_len = seq_len
        self._dtype = np.dtype(dtype)
        self._open: dict[int, Source] = {}

    def open(self, key: int, slice_index: int, one: Slice) -> None:
        self._views.view_of(key, slice_index)
        tokens = one.tokens
        self._views.check(key, one, len(tokens) // self._seq_len)
        self._open[key] = Source(tokens, one.path)

    def close(self, key: int) -> None:
        self._open.pop(key, None)

    def plan(self, keys: I64, samples: I64) -> tuple[TokenRows, list[int]]:
        """As `Maker.plan`: the rows, and which of them have no token after their last."""
        samples = self._views.in_slices(keys, samples)
        sources, which = open_sources(self._open, keys)
        starts = samples * self._seq_len
        left = np.array([len(source.array) for source in sources], np.int64)[which] - starts
        lengths = np.full(len(keys), self._seq_len + 1, np.int64)
        ends = np.flatnonzero(left == self._seq_len)
        firsts = list(range(len(keys) + 1))
        if len(ends):
            kinds = dict.fromkeys(source.array.dtype for source in sources)
            pads = [Source(np.zeros(1, kind), "") for kind in kinds]
            pad_of = np.array([list(kinds).index(source.array.dtype) for source in sources], np.int64) + len(sources)
            lengths[ends] -= 1
            which, starts = np.insert(which, ends + 1, pad_of[which[ends]]), np.insert(starts, ends + 1, 0)
            lengths = np.insert(lengths, ends + 1, 1)
            sources = [*sources, *pads]
            firsts = (np.arange(len(keys) + 1) + np.searchsorted(ends, np.arange(len(keys) + 1))).tolist()
        return TokenRows(sources, which, starts, lengths, firsts, self._dtype), ends.tolist()

    def make(self, plan: tuple[TokenRows, list[int]], start: int, stop: int) -> Made:
        rows = plan[0].read(start, stop).reshape(stop - start, self._seq_len + 1)
        for end in plan[1]:
            if start <= end < stop:
                rows[end - start, -1] = IGNORE_INDEX
        return rows[:, :-1], rows[:, 1:], {}, None, None, None
