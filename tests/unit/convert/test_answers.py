"""Messages of `convert`: damage, columns that are left out, and the format to write instead."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.cli import main
from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_rows_slice


def converted(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main(["convert", *map(str, argv), "--quiet", "--json"])
    message = capsys.readouterr()
    return code, message.out, message.err


def test_a_source_is_verified_by_its_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows").mkdir()
    write_rows_slice(tmp_path / "rows/0.safetensors", {"x": np.arange(9)})
    import_slices(tmp_path / "rows")
    slice_path = tmp_path / "rows/0.safetensors"
    slice_path.write_bytes(slice_path.read_bytes()[:-1] + b"\x01")
    code, _, err = converted(capsys, tmp_path / "rows", tmp_path / "y", "--to", "parquet")
    assert code == 1 and "expected the dataset's bytes in [0, " in err and not (tmp_path / "y").exists()


def test_missing_values_and_text_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"n": [1, None], "s": ["a", "b"]}), tmp_path / "missing.parquet")
    pq.write_table(pa.table({"n": [1, 2], "s": ["a", "b"]}), tmp_path / "mixed.parquet")
    pq.write_table(pa.table({"s": ["a", "b"]}), tmp_path / "text.parquet")
    code, _, err = converted(capsys, tmp_path / "missing.parquet", tmp_path / "a", "--to", "forebay")
    assert code == 1 and "column 'n'" in err and "row 1" in err and "--to parquet" in err
    code, _, err = converted(capsys, tmp_path / "text.parquet", tmp_path / "a", "--to", "forebay")
    assert code == 2 and "s: string" in err and "--to parquet" in err and "forebay prepare" in err
    code, out, _ = converted(capsys, tmp_path / "mixed.parquet", tmp_path / "a", "--to", "forebay")
    assert code == 0 and json.loads(out)["notes"] == ["left out, being no numbers: s; --to parquet or jsonl keeps them"]
