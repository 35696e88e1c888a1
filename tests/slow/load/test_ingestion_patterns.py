"""Batching, sharding, caching: shards stay with their worker, whole, and are shuffled inside anew each epoch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from forebay.cache.state import cache_directory
from forebay.errors import StateError, UsageError
from forebay.load.batch import NumpyTokens
from forebay.load.loader import Loader
from forebay.load.options import CacheOptions, OrderOptions, SampleOptions
from forebay.storage.chunk_file import MapLayout
from support.feeding import has_id, make_dataset
from support.origin_server import OriginServer

SLICES, SAMPLES, SEQ_LEN = 24, 16, 2048


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("patterns") / "data", SLICES, SAMPLES, SEQ_LEN)


@pytest.fixture
def server(data: Path) -> Iterator[OriginServer]:
    with OriginServer(data) as server:
        yield server


def owned(url: str, rank: int, world: int, worker_names: Sequence[str] = (), **more: Any) -> Loader[NumpyTokens]:
    order = OrderOptions(assignment="owned", worker_names=tuple(worker_names))
    return Loader(url, seq_len=SEQ_LEN, batch_size=4, rank=rank, world_size=world, order=order, epochs=2, **more)


def epochs_of(loader: Loader[NumpyTokens]) -> list[list[int]]:
    result: list[list[int]] = [[], []]
    for batch in loader:
        result[batch.epoch].extend(batch.sample_ids.tolist())
    return result


def slices_of(server: OriginServer) -> list[Path]:
    return list(server.directory.rglob("*.safetensors"))


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
    total = sum(path.stat().st_size for path in slices_of(server))
    with owned(server.url, rank, 2, cache_bytes=int(total * 0.7), cache=tier) as loader:
        first, second = epochs_of(loader)
        assert loader.stats()["refetched_bytes"] == 0
    assert sorted(first) == sorted(second) and first != second
    return first


def test_epoch_two_reads_the_cache_and_each_worker_holds_only_its_shards(
    server: OriginServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers: in two epochs every slice leaves the origin once; a cache holds whole, verified slices alone."""
    seen: set[int] = set()
    for rank in range(2):
        monkeypatch.setenv("FOREBAY_CACHE", str(tmp_path / f"host-{rank}"))
        first = epoch_two(server, rank, "disk")
        assert seen.isdisjoint(first)
        seen.update(first)
        current = [path for path in (tmp_path / f"host-{rank}/slices").iterdir() if len(path.name) == 64]
        assert len(current) == len(first) // SAMPLES and all(has_id(path, path.name) for path in current)
    assert len(seen) == SLICES * SAMPLES
    sent = {name: count for name, count in server.bytes_sent.items() if name.endswith(".safetensors")}
    assert sent == {f"{path.relative_to(server.directory)}": path.stat().st_size for path in slices_of(server)}


def test_memory_keeps_slices_between_loaders(server: OriginServer, memory: Path) -> None:
    epoch_two(server, 0, "ram")
    sent = sum(server.bytes_sent.values())
    assert any(path.is_file() for path in memory.iterdir())
    epoch_two(server, 0, "ram")
    assert sum(server.bytes_sent.values()) - sent < 64 << 10  # The manifest and the table.


