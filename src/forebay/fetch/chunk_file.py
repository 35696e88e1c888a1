"""A slice of which some chunks are here: a sparse file with these at their places, and a map of what is known of them.

The map has a header, a mark a chunk, the leaves of the slice's tree, and which chunks each process has pinned;
processes share it by mapping it. A chunk is marked after its bytes were written and verified, so a kill leaves chunks
that are not marked. Marks are not believed after a restart of the machine, and for a file that was copied or written to
by others: chunks are then hashed again at their first use. Another object than a slice has a check in place of a tree.
"""

import contextlib
import ctypes
import errno
import logging
import os
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from io import FileIO
from pathlib import Path

import numpy as np

from forebay.arrays import BOOL, I64, U8, U32
from forebay.dataset.chunks import HASH_BYTES, ChunkHasher, consecutive_runs, num_chunks, root_of, wrong_chunks
from forebay.dataset.manifest import SliceInfo
from forebay.machine import open_own
from forebay.maps import map_file

Check = Callable[[int, memoryview], bool]
"""Whether bytes are those of a chunk. Called by several threads."""

NUM_SLOTS = 64  # Processes that use a cache at once.
ABSENT, PRESENT, UNVERIFIED, FETCHING = 0, 1, 2, 16  # FETCHING + s: a process with slot s fetches it.
PAGE_BYTES = 4096
_EXTENTS_PER_PAGE = 340  # ext4's; other file systems take no more.
_log = logging.getLogger("forebay.cache")
_HEADER = struct.Struct("<8sqqqqqq16s")  # Magic, bytes, chunk bytes, deleted, offset, inode and time of file, boot id.
_MAGIC = b"FOREBAY3"
_DELETED_AT = 24
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
_POOL_BYTES = 32 << 20  # More are hashed by several threads.


