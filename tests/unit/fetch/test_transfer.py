"""Transfers from servers that drop, cut, lie, throttle or fall silent; cancelled and resumed."""

import errno
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.dataset.chunks import hash_slice
from forebay.dataset.manifest import SliceInfo
from forebay.errors import IntegrityError, NetworkError, ProtocolError, UsageError
from forebay.fetch.cache import ChunkCache
from forebay.fetch.chunk_file import ABSENT, PRESENT, ChunkFile, create
from forebay.fetch.engine import RunFetcher
from forebay.fetch.runs import TransferCancelledError
from forebay.fetch.transfers import ChunkTransfer, FileTransfer, map_path_of
from forebay.storage.base import Origin, Timeouts
from forebay.storage.origins import open_origin
from support import cached
from support.origin_server import OriginServer
from support.waiting import until

MIB, CHUNK = 1 << 20, 1 << 16
CONTENT = random.Random(7).randbytes(3_500_001)
PATIENT = Timeouts(60.0, 60.0)  # A request given up on a machine that stands still is one more request.
QUICK = {"max_backoff_s": 0.05}
Pieces = Callable[[int, int], Iterator[memoryview]]


def slice_info(data: bytes, name: str = "slice") -> SliceInfo:
    return SliceInfo(0, name, len(data), cached.info_of(data, CHUNK).sha256, 1, 1, CHUNK)


class Several(Origin):
    """Several origins as one; `named` gets the URLs of those that broke the protocol."""

    def __init__(self, origins: Sequence[Origin], named: list[str] | None = None):
        self.origins, self.named, self.url = origins, named, "several"

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        raise AssertionError

    def sources(self) -> list[Origin]:
        return [source for origin in self.origins for source in origin.sources()]

    def report(self, source: Origin, error: NetworkError) -> bool:
        if self.named is not None and isinstance(error, ProtocolError):
            self.named.append(source.url)
        return False


INFO, LEAVES = slice_info(CONTENT), cached.leaves_of(CONTENT, CHUNK)


def start(
    fetcher: RunFetcher, part: Path, *origins: Origin | str, info: SliceInfo = INFO, leaves: bytes = LEAVES,
    named: list[str] | None = None, timeouts: Timeouts = PATIENT,
) -> FileTransfer:  # fmt: skip
    """Start a transfer; `named` gets the URLs of the sources that broke the protocol."""
    opened = [open_origin(each, timeouts=timeouts) if isinstance(each, str) else each for each in origins]
    return FileTransfer(
        fetcher, info, part, Several(opened, named), read_leaves=lambda: leaves, run_bytes=1 << 18
    ).start()


def fetch(fetcher: RunFetcher, part: Path, *origins: Origin | str, **more: Any) -> Exception | None:
    """Return the error of a transfer; without one the part has the bytes of the slice."""
    transfer, info = start(fetcher, part, *origins, **more), more.get("info", INFO)
    assert transfer.wait()
    if transfer.error is None:
        assert part.stat().st_size == info.bytes == transfer.received
        assert hash_slice(part, info.chunk_bytes)[0] == info.sha256
    return transfer.error


@pytest.fixture
def make_server(tmp_path) -> Iterator[Callable[..., OriginServer]]:
    created = []

    def make(data=CONTENT):
        folder = tmp_path / f"server{len(created)}"
        folder.mkdir()
        (folder / "slice").write_bytes(data)
        created.append(OriginServer(folder, seed=len(created)).__enter__())
        return created[-1]

    yield make
    for server in created:
        server.close()


@pytest.fixture
def server(make_server) -> OriginServer:
    return make_server()


@pytest.mark.parametrize("kind, drop, truncate", [("http", 0.4, 0.4), ("s3", 0.4, 0.4), ("http", 0.0, 0.9)])
def test_no_byte_is_fetched_twice(server, tmp_path, monkeypatch, kind, drop, truncate):
    for key, value in server.s3_environment.items():
        monkeypatch.setenv(key, value)
    server.faults.drop, server.faults.truncate = drop, truncate
    with RunFetcher(**QUICK) as fetcher:
        assert fetch(fetcher, tmp_path / "part", server.url if kind == "http" else server.s3_url) is None
        stats = fetcher.stats()
    assert stats["retries"] > 0 and stats["bytes"] == INFO.bytes
    if kind == "http":  # a bucket's client reads ahead
        assert server.bytes_sent["slice"] == INFO.bytes


def test_too_many_requests(server, tmp_path, monkeypatch):
    """On a clock that advances a second each time it is read: the next request waits as long as the server says."""
    clock, times = itertools.count(), list[int]()

    def too_many():
        times.append(next(clock))
        return len(times) <= 2

    server.faults.retry_after = "500"
    monkeypatch.setattr(server, "too_many", too_many)
    with RunFetcher(1) as fetcher, monkeypatch.context() as patched:
        patched.setattr("forebay.fetch.engine.time", SimpleNamespace(monotonic=lambda: float(next(clock))))
        assert fetch(fetcher, tmp_path / "part", server.url) is None
    assert all(later - earlier > 500 for earlier, later in itertools.pairwise(times[:3]))
    assert server.statuses[503] == 2


