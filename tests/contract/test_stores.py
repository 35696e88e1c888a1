"""The laws of every store; here of a directory, in `tests/e2e/test_s3.py` of a bucket of a real server."""

import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from forebay.errors import DatasetError, UsageError
from forebay.storage.store import FolderStore, Store, open_store


class StoreContract:
    """A subclass has the fixture `store`, which is empty."""

    def test_objects_are_written_read_and_removed(self, store):
        with store.open("a/x.bin") as file:
            file.write(b"0123456789")
            assert not store.exists("a/x.bin")
        store.write("a/y", [b"12", b"345"], flush=False)
        assert store.as_uri().endswith(store.url) and (store.folder is None) == (store.as_uri() == store.url)
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

    def test_arrays_are_read_by_ranges(self, store):
        values = np.arange(1000, dtype="<u8")
        store.write("n", values.tobytes())
        assert store.read_array("n", "<u8").tolist() == values.tolist()
        for count, start, expected in ((3, 7, [7, 8, 9]), (-1, 998, [998, 999]), (5, 998, [998, 999]), (0, 5, [])):
            assert store.read_array("n", "<u8", count, start).tolist() == expected
        store.read_array("n", "<u8", 3, 7)[0] = 1  # writable, as kernels are compiled for

    def test_one_of_many_creates(self, store):
        created = []
        threads = [
            threading.Thread(target=lambda n=n: created.append(store.create("result", bytes([n])))) for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(created) == [False] * 7 + [True]
        assert len(store.read("result")) == 1 and not store.create("result", b"again")

    def test_an_exception_leaves_nothing(self, store):
        with pytest.raises(ValueError, match="stop"), store.open("x") as file:
            file.write(b"1")
            raise ValueError("stop")
        assert store.sizes() == {}

    def test_a_file_is_copied_and_moved(self, store, tmp_path):
        (tmp_path / "file").write_bytes(b"bytes")
        store.copy("copy", tmp_path / "file")
        store.copy("copy", tmp_path / "file")
        store.put("moved", tmp_path / "file")
        assert store.read("copy") == store.read("moved") == b"bytes" and not (tmp_path / "file").exists()

    def test_the_same_bytes_may_be_written_again_and_others_by_replacement(self, store):
        for data, options in ((b"1", {}), (b"1", {}), (b"3", {"replace": True})):
            with store.open("x", **options) as file:
                file.write(data)
        assert store.read("x") == b"3"


class TestFolder(StoreContract):
    @pytest.fixture
    def store(self, tmp_path) -> Iterator[Store]:
        opened = open_store(tmp_path / "store")
        yield opened
        opened.remove_all()
        assert opened.sizes() == {}

    def test_what_a_killed_writer_left_is_removed(self, tmp_path):
        store = FolderStore(str(tmp_path))
        with store.open("x") as file:
            name = Path(file.name).name
        dead = name.replace(f".{os.getpid()}.", f".{1 << 22}.")  # above every process id of the machine
        assert dead != name
        (tmp_path / dead).write_bytes(b"1")
        store.remove_stale()
        assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    "scheme, variable",
    [
        ("s3", "AWS_ACCESS_KEY_ID and AWS_SECRET"),
        ("gs", "GOOGLE_APPLICATION_CRED"),
        ("az", "AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_missing_credentials_are_one_line(monkeypatch, scheme, variable):
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    with pytest.raises(DatasetError) as raised:
        open_store(f"{scheme}://bucket/{scheme}").size("y")
    message = str(raised.value)
    assert message.startswith(f"{scheme}://bucket/{scheme}/y: expected credentials") and variable in message
    assert len(message) < 300 and "\n" not in message and "169.254" not in message


def test_wrong_addresses_are_named():
    with pytest.raises(UsageError, match="expected a directory, s3://"):
        open_store("ftp://host/x")
    with pytest.raises(UsageError, match="expected no secret in the URL"):
        open_store("s3://bucket/x?secret_access_key=1").read("y")
