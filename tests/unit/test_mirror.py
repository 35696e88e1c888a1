"""Mirrors: to directories and buckets, by ranges, under faults, killed and gone on with."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from forebay.cli import main
from forebay.dataset.import_slices import import_slices
from forebay.dataset.manifest import MANIFEST_FILE
from forebay.dataset.reader import open_dataset, verify_dataset
from forebay.dataset.slices import write_token_slice
from forebay.errors import DatasetError, NetworkError, UsageError
from forebay.mirror import mirror
from forebay.storage.origins import open_remote
from support.origin_server import OriginServer

LARGE = 3_000_000  # Tokens: 12 MB, which a bucket gets in two parts.


def make(folder: Path, lengths: list[int]) -> Path:
    folder.mkdir(parents=True)
    for index, length in enumerate(lengths):
        tokens = np.random.default_rng(index).integers(0, 60_000, length).astype(np.uint32)
        write_token_slice(folder / f"{index}.safetensors", tokens, np.array([length], np.uint64))
    import_slices(folder, "mirrored")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make(tmp_path / "source", [3000, 500, 40_000, 7, 20_000, 1000])


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "bucket").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with OriginServer(tmp_path / "bucket") as server:
        for name, value in server.s3_environment.items():
            monkeypatch.setenv(name, value)
        yield server


def copy(source: Path | str, target: str | Path, **given):
    return mirror(open_remote(str(source)), target, **given)


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_a_directory_gets_the_same_bytes(source: Path, tmp_path: Path) -> None:
    done: list[int] = []
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


def test_ranges_make_a_dataset_when_the_last_slice_is_there(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    first = copy(source, target, start=2, stop=4)
    assert not first.complete and first.missing == 4 and not (target / MANIFEST_FILE).exists()
    assert sorted(f.name for f in target.iterdir()) == ["2.safetensors", "3.safetensors"]
    assert copy(source, target, start=0, stop=2).missing == 2
    assert copy(source, target, start=4).complete
    assert verify_dataset(target).ok and files(target) == files(source)
    with pytest.raises(UsageError, match="range"):
        copy(source, target, start=4, stop=9)


def test_a_damaged_slice_is_copied_again(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    copy(source, target)
    data = bytearray((target / "2.safetensors").read_bytes())
    data[-1] ^= 1
    (target / "2.safetensors").write_bytes(data)
    report = copy(source, target)
    assert (report.copied, report.skipped) == (1, 5) and files(target) == files(source)


def test_wrong_bytes_never_get_a_name(source: Path, tmp_path: Path) -> None:
    with OriginServer(source) as server:
        server.faults.corrupt["1.safetensors"] = 100
        with pytest.raises(NetworkError, match=r"1\.safetensors"):
            copy(server.url, tmp_path / "copy")
        assert not (tmp_path / "copy" / "1.safetensors").exists()
        assert not (tmp_path / "copy" / MANIFEST_FILE).exists()
        server.faults.corrupt.clear()
        assert copy(server.url, tmp_path / "copy").complete


def test_what_cannot_be_is_refused_first(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make(tmp_path / "other", [10])
    with pytest.raises(UsageError, match="or the dataset"):
        copy(source, other)
    with pytest.raises(UsageError, match="to write to"):
        copy(source, "https://host/x")
    refused: list[Exception] = []

    def copy_beside(num_bytes: int) -> None:
        if not refused:
            with pytest.raises(UsageError, match="another mirror") as error:
                copy(source, tmp_path / "copy")
            refused.append(error.value)

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 0, 1000))
    with pytest.raises(UsageError, match="expected room for"):
        copy(source, tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []
    monkeypatch.undo()
    assert copy(source, tmp_path / "copy", on_progress=copy_beside).complete and refused


def test_a_bucket_gets_it_signed_in_parts_and_under_faults(tmp_path: Path, bucket: OriginServer) -> None:
    source = make(tmp_path / "source", [LARGE, 500, 40_000])
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


def test_a_bucket_that_refuses_says_so(source: Path, tmp_path: Path, bucket: OriginServer, monkeypatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(DatasetError, match="bucket/mine"):
        copy(source, "s3://bucket/mine")
    assert not any((tmp_path / "bucket").rglob("*.safetensors"))


def start_command(source: str, target: str, temporary: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "forebay", "mirror", source, target, "--quiet"]
    temporary.mkdir(exist_ok=True)
    environment = os.environ | {"TMPDIR": str(temporary)}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_kill_at_any_moment_leaves_no_partial_file_under_a_name(
    tmp_path: Path, bucket: OriginServer, kind: str
) -> None:
    source = make(tmp_path / "source", [LARGE, 2_000_000, LARGE])
    full = files(source)
    slices = {name: data for name, data in full.items() if name.endswith(".safetensors")}
    target = tmp_path / ("copy" if kind == "folder" else "bucket/copy")
    url = str(target) if kind == "folder" else "s3://bucket/copy"
    with OriginServer(source) as origin:
        origin.faults.bytes_per_s = 30e6
        for named_before_kill in (0, 1, 2):
            process = start_command(origin.url, url, tmp_path / "tmp")
            before = sum(origin.bytes_sent.values())
            while process.poll() is None and (
                sum(origin.bytes_sent.values()) < before + 5_000_000
                or len(named_in(target, slices)) < named_before_kill
            ):
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
            named = named_in(target, full)
            assert all(full[name] == data for name, data in named.items())
            assert MANIFEST_FILE not in named or len(named) == len(full)
        origin.reset()
        assert start_command(origin.url, url, tmp_path / "tmp").wait() == 0
        retained = named.keys() & slices
        assert files(target) == full and len(retained) >= 2
        assert not any(origin.requests[name] for name in retained)  # What had a name is not fetched again.


def named_in(target: Path, full: dict[str, bytes]) -> dict[str, bytes]:
    return {name: (target / name).read_bytes() for name in full if (target / name).is_file()}


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "copy")
    assert main(["mirror", str(source), target, "--slices", "0:2", "--json", "--quiet"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["copied"], reported["missing"], reported["complete"]) == (2, 4, False)
    assert main(["mirror", str(source), target, "--quiet"]) == 0
    assert re.search(r"^complete +yes$", capsys.readouterr().out, re.MULTILINE)
    assert main(["mirror", str(source), target, "--id", "0" * 64, "--quiet"]) == 1
    with pytest.raises(SystemExit):
        main(["mirror", str(source), target, "--slices", "5"])
