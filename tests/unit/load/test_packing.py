"""The guarantees of packings and filters, against plain loops that share nothing with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import DatasetError, UsageError
from forebay.load import packing
from forebay.load.packing import (
    DocumentSpans,
    DocumentSubset,
    PackedRows,
    count_sections,
    document_spans,
    pack_section,
)

lengths = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 60)), max_size=60)
gaps = st.lists(st.integers(0, 3), max_size=60)


@st.composite
def document_lists(draw: st.DrawFn) -> DocumentSpans:
    """DocumentSpans with gaps between them, as a filter leaves them."""
    index, starts, stops = 0, [], []
    holes = iter(draw(gaps))
    for length in draw(lengths):
        index += next(holes, 0)
        starts.append(index)
        index += length
        stops.append(index)
    return DocumentSpans(np.array(starts, np.int64), np.array(stops, np.int64))


def ranges(rows: PackedRows) -> Iterator[list[tuple[int, int]]]:
    for first, last in zip(rows.first_ranges[:-1].tolist(), rows.first_ranges[1:].tolist()):
        yield list(zip(rows.starts[first:last].tolist(), rows.lengths[first:last].tolist()))


@given(document_lists(), st.integers(1, 20), st.integers(1, 50), st.integers(0, 100))
def test_rows_are_counted_by_the_sections_in_which_documents_end(
    found: DocumentSpans, seq_len: int, size: int, tail: int
) -> None:
    num_tokens = max([0, *found.stops.tolist()]) + tail
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_SECTION_ROWS", 0)
        patch.setattr(packing, "_MIN_SECTION_TOKENS", size)
        counts = count_sections(found, num_tokens, seq_len).tolist()
    assert len(counts) == -(-num_tokens // size)
    for section, count in enumerate(counts):
        inside = (found.stops > section * size) & (found.stops <= (section + 1) * size)
        assert count == len(
            list(ranges(pack_section(DocumentSpans(found.starts[inside], found.stops[inside]), seq_len)))
        )


def test_rows_of_a_section_are_those_of_a_golden_case() -> None:
    result = DocumentSpans(np.array([0, 5, 7]), np.array([5, 7, 30]))
    assert list(ranges(pack_section(result, 8))) == [[(0, 5), (5, 2)], [(7, 9)], [(15, 9)], [(23, 7)]]


def test_sections_add_less_than_half_a_percent_of_padding() -> None:
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(5.9, 1, 20_000).astype(np.int64))
    stops = np.cumsum(lengths)
    found, num_tokens = DocumentSpans(stops - lengths, stops), int(stops[-1])
    whole, sections = len(pack_section(found, 2048).first_ranges) - 1, count_sections(found, num_tokens, 2048)
    assert len(sections) > 1 and 0 <= sections.sum() - whole < 0.005 * whole + 1


def test_empty_documents_and_empty_slices() -> None:
    for stops, tokens in (([], 0), ([0, 0], 0), ([], 5), ([2, 2, 5], 5)):
        result = document_spans(np.array(stops, np.uint64), tokens)
        assert result.num_tokens == tokens and (result.stops > result.starts).all()
        assert len(pack_section(result, 4).first_ranges) - 1 == count_sections(result, tokens, 4).sum()
        assert count_sections(result, tokens, 4).sum() == -(-tokens // 4)


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
