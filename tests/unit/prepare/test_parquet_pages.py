"""The pages of Parquet are known before they are read, and one that is too large is refused."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.dataset.parquet_pages import Page, pages
from forebay.formats import parquet as tables
from forebay.formats.parquet import max_rows
from support.preparing import read_records


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_headers_say_what_the_footer_says(tmp_path: Path, version: str) -> None:
    path = tmp_path / "x.parquet"
    table = pa.table({"text": [f"{i % 700} " * 40 for i in range(9000)]})
    pq.write_table(table, path, data_page_version=version, data_page_size=1 << 14)
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    start = column.dictionary_page_offset
    with path.open("rb") as file:
        result = list(pages(file, start, start + column.total_compressed_size))
    assert sum(page.values for page in result if not page.is_dictionary) == 9000
    assert [page.is_dictionary for page in result] == [True] + [False] * (len(result) - 1) and len(result) > 1
    assert sum(page.bytes for page in result) <= column.total_uncompressed_size


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert sum(1 for _ in pages(io.BytesIO(data), 0, len(data))) <= len(data)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), max_size=12), st.integers(1, 120))
def test_no_run_of_rows_touches_more_than_the_budget(sizes: list[tuple[int, int]], budget: int) -> None:
    result = [Page(False, values, size, size) for values, size in sizes]
    rows = max_rows(result, budget, 64)
    owner = [index for index, (values, _) in enumerate(sizes) for _ in range(values)]

    def largest(rows: int) -> int:
        runs = [set(owner[start : start + rows]) for start in range(max(1, len(owner) - rows + 1))]
        return max(sum(sizes[index][1] for index in run) for run in runs)

    assert rows == 1 or largest(rows) <= budget
    assert rows == 64 or largest(2 * rows) > budget


def test_a_page_too_large_is_told_and_the_next_row_group_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())]), use_dictionary=False) as writer:
        for text in ("first", "x" * 100_000, "last"):
            writer.write_table(pa.table({"text": [text]}))
    monkeypatch.setattr(tables, "MAX_BUFFERED_BYTES", 50_000)
    result = read_records(path)
    assert [record.text for record in result] == ["first", "", "last"]
    assert "smaller pages" in result[1].problem and result[1].location == "row group 1, of 1 rows"
