"""Which slices of which datasets this worker has cached: what it tells the scheduler, over restarts too.

The cache knows hashes; the scheduler speaks of datasets and indexes. One small file a dataset beside the slices says
which hash is which index, a line of some 80 bytes each; a line torn by a kill is passed over.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import numpy as np

from forebay.network.ranges import format_ranges
from forebay.store.cache import SliceCache
from forebay.worker.answers import Grant

_LINE = re.compile(rb"^(\d{1,10}) (\d{1,18}) ([0-9a-f]{64})$", re.MULTILINE)
_NAME = re.compile(rb"^= ([^\x00-\x1f]{1,255})$", re.MULTILINE)
_FILE = re.compile(r"([0-9a-f]{64})\.known")


class Shelf:
    """What of each dataset lies in a cache. Threads and processes share it, as they do the cache.

    Attributes:
        sizes: Bytes and dataset's name of each slice that this worker was ever leased, by hash: what it may hand on.
    """

    def __init__(self, cache: SliceCache) -> None:
        self.sizes: dict[str, tuple[int, str]] = {}
        self._cache = cache
        self._lock = threading.Lock()
        self._indexes: dict[str, dict[str, int]] = {}  # dataset id -> sha256 -> index
        self._told: dict[str, str] = {}
        for item in os.scandir(cache.directory):
            if found := _FILE.fullmatch(item.name):
                indexes = self._indexes.setdefault(found[1], {})
                lines = Path(item.path).read_bytes()
                name = _NAME.search(lines)
                for index, num_bytes, sha256 in _LINE.findall(lines):
                    indexes[sha256.decode()] = int(index)
                    if name is not None:  # without it nobody can say who may have it
                        self.sizes[sha256.decode()] = int(num_bytes), name[1].decode()

    def add(self, slice_: Grant) -> None:
        """A slice was cached."""
        with self._lock:
            indexes = self._indexes.setdefault(slice_.dataset_id, {})
            if indexes.get(slice_.sha256) == slice_.index:
                return
            indexes[slice_.sha256] = slice_.index
            self.sizes[slice_.sha256] = slice_.bytes, slice_.dataset
        path = self._cache.directory / f"{slice_.dataset_id}.known"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            # The line feed first: it ends what a kill may have torn.
            name = f"\n= {slice_.dataset}" if not os.fstat(file).st_size else ""
            os.write(file, f"{name}\n{slice_.index} {slice_.bytes} {slice_.sha256}\n".encode())
        finally:
            os.close(file)

    def news(self, everything: bool = False) -> dict[str, str]:
        """Dataset id to the ranges of slices that are here now, of those that changed since `told`, or of all."""
        here = self._cache.held()
        with self._lock:
            ranges = {
                i: format_ranges(np.array(sorted(known[s] for s in known.keys() & here), np.int64))
                for i, known in self._indexes.items()
            }
            return {i: text for i, text in ranges.items() if everything or self._told.get(i, "") != text}

    def told(self, news: dict[str, str]) -> None:
        """The scheduler has heard them."""
        with self._lock:
            self._told.update(news)
