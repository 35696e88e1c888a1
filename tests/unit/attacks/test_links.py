"""A dataset directory of another person has links in place of its files: no path of Forebay reads what they lead to."""

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import forebay
from forebay.convert import convert
from forebay.dataset.import_slices import import_slices
from forebay.dataset.manifest import MANIFEST_FILE
from forebay.dataset.reader import Dataset, open_dataset, verify_dataset
from forebay.dataset.verified import VerifiedChunks
from forebay.errors import DatasetError, ForebayError
from forebay.files import open_below
from forebay.formats.conversion import ConvertOptions
from forebay.mirror import mirror
from forebay.network.client import RemoteError
from forebay.prepare.driver import prepare_dataset
from forebay.storage.base import PathOrigin, PermanentError
from forebay.storage.origins import open_remote, read_dataset
from support.nodes import Network
from support.preparing import write_jsonl

SLICE = "slices/000001.safetensors"


def make_dataset(folder: Path) -> Path:
    """A prepared dataset of three slices, with ids of its documents and a tokenizer."""
    rows = [{"id": f"d{i}", "text": "a line of text " * 400} for i in range(40)]
    text = write_jsonl(folder / "in.jsonl", rows)
    prepare_dataset(text, folder / "data", tokenizer="bytes", slice_bytes=1 << 17, document_ids=True, workers=1)
    return folder / "data"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("links"))


@pytest.fixture
def data(tmp_path, original) -> Path:
    return Path(shutil.copytree(original, tmp_path / "data"))


def make_link(data: Path, name: str, content: bytes | None = None):
    """Replace a file, or the directory above it, by a link to one elsewhere: with the same bytes, or others."""
    secret = data.parent / "home" / name
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_bytes((data / name).read_bytes() if content is None else content)
    (data / name).unlink()
    (data / name).symlink_to(secret)


def read_all(data: Path) -> object:
    with forebay.Loader(data, seq_len=16, batch_size=4, shuffle=False) as loader:
        return list(loader)


USES: dict[str, Callable[[Path, Path], object]] = {
    "loader": lambda data, out: read_all(data),
    "documents": lambda data, out: [open_dataset(data)[i] for i in range(40)],
    "mirror": lambda data, out: mirror(read_dataset(PathOrigin(data), None), out),
    "mirror of a URL": lambda data, out: mirror(open_remote(data.as_uri()), out),
    "convert": lambda data, out: convert(data, out, "parquet", ConvertOptions()),
    "extend": lambda data, out: prepare_dataset(data.parent / "in.jsonl", out, extend=data, workers=1),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", [SLICE, "manifest.json", "slices.parquet"])
def test_a_link_below_a_dataset_is_not_followed(data, tmp_path, use, name):
    (tmp_path / "in.jsonl").write_text('{"text": "more"}\n')
    make_link(data, name)
    with pytest.raises(ForebayError, match=r"a link, which is not followed.*cp -rL"):
        USES[use](data, tmp_path / "out")


def test_a_directory_of_slices_that_is_a_link(data, tmp_path):
    (data / "slices").rename(tmp_path / "slices")
    (data / "slices").symlink_to(tmp_path / "slices")
    with pytest.raises(DatasetError, match="a link, which is not followed"):
        read_all(data)
    assert not verify_dataset(data).ok


def test_verify_and_import_name_links(data):
    make_link(data, SLICE)
    assert verify_dataset(data).changed == [SLICE]
    for name in (MANIFEST_FILE, "slices.parquet"):
        (data / name).unlink()
    with pytest.raises(DatasetError, match="a link, which is not followed"):
        import_slices(data)


def test_a_directory_that_the_user_names_by_a_link_is_read(data, tmp_path):
    (tmp_path / "named").symlink_to(data)
    assert len(open_dataset(tmp_path / "named")) == 40 and read_all(tmp_path / "named")
    assert verify_dataset(tmp_path / "named").ok


def test_only_regular_files_below_a_directory(tmp_path):
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "e" / "f").write_text("x")
    (tmp_path / "s").write_text("secret")
    os.mkfifo(tmp_path / "d" / "pipe")
    with open_below(tmp_path / "d", "e/f") as file:
        assert file.read() == b"x"
    for name in ("pipe", "e", "../s", "e/../../s", str(tmp_path / "s"), ""):
        with pytest.raises((PermissionError, FileNotFoundError)):
            open_below(tmp_path / "d", name)
    with pytest.raises(PermanentError):  # It is not tried again.
        PathOrigin(tmp_path / "d").get("pipe", 100)


