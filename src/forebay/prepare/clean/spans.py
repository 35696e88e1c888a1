"""Replaces spans of bytes in a text column. Costs one compiled copy of the column, and nothing without spans."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from forebay.prepare.compiled import Ints, jit
from forebay.prepare.documents import text_buffers, text_column


@jit()
def _splice(offsets, data, starts, stops, which, puts, put_offsets, out, out_offsets):  # type: ignore[no-untyped-def]
    written, span = 0, 0
    for row in range(len(offsets) - 1):
        i, stop = offsets[row], offsets[row + 1]
        while i < stop:
            mine = span < len(starts) and starts[span] < stop
            end = starts[span] if mine else stop
            out[written : written + end - i] = data[i:end]
            written += end - i
            i = end
            if mine:
                first, last = put_offsets[which[span]], put_offsets[which[span] + 1]
                out[written : written + last - first] = puts[first:last]
                written += last - first
                i = stops[span]
                span += 1
        out_offsets[row + 1] = written


def splice(
    column: pa.LargeStringArray, starts: Ints, stops: Ints, puts: Sequence[bytes], which: Ints
) -> pa.LargeStringArray:
    """The column, without nulls, with `puts[which[i]]` (UTF-8) in place of bytes `[starts[i], stops[i])` of its buffer.

    `starts`, `stops`, `which`: int64 [spans]; spans ascend, do not overlap, and none is empty or across two rows.
    """
    if not len(starts):
        return column
    offsets, data = text_buffers(column)
    put_offsets = np.zeros(len(puts) + 1, np.int64)
    np.cumsum([len(put) for put in puts], out=put_offsets[1:])
    size = int(offsets[-1] - offsets[0] - (stops - starts).sum() + np.diff(put_offsets)[which].sum())
    out, out_offsets = np.empty(size, np.uint8), np.zeros(len(offsets), np.int64)
    joined = np.frombuffer(b"".join(puts), np.uint8)
    _splice(offsets, data, starts, stops, which, joined, put_offsets, out, out_offsets)
    return text_column(out_offsets, out)


def replace_rows(column: pa.LargeStringArray, texts: Mapping[int, str]) -> pa.LargeStringArray:
    """The column with other texts in those rows, which must not be empty."""
    if not texts:
        return column
    offsets, _ = text_buffers(column)
    rows = np.array(sorted(texts), np.int64)
    assert (offsets[rows + 1] > offsets[rows]).all()
    puts = [texts[row].encode() for row in rows.tolist()]
    return splice(column, offsets[rows], offsets[rows + 1], puts, np.arange(len(rows)))
