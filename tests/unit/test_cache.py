"""The cache's budget, pins, eviction and what a kill leaves behind."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from millrace.errors import UsageError
from millrace.store.cache import SliceCache


def put(cache: SliceCache, content: bytes) -> str:
    sha256 = hashlib.sha256(content).hexdigest()
    with cache.fetching(sha256, len(content)) as part:
        assert cache.used_bytes() <= cache.budget_bytes
        part.write_bytes(content)
        cache.commit(sha256)
    return sha256


def age(cache: SliceCache, sha256: str, at: int) -> None:
    os.utime(cache.path_of(sha256), (at, at))


def test_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path, 30)
    names = [put(cache, bytes([number]) * 10) for number in range(3)]
    for number, name in enumerate(names):
        age(cache, name, 1000 + number)
    assert cache.get(names[0]) is not None  # used now
    fourth = put(cache, b"d" * 10)
    assert [cache.get(name) is not None for name in [*names, fourth]] == [True, False, True, True]
    assert cache.used_bytes() == 30


def test_a_pinned_slice_stays_whoever_asks_for_room(tmp_path: Path) -> None:
    cache, other = SliceCache(tmp_path, 20), SliceCache(tmp_path, 20)
    first, second = put(cache, b"a" * 10), put(cache, b"b" * 10)
    cache.pin(first)
    cache.pin(first)
    put(other, b"c" * 10)
    assert cache.get(first) is not None and cache.get(second) is None
    cache.unpin(first)
    with pytest.raises(UsageError, match=r"no room for 20 bytes .* pinned"):
        put(other, b"d" * 20)
    cache.unpin(first)
    put(other, b"d" * 20)
    assert cache.get(first) is None
    with pytest.raises(UsageError, match="not pinned"):
        cache.unpin(first)


def test_a_slice_larger_than_the_budget(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has 11 bytes, the budget .* is 10"):
        put(SliceCache(tmp_path, 10), b"x" * 11)
    with pytest.raises(UsageError, match="over 0"):
        SliceCache(tmp_path, 0)
    with pytest.raises(UsageError, match="sha256"):
        SliceCache(tmp_path, 10).get("../../etc/passwd")


def test_a_fetch_under_way_counts_in_full(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path, 20)
    with cache.fetching("a" * 64, 15) as part:
        assert cache.used_bytes() == 15
        part.write_bytes(b"x" * 4)
        assert cache.used_bytes() == 15
        with pytest.raises(UsageError, match="being fetched"):
            put(cache, b"y" * 6)
    assert cache.used_bytes() == 4  # broken off: kept to resume
    put(cache, b"y" * 18)  # and the first to go
    assert not part.exists()


def test_one_fetch_a_slice(tmp_path: Path) -> None:
    cache, entered, done = SliceCache(tmp_path, 100), threading.Event(), []
    sha256 = hashlib.sha256(b"abc").hexdigest()

    def second() -> None:
        entered.set()
        with SliceCache(tmp_path, 100).fetching(sha256, 3):
            done.append(cache.get(sha256) is not None)

    with cache.fetching(sha256, 3) as part:
        waiting = threading.Thread(target=second)
        waiting.start()
        assert entered.wait(10) and not done
        part.write_bytes(b"abc")
        cache.commit(sha256)
    waiting.join(10)
    assert done == [True]


def test_a_killed_process_holds_neither_pin_nor_reservation(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path, 20)
    first = put(cache, b"a" * 5)
    code = (
        "import os, signal, sys; from millrace.store.cache import SliceCache\n"
        f"cache = SliceCache({str(tmp_path)!r}, 20); cache.pin({first!r})\n"
        "with cache.fetching('b' * 64, 15) as part:\n"
        "    part.write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    assert cache.used_bytes() == 9
    put(cache, b"c" * 20)
    assert cache.get(first) is None and cache.used_bytes() == 20


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"x" * 50)
    cache = SliceCache(tmp_path, 10)
    put(cache, b"a" * 10)
    put(cache, b"b" * 10)
    assert (tmp_path / "notes.txt").exists() and cache.used_bytes() == 10


def test_the_directory_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="Choose another directory"):
        SliceCache(tmp_path / "file" / "cache", 10)
