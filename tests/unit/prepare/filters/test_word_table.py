"""Repetition counted beside a plain count of the same, and words that are cut once for several filters."""

from __future__ import annotations

import collections
import mmap

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.formats.records import Record
from forebay.prepare.filters.kernels import REPETITION, measure_repetition
from forebay.prepare.filters.quality import measure
from forebay.prepare.filters.words import word_table
from support.batches import to_batches

TOP, SAME = (1, 2, 3, 4), (2, 5, 6, 10)


def plain_top(words: list[str], n: int) -> int:
    grams = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
    if not grams:
        return 0
    gram, count = collections.Counter(grams).most_common(1)[0]
    return len(gram) * count


def plain_same(words: list[str], n: int) -> int:
    seen: set[str] = set()
    chars = i = 0
    while i + n <= len(words):
        gram = " ".join(words[i : i + n])
        if gram in seen:
            chars += len(gram) - n + 1
            i += n
        else:
            seen.add(gram)
            i += 1
    return chars


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["ab", "cde", "f", "ghij"]), max_size=60), min_size=1, max_size=4))
def test_ngrams_are_counted_as_a_plain_count_does(documents: list[list[str]]) -> None:
    (batch,) = to_batches([Record(i, text=" ".join(words)) for i, words in enumerate(documents)])
    asked = [*((n, True) for n in TOP), *((n, False) for n in SAME)]
    first = len(REPETITION)
    sizes = sorted((n, first + i, is_top) for i, (n, is_top) in enumerate(asked))
    result = measure(measure_repetition, batch, first + len(asked), [np.array(sizes, np.int64)])
    for row, words in enumerate(documents):
        expected = [plain_top(words, n) if is_top else plain_same(words, n) for n, is_top in asked]
        assert result[first:, row].tolist() == expected


def batch_of(*texts: str) -> pa.RecordBatch:
    return pa.record_batch({"text": pa.array(texts, pa.large_string())})


def test_words_are_cut_once_for_a_batch_and_anew_for_another() -> None:
    batch = batch_of("Hello, world. " * 40, "the and of " * 30)
    table = word_table(batch)
    assert word_table(batch) is table
    other = word_table(batch_of("Good bye"))
    assert other.starts.tolist() == [0, 2]
    again = word_table(batch)
    assert again is not table
    for mine, theirs in zip(again, table, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_batch_in_the_memory_of_the_one_before_it_is_cut_anew() -> None:
    """As the process of the stages receives them: one after another into the same shared memory."""
    shared = mmap.mmap(-1, 1 << 16)
    for texts in (("Good bye to all", "No"), ("So", "Good bye to all")):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch_of(*texts).schema) as writer:
            writer.write_batch(batch_of(*texts))
        data = memoryview(sink.getvalue())
        shared[: data.nbytes] = data
        received = next(iter(pa.ipc.open_stream(memoryview(shared)[: data.nbytes])))
        assert np.diff(word_table(received).starts).tolist() == [len(text.split()) for text in texts]
        del received
