"""What every store does: a directory, and a bucket of a real server with signatures."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from forebay.errors import DatasetError, UsageError
from forebay.storage.store import BucketStore, FolderStore, Store, open_store
from support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    directory = tmp_path_factory.mktemp("s3")
    (directory / "bucket").mkdir()
    with S3Server(directory) as server:
        yield server


@pytest.fixture(params=["folder", "bucket"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if request.param == "folder":
        opened = open_store(tmp_path / "store")
    elif own := os.environ.get("FOREBAY_TEST_BUCKET"):  # with its own credentials in the environment
        opened = open_store(own).child(tmp_path.name)
    else:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        opened = open_store(f"s3://bucket/{tmp_path.name}?endpoint={server.endpoint}")
    yield opened
    opened.remove_all()
    assert opened.sizes() == {}


def test_objects_are_written_read_and_removed(store: Store) -> None:
    with store.open("a/x.bin") as file:
        file.write(b"0123456789")
        assert not store.exists("a/x.bin")
    store.write("a/y", [b"12", b"345"])
    assert store.read("a/x.bin") == b"0123456789" and store.size("a/y") == 5
    assert store.sizes() == {"a/x.bin": 10, "a/y": 5} == store.sizes("a/")
    assert store.sizes("a/x") == {"a/x.bin": 10} and store.sizes("b/") == {}
    assert store.child("a").read("y") == b"12345" and pickle.loads(pickle.dumps(store)) == store
    with store.local("a/y") as path:
        assert path.read_bytes() == b"12345"
    store.remove(["a/y", "none"])
    assert not store.exists("a/y")
    for read in (store.read, store.size, lambda name: store.read_array(name, np.uint8, 2)):
        with pytest.raises(FileNotFoundError):
            read("none")


def test_arrays_are_read_by_ranges(store: Store) -> None:
    values = np.arange(1000, dtype="<u8")
    store.write("n", values.tobytes())
    assert store.read_array("n", "<u8").tolist() == values.tolist()
    assert store.read_array("n", "<u8", 3, 7).tolist() == [7, 8, 9]
    assert store.read_array("n", "<u8", -1, 998).tolist() == [998, 999]
    assert store.read_array("n", "<u8", 5, 998).tolist() == [998, 999]
    assert store.read_array("n", "<u8", 0, 5).tolist() == []
    store.read_array("n", "<u8", 3, 7)[0] = 1  # writable, as kernels are compiled for


def test_one_of_many_creates(store: Store) -> None:
    created: list[bool] = []
    threads = [
        threading.Thread(target=lambda n=n: created.append(store.create("result", bytes([n])))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(created) == [False] * 7 + [True]
    assert len(store.read("result")) == 1 and not store.create("result", b"again")


def test_an_exception_leaves_nothing(store: Store) -> None:
    with pytest.raises(ValueError, match="stop"), store.open("x") as file:
        file.write(b"1")
        raise ValueError("stop")
    assert store.sizes() == {}


def test_a_file_is_copied_and_moved(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    store.copy("copy", tmp_path / "file")
    store.copy("copy", tmp_path / "file")
    store.put("moved", tmp_path / "file")
    assert store.read("copy") == store.read("moved") == b"bytes" and not (tmp_path / "file").exists()


def test_other_bytes_of_an_object_are_refused_in_a_bucket(store: Store) -> None:
    """Two runs that differ must not mix; in a directory a lock keeps them apart."""

    def write(data: bytes, **options: bool) -> None:
        with store.open("x", **options) as file:
            file.write(data)

    write(b"1")
    write(b"1")
    if isinstance(store, BucketStore):
        with pytest.raises(DatasetError, match="another run writes here"):
            write(b"2")
    write(b"3", replace=True)
    assert store.read("x") == b"3"


_KILLED = """
import os, signal, sys
from forebay.storage.store import open_store
with open_store(sys.argv[1]).open("x") as file:
    file.write(b"1" * 100_000)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_no_object(store: Store) -> None:
    address = store.address if isinstance(store, BucketStore) else store.url
    died = subprocess.run([sys.executable, "-c", _KILLED, address], check=False)
    assert died.returncode == -signal.SIGKILL
    store.remove_stale()
    assert store.sizes() == {}
    if isinstance(store, FolderStore):
        assert list(store.path.iterdir()) == []


def test_scratch_is_of_this_user_alone(store: Store, tmp_path: Path) -> None:
    if isinstance(store, FolderStore):
        pytest.skip("a directory has its own")
    with store.scratch() as folder:
        assert folder.is_relative_to(tmp_path) and (folder.parents[1].stat().st_mode & 0o77) == 0
    assert not folder.exists()


def test_a_server_that_overwrites_is_refused(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"ACCESS_KEY_ID": ACCESS_KEY, "SECRET_ACCESS_KEY": SECRET_KEY, "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    store = BucketStore(f"s3://bucket/{tmp_path.name}?endpoint={server.endpoint}")
    store.check()
    monkeypatch.setattr(server.faults, "overwrites", True)
    with pytest.raises(UsageError, match="expected a bucket that refuses to overwrite"):
        store.check()
    assert store.sizes() == {}


def test_faults_of_the_server_are_waited_for(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"ACCESS_KEY_ID": ACCESS_KEY, "SECRET_ACCESS_KEY": SECRET_KEY, "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr("forebay.storage.buckets._FIRST_WAIT_S", 0.001)
    store = BucketStore(f"s3://bucket/{tmp_path.name}?endpoint={server.endpoint}")
    for fault in ("busy", "drop", "truncate"):
        monkeypatch.setattr(server.faults, fault, 0.3)
        for number in range(8):
            store.create(f"{fault}{number}", b"0123456789" * 100)
            assert store.read_array(f"{fault}{number}", np.uint8, 10, 500).tobytes() == b"0123456789"
            with store.local(f"{fault}{number}") as path:
                assert path.stat().st_size == 1000
        monkeypatch.setattr(server.faults, fault, 0.0)
    assert len(store.sizes()) == 24


@pytest.mark.parametrize(
    ("scheme", "variable"),
    [
        ("s3", "AWS_ACCESS_KEY_ID and AWS_SECRET"),
        ("gs", "GOOGLE_APPLICATION_CRED"),
        ("az", "AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_missing_credentials_are_one_line(monkeypatch: pytest.MonkeyPatch, scheme: str, variable: str) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    with pytest.raises(DatasetError) as raised:
        open_store(f"{scheme}://bucket/{scheme}").size("y")
    message = str(raised.value)
    assert message.startswith(f"{scheme}://bucket/{scheme}/y: expected credentials") and variable in message
    assert len(message) < 300 and "\n" not in message and "169.254" not in message


def test_wrong_addresses_and_credentials_are_named(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="expected a directory, s3://"):
        open_store("ftp://host/x")
    with pytest.raises(UsageError, match="expected no secret in the URL"):
        open_store("s3://bucket/x?secret_access_key=1").read("y")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    absent = open_store(f"s3://absent/x?endpoint={server.endpoint}")
    for call in (lambda: absent.write("y", b""), lambda: absent.read("y"), lambda: absent.create("y", b"")):
        with pytest.raises(DatasetError, match="s3://absent: expected a bucket, got none of that name"):
            call()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(DatasetError, match=r"s3://bucket/x/y: .*Check the bucket and the credentials"):
        open_store(f"s3://bucket/x?endpoint={server.endpoint}").write("y", b"")
