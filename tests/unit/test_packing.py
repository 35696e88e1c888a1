"""What a packing and a filter promise, against plain loops that share nothing with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import DatasetError, UsageError
from forebay.load.packing import (
    DocumentSpans,
    DocumentSubset,
    SampleSegments,
    concat_segments,
    count_fit,
    document_spans,
    fit_segments,
)

law = settings(deadline=None, max_examples=200)

lengths = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 60)), max_size=60)
gaps = st.lists(st.integers(0, 3), max_size=60)


@st.composite
def pieces(draw: st.DrawFn) -> DocumentSpans:
    """DocumentSpans with gaps between them, as a filter leaves them."""
    index, starts, stops = 0, [], []
    holes = iter(draw(gaps))
    for length in draw(lengths):
        index += next(holes, 0)
        starts.append(index)
        index += length
        stops.append(index)
    return DocumentSpans(np.array(starts, np.int64), np.array(stops, np.int64))


def segments(rows: SampleSegments) -> Iterator[list[tuple[int, int, int]]]:
    for first, last in zip(rows.first_segments[:-1].tolist(), rows.first_segments[1:].tolist()):
        columns = (rows.starts, rows.lengths, rows.last_labels)
        yield list(zip(*(column[first:last].tolist() for column in columns)))


def spans(result: DocumentSpans) -> list[tuple[int, int]]:
    return list(zip(result.starts.tolist(), result.stops.tolist()))


def first_fit(sizes: list[int], capacity: int) -> int:
    rows: list[int] = []
    for size in sizes:
        for i, remaining in enumerate(rows):
            if size <= remaining:
                rows[i] -= size
                break
        else:
            rows.append(capacity - size)
    return len(rows)


def best_fit_longest_first(sizes: list[int], capacity: int) -> list[int]:
    rows: list[int] = []
    for size in sorted(sizes, reverse=True):
        tightest = min((remaining for remaining in rows if remaining >= size), default=None)
        if tightest is None:
            rows.append(capacity - size)
        else:
            rows[rows.index(tightest)] -= size
    return rows


@law
@given(pieces(), st.integers(1, 20))
def test_fit_has_every_token_once_and_cuts_nothing_that_fits(found: DocumentSpans, seq_len: int) -> None:
    rows = list(segments(fit_segments(found, seq_len)))
    tokens: list[int] = []
    last_of = {stop - 1: stop for _, stop in spans(found)}
    starts_of = dict(spans(found))
    for row in rows:
        assert sum(length for _, length, _ in row) == seq_len and all(length > 0 for _, length, _ in row)
        assert all(start >= 0 for start, _, _ in row[:-1])  # Padding is last.
        for start, length, follow in row:
            if start < 0:
                assert follow == -1
                continue
            tokens += range(start, start + length)
            if start in starts_of and starts_of[start] - start <= seq_len:
                assert length == starts_of[start] - start, "a document that fits was cut"
            end = start + length
            assert follow == (-1 if end - 1 in last_of else end)
    assert sorted(tokens) == [token for start, stop in spans(found) for token in range(start, stop)]
    lowest = [min(start for start, _, _ in row if start >= 0) for row in rows]
    assert lowest == sorted(lowest)


@law
@given(pieces(), st.integers(1, 20))
def test_fit_is_best_fit_longest_first_and_wastes_no_more_than_its_bound(found: DocumentSpans, seq_len: int) -> None:
    sizes = [stop - start for start, stop in spans(found)]
    full, rests = sum(size // seq_len for size in sizes), [size % seq_len for size in sizes if size % seq_len]
    rows = fit_segments(found, seq_len)
    rooms = sorted(sum(length for start, length, _ in row if start < 0) for row in segments(rows))
    assert rooms == sorted([0] * full + best_fit_longest_first(rests, seq_len))
    assert len(rows) == count_fit(found, seq_len)
    # At most 11/9 of the least number of rows and 6/9 (Dosa 2007); first fit is never below the least.
    assert 9 * (len(rows) - full) <= 11 * first_fit(rests, seq_len) + 6


def test_fit_wastes_no_more_than_first_fit_on_documents_as_they_come() -> None:
    rng = np.random.default_rng(0)
    for seq_len in (256, 1024):
        stops = np.cumsum(np.maximum(1, rng.lognormal(5, 1.2, 2000).astype(np.int64)))
        result = DocumentSpans(np.append(0, stops[:-1]), stops)
        sizes = np.diff(stops, prepend=0)
        rests = sizes[sizes % seq_len > 0] % seq_len
        fitted = len(fit_segments(result, seq_len)) - int((sizes // seq_len).sum())
        assert fitted <= first_fit(rests.tolist(), seq_len)
        assert fitted <= -(-int(rests.sum()) // seq_len) * 1.01 + 1


def test_fit_does_not_depend_on_anything_else() -> None:
    result = DocumentSpans(np.array([0, 5, 7]), np.array([5, 7, 30]))
    first, second = fit_segments(result, 8), fit_segments(result, 8)
    assert list(segments(first)) == list(segments(second))
    assert list(segments(first)) == [
        [(0, 5, -1), (5, 2, -1), (-1, 1, -1)],
        [(7, 8, 15)],
        [(15, 8, 23)],
        [(23, 7, -1), (-1, 1, -1)],
    ]


@law
@given(pieces(), st.integers(1, 20), st.booleans())
def test_chunk_is_the_stream_of_what_is_kept(found: DocumentSpans, seq_len: int, masks: bool) -> None:
    stream = [token for start, stop in spans(found) for token in range(start, stop)]
    stops = {stop for _, stop in spans(found)}
    rows = concat_segments(found, seq_len, masks=masks)
    assert len(rows) == found.num_tokens // seq_len == len(stream) // seq_len
    for i, row in enumerate(segments(rows)):
        tokens, labels, documents = [], [], 0
        for start, length, follow in row:
            tokens += range(start, start + length)
            labels += [*range(start + 1, start + length), follow]
            documents += 1
        assert tokens == stream[i * seq_len : (i + 1) * seq_len]
        following = [*stream, -1][i * seq_len + 1 : (i + 1) * seq_len + 1]
        if masks:
            following = [-1 if token + 1 in stops else follow for token, follow in zip(tokens, following)]
            assert documents == 1 + sum(token + 1 in stops for token in tokens[:-1])
        assert labels == following


@law
@given(lengths.filter(bool), st.integers(0, 5), st.integers(0, 40), st.integers(0, 9), st.integers(0, 9), st.data())
def test_a_filter_removes_what_it_says(
    sizes: list[int], tail: int, first: int, before: int, after: int, data: st.DataObject
) -> None:
    exclude = data.draw(st.lists(st.integers(0, first + len(sizes) + 3), max_size=10))
    min_value, max_value = data.draw(st.integers(0, 20)), data.draw(st.none() | st.integers(20, 60))
    stops = np.cumsum(sizes).astype(np.uint64)
    result = document_spans(
        stops, int(stops[-1]) + tail, DocumentSubset(exclude, min_value, max_value), first, before, after
    )
    expected, index = [], 0
    for i, size in enumerate([*sizes, tail]):
        length = size + before * (i == 0) + after * (i == len(sizes))
        if size and first + i not in exclude and min_value <= length <= (max_value or 10**9):
            expected.append((index, index + size))
        index += size
    assert spans(result) == expected


def test_empty_documents_and_empty_slices() -> None:
    for stops, tokens in (([], 0), ([0, 0], 0), ([], 5), ([2, 2, 5], 5)):
        result = document_spans(np.array(stops, np.uint64), tokens)
        assert result.num_tokens == tokens and (result.stops > result.starts).all()
        assert len(fit_segments(result, 4)) == count_fit(result, 4) == -(-tokens // 4)
        for masks in (True, False):
            assert len(concat_segments(result, 4, masks=masks)) == tokens // 4


@pytest.mark.parametrize("ends", [[3, 2], [9], [1 << 63]])
def test_damaged_ends_are_named(ends: list[int]) -> None:
    with pytest.raises(DatasetError, match="document_ends"):
        document_spans(np.array(ends, np.uint64), 8)


def test_a_filter_is_what_it_leaves_out() -> None:
    same = [DocumentSubset(e) for e in ((3, 1, 3), [1, 3], np.array([3, 1], np.uint32))]
    assert len({subset.digest() for subset in same}) == 1
    assert (
        len({DocumentSubset().digest(), same[0].digest(), *(DocumentSubset((), a, b).digest() for a, b in BOUNDS)}) == 5
    )
    with pytest.raises(ValueError, match="read-only"):
        same[0].numbers[0] = 7


BOUNDS: list[tuple[int, int | None]] = [(1, None), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"exclude": [-1]},
        {"exclude": [0.5]},
        {"exclude": 3},
        {"exclude": np.array([1 << 63], np.uint64)},
        {"min_tokens": -1},
        {"min_tokens": True},
        {"min_tokens": None},
        {"max_tokens": 1.5},
        {"min_tokens": 5, "max_tokens": 4},
    ],
)
def test_wrong_filters(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        DocumentSubset(**wrong)
