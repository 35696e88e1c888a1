"""One decision from the columns of a table to a layout: the same for every container, in place and converted."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from forebay.cli import main
from forebay.convert import convert
from forebay.dataset.reader import open_dataset
from forebay.errors import ForebayError, UsageError
from forebay.formats import open_external
from forebay.formats.conversion import ConvertOptions
from forebay.load.loader import Loader
from support.doctor_cases import reports
from support.foreign_datasets import made_table, save_table

EVEN = [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 70]]
RAGGED = [[5, 6, 7], [9], [], [13, 14, 15, 70]]


def labels(rows: list[list[int]]) -> list[list[int]]:
    return [[-100, *row[1:]] if row else [] for row in rows]


TOKENS: dict[str, dict[str, Any]] = {  # Columns that are a stream of tokens, with the names that are left out.
    "alone": {"input_ids": RAGGED},
    "even": {"input_ids": EVEN},
    "one": {"input_ids": [[5], [6]]},
    "tokens": {"tokens": RAGGED},
    "text": {"input_ids": RAGGED, "text": ["a", "b", "c", "d"]},
    "strings": {"url": ["u"] * 3, "id": ["x", "y", "z"], "tokens": EVEN},
}
ROWS: dict[str, dict[str, Any]] = {  # Columns that are rows: those beside `input_ids` have numbers.
    "labels": {"input_ids": EVEN, "labels": labels(EVEN)},
    "ragged": {"input_ids": RAGGED[:2], "labels": labels(RAGGED[:2])},
    "mask": {"attention_mask": [[1, 1, 1, 0]] * 3, "input_ids": EVEN},
    "all": {"attention_mask": [[1] * 4] * 3, "input_ids": EVEN, "labels": labels(EVEN), "text": ["a", "b", "c"]},
    "types": {"input_ids": EVEN, "token_type_ids": [[0, 0, 1, 1]] * 3},
    "class": {"input_ids": EVEN, "label": [0, 1, 2]},
    "unknown": {"input_ids": EVEN, "zeta": [[7, 8]] * 3},
    "score": {"input_ids": EVEN, "zeta": [[0.5, 1.0]] * 3},
    "flag": {"input_ids": EVEN, "is_good": [True, False, True]},
    "both": {"input_ids": EVEN, "tokens": EVEN},
}
SETS = TOKENS | ROWS


def write_stream(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_hub(path: Path, table: pa.Table) -> None:
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    datasets.Dataset.from_dict(table.to_pydict()).save_to_disk(str(path))


def converted(to: str) -> Callable[[Path, pa.Table], Any]:
    return lambda path, table: convert(
        made_table({name: table[name] for name in table.column_names}, 2), path, to, ConvertOptions()
    )


FILES: dict[str, Callable[[Path, pa.Table], Any]] = {
    "a.parquet": lambda path, table: pq.write_table(table, path, row_group_size=2),
    "a.arrows": lambda path, table: write_stream(path, table),
    "a.feather": lambda path, table: pa.feather.write_feather(table, path),
    "a.jsonl": converted("jsonl"),
    "a.tar": converted("webdataset"),
    "a.tfrecord.gz": converted("tfrecord"),
}
FOLDERS = {"saved": save_table, "datasets": write_hub, "mds": converted("mds"), "litdata": converted("litdata")}
CONTAINERS = FILES | FOLDERS


Outcome = tuple[str, str, tuple[str, ...]]


@pytest.fixture(scope="module")
def of_parquet(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Return the outcome of a set of columns in Parquet."""

    @functools.cache
    def outcome(columns: str, **options: Any) -> Outcome:
        folder = tmp_path_factory.mktemp("parquet")
        FILES["a.parquet"](folder / "b.parquet", pa.table(SETS[columns]))
        return convert_to(folder / "out", folder / "b.parquet", **options)

    return outcome


def convert_to(out: Path, source: Path, **options: Any) -> Outcome:
    """Return the id, the layout and the notes of a dataset that `forebay convert` makes."""
    report = convert(source, out, "forebay", ConvertOptions(**options))
    return report.id, open_dataset(out).manifest.layout, report.written.notes


@pytest.mark.parametrize("columns", SETS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_table_has_one_outcome_in_every_container(
    container: str, columns: str, tmp_path: Path, of_parquet: Callable[..., Outcome]
) -> None:
    """As the same table in Parquet, by id: converted, padded, the tokens alone; in place and for `doctor`."""
    path, table = tmp_path / container, pa.table(SETS[columns])
    CONTAINERS[container](path, table)
    tokens = "tokens" if "input_ids" not in table.column_names else "input_ids"
    others = sorted({*table.column_names} - {tokens})
    for i, options in enumerate([{}, {"seq_len": 6, "eos_id": 3}, {"column": tokens}]):
        if columns == "ragged" and not options:
            with pytest.raises(
                ForebayError, match=r"'input_ids': expected rows of one shape.*--seq-len N.*column=NAME"
            ):
                convert(path, tmp_path / "out", "forebay", ConvertOptions())
            continue
        got = convert_to(tmp_path / f"a{i}", path, **options)
        same = of_parquet(columns, **options)
        is_exact = "tfrecord" not in container or columns not in ("score", "flag")  # It has neither F64 nor booleans.
        assert got[1:] == same[1:] and (got == same or not is_exact)
        is_tokens = columns in TOKENS or "column" in options
        assert got[1] == ("tokens" if is_tokens else "rows")
        assert got[2] == ((f"columns left out: {', '.join(others)}",) if is_tokens and others else got[2])
    if columns == "all":
        assert "left out, being no numbers: text" in got[2][0] or "columns left out: " in got[2][0]
    if columns in ROWS:
        more = ", ".join(name for name in others if name != "text")
        for to in ("megatron", "bin"):
            with pytest.raises(UsageError, match=f"tokens alone, got {more} beside input_ids.*--set column=input_ids"):
                convert(path, tmp_path / to, to, ConvertOptions())
        assert convert(path, tmp_path / "c", "megatron", ConvertOptions(column=tokens)).written.num_documents
    if container not in FOLDERS:
        with pytest.raises(ForebayError, match="forebay convert"):
            Loader(path, seq_len=2, batch_size=1)
        return
    if columns in ROWS:
        with pytest.raises(
            UsageError, match=rf"tokens alone, got {more} beside .*open_external\(PATH, column='{tokens}'"
        ):
            Loader(path, seq_len=1, batch_size=1)
    dataset = open_external(path, column=None if columns in TOKENS else tokens)
    assert dataset is not None and list(dataset.left_out) == others
    assert (
        dataset.num_tokens
        == sum(map(len, SETS[columns][tokens]))
        == sum(1 for _ in Loader(dataset, seq_len=1, batch_size=1))
    )
    (report,) = reports(path)
    assert report.ok and ("rows" in report.metadata) == (columns in ROWS)


def test_a_folder_of_splits_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "test"):
        save_table(tmp_path / "splits" / split, pa.table(SETS["labels"]))
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UsageError, match=r"got the splits test, train\. Name the directory of one: .*splits/test"):
        Loader(tmp_path / "splits", seq_len=2, batch_size=1)
    assert main(["convert", str(tmp_path / "splits"), str(tmp_path / "out"), "--to", "forebay"]) == 2
    assert "got the splits test, train" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "splits" / "test")
    assert convert_to(tmp_path / "out", tmp_path / "splits" / "train")[1] == "rows"
