"""One large file in ranges: whatever breaks, it is whole under its name or not there."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.dataset.manifest import SliceInfo
from forebay.errors import DatasetError, NetworkError, UsageError
from forebay.storage.base import ChangedError, PathOrigin, Timeouts
from forebay.storage.chunk_file import UNVERIFIED, ChunkFile, create
from forebay.storage.fetch import RunFetcher
from forebay.storage.origins import open_origin
from forebay.storage.ranged_download import download_large_file, plan_download
from forebay.storage.transfers import FileTransfer, map_path_of
from support.calibration import scaled
from support.origin_server import OriginServer
from support.wire import until

MIB = 1 << 20
CONTENT = random.Random(3).randbytes(3 * MIB + 4321)
QUICK = Timeouts(0.5, 0.5)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OriginServer]:
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "big").write_bytes(CONTENT)
    with OriginServer(tmp_path / "origin") as server:
        yield server


def only(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir() if not p.is_dir())


@pytest.mark.parametrize(
    ("size", "chunk", "workers", "ranges", "used"),
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
def test_ranges_follow_from_the_settings(size: int, chunk: Any, workers: Any, ranges: int, used: int) -> None:
    plan = plan_download(size, chunk, workers)
    assert (plan.num_ranges, plan.workers) == (ranges, used)
    assert plan.chunk_bytes % plan.piece_bytes == 0 and plan.piece_bytes <= 8 * MIB
    for wrong in ({"chunk_size": 1000}, {"max_workers": 0}):
        with pytest.raises(UsageError):
            plan_download(size, **wrong)


def test_a_shard_of_215_gb_is_resumed_by_8_mib(tmp_path: Path) -> None:
    plan, part = plan_download(215_000_000_000, 2 * 1024**3, "all"), tmp_path / "part"
    info = SliceInfo(0, "big", plan.num_bytes, "", 0, 0, plan.piece_bytes)
    create(part, map_path_of(part), info)
    with RunFetcher(plan.workers) as fetcher:
        assert FileTransfer(fetcher, info, part, [PathOrigin(tmp_path)]).received == 0
        ChunkFile(part, map_path_of(part), info).marks[12_800:12_802] = UNVERIFIED  # In the middle of a range.
        again = FileTransfer(fetcher, info, part, [PathOrigin(tmp_path)], run_bytes=plan.chunk_bytes)
        assert again.received == 16 * MIB


def test_a_file_comes_whole_through_a_bad_network(server: OriginServer, tmp_path: Path) -> None:
    server.faults.drop, server.faults.truncate = 0.2, 0.3
    path = tmp_path / "out" / "big"
    seen: list[int] = []
    got = download_large_file(
        server.url, "big", path, chunk_size=1 << 18, max_workers="all", on_progress=lambda at, of: seen.append(at)
    )
    assert path.read_bytes() == CONTENT and only(path) == ["big"]
    assert (got.num_bytes, got.bytes_fetched) == (len(CONTENT), len(CONTENT)) and got.retries > 0
    assert seen == sorted(seen) and seen[-1] == len(CONTENT)
    local = download_large_file(path.parent, path.name, tmp_path / "local")
    assert local.path.read_bytes() == CONTENT


def test_killed_at_any_moment_it_goes_on_and_is_never_seen_in_part(server: OriginServer, tmp_path: Path) -> None:
    path = tmp_path / "out" / "big"
    server.faults.bytes_per_s = 5 * MIB
    code = (
        "import sys; from forebay.storage.ranged_download import download_large_file\n"
        "download_large_file(sys.argv[1], 'big', sys.argv[2], chunk_size=1 << 17, max_workers=4)"
    )
    chance, kills = random.Random(1), 0
    while not path.exists():
        child = subprocess.Popen([sys.executable, "-c", code, server.url, str(path)])
        goal = server.bytes_sent["big"] + chance.randrange(MIB // 4, 2 * MIB)
        while child.poll() is None and server.bytes_sent["big"] < goal:
            time.sleep(0.002)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            kills += 1
        assert child.wait() in (0, -signal.SIGKILL)
        assert not path.exists() or path.read_bytes() == CONTENT
    assert kills and only(path) == ["big"]
    assert server.bytes_sent["big"] < len(CONTENT) + (kills + 1) * 5 * (1 << 17)


def test_another_version_of_an_object_is_an_error_and_begun_anew(server: OriginServer, tmp_path: Path) -> None:
    server.faults.connection_bytes_per_s = 2 * MIB
    path, other = tmp_path / "out" / "big", CONTENT[: 2 * MIB]

    def change(received: int, total: int) -> None:
        if received and total == len(CONTENT):
            (server.directory / "big").write_bytes(other)  # its ETag follows from its size

    with pytest.raises(NetworkError, match=r"changed while it was read|ends at byte|fewer (bytes )?than"):
        download_large_file(server.url, "big", path, chunk_size=1 << 16, max_workers=2, on_progress=change)
    assert not path.exists()
    download_large_file(server.url, "big", path)
    assert path.read_bytes() == other and only(path) == ["big"]
    origin = open_origin(server.url)
    with pytest.raises(ChangedError, match="expected ETag"):
        list(origin.read("big", 0, 10, '"1"'))  # type: ignore[call-arg]
    with pytest.raises(ChangedError):
        list(open_origin(server.directory).read("big", 0, 10, "1"))  # type: ignore[call-arg]


def test_a_black_hole_is_told_with_endpoint_attempts_and_time(server: OriginServer, tmp_path: Path) -> None:
    path = tmp_path / "out" / "big"
    server.faults.black_hole = True
    with pytest.raises(NetworkError, match=rf"big from {server.url}: no answer after \d+ attempts in \d.*s; the last"):
        download_large_file(server.url, "big", path, timeout_s=0.2)
    server.faults.black_hole = False
    server.faults.connection_bytes_per_s = MIB

    def fall(received: int, total: int) -> None:
        server.faults.black_hole = server.faults.black_hole or bool(received)

    with pytest.raises(NetworkError, match=r"big: got \d+ of \d+ bytes, then none for .* failed attempts in .*127"):
        download_large_file(
            server.url, "big", path, timeout_s=1.5, chunk_size=1 << 16, max_workers=2,
            on_progress=fall,
        )  # fmt: skip
    server.faults.black_hole, server.faults.connection_bytes_per_s = False, 0.0
    got = download_large_file(server.url, "big", path, chunk_size=1 << 18)
    assert path.read_bytes() == CONTENT and got.bytes_fetched <= len(CONTENT)


def test_patience_bounds_all_attempts_together(server: OriginServer, tmp_path: Path) -> None:
    """With the default limits of a request, which are longer, at the first answer and amid the bytes."""
    began = time.monotonic()
    download_large_file(server.url, "big", tmp_path / "calibrate")
    work_s = 20 * (time.monotonic() - began)
    server.faults.black_hole = True
    began = time.monotonic()
    with pytest.raises(NetworkError, match=r"no answer after \d+ attempts in"):
        download_large_file(server.url, "big", tmp_path / "big", timeout_s=2.0)
    assert 1.0 < time.monotonic() - began < scaled(2 * 2.0) + work_s
    server.faults.black_hole, server.faults.connection_bytes_per_s = False, MIB
    fallen: list[float] = []

    def fall(received: int, total: int) -> None:
        if received and not fallen:
            server.faults.black_hole = True
            fallen.append(time.monotonic())

    with pytest.raises(NetworkError, match=r"big: got \d+ of \d+ bytes, then none for"):
        download_large_file(
            server.url, "big", tmp_path / "big", timeout_s=2.0, chunk_size=1 << 16, max_workers=2, on_progress=fall
        )
    assert 1.0 < time.monotonic() - fallen[0] < scaled(2 * 2.0) + work_s


def test_what_is_not_there_is_told_at_once(server: OriginServer, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="404"):
        download_large_file(server.url, "none", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_full_disk_is_clean_and_resumed(server: OriginServer, tmp_path: Path, monkeypatch: Any) -> None:
    path, real, written = tmp_path / "out" / "big", os.pwrite, [0]

    def full(file: int, data: Any, offset: int) -> int:
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


def test_a_temporary_directory_of_ones_own(server: OriginServer, tmp_path: Path) -> None:
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


def test_two_processes_do_not_write_one_file(server: OriginServer, tmp_path: Path) -> None:
    path, stop = tmp_path / "out" / "big", threading.Event()
    server.faults.bytes_per_s = MIB
    errors: list[Exception] = []

    def first() -> None:
        try:
            download_large_file(server.url, "big", path, stop=stop)
        except NetworkError as error:
            errors.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    until(lambda: bool(list(path.parent.glob(".big.*.part"))))
    with pytest.raises(UsageError, match="another process downloads it"):
        download_large_file(server.url, "big", path)
    stop.set()
    thread.join()
    assert errors and "cancelled" in str(errors[0]) and not path.exists()


def test_sixteen_workers_are_sixteen_times_as_fast_where_a_connection_is_slow(
    server: OriginServer, tmp_path: Path
) -> None:
    """By rates of one run, the best of some, since the machine may be busy; sixteen requests at once in each."""
    server.faults.connection_bytes_per_s = 256 << 10
    gains = []
    while max(gains, default=0.0) < 12 and len(gains) < 6:
        rates = {}
        for workers, size in ((1, MIB // 4), (16, 4 * MIB)):  # 4 ranges, and 4 for each of 16
            (server.directory / "even").write_bytes(bytes(size))
            until(lambda: server._now == 0)  # The last answers of the turn before are over for the server, too.
            server.most_at_once = 0
            began = time.monotonic()
            download_large_file(server.url, "even", tmp_path / "even", chunk_size=1 << 16, max_workers=workers)
            rates[workers] = size / (time.monotonic() - began)
            assert server.most_at_once == workers
        gains.append(rates[16] / rates[1])
    print("16 workers are faster than one", [f"{gain:.1f}" for gain in gains], "times")
    assert max(gains) >= 12
