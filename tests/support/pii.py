"""Personal data that is found in texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.prepare.clean.pii import KINDS, Pii
from forebay.prepare.documents import text_buffers
from support.batches import to_batch


def find_spans(texts: Sequence[str], stage: Pii) -> list[list[tuple[int, int, str]]]:
    """Return what the stage finds in each text: start, stop (in characters) and kind."""
    batch = to_batch(texts)
    offsets, data = text_buffers(batch.column("text"))
    result: list[list[tuple[int, int, str]]] = [[] for _ in texts]
    for start, stop, kind in zip(*(array.tolist() for array in stage.find(batch.column("text")))):
        row = int(np.searchsorted(offsets, start, side="right")) - 1
        before = len(data[offsets[row] : start].tobytes().decode())
        result[row].append((before, before + len(data[start:stop].tobytes().decode()), KINDS[kind]))
    return result
