"""Streams: the packing against an oracle, the buffer's law, states that are refused, other libraries' datasets."""

import copy
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DatasetError, PrepareError, StateError, UsageError
from forebay.formats.inputs import ReadOptions
from forebay.order.bijection import derive_key
from forebay.stream import TextStream
from forebay.stream.hub import records_of
from forebay.stream.lane import ShuffleBuffer
from forebay.stream.records import Share
from forebay.stream.state import LaneState
from support import streams
from support.streams import Streamed, as_tuples, take_state

EOS = 256
TEXTS = [f"document {i} " + "ab" * (i * 7 % 19) for i in range(60)]


def stream(inputs: Any, **changes: Any) -> TextStream:
    """With one lane; texts are rows."""
    if isinstance(inputs, list):
        inputs = [{"text": item} if isinstance(item, str) else item for item in inputs]
    return streams.stream(inputs, **{"seq_len": 16, "global_batch_size": 6, "lanes": 1, **changes})


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=20),
    seq_len=st.integers(1, 9),
    size=st.integers(1, 5),
)
def test_packing_is_concatenation_and_chunks(texts, seq_len, size):
    read = [text.replace("\ufdd0", "").replace("\ufdd1", "") for text in texts]
    full = [token for text in read if text for token in (*text.encode(), EOS)]
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


def counts(stats: dict[str, float]) -> dict[str, float]:
    """Without the times."""
    return {name: value for name, value in stats.items() if not name.endswith("_s")}


@pytest.mark.parametrize("drop_last, prefetch_batches", [(False, 0), (True, 2)])
def test_resume_is_exact_at_every_batch(drop_last, prefetch_batches):
    settings = {"epochs": 3, "drop_last": drop_last, "seq_len": 32}
    full = stream(TEXTS, **settings)
    expected, stats = as_tuples(full), full.stats()
    assert {fact[3] for fact in expected} == {0, 1, 2}
    following = as_tuples(full)
    assert {fact[3] for fact in following} == {3, 4, 5}
    for stop in range(len(expected) + 1):
        first = stream(TEXTS, prefetch_batches=prefetch_batches, **settings)
        second = stream(TEXTS, prefetch_batches=prefetch_batches, **settings)
        second.measure_mfu(1, 1)
        second.load_state_dict(take_state(first, stop))
        assert second.stats()["ideal_s"] == 0
        assert as_tuples(second) == (expected[stop:] or following)
        if stop < len(expected):
            assert counts(second.stats()) == counts(stats)
        if stop % 5 == 0:
            assert as_tuples(first) == (expected[stop:] or following)  # leaving a loop and going on


def test_epochs_differ_and_seeds_too():
    def order(seed, epoch):
        return [fact[0] for fact in as_tuples(stream(TEXTS, epochs=2, seed=seed)) if fact[3] == epoch]

    assert order(0, 0) != order(0, 1) != order(1, 1) != order(1, 0)
    assert order(0, 1) == order(0, 1)


@given(
    lengths=st.lists(st.integers(0, 9), max_size=60),
    size=st.integers(0, 12),
    max_bytes=st.integers(0, 40),
    stop=st.integers(0, 80),
)
def test_a_buffer_loses_nothing_and_resumes(lengths, size, max_bytes, stop):
    key = derive_key(1, "test")
    texts = [b"%d" % i + b"x" * length for i, length in enumerate(lengths)]

    def run(interrupt):
        buffer, out = ShuffleBuffer(size, max_bytes, key), []
        for text in texts:
            buffer.push(text)
            while buffer.full:
                if len(out) == interrupt:
                    buffer = ShuffleBuffer(size, max_bytes, key, buffer.draws, buffer.texts)
                out.append(buffer.pop())
            assert len(buffer) <= size
        while len(buffer):
            out.append(buffer.pop())
        return out

    assert Counter(run(-1)) == Counter(texts)
    assert run(stop) == run(-1)
    if not size:
        assert run(-1) == texts


def test_any_document_may_come_next():
    first = set()
    for seed in range(100):
        buffer = ShuffleBuffer(9, 1 << 20, derive_key(seed, "test"))
        for i in range(10):
            buffer.push(b"%d" % i)
        first.add(buffer.pop())
    assert len(first) == 10


