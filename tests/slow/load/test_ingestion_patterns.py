"""Caches of workers that own slices, smaller than the dataset, on disk and in memory."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from forebay.dataset.chunks import HASH_BYTES, hash_slice
from forebay.dataset.reader import open_dataset
from forebay.errors import UsageError
from forebay.fetch.cache_state import cache_directory
from forebay.fetch.chunk_file import MapLayout
from forebay.load.loader import Loader
from forebay.load.options import CacheOptions
from support.feeding import dataset_fixture, read_owned
from support.origin_server import OriginServer

SLICES, SAMPLES, SEQ_LEN = 24, 16, 2048


data = dataset_fixture(SLICES, SAMPLES, SEQ_LEN)


def slice_paths(server: OriginServer) -> list[Path]:
    return list(server.directory.rglob("*.safetensors"))


def epoch_bytes(server: OriginServer) -> int:
    """The bytes of all slices, and of the hashes of their chunks."""
    table = open_dataset(server.directory).table
    return int(sum(table.bytes + -(-table.bytes // table.chunk_bytes) * HASH_BYTES))


@pytest.fixture
def memory() -> Iterator[Path]:
    """Where `cache="ram"` keeps slices; another's, if it is there, is left alone."""
    folder = cache_directory("ram")
    if any(path.is_file() for path in folder.iterdir()):
        pytest.skip(f"{folder} is in use")
    yield folder
    shutil.rmtree(folder)


def epoch_two(server: OriginServer, rank: int, tier: Literal["disk", "ram"]) -> list[int]:
    """Two epochs of a worker whose cache is smaller than the dataset: the first epoch's samples."""
    total = sum(path.stat().st_size for path in slice_paths(server))
    cache_bytes = int(total * 0.7)
    first, second, stats = read_owned(server.url, rank, 2, seq_len=SEQ_LEN, cache_bytes=cache_bytes, cache=tier)
    assert stats["refetched_bytes"] == 0
    assert sorted(first) == sorted(second) and first != second
    return first


def test_epoch_two_reads_the_cache_and_each_worker_holds_only_its_shards(server: OriginServer, tmp_path, monkeypatch):
    """Two workers: in two epochs every slice leaves the origin once; a cache holds whole, verified slices alone."""
    seen, chunk_bytes = set(), open_dataset(server.directory).table.chunk_bytes
    for rank in range(2):
        monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / f"host-{rank}"))
        first = epoch_two(server, rank, "disk")
        assert seen.isdisjoint(first)
        seen.update(first)
        current = [path for path in (tmp_path / f"host-{rank}/slices").iterdir() if len(path.name) == 64]
        assert len(current) == len(first) // SAMPLES and all(
            hash_slice(path, chunk_bytes)[0] == path.name for path in current
        )
    assert len(seen) == SLICES * SAMPLES
    sent = {name: count for name, count in server.bytes_sent.items() if name.endswith(".safetensors")}
    assert sent == {f"{path.relative_to(server.directory)}": path.stat().st_size for path in slice_paths(server)}


def test_memory_keeps_slices_between_loaders(server: OriginServer, memory):
    epoch_two(server, 0, "ram")
    sent = sum(server.bytes_sent.values())
    assert any(path.is_file() for path in memory.iterdir())
    epoch_two(server, 0, "ram")
    assert sum(server.bytes_sent.values()) - sent < 64 << 10  # The manifest and the table.


@pytest.mark.parametrize("num_cached", [6, 20])
def test_a_cache_of_a_part_hits_at_least_that_part(server: OriginServer, tmp_path, num_cached):
    """Cyclic passes, where the least recently used would never hit: b of N slices give b / N of the reads or more.

    No cache can do better: each epoch reads all once. Room for the maps of the slices, and half a slice for what is
    being read, are beside the b.
    """
    item, maps = max(path.stat().st_size for path in slice_paths(server)), SLICES * MapLayout(131_236, 4096).disk_bytes
    with Loader(
        server.url, seq_len=SEQ_LEN, batch_size=4, epochs=5, cache=CacheOptions(readahead_bytes=0),
        cache_dir=tmp_path, cache_bytes=int((num_cached + 0.5) * item) + maps,
    ) as loader:  # fmt: skip
        for _ in loader:
            pass
        fetched = loader.stats()["fetched_bytes"] / epoch_bytes(server)
    assert 1 - (fetched - 1) / 4 >= num_cached / SLICES - 1e-9


def test_a_cache_keeps_the_open_windows_or_everything(server: OriginServer, tmp_path):
    """keep="window" needs little disk and fetches in each epoch; "all" fetches once, and is refused a small cache."""
    total = sum(path.stat().st_size for path in slice_paths(server))
    arguments = {"seq_len": SEQ_LEN, "batch_size": 4, "epochs": 2}
    seen, max_bytes = [], 0
    with Loader(
        server.url, cache=CacheOptions(keep="window", readahead_bytes=total // 16), cache_dir=tmp_path / "window",
        cache_bytes=2 * total, **arguments,
    ) as loader:  # fmt: skip
        assert f"dataset='{server.url}'" in repr(loader)
        for batch in loader:
            seen.append(batch.sample_ids.tolist())
            max_bytes = max(max_bytes, loader.stats()["cached_bytes"])
        assert 2 * total * 0.95 < loader.stats()["fetched_bytes"] < 2 * total * 1.05
    assert max_bytes < total / 2
    with Loader(server.url, cache=CacheOptions(keep="all"), cache_dir=tmp_path / "all", **arguments) as loader:
        assert [batch.sample_ids.tolist() for batch in loader] == seen
        stats = loader.stats()
    assert stats["fetched_bytes"] == epoch_bytes(server) and stats["evicted_bytes"] == 0
    with pytest.raises(UsageError, match=r"cache_bytes: expected at least .* for keep='all', got"):
        Loader(server.url, cache=CacheOptions(keep="all"), cache_dir=tmp_path / "small", cache_bytes=total, **arguments)