class MapLayout:
    """Where the parts of the map of a slice are."""

    def __init__(self, num_bytes: int, chunk_bytes: int) -> None:
        self.num_chunks = n = num_chunks(num_bytes, chunk_bytes)
        self.marks = _HEADER.size
        self.leaves = -(-(self.marks + n) // 8) * 8
        self.generations = self.leaves + HASH_BYTES * n
        self.pins = self.generations + 4 * NUM_SLOTS
        self.pin_bytes = -(-n // 8)
        self.num_bytes = round_up(self.pins + NUM_SLOTS * self.pin_bytes)
        self.disk_bytes = self.num_bytes + PAGE_BYTES * (1 + n // _EXTENTS_PER_PAGE)
        """Of the map, and of the file system's list of where a sparse file's chunks are."""


class ChunkFile:
    """An open file of a cache. `refs` counts this process's pins of each chunk.

    The cache's lock guards everything but the marks of chunks that this process has pinned or claimed.
    """

    def __init__(self, path: Path, map_path: Path, info: SliceInfo) -> None:
        self.path, self.map_path, self.info = path, map_path, info
        self.check: Check | None = None
        """In place of the tree of an object that has none; the caller that opens the object sets it."""
        self.layout = layout = MapLayout(info.bytes, info.chunk_bytes)
        with open(map_path, "r+b", opener=open_own) as file:
            self._map: U8 = map_file(file, layout.num_bytes, is_writable=True)
        with open(path, "rb", opener=open_own) as file:
            self.data: U8 = map_file(file, info.bytes, info.offset)
            self._inode = os.fstat(file.fileno()).st_ino
        n = layout.num_chunks
        self.marks = self._map[layout.marks : layout.marks + n]
        self.generations = self._map[layout.generations : layout.pins].view(np.uint32)
        self.pins = self._map[layout.pins : layout.pins + NUM_SLOTS * layout.pin_bytes].reshape(NUM_SLOTS, -1)
        self.refs = np.zeros(n, np.uint16)
        self.leaves_lock = threading.Lock()  # One thread of this process reads them.
        self._has_leaves = n == 1 and bool(info.sha256)
        inode, time_ns, boot = _identity_of(path)
        own_inode, own_time_ns, own_boot = self._identity()
        is_written = time_ns != own_time_ns and not (self.marks >= FETCHING).any()
        if (inode, boot) != (own_inode, own_boot) or is_written:
            self._distrust()

    @property
    def is_deleted(self) -> bool:
        """Whether the file was removed from the cache; another one may have its name."""
        return bool(self._map[_DELETED_AT])

    def is_lost(self) -> bool:
        """Return whether the cache or another program removed the file; chunks are then fetched into a new one."""
        try:
            return self.is_deleted or self.path.stat().st_ino != self._inode
        except OSError as error:
            return isinstance(error, FileNotFoundError)

    def is_same_file(self, other: "ChunkFile | None") -> bool:
        """Return whether another entry of this name is of the same file."""
        return other is not None and self._inode == other._inode

    def open_file(self) -> FileIO:
        """Open the file to write to it. Raises FileNotFoundError if it was removed, even if another has its name."""
        file = self.path.open("r+b", buffering=0)
        if os.fstat(file.fileno()).st_ino != self._inode:
            file.close()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        return file

    @property
    def has_leaves(self) -> bool:
        """Whether the leaves of the tree are known here; another process may have stored them."""
        if not self._has_leaves and self.check is None:
            leaves = self._leaves()
            self._has_leaves = bool(leaves.any()) and root_of(leaves.tobytes()) == self.info.sha256
        return self._has_leaves and self.check is None

    @property
    def chunk_bytes(self) -> int:
        return self.info.chunk_bytes

    def stored(self, chunks: I64) -> I64:
        """Those of the chunks whose bytes are here; another process may have them verified again."""
        marks = self.marks[chunks]
        chosen: I64 = chunks[(marks == PRESENT) | (marks == UNVERIFIED)]
        return chosen

    def is_complete(self) -> bool:
        return bool((self.marks == PRESENT).all())

    def size_of(self, chunks: I64) -> int:
        """Bytes on disk of these chunks."""
        return self._sum_of(chunks, round_up(self.info.bytes))

    def bytes_of(self, chunks: I64) -> int:
        """Bytes of the slice in these chunks."""
        return self._sum_of(chunks, self.info.bytes)

    def _sum_of(self, chunks: I64, num_bytes: int) -> int:
        """The sizes of chunks of which all have `num_bytes`: only the last may differ."""
        size = len(chunks) * self.chunk_bytes
        if len(chunks) and int(chunks.max()) == self.layout.num_chunks - 1:
            size -= self.layout.num_chunks * self.chunk_bytes - num_bytes
        return size

    def leaves(self) -> bytes:
        """The leaves of the tree; only if `has_leaves`."""
        return bytes.fromhex(self.info.sha256) if self.layout.num_chunks == 1 else self._leaves().tobytes()

    def set_leaves(self, leaves: bytes) -> None:
        self._leaves()[:] = np.frombuffer(leaves, np.uint8)
        self._has_leaves = True

    def verify(self, chunks: I64) -> bool:
        """Hash chunks whose marks are not believed; whether all were right. The others are marked absent.

        Processes that verify at the same time share the work, since each takes the chunks in another order.
        """
        doubtful = chunks[self.marks[chunks] == UNVERIFIED]
        if not len(doubtful):
            return True
        if self.check is None and not self.has_leaves and not self._find_leaves():
            self.marks[self.marks == UNVERIFIED] = ABSENT
            _log.warning("%s: cannot be verified; it is fetched again.", self.path)
            return False
        check, order = self.check or self._has_hash, np.random.default_rng().permutation(doubtful).tolist()

        def verify_chunk(chunk: int) -> None:
            if self.marks[chunk] == UNVERIFIED:
                data = memoryview(self.data[chunk * self.chunk_bytes : (chunk + 1) * self.chunk_bytes])  # type: ignore[arg-type]
                self.marks[chunk] = PRESENT if check(chunk, data) else ABSENT

        if len(order) * self.chunk_bytes < _POOL_BYTES:
            list(map(verify_chunk, order))
        else:
            with ThreadPoolExecutor() as pool:
                list(pool.map(verify_chunk, order))
        is_right = bool((self.marks[doubtful] == PRESENT).all())
        if not is_right:
            _log.warning("%s: its bytes do not have that id. They are fetched again.", self.path)
        return is_right

    def record_write(self) -> None:
        """This process wrote to the file: its time is not a reason to doubt it. Another one of its name is doubted."""
        if not self.is_lost():
            self._map[: _HEADER.size] = _header(self.info, self.is_deleted, self.path)

    def doubt(self, chunks: I64) -> None:
        """Have chunks hashed again before they are used."""
        self.marks[chunks[self.marks[chunks] == PRESENT]] = UNVERIFIED

    def pin(self, chunks: I64, slot: int, generation: int) -> None:
        self.refs[chunks] += 1
        self._publish(slot, generation)

    def unpin(self, chunks: I64, slot: int, generation: int) -> I64:
        """Undo a pin; returns the chunks that this process does not need any more."""
        self.refs[chunks] -= 1
        self._publish(slot, generation)
        unused: I64 = chunks[self.refs[chunks] == 0]
        return unused

    def pinned(self, live: dict[int, int]) -> BOOL:
        """Which chunks a live process has pinned, bool [n]; `live`: the generation by slot."""
        rows = [slot for slot, generation in live.items() if self.generations[slot] == generation]
        if not rows:
            return np.zeros(self.layout.num_chunks, bool)
        bits = np.bitwise_or.reduce(self.pins[rows], axis=0)
        return np.unpackbits(bits, count=self.layout.num_chunks).astype(bool)

    def delete(self, is_unused: bool) -> None:
        """Remove the file. Processes that have it open notice by `is_deleted`; their maps keep the disk space of one
        that is not `is_unused`."""
        self._map[_DELETED_AT] = 1
        if is_unused:
            with contextlib.suppress(OSError), self.open_file() as file:
                punch_hole(file.fileno(), 0, round_up(self.info.offset + self.info.bytes))
        self.path.unlink(missing_ok=True)
        self.map_path.unlink(missing_ok=True)

    def punch(self, chunks: I64) -> bool:
        """Return the disk space of chunks that are marked absent; False if the file system cannot."""
        with self.open_file() as file:
            for run in consecutive_runs(chunks):
                first, stop = int(run[0]) * self.chunk_bytes, (int(run[-1]) + 1) * self.chunk_bytes
                size = min(stop, round_up(self.info.bytes)) - first
                if not punch_hole(file.fileno(), self.info.offset + first, size):
                    return False
        self.record_write()
        return True

    def _identity(self) -> tuple[int, int, bytes]:
        *_, inode, time_ns, boot = _HEADER.unpack(self._map[: _HEADER.size].tobytes())
        return inode, time_ns, boot

    def _distrust(self) -> None:
        present = (self.marks == PRESENT) | (self.marks == UNVERIFIED)
        self.marks[:] = np.where(present, UNVERIFIED, np.where(self.marks >= FETCHING, self.marks, ABSENT))
        self.record_write()

    def _find_leaves(self) -> bool:
        """Compute the leaves of a slice that came as a whole; whether they are right."""
        if not self.marks.all():
            return False
        hasher = ChunkHasher(self.info.chunk_bytes)
        hasher.update(memoryview(self.data))  # type: ignore[arg-type]
        leaves = hasher.leaves()
        if root_of(leaves) != self.info.sha256:
            return False
        self.set_leaves(leaves)
        return True

    def _has_hash(self, chunk: int, data: memoryview) -> bool:
        if self.layout.num_chunks == 1:
            return not wrong_chunks(data, self.leaves(), self.info.chunk_bytes)
        leaf = self._leaves()[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES].tobytes()
        return not wrong_chunks(data, leaf, self.info.chunk_bytes)

    def _leaves(self) -> U8:
        return self._map[self.layout.leaves : self.layout.generations]

    def _publish(self, slot: int, generation: int) -> None:
        self.pins[slot] = np.packbits(self.refs > 0)
        self.generations[slot] = generation


def round_up(num_bytes: int) -> int:
    """Bytes on disk of a file with so many."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def create(path: Path, map_path: Path, info: SliceInfo, mark: int = ABSENT) -> None:
    """Make the map of a slice, then its file unless that is complete (`mark` not ABSENT). Raises OSError.

    In this order: a file without a map is a complete one.
    """
    layout = MapLayout(info.bytes, info.chunk_bytes)
    data = bytearray(layout.num_bytes)  # Written, so that a full disk is an error now, and no signal later.
    data[: _HEADER.size] = _header(info, False, path).tobytes()
    data[layout.marks : layout.marks + layout.num_chunks] = bytes([mark]) * layout.num_chunks
    with open(map_path, "wb", opener=open_own) as file:
        file.write(data)
    if mark == ABSENT:
        with open(path, "wb", opener=open_own) as file:
            file.truncate(info.offset + info.bytes)


def read_info(map_path: Path) -> SliceInfo | None:
    """What the map of a slice says of it; None if it is none, or was not written to its end."""
    with map_path.open("rb") as file:
        data = file.read(_HEADER.size)
        size = file.seek(0, os.SEEK_END)
    if len(data) < _HEADER.size:
        return None
    magic, num_bytes, chunk_bytes, _, offset, *_ = _HEADER.unpack(data)
    if (
        magic != _MAGIC
        or min(num_bytes, chunk_bytes, offset) < 0
        or MapLayout(num_bytes, chunk_bytes).num_bytes != size
    ):
        return None
    return SliceInfo(0, map_path.name, num_bytes, map_path.name, 0, 0, chunk_bytes, offset)


def read_generations(map_path: Path) -> U32:
    """The generation of each slot that has pinned something of the slice: [64], or [0] if the file is none."""
    try:
        if (info := read_info(map_path)) is not None:
            offset = MapLayout(info.bytes, info.chunk_bytes).generations
            return np.fromfile(map_path, np.uint32, NUM_SLOTS, offset=offset)
    except OSError:
        pass
    return np.zeros(0, np.uint32)


def punch_hole(descriptor: int, start: int, size: int) -> bool:
    """Return the disk space of a part of a file, which then reads as zeros; False where that is not supported."""
    if _fallocate is None:
        return False
    if _fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, start, size):
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return False
        raise OSError(number, os.strerror(number))
    return True


@cache
def _boot_id() -> bytes:
    """What changes when the machine restarts; zeros where that is not known."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def _identity_of(path: Path) -> tuple[int, int, bytes]:
    status = path.stat()
    return status.st_ino & (1 << 63) - 1, status.st_mtime_ns, _boot_id()


def _header(info: SliceInfo, is_deleted: bool, path: Path) -> U8:
    identity = _identity_of(path) if path.exists() else (0, 0, _boot_id())
    header = _HEADER.pack(_MAGIC, info.bytes, info.chunk_bytes, is_deleted, info.offset, *identity)
    return np.frombuffer(header, np.uint8)


def _find_fallocate() -> ctypes._CFuncPtr | None:  # type: ignore[name-defined]
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate64
    except (AttributeError, OSError, TypeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return call


_fallocate = _find_fallocate()
