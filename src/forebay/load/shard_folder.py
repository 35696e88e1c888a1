"""Shards of a bucket in a local directory: pairs of files, fetched, verified, and removed again.

One process of the machine fetches a shard, under a lock that the kernel releases if it dies. Tokens get their final
name after every sample was verified by its id, in threads (1 GB/s a processor). A mark file
records sizes and times; a pair without one, or changed since, is verified again. Only shards that were fetched here are
ever removed, and none that a process uses. Disk: the pairs that are kept and one partial pair.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.slices import hash_file
from forebay.errors import DatasetError, IntegrityError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.formats.external import map_file, read_head
from forebay.formats.vectors import NPY_MAGIC, Vector, vector_in
from forebay.storage.base import ObjectMeta, Origin, PermanentError, TransientError, as_object_origin, head_object
from forebay.storage.locks import EXCLUSIVE, SHARED, Lock, acquire, is_locked, try_acquire
from forebay.storage.ranged_download import DownloadResult, Progress, Workers, download_object, plan_download
from forebay.storage.transfers import RUN_BYTES, map_path_of

_BLOCK_BYTES = 1 << 20
_MAX_SAME = 2  # Retries that give the same wrong bytes.
_MAX_CHECK_RETRIES = 10
_MIN_SAMPLES = 64  # If all of so many are wrong, the ids are another shard's.
_MAX_HEADER_BYTES = 12 << 10
_MAX_RETRIES = 8
_LOCK_POLL_S = 0.1
log = logging.getLogger("forebay.storage")


@dataclass(frozen=True)
class ShardFiles:
    """A shard's two local files, verified."""

    index: int
    tokens: Path
    ids: Path


