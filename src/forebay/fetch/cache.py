"""A directory of verified chunks of slices, with a budget of bytes that is never exceeded.

`DIR/SHA256` is a slice of that id, complete or in part; `DIR/chunks/SHA256` says which chunks it has
(`chunk_file.py`). Space is reserved, and other chunks evicted, before the first byte is requested; a killed
process's reservation counts until the directory was counted again. What is read soon is pinned. Slices that no running
process uses are evicted first, those used longest ago before others; then what this process read and needs latest
again, if at all. Processes share a directory by a lock, which is taken for some 20 us for each fetch and for each plan.
"""

import contextlib
import heapq
import logging
import math
import os
import re
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forebay.arrays import I64
from forebay.dataset.manifest import SliceInfo
from forebay.errors import UsageError
from forebay.fetch.cache_state import SharedState
from forebay.fetch.chunk_file import (
    ABSENT,
    FETCHING,
    ChunkFile,
    MapLayout,
    create,
    read_generations,
    read_info,
)
from forebay.files import remove_stale
from forebay.storage.locks import at_fork

Group = tuple[ChunkFile, I64]  # Chunks of an entry.
_Used = tuple[int, int, str, I64]  # Minus the next use, a number, slice, chunks.
SHA256 = re.compile(r"[0-9a-f]{64}")
log = logging.getLogger("forebay.cache")
_MIN_EVICTED = 8 << 20  # At once, so that evictions are few; at most four requests' bytes and a 64th of the budget.
_MAX_USED = 1 << 16
_COUNT_INTERVAL_S = 5.0
_CREATE_TRIES = 4


_AHEAD_BYTES = (1 << 30) // 3
NEIGHBOURS_AHEAD = 2
"""Times what is planned ahead: how far ahead the neighbours lie that come with the same requests."""


