"""`--to`: text and tokens in the formats of other libraries, with all columns; the same bytes however they are made.

`tests/peers` has the libraries themselves read these outputs.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from forebay import open_dataset, prepare_dataset
from forebay.cli import make_parser
from forebay.cli.parser import walk
from forebay.errors import UsageError
from forebay.formats.conversion import ConvertOptions
from forebay.formats.sources import open_source, open_table
from forebay.formats.token_stream import documents
from forebay.prepare import PrepareResult, load_recipe
from forebay.prepare.driver import OUTPUTS
from forebay.prepare.outputs import megatron
from forebay.prepare.outputs.text import SUFFIXES
from support.outputs import hashes
from support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

TEXTS = sorted(SUFFIXES)
TABLES: dict[str, Any] = {
    "name": "d",
    "read": {"columns": {"quality": "number", "licence": "text"}},
    "dedup": {"exact": True, "lines": True},
    "slice": {"shuffle": True, "seed": 3},
    "tokenize": {"tokenizer": "bytes"},
}
SUBSETS = {"subset": [{"subset": "good", "column": "quality", "min": 1}]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files with documents that repeat, and of each two that are cut away line by line."""
    folder = tmp_path_factory.mktemp("corpus")
    for k in range(3):
        with (folder / f"{k}.jsonl").open("w") as file:
            for i in range(40):
                text = f"document {k} {i} äöü “x”\nline {i % 7} of words that repeat, in some\n" * (1 + i % 3)
                row: dict[str, Any] = {"id": f"{k}-{i}", "url": f"http://a/{k}/{i}", "text": text}
                row |= {"quality": i / 7} if i % 3 else {}
                row |= {"licence": "mit"} if i % 2 else {}
                file.write(json.dumps(row) + "\n")
            file.write(json.dumps({"id": "same", "text": "one document that all have"}) + "\n")
    return folder


def prepare(corpus: Path, out: Path | str, to: str, tables: dict[str, Any] | None = None, **more: Any) -> PrepareResult:
    recipe = load_recipe(settings={**TABLES, **(tables or {})})
    return prepare_dataset([corpus], out, to=to, recipe=recipe, **{"workers": 1, **more})


def output(folder: Path) -> dict[str, str]:
    """The files of an output by their hashes, without what describes the inputs and the run."""
    return {name: digest for name, digest in hashes(folder).items() if not name.startswith((".", "report"))}


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows that a format reads, with gaps in place of NaN and without keys of its own."""
    table = open_table(folder)
    assert table is not None
    read = pa.Table.from_batches(list(table.batches()), table.schema).to_pylist()
    return [{n: None if v != v else v for n, v in row.items() if n != "__key__"} for row in read]


@pytest.fixture(scope="module")
def made(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each output of one process, by its name, and the ids of its documents."""
    folder = tmp_path_factory.mktemp("made")
    for to in (*TEXTS, "megatron", "dataset"):
        prepare(corpus, folder / to, to, write_ids=folder / f"{to}.ids")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    directory = tmp_path_factory.mktemp("s3")
    (directory / "bucket").mkdir()
    with S3Server(directory) as server:
        yield server


@pytest.mark.parametrize("to", TEXTS)
def test_a_format_reads_its_directory_with_all_columns(made: Path, corpus: Path, to: str) -> None:
    got = rows(made / to / "text")
    assert [row["id"] for row in got] == (made / f"{to}.ids").read_text().split()
    by_id = {row["id"]: row for path in corpus.iterdir() for row in map(json.loads, path.read_text().splitlines())}
    assert len(got) == len(by_id) == 121
    for row in got:
        source = by_id[row["id"]]
        assert (row["url"], row["licence"]) == (source.get("url", ""), source.get("licence", ""))
        assert row["quality"] == source.get("quality")
        assert row["text"].split("\n")[0] == source["text"].split("\n")[0]
    assert sum(len(row["text"]) for row in got) < sum(len(row["text"]) for row in by_id.values())  # lines were cut


@pytest.mark.parametrize("to", ["jsonl", "arrow", "webdataset"])
def test_a_later_preparation_reads_the_same_documents_and_columns(made: Path, tmp_path: Path, to: str) -> None:
    recipe = load_recipe(settings={"read": TABLES["read"]})
    prepare_dataset([made / to / "text"], tmp_path / "again", to="parquet", recipe=recipe, workers=1)
    assert rows(tmp_path / "again/text") == rows(made / "parquet/text")


def test_tokens_are_those_of_the_dataset_in_its_order(made: Path) -> None:
    source = open_source(made / "megatron/tokens", ConvertOptions(), "megatron")
    dataset = open_dataset(made / "dataset")
    expected = [dataset.document(index).tokens.tolist() for index in range(len(dataset))]
    assert [document.tolist() for document in documents(source.parts())] == expected and len(expected) == 121
    for name in ("tokenizer.json", "../dataset.ids"):
        assert (made / "megatron" / name).read_bytes() == (made / "dataset" / name).read_bytes()