class ShardFolder:
    """A directory of shards, created if absent, and their origin. Processes share the directory, threads the object.

    Args:
        origin: None if all shards are in the directory.
        sequence_length: Tokens of a sample; 0: as the files have them.
        tmp_dir: Directory of partial files; by default `folder`.
        chunk_size, max_workers: See `plan_download`.
    """

    def __init__(
        self, origin: Origin | None, folder: Path, sequence_length: int = 0, *, tmp_dir: Path | None = None,
        chunk_size: int | None = None, max_workers: Workers = None, timeout_s: float = 300.0,
    ) -> None:  # fmt: skip
        plan_download(1, chunk_size, max_workers)  # Checks them.
        self.origin = None if origin is None else as_object_origin(origin)
        self.folder, self.tmp_dir = folder, tmp_dir or folder
        self._sequence_length, self._timeout_s = sequence_length, timeout_s
        self._chunk_size, self._max_workers = chunk_size, max_workers
        with self._writing():
            for directory in (self.folder, self.tmp_dir):
                directory.mkdir(parents=True, exist_ok=True)

    def indexes(self) -> list[int]:
        """The indexes of the shards at the origin or here, ascending. Raises DatasetError if there are none."""
        names = [path.name for path in self.folder.glob("train_*.npy")] + self._list_origin()
        indexes = {int(match[1]) for name in names if (match := re.fullmatch(r"train_(\d{6})\.npy", name))}
        if not indexes:
            location = self.folder if self.origin is None else self.origin.url
            raise DatasetError(f"{location}: expected shards {_tokens_name(0)} and on, got none. Check the address.")
        return sorted(indexes)

    def num_bytes(self, index: int) -> int:
        """Bytes of a shard's two files, here or at the origin. Raises DatasetError or NetworkError."""
        if (files := self.ready(index)) is not None:
            return files.tokens.stat().st_size + files.ids.stat().st_size
        return sum(head.bytes for head in self.heads(index).values())

    def check(self, index: int, tokens: Path, ids: Path) -> None:
        """Verify each sample of a pair of local files. Raises DatasetError or IntegrityError."""
        SampleCheck(index, ids, tokens.stat().st_size, self._sequence_length).finish(tokens)

    def heads(self, index: int, stop: threading.Event | None = None) -> dict[str, ObjectMeta]:
        """The heads of a shard's tokens and ids at the origin, by name. Raises DatasetError or NetworkError."""
        if self.origin is None:
            raise DatasetError(
                f"{self.folder}: expected shard {index} ({_tokens_name(index)} and its ids), got none. Copy it there, "
                "or give a url to fetch it from."
            )
        tokens, npy_ids, bin_ids = _names(index)
        heads = {tokens: self._head(tokens, stop)}
        try:
            return heads | {npy_ids: self._head(npy_ids, stop)}
        except DatasetError:
            return heads | {bin_ids: self._head(bin_ids, stop)}

    def on_disk(self, index: int) -> int:
        """Bytes of a shard on this disk, partial files included."""
        paths = [path for name in _names(index) for path in (self.folder / name, *self._parts(name))]
        return sum(path.stat().st_blocks * 512 for path in paths if path.exists())

    def ready(self, index: int) -> ShardFiles | None:
        """The shard's files, if they are here, verified, and unchanged since."""
        verified = self._read_mark(index).get("verified")
        return next((files for files in self._pairs(index) if _state(files) == verified), None)

    def use(self, index: int) -> Lock:
        """Lock a shard: no process removes it until the lock is released. Raises UsageError if it cannot be written."""
        with self._writing():
            return acquire(self._path(index, "use"), SHARED)

    def obtain(
        self, index: int, *, stop: threading.Event, on_progress: Progress | None = None
    ) -> tuple[ShardFiles, DownloadResult | None]:
        """The shard's files, fetched by one process of the machine while the others wait; None if not by this one.

        Raises:
            UsageError: If `stop` is set, or the directory cannot be written.
            DatasetError, IntegrityError, NetworkError: If it cannot be fetched or verified.
        """
        while (files := self.ready(index)) is None:
            with self._writing():
                lock = try_acquire(self._path(index, "fetch"))
            if lock is not None:
                with lock:
                    return self._obtain_locked(index, stop, on_progress)
            if stop.wait(_LOCK_POLL_S):
                raise UsageError(f"shard {index}: cancelled while another process fetched it.")
        return files, None

    def _obtain_locked(
        self, index: int, stop: threading.Event, on_progress: Progress | None
    ) -> tuple[ShardFiles, DownloadResult | None]:
        files, fetched = self.ready(index), None
        if files is None:
            if (files := self._verify_local(index)) is None:
                files, fetched = self._fetch(index, stop, on_progress)
            is_fetched = fetched is not None or self._is_fetched(index)
            with self._writing():
                self._write_mark(index, fetched=is_fetched, verified=_state(files))
        return files, fetched

    def remove(self, index: int) -> bool:
        """Remove a shard that was fetched here, unless it is used; whether it is gone, or was not fetched here."""
        if not self._is_fetched(index):
            return True
        with contextlib.ExitStack() as stack:
            for kind in ("use", "fetch"):
                lock = try_acquire(self._path(index, kind), EXCLUSIVE)
                if lock is None:
                    return False
                stack.enter_context(lock)
            for name in reversed(_names(index)):
                (self.folder / name).unlink(missing_ok=True)
            for kind in ("mark", "use", "fetch"):
                self._path(index, kind).unlink(missing_ok=True)  # A process that waits for a lock creates a new one.
        log.info("shard %d removed from %s", index, self.folder)
        return True

    def clean(self, keep: set[int]) -> None:
        """Remove what earlier runs left: unused partial files, and shards that were fetched here, except `keep`."""
        remove_stale(self.folder)
        for path in [*self.tmp_dir.glob(".*.part"), *self.folder.glob(".*.part")]:
            match = re.match(r"\.(?:train|sample_ids)_(\d{6})\.", path.name)
            if match is None or is_locked(self._path(int(match[1]), "fetch"), EXCLUSIVE):
                continue
            if not (path.parent == self.tmp_dir and int(match[1]) in keep and self.ready(int(match[1])) is None):
                path.unlink(missing_ok=True)
                map_path_of(path).unlink(missing_ok=True)
        for path in self.folder.glob(".train_*.mark"):
            if (index := int(path.stem[-6:])) not in keep:
                self.remove(index)

    def _pairs(self, index: int) -> list[ShardFiles]:
        tokens, *ids = (self.folder / name for name in _names(index))
        return [ShardFiles(index, tokens, path) for path in ids if tokens.is_file() and path.is_file()]

    def _parts(self, name: str) -> list[Path]:
        return list(self.tmp_dir.glob(f".{name}.*.part"))

    def _path(self, index: int, kind: str) -> Path:
        return self.folder / f".train_{index:06d}.{kind}"

    def _head(self, name: str, stop: threading.Event | None = None) -> ObjectMeta:
        assert self.origin is not None
        return head_object(self.origin, name, timeout_s=self._timeout_s, stop=stop)

    def _fetch(
        self, index: int, stop: threading.Event, on_progress: Progress | None
    ) -> tuple[ShardFiles, DownloadResult]:
        """Fetch the ids, then the tokens, which they verify. Ids or a header that do not fit are fetched once more."""
        assert self.origin is not None
        settings: dict[str, Any] = {"timeout_s": self._timeout_s, "stop": stop, "max_workers": self._max_workers}
        failed: set[str] = set()  # Digests of ids and headers.
        while True:
            tokens, ids = (self.folder / name for name in self.heads(index, stop))
            self._write_mark(index, fetched=True)
            download_object(self.origin, ids.name, ids, self.tmp_dir, **settings)
            try:
                fetched = download_object(
                    self.origin, tokens.name, tokens, self.tmp_dir, chunk_size=self._chunk_size,
                    on_progress=on_progress, **settings,
                    make_check=lambda plan, ids=ids: SampleCheck(  # type: ignore[misc]
                        index, ids, plan.num_bytes, self._sequence_length, plan.piece_bytes
                    ).wrong,
                )  # fmt: skip
                return ShardFiles(index, tokens, ids), fetched
            except (IntegrityError, DatasetError) as error:
                parts = self._parts(tokens.name) if isinstance(error, DatasetError) else []
                digest = hash_file(ids) + "".join(read_head(part, _MAX_HEADER_BYTES).hex() for part in parts)
                if digest in failed or len(failed) == _MAX_RETRIES:
                    raise
                failed.add(digest)
                for part in parts:
                    part.unlink()
                    map_path_of(part).unlink(missing_ok=True)
                log.warning("%s Fetching the ids again", error)

    def _verify_local(self, index: int) -> ShardFiles | None:
        for files in self._pairs(index):
            log.info("shard %d is already in %s: comparing all its samples with their ids", index, self.folder)
            try:
                self.check(index, files.tokens, files.ids)
                return files
            except (DatasetError, IntegrityError) as error:
                if not self._is_fetched(index):
                    raise
                log.warning("%s Fetching the shard again", error)
                files.tokens.unlink()
                files.ids.unlink()
        return None

    def _read_mark(self, index: int) -> dict[str, Any]:
        try:
            mark = json.loads(self._path(index, "mark").read_bytes())
        except (OSError, ValueError):
            return {}
        return mark if isinstance(mark, dict) else {}

    def _write_mark(self, index: int, **fields: Any) -> None:
        atomic_write(self._path(index, "mark"), json.dumps(fields).encode())

    def _is_fetched(self, index: int) -> bool:
        return bool(self._read_mark(index).get("fetched"))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(
                f"{self.folder}: expected a directory to write to, got: {error.strerror}. Choose another folder."
            ) from error

    def _list_origin(self) -> list[str]:
        """The names at the origin; if it cannot list them, each name is requested in turn."""
        if self.origin is None:
            return []
        list_names: Callable[[str], list[str]] | None = getattr(self.origin, "names", None)
        if list_names is not None:
            with contextlib.suppress(PermanentError, TransientError):
                return list_names("train_")
        names: list[str] = []
        try:
            for name in map(_tokens_name, itertools.count()):
                self._head(name)
                names.append(name)
        except DatasetError:
            if not names:
                raise
        return names