def test_a_silent_server_is_named(server, tmp_path):
    server.faults.black_hole = True
    data = CONTENT[:1000]
    with RunFetcher(timeout_s=0.0, tries=2, **QUICK) as fetcher:
        error = fetch(fetcher, tmp_path / "part", server.url, info=slice_info(data), timeouts=Timeouts(60.0, 0.1))
    assert type(error) is NetworkError
    for word in (f"127.0.0.1:{server.port}", "got 0 of 1000 bytes", "2 failed attempts in", "no answer",
                 "Check the network"):  # fmt: skip
        assert word in str(error)


def test_an_outage_is_waited_for(server, tmp_path, monkeypatch):
    """More failures than `tries` are no error before `timeout_s`."""
    failures = iter([True] * 12)
    monkeypatch.setattr(server, "strikes", lambda part, request: next(failures, False))
    with RunFetcher(1, tries=2, **QUICK) as fetcher:
        assert fetch(fetcher, tmp_path / "part", server.url) is None
        assert fetcher.retries == 12


@pytest.mark.parametrize("connections", [1, 8])
def test_only_liars_are_named(make_server, tmp_path, connections):
    liars, absent, honest = [make_server(), make_server()], make_server(), make_server()
    for liar in liars:
        liar.faults.corrupt["slice"] = 5  # of the run that the first source is asked for
    absent.faults.missing.add("slice")
    liar_urls, named = [liar.url for liar in liars], list[str]()
    urls = [*liar_urls, absent.url]
    with RunFetcher(connections, **QUICK) as fetcher:
        for turn in range(3):
            assert fetch(fetcher, tmp_path / f"{turn}", *urls, honest.url, named=named) is None
        assert named and set(named) <= set(urls[:2])
        assert sum(fetcher._sources[url].lies for url in urls[:2]) == len(named)
        named.clear()
        error = fetch(fetcher, tmp_path / "lost", *liar_urls, named=named)
        absent_too = fetch(fetcher, tmp_path / "absent", *urls)
    assert type(error) is IntegrityError and sorted(set(named)) == sorted(urls[:2])
    assert type(absent_too) is NetworkError, "a source that does not have it says nothing of the slice"
    text = str(absent_too)
    assert "slice slice" in text and "404" in text and all(url in text for url in urls)


def test_what_an_earlier_process_left(server, tmp_path):
    """A complete part is taken; wrong bytes of our own are fetched again, and no source is blamed."""
    part, named = tmp_path / "part", list[str]()
    with RunFetcher(**QUICK) as fetcher:
        for content, requests in ((CONTENT, 0), (bytes(INFO.bytes), 14)):
            part.write_bytes(content)
            server.reset()
            assert fetch(fetcher, part, server.url, named=named) is None
            assert server.requests["slice"] == requests
        create(part, map_path_of(part), INFO)
        file = ChunkFile(part, map_path_of(part), INFO)
        file.set_leaves(LEAVES)
        file.marks[:4] = PRESENT
        part.write_bytes(bytes(INFO.bytes))
        assert fetch(fetcher, part, server.url, named=named) is None
    assert named == []


def test_what_starts_first_is_fetched_first(server, tmp_path, monkeypatch):
    names, started = ["a", "b", "c"], threading.Event()
    for name in names:
        (server.directory / name).write_bytes(CONTENT)
    monkeypatch.setattr(server, "too_many", lambda: not started.wait())
    with RunFetcher(1, **QUICK) as fetcher:
        transfers = [start(fetcher, tmp_path / name, server.url, info=slice_info(CONTENT, name)) for name in names]
        started.set()
        assert all(transfer.wait() and transfer.error is None for transfer in transfers)
    assert [name for name, _, _ in server.ranges] == [name for name in names for _ in range(14)]


