"""MDS and LitData: gaps, columns beside tokens, streams that are read once, directories merged into one dataset."""

import json
from collections.abc import Iterator

import pyarrow as pa
import pytest

from forebay.convert import convert
from forebay.errors import DatasetError, UsageError
from forebay.formats.base import get_format
from forebay.formats.blocks import merge_indexes
from forebay.formats.conversion import ConvertOptions, TableSource
from forebay.formats.sources import open_table, table_of_stream
from support.doctor_cases import reports
from support.foreign_datasets import made_table, read_table, read_tokens

BOTH = pytest.mark.parametrize("to", ["mds", "litdata"])
NONE = ConvertOptions()


@BOTH
def test_a_stream_without_gaps_is_read_once(tmp_path, to):
    """A caller that has its rows only once declares the fields as not nullable."""
    schema = pa.schema([pa.field("text", pa.large_string(), nullable=False), pa.field("n", pa.int64(), nullable=False)])
    reads = 0

    def batches(rows):
        nonlocal reads
        reads += 1
        yield pa.RecordBatch.from_pylist(rows, schema)

    rows = [{"text": "a", "n": 1}, {"text": "b", "n": 2}]
    source = TableSource("stream", schema, None, lambda: batches(rows))
    written = get_format(to).write_rows(source, tmp_path / "out", NONE)
    assert (written.num_rows, reads) == (2, 1)
    assert read_table(tmp_path / "out").to_pylist() == rows
    gap = TableSource("stream", schema, None, lambda: batches([{"text": None, "n": 1}]))
    with pytest.raises(DatasetError, match="expected a value in every row"):
        get_format(to).write_rows(gap, tmp_path / "gap", NONE)


@BOTH
def test_columns_beside_tokens_are_kept_and_an_empty_table_is_an_empty_dataset(tmp_path, to):
    ids = pa.array([[1, 2], [3]], pa.list_(pa.uint16()))
    convert(made_table({"input_ids": ids, "url": ["u", "v"]}), tmp_path / "a.parquet", "parquet", NONE)
    convert(tmp_path / "a.parquet", tmp_path / "out", to, NONE)
    rows = [{"url": "u", "input_ids": [1, 2]}, {"url": "v", "input_ids": [3]}]
    assert read_table(tmp_path / "out").to_pylist() == rows
    assert read_tokens(tmp_path / "out") == [[1, 2], [3]]
    convert(tmp_path / "out", tmp_path / "b.jsonl", "jsonl", NONE)
    assert [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()] == rows
    assert convert(made_table({"text": pa.array([], pa.string())}), tmp_path / "empty", to, NONE).num_bytes
    assert read_table(tmp_path / "empty").to_pydict() == {}
    for name in ("a.parquet", "b.jsonl"):
        (tmp_path / name).unlink()
    with pytest.raises(UsageError, match="got some in directories"):
        open_table(tmp_path)


@BOTH
def test_values_that_they_cannot_hold_are_refused(tmp_path, to):
    for columns, match in [
        ({"blob": [b"x", None]}, "expected bytes in every row of 'blob'"),
        ({}, "expected a table with columns"),
        ({"x": [[1.0, None], [float("inf")]]}, "expected finite numbers"),
    ]:
        with pytest.raises((UsageError, DatasetError), match=match):
            convert(made_table(columns), tmp_path / "out", to, NONE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to, key, match", [("mds", "column_encodings", "pkl"), ("litdata", "data_format", "pickle")])
def test_columns_that_run_code_are_refused(tmp_path, to, key, match):
    convert(made_table({"text": ["a"]}), tmp_path / "out", to, NONE)
    index = tmp_path / "out" / "index.json"
    index.write_text(index.read_text().replace('"str"', f'"{match}"'))
    assert key in index.read_text()
    with pytest.raises(DatasetError, match="without running code"):
        open_table(tmp_path / "out")


SCHEMA = pa.schema([("text", pa.large_string()), ("url", pa.large_string()), ("quality", pa.float64())])


def stream(part: int) -> Iterator[pa.RecordBatch]:
    for i in (2 * part, 2 * part + 1):
        yield pa.record_batch([[f"text {i}"], [f"u{i}"], [i / 2 if i else float("nan")]], schema=SCHEMA)


@BOTH
@pytest.mark.parametrize("compress", ["", "zstd"])
def test_directories_that_were_written_apart_become_one_dataset(tmp_path, to, compress):
    merged = tmp_path / "merged"
    merged.mkdir()

    def written(name, source):
        get_format(to).write_rows(source, tmp_path / name, ConvertOptions(compress=compress))
        index = tmp_path / name / "index.json"
        for path in (tmp_path / name).iterdir():
            if path != index:
                path.rename(merged / f"{name}.{path.name}")
        return json.loads(index.read_bytes())

    parts = {f"{i}.": written(str(i), table_of_stream(SCHEMA, stream(i), to)) for i in range(3)}
    (merged / "index.json").write_bytes(merge_indexes(parts))
    assert read_table(merged)["text"].to_pylist() == [f"text {i}" for i in range(6)]
    (report,) = reports(merged)
    assert report.ok and report.metadata["rows"] == 6
    if to == "litdata":  # Its readers keep what they have by this number.
        numbers = {json.loads(merge_indexes({"0.": index}))["updated_at"] for index in parts.values()}
        assert len(numbers) == 3
    with pytest.raises(DatasetError, match=r"other\.: its columns are not those of 0\."):
        merge_indexes({**parts, "other.": written("other", made_table({"text": ["a"]}))})
