"""Files at URLs as paths: which are listed, by which names, and that readers of paths read them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.cli import main
from forebay.convert import convert
from forebay.dataset.reader import open_dataset
from forebay.dataset.slices import write_rows_slice
from forebay.errors import DatasetError, ForebayError, UnknownDatasetError, UsageError
from forebay.formats.conversion import ConvertOptions
from forebay.formats.detect import detect
from forebay.storage.addresses import is_url
from forebay.storage.remote_path import find_paths, url_name
from support.hub_repos import write_repo
from support.hub_server import HubServer
from support.origin_server import OriginServer
from support.preparing import write_jsonl

TOKENS = np.arange(70_000, dtype=np.uint16)


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    repo = write_repo(folder / "datasets/me/mixed")
    for index in range(3):
        np.save(repo / f"train_{index:06d}.npy", TOKENS + np.uint16(index))
    lists = pa.table({"tokens": pa.array([[1, 2, 3], [], [4]] * 100, pa.list_(pa.int64()))})
    for index in (2, 10, 9):
        (repo / "data").mkdir(exist_ok=True)
        pq.write_table(lists, repo / f"data/part-{index:05d}.parquet")
    write_jsonl(repo / "more/a.jsonl", [{"tokens": [1, 2, 70_000]}] * 50)
    (repo / ".hidden.npy").write_bytes(b"x")
    with HubServer(folder) as server:
        yield server


@pytest.fixture
def hub(running, monkeypatch) -> HubServer:
    monkeypatch.setenv("HF_ENDPOINT", running.url)
    running.reset()
    return running


def test_what_a_url_lists(hub):
    paths = find_paths("hf://datasets/me/mixed")
    assert [path.relative_to("mixed").as_posix() for path in paths] == [
        "README.md", "data/part-00002.parquet", "data/part-00009.parquet", "data/part-00010.parquet", "more/a.jsonl",
        "train_000000.npy", "train_000001.npy", "train_000002.npy",
    ]  # fmt: skip
    assert [path.name for path in find_paths("hf://datasets/me/mixed/data/part-0000*")] == [
        "part-00002.parquet", "part-00009.parquet",
    ]  # fmt: skip
    [single] = find_paths("hf://datasets/me/mixed@main/data/part-00009.parquet")
    commit = hub.commit(hub.directory / "datasets/me/mixed")
    assert str(single) == f"hf://datasets/me/mixed@{commit}/data/part-00009.parquet"
    assert (url_name("hf://datasets/me/mixed@main"), url_name("s3://b/x/y-*.npy")) == ("mixed", "x")
    assert is_url("s3://b/x") and not is_url("file:///x") and not is_url(Path("x"))
    for url in ("hf://datasets/me/mixed/none", "hf://datasets/me/mixed/none-*"):
        with pytest.raises(ForebayError, match="expected"):
            find_paths(url)
    with pytest.raises(UnknownDatasetError):
        find_paths("hf://datasets/me/nothing")
    with pytest.raises(UsageError, match="expected hf://datasets/OWNER/NAME"):
        find_paths("hf://datasets/me")


def test_a_path_reads_as_one_of_this_machine(hub):
    *_, path, _ = find_paths("hf://datasets/me/mixed/*.npy")
    local = hub.directory / "datasets/me/mixed" / path.name
    assert (path.name, path.suffix, path.stat().st_size) == (local.name, ".npy", local.stat().st_size)
    assert path.is_file() and path.exists() and not path.is_dir() and detect(path).format == "npy"
    assert sum(stop - start for _, start, stop in hub.ranges) == 64 << 10
    with path.open() as file:
        file.seek(100_000)
        assert file.read(50_000) == local.read_bytes()[100_000:150_000]
    assert path.with_name("train_000000.npy").is_file()
    missing = path.with_name("sample_ids_000000.npy")
    assert not missing.is_file() and not missing.exists()
    with pytest.raises(FileNotFoundError):
        missing.open()


def test_tokens_of_a_url_and_types_that_must_be_told(hub, tmp_path):
    folder = hub.directory / "datasets/me/mixed"
    report = convert("hf://datasets/me/mixed/*.npy", tmp_path / "a", "forebay", ConvertOptions())
    convert(f"{folder}/*.npy", tmp_path / "b", "forebay", ConvertOptions())
    assert report.id == open_dataset(tmp_path / "a").id == open_dataset(tmp_path / "b").id
    lists = "hf://datasets/me/mixed/data"
    with pytest.raises(
        UsageError, match=r"column tokens: expected --dtype uint16 .* got none and list<element: int64>"
    ):
        convert(lists, tmp_path / "c", "forebay", ConvertOptions())
    report = convert(lists, tmp_path / "c", "forebay", ConvertOptions(dtype="U16"))
    convert(folder / "data", tmp_path / "d", "forebay", ConvertOptions())
    assert report.id == open_dataset(tmp_path / "d").id and report.written.num_documents == 900
    with pytest.raises(UsageError, match=r"at most 65535 to write uint16, got 70000"):
        convert("hf://datasets/me/mixed/more", tmp_path / "e", "forebay", ConvertOptions(dtype="U16"))


def test_a_format_that_is_mapped_needs_the_file_here(hub, tmp_path):
    repo = write_repo(hub.directory / "datasets/me/archive")
    rows = {"x": np.random.default_rng(0).random((10_000, 8)), "y": np.arange(10_000)}
    for save, name in ((np.savez, "a"), (np.savez_compressed, "b")):
        save(repo / "a.npz", **rows)
        convert("hf://datasets/me/archive", tmp_path / f"{name}.parquet", "parquet", ConvertOptions())
        convert(repo / "a.npz", tmp_path / f"{name}-here.parquet", "parquet", ConvertOptions())
        assert (tmp_path / f"{name}.parquet").read_bytes() == (tmp_path / f"{name}-here.parquet").read_bytes()
    (repo / "a.npz").unlink()
    write_rows_slice(repo / "a.safetensors", {"x": np.arange(10)})
    with pytest.raises(UsageError, match=r"a.safetensors: expected a format that is read by ranges"):
        convert("hf://datasets/me/archive", tmp_path / "x", "jsonl", ConvertOptions())
    (repo / "a.safetensors").unlink()
    (repo / "a.bin").write_bytes(TOKENS.tobytes())
    with pytest.raises(DatasetError, match=r"expected a dataset, token files or a table, .* --set input_dtype=uint16"):
        convert("hf://datasets/me/archive", tmp_path / "x", "forebay", ConvertOptions())
    convert("hf://datasets/me/archive", tmp_path / "x", "forebay", ConvertOptions(input_dtype="uint16"))
    assert open_dataset(tmp_path / "x").num_tokens == len(TOKENS)


def test_a_file_of_a_web_server(tmp_path, capsys):
    (tmp_path / "web").mkdir()
    rows = pa.table({"x": np.arange(200_000), "y": ["text"] * 200_000})
    pq.write_table(rows, tmp_path / "web/t.parquet", row_group_size=10_000)
    with OriginServer(tmp_path / "web") as server:
        server.faults.drop = 0.1
        assert main(["convert", f"{server.url}/t.parquet", str(tmp_path / "out.parquet"), "--to", "parquet"]) == 0
        assert pq.read_table(tmp_path / "out.parquet").equals(rows)
        assert main(["convert", f"{server.url}/none.parquet", str(tmp_path / "x"), "--to", "parquet"]) == 1
        assert "none.parquet: expected a file, got" in capsys.readouterr().err
