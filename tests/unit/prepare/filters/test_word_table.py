"""Repetition counted beside a plain count of the same, and words that are cut once for several filters."""

import mmap

import numpy as np
import pyarrow as pa

from forebay.prepare.filters.kernels import REPETITION, measure_repetition
from forebay.prepare.filters.quality import measure
from forebay.prepare.filters.words import word_table
from support.batches import to_batch

TOP, SAME = (1, 2, 3, 4), (2, 5, 6, 10)


def test_ngrams_are_counted_in_each_document():
    text = "ab cde ab cde ab cde f ghij ab cde f ghij ab cde f ghij" + " ab" * 23
    first = len(REPETITION)
    sizes = [(1, first, True), (2, first + 1, True), (2, first + 2, False), (3, first + 3, True)]
    sizes += [(4, first + 4, True), (5, first + 5, False), (6, first + 6, False), (10, first + 7, False)]
    names = [*REPETITION, *map(str, range(len(sizes)))]
    result = measure(measure_repetition, to_batch([text, "ab", text]), names, np.array(sizes, np.int64))
    expected = [56, 110, 74, 168, 220, 52, 51, 40]
    counts = np.array([result[name] for name in names[first:]])
    assert counts.T.tolist() == [expected, [2, 0, 0, 0, 0, 0, 0, 0], expected]


def batch_of(*texts: str) -> pa.RecordBatch:
    return pa.record_batch({"text": pa.array(texts, pa.large_string())})


def test_a_batch_in_the_memory_of_the_one_before_it_is_cut_anew():
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
