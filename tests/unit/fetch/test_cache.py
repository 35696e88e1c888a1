"""The cache's budget, pins, eviction, and what a kill, a copy or a stranger's write leaves behind."""

import os
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.fetch.cache import ChunkCache
from forebay.fetch.chunk_file import ABSENT, PRESENT, UNVERIFIED, MapLayout
from support.cached import CHUNK, content, disk_bytes, info_of, put, put_chunks

MAP = MapLayout(len(content(0)), CHUNK).disk_bytes
SLICE = 4 * CHUNK + MAP  # On disk.


def test_least_recently_used_goes_first(tmp_path):
    with_pins = ChunkCache(tmp_path, 4 * SLICE)
    names = [put(with_pins, content(number), CHUNK) for number in range(3)]
    with_pins.close()  # No process uses them.
    for number, name in enumerate(names):
        os.utime(tmp_path / "chunks" / name, (1000 + number, 1000 + number))
    cache = ChunkCache(tmp_path, 3 * SLICE + MAP)
    cache.open(info_of(content(0), CHUNK))  # Used now.
    put(cache, content(3), CHUNK)
    assert [cache.get(name) is not None for name in names] == [True, False, True]
    assert cache.used_bytes() <= cache.budget_bytes


def test_a_smaller_budget_holds_at_once(tmp_path):
    cache = ChunkCache(tmp_path, 4 * SLICE)
    names = {put(cache, content(number), CHUNK) for number in range(4)}
    cache.close()
    assert ChunkCache(tmp_path, 2 * SLICE).list_slices() < names
    assert 0 < ChunkCache(tmp_path, 2 * SLICE).used_bytes() <= 2 * SLICE


def test_eviction_of_what_is_unused_spares_pins_and_views(tmp_path):
    cache, other = ChunkCache(tmp_path, 1 << 30), ChunkCache(tmp_path, 1 << 30)
    names = [put(cache, content(number), CHUNK) for number in range(4)]
    other.open_pinned([(info_of(content(1), CHUNK), np.arange(4))])
    entry = put_chunks(cache, content(2), CHUNK, [0])
    view = entry.data[:100]
    cache.unpin([(entry, np.array([0]))])
    cache.evict({names[3]})
    assert sorted(path.name for path in tmp_path.iterdir() if len(path.name) == 64) == sorted([names[1], names[3]])
    assert entry.is_deleted and bytes(view) == content(2)[:100] and cache.used_bytes() == 2 * SLICE
    other.close()
    cache.evict(())
    assert cache.used_bytes() == 0 == len(list((tmp_path / "chunks").iterdir()))
    for number in range(100):
        cache.unpin([(put_chunks(cache, content(number), CHUNK, [0, 1]), np.arange(2))])
        cache.evict(())
    assert len(cache._used) <= 1, "what was evicted is forgotten"
    cache.close()


def test_what_is_pinned_or_being_fetched_stays(tmp_path):
    budget = 2 * SLICE + CHUNK
    cache, other = ChunkCache(tmp_path, budget), ChunkCache(tmp_path, budget)
    entry = put_chunks(cache, content(0), CHUNK, [0, 1, 2, 3])
    chunks = np.arange(4)
    cache.pin([(entry, chunks[:2])])
    cache.unpin([(entry, chunks)], [7])
    put_chunks(other, content(1), CHUNK, [0, 1, 2, 3])
    put_chunks(other, content(2), CHUNK, [0])
    assert entry.marks.tolist() == [PRESENT, PRESENT, ABSENT, ABSENT]
    with pytest.raises(UsageError, match=r"no room for \d+ bytes .* pinned"):
        put_chunks(other, content(3), CHUNK, [0])
    cache.unpin([(entry, chunks[:2])])
    put_chunks(other, content(3), CHUNK, [0])
    assert entry.is_deleted or not entry.marks.any()
    other.close()
    entry = put_chunks(cache, content(4), CHUNK, [0])
    claimed, _ = cache.claim(entry, chunks)
    assert claimed.tolist() == [1, 2, 3]
    large = content(5, 8 * CHUNK)
    with pytest.raises(UsageError, match="being fetched"):
        put_chunks(cache, large, CHUNK, [*range(8)])
    cache.complete(entry, claimed)  # It failed.
    put_chunks(cache, large, CHUNK, [*range(8)])
    assert disk_bytes(tmp_path) <= budget


def test_chunks_that_are_read_latest_go_first(tmp_path):
    cache = ChunkCache(tmp_path, 3 * SLICE)
    entries = [put_chunks(cache, content(number), CHUNK, [0, 1, 2, 3]) for number in range(3)]
    for entry, next_use in zip(entries, (50, 90, 10)):
        cache.unpin([(entry, np.arange(4))], [next_use])
    put_chunks(cache, content(3), CHUNK, [0])
    present = [0 if entry.is_deleted else int((entry.marks == PRESENT).sum()) for entry in entries]
    assert present[0] == present[2] == 4 and 0 < present[1] < 4  # Chunks go, not their slice.