@dataclass(frozen=True)
class CacheSettings:
    """The settings of a cache, with defaults filled in, and how far ahead of its reader they allow to plan."""

    directory: str | Path
    """Or `ram`, as of `ChunkCache`."""
    budget_bytes: int
    connections: int
    readahead_bytes: int | None
    share: bool | str
    keep: str = "budget"

    def ahead_bytes(self, sharers: int) -> int:
        """How many bytes of samples one of `sharers` plans ahead."""
        if self.readahead_bytes is not None:
            return self.readahead_bytes // 3
        return min(_AHEAD_BYTES, self.budget_bytes // 8) // sharers

    def neighbour_bytes(self) -> int:
        """How far ahead a process that has the cache alone fetches what lies beside that, with the same requests."""
        return NEIGHBOURS_AHEAD * self.ahead_bytes(1)


class NoSpaceError(UsageError):
    """What a cache needs now does not fit its budget, or its disk."""


class ChunkCache(SharedState):
    """Chunks of slices within a budget. Safe between threads and processes, and against kills. `close` it.

    Args:
        directory: Created if absent. Other files in it are ignored. `ram` keeps the slices in memory (/dev/shm): fast,
            shared by the processes of this user, and lost when the machine restarts.
        budget_bytes: For slices, and what is known of their chunks, together.

    Raises:
        UsageError: If the budget is not positive, the directory cannot be created, or 64 processes use it.
    """

    def __init__(self, directory: str | Path, budget_bytes: int) -> None:
        if budget_bytes <= 0:
            raise UsageError(f"cache: expected a budget over 0 bytes, got {budget_bytes}.")
        super().__init__(directory)
        self.budget_bytes = budget_bytes
        self.after_fork()
        with self._lock:  # Errors are raised here, and not at the first chunk.
            remove_stale(self.directory)
            self._make_space(0)  # The budget may have been larger before.
        at_fork(self)

    def after_fork(self) -> None:
        super().after_fork()
        self._entries: dict[str, ChunkFile] = {}
        self._used: list[_Used] = []  # A heap of what was read, by the next use; chunks may be listed twice.
        self._next_uses: dict[str, I64] = {}  # The latest of each chunk, by slice.
        self._num_used, self._max_used = 0, _MAX_USED
        self._claims: dict[str, set[int]] = {}  # Chunks that this process fetches, by slice.
        self._foreign: tuple[object, float, bool] = (None, 0.0, True)
        self._num_sharers, self._counted_at = 1, -math.inf
        self.evicted_bytes = 0
        self._is_miscounted = False  # Others removed a file that counts as stored.

    def close(self) -> None:
        """Release all pins and leave the cache; the next use enters it again. May be repeated."""
        with self._threads:
            self._leave()
            self._forget()

    def _forget(self) -> None:
        for table in (self._entries, self._used, self._next_uses, self._claims):
            table.clear()

    def num_sharers(self) -> int:
        """How many caches of this directory are in use, in all processes; as of 5 s ago at most."""
        now = time.monotonic()
        if now - self._counted_at > _COUNT_INTERVAL_S:
            with self._lock:
                self._num_sharers, self._counted_at = len(self._live()), now
        return self._num_sharers

    def path_of(self, sha256: str) -> Path:
        if not SHA256.fullmatch(sha256):
            raise UsageError(f"cache: expected a sha256 in lower-case hex, got {sha256[:80]!r}.")
        return self.directory / sha256

    # Chunks.

    def open(self, info: SliceInfo) -> ChunkFile:
        """The entry of a slice, made if it is absent. Raises UsageError if there is no space for it."""
        entry = self._entries.get(info.sha256)
        if entry is not None and not entry.is_lost():
            return entry
        with self._lock:
            entry = self._open(info.sha256)
            if self._is_miscounted:
                self._recount(always=True)
            if entry is not None and entry.info.chunk_bytes != info.chunk_bytes:
                self._delete(entry)
                entry = None
            if entry is None:
                entry = self._create(info)
            self._entries[info.sha256] = entry
            with contextlib.suppress(OSError):
                os.utime(entry.map_path)
            return entry

    def _create(self, info: SliceInfo) -> ChunkFile:
        size = MapLayout(info.bytes, info.chunk_bytes).disk_bytes
        paths = self.path_of(info.sha256), self._maps / info.sha256
        if reason := self._make_space(size):
            raise NoSpaceError(f"cache: {reason}")
        self._stored += size
        for _ in range(_CREATE_TRIES - 1):
            create(*paths, info)
            with contextlib.suppress(OSError):  # Unless another program deleted or replaced it.
                return ChunkFile(*paths, info)
        create(*paths, info)
        return ChunkFile(*paths, info)

    def open_pinned(self, items: Sequence[tuple[SliceInfo, I64]]) -> tuple[list[ChunkFile], str]:
        """`open` and `pin` slices, with no moment between them in which another process deletes one.

        Returns (the entries of those for which there is space, why there is none for the next or "").
        """
        entries: list[ChunkFile] = []
        with self._lock:
            for info, chunks in items:
                try:
                    entry = self.open(info)
                except NoSpaceError as error:
                    return entries, str(error)
                entry.pin(chunks, self._slot_number, self._generation)
                entries.append(entry)
        return entries, ""

    def pin(self, groups: Sequence[Group]) -> None:
        """Protect chunks, present or not, from eviction by any process until `unpin`, `close` or this process's end."""
        with self._lock:
            for entry, chunks in groups:
                entry.pin(chunks, self._slot_number, self._generation)

    def unpin(self, groups: Sequence[Group], next_uses: Sequence[int] | None = None) -> None:
        """Undo pins. `next_uses`: when each is read again, in steps; None: the later it was read, the later again."""
        with self._threads:
            for i, (entry, chunks) in enumerate(groups):
                if self._entries.get(entry.info.sha256) is not entry:
                    continue  # Another one has its name.
                freed = entry.unpin(chunks, self._slot_number, self._generation)
                if len(freed):
                    self._num_used += 1
                    next_use = self._num_used if next_uses is None else next_uses[i]
                    heapq.heappush(self._used, (-next_use, self._num_used, entry.info.sha256, freed))
                    self._next_uses.setdefault(entry.info.sha256, np.zeros(entry.layout.num_chunks, np.int64))[
                        freed
                    ] = next_use
                    if not entry.refs.any():
                        self._entries.pop(entry.info.sha256, None)  # Its map is closed when nobody uses it.
            if len(self._used) > self._max_used:
                self._used = [item for item in self._used if self._is_current(item)]
                heapq.heapify(self._used)
                self._max_used = max(_MAX_USED, 2 * len(self._used))

    def _is_current(self, item: _Used) -> bool:
        next_use, _, sha256, chunks = item
        latest = self._next_uses.get(sha256)
        return latest is not None and bool((latest[chunks] == -next_use).any())

    def claim(self, entry: ChunkFile, chunks: I64) -> tuple[I64, str]:
        """Reserve space for those of the pinned chunks that are absent, and mark them as being fetched by this process.

        Returns (the claimed chunks, why there is no space for them or ""). Fetch them, then call `complete`.
        """
        with self._lock:
            marks = entry.marks[chunks]
            if (marks >= FETCHING).any():
                others = [FETCHING + slot for slot in self._live() if slot != self._slot_number]
                claimed = list(self._claims.get(entry.info.sha256, ()))
                is_dead = (marks >= FETCHING) & ~np.isin(marks, others) & ~np.isin(chunks, claimed)
                entry.marks[chunks[is_dead]] = ABSENT
            absent = chunks[entry.marks[chunks] == ABSENT]
            if not len(absent):
                return absent, ""
            size = entry.size_of(absent)
            if reason := self._make_space(size):
                return absent[:0], reason
            self._reserved[self._slot_number] += size
            entry.marks[absent] = FETCHING + self._slot_number
            entry.pin(absent, self._slot_number, self._generation)  # Not evicted before it is counted as stored.
            self._claims.setdefault(entry.info.sha256, set()).update(absent.tolist())
            return absent, ""

    def complete(self, entry: ChunkFile, chunks: I64) -> None:
        """A fetch of claimed chunks ended: the present ones are stored, the others can be claimed again."""
        try:
            with self._lock:
                failed = chunks[entry.marks[chunks] >= FETCHING]
                entry.marks[failed] = ABSENT
                try:
                    with contextlib.suppress(FileNotFoundError):
                        if len(failed):
                            entry.punch(failed)  # A part of a chunk may be written.
                        entry.record_write()
                finally:
                    if not entry.is_deleted:
                        self._stored += entry.size_of(entry.stored(chunks))
                    # Last: a kill before it counts them twice.
                    self._reserved[self._slot_number] -= entry.size_of(chunks)
        finally:  # Also if the lock could not be taken: they can be claimed again.
            with self._threads:
                self._claims.get(entry.info.sha256, set()).difference_update(chunks.tolist())
                self.unpin([(entry, chunks)])

    def verify(self, entry: ChunkFile, chunks: I64) -> None:
        """Hash chunks whose marks are not believed; the space of those that are wrong is free."""
        if not entry.verify(chunks):
            with self._lock, contextlib.suppress(FileNotFoundError):
                entry.punch(np.flatnonzero(entry.marks == ABSENT))
                self._recount(always=True)

    # Whole slices.

    def get(self, sha256: str) -> Path | None:
        """The file of a slice all of whose chunks are here and verified, or None; it may be evicted."""
        self.path_of(sha256)
        with self._lock:
            entry = self._open(sha256)
            if entry is None:
                return None
            self._entries[sha256] = entry
            everything = np.arange(entry.layout.num_chunks)
            entry.pin(everything, self._slot_number, self._generation)
        self.verify(entry, everything)
        self.unpin([(entry, everything)])
        return entry.path if entry.is_complete() and not entry.is_deleted else None

    def stored_leaves(self, sha256: str) -> bytes | None:
        """The hashes of the chunks of a slice, if they are here."""
        with self._lock:
            entry = self._entries.get(sha256) or self._open(sha256)
            return entry.leaves() if entry is not None and entry.has_leaves else None

    def list_slices(self) -> set[str]:
        """The ids of the slices that are here completely."""
        complete = set()
        for item in os.scandir(self.directory):
            if SHA256.fullmatch(item.name):
                with contextlib.suppress(OSError), self._lock:
                    entry = self._open(item.name)
                    if entry is not None and entry.is_complete():
                        complete.add(item.name)
        return complete

    def evict(self, keep: Collection[str]) -> None:
        """Delete the slices, except these, that no process has pinned. Views of them stay valid, and keep the space."""
        with self._lock:
            live = self._live()
            for path in self._files():
                entry = self._open(path.name) if path.name not in keep else None
                if entry is not None and not entry.pinned(live).any():
                    self._delete(entry)
            self._used = [item for item in self._used if self._is_current(item)]
            heapq.heapify(self._used)

    def drop(self, groups: Sequence[Group]) -> None:
        """Delete those of the chunks that no process has pinned."""
        with self._lock:
            live = self._live()
            for entry, chunks in groups:
                if not entry.is_lost():
                    self.evicted_bytes += self._evict_chunks(entry, chunks, live, self.budget_bytes)

    def discard(self, sha256: str) -> None:
        """Delete a slice whose bytes are wrong, even if it is pinned."""
        with self._lock:
            entry = self._open(sha256)
            if entry is not None:
                self._delete(entry)

    def used_bytes(self) -> int:
        """Bytes stored and reserved, by all processes."""
        with self._lock:
            return self._stored + int(self._reserved.sum())

    # With the lock.

    def _recount(self, always: bool = False, dead_slot: int | None = None) -> bool:
        """Count the files again if a process died with a reservation; whether it was necessary."""
        live = self._live()
        dead = [n for n in np.flatnonzero(self._reserved).tolist() if n not in live or n == dead_slot]
        if not dead and not always:
            return False
        stored = 0
        for item in os.scandir(self._maps):  # What live processes are writing is counted twice, at worst.
            with contextlib.suppress(FileNotFoundError):
                if SHA256.fullmatch(item.name) and (entry := self._open(item.name)) is not None:
                    unfinished = np.flatnonzero(np.isin(entry.marks, [FETCHING + slot for slot in dead]))
                    if len(unfinished):
                        entry.marks[unfinished] = ABSENT
                        entry.punch(unfinished)
                    stored += entry.path.stat().st_blocks * 512 + entry.layout.disk_bytes
        self._stored, self._is_miscounted = stored, False
        self._reserved[dead] = 0
        return True

    def _open(self, sha256: str) -> ChunkFile | None:
        entry = self._entries.get(sha256)
        if entry is not None and not entry.is_lost():
            return entry
        self._entries.pop(sha256, None)
        path, map_path = self.path_of(sha256), self._maps / sha256
        try:
            info, size = read_info(map_path), path.stat().st_size
            if info is not None:
                if size == info.offset + info.bytes:
                    return ChunkFile(path, map_path, info)
                log.warning("%s: its bytes do not have that id. They are fetched again.", path)
        except FileNotFoundError:
            self._is_miscounted = map_path.exists()
        for file in (path, map_path):  # Not completed before a kill, truncated, or without its other half.
            with contextlib.suppress(FileNotFoundError):
                num_bytes = file.stat().st_blocks * 512
                file.unlink()
                self._stored -= num_bytes
        return None

    def _make_space(self, num_bytes: int) -> str:
        """Evict until so many bytes fit the budget and the disk; why they do not, or ""."""
        for can_recount in (True, False):
            free = os.statvfs(self.directory)
            reserved = int(self._reserved.sum())
            over = self._stored + reserved + num_bytes - self.budget_bytes
            short = reserved + num_bytes - free.f_bavail * free.f_frsize
            if max(over, short) <= 0 or self._evict(max(over, short)) >= max(over, short):
                return ""
            if not (can_recount and self._recount()):
                break
        if over > 0:
            return (
                f"no room for {num_bytes} bytes in {self.directory}: budget {self.budget_bytes}, "
                f"{self._stored + reserved} in use by chunks that are pinned or being fetched. "
                "Raise the budget to what the processes that share it read at once, or use fewer lanes."
            )
        return f"no room for {num_bytes} bytes in {self.directory}: its disk is full, {short} bytes short. Free space."

    def _evict(self, needed: int) -> int:
        """Delete unpinned chunks of at least so many bytes, if there are; returns the bytes that are free now."""
        target = max(needed, min(_MIN_EVICTED, 4 * needed, self.budget_bytes // 64))
        live = self._live()
        freed = self._evict_unused(needed, live)
        while freed < target and self._used:
            freed += self._evict_used(live, target - freed)
        if freed < needed:
            for path in self._files():
                if freed >= needed:
                    break
                if (other := self._open(path.name)) is not None:
                    freed += self._evict_chunks(other, np.arange(other.layout.num_chunks), live, target - freed)
        self.evicted_bytes += freed
        return freed

    def _evict_used(self, live: dict[int, int], limit: int) -> int:
        """Evict chunks that were read, those first that are read again last; neighbours with one call."""
        planned, taken = 0, dict[str, tuple[ChunkFile, list[I64]]]()
        while planned < limit and self._used:
            next_use, number, sha256, chunks = heapq.heappop(self._used)
            latest = self._next_uses.get(sha256)
            if latest is None or not len(chunks := chunks[latest[chunks] == -next_use]):
                continue
            entry = taken[sha256][0] if sha256 in taken else self._open(sha256)
            if entry is None:
                continue
            count = -(-(limit - planned) // entry.chunk_bytes)
            if count < len(chunks):
                heapq.heappush(self._used, (next_use, number, sha256, chunks[:-count]))
            taken.setdefault(sha256, (entry, []))[1].append(chunks[-count:])
            planned += entry.size_of(chunks[-count:])
        return sum(
            self._evict_chunks(entry, np.unique(np.concatenate(parts)), live, limit) for entry, parts in taken.values()
        )

    def _evict_unused(self, needed: int, live: dict[int, int]) -> int:
        """Delete slices, and parts of slices, that no live process uses; those used longest ago first."""
        freed = 0
        for path in self._files() if self._has_foreign(live) else ():
            if freed >= needed:
                break
            if not _is_used(self._maps / path.name, live) and (entry := self._open(path.name)) is not None:
                freed += self._delete(entry, is_unused=True)
        return freed

    def _has_foreign(self, live: dict[int, int]) -> bool:
        """Whether there may be files that no live process uses; looked at again when processes change, or after 5 s."""
        now, key = time.monotonic(), tuple(sorted(live.items()))
        last_key, looked_at, result = self._foreign
        if key != last_key or now - looked_at > 5.0:
            result = not all(_is_used(self._maps / path.name, live) for path in self._files())
            self._foreign = key, now, result
        return result

    def _files(self) -> list[Path]:
        """The paths of all slices, the one used longest ago first."""
        files = []
        for item in os.scandir(self.directory):
            if SHA256.fullmatch(item.name):
                used_at = 0.0
                with contextlib.suppress(FileNotFoundError):
                    used_at = (self._maps / item.name).stat().st_mtime
                files.append((used_at, Path(item.path)))
        return [path for _, path in sorted(files)]

    def _evict_chunks(self, entry: ChunkFile, chunks: I64, live: dict[int, int], limit: int) -> int:
        """Evict those of the chunks that are present and not pinned, the last first; returns their bytes."""
        chosen, pinned = entry.stored(chunks), entry.pinned(live)
        chosen = chosen[~pinned[chosen]]
        chosen = chosen[-max(1, -(-limit // entry.chunk_bytes)) :] if limit > 0 else chosen[:0]
        if not len(chosen):
            return 0
        if len(chosen) == int((entry.marks != ABSENT).sum()) and not pinned.any():
            return self._delete(entry, is_unused=True)
        before = entry.marks[chosen].copy()
        entry.marks[chosen] = ABSENT
        if not entry.punch(chosen):  # The file system keeps all or nothing of a file.
            entry.marks[chosen] = before
            return 0 if pinned.any() else self._delete(entry, is_unused=True)
        size = entry.size_of(chosen)
        self._stored -= size
        return size

    def _delete(self, entry: ChunkFile, is_unused: bool = False) -> int:
        size = entry.size_of(entry.stored(np.arange(entry.layout.num_chunks))) + entry.layout.disk_bytes
        entry.delete(is_unused)
        self._next_uses.pop(entry.info.sha256, None)
        self._entries.pop(entry.info.sha256, None)
        self._stored -= size
        return size


def _is_used(map_path: Path, live: dict[int, int]) -> bool:
    """Whether a live process has pinned anything of a slice since it came to the cache."""
    generations = read_generations(map_path)
    return len(generations) > 0 and any(generations[slot] == generation for slot, generation in live.items())
