"""Where the chunks of a run come from: the cache's settings, and origins or swarms."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.arrays import BOOL
from forebay.dataset.reader import Dataset
from forebay.errors import NetworkError, UsageError
from forebay.fetch.cache import CacheSettings, ChunkCache
from forebay.fetch.chunk_file import MapLayout, round_up
from forebay.fetch.needs import ChunkTable
from forebay.fetch.runs import Providers, Sources
from forebay.machine import memory_bytes, user_cache
from forebay.storage.base import origin_of
from forebay.units import as_size

if TYPE_CHECKING:
    from forebay.load.options import LoaderConfig
    from forebay.swarm.reader import SwarmMember
    from forebay.swarm.share import SliceShare

MAX_DEFAULT_BYTES = 64 << 30
_SWARM_DOWNLOADS = 8
_log = logging.getLogger("forebay")


def resolve_cache(datasets: Sequence[Dataset], config: LoaderConfig) -> tuple[list[bool], CacheSettings | None]:
    """Whether the slices of each dataset are cached, and the settings if any are.

    Raises:
        UsageError: If a setting of the Loader does not fit a dataset or this machine.
    """
    cached, options, cache_bytes, listen = [], config.cache, as_size(config.cache_bytes), config.network.listen
    share: bool | str = config.scheduler is None and (listen == "auto" or listen or False)
    cache_dir = "ram" if options.tier == "ram" else config.cache_dir
    for dataset in datasets:
        cached.append(not dataset.is_local or cache_dir is not None)
        if share and not dataset.has_peers:
            raise UsageError(f"listen: expected datasets of forebay://NETWORK/NAME, got {dataset.url}. Leave it out.")
        if dataset.has_hashes:
            continue
        if options.verify == "open":
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
    if options.keep == "all":
        tables = [dataset.table for dataset, is_cached in zip(datasets, cached) if is_cached]
        sizes = [(size, table.chunk_bytes) for table in tables for size in table.bytes.tolist()]
        needed = sum(round_up(size) + MapLayout(size, chunk_bytes).disk_bytes for size, chunk_bytes in sizes)
        if cache_bytes is not None and cache_bytes < needed:
            raise UsageError(
                f"cache_bytes: expected at least {needed:,} for keep='all', got {cache_bytes:,}. Leave it out, or use "
                "keep='budget'."
            )
        cache_bytes = needed if cache_bytes is None else cache_bytes
    budget = _check_budget(directory, cache_bytes)
    connections = config.network.connections
    return cached, CacheSettings(directory, budget, connections, as_size(options.readahead_bytes), share, options.keep)


def _check_budget(directory: str | Path, budget_bytes: int | None) -> int:
    in_memory = str(directory).partition(":")[0] == "ram"
    if budget_bytes is None:
        existing = Path("/dev/shm") if in_memory else Path(directory)
        while not existing.exists():
            existing = existing.parent
        return min(MAX_DEFAULT_BYTES, shutil.disk_usage(existing).free // 4)
    memory = memory_bytes()
    if in_memory and budget_bytes > memory:
        raise UsageError(
            f"cache_bytes: expected at most this machine's memory, {memory:,} bytes, for a cache in memory, got "
            f"{budget_bytes:,}. Lower it, or keep the cache on disk (cache_dir=)."
        )
    return int(budget_bytes)


class Origins(Providers):
    """The origins of the datasets of a run, as providers of a feed."""

    def __init__(self, table: ChunkTable) -> None:
        self._table = table
        self._origins: dict[int, Sources] = {}
        """By index of the dataset."""

    def origin(self, key: int) -> Sources:
        i, _ = self._table.find(key)
        if i not in self._origins:
            self._origins[i] = origin_of(self._table.datasets[i])
        return self._origins[i]


class Swarms(Origins):
    """The swarms of the datasets, which get the cached slices from this process.

    Args:
        share: True, or the `HOST:PORT` to listen at. Every process that shares is a member of its own, with one server
            a node.
        on_change: Called when somebody can be asked for a slice.
    """

    passes_on = True

    def __init__(
        self, table: ChunkTable, cache: ChunkCache, share: bool | str, on_change: Callable[[], object]
    ) -> None:  # fmt: skip
        super().__init__(table)
        self._pid, self._cache, self._share, self._on_change = os.getpid(), cache, share, on_change
        self._shares: dict[str, SliceShare | None] = {}  # By node.
        self._members: dict[str, SwarmMember] = {}  # By dataset id.
        try:
            for dataset in table.datasets:
                if dataset.id not in self._members:
                    self._members[dataset.id] = self._join(dataset)
        except BaseException:
            self.close()
            raise

    def _member(self, key: int) -> tuple[SwarmMember, int]:
        i, index = self._table.find(key)
        return self._members[self._table.datasets[i].id], index

    def origin(self, key: int) -> Sources:
        member, index = self._member(key)
        return member.origin(index)

    def release(self, key: int, is_complete: bool) -> None:
        member, index = self._member(key)
        member.reader.release(index, is_complete)

    def stats(self) -> dict[str, int]:
        stats = [member.reader.stats() for member in self._members.values()]
        sent = sum(share.bytes_sent for share in self._shares.values() if share is not None)
        names = ("from_origins", "from_peers")
        return {name: sum(counts[name] for counts in stats) for name in names} | {"shared_bytes": sent}

    def close(self) -> None:
        """Leave the swarms. Does nothing in a forked child. May be repeated."""
        if os.getpid() != self._pid:
            return
        for member in self._members.values():
            member.close()
        for share in self._shares.values():
            if share is not None:
                share.close()

    def _join(self, dataset: Any) -> SwarmMember:
        from forebay.swarm.reader import SwarmMember

        cache = self._cache
        indexes = {row.tobytes().hex(): index for index, row in enumerate(dataset.table.sha256)}

        def available() -> BOOL:
            flags = np.zeros(len(dataset.table), np.bool_)
            flags[[indexes[sha256] for sha256 in cache.list_slices() if sha256 in indexes]] = True
            return flags

        server = self._server(dataset) or False
        return SwarmMember(dataset, cache, available, self._on_change, share=server, downloads=_SWARM_DOWNLOADS)

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
