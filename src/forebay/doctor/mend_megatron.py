"""A mended copy of Megatron's pair: the sequences that lie whole in their data, under an index that says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forebay.errors import DatasetError, UsageError
from forebay.formats.detect import MEGATRON_MAGIC
from forebay.formats.foreign import head_of, map_file, size_of
from forebay.storage.atomic import atomic_write

_HEADER_BYTES = 34
_VERSION = (1).to_bytes(8, "little")
_WIDTHS = {1: 1, 3: 2, 4: 4, 5: 8, 8: 2}


def can_mend(idx: Path, data: Path) -> bool:
    """Whether an index is whole and has some data beside it."""
    if not (idx.is_file() and data.is_file() and data.stat().st_size):
        return False
    head = head_of(idx, _HEADER_BYTES)
    whole = len(head) == _HEADER_BYTES and head[:9] == MEGATRON_MAGIC and head[9:17] == _VERSION
    return whole and head[17] in _WIDTHS and size_of(idx) >= _wanted(head)


def _wanted(head: bytes) -> int:
    """Bytes of an index without modes."""
    return _HEADER_BYTES + 12 * int.from_bytes(head[18:26], "little") + 8 * int.from_bytes(head[26:34], "little")


def mend_megatron(idx: Path, data: Path, out: Path) -> list[Path]:
    """Write a pair to directory `out` with the sequences of the index that lie whole in its data.

    Raises:
        DatasetError: If the index itself is cut off or is none.
        UsageError: If no sequence is whole.
    """
    if not can_mend(idx, data):
        raise DatasetError(f"{idx}: expected Megatron's whole index, and {data.name}, got less. Fetch both again.")
    raw = map_file(idx)
    head = raw[:_HEADER_BYTES].tobytes()
    sequences, bounds = int.from_bytes(head[18:26], "little"), int.from_bytes(head[26:34], "little")
    at, width = _HEADER_BYTES, _WIDTHS[head[17]]
    lengths = raw[at : at + 4 * sequences].view("<i4").astype(np.int64)
    pointers = raw[at + 4 * sequences : at + 12 * sequences].view("<i8")
    documents = raw[at + 12 * sequences : at + 12 * sequences + 8 * bounds].view("<i8")
    size = size_of(data)
    bad = (lengths < 0) | (pointers < 0) | (pointers > size)
    bad |= lengths * width > size - np.where(bad, 0, pointers)
    whole = int(np.flatnonzero(bad)[0]) if bad.any() else sequences
    sound = (documents >= 0) & (documents <= whole) & (np.diff(documents, prepend=0) >= 0)
    kept = documents[: len(documents) if sound.all() else int(np.argmin(sound))]
    kept = kept if len(kept) > 1 and not kept[0] else kept[:0]
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
