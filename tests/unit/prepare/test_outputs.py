"""`--to`: text and tokens in the formats of other libraries, with all columns; the same bytes however they are made.

`tests/slow/peers` has the libraries themselves read these outputs, `tests/slow/prepare/test_prepare_outputs.py` writes
them by several processes and into buckets.
"""

import math
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from forebay import open_dataset
from forebay.errors import UsageError
from forebay.formats.conversion import ConvertOptions
from forebay.formats.sources import open_source, open_table
from forebay.formats.token_stream import documents
from forebay.prepare.outputs import tokens as token_outputs
from forebay.prepare.outputs.text import SUFFIXES
from forebay.storage.store import FolderStore
from support.outputs import RECIPE, make_outputs, output, prepare_output
from support.preparing import prepare, read_lines
from support.store import stored

SUBSETS = {"subset": [{"subset": "good", "column": "quality", "min": 1}]}


@pytest.fixture
def outputs() -> Path:
    return stored(make_outputs)


@pytest.fixture
def corpus(outputs) -> Path:
    return outputs / "in"


def rows(folder: Path) -> list[dict]:
    """Return the rows that a format reads, with gaps in place of NaN and without keys of its own."""
    table = open_table(folder)
    read = pa.Table.from_batches(list(table.batches()), table.schema).to_pylist()
    return [{n: None if v != v else v for n, v in row.items() if n != "__key__"} for row in read]


@pytest.mark.parametrize("to", sorted(SUFFIXES))
def test_a_format_reads_its_directory_with_all_columns(outputs, corpus, to):
    got = rows(outputs / to / "text")
    assert [row["id"] for row in got] == (outputs / f"{to}.ids").read_text().split()
    by_id = {row["id"]: row for path in corpus.iterdir() for row in read_lines(path)}
    assert len(got) == len(by_id) == 121
    for row in got:
        source = by_id[row["id"]]
        assert (row["url"], row["licence"]) == (source.get("url", ""), source.get("licence", ""))
        assert row["quality"] == source.get("quality")
        assert row["text"].split("\n")[0] == source["text"].split("\n")[0]
    assert sum(len(row["text"]) for row in got) < sum(len(row["text"]) for row in by_id.values())  # lines were cut


@pytest.mark.parametrize("to", ["jsonl", "arrow", "parquet", "webdataset"])
def test_a_later_preparation_reads_the_same_documents_and_columns(outputs, tmp_path, to):
    prepare(outputs / to / "text", tmp_path / "again", to="parquet", settings={"read": RECIPE["read"]})
    assert rows(tmp_path / "again/text") == rows(outputs / "parquet/text")


def test_tokens_are_those_of_the_dataset_in_its_order(outputs, corpus, tmp_path, monkeypatch):
    source = open_source(outputs / "megatron/tokens", ConvertOptions(), "megatron")
    dataset = open_dataset(outputs / "dataset")
    expected = [dataset.document(index).tokens.tolist() for index in range(len(dataset))]
    assert [document.tolist() for document in documents(source.parts())] == expected and len(expected) == 121
    for name in ("tokenizer.json", "../dataset.ids"):
        assert (outputs / "megatron" / name).read_bytes() == (outputs / "dataset" / name).read_bytes()
    # Pieces that begin and end inside documents and at their ends.
    monkeypatch.setattr(token_outputs, "MAX_TOKENS", 13)
    prepare_output("megatron", corpus, tmp_path / "out")
    assert output(tmp_path / "out") == output(outputs / "megatron")


class Killed(BaseException):
    """The end of a process, at which nothing is tidied."""


@pytest.mark.parametrize("to", ["parquet", "megatron"])
def test_a_run_that_ended_between_its_files_goes_on(outputs, corpus, tmp_path, to, monkeypatch):
    """Finished files are not written again; `tests/slow/dataset/test_faults.py` ends runs at every write."""
    puts = []
    plain = FolderStore.put

    def put(store, name, path):
        puts.append(name)
        if len(puts) == 2:
            raise Killed
        plain(store, name, path)

    monkeypatch.setattr(FolderStore, "put", put)
    with pytest.raises(Killed):
        prepare_output(to, corpus, tmp_path / "out")
    assert not [path for path in (tmp_path / "out").glob("t*.json") if path.name != "tokenizer.json"]
    prepare_output(to, corpus, tmp_path / "out")
    assert output(tmp_path / "out") == output(outputs / to)
    is_one_task = to == "megatron"
    assert puts.count(puts[0]) == 1 + is_one_task and puts.count(puts[1]) == 2


def test_another_output_is_refused_and_an_unfinished_one_removed(outputs, corpus, tmp_path):
    out = tmp_path / "mds"
    shutil.copytree(outputs / "mds", out)
    again = prepare_output("mds", corpus, out)
    assert again.already_exists and again.documents_out == 121
    for to in ("litdata", "megatron", "dataset", "lm"):
        with pytest.raises(UsageError, match="which holds mds 'd'"):
            prepare_output(to, corpus, out)
    assert output(out) == output(outputs / "mds")
    (out / "text.json").unlink()
    prepare_output("jsonl", corpus, out)
    assert output(out) == output(outputs / "jsonl")


@pytest.mark.parametrize("to", ["parquet", "litdata"])
def test_each_subset_is_a_directory_that_its_format_reads(corpus, tmp_path, to):
    prepare_output(to, corpus, tmp_path / "out", SUBSETS, write_ids=tmp_path / "ids")
    good, rest = rows(tmp_path / "out/text/good"), rows(tmp_path / "out/text/rest")
    assert all(row["quality"] >= 1 for row in good)
    assert not any(math.isfinite(row["quality"] or math.nan) and row["quality"] >= 1 for row in rest)
    assert sorted(row["id"] for row in (*good, *rest)) == sorted((tmp_path / "ids").read_text().split())


def test_settings_that_an_output_does_not_have_are_refused(corpus, tmp_path):
    for to, options, message in (
        ("megatron", {"tables": SUBSETS}, "subset: expected --to parquet, got megatron"),
        ("megatron", {"tables": {"rows": {"max_tokens": 64}}}, "rows: expected --to dataset, got megatron"),
        ("megatron", {"document_ids": True}, "document ids: expected a dataset of tokens, got megatron"),
        ("mds", {"document_ids": True}, "document ids: expected a dataset of tokens, got mds"),
        ("megatron", {"tables": {"tokenize": {}}}, "expected a tokenizer"),
        ("text", {}, r"to: expected one of dataset, parquet, .*, got 'text'"),
    ):
        with pytest.raises(UsageError, match=message):
            prepare_output(to, corpus, tmp_path / "out", **options)
