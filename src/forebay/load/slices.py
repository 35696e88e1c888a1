"""The slices of a run, by key: read in place, or through the cache, whose chunks come before they are needed."""

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from forebay.arrays import BOOL, I64
from forebay.dataset.manifest import SliceInfo
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import Slice, view_slice
from forebay.errors import DatasetError, UsageError
from forebay.fetch.cache import CacheSettings, ChunkCache
from forebay.fetch.chunk_file import PRESENT, ChunkFile
from forebay.fetch.feed import ChunkFeed
from forebay.fetch.needs import PlanNeeds
from forebay.fetch.runs import Providers
from forebay.load.arguments import ranks_per_node
from forebay.load.chunk_source import Origins, Swarms
from forebay.maps import map_offset
from forebay.order.run import Run

_READAHEAD_BYTES = 4 << 20


class RemovedError(UsageError):
    """The file of a slice that the cache had is not there any more; its plan is to be renewed."""


class SliceReader(ChunkFeed):
    """Opens slices by key. Arguments and errors as of `ChunkFeed`."""

    def __init__(
        self, datasets: Sequence[Dataset], cached: Sequence[bool], run: Run, rank: int, world_size: int,
        cache: CacheSettings | None, verify: bool, providers: Providers | None = None, **patience: Any,
    ) -> None:  # fmt: skip
        per_node = ranks_per_node(world_size)
        first = rank // per_node * per_node

        def open_providers(chunks: ChunkCache, on_change: Callable[[], object]) -> Providers:
            if providers is not None:
                return providers
            if cache is None or not cache.share:
                return Origins(self.chunks)
            return Swarms(self.chunks, chunks, cache.share, on_change)

        super().__init__(
            datasets, cached, run, (first, first + per_node), world_size, cache, open_providers, verify, **patience
        )

    def after_fork(self) -> None:
        super().after_fork()
        self._verified: set[int] = set()  # Keys of local slices.
        self._mapped: dict[int, ChunkFile] = {}  # The cache file that each open slice maps.
        self._readahead: ThreadPoolExecutor | None = None
        self._advised: dict[int, tuple[int, int]] = {}  # By key: bytes that the kernel was told to read.

    def waiting_keys(self, keys: I64) -> BOOL | None:
        """Which of these slices have chunks that must be fetched or verified before they are used; None: none."""
        waiting = np.array([self._waits(key) for key in keys.tolist()], bool)
        return waiting if waiting.any() else None

    def _waits(self, key: int) -> bool:
        if key in self._verified:
            return False
        if self.is_cached(key):
            return True
        dataset, index = self.find(key)
        if self._verify:
            return True
        with contextlib.suppress(DatasetError):  # Opening the slice raises it.
            if not dataset.is_verified(index):
                return True
            self._verified.add(key)
        return False

    def describe(self, key: int) -> tuple[SliceInfo, int]:
        """(row of the table, bytes of a token) of a slice."""
        return self.chunks.row(key), int(self.chunks.token_bytes[key])

    def close_slice(self, key: int) -> None:
        """A slice that was opened is not used any more."""
        self._mapped.pop(key, None)

    def is_stale(self, key: int) -> bool:
        """Return whether the file of an open slice was removed, so that the slice must be opened again."""
        return key in self._mapped and self._mapped[key].is_lost()

    def check_files(self, plan: PlanNeeds, keys: Collection[int]) -> None:
        """Raise RemovedError unless the open slices of these keys are of the files whose chunks the plan has."""
        with self._changed:
            for group in plan.groups:
                entry = group.entry
                if entry is not None and group.key in keys and not entry.is_same_file(self._mapped.get(group.key)):
                    raise RemovedError(f"cache: {entry.path} was made again while it was in use.")

    def open(self, key: int) -> tuple[int, Slice]:
        """(index in its dataset, mapped slice); its header must be here.

        Raises:
            DatasetError: If it is missing, or not a slice of the dataset.
            RemovedError: If the cache's file was deleted meanwhile.
        """
        dataset, index = self.find(key)
        if not self.is_cached(key):
            return index, dataset.map_slice(index)
        row = dataset.table.row(index)
        with self._changed:
            entry = self._mapped[key] = self._open_cache(self._settings).open(row)
            if entry.marks[0] != PRESENT:
                raise RemovedError(f"cache: {entry.path} was deleted while it was in use. Run the loop again.")
        try:
            opened = view_slice(entry.data, entry.path)
            dataset.check_slice(row, opened)
            if opened.layout == "tokens" and map_offset(opened.tokens) != int(self.chunks.token_starts[key]):
                raise DatasetError("expected the tokens behind all other tensors.")
        except DatasetError as error:
            raise DatasetError(
                f"slice {row.name} of {dataset.name} ({dataset.url}): its bytes have the hash of the dataset's table, "
                f"but do not fit the table: {error} Publish the dataset again."
            ) from error
        return index, opened

    def read_ahead(self, keys: I64, starts: I64, stops: I64) -> None:
        """In a thread, read byte ranges of local files that are used soon, and hash chunks that are not verified."""
        if not len(keys) or all(self._cached):
            return
        order = np.argsort(keys, kind="stable")
        edges = np.flatnonzero(np.diff(keys[order], prepend=-1))
        low, high = np.minimum.reduceat(starts[order], edges), np.maximum.reduceat(stops[order], edges)
        for key, start, stop in zip(keys[order][edges].tolist(), low.tolist(), high.tolist()):
            first, last = self._advised.get(key, (0, 0))
            if not self.is_cached(key) and not first <= start <= stop <= last:
                size = max(stop - start, _READAHEAD_BYTES)  # A lane goes on from here.
                self._advised[key] = start, start + size
                dataset, index = self.find(key)
                self._readahead = self._readahead or ThreadPoolExecutor(1, "readahead")
                self._readahead.submit(_read_ahead, dataset, index, start, start + size)

    def pause(self) -> None:
        pool, self._readahead, self._advised = self._readahead, None, {}
        if pool is not None:
            pool.shutdown(cancel_futures=True)
        super().pause()


def _read_ahead(dataset: Dataset, index: int, start: int, stop: int) -> None:
    chunk_bytes = dataset.table.chunk_bytes
    with contextlib.suppress(OSError, DatasetError):  # Using the slice raises the error.
        if hasattr(os, "posix_fadvise"):  # Not of macOS.
            descriptor = os.open(dataset.slice_path(index), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
        dataset.verify_chunks(index, start // chunk_bytes, -(-stop // chunk_bytes))