def test_shards_stay_and_their_insides_are_shuffled_anew(data: Path) -> None:
    """A sample's shard is the same in all epochs; a shard is whole at one worker; orders come from the seed alone."""
    homes: dict[int, int] = {}
    for rank in range(3):
        loader = owned(str(data), rank, 3)
        first, second = epochs_of(loader)
        assert (first, second) == tuple(epochs_of(owned(str(data), rank, 3)))
        assert first != epochs_of(owned(str(data), rank, 3, seed=1))[0]
        for number in first:
            assert homes.setdefault(number // SAMPLES, rank) == rank
        for shard in {number // SAMPLES for number in first}:
            inside = [[n for n in epoch if n // SAMPLES == shard] for epoch in (first, second)]
            assert len(inside[0]) == SAMPLES and sorted(inside[0]) == sorted(inside[1]) and inside[0] != inside[1]
    assert len(homes) == SLICES


def test_ranks_take_equally_many_steps_and_go_on_where_they_stood(data: Path) -> None:
    loaders = [owned(str(data), rank, 3) for rank in range(3)]
    assert len({len(loader) for loader in loaders}) == 1
    sizes = [[len(batch) for batch in loader] for loader in loaders]
    assert max(map(max, sizes)) == 4 and min(map(min, sizes)) >= 2
    for rank in range(3):
        full = [batch.sample_ids.tolist() for batch in owned(str(data), rank, 3)]
        half = owned(str(data), rank, 3)
        for batch in half:
            if batch.step == len(full) // 3:
                break
        rest = owned(str(data), rank, 3)
        rest.load_state_dict(half.state_dict())
        assert [batch.sample_ids.tolist() for batch in rest] == full[len(full) // 3 + 1 :]
    with pytest.raises(StateError, match="expected rank 0"):
        owned(str(data), 0, 3).load_state_dict(half.state_dict())


def test_a_worker_more_takes_over_its_part_alone(data: Path) -> None:
    """Named workers: whoever stays keeps its shards but for what the new one takes."""
    names = ["north", "east", "south", "west"]
    before = [set(epochs_of(owned(str(data), rank, 3, worker_names=names[:3]))[0]) for rank in range(3)]
    after = [set(epochs_of(owned(str(data), rank, 4, worker_names=names))[0]) for rank in range(4)]
    retained = sum(len(old & new) for old, new in zip(before, after))
    assert retained >= (1 - 1 / 4 - 0.1) * SLICES * SAMPLES  # 24 shards: a hundredth is not a shard.
    assert sum(map(len, after)) == len(set().union(*after)) == SLICES * SAMPLES


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"samples": SampleOptions(drop_last=True)}, "no drop_last"),
        ({"worker_names": ["one"]}, "a name for each of 2 ranks"),
    ],
)
def test_what_cannot_be_is_refused(data: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        owned(str(data), 0, 2, **arguments)
    with pytest.raises(UsageError, match="assignment: expected one of 'global', 'owned'"):
        OrderOptions(assignment="random")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"{SLICES} slices are too few"):
        owned(str(data), 0, 200)


def test_arrays_are_the_samples_of_their_numbers(data: Path) -> None:
    plain = {}
    for batch in Loader(str(data), seq_len=SEQ_LEN, batch_size=8, shuffle=False):
        plain.update(zip(batch.sample_ids.tolist(), batch.inputs.copy()))
    for rank in range(2):
        for batch in owned(str(data), rank, 2):
            assert all(np.array_equal(plain[n], row) for n, row in zip(batch.sample_ids.tolist(), batch.inputs))


@pytest.mark.parametrize("held", [6, 12, 20])
def test_a_cache_of_a_part_hits_at_least_that_part(server: OriginServer, tmp_path: Path, held: int) -> None:
    """Cyclic passes, where the least recently used would never hit: b of N slices give b / N of the reads or more.

    No cache can do better: each epoch reads all once. Room for the maps of the slices, and half a slice for what is
    being read, are beside the b.
    """
    item, maps = max(path.stat().st_size for path in slices_of(server)), SLICES * MapLayout(131_236, 4096).disk_bytes
    with Loader(
        server.url, seq_len=SEQ_LEN, batch_size=4, epochs=5, cache=CacheOptions(readahead_bytes=0),
        cache_dir=tmp_path, cache_bytes=int((held + 0.5) * item) + maps,
    ) as loader:  # fmt: skip
        for _ in loader:
            pass
        fetched = loader.stats()["fetched_bytes"] / sum(path.stat().st_size for path in slices_of(server))
    assert 1 - (fetched - 1) / 4 >= held / SLICES - 1e-9


def test_a_cache_keeps_the_open_windows_or_everything(server: OriginServer, tmp_path: Path) -> None:
    """keep="window" needs little disk and fetches each epoch anew; "all" fetches once, and is refused a small cache."""
    total = sum(path.stat().st_size for path in slices_of(server))
    arguments: dict[str, Any] = {"seq_len": SEQ_LEN, "batch_size": 4, "epochs": 2}
    seen, most = [], 0
    with Loader(
        server.url, cache=CacheOptions(keep="window", readahead_bytes=total // 16), cache_dir=tmp_path / "window",
        cache_bytes=2 * total, **arguments,
    ) as loader:  # fmt: skip
        assert f"dataset='{server.url}'" in repr(loader)
        for batch in loader:
            seen.append(batch.sample_ids.tolist())
            most = max(most, loader.stats()["cached_bytes"])
        assert 2 * total * 0.95 < loader.stats()["fetched_bytes"] < 2 * total * 1.05
    assert most < total / 2
    with Loader(server.url, cache=CacheOptions(keep="all"), cache_dir=tmp_path / "all", **arguments) as loader:
        assert [batch.sample_ids.tolist() for batch in loader] == seen
        stats = loader.stats()
    assert stats["fetched_bytes"] == total and stats["evicted_bytes"] == 0
    with pytest.raises(UsageError, match=r"cache_bytes: expected at least .* for keep='all', got"):
        Loader(server.url, cache=CacheOptions(keep="all"), cache_dir=tmp_path / "small", cache_bytes=total, **arguments)