def test_packed_tokens_and_texts():
    texts, tokens = (b"", "ü".encode(), b"x" * 1000), np.array([0, 1, 65535, 1 << 31], np.uint32)
    state = LaneState(buffered=texts, tokens=tokens).to_dict()
    loaded = LaneState.from_dict(json.loads(json.dumps(state)), np.uint32)
    assert loaded.buffered == texts and loaded.tokens.tolist() == tokens.tolist()
    wrong = {"buffer": state["pending"]}, {"pending": state["buffer"]}, {"pending": "x"}, {"buffer": "YQ=="}
    for changes in wrong:
        with pytest.raises(StateError):
            LaneState.from_dict({**state, **changes}, np.uint32)


def test_states_of_other_streams_are_refused():
    state = take_state(stream(TEXTS), 3)
    for changes in (
        {"seed": 1}, {"seq_len": 8}, {"global_batch_size": 5}, {"shuffle_documents": 9}, {"shuffle": False},
        {"eos": False}, {"drop_last": True}, {"text_key": "body"}, {"shuffle_bytes": 9},
        {"lanes": 2, "steps": 9}, {"warmup_documents": 2},
    ):  # fmt: skip
        with pytest.raises(StateError, match=r"expected .*, got"):
            stream(TEXTS, **changes).load_state_dict(state)
    with pytest.raises(StateError):
        stream(TEXTS[:-1]).load_state_dict(state)
    with pytest.raises(StateError):
        stream(TEXTS).load_state_dict([])
    for name in state:
        for value in (None, -1, "x", [1]):
            if value == state[name]:
                continue
            with pytest.raises(StateError):
                other = stream(TEXTS)
                other.load_state_dict({**copy.deepcopy(state), name: value})
                next(iter(other))


def test_wrong_arguments():
    for changes in (
        {"seq_len": 0}, {"batch_size": 2}, {"global_batch_size": None}, {"dtype": np.uint16}, {"lanes": 0},
        {"rank": 2}, {"shuffle_documents": -1}, {"shuffle_bytes": -1}, {"steps": 0}, {"epochs": 0},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            stream(TEXTS, **changes)


def test_wrong_inputs(tmp_path):
    for inputs, message in (
        (iter(TEXTS), "iterator"),
        (7, "iterable"),
    ):
        with pytest.raises(UsageError, match=message):
            stream(inputs)
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><html><body>Hello</body></html>")
    with pytest.raises(DatasetError, match="HTML"):
        list(stream(page))


class Replayed:
    """A re-iterable without a state, as a WebDataset is: some samples of text, some of JSON, one of neither."""

    def __iter__(self) -> Iterator:
        for i, text in enumerate(TEXTS):
            if i == 7:
                yield {"__key__": "7", "jpg": b"\xff"}
            elif i % 2:
                yield {"__key__": str(i), "json": json.dumps({"text": text}).encode()}
            else:
                yield {"__key__": str(i), "txt": text.encode()}


@pytest.mark.parametrize(
    "dataset, kind",
    [(lambda: [{"text": text} for text in TEXTS], "index"), (lambda: Streamed(TEXTS), "own"), (Replayed, "replay")],
    ids=["index", "own", "replay"],
)
def test_datasets_of_others_resume(dataset, kind):
    records = records_of(dataset(), ReadOptions())
    assert records.kind == kind
    full = Counter(record.text for record, _ in records.open(0, None))
    for lanes in (2, 3, 7):
        shares = [
            [record.text for record, _ in records_of(dataset(), ReadOptions()).open(0, None, share=Share(lane, lanes))]
            for lane in range(lanes)
        ]
        assert Counter(text for share in shares for text in share) == full
        assert max(map(len, shares)) <= -(-60 // lanes)
    for settings in ({"epochs": 2}, {"lanes": 3, "steps": 20}):
        expected = as_tuples(stream(dataset(), **settings))
        for stop in range(0, len(expected), 5):
            second = stream(dataset(), **settings)
            second.load_state_dict(take_state(stream(dataset(), **settings), stop))
            assert as_tuples(second) == expected[stop:]


def test_records_without_text_are_counted_with_their_place():
    created = stream([*TEXTS, {"text": 3}, {"other": "x"}, "\ud800", 5])
    list(created)
    assert created.stats()["malformed"] == 4 and created.stats()["documents"] == len(TEXTS)
    assert [invalid.location for invalid in created.malformed] == [f"record {i}" for i in range(60, 64)]


def test_errors_of_the_callers_dataset_are_passed_on():
    class Broken:
        def __iter__(self):
            yield "x" * 1000
            raise RuntimeError("the disk is gone")

    for prefetch in (0, 2):
        with pytest.raises(PrepareError, match="the disk is gone"):
            list(stream(Broken(), prefetch_batches=prefetch))
