"""Cut spans out of a text column, or put other bytes in their place.

Hides: how offsets move. Costs one copy of the column, and nothing where there are no spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millrace.prepare.documents import text_buffers, text_column


def splice(
    column: pa.LargeStringArray, starts: NDArray[np.int64], stops: NDArray[np.int64], puts: Sequence[bytes]
) -> pa.LargeStringArray:
    """The column with `puts[i]` in place of its bytes `[starts[i], stops[i])`.

    Args:
        column: Without nulls.
        starts, stops: int64 [spans], ascending, not overlapping, none across two rows; positions in the data buffer.
        puts: UTF-8, one for each span.
    """
    if not len(starts):
        return column
    offsets, data = text_buffers(column)
    view, at = memoryview(data.data), int(offsets[0])
    pieces: list[bytes | memoryview] = []
    for start, stop, put in zip(starts.tolist(), stops.tolist(), puts):
        pieces += (view[at:start], put)
        at = stop
    pieces.append(view[at : int(offsets[-1])])
    grown = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, puts), np.int64, len(puts)) - (stops - starts), out=grown[1:])
    # An empty span at a row's start belongs to that row, as does one that begins there.
    before = np.searchsorted(starts, offsets, side="left")
    before[-1] = len(starts)
    moved = offsets + grown[before] - offsets[0]
    return text_column(moved, np.frombuffer(b"".join(pieces), np.uint8))


def replace_rows(column: pa.LargeStringArray, texts: Mapping[int, str]) -> pa.LargeStringArray:
    """The column with other texts in those rows."""
    if not texts:
        return column
    offsets, _ = text_buffers(column)
    rows = np.array(sorted(texts), np.int64)
    # Rows that are empty have no span of their own to replace; nobody repairs an empty text.
    assert (offsets[rows + 1] > offsets[rows]).all()
    return splice(column, offsets[rows], offsets[rows + 1], [texts[row].encode() for row in rows.tolist()])
