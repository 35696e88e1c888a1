"""The slices of a run, by key: read in place, or fetched through the cache before they are needed.

A key is the number of a slice among those of all datasets, one dataset after another. This module decides which slices
are cached, checks the cache's size, and asks the kernel to read local files ahead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.chunks import hash_slice
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import Slice, open_slice
from forebay.dataset.verified import user_cache
from forebay.errors import DatasetError, NetworkError, UsageError
from forebay.formats import ExternalDataset
from forebay.order.run import Run
from forebay.order.windows import window_steps

if TYPE_CHECKING:
    from forebay.cache.cache import SliceCache
    from forebay.cache.prefetch import SliceFeed
    from forebay.storage.transfer_state import Transfer
    from forebay.storage.transfers import Transfers
    from forebay.swarm.reader import SwarmMember
    from forebay.swarm.share import SliceShare

I64 = NDArray[np.int64]

_MAX_DEFAULT_BYTES = 64 << 30
_SWARM_DOWNLOADS = 8
_log = logging.getLogger("forebay")


@dataclass(frozen=True)
class CacheSettings:
    """The Loader's arguments for the cache, with defaults filled in."""

    directory: str | Path  # Or `ram`.
    budget_bytes: int
    connections: int
    readahead_bytes: int | None
    share: bool | str


def resolve_cache(
    datasets: Sequence[Dataset], *, cache_dir: str | Path | None, cache_bytes: int | None, connections: int,
    readahead_bytes: int | None, share: bool | str, verify: bool,
) -> tuple[list[bool], CacheSettings | None]:  # fmt: skip
    """Whether the slices of each dataset are cached, and the settings if any are, from the Loader's arguments.

    Raises:
        UsageError: If an argument does not fit a dataset or this machine.
    """
    cached = []
    for dataset in datasets:
        origin = getattr(dataset, "origin", None)
        cached.append(origin is not None or cache_dir is not None)
        url = str(getattr(origin, "url", dataset.path))
        if share and not url.startswith("forebay://"):
            raise UsageError(f"share: expected datasets of forebay://NETWORK/NAME, got {url}. Leave it out.")
        if not isinstance(dataset, ExternalDataset):
            continue
        if verify:
            raise UsageError(f"verify: {dataset.path} is of another format, which has no hashes. Leave it out.")
        if cached[-1]:
            raise UsageError(
                f"cache_dir: expected none for {dataset.path}, a dataset of another format, which is read in place. "
                "Leave it out."
            )
    if not any(cached):
        if cache_bytes is None:
            return cached, None
        raise UsageError(
            f"cache_bytes: expected none for {datasets[0].path}, which is local and is read in place. Leave it out, "
            "or give a cache_dir to cache its slices (for a slow mount)."
        )
    directory = cache_dir or user_cache() / "slices"
    budget = _check_budget(directory, cache_bytes)
    return cached, CacheSettings(directory, budget, int(connections), readahead_bytes, share)


