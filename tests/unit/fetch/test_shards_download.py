"""One large file in ranges: whatever breaks, it is whole under its name or not there."""

import errno
import itertools
import os
import threading
from pathlib import Path

import pytest

from forebay.errors import DatasetError, NetworkError, UsageError
from forebay.fetch.downloads import download_large_file, plan_download
from forebay.storage import retry
from forebay.storage.base import ChangedError
from forebay.storage.locks import try_acquire
from forebay.storage.origins import open_origin
from support.big_file import CONTENT, MIB, big_file_server
from support.waiting import until

server = big_file_server


def only(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir() if not p.is_dir())


@pytest.mark.parametrize(
    "size, chunk, workers, ranges, used",
    [
        (215_000_000_000, 2 * 1024**3, "all", 101, 101),
        (215_000_000_000, 2 * 1024**3, 100, 101, 100),
        (215_000_000_000, None, None, 3204, 32),
        (429_500_000_000, 512 * MIB, 32, 801, 32),
        (10**6, None, None, 1, 1),
        (10**6, 1 << 16, "all", 16, 16),
        (1, None, 64, 1, 1),
    ],
)
def test_ranges_follow_from_the_settings(size, chunk, workers, ranges, used):
    plan = plan_download(size, chunk, workers)
    assert (plan.num_ranges, plan.workers) == (ranges, used)
    assert plan.chunk_bytes % plan.piece_bytes == 0 and plan.piece_bytes <= 8 * MIB
    for wrong in ({"chunk_size": 1000}, {"max_workers": 0}):
        with pytest.raises(UsageError):
            plan_download(size, **wrong)


def test_a_file_comes_whole_through_a_bad_network(server, tmp_path):
    server.faults.drop, server.faults.truncate = 0.2, 0.3
    path = tmp_path / "out" / "big"
    seen = []
    got = download_large_file(
        server.url, "big", path, chunk_size=1 << 18, max_workers="all", on_progress=lambda size, of: seen.append(size)
    )
    assert path.read_bytes() == CONTENT and only(path) == ["big"]
    assert (got.num_bytes, got.bytes_fetched) == (len(CONTENT), len(CONTENT)) and got.retries > 0
    assert seen == sorted(seen) and seen[-1] == len(CONTENT)
    local = download_large_file(path.parent, path.name, tmp_path / "local")
    assert local.path.read_bytes() == CONTENT
    with pytest.raises(DatasetError, match="404"):
        download_large_file(server.url, "none", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_full_disk_is_clean_and_resumed(server, tmp_path, monkeypatch):
    path, real, written = tmp_path / "out" / "big", os.pwrite, [0]

    def full(file, data, offset):
        written[0] += len(data)
        if written[0] > 2 * MIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(UsageError, match=r"expected room for .* got: No space left.*kept and resumed"):
            download_large_file(server.url, "big", path, chunk_size=1 << 17, max_workers=2)
    assert not path.exists()
    got = download_large_file(server.url, "big", path, chunk_size=1 << 17)
    assert path.read_bytes() == CONTENT and got.bytes_fetched < len(CONTENT) - MIB


def test_a_temporary_directory_of_ones_own(server, tmp_path):
    path, elsewhere = tmp_path / "out" / "big", Path("/dev/shm")
    download_large_file(server.url, "big", path, tmp_dir=tmp_path / "tmp")
    assert path.read_bytes() == CONTENT and not list((tmp_path / "tmp").iterdir())
    if elsewhere.is_dir() and elsewhere.stat().st_dev != tmp_path.stat().st_dev:
        folder = elsewhere / f"forebay-{os.getpid()}"
        try:
            download_large_file(server.url, "big", path, tmp_dir=folder)  # another volume
            assert path.read_bytes() == CONTENT and not list(folder.iterdir())
        finally:
            for remaining in folder.iterdir():
                remaining.unlink()
            folder.rmdir()


def test_another_version_of_an_object_is_an_error_and_begun_anew(server, tmp_path, monkeypatch):
    path, other, requests = tmp_path / "out" / "big", CONTENT[: 2 * MIB], itertools.count()

    def change():
        if next(requests) == 4:
            (server.directory / "big").write_bytes(other)  # Its ETag follows from its size.
        return False

    monkeypatch.setattr(server, "too_many", change)
    with pytest.raises(NetworkError, match=r"changed while it was read|ends at byte|fewer (bytes )?than"):
        download_large_file(server.url, "big", path, chunk_size=1 << 16, max_workers=2)
    assert not path.exists()
    download_large_file(server.url, "big", path)
    assert path.read_bytes() == other and only(path) == ["big"]
    origin = open_origin(server.url)
    with pytest.raises(ChangedError, match="expected ETag"):
        list(origin.read("big", 0, 10, '"1"'))
    with pytest.raises(ChangedError):
        list(open_origin(server.directory).read("big", 0, 10, "1"))


def test_a_file_that_another_process_downloads_and_one_that_is_cancelled(server, tmp_path, monkeypatch, caplog):
    path, stop = tmp_path / "big", threading.Event()
    lock = try_acquire(tmp_path / ".big.lock")
    assert lock is not None
    with lock, pytest.raises(UsageError, match=f"process {os.getpid()} on"):
        download_large_file(server.url, "big", path)

    def fall_silent():
        if len(server.paths) > 1:
            until(lambda: f"waiting for big: 0 of {len(CONTENT)} bytes; no response yet" in caplog.text)
            stop.set()
            server.stopping.wait()
        return False

    monkeypatch.setattr(server, "too_many", fall_silent)
    monkeypatch.setattr(retry, "FIRST_S", 0.0)
    with pytest.raises(NetworkError, match="cancelled"):
        download_large_file(server.url, "big", path, stop=stop)
    assert not path.exists()


def test_as_many_requests_at_once_as_workers(server, tmp_path, monkeypatch):
    (server.directory / "even").write_bytes(bytes(MIB))
    together = threading.Barrier(16)
    monkeypatch.setattr(server, "too_many", lambda: len(server.paths) > 1 and together.wait() < 0)
    download_large_file(server.url, "even", tmp_path / "even", chunk_size=1 << 16, max_workers=16)
    assert server.most_at_once == 16