def test_chunks_that_have_a_check_instead_of_hashes(server, tmp_path):
    """An object's bytes from an offset on: a wrong chunk costs its own bytes; a file keeps its header."""
    offset, wrong = 1000, [5]
    num_bytes = len(CONTENT) - offset
    info = SliceInfo(0, "slice", num_bytes, "0" * 64, 0, 0, CHUNK, offset)
    cache, origin = ChunkCache(tmp_path / "cache", 8 * MIB), open_origin(server.url, timeouts=PATIENT)
    chunks = np.arange(-(-num_bytes // CHUNK))
    [entry], _ = cache.open_pinned([(info, chunks)])

    def check(chunk, data):
        start = offset + chunk * CHUNK
        return chunk not in wrong and bytes(data) == CONTENT[start : start + len(data)]

    def fetch_absent():
        claimed, reason = cache.claim(entry, chunks)
        assert not reason
        transfer = ChunkTransfer(fetcher, entry, replace(info, sha256=""), origin, chunks=claimed).start()
        assert transfer.wait()
        cache.complete(entry, claimed)
        return transfer.error

    with RunFetcher(2, **QUICK) as fetcher:
        entry.check = check
        assert isinstance(fetch_absent(), IntegrityError) and entry.marks[5] == ABSENT
        assert set(entry.marks.tolist()) == {ABSENT, PRESENT}
        wrong.clear()
        assert fetch_absent() is None and entry.is_complete()
    assert bytes(entry.data) == CONTENT[offset:] == entry.path.read_bytes()[offset:]
    assert entry.path.stat().st_size == len(CONTENT)
    checked = []
    for pool_bytes in (1 << 30, 0):  # in this thread, and by several
        entry.check = lambda chunk, data: check(chunk, data) and checked.append(chunk) is None
        entry.doubt(chunks)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("forebay.fetch.chunk_file._POOL_BYTES", pool_bytes)
            assert entry.verify(chunks) and sorted(checked) == chunks.tolist() != checked
        checked.clear()
    wrong.append(7)
    entry.doubt(chunks)
    assert not entry.verify(chunks) and np.flatnonzero(entry.marks == ABSENT).tolist() == [7]
    cache.close()


def test_close(server, tmp_path):
    server.faults.black_hole = True
    fetcher = RunFetcher(4, **QUICK)
    transfer = start(fetcher, tmp_path / "part", server.url, timeouts=Timeouts(60.0, 0.1))
    fetcher.close()
    assert transfer.wait(0) and isinstance(transfer.error, TransferCancelledError)
    fetcher.close()
    with pytest.raises(UsageError, match="closed"):
        start(fetcher, tmp_path / "part2", server.url)


class Fake(Origin):
    """An origin made of a function."""

    def __init__(self, url: str, read: Pieces):
        self.url, self._read = url, read

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        return self._read(start, stop)

    def sources(self) -> Sequence[Origin]:
        return [self]


def raising(error: Exception) -> Pieces:
    def read(start, stop):
        raise error

    return read


def honest(start: int, stop: int) -> Iterator[memoryview]:
    yield memoryview(CONTENT)[start:stop]


def test_cancel_and_resume(tmp_path):
    """Two connections have sent three of their four chunks when they are cancelled: these six are kept."""
    part, released, received = tmp_path / "part", threading.Event(), 6 * CHUNK

    def paused(start, stop):
        yield from honest(start, stop - CHUNK)
        assert released.wait()
        yield from honest(stop - CHUNK, stop)

    with RunFetcher(2, **QUICK) as fetcher:
        transfer = start(fetcher, part, Fake("x", paused))
        until(lambda: transfer.received == received)
        transfer.cancel()
        assert transfer.wait(0) and isinstance(transfer.error, TransferCancelledError)
        remaining = part.read_bytes()
        transfer.cancel()
        released.set()
    assert part.read_bytes() == remaining, "nothing is written after the end"
    with RunFetcher(2, **QUICK) as fetcher:
        assert fetch(fetcher, part, Fake("x", honest)) is None
        assert fetcher.stats()["bytes"] == INFO.bytes - received


def too_much(start: int, stop: int) -> Iterator[memoryview]:
    yield memoryview(bytes(stop - start + 1))


@pytest.mark.parametrize("fault", [raising(ProtocolError("nonsense")), too_much])
def test_a_violation_is_reported(tmp_path, fault):
    named = []
    with RunFetcher(4, **QUICK) as fetcher:
        assert fetch(fetcher, tmp_path / "part", Fake("bad", fault), Fake("good", honest), named=named) is None
        assert set(named) == {"bad"}
        assert type(fetch(fetcher, tmp_path / "part2", Fake("bad", fault))) is NetworkError


def test_without_a_thread_a_transfer_ends_and_the_next_one_is_tried(tmp_path, monkeypatch):
    def cannot(self):
        raise RuntimeError("can't start new thread")

    with RunFetcher(3, **QUICK) as fetcher:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", cannot)
            assert isinstance(fetch(fetcher, tmp_path / "part", Fake("x", honest)), NetworkError)
        assert fetch(fetcher, tmp_path / "part", Fake("x", honest)) is None
        fetcher._pid -= 1
        with pytest.raises(UsageError, match="a fork of it"):
            start(fetcher, tmp_path / "forked", Fake("x", honest))
        fetcher._pid += 1


def test_our_own_fault_is_not_hidden(tmp_path):
    with RunFetcher(1, **QUICK) as fetcher:
        assert isinstance(fetch(fetcher, tmp_path / "part", Fake("x", raising(ValueError("a bug")))), ValueError)
        error = fetch(fetcher, tmp_path / "part", Fake("x", raising(OSError(errno.EDQUOT, "quota"))))
        assert isinstance(error, UsageError) and "quota" in str(error)
        with pytest.raises(UsageError, match="Check the directory"):
            start(fetcher, tmp_path / "absent" / "part", Fake("x", honest))
        assert fetch(fetcher, tmp_path / "part", Fake("x", honest)) is None, "the pool lives on"


@pytest.mark.parametrize("wrong", [{"connections": 0}, {"tries": 0}])
def test_bad_arguments(wrong):
    with pytest.raises(UsageError, match="expected at least one connection and try"):
        RunFetcher(**wrong)
