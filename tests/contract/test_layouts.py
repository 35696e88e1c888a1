"""One decision from the columns of a table to a layout: the same for every container, in place and converted."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from forebay.convert import convert
from forebay.dataset.reader import open_dataset
from forebay.errors import ForebayError, UsageError
from forebay.formats import open_external
from forebay.formats.conversion import ConvertOptions
from forebay.load.loader import Loader
from support.doctor_cases import reports
from support.foreign_datasets import made_table, save_table

IDS = np.arange(60, 72).reshape(3, 4)
VALUES = {
    "input_ids": IDS,
    "tokens": IDS,
    "labels": np.where(IDS % 4, IDS, -100),
    "attention_mask": IDS % 2,
    "label": IDS[0, :3],
    "zeta": IDS[:, :2],
    "score": IDS[0, :3] / 2,
    "flag": IDS[0, :3] > 60,
}
TEXT = pa.array([*"abc"])
ROWS = [*(f"input_ids {name}" for name in [*VALUES][1:]), "ragged zeta", "text attention_mask labels input_ids"]
FILES = ["a.parquet", "a.arrow", "a.jsonl", "a.webdataset", "a.tfrecord"]
FOLDERS = ["saved", "mds", "litdata", *(["datasets"] if find_spec("datasets") else [])]
PLAIN = ConvertOptions()


def write(path: Path, table: pa.Table):
    if path.name == "datasets":  # It has types of its own: int32 and int8 of some columns.
        __import__("datasets").Dataset.from_dict(table.to_pydict()).save_to_disk(str(path))
    elif path.name == "saved":
        save_table(path, table)
    else:
        convert(made_table(dict(zip(table.column_names, table.columns)), 2), path, path.name.removeprefix("a."), PLAIN)


def outcome(source: Path, **options: Any) -> tuple[str, ...]:
    """Return the layout, the id and the notes of a dataset that `forebay convert` makes, or the error."""
    out = source.with_name(f"{source.name}.{options}")
    try:
        report = convert(source, out, "forebay", ConvertOptions(**options))
    except ForebayError as error:
        return "", str(error)
    return open_dataset(out).manifest.layout, report.id, *report.written.notes


@pytest.mark.parametrize("columns", ["input_ids", "tokens", "ragged", "ragged text", *ROWS])
def test_a_table_has_one_outcome_in_every_container(columns, tmp_path):
    """Converted, padded, the tokens alone; in place and for `doctor`."""
    names, is_rows = columns.replace("ragged", "input_ids").split(), columns in ROWS
    table = pa.table({name: TEXT if name == "text" else VALUES[name].tolist() for name in names})
    if "ragged" in columns:
        table = table.set_column(0, "input_ids", [[[1, 2], [3], [4, 5, 6]]])
    tokens = names[0] if names == ["tokens"] else "input_ids"
    others = tuple(sorted({*names} - {tokens}))
    refused = f"tokens alone, got {', '.join(others).removesuffix(', text')} beside input_ids.*column='?input_ids"
    arguments = {"seq_len": 1, "batch_size": 1}
    expected = []
    for path in (tmp_path / name for name in FILES + FOLDERS):
        write(path, table)
        got = [outcome(path), outcome(path, seq_len=6, eos_id=3), outcome(path, column=tokens)]
        expected = expected or got
        has_types = path.name != "a.tfrecord" or names[-1] not in ("score", "flag")  # It has no F64 and no booleans.
        assert got == expected or not has_types, path
        for to in ("megatron", "bin") if is_rows else ():
            with pytest.raises(UsageError, match=refused):
                convert(path, tmp_path / to, to, PLAIN)
        if is_rows or path.name in FILES:
            with pytest.raises(ForebayError, match="`forebay convert`" if path.name in FILES else refused):
                Loader(path, **arguments)
        if path.name in FOLDERS:
            dataset = open_external(path, column=tokens if is_rows else None)
            assert dataset.left_out == others
            assert (
                dataset.num_tokens == len(table[tokens].combine_chunks().flatten()) == len(Loader(dataset, **arguments))
            )
            (report,) = reports(path)
            assert report.ok and ("rows" in report.metadata) == is_rows
    layouts = ["rows" if is_rows else "tokens"] * 2 + ["tokens"]
    if columns == "ragged zeta":
        assert "'input_ids': expected rows of one shape" in expected[0][1] and "--seq-len N" in expected[0][1]
        layouts[0] = ""
    assert [item[0] for item in expected] == layouts
    assert ("text" in others) == (expected[1][2:] != ()) and (others == ()) == (expected[2][2:] == ())


def test_a_folder_of_splits_is_named(tmp_path):
    save_table(tmp_path / "train", pa.table({"input_ids": IDS.tolist()}))
    (tmp_path / "dataset_dict.json").touch()
    for read in (open_external, lambda path: convert(path, tmp_path / "out" / "o", "bin", PLAIN)):
        with pytest.raises(UsageError, match=r"got the splits train\. Name the directory of one: .*/train"):
            read(tmp_path)


@pytest.mark.parametrize(
    "names, got", [("ba", ""), ("aa", "once, got a difference in a: int64"), ("b", "got a difference in a")]
)
def test_files_have_the_same_columns_in_any_order(names, got, tmp_path):
    for file, columns in enumerate(("ab", names)):
        table = pa.Table.from_arrays([pa.array([ord(name)]) for name in columns], [*columns])
        pa.parquet.write_table(table, tmp_path / f"{file}.parquet")
    layout, result = outcome(tmp_path)
    assert got in result and layout == ("" if got else "rows")


def test_ids_below_0_are_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.array([1, -2], np.int32).tobytes())
    assert "got 4294967294, or -2" in outcome(tmp_path / "a.bin", input_dtype="int32")[1]


def test_a_table_without_rows_is_a_dataset_without_tokens(tmp_path):
    save_table(tmp_path / "a", pa.table({"input_ids": pa.array([], pa.list_(pa.int32()))}))
    assert outcome(tmp_path / "a")[0] == "tokens"
