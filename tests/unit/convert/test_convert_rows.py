"""Tables from one format to another, and to rows: what comes back is what was there."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.cli import main
from forebay.convert import convert
from forebay.dataset.reader import open_dataset
from forebay.dataset.slices import open_slice
from forebay.errors import DatasetError, UsageError
from forebay.formats.base import get_format
from forebay.formats.conversion import ConvertOptions, TableSource
from forebay.formats.sources import open_table, verify_table
from forebay.formats.tables import TableDigest
from forebay.formats.tfrecord import integers, varints
from forebay.load.loader import Loader
from support.paths import TESTS

DATA = TESTS / "shared" / "data"
ROWS = 600


def a_table(columns: dict[str, Any], batch: int = 400) -> TableSource:
    table = pa.table(columns)
    return TableSource("made", table.schema, len(table), lambda: iter(table.to_batches(batch)))


def num_rows(table: TableSource) -> int:
    return sum(batch.num_rows for batch in table.batches())


def tensors(values: np.ndarray) -> pa.Array:
    return pa.FixedShapeTensorArray.from_numpy_ndarray(values)


def mixed() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    lists = [rng.integers(-(2**62), 2**62, n).tolist() for n in rng.integers(0, 9, ROWS)]
    return {
        "text": [f"row {i} “ä”, with a comma,\nand a line\x00" if i % 3 else "" for i in range(ROWS)],
        "label": pa.array(rng.integers(0, 1000, ROWS), pa.int64()),
        "score": pa.array(rng.random(ROWS).astype(np.float32)),
        "some": pa.array([None if i % 5 == 0 else i for i in range(ROWS)], pa.int64()),
        "ids": pa.array(lists, pa.list_(pa.int64())),
        "pixels": tensors(rng.integers(0, 256, (ROWS, 3, 4, 5), dtype=np.uint8)),
        "digits": [f"{i:05d}" for i in range(ROWS)],
        "flag": [i % 2 == 0 for i in range(ROWS)],
    }


def read(path: Path) -> pa.Table:
    source = open_table(path)
    assert source is not None
    return pa.Table.from_batches(list(source.batches()), source.schema)


@pytest.mark.parametrize("to", ["parquet", "arrow", "jsonl", "tfrecord", "webdataset", "mds", "litdata"])
def test_every_value_comes_back_from_every_format(tmp_path: Path, to: str) -> None:
    source = a_table(mixed())
    report = convert(source, tmp_path / "out", to, ConvertOptions(slice_bytes=20_000))
    assert report.written.num_rows == ROWS
    assert report.num_bytes
    assert len(report.written.files) > 1
    back = read(tmp_path / "out")
    assert back.column("text").to_pylist() == mixed()["text"]
    ids = back.column("ids").to_pylist()
    assert ids == mixed()["ids"].to_pylist()


@pytest.mark.parametrize("to", ["jsonl", "webdataset"])
@pytest.mark.parametrize(("suffix", "start"), [(".gz", b"\x1f\x8b"), (".zst", b"\x28\xb5\x2f\xfd")])
def test_lines_and_archives_are_packed_as_the_name_says(tmp_path: Path, to: str, suffix: str, start: bytes) -> None:
    name = f"t.{ {'jsonl': 'jsonl', 'webdataset': 'tar'}[to] }{suffix}"
    convert(a_table({"a": [1, 2, 3]}), tmp_path / name, to, ConvertOptions())
    assert (tmp_path / name).read_bytes().startswith(start)
    assert read(tmp_path / name).column("a").to_pylist() == [1, 2, 3]


def test_parquet_with_snappy_and_feather_of_others(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([1.5, 2.5]), "y": ["a", "b"]})
    pq.write_table(table, tmp_path / "a.parquet", compression="snappy")
    assert read(tmp_path / "a.parquet").equals(table)
    convert(tmp_path / "a.parquet", tmp_path / "b.arrow", "arrow", ConvertOptions(compress="zstd"))
    assert read(tmp_path / "b.arrow").equals(table)


def test_a_changed_byte_is_seen_when_reading_again(tmp_path: Path) -> None:
    source = a_table({"a": list(range(100))})
    out = tmp_path / "t.jsonl"
    written = get_format("jsonl").write_rows(source, out, ConvertOptions())
    verify_table(out, written)
    out.write_bytes(out.read_bytes().replace(b'"a":42', b'"a":43'))
    with pytest.raises(DatasetError, match=r"other values in a, when reading them again"):
        verify_table(out, written)


VALUES = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))
LISTS = st.lists(st.one_of(st.none(), st.lists(st.floats(width=32), max_size=4)), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(LISTS, st.data())
def test_the_digest_knows_no_batches_and_no_types(rows: list[Any], data: st.DataObject) -> None:
    table = pa.table({"x": pa.array(rows, pa.list_(pa.float32())), "i": list(range(len(rows)))})
    first = TableDigest()
    for batch in table.to_batches():
        first.add(batch)
    cut = data.draw(st.integers(0, len(rows)))
    wide = table.cast(pa.schema([("x", pa.large_list(pa.float64())), ("i", pa.float64())]))
    second = TableDigest()
    for part in (wide.slice(0, cut), wide.slice(cut)):
        for batch in part.to_batches():
            second.add(batch)
    assert first.columns() == second.columns()
    if any(rows):
        changed = TableDigest()
        changed.add(pa.table({"x": pa.array([*rows[:-1], [0.5]], pa.list_(pa.float32()))}).to_batches()[0])
        assert (changed.columns()["x"] == first.columns()["x"]) == (rows[-1] == [0.5])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50))
def test_varints_there_and_back(numbers: list[int]) -> None:
    data, stops = varints(np.array(numbers, np.int64))
    assert integers(data).tolist() == numbers
    assert (int(stops[-1]) if numbers else 0) == len(data)


# To rows.


def test_rows_are_the_tensors_that_a_loader_gives(tmp_path: Path) -> None:
    columns = {name: mixed()[name] for name in ("text", "label", "ids", "pixels", "flag", "score")}
    options = ConvertOptions(
        slice_bytes=30_000, name="m", tensors={"label": "u16", "pixels": "f16", "ids": "int64"}, seq_len=8
    )
    report = convert(a_table(columns), tmp_path / "ds", "forebay", options)
    dataset = open_dataset(tmp_path / "ds")
    assert dataset.verify().ok and dataset.manifest.slices > 1 and dataset.manifest.rows == ROWS
    assert report.written.notes == ("left out, being no numbers: text; --to parquet or jsonl keeps them",)
    reported = dataset.manifest.lineage["converted"]
    assert reported["tensors"]["pixels"] == ["F16", 3, 4, 5]
    assert reported["changed"] == {"label": ["I64", "U16"], "pixels": ["U8", "F16"]}
    pixels = columns["pixels"].to_numpy_ndarray()
    seen = []
    for batch in Loader(tmp_path / "ds", batch_size=64, seed=3):
        seen += batch.sample_ids.tolist()
        assert batch.tensors["label"].dtype == np.uint16
        assert (batch.tensors["pixels"] == pixels[batch.sample_ids]).all()
        for row, index in zip(batch.tensors["ids"], batch.sample_ids.tolist()):
            ids = columns["ids"][index].as_py()
            assert row.tolist() == ids + [0] * (8 - len(ids))
    assert sorted(seen) == list(range(ROWS))


def test_conversations_keep_their_masked_labels(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7][: n + 1], "labels": [-100, 6, 7][: n + 1]} for n in range(3)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ConvertOptions(seq_len=4, eos_id=2, tensors={"input_ids": "u16", "labels": "i32"})
    convert(tmp_path / "chat.jsonl", tmp_path / "ds", "forebay", options)
    item = open_dataset(tmp_path / "ds").open_slice(0)
    assert item.tensors["input_ids"].tolist() == [[5, 2, 2, 2], [5, 6, 2, 2], [5, 6, 7, 2]]
    assert item.tensors["labels"].tolist() == [[-100] * 4, [-100, 6, -100, -100], [-100, 6, 7, -100]]
    assert item.tensors["attention_mask"].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert item.dtypes == {"input_ids": "U16", "labels": "I32", "attention_mask": "U8"}
    with pytest.raises(DatasetError, match=r"at most 2 values in a row, got 3 \(row 2\)"):
        convert(
            tmp_path / "chat.jsonl", tmp_path / "b", "forebay", ConvertOptions(seq_len=2, tensors={"labels": "i32"})
        )


@pytest.mark.parametrize("kind", ["u2", "u4", "i4", "i8"])
def test_tensors_of_every_integer_type_survive_bit_by_bit(tmp_path: Path, kind: str) -> None:
    info = np.iinfo(kind)
    rng = np.random.default_rng(7)
    ids = rng.integers(info.min, info.max, (500, 16), dtype=kind, endpoint=True)
    source = a_table({"input_ids": tensors(ids), "labels": tensors(ids[:, ::-1].copy())})
    convert(source, tmp_path / "ds", "forebay", ConvertOptions(slice_bytes=20_000, tensors={"labels": info.dtype.name}))
    for batch in Loader(tmp_path / "ds", batch_size=50):
        assert batch.tensors["input_ids"].dtype == np.dtype(kind)
        assert (batch.tensors["input_ids"] == ids[batch.sample_ids]).all()
        assert (batch.tensors["labels"] == ids[batch.sample_ids, ::-1]).all()


def test_a_slice_made_with_plain_safetensors_code(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    arrays = {"images": np.arange(60, dtype=np.uint8).reshape(5, 1, 3, 4), "labels": np.arange(5)}
    (tmp_path / "in").mkdir()
    for index in range(2):
        numpy.save_file(arrays, tmp_path / "in" / f"part-{index}.safetensors")
    convert(tmp_path / "in", tmp_path / "t.parquet", "parquet", ConvertOptions())
    convert(tmp_path / "t.parquet", tmp_path / "ds", "forebay", ConvertOptions())
    item = open_dataset(tmp_path / "ds").open_slice(0)
    assert (item.tensors["images"] == np.concatenate([arrays["images"]] * 2)).all()
    assert numpy.load_file(item.path)["labels"].tolist() == [*range(5), *range(5)]


def test_rows_of_a_slice(tmp_path: Path) -> None:
    convert(a_table({"x": list(range(100))}), tmp_path / "f", "forebay", ConvertOptions(slice_bytes=4096 + 8 * 40))
    sizes = [open_slice(path).num_rows for path in sorted((tmp_path / "f" / "slices").iterdir())]
    assert sizes == [40, 40, 20]


# Arrays.


def test_arrays_of_npz_and_npy(tmp_path: Path) -> None:
    x, y = np.arange(60.0).reshape(10, 3, 2), np.arange(10)
    np.savez_compressed(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    with pytest.raises(UsageError, match="--set column=x_train,y_train"):
        open_table(tmp_path / "d.npz")
    report = convert(tmp_path / "d.npz", tmp_path / "ds", "forebay", ConvertOptions(column="x_train,y_train"))
    assert report.written.num_rows == 10
    assert (open_dataset(tmp_path / "ds").open_slice(0).tensors["x_train"] == x).all()
    (tmp_path / "n").mkdir()
    np.save(tmp_path / "n" / "features.npy", x)
    np.save(tmp_path / "n" / "labels.npy", y)
    table = open_table(tmp_path / "n")
    assert table is not None and table.schema.names == ["features", "labels"] and table.num_rows == 10
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(DatasetError, match="expected rows of numbers in C order, got object"):
        open_table(tmp_path / "objects.npy")


# What others wrote.


def test_the_samples_of_webdataset() -> None:
    if not DATA.is_dir():
        pytest.skip("shared/data is not there")
    for path in sorted((DATA / "webdataset").iterdir()):
        if path.name in ("sample.tgz",):
            continue
        table = open_table(path)
        assert table is not None and num_rows(table) > 0, path


def test_the_records_of_tensorflow() -> None:
    path = DATA / "tfrecord" / "example.tfrecord"
    if not path.is_file():
        pytest.skip("shared/data is not there")
    table = open_table(path)
    assert table is not None and num_rows(table) > 0


def test_what_hugging_face_saved(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b", "c"], "n": [1, 2, 3]})
    for index in range(2):
        with pa.OSFile(str(tmp_path / f"data-{index}.arrow"), "wb") as file, pa.ipc.new_stream(
            file, table.schema
        ) as writer:  # fmt: skip
            writer.write_table(table)
    state = {"_data_files": [{"filename": f"data-{index}.arrow"} for index in range(2)], "_fingerprint": "1"}
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "dataset_info.json").write_text("{}")
    source = open_table(tmp_path)
    assert source is not None and source.format == "arrow"
    assert num_rows(source) == 6


# Damage, and what does not fit.


@pytest.mark.parametrize("to", ["parquet", "arrow", "jsonl", "tfrecord", "webdataset"])
def test_a_file_that_is_cut_is_an_error(tmp_path: Path, to: str) -> None:
    convert(a_table({"text": ["word"] * 300, "n": list(range(300))}), tmp_path / "t.x", to, ConvertOptions())
    data = (tmp_path / "t.x").read_bytes()
    (tmp_path / "t.x").write_bytes(data[: len(data) // 2 - 3])
    with pytest.raises(DatasetError, match=r"t\.x"):
        source = open_table(tmp_path / "t.x")
        assert source is not None
        num_rows(source)


def test_lines_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": 1}\n{"a": 2\n')
    with pytest.raises(DatasetError, match=r"t.jsonl, line 2: expected JSON"):
        open_table(path)
    path.write_text('{"a": 1}\n{"a": "x"}\n')
    with pytest.raises(DatasetError, match=r"t.jsonl, line 1 and after: expected fields of one type each"):
        open_table(path)
    path.write_text('{"a": 1}\n\n{"b": {"c": [1.5]}}\n')
    assert read(path).to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": {"c": [1.5]}}]


def test_a_column_that_comes_late_is_no_silent_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.formats.tables.INFERRED_BYTES", 1000)
    lines = [{"a": i} for i in range(5000)] + [{"a": 1, "b": 2}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DatasetError, match=r"line 4097 and after: expected columns a, .* got b: int64"):
        convert(tmp_path / "t.jsonl", tmp_path / "o.parquet", "parquet", ConvertOptions())
    assert not (tmp_path / "o.parquet").exists()


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"JSONL: expected columns that it can hold, got b: binary"):
        convert(a_table({"b": [b"x"]}), tmp_path / "o", "jsonl", ConvertOptions())
    with pytest.raises(DatasetError, match=r"JSON: expected finite numbers, got another \(x, row 1\)"):
        convert(a_table({"x": [1.0, float("nan")]}), tmp_path / "o", "jsonl", ConvertOptions())
    with pytest.raises(DatasetError, match=r"TFRecord: expected floats that fit F32, got 0.1 \(x, value 0"):
        convert(a_table({"x": [0.1]}), tmp_path / "o", "tfrecord", ConvertOptions())
    assert not list(tmp_path.iterdir())


def test_files_of_two_formats_are_two_tables(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "README.md").write_text("words\n")
    assert open_table(tmp_path) is not None
    (tmp_path / "b.csv").write_text("a\n1\n")
    with pytest.raises(UsageError, match=r"expected files of one format, got jsonl \(a.jsonl …\), csv \(b.csv …\)"):
        open_table(tmp_path)


# No copy is made.


def addresses(path: Path) -> list[range]:
    """Where this process has a file mapped."""
    result = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            start, stop = line.split()[0].split("-")
            result.append(range(int(start, 16), int(stop, 16)))
    return result


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_columns_lie_in_the_map_of_their_file(tmp_path: Path) -> None:
    values = np.arange(300_000, dtype=np.int64)
    for to, name in (("arrow", "t.arrow"), ("forebay", "ds")):
        convert(a_table({"x": values}, batch=300_000), tmp_path / name, to, ConvertOptions())
        source = open_table(tmp_path / name)
        assert source is not None
        path = tmp_path / name if to == "arrow" else open_dataset(tmp_path / name).slice_path(0)
        for batch in source.batches():
            address = batch.column("x").buffers()[1].address
            assert any(address in item for item in addresses(path))
    item = open_dataset(tmp_path / "ds").open_slice(0)
    assert any(item.tensors["x"].ctypes.data in location for location in addresses(item.path))


def test_members_of_a_tar_of_others(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "a.json").write_text('{"width": 3, "tags": ["x"]}')
    (tmp_path / "a.cls").write_text("7")
    np.save(tmp_path / "m.npy", np.eye(2, dtype=np.float32))
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name, member in (
            ("d/a.txt", "a.txt"),
            ("d/a.json", "a.json"),
            ("d/a.cls", "a.cls"),
            ("d/a.m.npy", "m.npy"),
        ):
            tar.add(tmp_path / member, name)
    shutil.copy(tmp_path / "t.tar", tmp_path / "other")
    row = read(tmp_path / "other").to_pylist()[0]
    assert (row["__key__"], row["text"], row["label"], row["width"], row["tags"]) == ("d/a", "hello", 7, 3, ["x"])


def test_what_cannot_be_rows_is_said(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"column 'some': expected a value in every row, got none \(row 0\)"):
        convert(a_table({"some": mixed()["some"]}), tmp_path / "a", "forebay", ConvertOptions())
    with pytest.raises(DatasetError, match=r"column 'ids': expected rows of one shape.*--seq-len N"):
        convert(a_table({"ids": mixed()["ids"]}), tmp_path / "a", "forebay", ConvertOptions())
    with pytest.raises(UsageError, match=r"expected columns of numbers, got text: string"):
        convert(a_table({"text": ["a"]}), tmp_path / "a", "forebay", ConvertOptions())
    with pytest.raises(UsageError, match=r"numbers called absent, got label"):
        convert(a_table({"label": [1]}), tmp_path / "a", "forebay", ConvertOptions(tensors={"absent": "u8"}))
    assert not list(tmp_path.iterdir())


def test_labels_beside_tokens_are_kept_or_said_to_be_left_out(tmp_path: Path) -> None:
    """Rows with labels stay rows; where a format holds tokens alone, the report says what it does not hold."""
    path = tmp_path / "chat.jsonl"
    path.write_text(
        "".join(json.dumps({"input_ids": [i, 2, 3], "labels": [-100, 2, 3], "url": "x"}) + "\n" for i in range(5))
    )
    report = convert(path, tmp_path / "rows", "forebay", ConvertOptions())
    assert open_dataset(tmp_path / "rows").manifest.layout == "rows" and report.written.num_rows == 5
    assert open_dataset(tmp_path / "rows").open_slice(0).tensors["labels"][0].tolist() == [-100, 2, 3]
    report = convert(path, tmp_path / "pairs", "megatron", ConvertOptions())
    assert "columns left out: labels, url" in report.written.notes
    report = convert(path, tmp_path / "tokens", "forebay", ConvertOptions(column="input_ids"))
    assert open_dataset(tmp_path / "tokens").manifest.layout == "tokens"


def test_what_a_directory_holds_beside_tables_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    (folder / "state").mkdir(parents=True)
    for path in (folder / "a.jsonl", folder / "state/state.json", folder / ".hidden.jsonl", tmp_path / "b.jsonl"):
        path.write_text('{"n": 1}\n')
    (folder / "paper.pdf").write_bytes(b"%PDF-1.4\0\1\2")
    (folder / "b.jsonl").symlink_to(tmp_path / "b.jsonl")
    assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "jsonl", "--json", "--quiet"]) == 0
    message = capsys.readouterr()
    result = json.loads(message.out)
    assert result["rows"] == 2 and sorted(result["skipped"].values()) == [1, 1, 1]
    assert message.err.count("forebay: left out 1: ") == 3 and "paper.pdf" in message.err