def test_tokens_are_written_in_pieces(
    made: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that begin and end inside documents and at their ends."""
    monkeypatch.setattr(megatron, "MAX_TOKENS", 13)
    prepare(corpus, tmp_path / "out", "megatron")
    assert output(tmp_path / "out") == output(made / "megatron")


@pytest.mark.parametrize("to", ["jsonl", "litdata", "megatron"])
def test_the_bytes_do_not_depend_on_the_processes(corpus: Path, tmp_path: Path, to: str) -> None:
    """Without deduplication, whose kernels each process would load."""
    prepare(corpus, tmp_path / "1/out", to, {"dedup": {}}, write_ids=tmp_path / "1/ids")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[read.columns]\nquality = "number"\nlicence = "text"\n[slice]\nshuffle = true\nseed = 3\n')
    options = ["--to", to, "--tokenizer", "bytes", "--name", "d", "--config", recipe, "--workers", "3"]
    command = [sys.executable, "-m", "forebay", "prepare", corpus, "--out", "3/out", "--write-ids", "3/ids", *options]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert hashes(tmp_path / "3") == hashes(tmp_path / "1")


@pytest.mark.parametrize("to", [*TEXTS, "megatron"])
def test_a_bucket_has_what_a_directory_has(
    made: Path, corpus: Path, tmp_path: Path, to: str, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    url = f"s3://bucket/{to}?endpoint={server.endpoint}"
    result = prepare(corpus, url, to)
    assert output(server.directory / "bucket" / to) == output(made / to)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    again = prepare(corpus, url, to)
    assert again.already_exists and (again.id, again.documents_out) == (result.id, result.documents_out)


class Killed(BaseException):
    """The end of a process, at which nothing is tidied."""


@pytest.mark.parametrize("to", ["parquet", "mds", "megatron"])
def test_a_run_that_ended_between_its_files_goes_on(
    made: Path, corpus: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished files are not written again; `tests/unit/dataset/test_faults.py` ends runs at every write."""
    from forebay.storage.store import FolderStore

    puts: list[str] = []
    plain = FolderStore.put

    def put(store: FolderStore, name: str, path: Path) -> None:
        puts.append(name)
        if len(puts) == 2:
            raise Killed
        plain(store, name, path)

    monkeypatch.setattr(FolderStore, "put", put)
    with pytest.raises(Killed):
        prepare(corpus, tmp_path / "out", to)
    assert not [path for path in (tmp_path / "out").glob("t*.json") if path.name != "tokenizer.json"]
    prepare(corpus, tmp_path / "out", to)
    assert output(tmp_path / "out") == output(made / to)
    is_one_task = to == "megatron"
    assert puts.count(puts[0]) == 1 + is_one_task and puts.count(puts[1]) == 2


def test_files_of_an_unfinished_run_of_another_format_are_removed(made: Path, corpus: Path, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "out", "mds")
    (tmp_path / "out/text.json").unlink()
    prepare(corpus, tmp_path / "out", "jsonl")
    assert output(tmp_path / "out") == output(made / "jsonl")


def test_another_output_is_refused(made: Path, corpus: Path) -> None:
    before = output(made / "mds")
    again = prepare(corpus, made / "mds", "mds")
    assert again.already_exists and again.documents_out == 121
    for to in ("litdata", "megatron", "dataset", "lm"):
        with pytest.raises(UsageError, match="which holds mds 'd'"):
            prepare(corpus, made / "mds", to)
    assert output(made / "mds") == before


@pytest.mark.parametrize("to", ["parquet", "litdata"])
def test_each_subset_is_a_directory_that_its_format_reads(corpus: Path, tmp_path: Path, to: str) -> None:
    prepare(corpus, tmp_path / "out", to, SUBSETS, write_ids=tmp_path / "ids")
    good, rest = rows(tmp_path / "out/text/good"), rows(tmp_path / "out/text/rest")
    assert all(row["quality"] >= 1 for row in good)
    assert not any(math.isfinite(row["quality"] or math.nan) and row["quality"] >= 1 for row in rest)
    assert sorted(row["id"] for row in (*good, *rest)) == sorted((tmp_path / "ids").read_text().split())


def test_settings_that_an_output_does_not_have_are_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="subset: expected --to parquet, got megatron"):
        prepare(corpus, tmp_path / "out", "megatron", SUBSETS)
    with pytest.raises(UsageError, match=r"rows: expected --to dataset, got megatron"):
        prepare(corpus, tmp_path / "out", "megatron", {"rows": {"max_tokens": 64}})
    for to in ("mds", "megatron"):
        with pytest.raises(UsageError, match=f"document ids: expected a dataset of tokens, got {to}"):
            prepare(corpus, tmp_path / "out", to, document_ids=True)
    with pytest.raises(UsageError, match="expected a tokenizer"):
        prepare(corpus, tmp_path / "out", "megatron", {"tokenize": {}})
    with pytest.raises(UsageError, match=r"to: expected one of dataset, parquet, .*, got 'text'"):
        prepare(corpus, tmp_path / "out", "text")


def test_the_command_line_has_every_output() -> None:
    prepare_parser = dict(walk(make_parser()))[("prepare",)]
    (option,) = (action for action in prepare_parser._actions if action.dest == "to")
    assert list(option.choices) == [output.name for output in OUTPUTS]