def _check_budget(directory: str | Path, budget_bytes: int | None) -> int:
    in_memory = str(directory).partition(":")[0] == "ram"
    if budget_bytes is None:
        existing = Path("/dev/shm") if in_memory else Path(directory)
        while not existing.exists():
            existing = existing.parent
        return min(_MAX_DEFAULT_BYTES, shutil.disk_usage(existing).free // 4)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else budget_bytes
    if in_memory and budget_bytes > memory:
        raise UsageError(
            f"cache_bytes: expected at most this machine's memory, {memory:,} bytes, for a cache in memory, got "
            f"{budget_bytes:,}. Lower it, or keep the cache on disk (cache_dir=)."
        )
    return int(budget_bytes)


class SliceReader:
    """Opens slices by key. For one consumer; its threads start with the first `seek` and end with `close`.

    `cached`: for each dataset, whether its slices are; then with the settings `cache`. `verify`: hash each slice when
    it is opened for the first time.

    Raises:
        UsageError: If a slice does not fit the cache.
    """

    def __init__(
        self, datasets: Sequence[Dataset], cached: Sequence[bool], run: Run, rank: int, world_size: int,
        cache: CacheSettings | None, verify: bool = False,
    ) -> None:  # fmt: skip
        self._datasets, self._cached, self._cache = datasets, cached, cache
        self._run, self._rank, self._world_size = run, rank, world_size
        self.cached = any(cached)
        self._verify = verify
        self._verified: set[int] = set()
        counts = [len(dataset.table) for dataset in datasets]
        self.first_key = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)  # [D + 1], of each slice 0.
        self._feed: SliceFeed | None = None
        self._source: SliceSource | None = None
        self._close_source: weakref.finalize[..., Any] | None = None
        self._past_stats: dict[str, Any] = {}  # Of feeds and sources that are closed.
        self._readahead: ThreadPoolExecutor | None = None
        self._readahead_keys: set[int] = set()
        if cache is not None:
            self._check_budget(cache)

    def _check_budget(self, cache: CacheSettings) -> None:
        from forebay.cache.eviction import part_bytes

        for dataset, cached in zip(self._datasets, self._cached):
            sizes = dataset.table.bytes
            if cached and len(sizes) and part_bytes(int(sizes.max())) > cache.budget_bytes:
                largest = dataset.table.row(int(sizes.argmax()))
                raise UsageError(
                    f"cache_bytes: expected at least {part_bytes(largest.bytes):,} for {largest.name} of "
                    f"{dataset.name}, got {cache.budget_bytes:,}. Make the cache larger, or prepare smaller slices "
                    "(--slice-bytes)."
                )

    def find(self, key: int) -> tuple[Dataset, int]:
        i = self._dataset_index(key)
        return self._datasets[i], key - int(self.first_key[i])

    def _dataset_index(self, key: int) -> int:
        return int(np.searchsorted(self.first_key, key, side="right")) - 1

    def is_cached(self, key: int) -> bool:
        return self.cached and self._cached[self._dataset_index(key)]

    def seek(self, step: int) -> None:
        if self._cache is None:
            return
        if self._feed is not None and self._feed.pid != os.getpid():
            self._feed = self._source = None  # They belong to the parent of this fork.
        if self._feed is None:
            self._feed = self._start_feed(self._cache)
        self._feed.seek(step)

    def advance(self, step: int) -> None:
        if self._feed is not None:
            self._feed.advance(step)

    def hold(self, keys: Sequence[int], until: int) -> bool:
        """Retain these slices until `advance(until)`, if all of them are available; whether they are. Does not wait."""
        cached = [key for key in keys if self.is_cached(key)]
        return not cached or (self._feed is not None and self._feed.try_acquire_all(cached, until))

    def fetch(self, keys: Sequence[int], until: int) -> None:
        """Wait until all of these slices are available; retain them together until `advance(until)`."""
        cached = [key for key in keys if self.is_cached(key)]
        if cached:
            assert self._feed is not None
            self._feed.acquire_all(cached, until)

    def open(self, key: int, until: int) -> tuple[int, Slice]:
        """(index in its dataset, mapped slice), retained until `advance(until)`. Waits until it is available.

        Raises:
            DatasetError: If it is missing, or its bytes are not those of the dataset.
            NetworkError: If no origin gives it.
        """
        dataset, index = self.find(key)
        row = dataset.table.row(index)
        is_new = self._verify and key not in self._verified
        if not self.is_cached(key):
            opened = dataset.open_slice(index)
            if is_new and (sha256 := hash_slice(opened.path, row.chunk_bytes)[0]) != row.sha256:
                raise DatasetError(
                    f"{opened.path}: expected bytes of sha256 {row.sha256}, got {sha256}. The dataset was changed, or "
                    "its disk fails. Fetch or prepare this slice again."
                )
            self._verified.add(key)
            return index, opened
        assert self._feed is not None
        path = self._feed.acquire(key, until)
        if is_new and hash_slice(path, row.chunk_bytes)[0] != row.sha256:
            _log.warning("%s of %s was changed after it was verified. Fetching it again.", row.name, dataset.name)
            self._feed.reject(key)
            path = self._feed.acquire(key, until)
        self._verified.add(key)
        try:
            opened = open_slice(path)
            dataset.check_slice(row, opened)
        except DatasetError as error:
            raise DatasetError(
                f"slice {row.name} of {dataset.name} ({dataset.path}): its bytes have the hash of the dataset's table, "
                f"but do not fit the table: {error} Publish the dataset again."
            ) from error
        return index, opened

    def read_ahead(self, keys: Sequence[int]) -> None:
        """Let the kernel read the local files of slices that are opened soon, in a thread; a no-op on macOS."""
        new = [key for key in keys if key not in self._readahead_keys and not self.is_cached(key)]
        self._readahead_keys = set(keys)
        if new and hasattr(os, "posix_fadvise"):
            self._readahead = self._readahead or ThreadPoolExecutor(1, "readahead")
            for dataset, index in map(self.find, new):
                self._readahead.submit(_read_ahead, dataset.slice_path(index))

    def stats(self) -> dict[str, Any]:
        stats = self._feed.stats() if self._feed is not None else {}
        stats |= self._source.stats() if self._source is not None else {}
        return self._past_stats | self._summed(stats)

    def close(self) -> None:
        """End the threads, and leave the swarm. The next `seek` starts them again."""
        self.pause()
        self._leave()

    def pause(self) -> None:
        """End the threads, but continue to share. The next `seek` starts them again."""
        pool, self._readahead = self._readahead, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()
            current = {"held_bytes": 0, "in_flight": 0}  # Not sums.
            self._past_stats |= self._summed(feed.stats() | current)
        if self._cache is None or not self._cache.share:
            self._leave()

    def _leave(self) -> None:
        source, self._source = self._source, None
        if source is not None and self._close_source is not None:
            self._close_source()
            self._past_stats |= self._summed(source.stats())

    def _summed(self, stats: dict[str, Any]) -> dict[str, Any]:
        return {name: value + self._past_stats.get(name, 0) for name, value in stats.items()}

    def _start_feed(self, settings: CacheSettings) -> SliceFeed:
        from forebay.cache.cache import SliceCache
        from forebay.cache.prefetch import SliceFeed

        cache, tables = SliceCache(settings.directory, settings.budget_bytes), [d.table for d in self._datasets]
        if self._source is None:
            self._source = SliceSource(self._datasets, cache, settings.connections, settings.share)
            self._close_source = weakref.finalize(self, self._source.close)
        source, find = self._source, self.find
        return SliceFeed(
            cache,
            np.concatenate([table.sha256 for table in tables]),
            np.concatenate([table.bytes * cached for table, cached in zip(tables, self._cached)]),  # Local: no bytes.
            self._cached_uses,
            self._run.num_steps,
            lambda key, part: source.start(*find(key), part),
            horizon_bytes=settings.readahead_bytes,
            epoch_of=lambda step, key: self._run.epoch_of(step, self._dataset_index(key))[0],
            window_steps=max(map(window_steps, self._run.orders)),
        )

    def _cached_uses(self, start: int, stop: int) -> tuple[I64, I64]:
        steps, sources, slices = self._run.uses(start, stop, self._rank, self._world_size)
        keys = self.first_key[sources] + slices
        if all(self._cached):
            return steps, keys
        chosen = np.array(self._cached)[sources]
        return steps[chosen], keys[chosen]


