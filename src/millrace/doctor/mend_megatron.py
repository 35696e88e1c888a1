"""A mended copy of Megatron's pair: the sequences that lie whole in their data, under an index that says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from millrace.dataset.slices import atomic_write
from millrace.errors import DatasetError, UsageError
from millrace.formats.foreign import map_file
from millrace.formats.megatron import MAGIC

_HEADER_BYTES = 34
_WIDTHS = {1: 1, 3: 2, 4: 4, 5: 8, 8: 2}


def mend_megatron(idx: Path, data: Path, out: Path) -> list[Path]:
    """Write a pair to directory `out` with the sequences of the index that lie whole in its data.

    Raises:
        DatasetError: If the index itself is cut off or is none.
        UsageError: If no sequence is whole.
    """
    raw = np.fromfile(idx, np.uint8)
    head = raw[:_HEADER_BYTES].tobytes()
    sequences, bounds = int.from_bytes(head[18:26], "little"), int.from_bytes(head[26:34], "little")
    wanted = _HEADER_BYTES + 12 * sequences + 8 * bounds
    if head[:9] != MAGIC or len(head) < _HEADER_BYTES or head[17] not in _WIDTHS or len(raw) < wanted:
        raise DatasetError(f"{idx}: expected Megatron's index of {wanted} bytes, got {len(raw)}. Fetch it again.")
    at, width = _HEADER_BYTES, _WIDTHS[head[17]]
    lengths = raw[at : at + 4 * sequences].view("<i4").astype(np.int64)
    pointers = raw[at + 4 * sequences : at + 12 * sequences].view("<i8")
    documents = raw[at + 12 * sequences : at + 12 * sequences + 8 * bounds].view("<i8")
    size = data.stat().st_size
    bad = (lengths < 0) | (pointers < 0) | (pointers > size)
    bad |= lengths * width > size - np.where(bad, 0, pointers)
    whole = int(np.flatnonzero(bad)[0]) if bad.any() else sequences
    kept = documents[(documents >= 0) & (documents <= whole)]
    if len(kept):
        whole = int(kept[-1])  # A document of which a sequence is lost goes whole.
    stop = int((pointers[:whole] + lengths[:whole] * width).max()) if whole else 0
    if not stop:
        raise UsageError(f"{idx}: expected some sequence whole in {data.name}, got none. Fetch both again.")
    head = head[:18] + whole.to_bytes(8, "little") + len(kept).to_bytes(8, "little")
    parts = [lengths[:whole].astype("<i4"), pointers[:whole], kept]
    targets = [out / data.name, out / idx.name]
    memory = map_file(data)
    atomic_write(targets[0], (memory[a : min(a + (1 << 22), stop)].data for a in range(0, stop, 1 << 22)))
    atomic_write(targets[1], head + b"".join(np.ascontiguousarray(part).tobytes() for part in parts))
    return targets
