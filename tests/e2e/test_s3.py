"""A bucket of a real server (`rclone serve s3`): the laws of stores, and the path of a dataset there and back."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from contract.test_stores import StoreContract
from forebay import Loader, open_dataset, prepare_dataset
from forebay.errors import DatasetError, UsageError
from forebay.mirror import mirror
from forebay.storage.origins import open_remote
from forebay.storage.store import BucketStore, Store, open_store
from support.outputs import contents
from support.s3_server import S3Server

pytestmark = pytest.mark.xdist_group("s3")  # one server for all of them


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[S3Server]:
    directory = tmp_path_factory.mktemp("s3")
    (directory / "bucket").mkdir()
    with S3Server(directory) as server:
        yield server


@pytest.fixture
def server(running, tmp_path, monkeypatch) -> S3Server:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, value in running.aws_environment().items():
        monkeypatch.setenv(name, value)
    return running


@pytest.fixture
def store(server, tmp_path, monkeypatch) -> Iterator[Store]:
    own = os.environ.get("FOREBAY_TEST_BUCKET")  # with its own credentials in the environment
    if own:
        monkeypatch.undo()
    opened = open_store(own or "s3://bucket").child(tmp_path.name)
    yield opened
    opened.remove_all()
    assert opened.sizes() == {}


class TestBucket(StoreContract):
    def test_other_bytes_of_an_object_are_refused(self, store):
        """Two runs that differ must not mix; in a directory a lock keeps them apart."""
        store.write("x", b"1")
        with pytest.raises(DatasetError, match="another run writes here"), store.open("x") as file:
            file.write(b"2")

    def test_scratch_is_of_this_user_alone(self, store):
        with store.scratch() as folder:
            assert (folder.parents[1].stat().st_mode & 0o77) == 0
        assert not folder.exists()


_KILLED = """
import os, signal, sys
from forebay.storage.store import open_store
with open_store(sys.argv[1]).open("x") as file:
    file.write(b"1" * 100_000)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_no_object(store):
    assert isinstance(store, BucketStore)
    died = subprocess.run([sys.executable, "-c", _KILLED, store.address], check=False)
    assert died.returncode == -signal.SIGKILL
    store.remove_stale()
    assert store.sizes() == {}


def test_a_server_that_overwrites_is_refused(server, monkeypatch, tmp_path):
    store = BucketStore(f"s3://bucket/{tmp_path.name}?endpoint={server.endpoint}")
    with store.locked(shared=True):
        monkeypatch.setattr(server.faults, "overwrites", True)
    with pytest.raises(UsageError, match="expected a bucket that refuses to overwrite"), store.locked(shared=True):
        pass
    assert store.sizes() == {}


def test_faults_of_the_server_are_waited_for(server, monkeypatch, tmp_path):
    monkeypatch.setattr("forebay.storage.base._FIRST_WAIT_S", 0.001)
    store = BucketStore(f"s3://bucket/{tmp_path.name}")
    for fault in ("busy", "drop", "truncate"):
        monkeypatch.setattr(server.faults, fault, 0.3)
        for number in range(6):
            store.create(f"{fault}{number}", b"0123456789" * 100)
            assert store.read_array(f"{fault}{number}", np.uint8, 10, 500).tobytes() == b"0123456789"
            with store.local(f"{fault}{number}") as path:
                assert path.stat().st_size == 1000
        monkeypatch.setattr(server.faults, fault, 0.0)
    assert len(store.sizes()) == 18


def test_wrong_buckets_and_credentials_are_named(server, monkeypatch):
    absent = open_store("s3://absent/x")
    for call in (lambda: absent.write("y", b""), lambda: absent.read("y"), lambda: absent.create("y", b"")):
        with pytest.raises(DatasetError, match="s3://absent: expected a bucket, got none of that name"):
            call()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    with pytest.raises(DatasetError, match=r"s3://bucket/x/y: .*Check the URL, the name and the credentials"):
        open_store("s3://bucket/x").write("y", b"")


def test_a_dataset_is_prepared_there_read_and_mirrored_back(server, tmp_path):
    lines = [json.dumps({"text": f"document {number} " * (number % 9 + 1)}) for number in range(200)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    url = "s3://bucket/set"
    for out in (tmp_path / "local/set", url):
        prepare_dataset([tmp_path / "in.jsonl"], out, tokenizer="bytes", slice_bytes=4096, workers=1)
    local = open_dataset(tmp_path / "local/set")
    assert open_remote(url).id == local.id and local.num_slices > 3

    def read(dataset):
        with Loader(dataset, seq_len=64, batch_size=4, cache_dir=tmp_path / "cache") as loader:
            return [batch.inputs.tolist() for batch in loader]

    assert read(url) == read(tmp_path / "local/set") != []
    assert mirror(open_remote(url), tmp_path / "copy").complete
    copied, expected = contents(tmp_path / "copy"), contents(tmp_path / "local/set")
    assert copied and copied == {name: expected[name] for name in copied}
    assert {name for name in expected if name.startswith("slices/")} <= copied.keys()
