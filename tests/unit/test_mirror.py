"""Mirrors: to directories and buckets, by ranges, under faults."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from forebay.cli import main
from forebay.dataset.manifest import MANIFEST_FILE
from forebay.dataset.reader import open_dataset, verify_dataset
from forebay.errors import NetworkError, UsageError
from forebay.mirror import mirror
from forebay.storage.origins import open_remote
from support.origin_server import OriginServer
from support.token_slices import write_tokens

LARGE = 3_000_000  # Tokens: 12 MB, which a bucket gets in two parts.


@pytest.fixture
def source(tmp_path) -> Path:
    return write_tokens(tmp_path / "source", [3000, 500, 40_000, 7, 20_000, 1000], dtype=np.uint32).path


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    (tmp_path / "bucket").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with OriginServer(tmp_path / "bucket") as server:
        for name, value in server.s3_environment.items():
            monkeypatch.setenv(name, value)
        yield server


def copy(source: Path | str, target: str | Path, **options):
    return mirror(open_remote(str(source)), target, **options)


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_a_directory_gets_the_same_bytes(source, tmp_path):
    done = []
    with OriginServer(source) as server:
        server.faults.drop, server.faults.truncate = 0.2, 0.2
        report = copy(server.url, tmp_path / "copy", on_progress=done.append)
        assert report.complete and (report.copied, report.skipped, report.missing) == (6, 0, 0)
        assert files(tmp_path / "copy") == files(source)
        assert sum(done) == report.copied_bytes == open_dataset(source).manifest.bytes
        server.reset()
        again = copy(server.url, tmp_path / "copy")
        assert (again.copied, again.skipped) == (0, 6)
        assert not any(name.endswith(".safetensors") for name in server.requests)
        data = bytearray((tmp_path / "copy/2.safetensors").read_bytes())
        data[-1] ^= 1
        (tmp_path / "copy/2.safetensors").write_bytes(data)
        report = copy(server.url, tmp_path / "copy")
        assert (report.copied, report.skipped) == (1, 5) and files(tmp_path / "copy") == files(source)


def test_ranges_make_a_dataset_when_the_last_slice_is_there(source, tmp_path):
    target = tmp_path / "copy"
    first = copy(source, target, start=2, stop=4)
    assert not first.complete and first.missing == 4 and not (target / MANIFEST_FILE).exists()
    assert sorted(f.name for f in target.iterdir()) == ["2.safetensors", "3.safetensors"]
    assert copy(source, target, start=0, stop=2).missing == 2
    assert copy(source, target, start=4).complete
    assert verify_dataset(target).ok and files(target) == files(source)
    with pytest.raises(UsageError, match="range"):
        copy(source, target, start=4, stop=9)


def test_wrong_bytes_never_get_a_name(source, tmp_path):
    with OriginServer(source) as server:
        server.faults.corrupt["1.safetensors"] = 100
        with pytest.raises(NetworkError, match=r"1\.safetensors"):
            copy(server.url, tmp_path / "copy")
        assert not (tmp_path / "copy" / "1.safetensors").exists()
        assert not (tmp_path / "copy" / MANIFEST_FILE).exists()
        server.faults.corrupt.clear()
        assert copy(server.url, tmp_path / "copy").complete


def test_what_cannot_be_is_refused_first(source, tmp_path, monkeypatch):
    other = write_tokens(tmp_path / "other", [10]).path
    with pytest.raises(UsageError, match="or the dataset"):
        copy(source, other)
    with pytest.raises(UsageError, match="to write to"):
        copy(source, "https://host/x")
    refused = []

    def copy_beside(num_bytes):
        if not refused:
            with pytest.raises(UsageError, match=f"process {os.getpid()} on") as error:
                copy(source, tmp_path / "copy")
            refused.append(error.value)

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 0, 1000))
    with pytest.raises(UsageError, match="expected room for"):
        copy(source, tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []
    monkeypatch.undo()
    assert copy(source, tmp_path / "copy", on_progress=copy_beside).complete and refused


def test_a_bucket_gets_it_signed_in_parts_and_under_faults(tmp_path, bucket: OriginServer):
    source = write_tokens(tmp_path / "source", [LARGE, 500, 40_000], dtype=np.uint32).path
    bucket.uploads.refuse = 0.15
    report = copy(source, "s3://bucket/sets/mine")
    assert report.complete and report.target == "s3://bucket/sets/mine"
    assert files(tmp_path / "bucket" / "sets" / "mine") == files(source)
    assert bucket.statuses[503] and not bucket.statuses[403]
    assert not [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]
    assert max(bucket.uploads.completed.values()) == 1
    # What is there is known by the hash kept with it: not a byte of a slice is read.
    bucket.reset()
    again = copy(source, "s3://bucket/sets/mine")
    assert (again.copied, again.skipped) == (0, 3)
    assert not any(name.endswith(".safetensors") for name, size in bucket.bytes_sent.items() if size)
    # And without it it is copied again.
    bucket.uploads.metadata.clear()
    assert copy(source, "s3://bucket/sets/mine").copied == 3
    assert open_remote("s3://bucket/sets/mine").id == open_dataset(source).id


def test_the_command(source, tmp_path, capsys):
    target = str(tmp_path / "copy")
    assert main(["mirror", str(source), target, "--slices", "0:2", "--json", "--quiet"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["copied"], reported["missing"], reported["complete"]) == (2, 4, False)
    assert main(["mirror", str(source), target, "--quiet"]) == 0
    assert re.search(r"^complete +yes$", capsys.readouterr().out, re.MULTILINE)
    assert main(["mirror", str(source), target, "--id", "0" * 64, "--quiet"]) == 1
    with pytest.raises(SystemExit):
        main(["mirror", str(source), target, "--slices", "5"])