def _tokens_name(index: int) -> str:
    return f"train_{index:06d}.npy"


def _names(index: int) -> tuple[str, str, str]:
    return _tokens_name(index), f"sample_ids_{index:06d}.npy", f"sample_ids_{index:06d}.bin"


def _state(files: ShardFiles) -> list[int]:
    stats = [files.tokens.stat(), files.ids.stat()]
    return [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns, stat.st_ino)]


class SampleCheck:
    """Checks one shard's tokens, a file of `num_bytes`, by the ids in the complete file `ids`.

    `seq_len` 0: from the sizes, as the ids verify it. `piece_bytes` is the unit that is fetched again.
    """

    def __init__(self, index: int, ids: Path, num_bytes: int, seq_len: int = 0, piece_bytes: int = RUN_BYTES) -> None:
        self._index, self._ids = index, ids
        self._num_bytes, self._seq_len, self._piece_bytes = num_bytes, seq_len, piece_bytes
        self._num_samples = len(read_ids(ids))
        self._path = Path()  # Of the tokens.
        self._vector: Vector | None = None  # Their layout.
        self._wrong: dict[int, int] = {}  # Sample to the id that its bytes have.
        self._is_verified: NDArray[np.bool_] = np.zeros(self._num_samples, bool)
        self._num_same = self._num_retries = 0

    def wrong(self, path: Path) -> list[tuple[int, int]]:
        """The ranges of a complete file that must be fetched again: the pieces of the samples that are wrong.

        Raises IntegrityError if all are wrong, or the same wrong bytes are received repeatedly; or DatasetError.
        """
        last = self._wrong
        self._check(path)
        if not self._wrong:
            return []
        self._num_same = self._num_same + 1 if self._wrong == last else 0
        if self._num_retries == _MAX_CHECK_RETRIES or self._num_same == _MAX_SAME:
            raise self._error()
        self._num_retries += 1
        (offset, width), size = self._layout(), self._piece_bytes
        starts = np.array(sorted(self._wrong), np.int64) * width + offset
        pieces = np.unique(np.concatenate([starts, starts + width - 1]) // size).tolist()
        for piece in pieces:  # Their other samples are received again, too.
            first, stop = piece * size - offset, (piece + 1) * size - offset
            self._is_verified[max(0, first) // width : -(-stop // width)] = False
        return [(piece * size, min((piece + 1) * size, self._num_bytes)) for piece in pieces]

    def finish(self, path: Path) -> None:
        """Verify a complete local file. Raises IntegrityError or DatasetError."""
        size = path.stat().st_size
        if size != self._num_bytes:
            raise DatasetError(f"{path}: expected {self._num_bytes} bytes, got {size}. Fetch it again.")
        self._check(path)
        if self._wrong:
            raise self._error()

    def _check(self, path: Path) -> None:
        """Check the samples that are not verified."""
        self._path, self._vector = path, self._read_header(path)
        step = max(1, _BLOCK_BYTES // self._layout()[1])
        blocks = [range(i, min(i + step, self._num_samples)) for i in range(0, self._num_samples, step)]
        doubtful = [block for block in blocks if not self._is_verified[block.start : block.stop].all()]
        check_block = partial(self._check_block, map_file(path), read_ids(self._ids))
        self._wrong = {}
        with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
            for wrong in pool.map(check_block, doubtful):
                self._wrong |= wrong
        self._is_verified[:] = True
        self._is_verified[list(self._wrong)] = False
        if len(self._wrong) == self._num_samples >= _MIN_SAMPLES:
            raise self._error()  # Not damage in transfer.

    def _layout(self) -> tuple[int, int]:
        assert self._vector is not None
        return self._vector.offset, self._seq_len * self._vector.kind.itemsize

    def _read_header(self, path: Path) -> Vector:
        count, dtype = self._num_samples, None
        with path.open("rb") as file:
            is_raw = file.read(len(NPY_MAGIC)) != NPY_MAGIC
        if is_raw:
            width = self._num_bytes // max(1, count * self._seq_len) if self._seq_len else 2
            dtype = {2: "<u2", 4: "<u4"}.get(width)
            if dtype is None:
                raise self._size_error(f"{self._num_bytes} bytes")
        vector = vector_in(path, self._num_bytes, dtype)
        if vector.kind not in (np.dtype("<u2"), np.dtype("<u4")):
            raise DatasetError(f"shard {self._index}: expected tokens of uint16 or uint32, got {vector.kind} ({path}).")
        self._seq_len = self._seq_len or vector.count // count
        if vector.count != count * self._seq_len or not self._seq_len:
            raise self._size_error(f"{vector.count} tokens")
        return vector

    def _size_error(self, actual: str) -> DatasetError:
        count = self._num_samples
        return DatasetError(
            f"shard {self._index}: expected {count * self._seq_len} tokens, {self._seq_len} for each of {count} ids "
            f"({self._ids}), got {actual}. One of the two is truncated, of another shard, or of another "
            "sequence_length; fetch both again, or set sequence_length."
        )

    def _check_block(self, tokens: NDArray[np.uint8], ids: NDArray[np.uint64], samples: range) -> dict[int, int]:
        offset, width = self._layout()
        data = tokens[offset + samples.start * width : offset + samples.stop * width].data
        digests = (hashlib.blake2b(data[i : i + width], digest_size=8).digest() for i in range(0, len(data), width))
        got = np.frombuffer(b"".join(digests), "<u8")
        wrong = np.flatnonzero(got != ids[samples.start : samples.stop])
        return {samples.start + int(i): int(got[i]) for i in wrong}

    def _error(self) -> IntegrityError:
        first, (offset, width) = min(self._wrong), self._layout()
        return IntegrityError(
            f"shard {self._index}: expected each sample to have its id, got {len(self._wrong)} of {self._num_samples} "
            f"that have not, the first sample {first} at byte {offset + first * width} ({self._path}). Have "
            f"the shard published again, or leave it out: remap={{{self._index}: ANOTHER}}."
        )


def read_ids(path: Path) -> NDArray[np.uint64]:
    """The ids of a file, U64 [N], a view of the mapped file. Raises DatasetError if it has no ids."""
    memory = map_file(path)
    vector = vector_in(path, len(memory), "<u8")
    if vector.kind != np.dtype("<u8") or not vector.count:
        raise DatasetError(f"{path}: expected sample ids of uint64, got {vector.count} {vector.kind}. Fetch it again.")
    return memory[vector.offset :].view("<u8")
