"""Tables: what one format alone does with them, what is refused, and rows as tensors.

That columns come back from every format is in contract/test_formats.py.
"""

import json
import tarfile

import numpy as np
import pytest

from forebay.cli import main
from forebay.convert import convert
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import open_dataset
from forebay.dataset.slices import open_slice, write_rows_slice
from forebay.errors import DatasetError, UsageError
from forebay.formats.base import get_format
from forebay.formats.conversion import ConvertOptions
from forebay.formats.sources import open_table, verify_table
from support.foreign_datasets import made_table, read_table
from support.preparing import write_jsonl


def test_a_changed_byte_is_seen_when_reading_again(tmp_path):
    source = made_table({"a": list(range(100))})
    out = tmp_path / "t.jsonl"
    written = get_format("jsonl").write_rows(source, out, ConvertOptions())
    verify_table(out, written)
    out.write_bytes(out.read_bytes().replace(b'"a":42', b'"a":43'))
    with pytest.raises(DatasetError, match=r"other values in a, when reading them again"):
        verify_table(out, written)


# To rows.


def test_conversations_keep_their_masked_labels(tmp_path):
    rows = [{"input_ids": [5, 6, 7][: n + 1], "labels": [-100, 6, 7][: n + 1]} for n in range(3)]
    write_jsonl(tmp_path / "chat.jsonl", rows)
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


@pytest.mark.parametrize("name, start", [("t.jsonl.gz", b"\x1f\x8b"), ("t.tar.zst", b"\x28\xb5\x2f\xfd")])
def test_a_suffix_names_the_compression(tmp_path, name, start):
    convert(made_table({"a": [1, 2, 3]}), tmp_path / name, "webdataset" if "tar" in name else "jsonl", ConvertOptions())
    assert (tmp_path / name).read_bytes().startswith(start)
    assert read_table(tmp_path / name)["a"].to_pylist() == [1, 2, 3]


def test_rows_of_a_slice(tmp_path):
    """As many as fit with the header as it is."""
    for slice_bytes, expected in ((424, [40, 40, 20]), (4000, [100])):
        out = tmp_path / str(slice_bytes)
        convert(made_table({"x": list(range(100))}), out, "forebay", ConvertOptions(slice_bytes=slice_bytes))
        assert [open_slice(path).num_rows for path in sorted((out / "slices").iterdir())] == expected


# Arrays.


def test_arrays_of_npz_and_npy(tmp_path):
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
    assert table.schema.names == ["features", "labels"] and table.num_rows == 10
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(DatasetError, match="expected rows of numbers in C order, got object"):
        open_table(tmp_path / "objects.npy")


# What others wrote.


def test_a_source_is_verified_by_its_hashes(tmp_path):
    path = tmp_path / "rows/0.safetensors"
    path.parent.mkdir()
    write_rows_slice(path, {"x": np.arange(9)})
    import_slices(path.parent)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DatasetError, match=r"bytes \[0, "):
        convert(path.parent, tmp_path / "y", "parquet", ConvertOptions())
    assert not (tmp_path / "y").exists()


# Damage, and what does not fit.


@pytest.mark.parametrize("to", ["parquet", "arrow", "jsonl", "tfrecord", "webdataset"])
def test_a_file_that_is_cut_is_an_error(tmp_path, to):
    path = tmp_path / "t.x"
    convert(made_table({"text": ["word"] * 300, "n": list(range(300))}), path, to, ConvertOptions())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 - 3])
    with pytest.raises(DatasetError, match=r"t\.x"):
        read_table(path)


def test_lines_that_do_not_fit(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": 1}\n{"a": 2\n')
    with pytest.raises(DatasetError, match=r"t.jsonl, line 2: expected JSON"):
        open_table(path)
    path.write_text('{"a": 1}\n{"a": "x"}\n')
    with pytest.raises(DatasetError, match=r"t.jsonl, line 1 and after: expected fields of one type each"):
        open_table(path)
    path.write_text('{"a": 1}\n\n{"b": {"c": [1.5]}}\n')
    assert read_table(path).to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": {"c": [1.5]}}]
    with pytest.raises(DatasetError, match=r"JSON: expected finite numbers, got infinity or NaN \(x, row 1\)"):
        convert(made_table({"x": [1.0, float("nan")]}), tmp_path / "o", "jsonl", ConvertOptions())


def test_a_column_that_comes_late_is_no_silent_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.formats.tables.INFERRED_BYTES", 1000)
    lines = [{"a": i} for i in range(5000)] + [{"a": 1, "b": 2}]
    write_jsonl(tmp_path / "t.jsonl", lines)
    with pytest.raises(DatasetError, match=r"line 4097 and after: expected columns a, .* got b: int64"):
        convert(tmp_path / "t.jsonl", tmp_path / "o.parquet", "parquet", ConvertOptions())
    assert not (tmp_path / "o.parquet").exists()


def test_files_of_two_formats_are_two_tables(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "README.md").write_text("words\n")
    assert open_table(tmp_path) is not None
    (tmp_path / "b.csv").write_text("a\n1\n")
    with pytest.raises(UsageError, match=r"expected files of one format, got jsonl \(a.jsonl …\), csv \(b.csv …\)"):
        open_table(tmp_path)


# No copy is made.


def test_members_of_a_tar_of_others(tmp_path):
    (tmp_path / "d").mkdir()
    for kind, text in {"txt": "hello", "json": '{"width": 3, "tags": ["x"]}', "cls": "7"}.items():
        (tmp_path / f"d/a.{kind}").write_text(text)
    np.save(tmp_path / "d/a.m.npy", np.eye(2, dtype=np.float32))
    with tarfile.open(tmp_path / "other", "w") as tar:
        tar.add(tmp_path / "d", "d")
    row = read_table(tmp_path / "other").to_pylist()[0]
    assert (row["__key__"], row["text"], row["label"], row["width"], row["tags"]) == ("d/a", "hello", 7, 3, ["x"])


def test_what_a_directory_holds_beside_tables_is_named(tmp_path, capsys):
    folder = tmp_path / "in"
    (folder / "state").mkdir(parents=True)
    for path in (folder / "a.jsonl", folder / "state/state.json", folder / ".hidden.jsonl", tmp_path / "b.jsonl"):
        path.write_text('{"n": 1, "text": "a"}\n')
    (folder / "paper.pdf").write_bytes(b"%PDF-1.4\0\1\2")
    (folder / "b.jsonl").symlink_to(tmp_path / "b.jsonl")
    assert main(["convert", str(folder), str(tmp_path / "out"), "--to", "forebay", "--json", "--quiet"]) == 0
    message = capsys.readouterr()
    result = json.loads(message.out)
    assert message.err.splitlines()[-4] == f"note: {result['notes'][0]}" and "numbers (1): text;" in message.err
    assert result["rows"] == 2 and sorted(result["skipped"].values()) == [1, 1, 1]
    assert message.err.count("forebay: left out 1: ") == 3 and "paper.pdf" in message.err
