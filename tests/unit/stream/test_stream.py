"""Streams: the packing against an oracle, the buffer's law, states that are refused, other libraries' datasets."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay
from forebay.errors import DatasetError, PrepareError, StateError, UsageError
from forebay.formats.inputs import ReadOptions
from forebay.order.bijection import derive_key
from forebay.stream import StreamOptions, TextStream
from forebay.stream.documents import ShuffleBuffer
from forebay.stream.hub import records_of
from forebay.stream.state import LaneState

EOS = 256
TEXTS = [f"document {i} " + "ab" * (i * 7 % 19) for i in range(60)]


def stream(inputs: Any, **changes: Any) -> TextStream:
    defaults: dict[str, Any] = {
        "tokenizer": "bytes", "seq_len": 16, "global_batch_size": 6, "rank": 0, "world_size": 1, "lanes": 1,
        "shuffle_documents": 8, "prefetch_batches": 0,
    }  # fmt: skip
    rows = (
        [{"text": item} if isinstance(item, str) else item for item in inputs] if isinstance(inputs, list) else inputs
    )
    arguments = {**defaults, **changes}
    options = {field.name: arguments.pop(field.name) for field in fields(StreamOptions) if field.name in arguments}
    return TextStream(rows, options=StreamOptions(**options), **arguments)


def facts(given: Any) -> list[Any]:
    return [(b.inputs.tolist(), b.labels.tolist(), b.sample_ids.tolist(), b.epoch, b.epoch_step, b.step) for b in given]


def tokens_of(texts: list[str]) -> list[int]:
    return [token for text in texts if text for token in (*text.encode(), EOS)]


def test_it_is_at_the_door() -> None:
    assert forebay.TextStream is TextStream


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=20),
    seq_len=st.integers(1, 9),
    size=st.integers(1, 5),
)
def test_packing_is_concatenation_and_chunks(texts: list[str], seq_len: int, size: int) -> None:
    full = tokens_of([text.replace("\ufdd0", "").replace("\ufdd1", "") for text in texts])
    created = stream(texts, seq_len=seq_len, global_batch_size=size, shuffle=False)
    if len(full) < seq_len:
        with pytest.raises(DatasetError, match="at least one batch an epoch"):
            list(created)
        return
    inputs, labels, ids = [], [], []
    for batch in created:
        assert batch.inputs is not None and batch.labels is not None and batch.inputs.dtype == np.int64
        inputs += batch.inputs.reshape(-1).tolist()
        labels += batch.labels.reshape(-1).tolist()
        ids += batch.sample_ids.tolist()
    number = len(full) // seq_len
    assert inputs == full[: number * seq_len]
    assert labels == [*full[1:], -100][: number * seq_len]
    assert ids == list(range(number))
    assert created.stats()["tail_tokens"] == len(full) - number * seq_len
    assert created.stats()["documents"] == len(texts) and created.stats()["empty"] == sum(not text for text in texts)


def counts_of(stats: dict[str, float]) -> dict[str, float]:
    """Without the times."""
    return {name: value for name, value in stats.items() if not name.endswith("_s")}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("prefetch_batches", [0, 2])
def test_resume_is_exact_at_every_batch(drop_last: bool, prefetch_batches: int) -> None:
    settings = {"epochs": 3, "drop_last": drop_last, "seq_len": 32}
    full = stream(TEXTS, **settings)
    expected, stats = facts(full), full.stats()
    assert len({str(epoch) for *_, epoch, _, _ in expected}) == 3
    following = facts(full)
    assert {epoch for *_, epoch, _, _ in following} == {3, 4, 5}
    for stop in range(len(expected) + 1):
        first = stream(TEXTS, prefetch_batches=prefetch_batches, **settings)
        batches = iter(first)
        for _ in range(stop):
            next(batches)
        state = json.loads(json.dumps(first.state_dict()))
        batches.close()
        second = stream(TEXTS, prefetch_batches=prefetch_batches, **settings)
        second.load_state_dict(state)
        assert facts(second) == (expected[stop:] or following)
        if stop < len(expected):
            assert counts_of(second.stats()) == counts_of(stats)
        if stop % 5 == 0:
            assert facts(first) == (expected[stop:] or following)  # leaving a loop and going on


def test_epochs_differ_and_seeds_too() -> None:
    def order(seed: int, epoch: int) -> list[Any]:
        return [fact[0] for fact in facts(stream(TEXTS, epochs=2, seed=seed)) if fact[3] == epoch]

    assert order(0, 0) != order(0, 1) != order(1, 1) != order(1, 0)
    assert order(0, 1) == order(0, 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7])
def test_ranks_part_each_global_batch(world_size: int) -> None:
    full = facts(stream(TEXTS))
    ranks = [list(stream(TEXTS, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert {len(rank) for rank in ranks} == {len(full)}
    for step, expected in enumerate(full):
        for rank in range(world_size):
            batch = ranks[rank][step]
            ids = expected[2][rank::world_size]
            assert batch.sample_ids.tolist() == ids and batch.weight == len(ids) * world_size / len(expected[2])
            assert batch.inputs.tolist() == expected[0][rank::world_size] if ids else batch.inputs.shape == (1, 16)


def _state_after(created: TextStream, batches: int) -> dict[str, Any]:
    iterator = iter(created)
    for _ in range(batches):
        next(iterator)
    return created.state_dict()


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=60),
    size=st.integers(0, 12),
    most=st.integers(0, 40),
    stop=st.integers(0, 80),
)
def test_a_buffer_loses_nothing_and_resumes(lengths: list[int], size: int, most: int, stop: int) -> None:
    key = derive_key(1, "test")
    texts = [b"%d" % i + b"x" * length for i, length in enumerate(lengths)]

    def run(interrupt: int) -> list[bytes]:
        buffer, out = ShuffleBuffer(size, most, key), []
        for text in texts:
            buffer.push(text)
            while buffer.full:
                if len(out) == interrupt:
                    buffer = ShuffleBuffer(size, most, key, buffer.draws, buffer.texts)
                out.append(buffer.pop())
            assert len(buffer) <= size
        while len(buffer):
            out.append(buffer.pop())
        return out

    assert Counter(run(-1)) == Counter(texts)
    assert run(stop) == run(-1)
    if not size:
        assert run(-1) == texts


def test_any_document_may_come_next() -> None:
    first = Counter()
    for seed in range(3000):
        buffer = ShuffleBuffer(9, 1 << 20, derive_key(seed, "test"))
        for i in range(10):
            buffer.push(b"%d" % i)
        first[buffer.pop()] += 1
    assert len(first) == 10 and all(210 < count < 390 for count in first.values())  # 300, 5.5 sigma


def test_packed_tokens_and_texts() -> None:
    texts, tokens = (b"", "ü".encode(), b"x" * 1000), np.array([0, 1, 65535, 1 << 31], np.uint32)
    state = LaneState(buffered=texts, tokens=tokens).to_dict()
    loaded = LaneState.from_dict(json.loads(json.dumps(state)), np.uint32)
    assert loaded.buffered == texts and loaded.tokens.tolist() == tokens.tolist()
    for changes in (
        {"buffer": state["pending"]},
        {"pending": state["buffer"]},
        {"lengths": [1001]},
        {"buffer": "YQ=="},
    ):
        with pytest.raises(StateError):
            LaneState.from_dict({**state, **changes}, np.uint32)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1}, {"seq_len": 8}, {"global_batch_size": 5}, {"shuffle_documents": 9}, {"shuffle": False},
        {"eos": False}, {"drop_last": True}, {"text_key": "body"}, {"shuffle_bytes": 9},
        {"lanes": 2, "steps": 9}, {"warmup_documents": 2},
    ],
)  # fmt: skip
def test_states_of_other_streams_are_refused(changes: dict[str, Any]) -> None:
    state = _state_after(stream(TEXTS), 3)
    with pytest.raises(StateError, match=r"expected .*, got"):
        stream(TEXTS, **changes).load_state_dict(state)
    with pytest.raises(StateError):
        stream(TEXTS[:-1]).load_state_dict(state)


def test_damaged_states_are_refused() -> None:
    state = _state_after(stream(TEXTS), 3)
    for name in state:
        for value in (None, -1, "x", [1]):
            if value == state[name]:
                continue
            damaged = {**copy.deepcopy(state), name: value}
            with pytest.raises(StateError):
                other = stream(TEXTS)
                other.load_state_dict(damaged)
                next(iter(other))
    with pytest.raises(StateError):
        stream(TEXTS).load_state_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_len": 0}, {"batch_size": 2}, {"global_batch_size": None}, {"dtype": np.uint16},
        {"lanes": 0}, {"lanes": 2},
        {"rank": 2}, {"shuffle_documents": -1}, {"shuffle_bytes": -1}, {"steps": 0}, {"epochs": 0},
        {"lanes": 4, "world_size": 4, "steps": 9},
    ],
)  # fmt: skip
def test_wrong_arguments(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        stream(TEXTS, **changes)


def test_wrong_inputs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="match"):
        stream(str(tmp_path / "*.jsonl"))
    with pytest.raises(PrepareError, match="does not exist"):
        stream(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="iterator"):
        stream(iter(TEXTS))
    with pytest.raises(UsageError, match="iterable"):
        stream(7)
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><html><body>Hello</body></html>")
    with pytest.raises(DatasetError, match="HTML"):
        list(stream(page))


class Streamed:
    """As `datasets.IterableDataset` keeps its state: taken while iterating, loaded before, told the epoch."""

    __module__ = "datasets.fake"

    def __init__(self, texts: list[str]) -> None:
        self._texts, self._at, self._epoch = texts, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]

    def __iter__(self) -> Iterator[dict[str, str]]:
        for text in self._texts[self._at :]:
            self._at += 1
            yield {"text": f"{self._epoch}{text}"}


class Replayed:
    """A re-iterable without a state, as a WebDataset is: some samples of text, some of JSON, one of neither."""

    def __iter__(self) -> Iterator[Any]:
        for i, text in enumerate(TEXTS):
            if i == 7:
                yield {"__key__": "7", "jpg": b"\xff"}
            elif i % 2:
                yield {"__key__": str(i), "json": json.dumps({"text": text}).encode()}
            else:
                yield {"__key__": str(i), "txt": text.encode()}


@pytest.mark.parametrize(("dataset", "kind"), [(lambda: Streamed(TEXTS), "own"), (Replayed, "replay")])
def test_datasets_of_others_resume(dataset: Any, kind: str) -> None:
    assert records_of(dataset(), ReadOptions()).kind == kind
    expected = facts(stream(dataset(), epochs=2))
    for stop in range(0, len(expected), 3):
        second = stream(dataset(), epochs=2)
        second.load_state_dict(json.loads(json.dumps(_state_after(stream(dataset(), epochs=2), stop))))
        assert facts(second) == expected[stop:]


def test_what_is_no_text_is_counted_with_its_place() -> None:
    created = stream([*TEXTS, {"text": 3}, {"other": "x"}, "\ud800", 5])
    list(created)
    assert created.stats()["malformed"] == 4 and created.stats()["documents"] == len(TEXTS)
    assert [invalid.location for invalid in created.malformed] == [f"record {i}" for i in range(60, 64)]


def test_errors_of_the_caller_s_dataset_are_told() -> None:
    class Broken:
        def __iter__(self) -> Iterator[str]:
            yield "x" * 1000
            raise RuntimeError("the disk is gone")

    for prefetch in (0, 2):
        with pytest.raises(PrepareError, match="the disk is gone"):
            list(stream(Broken(), prefetch_batches=prefetch))
