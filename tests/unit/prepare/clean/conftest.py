"""Batches from texts, real data, and a check that time grows no faster than text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from forebay.formats.records import Record
from forebay.prepare.documents import Stage
from support.batches import to_batches
from support.shared_data import shared_data


def to_batch(texts: Sequence[str]) -> pa.RecordBatch:
    batches = list(to_batches([Record(i, text=text) for i, text in enumerate(texts)], batch_bytes=1 << 40))
    assert len(batches) == 1
    return batches[0]


@pytest.fixture
def texts_of() -> Callable[[Stage, Sequence[str]], list[str]]:
    """What a stage makes of texts; checks that it keeps the rows, and that the batch's cut makes no difference."""

    def apply(stage: Stage, texts: Sequence[str]) -> list[str]:
        batch = to_batch(texts)
        full = stage.apply(batch)
        assert full.batch.column("place").to_pylist() == list(range(len(texts)))
        assert full.drop.shape == (len(texts),) and full.batch.schema.field("text").type == pa.large_string()
        result: list[str] = full.batch.column("text").to_pylist()
        pieces = [stage.apply(batch.slice(i, 1)) for i in range(len(texts))]
        assert [piece.batch.column("text")[0].as_py() for piece in pieces] == result
        assert [int(piece.drop[0]) for piece in pieces] == full.drop.tolist()
        return result

    return apply


@pytest.fixture
def growth() -> Callable[[Stage, str, int], float]:
    """The CPU time of a stage on a piece of text repeated to `size` characters, over that for a quarter of it."""

    def seconds(stage: Stage, text: str) -> float:
        batch = to_batch([text])
        start = time.process_time()
        verdict = stage.apply(batch)
        assert len(verdict.drop) == 1
        return time.process_time() - start

    def measure(stage: Stage, piece: str, size: int) -> float:
        seconds(stage, "warm up")
        quarter = piece * (size // 4 // len(piece))
        # Below a few milliseconds the clock and the allocator are what is measured.
        short = max(min(seconds(stage, quarter) for _ in range(2)), 0.004)
        return min(seconds(stage, quarter * 4) for _ in range(2)) / short

    return measure


@pytest.fixture
def data() -> Path:
    return shared_data("pii").parent
