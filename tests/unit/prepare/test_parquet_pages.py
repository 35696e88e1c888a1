"""The pages of Parquet are known before they are read, and one that is too large is refused."""

import contextlib
import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.dataset.parquet_pages import Page, pages
from forebay.formats import parquet as tables
from forebay.formats.parquet import max_rows
from support.preparing import read_records


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    with contextlib.suppress(ValueError):
        assert sum(1 for _ in pages(io.BytesIO(data), 0, len(data))) <= len(data)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), max_size=12), st.integers(1, 120))
def test_no_run_of_rows_touches_more_than_the_budget(sizes, budget):
    result = [Page(False, values, size, size) for values, size in sizes]
    rows = max_rows(result, budget, 64)
    owner = [index for index, (values, _) in enumerate(sizes) for _ in range(values)]

    def largest(rows):
        runs = [set(owner[start : start + rows]) for start in range(max(1, len(owner) - rows + 1))]
        return max(sum(sizes[index][1] for index in run) for run in runs)

    assert rows == 1 or largest(rows) <= budget
    assert rows == 64 or largest(2 * rows) > budget


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_page_too_large_is_told_and_the_next_row_group_read(tmp_path, monkeypatch, version):
    path, schema = tmp_path / "x.parquet", pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema, use_dictionary=False, data_page_version=version) as writer:
        for text in ("first", "x" * 100_000, "last"):
            writer.write_table(pa.table({"text": [text]}))
    monkeypatch.setattr(tables, "MAX_BUFFERED_BYTES", 50_000)
    result = read_records(path)
    assert [record.text for record in result] == ["first", "", "last"]
    assert "smaller pages" in result[1].problem and result[1].location == "row group 1, of 1 rows"