class SliceSource:
    """Transfers slices from their datasets' origins, or from peers, in the process that made it, until `close`.

    `share`: whether to serve the cached slices to peers, or the `HOST:PORT` to listen at; it then fetches from peers as
    well. Nothing is retained for peers. Every process that shares is a member of its own, with one server a node.
    """

    def __init__(self, datasets: Sequence[Dataset], cache: SliceCache, connections: int, share: bool | str) -> None:
        self.pid = os.getpid()
        self._cache, self._connections, self._share = cache, connections, share
        self._transfers: Transfers | None = None
        self._shares: dict[str, SliceShare | None] = {}  # By node.
        self._members: dict[str, SwarmMember] = {}  # By dataset id.
        try:
            for dataset in datasets if share else ():
                if dataset.id not in self._members:
                    self._members[dataset.id] = self._join(dataset)
        except BaseException:
            self.close()
            raise

    def start(self, dataset: Dataset, index: int, part: Path) -> Transfer:
        """Start to fetch a slice into its partial file."""
        if (member := self._members.get(dataset.id)) is not None:
            return member.reader.fetch(index, part)
        from forebay.storage.origins import open_origin
        from forebay.storage.transfers import Transfers

        self._transfers = self._transfers or Transfers(connections=self._connections)
        origin = getattr(dataset, "origin", None) or open_origin(str(dataset.path))
        return self._transfers.start(dataset.table.row(index), part, [origin])

    def stats(self) -> dict[str, int]:
        if not self._members:
            return {}
        stats = [member.reader.stats() for member in self._members.values()]
        sent = sum(share.bytes_sent for share in self._shares.values() if share is not None)
        names = ("from_origins", "from_peers")
        return {name: sum(int(counts[name]) for counts in stats) for name in names} | {"shared_bytes": sent}

    def close(self) -> None:
        """Leave the swarms and cancel transfers. Does nothing in a forked child. May be repeated."""
        if os.getpid() != self.pid:
            return
        for member in self._members.values():
            member.close()
        for share in self._shares.values():
            if share is not None:
                share.close()
        if self._transfers is not None:
            self._transfers.close()

    def _join(self, dataset: Any) -> SwarmMember:
        from forebay.swarm.reader import SwarmMember

        cache = self._cache
        indexes = {row.tobytes().hex(): index for index, row in enumerate(dataset.table.sha256)}

        def available() -> NDArray[np.bool_]:
            flags = np.zeros(len(dataset.table), np.bool_)
            flags[[indexes[sha256] for sha256 in cache.list_slices() if sha256 in indexes]] = True
            return flags

        server = self._server(dataset) or False
        return SwarmMember(
            dataset, cache, available, share=server, downloads=_SWARM_DOWNLOADS, connections=self._connections
        )

    def _server(self, dataset: Any) -> SliceShare | None:
        from forebay.swarm.reader import open_share

        node = dataset.origin.identity.peer_id
        if node not in self._shares:
            try:
                self._shares[node] = open_share(dataset.origin, self._cache, self._share)
            except NetworkError as error:
                if not isinstance(self._share, str):
                    raise
                _log.warning("this process fetches from peers and does not share: %s", error)  # The port is in use.
                self._shares[node] = None
        return self._shares[node]


def _read_ahead(path: Path) -> None:
    with contextlib.suppress(OSError):  # Opening the slice raises the error.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
