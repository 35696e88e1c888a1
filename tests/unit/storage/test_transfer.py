"""Transfers from servers that drop, cut, lie, throttle, say nothing; killed and resumed; with a full disk."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from forebay.cache.cache import ChunkCache
from forebay.dataset.manifest import SliceInfo
from forebay.errors import IntegrityError, NetworkError, UsageError
from forebay.storage.base import Timeouts
from forebay.storage.chunk_file import ABSENT, PRESENT, ChunkFile, create
from forebay.storage.fetch import RunFetcher, TransferCancelledError
from forebay.storage.origins import open_origin
from forebay.storage.transfers import ChunkTransfer, map_path_of
from support.cached import leaves_of
from support.calibration import scaled
from support.origin_server import OriginServer
from support.transfer_cases import CHUNK, CONTENT, INFO, LEAVES, MIB, PATIENT, QUICK, fetch, info_of, start
from support.wire import until


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., OriginServer]]:
    created: list[OriginServer] = []

    def make(data: bytes = CONTENT) -> OriginServer:
        folder = tmp_path / f"server{len(created)}"
        folder.mkdir()
        (folder / "slice").write_bytes(data)
        created.append(OriginServer(folder, seed=len(created)).__enter__())
        return created[-1]

    yield make
    for server in created:
        server.close()


@pytest.fixture
def server(make_server: Callable[..., OriginServer]) -> OriginServer:
    return make_server()


@pytest.mark.parametrize("size", [1, 1000, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 1_000_000])
@pytest.mark.parametrize("kind", ["path", "http"])
def test_whole(make_server: Callable[..., OriginServer], tmp_path: Path, size: int, kind: str) -> None:
    data = CONTENT[:size]
    server = make_server(data)
    with RunFetcher(**QUICK) as transfers:
        url = str(server.directory) if kind == "path" else server.url
        assert fetch(transfers, tmp_path / "part", url, info=info_of(data), leaves=leaves_of(data, CHUNK)).error is None
        assert transfers.stats()["bytes"] == size


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_drops_and_cuts(server: OriginServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A fifth of the connections dropped, a fifth of the bodies cut: exact, and nothing fetched twice."""
    for key, value in server.s3_environment.items():
        monkeypatch.setenv(key, value)
    server.faults.drop = server.faults.truncate = 0.2
    with RunFetcher(**QUICK) as transfers:
        for turn in range(5):
            assert (
                fetch(transfers, tmp_path / f"part{turn}", server.url if kind == "http" else server.s3_url).error
                is None
            )
        stats = transfers.stats()
    assert stats["retries"] > 5
    assert stats["bytes"] == 5 * INFO.bytes
    if kind == "http":  # the other reads ahead of what it hands out
        assert server.bytes_sent["slice"] == 5 * INFO.bytes


def test_retries_in_the_middle_of_a_piece(server: OriginServer, tmp_path: Path) -> None:
    server.faults.truncate = 0.9
    with RunFetcher(connections=2, **QUICK) as transfers:
        assert fetch(transfers, tmp_path / "part", server.url).error is None
    assert len(server.ranges) > 40
    assert server.bytes_sent["slice"] == INFO.bytes, "what came was not asked for again"