def test_a_chunk_larger_than_the_budget(tmp_path):
    with pytest.raises(UsageError, match=r"no room for .* budget 10"):
        put(ChunkCache(tmp_path, 10), b"x" * 11)
    with pytest.raises(UsageError, match="over 0"):
        ChunkCache(tmp_path, 0)
    with pytest.raises(UsageError, match="sha256"):
        ChunkCache(tmp_path, 10).get("../../etc/passwd")


@pytest.mark.parametrize("damage", ["copied", "flipped", "no map"])
def test_changes_of_files_by_others_are_noticed(tmp_path, damage, caplog):
    cache = ChunkCache(tmp_path / "cache", 20 * SLICE)
    names = [put(cache, content(number), CHUNK) for number in range(2)]
    put_chunks(cache, content(2), CHUNK, [1])
    cache.close()
    path = tmp_path / "cache" / names[0]
    match damage:
        case "copied":
            shutil.copytree(tmp_path / "cache", tmp_path / "copy")
            shutil.rmtree(tmp_path / "cache")
            (tmp_path / "copy").rename(tmp_path / "cache")
        case "flipped":
            with path.open("r+b") as file:
                file.seek(5000)
                file.write(bytes([content(0)[5000] ^ 1]))
        case "no map":
            (tmp_path / "cache" / "chunks" / names[0]).unlink()
    cache = ChunkCache(tmp_path / "cache", 20 * SLICE)
    assert (cache.get(names[0]) is not None) == (damage == "copied")
    assert cache.get(names[1]) is not None
    assert ("do not have that id" in caplog.text) == (damage == "flipped")
    entry = cache.open(info_of(content(2), CHUNK))
    if damage == "copied":
        assert entry.marks[1] == UNVERIFIED and entry.verify(np.arange(4))
    assert entry.marks.tolist() == [ABSENT, PRESENT, ABSENT, ABSENT]


def test_foreign_files_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_bytes(b"x" * 50)
    cache = ChunkCache(tmp_path, SLICE + 4096)
    put(cache, content(0), CHUNK)
    put(cache, content(1), CHUNK)
    assert (tmp_path / "notes.txt").exists()


def test_a_directory_that_is_deleted_is_made_again(tmp_path, caplog):
    cache = ChunkCache(tmp_path / "cache", 4 * SLICE)
    name = put(cache, content(0), CHUNK)
    shutil.rmtree(tmp_path / "cache")
    assert cache.get(name) is None and "was deleted while it was in use" in caplog.text
    assert put(cache, content(0), CHUNK) == name and cache.get(name) is not None


def test_a_cache_in_memory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ChunkCache("~/c", 4 * SLICE).directory == tmp_path / "c"
    monkeypatch.setattr("forebay.fetch.cache_state._RAM", tmp_path)
    cache = ChunkCache("ram", 4 * SLICE)
    assert cache.directory.parent == tmp_path and cache.directory.stat().st_mode & 0o777 == 0o700


def test_more_than_64_processes_are_refused(tmp_path):
    caches = [ChunkCache(tmp_path, SLICE) for _ in range(64)]
    with pytest.raises(UsageError, match="64 processes"):
        ChunkCache(tmp_path, SLICE)
    caches[3].close()
    ChunkCache(tmp_path, SLICE).close()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 15)), max_size=40), st.integers(2, 5))
def test_the_budget_and_pins_hold_whatever_happens(tmp_path_factory, actions, slices):
    """Two processes' caches fetch, release and evict; what one has pinned keeps its bytes, and the disk its limit."""
    folder, budget = tmp_path_factory.mktemp("cache"), slices * SLICE // 2 + 6 * MAP
    caches = [ChunkCache(folder, budget), ChunkCache(folder, budget)]
    pinned = []
    for kind, number, bits in actions:
        chunks = [i for i in range(4) if bits >> i & 1]
        if kind < 2:
            try:
                put_chunks(caches[kind], content(number), CHUNK, chunks)
                pinned.append((kind, number, chunks))
            except UsageError:
                assert pinned
        elif pinned:
            owner, other, own = pinned.pop(bits % len(pinned))
            caches[owner].unpin([(caches[owner].open(info_of(content(other), CHUNK)), np.array(own))])
        assert disk_bytes(folder) <= budget
        for owner, other, own in pinned:
            entry = caches[owner].open(info_of(content(other), CHUNK))
            for chunk in own:
                assert entry.marks[chunk] == PRESENT
                assert bytes(entry.data[chunk * CHUNK :][:CHUNK]) == content(other)[chunk * CHUNK :][:CHUNK]
    for cache in caches:
        cache.close()
