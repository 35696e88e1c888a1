"""The slices of all datasets of a run, by key: read in place, or fetched by way of the cache before they are needed.

Hides which is which. A key is a slice's number among the slices of all datasets, one dataset after another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.reader import Dataset
from forebay.dataset.slices import Slice, hash_file, open_slice
from forebay.dataset.verified import user_cache
from forebay.errors import DatasetError, UsageError
from forebay.formats import ExternalDataset
from forebay.order.run import Run

if TYPE_CHECKING:
    from forebay.cache.planned_use import Keep
    from forebay.cache.prefetch import SliceFeed
    from forebay.load.slice_source import Fetches

I64 = NDArray[np.int64]

_MOST_DEFAULT_BYTES = 64 << 30
_LOOK_AT_STEPS = 256
_log = logging.getLogger("forebay")


@dataclass(frozen=True)
class CacheSettings:
    """Where fetched slices are kept: a directory (or `ram`), its budget, what is kept, how they come."""

    directory: str | Path
    budget_bytes: int
    keep: Keep
    connections: int
    ahead_bytes: int | None
    share: bool | str


class Slices:
    """Opens slices by key. One consumer; its threads begin with the first `seek` and end with `close`.

    `cached`: for each dataset, whether its slices come by way of the cache, which is needed if any do. `verify`: hash
    each slice as it is opened for the first time. `window_steps`: as `SliceFeed`.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        cached: Sequence[bool],
        run: Run,
        rank: int,
        world_size: int,
        cache: CacheSettings | None,
        verify: bool = False,
        window_steps: int = 0,
    ) -> None:
        self._window_steps = window_steps
        self._datasets = datasets
        self._cached = cached
        self._run, self._rank, self._world_size = run, rank, world_size
        self._cache = cache
        self.lean = cache is not None and cache.keep == "window"  # A slice is deleted as soon as it was read.
        self._verify = verify
        self._verified: set[int] = set()
        counts = [len(dataset.table) for dataset in datasets]
        self.first_key = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)  # [D + 1], of each slice 0.
        self.cached = any(cached)
        self._feed: SliceFeed | None = None
        self._fetches: Fetches | None = None
        self._leaving: weakref.finalize[..., Any] | None = None
        self._counted: dict[str, Any] = {}
        self._read_ahead = ReadAhead()
        self._told: set[int] = set()
        if cache is not None:
            self._check_budget(cache)

    def _check_budget(self, cache: CacheSettings) -> None:
        from forebay.cache.eviction import part_bytes

        for dataset, cached in zip(self._datasets, self._cached):
            sizes = dataset.table.bytes
            if cached and len(sizes) and part_bytes(int(sizes.max())) > cache.budget_bytes:
                worst = dataset.table.row(int(sizes.argmax()))
                raise UsageError(
                    f"cache_bytes: expected at least {part_bytes(worst.bytes):,} for {worst.name} of {dataset.name}, "
                    f"got {cache.budget_bytes:,}. Give the cache room for a few slices, or prepare smaller ones "
                    "(--slice-bytes)."
                )

    def _check_steps(self) -> None:
        """Look at steps here and there: the slices that one of them reads must fit the budget together."""
        assert self._cache is not None
        sizes = np.concatenate([dataset.table.bytes for dataset in self._datasets])
        last = (self._run.num_steps or _LOOK_AT_STEPS) - 1
        for start in sorted({0, last // 3, 2 * last // 3}):
            stop = min(start + _LOOK_AT_STEPS, last + 1)
            steps, keys = self._cached_uses(start, stop)
            if not len(steps):
                continue
            needs = np.bincount(steps - start, weights=sizes[keys])
            worst = int(needs.argmax())
            if needs[worst] > self._cache.budget_bytes:
                raise UsageError(
                    f"cache_bytes: expected at least the {int(needs[worst]):,} bytes of the "
                    f"{int((steps - start == worst).sum())} slices that step {start + worst} reads, got "
                    f"{self._cache.budget_bytes:,}. Give the cache more room, or read fewer slices at once "
                    "(lanes=…, window=…)."
                )

    def find(self, key: int) -> tuple[Dataset, int]:
        """The dataset of a key, and the slice's index there."""
        at = self._source_of(key)
        return self._datasets[at], key - int(self.first_key[at])

    def _source_of(self, key: int) -> int:
        return int(np.searchsorted(self.first_key, key, side="right")) - 1

    def is_cached(self, key: int) -> bool:
        """Whether this slice comes by way of the cache."""
        return self.cached and self._cached[self._source_of(key)]

    def seek(self, step: int) -> None:
        """The consumer stands before `step`."""
        if not self.cached:
            return
        if self._feed is not None and self._feed.pid != os.getpid():
            self._feed = self._fetches = None  # Another process's, come by a fork.
        if self._feed is None:
            self._check_steps()
            self._feed = self._begin()
        self._feed.seek(step)

    def advance(self, step: int) -> None:
        """All before `step` is consumed."""
        if self._feed is not None:
            self._feed.advance(step)

    def hold(self, keys: Sequence[int], until: int) -> bool:
        """Whether all of these are here; then they are kept until `advance(until)`. Does not wait."""
        wanted = [key for key in keys if self.is_cached(key)]
        return not wanted or (self._feed is not None and self._feed.try_acquire_all(wanted, until))

    def bring(self, keys: Sequence[int], until: int) -> None:
        """Wait until all of these are here, kept together until `advance(until)`."""
        wanted = [key for key in keys if self.is_cached(key)]
        if wanted:
            assert self._feed is not None
            self._feed.acquire_all(wanted, until)

    def open(self, key: int, until: int) -> tuple[int, Slice]:
        """(index in its dataset, the slice, mapped), kept until `advance(until)`. Waits until it is here."""
        dataset, index = self.find(key)
        row = dataset.table.row(index)
        new = self._verify and key not in self._verified
        if not self.is_cached(key):
            found = dataset.open_slice(index)
            if new and (got := hash_file(found.path)) != row.sha256:
                raise DatasetError(
                    f"{found.path}: expected bytes of sha256 {row.sha256}, got {got}. The dataset was changed, or its "
                    "disk fails. Fetch or prepare this slice again."
                )
            self._verified.add(key)
            return index, found
        assert self._feed is not None
        path = self._feed.acquire(key, until)
        if new and hash_file(path) != row.sha256:
            _log.warning("%s of %s was changed after it was verified. Fetching it again.", row.name, dataset.name)
            self._feed.reject(key)
            path = self._feed.acquire(key, until)
        self._verified.add(key)
        try:
            found = open_slice(path)
            dataset.check_slice(row, found)
        except DatasetError as error:
            raise DatasetError(
                f"slice {row.name} of {dataset.name} ({dataset.path}): its bytes have the hash of the dataset's table, "
                f"but are not what the table says: {error} Publish the dataset again."
            ) from error
        return index, found

    def read_ahead(self, keys: Sequence[int]) -> None:
        """These will be opened soon: let the kernel read those that are local files."""
        new = [key for key in keys if key not in self._told and not self.is_cached(key)]
        self._told = set(keys)
        self._read_ahead.request([dataset.slice_path(index) for dataset, index in map(self.find, new)])

    def stats(self) -> dict[str, Any]:
        """What the cache and the transfers counted since the loader was made; empty if all is local."""
        found = self._feed.stats() if self._feed is not None else {}
        found |= self._fetches.stats() if self._fetches is not None else {}
        return self._counted | {name: value + self._counted.get(name, 0) for name, value in found.items()}

    def close(self) -> None:
        """End the threads, and leave the swarm. The next `seek` begins anew."""
        self.pause()
        self._leave()

    def pause(self) -> None:
        """End the threads, but go on sharing. The next `seek` begins anew."""
        self._read_ahead.close()
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()
            counted = feed.stats() | {"held_bytes": 0, "in_flight": 0}  # Of now, not sums.
            self._counted = {name: value + self._counted.get(name, 0) for name, value in counted.items()}
        if self._cache is None or not self._cache.share:
            self._leave()

    def _leave(self) -> None:
        fetches, self._fetches = self._fetches, None
        if fetches is not None and self._leaving is not None:
            self._leaving()
            found = fetches.stats()
            self._counted |= {name: value + self._counted.get(name, 0) for name, value in found.items()}

    def _begin(self) -> SliceFeed:
        from forebay.cache.cache import SliceCache
        from forebay.cache.planner import FeedOptions
        from forebay.cache.prefetch import SliceFeed
        from forebay.load.slice_source import Fetches

        assert self._cache is not None
        cache, infos = SliceCache(self._cache.directory, self._cache.budget_bytes), [d.table for d in self._datasets]
        fetches = self._fetches or Fetches(self._datasets, cache, self._cache.connections, self._cache.share)
        if fetches is not self._fetches:
            self._fetches, self._leaving = fetches, weakref.finalize(self, fetches.close)
        find = self.find
        return SliceFeed(
            cache,
            np.concatenate([table.sha256 for table in infos]),
            np.concatenate([table.bytes * cached for table, cached in zip(infos, self._cached)]),  # Local: no room.
            self._cached_uses,
            self._run.num_steps,
            lambda key, part: fetches.start(*find(key), part),
            FeedOptions(
                keep=self._cache.keep,
                horizon_bytes=self._cache.ahead_bytes,
                epoch_of=self._epoch_of,
                first_alone=True,
                window_steps=self._window_steps,
            ),
            on_evict=(lambda key: fetches.evicted(*find(key))) if self._cache.share else None,
        )

    def _cached_uses(self, start: int, stop: int) -> tuple[I64, I64]:
        steps, sources, slices = self._run.uses(start, stop, self._rank, self._world_size)
        keys = self.first_key[sources] + slices
        if all(self._cached):
            return steps, keys
        kept = np.array(self._cached)[sources]
        return steps[kept], keys[kept]

    def _epoch_of(self, step: int, key: int) -> tuple[int | None, int | None]:
        return self._run.epoch_of(step, self._source_of(key))


def check_hashes(datasets: list[Dataset]) -> None:
    """Raise UsageError for a dataset that has no hashes to verify by."""
    for dataset in datasets:
        if isinstance(dataset, ExternalDataset):
            raise UsageError(f"verify: {dataset.path} is of another format, which has no hashes. Leave it out.")


def settings_for(
    datasets: Sequence[Dataset],
    cached: bool,
    directory: str | Path | None,
    budget_bytes: int | None,
    keep: Keep,
    connections: int,
    ahead_bytes: int | None,
    share: bool | str,
) -> CacheSettings | None:
    """The settings given, where any slice comes by way of the cache.

    By default they are kept in a directory of the user's, in a quarter of what is free, up to 64 GiB.
    """
    for dataset in datasets if share else ():
        url = str(getattr(getattr(dataset, "origin", None), "url", dataset.path))
        if not url.startswith("forebay://"):
            raise UsageError(f"share: expected datasets of forebay://NETWORK/NAME, got {url}. Leave it out.")
    if not cached:
        if budget_bytes is None:
            return None
        raise UsageError(
            f"cache_bytes: expected none for {datasets[0].path}, which is local and is read in place. Leave it out, "
            "or give a cache_dir to keep slices in (of a slow mount, say)."
        )
    directory = user_cache() / "slices" if directory is None else directory
    in_memory = str(directory).partition(":")[0] == "ram"
    if in_memory and budget_bytes is not None and hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if budget_bytes > memory:
            raise UsageError(
                f"cache_bytes: expected at most this machine's memory, {memory:,} bytes, for a cache in memory, "
                f"got {budget_bytes:,}. Lower it, or keep the cache on disk (cache='disk')."
            )
    if budget_bytes is None:
        near = Path("/dev/shm") if in_memory else Path(directory)
        while not near.exists():
            near = near.parent
        budget_bytes = min(_MOST_DEFAULT_BYTES, shutil.disk_usage(near).free // 4)
    return CacheSettings(directory, int(budget_bytes), keep, connections, ahead_bytes, share)


def comes_by_cache(dataset: Dataset, cache_dir: str | Path | None) -> bool:
    """Whether a dataset's slices come by way of the cache."""
    if getattr(dataset, "origin", None) is not None:
        return True
    if cache_dir is not None and isinstance(dataset, ExternalDataset):
        raise UsageError(
            f"cache_dir: expected none for {dataset.path}, a dataset of another format: it is read in place. "
            "Leave it out."
        )
    return cache_dir is not None


def cache_place(cache: str | None, cache_dir: str | Path | None) -> str | Path | None:
    """The directory that `cache` (`disk`, `ram`) or `cache_dir` names; None for neither."""
    if cache is None:
        return cache_dir
    if cache not in ("disk", "ram") or cache_dir is not None:
        raise UsageError(
            f"cache: expected 'disk' or 'ram', and no cache_dir beside it, got {cache!r} and {cache_dir!r}."
        )
    return user_cache() / "slices" if cache == "disk" else "ram"


class ReadAhead:
    """Names files to the kernel (`posix_fadvise`), one after the other, in a thread that begins with the first of them.

    So a batch is gathered from the page cache and not from the disk. It copies nothing and holds nothing: the pages are
    the kernel's, and go when memory is short. Where the call is missing (macOS), it does nothing.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def request(self, paths: Iterable[Path]) -> None:
        """These will be read soon, in this order."""
        if not hasattr(os, "posix_fadvise"):
            return
        self._pool = self._pool or ThreadPoolExecutor(1, "readahead")
        for path in paths:
            self._pool.submit(_advise, path)

    def close(self) -> None:
        """End the thread, after the file that it is at."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)


def _advise(path: Path) -> None:
    with contextlib.suppress(OSError):  # Who reads it says why.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
