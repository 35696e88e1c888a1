"""The cache's budget, pins, eviction and what a kill leaves behind."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.cache import cache as cache_module
from forebay.cache.cache import NotReserved, Reservation, SliceCache
from forebay.cache.eviction import DiskBudget, Evict
from forebay.errors import UsageError
from forebay.storage import locks
from support.cached import put, reserve
from support.calibration import scaled


def age(cache: SliceCache, sha256: str, at: int) -> None:
    os.utime(cache.path_of(sha256), (at, cache.path_of(sha256).stat().st_mtime))


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
    reserved = reserve(cache, "a" * 64, 15)
    assert cache.used_bytes() == 15
    reserved.part.write_bytes(b"x" * 4)
    assert cache.used_bytes() == 15
    with pytest.raises(UsageError, match="being fetched"):
        put(cache, b"y" * 6)
    reserved.release()
    assert cache.used_bytes() == 4  # broken off: kept to resume
    put(cache, b"y" * 18)  # and the first to go
    assert not reserved.part.exists()


def test_one_fetch_a_slice(tmp_path: Path) -> None:
    cache, other = SliceCache(tmp_path, 100), SliceCache(tmp_path, 100)
    sha256 = hashlib.sha256(b"abc").hexdigest()
    reserved = reserve(cache, sha256, 3)
    assert other.try_reserve(sha256, 3) == NotReserved("busy") == cache.try_reserve(sha256, 3)
    reserved.part.write_bytes(b"abc")
    reserved.commit()
    assert other.try_reserve(sha256, 3) == NotReserved("cached") and other.get(sha256) is not None


def test_a_killed_process_holds_neither_pin_nor_reservation(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path, 20)
    first = put(cache, b"a" * 5)
    code = (
        "import os, signal, sys; from forebay.cache.cache import SliceCache\n"
        f"cache = SliceCache({str(tmp_path)!r}, 20); cache.pin({first!r})\n"
        "cache.try_reserve('b' * 64, 15).part.write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=scaled(60)).returncode == -9
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


def test_a_reservation_does_not_wait(tmp_path: Path) -> None:
    cache, other = SliceCache(tmp_path, 30), SliceCache(tmp_path, 30)
    first = cache.try_reserve("a" * 64, 20)
    assert isinstance(first, Reservation) and cache.used_bytes() == 20
    assert other.try_reserve("a" * 64, 20) == NotReserved("busy")
    refused = other.try_reserve("b" * 64, 11)
    assert isinstance(refused, NotReserved) and refused.reason == "no room" and "20 in use" in refused.detail
    first.part.write_bytes(b"x" * 20)
    assert first.commit() == tmp_path / ("a" * 64)
    assert other.try_reserve("a" * 64, 20) == NotReserved("cached")
    second = other.try_reserve("b" * 64, 11)  # nobody wants the first any more
    assert isinstance(second, Reservation) and second.evicted == ["a" * 64]
    second.release()
    second.release()
    assert cache.used_bytes() == 0
    with pytest.raises(UsageError, match="has 31 bytes"):
        cache.try_reserve("c" * 64, 31)


def test_eviction_goes_by_what_all_will_read(tmp_path: Path) -> None:
    mine, theirs = SliceCache(tmp_path, 30), SliceCache(tmp_path, 30)
    names = [put(mine, bytes([number]) * 10) for number in range(3)]
    soon, late, unwanted = names
    age(mine, unwanted, 1 << 33)  # used last, and yet the first to go
    theirs.publish({soon: (4, 6, None), late: (20, 20, None)})
    mine.publish({late: (40, 41, 60), soon: (50, 50, None)})
    assert evicted(mine, "1" * 64, steps=2.0) == [unwanted]
    put(mine, b"d" * 10)
    theirs.set_position(1)
    age(mine, names[0], 1)
    pinned = SliceCache(tmp_path, 30)
    put(mine, b"e" * 10)  # in the place of d, which nobody wants
    pinned.pin(put(mine, b"e" * 10))
    assert evicted(mine, "1" * 64, steps=2.0, evict="unwanted") is None
    assert evicted(mine, "1" * 64, steps=19.0) is None  # none is read later than in 19 steps by both
    assert evicted(mine, "1" * 64, steps=18.0) == [late]
    pinned.pin(put(mine, b"f" * 10))
    assert evicted(mine, "2" * 64, steps=2.0) == [soon]


def evicted(cache: SliceCache, sha256: str, steps: float, evict: Evict = "later") -> list[str] | None:
    reserved = cache.try_reserve(sha256, 10, steps=steps, evict=evict)
    if isinstance(reserved, NotReserved):
        return None
    reserved.part.write_bytes(b"x" * 10)
    reserved.commit()
    cache.path_of(sha256).unlink()
    return reserved.evicted


def test_of_two_that_need_room_at_once_the_elder_gets_it(tmp_path: Path) -> None:
    elder, younger = SliceCache(tmp_path, 20), SliceCache(tmp_path, 20)
    theirs, ours = put(younger, b"a" * 10), put(elder, b"b" * 10)
    younger.publish({theirs: (0, 0, None)})
    elder.publish({ours: (0, 0, None)})

    def next_use(sha256: str) -> float:
        return 0.0 if sha256 in (theirs, "c" * 64) else float("inf")

    refused = younger.try_reserve("c" * 64, 10, next_use=next_use)
    assert isinstance(refused, NotReserved) and refused.reason == "no room"
    taken = elder.try_reserve("d" * 64, 10, next_use=lambda sha256: 0.0 if sha256 == ours else float("inf"))
    assert isinstance(taken, Reservation) and taken.evicted == [theirs]
    taken.release()


def test_a_dead_process_wants_nothing(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path, 10)
    name = put(cache, b"a" * 10)
    code = (
        "import os, signal; from forebay.cache.cache import SliceCache\n"
        f"cache = SliceCache({str(tmp_path)!r}, 10); cache.publish({{{name!r}: (0, 0, None)}})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=scaled(60)).returncode == -9
    assert len(list((tmp_path / "futures").iterdir())) == 1
    reserved = cache.try_reserve("b" * 64, 10, evict="unwanted")
    assert isinstance(reserved, Reservation) and reserved.evicted == [name]
    assert not list((tmp_path / "futures").iterdir())
    reserved.release()


def test_hold_is_all_or_none(tmp_path: Path) -> None:
    cache = SliceCache(tmp_path, 20)
    first = put(cache, b"a" * 10)
    assert cache.pin_all([first, "b" * 64]) is None
    second = put(cache, b"b" * 10)
    assert cache.pin_all([first, second]) == [tmp_path / first, tmp_path / second]
    assert cache.list_slices() == {first, second}
    with pytest.raises(UsageError, match="pinned"):
        put(SliceCache(tmp_path, 20), b"c")
    cache.unpin(first)
    put(SliceCache(tmp_path, 20), b"c")
    assert cache.list_slices() == {second, hashlib.sha256(b"c").hexdigest()}


def test_what_killed_processes_left_is_cleaned(tmp_path: Path) -> None:
    cache, other = SliceCache(tmp_path, 100), SliceCache(tmp_path, 100)
    retained, stale, expected, under_way = put(cache, b"a"), "b" * 64, "c" * 64, "d" * 64
    for sha256 in (stale, expected):
        broken_off = reserve(cache, sha256, 10)
        broken_off.part.write_bytes(b"half")
        broken_off.release()
    other.pin(retained)
    reserved = reserve(other, under_way, 10)
    reserved.part.write_bytes(b"half")
    cache.clean([expected])
    assert sorted(path.name for path in tmp_path.glob("*.part")) == [f"{expected}.part", f"{under_way}.part"]
    assert {path.name.partition(".")[0] for path in (tmp_path / "locks").iterdir()} == {"room", retained, under_way}
    reserved.release()


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SliceCache(tmp_path, 10_000)
    cache.check_space(10_000)
    monkeypatch.setattr(DiskBudget, "free_bytes", lambda capacity: 4096)
    with pytest.raises(UsageError, match="needs 9000 bytes, but its disk has 4096 free"):
        cache.check_space(9000)
    old = put(cache, b"a" * 4000)
    cache.check_space(8000)  # what is here already is reused
    reserved = cache.try_reserve("b" * 64, 6000)  # within the budget, but not on this disk unless the old one goes
    assert isinstance(reserved, Reservation) and reserved.evicted == [old]
    refused = cache.try_reserve("c" * 64, 3000)
    assert isinstance(refused, NotReserved) and "its disk is full" in refused.detail
    reserved.release()


def test_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache_module, "_RAM", tmp_path)
    cache = SliceCache("ram", 100)
    assert cache.directory == tmp_path / f"forebay-{os.getuid()}"
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    assert cache_module.cache_directory(Path("ram")) == Path("ram")
    cache.directory.chmod(0o755)
    with pytest.raises(UsageError, match="not a directory of this user's alone"):
        SliceCache("ram", 100)
    monkeypatch.setattr(cache_module, "_RAM", tmp_path / "absent")
    with pytest.raises(UsageError, match="Choose a directory on disk"):
        SliceCache("ram", 100)


def test_a_lock_file_that_was_cleaned_away_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    current = locks.acquire(path)
    assert locks.try_acquire(path) is None and locks.is_locked(path, locks.SHARED)
    path.unlink()
    other = locks.try_acquire(path)
    assert other is not None
    current.release()
    current.release()
    assert locks.is_locked(path, locks.SHARED)
    other.release()
    assert not locks.is_locked(path, locks.SHARED) and not locks.is_locked(tmp_path / "none", locks.SHARED)


def slices(cache: SliceCache, contents: list[bytes]) -> list[str]:
    """Those whose verified files hold their bytes."""
    names = [hashlib.sha256(content).hexdigest() for content in contents]
    paths = [cache.get(name) for name in names]
    return [name for name, path, content in zip(names, paths, contents) if path and path.read_bytes() == content]


@pytest.mark.parametrize("copied", ["cp -r", "cp -a", "mv"])
def test_a_copied_cache_stays_whole(tmp_path: Path, copied: str) -> None:
    cache, contents = SliceCache(tmp_path / "a", 1000), [bytes([number]) * 100 for number in range(3)]
    names = [put(cache, content) for content in contents]
    subprocess.run([*copied.split(), tmp_path / "a", tmp_path / "b"], check=True)
    copy = SliceCache(tmp_path / "b", 1000)
    assert copy.list_slices() == set(names) == set(slices(copy, contents))
    assert SliceCache(tmp_path / "b", 1000).pin_all(names) == [tmp_path / "b" / name for name in names]


def test_a_file_that_changed_is_hashed_and_stays_if_it_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hashed: list[str] = []

    def count(path: Path) -> str:
        hashed.append(path.name)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(cache_module, "hash_file", count)
    cache, other = SliceCache(tmp_path, 1000), SliceCache(tmp_path, 1000)
    touched, restored, wrong, same_time, gone = names = [put(cache, bytes([number]) * 100) for number in range(5)]
    assert slices(other, [bytes([number]) * 100 for number in range(5)]) == names and not hashed
    os.utime(cache.path_of(touched))
    cache.path_of(restored).unlink()
    cache.path_of(restored).write_bytes(b"\1" * 100)
    cache.path_of(wrong).write_bytes(b"x" * 100)  # within the tick of the clock in which it was verified
    times = cache.path_of(same_time).stat()
    (tmp_path / "restored").write_bytes(b"x" * 100)
    os.utime(tmp_path / "restored", ns=(times.st_atime_ns, times.st_mtime_ns))
    (tmp_path / "restored").replace(cache.path_of(same_time))
    cache.path_of(gone).unlink()
    assert other.pin_all(names[:2]) == [tmp_path / touched, tmp_path / restored]
    assert [other.get(name) for name in names[2:]] == [None] * 3 == [other.pin_all([name]) for name in names[2:]]
    assert hashed == [touched, restored, wrong, same_time] and cache.list_slices() == {touched, restored}
    assert [record.getMessage().count("expected bytes of that sha256") for record in caplog.records] == [1, 1]
    assert slices(cache, [b"\0" * 100, b"\1" * 100]) == names[:2] and len(hashed) == 4  # one hash serves all processes


def test_a_record_that_is_damaged_or_cannot_be_written_costs_a_hash(tmp_path: Path) -> None:
    contents = [bytes([number]) * 100 for number in range(4)]
    names = [put(SliceCache(tmp_path, 1000), content) for content in contents]
    for damaged in (b"", b"\xff\0\n" * 9, b"100 1"):
        for name in names:
            (tmp_path / "locks" / f"{name}.verified").write_bytes(damaged)
        assert slices(SliceCache(tmp_path, 1000), contents) == names
        assert slices(SliceCache(tmp_path, 1000), contents) == names
    for name in names:
        (tmp_path / "locks" / f"{name}.verified").unlink()
        (tmp_path / "locks" / f"{name}.verified").mkdir()  # It can be neither read nor written.
    cache = SliceCache(tmp_path, 1000)
    assert slices(cache, contents) == names
    assert cache.pin_all(names) is not None


def test_processes_share_the_records_and_evicted_slices_have_none(tmp_path: Path) -> None:
    code = (
        "import hashlib, sys\n"
        "from forebay.cache.cache import SliceCache\n"
        f"cache = SliceCache({str(tmp_path)!r}, 1500)\n"
        "for number in range(300):\n"
        "    data = b'%s %d' % (sys.argv[1].encode(), number)\n"
        "    sha256 = hashlib.sha256(data).hexdigest()\n"
        "    reserved = cache.try_reserve(sha256, len(data), evict='any')\n"
        "    reserved.part.write_bytes(data)\n"
        "    reserved.commit()\n"
        "    assert cache.get(sha256), number\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, name]) for name in ("a", "b", "c")]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    cache = SliceCache(tmp_path, 1500)
    recorded = {path.stem for path in (tmp_path / "locks").glob("*.verified")}
    cached = cache.list_slices()
    assert recorded >= cached and len(recorded) < len(cached) + 60 and all(cache.get(name) for name in cached)