@pytest.mark.parametrize("to", ["mds", "litdata", "megatron"])
def test_a_link_in_data_of_another_tool_is_not_followed(data, tmp_path, to):
    shards = tmp_path / "shards"
    convert(data, shards, to, ConvertOptions())
    assert read_all(shards)
    largest = max((path for path in shards.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    make_link(shards, largest.relative_to(shards).as_posix())
    with pytest.raises(DatasetError, match="a link, which is not followed"):
        read_all(shards)


class Served:
    def __init__(self, data: Path, tmp_path: Path, stack: ExitStack):
        network = Network(tmp_path / "network", stack, "thief")
        self.dataset = open_dataset(data)
        self.node, self.client = network.serve(self.dataset), network.client("thief")

    def file(self, name: str) -> bytes:
        return self.client.get_bytes(self.node.address, f"/v1/datasets/{self.dataset.id}/{name}", 1 << 24)

    def slice(self, index: int) -> bytes:
        sha256 = self.dataset.table.row(index).sha256
        return self.client.get_bytes(self.node.address, f"/v1/slices/{sha256}", 1 << 24)


@pytest.mark.parametrize("is_link", [True, False])
def test_a_data_node_sends_the_bytes_of_the_dataset_alone(data, tmp_path, is_link, caplog):
    names = ["documents.parquet", "tokenizer.json", "manifest.sig.json", "report.html"]
    (data / "manifest.sig.json").touch()
    secrets = dict.fromkeys(names, b"SECRET") | {SLICE: b"S" * (data / SLICE).stat().st_size}
    for name, content in secrets.items():
        if is_link:
            make_link(data, name, content)
        elif name != "manifest.sig.json":  # Its readers verify it.
            (data / name).write_bytes(content)
    with ExitStack() as stack:
        served = Served(data, tmp_path, stack)
        assert served.slice(0) == (data / "slices/000000.safetensors").read_bytes()
        assert served.file("manifest.json") == (data / "manifest.json").read_bytes()
        for name in names[:2] if not is_link else names:
            with pytest.raises(RemoteError, match="404 unknown_file"):
                served.file(name)
        with pytest.raises(RemoteError, match="404 slice_changed"):
            served.slice(1)
    assert "documents.parquet is not served here" in caplog.text and "a slice" not in caplog.text


def test_a_directory_that_became_a_link_after_the_check(data, tmp_path, monkeypatch):
    secret = bytes((data / SLICE).stat().st_size)
    verify = VerifiedChunks.verify

    def verify_and_swap(*args, **kwargs):
        verify(*args, **kwargs)
        (data / "slices").rename(tmp_path / "old")
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / Path(SLICE).name).write_bytes(secret)
        (data / "slices").symlink_to(tmp_path / "home")

    monkeypatch.setattr(VerifiedChunks, "verify", verify_and_swap)
    with ExitStack() as stack:
        served = Served(data, tmp_path, stack)
        with pytest.raises(RemoteError, match="500 unreadable"):
            served.slice(1)


def test_a_slice_is_hashed_once_until_its_file_changes(data, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / "cache"))
    hashed, leaves = [], Dataset.leaves
    monkeypatch.setattr(Dataset, "leaves", lambda self, index: (hashed.append(index), leaves(self, index))[1])
    with ExitStack() as stack:
        served = Served(data, tmp_path, stack)
        assert [served.slice(1) for _ in range(3)] and hashed == [1]
        with (data / SLICE).open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\xff\xff")
        with pytest.raises(RemoteError, match="404 slice_changed"):
            served.slice(1)
        assert hashed == [1, 1]
