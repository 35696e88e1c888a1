"""MDS and LitData: rows with columns of every kind, gaps, streams that are read once, damage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from forebay.convert import convert
from forebay.errors import DatasetError, UsageError
from forebay.formats.base import get_format
from forebay.formats.blocks import merge_indexes
from forebay.formats.conversion import ConvertOptions, TableSource, TokenPart, TokenSource
from forebay.formats.sources import open_source, open_table, table_of_stream

BOTH = pytest.mark.parametrize("to", ["mds", "litdata"])
TOKENS = np.arange(3000, dtype=np.uint32) * 41 % 70_000


def a_table(columns: dict[str, Any], batch: int = 40) -> TableSource:
    table = pa.table(columns)
    return TableSource("made", table.schema, len(table), lambda: iter(table.to_batches(batch)))


def read(path: Path) -> dict[str, list[Any]]:
    source = open_table(path)
    assert source is not None
    return pa.Table.from_batches(list(source.batches()), source.schema).to_pydict()


def tokens() -> TokenSource:
    ends = np.array([10, 10, 2000, 3000], np.uint64)
    return TokenSource("made", "U32", 3000, 4, lambda: iter([TokenPart(TOKENS, ends)]))


COLUMNS: dict[str, Callable[[], Any]] = {
    "text": lambda: [f"row {i} “ä”" * (i % 3) for i in range(100)],
    "category": lambda: pa.array([f"c{i % 3}" for i in range(100)]).dictionary_encode(),
    "url": lambda: [None if i % 5 == 0 else f"u{i}" for i in range(100)],
    "score": lambda: pa.array([i / 7 for i in range(100)], pa.float32()),
    "half": lambda: pa.array(np.arange(100, dtype=np.float16) / 3),
    "small": lambda: pa.array(range(100), pa.uint8()),
    "large": lambda: pa.array([(1 << 63) - 1 - i for i in range(100)], pa.uint64()),
    "flag": lambda: [i % 2 == 0 for i in range(100)],
    "blob": lambda: [bytes([i]) * (i % 4) for i in range(100)],
    "ids": lambda: pa.array([list(range(i % 7)) for i in range(100)], pa.list_(pa.uint16())),
    "some": lambda: [None if i % 3 == 0 else [1.5, None][: i % 3] for i in range(100)],
    "words": lambda: [["a", "ä"][: i % 3] for i in range(100)],
    "nested": lambda: [{"a": [i, None], "b": {"c": str(i)}} for i in range(100)],
    "pixels": lambda: pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(600, dtype=np.uint8).reshape(100, 2, 3)),
    "fixed": lambda: pa.array([[i, -i] for i in range(100)], pa.list_(pa.int32(), 2)),
}


@BOTH
@pytest.mark.parametrize("compress", ["", "zstd"])
def test_columns_of_every_kind_come_back(tmp_path: Path, to: str, compress: str) -> None:
    table = a_table({name: create() for name, create in COLUMNS.items()})
    report = convert(table, tmp_path / "out", to, ConvertOptions(slice_bytes=6000, compress=compress))
    assert report.written.num_rows == 100 and len(report.written.files) > 3
    back = read(tmp_path / "out")
    for name, create in COLUMNS.items():
        if name != "pixels":
            assert back[name] == pa.array(create()).to_pylist(), name
    assert [value.tolist() if hasattr(value, "tolist") else value for value in back["pixels"]][1] == [
        6,
        7,
        8,
        9,
        10,
        11,
    ]


@BOTH
def test_a_stream_without_gaps_is_read_once(tmp_path: Path, to: str) -> None:
    """A caller that has its rows only once declares the fields as not nullable."""
    schema = pa.schema([pa.field("text", pa.large_string(), nullable=False), pa.field("n", pa.int64(), nullable=False)])
    reads = 0

    def batches(rows: list[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
        nonlocal reads
        reads += 1
        yield pa.RecordBatch.from_pylist(rows, schema)

    rows = [{"text": "a", "n": 1}, {"text": "b", "n": 2}]
    source = TableSource("stream", schema, None, lambda: batches(rows))
    written = get_format(to).write_rows(source, tmp_path / "out", ConvertOptions())
    assert (written.num_rows, reads) == (2, 1)
    assert read(tmp_path / "out") == {"text": ["a", "b"], "n": [1, 2]}
    gap = TableSource("stream", schema, None, lambda: batches([{"text": None, "n": 1}]))
    with pytest.raises(DatasetError, match="expected a value in every row"):
        get_format(to).write_rows(gap, tmp_path / "gap", ConvertOptions())


@BOTH
@pytest.mark.parametrize("compress", ["", "zstd"])
def test_tokens_come_back_with_their_documents(tmp_path: Path, to: str, compress: str) -> None:
    report = convert(tokens(), tmp_path / "out", to, ConvertOptions(slice_bytes=5000, compress=compress))
    assert (report.written.num_documents, report.written.num_rows) == (4, 4)
    rows = convert(tmp_path / "out", tmp_path / "rows", "jsonl", ConvertOptions())
    assert rows.written.num_rows == 4
    with pytest.raises(UsageError, match=r"--set compress: expected one of zstd, got lz4"):
        convert(tokens(), tmp_path / "b", to, ConvertOptions(compress="lz4"))


@BOTH
def test_columns_beside_tokens_are_kept(tmp_path: Path, to: str) -> None:
    ids = pa.array([[1, 2], [3]], pa.list_(pa.uint16()))
    convert(a_table({"input_ids": ids, "url": ["u", "v"]}), tmp_path / "a.parquet", "parquet", ConvertOptions())
    convert(tmp_path / "a.parquet", tmp_path / "out", to, ConvertOptions())
    assert read(tmp_path / "out") == {"url": ["u", "v"], "input_ids": [[1, 2], [3]]}
    source = open_source(tmp_path / "out", ConvertOptions(), "megatron")
    assert isinstance(source, TokenSource) and source.num_tokens == 3
    convert(tmp_path / "out", tmp_path / "b.jsonl", "jsonl", ConvertOptions())
    lines = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert lines == [{"url": "u", "input_ids": [1, 2]}, {"url": "v", "input_ids": [3]}]


@BOTH
def test_an_empty_table_is_an_empty_dataset(tmp_path: Path, to: str) -> None:
    assert convert(a_table({"text": pa.array([], pa.string())}), tmp_path / "out", to, ConvertOptions()).num_bytes
    assert read(tmp_path / "out") == {}


@BOTH
def test_what_they_cannot_hold_is_refused(tmp_path: Path, to: str) -> None:
    for columns, match in [
        ({"at": [datetime(2020, 1, 1, tzinfo=UTC)]}, "expected columns that it can hold, got at: timestamp"),
        ({"blob": [b"x", None]}, "expected bytes in every row of 'blob'"),
        ({}, "expected a table with columns"),
    ]:
        with pytest.raises(UsageError, match=match):
            convert(a_table(columns), tmp_path / "out", to, ConvertOptions())
    with pytest.raises(DatasetError, match="expected finite numbers"):
        convert(a_table({"x": [[1.0, None], [float("inf")]]}), tmp_path / "out", to, ConvertOptions())
    with pytest.raises(UsageError, match="expected zstd or none"):
        convert(a_table({"x": [1]}), tmp_path / "out", to, ConvertOptions(compress="gzip"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("to", "key", "match"), [("mds", "column_encodings", "pkl"), ("litdata", "data_format", "pickle")]
)
def test_columns_that_run_code_are_refused(tmp_path: Path, to: str, key: str, match: str) -> None:
    convert(a_table({"text": ["a"]}), tmp_path / "out", to, ConvertOptions())
    index = tmp_path / "out" / "index.json"
    index.write_text(index.read_text().replace('"str"', f'"{match}"'))
    assert key in index.read_text()
    with pytest.raises(DatasetError, match="without running code"):
        open_table(tmp_path / "out")


SCHEMA = pa.schema([("text", pa.large_string()), ("url", pa.large_string()), ("quality", pa.float64())])


def stream(part: int) -> Iterator[pa.RecordBatch]:
    for i in (2 * part, 2 * part + 1):
        yield pa.record_batch([[f"text {i}"], [f"u{i}"], [i / 2 if i else float("nan")]], schema=SCHEMA)


@pytest.mark.parametrize("to", ["jsonl", "parquet", "arrow", "webdataset", "mds", "litdata"])
def test_a_stream_of_documents_is_written_without_a_dataset_between(tmp_path: Path, to: str) -> None:
    name = {"jsonl": "a.jsonl.zst", "parquet": "a.parquet", "arrow": "a.arrow", "webdataset": "a.tar"}.get(to, "a")
    source = table_of_stream(SCHEMA, stream(0), to)
    assert get_format(to).write_rows(source, tmp_path / name, ConvertOptions()).num_rows == 2
    got = read(tmp_path / name)
    assert (got["text"], got["url"], got["quality"][1]) == (["text 0", "text 1"], ["u0", "u1"], 0.5)
    missing = got["quality"][0]
    assert missing is None if to in ("jsonl", "webdataset") else missing != missing


@BOTH
@pytest.mark.parametrize("compress", ["", "zstd"])
def test_directories_that_were_written_apart_become_one_dataset(tmp_path: Path, to: str, compress: str) -> None:
    merged = tmp_path / "merged"
    merged.mkdir()

    def written(name: str, source: TableSource) -> Any:
        get_format(to).write_rows(source, tmp_path / name, ConvertOptions(compress=compress))
        index = tmp_path / name / "index.json"
        for path in (tmp_path / name).iterdir():
            if path != index:
                path.rename(merged / f"{name}.{path.name}")
        return json.loads(index.read_bytes())

    parts = {f"{i}.": written(str(i), table_of_stream(SCHEMA, stream(i), to)) for i in range(3)}
    (merged / "index.json").write_bytes(merge_indexes(parts))
    assert read(merged)["text"] == [f"text {i}" for i in range(6)]
    if to == "litdata":  # Its readers keep what they have by this number.
        numbers = {json.loads(merge_indexes({"0.": index}))["updated_at"] for index in parts.values()}
        assert len(numbers) == 3
    with pytest.raises(DatasetError, match=r"other\.: expected the columns of 0\., got others"):
        merge_indexes({**parts, "other.": written("other", a_table({"text": ["a"]}))})