def test_too_many_requests(server: OriginServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_at: list[float] = []

    def too_many() -> bool:
        """After twelve, for 0.5 s: one is refused however far apart a busy machine asks."""
        asked_at.append(time.monotonic())
        return len(asked_at) > 12 and time.monotonic() - asked_at[12] < 0.5

    monkeypatch.setattr(server, "too_many", too_many)
    with RunFetcher(connections=16, **QUICK) as transfers:
        began = time.monotonic()
        assert fetch(transfers, tmp_path / "part", server.url).error is None
        took = time.monotonic() - began
        (source,) = transfers._sources.values()
    assert server.statuses[503] > 0
    assert source.limit < 16, "fewer connections for who says that it is too busy"
    assert sum(server.requests.values()) < 14 + 16 + 40 * took, "it is not hammered"


def test_retry_after_is_honoured(server: OriginServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_at: list[float] = []

    def too_many() -> bool:
        """For 0.3 s from the first request on."""
        asked_at.append(time.monotonic())
        return time.monotonic() - asked_at[0] < 0.3

    server.faults.retry_after = "1"
    monkeypatch.setattr(server, "too_many", too_many)
    with RunFetcher(connections=4, **QUICK) as transfers:
        began = time.monotonic()
        assert fetch(transfers, tmp_path / "part", server.url).error is None
        assert 1 <= time.monotonic() - began < scaled(3)
    assert server.statuses[503] <= 4


def test_more_connections_are_faster(make_server: Callable[..., OriginServer], tmp_path: Path) -> None:
    """Where each connection is throttled, 16 move 10 times as much as one; the best of some, as the machine is busy."""
    gains: list[float] = []
    while max(gains, default=0.0) < 10 and len(gains) < 5:
        seconds = {}
        for connections, size in ((1, MIB), (16, 16 * MIB)):
            data = os.urandom(size)
            server = make_server(data)
            server.faults.connection_bytes_per_s = 700_000
            part = tmp_path / f"part{len(gains)}-{connections}"
            with RunFetcher(connections) as transfers:
                began = time.monotonic()
                assert (
                    fetch(transfers, part, server.url, info=info_of(data), leaves=leaves_of(data, CHUNK)).error is None
                )
                seconds[connections] = (time.monotonic() - began) / size
        gains.append(seconds[1] / seconds[16])
    assert max(gains) >= 10, gains


def test_a_black_hole_is_named(server: OriginServer, tmp_path: Path) -> None:
    server.faults.black_hole = True
    with RunFetcher(connections=2, timeout_s=0.8, tries=2, **QUICK) as transfers:
        error = fetch(transfers, tmp_path / "part", server.url, timeouts=Timeouts(0.5, 0.5)).error
    assert type(error) is NetworkError
    for word in (f"127.0.0.1:{server.port}", "failed attempts in", "no answer", "0.5 s", "Check the network"):
        assert word in str(error)


def test_an_outage_is_waited_for(server: OriginServer, tmp_path: Path) -> None:
    server.faults.drop = 1
    threading.Timer(0.5, lambda: setattr(server.faults, "drop", 0)).start()
    with RunFetcher(timeout_s=30, tries=2, **QUICK) as transfers:
        assert fetch(transfers, tmp_path / "part", server.url).error is None


def test_refused_everywhere(make_server: Callable[..., OriginServer], tmp_path: Path) -> None:
    item, other = make_server(), make_server()
    item.faults.missing.add("slice")
    other.faults.forbidden.add("slice")
    with RunFetcher(**QUICK) as transfers:
        error = fetch(transfers, tmp_path / "part", item.url, other.url).error
    assert type(error) is NetworkError
    assert item.url in str(error) and "404" in str(error) and other.url in str(error) and "403" in str(error)


def test_one_of_several_refuses(make_server: Callable[..., OriginServer], tmp_path: Path) -> None:
    item, other = make_server(), make_server()
    item.faults.missing.add("slice")
    with RunFetcher(**QUICK) as transfers:
        assert fetch(transfers, tmp_path / "part", item.url, other.url).error is None


@pytest.mark.parametrize("connections", [1, 8])
def test_the_liar_is_named(make_server: Callable[..., OriginServer], tmp_path: Path, connections: int) -> None:
    """Whoever gave what, the slice is right at the end, and only the liar is ever named."""
    liar, honest = make_server(), make_server()
    liar.faults.corrupt["slice"] = 5  # of the first span, which goes to whoever is named first
    named: list[str] = []
    with RunFetcher(connections, **QUICK) as transfers:
        for turn in range(6):
            moved = fetch(transfers, tmp_path / f"{turn}", liar.url, honest.url, bad=named)
            assert moved.error is None
    assert named and set(named) == {liar.url}
    assert transfers._sources[liar.url].lies == len(named)


@pytest.mark.parametrize("connections", [1, 8])
def test_without_hashes_the_liar_is_named(
    make_server: Callable[..., OriginServer], tmp_path: Path, connections: int
) -> None:
    """No source knows the hashes of the chunks: the slice comes from one at a time, and its id decides."""
    liars, honest = [make_server(), make_server()], make_server()
    for liar in liars:
        liar.faults.corrupt["slice"] = 3_000_000
    gone = make_server()
    gone.faults.missing.add("slice")
    urls, named = [*(liar.url for liar in liars), gone.url, honest.url], list[str]()
    with RunFetcher(connections, **QUICK) as transfers:
        for turn in range(3):
            assert fetch(transfers, tmp_path / f"{turn}", *urls, bad=named, leaves=b"").error is None
        assert named and set(named) <= {liar.url for liar in liars}
        error = fetch(transfers, tmp_path / "lost", *urls[:3], leaves=b"").error
    assert type(error) is IntegrityError and "404" in str(error) and all(liar.url in str(error) for liar in liars)


def test_a_lie_among_several_is_traced(make_server: Callable[..., OriginServer], tmp_path: Path) -> None:
    """Three gave bytes together: fetched anew from one alone, and what differs names who lied."""
    servers = [make_server() for _ in range(3)]
    for server in servers:
        server.faults.connection_bytes_per_s = 3_000_000
    servers[0].faults.corrupt = {"slice": 100}
    named: list[str] = []
    with RunFetcher(3, **QUICK) as transfers:
        for turn in range(4):
            assert fetch(transfers, tmp_path / f"{turn}", *(s.url for s in servers), bad=named).error is None
            if named:
                break
    assert named == [servers[0].url]


def test_only_liars(make_server: Callable[..., OriginServer], tmp_path: Path) -> None:
    servers = [make_server(), make_server()]
    for server in servers:
        server.faults.corrupt["slice"] = 5
    named: list[str] = []
    with RunFetcher(**QUICK) as transfers:
        error = fetch(transfers, tmp_path / "part", *(s.url for s in servers), bad=named).error
    assert type(error) is IntegrityError
    assert sorted(named) == sorted(s.url for s in servers)
    assert "slice slice" in str(error) and all(s.url in str(error) for s in servers)


def test_a_wrong_resumed_part_blames_nobody(server: OriginServer, tmp_path: Path) -> None:
    part = tmp_path / "part"
    create(part, map_path_of(part), INFO)
    file = ChunkFile(part, map_path_of(part), INFO)
    file.set_leaves(LEAVES)
    file.marks[:4] = PRESENT  # Of zeros.
    part.write_bytes(bytes(INFO.bytes))
    named: list[str] = []
    with RunFetcher(**QUICK) as transfers:
        assert fetch(transfers, part, server.url, bad=named).error is None
    assert named == []


def test_killed_before_the_rename(server: OriginServer, tmp_path: Path) -> None:
    part = tmp_path / "part"
    with RunFetcher(**QUICK) as transfers:
        for content, requests in ((CONTENT, 0), (bytes(INFO.bytes), 14)):
            part.write_bytes(content)
            server.reset()
            assert fetch(transfers, part, server.url).error is None
            assert server.requests["slice"] == requests


def test_the_fastest_is_asked_most(make_server: Callable[..., OriginServer], tmp_path: Path) -> None:
    slow, fast = make_server(), make_server()
    slow.faults.connection_bytes_per_s = 1_000_000
    with RunFetcher(2, **QUICK) as transfers:
        assert fetch(transfers, tmp_path / "part", slow.url, fast.url).error is None
    assert fast.bytes_sent["slice"] > 3 * slow.bytes_sent["slice"]


def test_first_started_first_moved(make_server: Callable[..., OriginServer], tmp_path: Path) -> None:
    """Pieces are asked for in the order of starts: on average, as any thread may have to wait for a processor."""
    server = make_server()
    server.faults.bytes_per_s = 20_000_000
    names = [f"slice{i}" for i in range(4)]
    for name in names:
        (server.directory / name).write_bytes(CONTENT)
    ended: list[str] = []
    with RunFetcher(4, **QUICK) as transfers:
        origins = [open_origin(server.url)]
        moved = [
            start(transfers, info_of(CONTENT, name), tmp_path / name, origins, run_bytes=1 << 18) for name in names
        ]
        for name, each in zip(names, moved):
            each.on_done(lambda _, name=name: ended.append(name))
        assert all(each.wait() and each.error is None for each in moved)
        until(lambda: len(ended) == len(names))  # Who waits may go on before who asked to be called is called.
        moved[0].on_done(lambda _: ended.append("late"))
    assert sorted(ended[:-1]) == names and ended[-1] == "late"
    asked = [name for name, _, _ in server.ranges]
    turns = [[turn for turn, other in enumerate(asked) if other == name] for name in names]
    means = [sum(turn) / len(turn) for turn in turns]
    assert means == sorted(means), asked


def hold_after(server: OriginServer, num_bytes: int) -> None:
    """The server sends so many bytes more, a piece more or less for each connection, and then none until it closes."""
    goal = server.bytes_sent["slice"] + num_bytes

    def pace(size: int) -> None:
        until(lambda: server.bytes_sent["slice"] < goal or server.stopping.is_set(), 120)

    server.faults.bytes_per_s, server.pace = 1.0, pace  # type: ignore[method-assign]  # piece by piece


def test_cancel_and_resume(make_server: Callable[..., OriginServer], tmp_path: Path) -> None:
    server, part = make_server(), tmp_path / "part"
    hold_after(server, 1_600_000)
    with RunFetcher(2, **QUICK) as transfers:
        moved = start(transfers, INFO, part, [open_origin(server.url, timeouts=PATIENT)])
        until(lambda: moved.received >= 1_500_000)
        moved.cancel()
        assert moved.wait(0) and isinstance(moved.error, TransferCancelledError)
        remaining = part.read_bytes()
        moved.cancel()
        server.close()  # It sends what it held back.
        time.sleep(0.1)
        assert part.read_bytes() == remaining, "nothing is written after the end"
        retained = kept_bytes(part)
        assert retained >= 3 << 18
        server = make_server()  # Another, as a request to the first may still be on its way.
        assert fetch(transfers, part, server.url).error is None
        assert sum(stop - start for _, start, stop in server.ranges) == INFO.bytes - retained


def test_chunks_that_have_a_check_instead_of_hashes(server: OriginServer, tmp_path: Path) -> None:
    """An object's bytes from an offset on: a wrong chunk costs its own bytes; a file keeps its header."""
    offset, wrong = 1000, [5]
    num_bytes = len(CONTENT) - offset
    info = SliceInfo(0, "slice", num_bytes, "0" * 64, 0, 0, CHUNK, offset)
    cache, origins = ChunkCache(tmp_path / "cache", 8 * MIB), [open_origin(server.url)]
    chunks = np.arange(-(-num_bytes // CHUNK))
    [entry], _ = cache.open_pinned([(info, chunks)])

    def check(chunk: int, data: memoryview) -> bool:
        start = offset + chunk * CHUNK
        return chunk not in wrong and bytes(data) == CONTENT[start : start + len(data)]

    def fetch_absent() -> Exception | None:
        claimed, reason = cache.claim(entry, chunks)
        assert not reason
        moved = ChunkTransfer(fetcher, entry, replace(info, sha256=""), origins, chunks=claimed).start()
        assert moved.wait()
        cache.complete(entry, claimed)
        return moved.error

    with RunFetcher(2, **QUICK) as fetcher:
        entry.check = check
        assert isinstance(fetch_absent(), IntegrityError) and entry.marks[5] == ABSENT
        assert set(entry.marks.tolist()) == {ABSENT, PRESENT}
        assert isinstance(fetch_absent(), IntegrityError)
        wrong.clear()
        assert fetch_absent() is None and entry.is_complete()
    assert bytes(entry.data) == CONTENT[offset:] == entry.path.read_bytes()[offset:]
    assert entry.path.stat().st_size == len(CONTENT)
    checked: list[int] = []
    for pool_bytes in (1 << 30, 0):  # In this thread, and by several.
        entry.check = lambda chunk, data: check(chunk, data) and checked.append(chunk) is None
        entry.doubt(chunks)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("forebay.storage.chunk_file._POOL_BYTES", pool_bytes)
            assert entry.verify(chunks) and sorted(checked) == chunks.tolist() != checked
        checked.clear()
    wrong.append(7)
    entry.doubt(chunks)
    assert not entry.verify(chunks) and np.flatnonzero(entry.marks == ABSENT).tolist() == [7]
    cache.close()


def test_a_cache_keeps_the_chunks_of_a_cancelled_transfer(
    make_server: Callable[..., OriginServer], tmp_path: Path
) -> None:
    server, cache = make_server(), ChunkCache(tmp_path / "cache", 8 * MIB)
    hold_after(server, 1_600_000)

    def claim() -> tuple[ChunkFile, NDArray[np.int64]]:
        claimed, reason = cache.claim_slice(INFO)
        assert claimed is not None, reason
        return claimed

    with RunFetcher(2, **QUICK) as fetcher:
        entry, chunks = claim()
        origins = [open_origin(server.url, timeouts=PATIENT)]
        moved = ChunkTransfer(fetcher, entry, INFO, origins, chunks=chunks, read_leaves=lambda: LEAVES).start()
        until(lambda: moved.received >= 1_500_000)
        moved.cancel()
        cache.complete(entry, chunks)
        cache.unpin_slice(INFO.sha256)
        entry, absent = claim()
        retained = INFO.bytes - sum(min(CHUNK, INFO.bytes - chunk * CHUNK) for chunk in absent.tolist())
        assert 0 < retained < INFO.bytes and cache.get(INFO.sha256) is None
        server.close()
        server = make_server()  # Another, as a request to the first may still be on its way.
        origins = [open_origin(server.url, timeouts=PATIENT)]
        moved = ChunkTransfer(fetcher, entry, INFO, origins, chunks=absent).start()
        assert moved.wait() and moved.error is None and moved.received == INFO.bytes
    assert sum(stop - start for _, start, stop in server.ranges) == INFO.bytes - retained
    cache.complete(entry, absent)
    path = cache.get(INFO.sha256)
    assert path is not None and path.read_bytes() == CONTENT
    cache.close()


def test_close(server: OriginServer, tmp_path: Path) -> None:
    server.faults.black_hole = True
    transfers = RunFetcher(4, **QUICK)
    moved = start(transfers, INFO, tmp_path / "part", [open_origin(server.url, timeouts=Timeouts(0.2, 0.2))])
    transfers.close()
    assert moved.wait(0) and isinstance(moved.error, TransferCancelledError)
    transfers.close()
    with pytest.raises(UsageError, match="closed"):
        start(transfers, INFO, tmp_path / "part2", [open_origin(server.url)])


def kept_bytes(part: Path) -> int:
    marks = ChunkFile(part, map_path_of(part), INFO).marks
    return sum(min(INFO.bytes - piece * CHUNK, CHUNK) for piece, mark in enumerate(marks) if mark)


KILLED = """
import sys, time
from pathlib import Path
from forebay.dataset.manifest import SliceInfo
from forebay.storage.chunk_file import PRESENT, ChunkFile, create
from forebay.storage.fetch import RunFetcher
from forebay.storage.origins import open_origin
from forebay.storage.transfers import FileTransfer
url, part, size, sha256, leaves = sys.argv[1:]
info = SliceInfo(0, "slice", int(size), sha256, 1, 1, 1 << 16)
moved = FileTransfer(
    RunFetcher(4), info, Path(part), [open_origin(url)], read_leaves=lambda: bytes.fromhex(leaves)
).start()
print("started", flush=True)
moved.wait()
"""


def test_killed_at_any_moment(make_server: Callable[..., OriginServer], tmp_path: Path) -> None:
    """kill -9 again and again: each run fetches only what is missing, and a piece for each connection at most."""
    server, part, chance, kills = make_server(), tmp_path / "part", random.Random(5), 0
    while kills < 3 or not kept_bytes(part):  # On a busy machine each may be killed before its first chunk.
        kills += 1
        num_bytes = chance.randrange(250_000, 900_000)  # Three times this is less than all.
        goal = server.bytes_sent["slice"] + num_bytes
        hold_after(server, num_bytes)
        command = [sys.executable, "-c", KILLED, server.url, str(part), str(INFO.bytes), INFO.sha256, LEAVES.hex()]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        until(lambda goal=goal: server.bytes_sent["slice"] >= goal)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    retained = kept_bytes(part)
    server = make_server()  # Another, as a request of the killed to the first may still be on its way.
    with RunFetcher(**QUICK) as transfers:
        assert fetch(transfers, part, server.url).error is None
    assert sum(stop - start for _, start, stop in server.ranges) == INFO.bytes - retained


def test_a_full_disk(make_server: Callable[..., OriginServer], tmp_path: Path) -> None:
    """The part stays and is resumed when there is room. A tmpfs where that may be mounted, else a limit."""
    server, disk = make_server(), tmp_path / "disk"
    disk.mkdir()
    mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode == 0
    )
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    part = disk / "part"
    try:
        with RunFetcher(2, **QUICK) as transfers:
            if not mounted:
                resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, old[1]))
            error = fetch(transfers, part, server.url).error
            assert isinstance(error, UsageError)
            assert str(part) in str(error) and f"{INFO.bytes} bytes" in str(error) and "Free space" in str(error)
            del error  # It has the frames of the transfer.
            if mounted:
                subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            retained = kept_bytes(part)
            assert retained > MIB or not mounted
            server = make_server()  # Another, as a request to the first may still be on its way.
            assert fetch(transfers, part, server.url).error is None
            assert sum(stop - start for _, start, stop in server.ranges) == INFO.bytes - retained
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, ignored)
        if mounted:
            gc.collect()  # The file is mapped as long as its transfer lives.
            subprocess.run(["umount", disk], check=True)


def test_memory_is_bounded(make_server: Callable[..., OriginServer], tmp_path: Path) -> None:
    """16 connections x 256 KiB, whatever the slice's size."""
    data = os.urandom(1 << 20) * 96
    server = make_server(data)
    info, leaves = info_of(data), leaves_of(data, CHUNK)
    del data
    process, max_value, stop = psutil.Process(), [0], threading.Event()
    with RunFetcher(16) as transfers:
        fetch(transfers, tmp_path / "warm", server.url, info=info, leaves=leaves)
        before = process.memory_info().rss

        def watch() -> None:
            while not stop.wait(0.002):
                max_value[0] = max(max_value[0], process.memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        moved = start(transfers, info, tmp_path / "part", [open_origin(server.url)], leaves=leaves)
        assert moved.wait() and moved.error is None
        stop.set()
        watcher.join()
    assert max_value[0] - before < 32 * MIB
