"""The guarantees of packings and filters, against plain loops that share nothing with them."""

from collections.abc import Iterator

import numpy as np
import pytest

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


def ranges(rows: PackedRows) -> Iterator[list[tuple[int, int]]]:
    for first, last in zip(rows.first_ranges[:-1].tolist(), rows.first_ranges[1:].tolist()):
        yield list(zip(rows.starts[first:last].tolist(), rows.lengths[first:last].tolist()))


def test_rows_of_a_section_are_those_of_a_golden_case(monkeypatch):
    result = DocumentSpans(np.array([0, 5, 7]), np.array([5, 7, 30]))
    assert list(ranges(pack_section(result, 8))) == [[(0, 5), (5, 2)], [(7, 9)], [(15, 9)], [(23, 7)]]
    monkeypatch.setattr(packing, "_SECTION_ROWS", 0)
    monkeypatch.setattr(packing, "_MIN_SECTION_TOKENS", 7)
    assert count_sections(result, 30, 8).tolist() == [1, 0, 0, 0, 3]  # A document is of the section in which it ends.


@pytest.mark.parametrize("stops", [[3, 2], [9], [1 << 63]])
def test_damaged_ends_are_named(stops):
    with pytest.raises(DatasetError, match="document_ends"):
        document_spans(np.array(stops, np.uint64), 8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"exclude": [-1]},
        {"exclude": 3},
        {"exclude": np.array([1 << 63], np.uint64)},
        {"min_tokens": -1},
        {"max_tokens": 1.5},
        {"min_tokens": 5, "max_tokens": 4},
    ],
)
def test_wrong_filters(wrong):
    with pytest.raises(UsageError):
        DocumentSubset(**wrong)
