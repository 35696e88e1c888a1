"""Outputs by several processes and in buckets: the same bytes as of one process in a directory."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.errors import PrepareError
from forebay.formats.inputs import ReadOptions
from forebay.prepare import path_lists
from forebay.prepare.inputs import find_inputs, read_split, split_files
from support.crawl import CRAWL, write_mirror
from support.outputs import OUTPUTS, hashes, make_outputs, output, prepare_output
from support.preparing import prepare, write_jsonl
from support.s3_server import S3Server
from support.store import stored


@pytest.fixture
def outputs() -> Path:
    return stored(make_outputs)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[S3Server]:
    directory = tmp_path_factory.mktemp("s3")
    (directory / "bucket").mkdir()
    with S3Server(directory) as server:
        yield server


@pytest.fixture
def bucket(server: S3Server, monkeypatch) -> Path:
    """Return the directory of a bucket that the environment names."""
    for name, value in server.aws_environment().items():
        monkeypatch.setenv(name, value)
    return server.directory / "bucket"


@pytest.mark.parametrize("to", ["jsonl", "litdata", "megatron"])
def test_the_bytes_do_not_depend_on_the_processes(outputs: Path, tmp_path, to: str):
    """Without deduplication, whose kernels each process would load."""
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        prepare_output(to, outputs / "in", folder / "out", {"dedup": {}}, write_ids=folder / "ids", workers=workers)
    assert hashes(tmp_path / "3") == hashes(tmp_path / "1")


@pytest.mark.parametrize("to", OUTPUTS[:-1])
def test_a_bucket_has_what_a_directory_has(outputs: Path, tmp_path, to: str, bucket: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = prepare_output(to, outputs / "in", f"s3://bucket/{to}")
    assert output(bucket / to) == output(outputs / to)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    again = prepare_output(to, outputs / "in", f"s3://bucket/{to}")
    assert again.already_exists and (again.id, again.documents_out) == (result.id, result.documents_out)


def test_a_bucket_is_a_mirror_of_a_crawl(bucket: Path, tmp_path, monkeypatch):
    write_mirror(bucket)
    name = f"crawl-data/{CRAWL}/wet.paths.gz"
    local = prepare(bucket / name, tmp_path / "a/d")
    assert prepare(f"s3://bucket/{name}", tmp_path / "b/d").id == local.id
    monkeypatch.setenv(path_lists.SERVER_VARIABLE, "s3://bucket")
    assert prepare(f"commoncrawl:{CRAWL}?kind=wet", tmp_path / "c/d", workers=2).id == local.id


def test_an_object_is_read_as_it_was_listed(bucket: Path, monkeypatch):
    monkeypatch.setattr("forebay.formats.text.SPLIT_BYTES", 100_000)
    path = write_jsonl(bucket / "a.jsonl", [f"document {i} " * 20 for i in range(3000)])
    options = ReadOptions()
    first, second, *_ = split_files(find_inputs(["s3://bucket/a.jsonl"], options).files, options)
    assert len(list(read_split(first, options))) > 100
    path.write_bytes(path.read_bytes().replace(b"document", b"replaced"))
    with pytest.raises(PrepareError, match="the input changed while it was read"):
        list(read_split(second, options))


def test_training_does_not_depend_on_threads(tmp_path, monkeypatch):
    path, ids = write_jsonl(tmp_path / "a.jsonl", [f"Document {i % 300}: grüße " * (i % 9) for i in range(6000)]), set()
    script = "from forebay import prepare_dataset; import sys\n"
    script += "print(prepare_dataset([sys.argv[1]], sys.argv[2], tokenizer='train:500', name='d', workers=1).id)"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    for threads in ("1", "2", "7"):
        monkeypatch.setenv("RAYON_NUM_THREADS", threads)
        command = [sys.executable, "-c", script, path, tmp_path / threads]
        ids.add(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(ids) == 1
