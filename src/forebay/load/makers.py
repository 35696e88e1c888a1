"""Batches out of open slices: consecutive tokens, documents with their masks, or rows.

A maker is told which slices are open, plans many samples at once, and makes batches of runs of them; a plan holds the
arrays that it reads, so that a slice may be closed while batches of it are still to be made. For one thread at a time.

Costs, 8 x 2048 U16 tokens to int64 on one core: `ChunkMaker` 10 us a batch, `DocumentMaker` some 100 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forebay.dataset.slices import Slice
from forebay.errors import UsageError
from forebay.load.documents import DocumentMaker
from forebay.load.gather import Gather
from forebay.load.rows import RowMaker
from forebay.load.samples import I64, Array, KeyedViews, Made, Maker, View

__all__ = ["ChunkMaker", "DocumentMaker", "Made", "Maker", "RowMaker", "make_maker"]


def make_maker(
    views: Sequence[View],
    *,
    dtype: Any = np.int64,
    document_masks: bool = False,
    pad_id: int | None = None,
    trim: bool = False,
) -> Maker:
    """The maker for these views, one a dataset, all of one layout and seq_len.

    Args:
        dtype: Of token ids, labels and positions of layout `tokens`: int64 or int32.
        document_masks: Give document_ids, position_ids and cu_seqlens, and no label across documents. Packing `fit`
            has them always.
        pad_id: What pads; by default each dataset's EOS, or 0.
        trim: Cut the columns at a batch's end that are padding in all its rows (layout `rows`).

    Raises:
        UsageError: If views differ in layout, seq_len or packing, or an option has no meaning for the layout.
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
        self._gather = Gather(seq_len, dtype)

    def open(self, key: int, slice_index: int, one: Slice) -> None:
        """As `Maker.open`."""
        self._views.view_of(key, slice_index)
        tokens = one.tokens
        self._views.check(key, one, len(tokens) // self._seq_len)
        self._gather.add(key, tokens)

    def close(self, key: int) -> None:
        """As `Maker.close`."""
        self._gather.drop(key)

    def plan(self, keys: I64, samples: I64) -> tuple[I64, tuple[Array, ...]]:
        """As `Maker.plan`: indexes for the gather, and the arrays that must outlive them."""
        return self._gather.indexes(keys, self._views.in_slices(keys, samples)), self._gather.arrays

    def make(self, plan: tuple[I64, tuple[Array, ...]], start: int, stop: int) -> Made:
        """As `Maker.make`."""
        rows = self._gather.take(plan[0][start:stop])
        return rows[:, :-1], rows[:, 1:], {}, None, None, None
