"""Copy a dataset or token shards to a directory or a bucket: verified, resumable, complete or in part.

Slices come first, then small files, the table, and last the manifest, so a copy with a manifest is complete. Bytes are
verified before they get their final names. Existing slices are hashed (in a bucket: compared by their recorded hash)
and skipped; one that a kill broke off resumes with its complete pieces. A mirror may join the swarm and serve its
slices meanwhile. Of an existing shard every sample is compared with its id; in a bucket its size counts.

Disk: the slices being downloaded (four and 1 GiB at most, or one larger; to a bucket two) or one shard, in `.mirror` of
the target or in a temporary directory. Memory: that of the transfers (`connections` x 256 KiB), and 32 MiB per upload.
"""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from forebay.base import Json
from forebay.dataset.chunks import CHUNKS_FILE, hash_slice
from forebay.dataset.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, TABLE_FILE, SliceInfo, dataset_id
from forebay.errors import DatasetError, ForebayError, IntegrityError, NetworkError, UsageError
from forebay.fetch.downloads import Workers
from forebay.fetch.engine import RunFetcher
from forebay.fetch.runs import Sources
from forebay.fetch.transfers import FileTransfer, map_path_of
from forebay.load.shard_cache import ShardCache
from forebay.load.shard_files import ShardInfo, find_shard, list_shards, pair_map, read_layout, verify_pair
from forebay.storage.addresses import is_bucket
from forebay.storage.base import PathOrigin, as_object_origin, head_object, read_small
from forebay.storage.locks import acquire_now
from forebay.storage.origins import RemoteDataset, fetch_object, open_origin
from forebay.storage.store import Store, open_store

_MAX_SLICES, _MAX_BYTES = 4, 1 << 30
_MAX_BUCKET_SLICES = 2  # one is downloaded while another is uploaded; four were as fast
_MAX_SWARM_SLICES = 64  # requested from the trackers at once
_POLL_S = 0.1
_IDLE_S = 5.0  # a mirror that served nothing for so long ends
_MAX_CHECKS = 16
_MAX_FILE_BYTES = 1 << 30
_PARTS = ".mirror"
OnProgress = Callable[[int], object]
log = logging.getLogger("forebay.mirror")


@dataclass(frozen=True)
class MirrorReport:
    """The result of a mirror.

    Attributes:
        id: Of the dataset.
        copied, skipped: Slices of the range that were downloaded, and that existed.
        missing: Slices outside the range that do not exist in the target.
        complete: The target has the complete dataset with its manifest.
    """

    id: str
    source: str
    target: str
    slices: int
    copied: int
    skipped: int
    copied_bytes: int
    skipped_bytes: int
    missing: int
    complete: bool


@dataclass(frozen=True)
class _Target:
    """Where a mirror writes, and its files that are not complete."""

    store: Store
    parts: Path

    def part_path(self, name: str) -> Path:
        return self.parts / f"{name.replace('/', '_')}.part"


@contextmanager
def _open_target(url: str | Path) -> Iterator[_Target]:
    """Lock a target against other mirrors. Raises UsageError if another one has it."""
    store = open_store(url if "://" in str(url) else Path(url).absolute())
    try:
        parts = store.directory(_PARTS)
        lock = acquire_now(parts / "lock", f"mirror: {store.url}")
    except OSError as error:
        raise UsageError(f"mirror: cannot write to {store.url}: {error}. Choose another directory.") from error
    try:
        store.remove_stale()
        yield _Target(store, parts)
    finally:
        lock.path.unlink(missing_ok=True)
        lock.release()
        with suppress(OSError):  # Partial files that can be resumed are kept.
            parts.rmdir()


def mirror(
    dataset: RemoteDataset, to: str | Path, *, start: int = 0, stop: int | None = None, connections: int = 16,
    on_progress: OnProgress = lambda _: None,
) -> MirrorReport:  # fmt: skip
    """Copy slices [start, stop) and, when all slices exist, the files that complete the dataset.

    Args:
        dataset: From `open_remote`, of any URL.
        to: A directory, or a URL of a bucket and a prefix.
        on_progress: Called with the bytes copied or skipped since the last call, one call at a time.

    Raises:
        UsageError: If the range is outside the dataset, or the target has no room, contains another dataset or is
            written to by another mirror.
        NetworkError: If a slice cannot be downloaded. The copied ones are kept; the next run resumes.
    """

    with _open_target(to) as target, RunFetcher(connections) as fetcher:
        return _mirror(dataset, target, fetcher, start, stop, on_progress)


def mirror_by_swarm(
    dataset: RemoteDataset, to: str | Path, *, share: bool | str, start: int = 0, stop: int | None = None,
    connections: int = 16, linger_s: float = 60.0,
    on_progress: OnProgress = lambda _: None,
) -> tuple[MirrorReport, Json]:  # fmt: skip
    """Like `mirror`, from a swarm to a directory; also returns the figures of the swarm.

    `share`: see SwarmMember. After the copy it serves slices until none was requested for 5 s, for `linger_s` at most.
    """
    from forebay.swarm.reader import SwarmMember

    if is_bucket(to):
        raise UsageError(f"mirror: expected a directory to share from, got {to}. Leave out --share.")
    files, is_present = dict[str, Path](), np.zeros(dataset.num_slices, np.bool_)

    def serve(row: SliceInfo) -> None:
        files[row.sha256] = Path(target.store.url) / row.name
        is_present[row.index] = True
        member.reader.release(row.index, True)  # After it can be served.

    with (
        _open_target(to) as target,
        RunFetcher(connections) as fetcher,
        SwarmMember(dataset, files, is_present.copy, fetcher.wake, share=share) as member,
    ):
        member.files[CHUNKS_FILE] = Path(target.store.url) / CHUNKS_FILE  # served as soon as it exists
        report = _mirror(
            dataset, target, fetcher, start, stop, on_progress, member.origin, serve, _MAX_SWARM_SLICES
        )  # fmt: skip
        deadline = time.monotonic() + linger_s
        sent, sent_at = -1, time.monotonic()
        while member.share is not None and time.monotonic() < min(deadline, sent_at + _IDLE_S):
            if sent != member.share.bytes_sent:
                sent, sent_at = member.share.bytes_sent, time.monotonic()
            time.sleep(_POLL_S)
        bytes_shared = member.share.bytes_sent if member.share is not None else 0
        return report, {**member.reader.stats(), "transfers": fetcher.stats(), "bytes_shared": bytes_shared}


def _mirror(
    dataset: RemoteDataset, target: _Target, fetcher: RunFetcher, start: int, stop: int | None, on_progress: OnProgress,
    origin: Callable[[int], Sources] | None = None, on_commit: Callable[[SliceInfo], object] = lambda row: None,
    at_once: int = 0,
) -> MirrorReport:  # fmt: skip
    """Mirror a dataset.

    Args:
        origin: Who sends a slice, by index; by default the dataset's origin.
        on_commit: Called with each slice that is there.
        at_once: Slices that are downloaded at once.
    """
    stop = dataset.num_slices if stop is None else stop
    if not 0 <= start <= stop <= dataset.num_slices:
        raise UsageError(f"slices: expected a range in 0:{dataset.num_slices}, got {start}:{stop}.")
    store = target.store
    _check_manifest(dataset, target)
    absent: list[SliceInfo] = []
    skipped: list[SliceInfo] = []
    for row, is_present in _check_slices(store, map(dataset.table.row, range(start, stop)), verify=True):
        (skipped if is_present else absent).append(row)
        if is_present:  # A kill between an upload and the deletion leaves its part.
            for part in (target.part_path(row.name), map_path_of(target.part_path(row.name))):
                part.unlink(missing_ok=True)
            on_commit(row)
            on_progress(row.bytes)
    if store.folder:
        _check_room(target, sum(row.bytes for row in absent))
    has_leaves = False
    if (start, stop) == (0, dataset.num_slices):  # Now, as the source may be gone at the end.
        with suppress(DatasetError, NetworkError):
            _copy_leaves(dataset.all_leaves(), target)
            has_leaves = True
    _copy_slices(
        dataset, target, fetcher, absent, origin or (lambda _: dataset.origin), on_commit, on_progress, at_once
    )
    outside = map(dataset.table.row, [*range(start), *range(stop, dataset.num_slices)])
    missing = sum(not is_present for _, is_present in _check_slices(store, outside, verify=False))
    if not missing:
        if not has_leaves:
            _copy_leaves(_all_leaves(dataset, target), target)
        _copy_listed(dataset, target)
    return MirrorReport(
        dataset.id, dataset.origin.url, store.url, dataset.num_slices, len(absent), len(skipped),
        sum(row.bytes for row in absent), sum(row.bytes for row in skipped), missing, not missing,
    )  # fmt: skip


def _check_manifest(dataset: RemoteDataset, target: _Target) -> None:
    with suppress(FileNotFoundError):
        if (id := dataset_id(target.store.read(MANIFEST_FILE))) != dataset.id:
            raise UsageError(
                f"{target.store.url}: expected no dataset, or the dataset {dataset.id}, got {id}. Choose another "
                "target."
            )


def _copy_slices(
    dataset: RemoteDataset, target: _Target, fetcher: RunFetcher, rows: Sequence[SliceInfo],
    origin: Callable[[int], Sources], on_commit: Callable[[SliceInfo], object], on_progress: OnProgress, at_once: int,
) -> None:  # fmt: skip
    """Download slices, `at_once` at a time, or as many as the target allows. The first error ends all."""
    store, largest = target.store, max((row.bytes for row in rows), default=1)
    at_once = at_once or max(1, min(_MAX_SLICES if store.folder else _MAX_BUCKET_SLICES, _MAX_BYTES // largest))
    stopping, errors, lock = threading.Event(), list[Exception](), threading.Lock()

    def copy(row: SliceInfo) -> None:
        reported = 0

        def report(received: int) -> None:
            nonlocal reported
            with lock:
                on_progress(received - reported)
            reported = received

        try:
            sources, leaves = origin(row.index), partial(dataset.leaves, row.index)
            transfer = FileTransfer(fetcher, row, target.part_path(row.name), sources, read_leaves=leaves)
            transfer.run(stopping, report)
            store.put(row.name, transfer.part, row.sha256)
            on_commit(row)
            report(row.bytes)
        except Exception as error:  # noqa: BLE001 - raised below
            is_disk = isinstance(error, OSError) and not isinstance(error, ForebayError)
            wrong = UsageError(f"{store.url}: cannot write {row.name}: {error}. Check the disk.")
            errors.append(wrong if is_disk else error)
            stopping.set()

    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(lambda row: None if stopping.is_set() else copy(row), rows))
        finally:
            stopping.set()
    if errors:
        raise errors[0]


def _copy_listed(dataset: RemoteDataset, target: _Target) -> None:
    """Copy the files that complete a dataset; its manifest last.

    Raises:
        DatasetError: If a file is larger than the slices and 1 GiB, or the source has another dataset by now.
    """
    limit = _MAX_FILE_BYTES + int(dataset.table.bytes.sum())
    for name, sha256 in {**dataset.manifest.listed_files, TABLE_FILE: dataset.manifest.table_sha256}.items():
        part, size = target.part_path(name), dataset.origin.size(name)
        if size > limit:
            raise DatasetError(f"{dataset.origin.url}/{name}: expected at most {limit} bytes, got {size}.")
        with part.open("wb") as file:
            fetch_object(dataset.origin, name, size, sha256, file, size + 1)
        target.store.put(name, part)
    manifest = read_small(dataset.origin, MANIFEST_FILE, MAX_MANIFEST_BYTES)
    if (id := dataset_id(manifest)) != dataset.id:
        raise DatasetError(f"{dataset.origin.url}: expected the dataset {dataset.id}, got {id}. Publish it again.")
    target.store.write(MANIFEST_FILE, manifest)


def _copy_leaves(of_slices: Iterable[bytes], target: _Target) -> None:
    """Copy the hashes of all chunks, verified slice by slice: 1 MiB of memory, and a part file of 32 bytes a chunk."""
    part = target.part_path(CHUNKS_FILE)
    with part.open("wb") as file:
        file.writelines(of_slices)
    target.store.put(CHUNKS_FILE, part)


def _all_leaves(dataset: RemoteDataset, target: _Target) -> Iterator[bytes]:
    """The hashes of the chunks of each slice: the source's; of slices in a directory their own where it has none."""
    count = 0
    try:
        for count, leaves in enumerate(dataset.all_leaves(), 1):  # noqa: B007
            yield leaves
    except (DatasetError, NetworkError):
        if not target.store.folder:
            raise
    for row in map(dataset.table.row, range(count, dataset.num_slices)):
        path = Path(target.store.url) / row.name
        sha256, leaves = hash_slice(path, row.chunk_bytes)
        if sha256 != row.sha256:
            raise DatasetError(f"{path}: changed after it was copied. Check the disk, and mirror again.")
        yield leaves


def _check_room(target: _Target, needed: int) -> None:
    free = shutil.disk_usage(target.parts).free
    free += sum(path.stat().st_blocks * 512 for path in target.parts.rglob("*") if path.is_file())
    if needed > free:
        raise UsageError(
            f"{target.store.folder or target.parts}: expected room for {needed} bytes, got {free}. Nothing was copied. "
            f"Free {needed - free} bytes, copy less (--slices A:B), or choose another disk."
        )


def _check_slices(store: Store, rows: Iterable[SliceInfo], *, verify: bool) -> Iterator[tuple[SliceInfo, bool]]:
    with ThreadPoolExecutor(_MAX_CHECKS) as pool:
        yield from pool.map(
            lambda row: (row, store.contains(row.name, row.bytes, row.sha256 if verify else "", row.chunk_bytes)),
            list(rows),
        )


def holds_shards(source: str) -> bool:
    """Whether a source has shards, and no dataset of slices."""
    origin = open_origin(source)
    if not hasattr(origin, "head"):
        return False
    with suppress(DatasetError):
        head_object(as_object_origin(origin), MANIFEST_FILE)
        return False
    with suppress(DatasetError):
        return bool(list_shards(as_object_origin(origin)))
    return False


def mirror_shards(
    source: str, to: str | Path, *, shards: slice | None, max_workers: Workers, on_progress: OnProgress
) -> Json:
    """Copy shards; those that the target has are skipped. Returns JSON: indexes of the shards, and bytes.

    Args:
        to: As of `mirror`.
        shards: Indexes to copy; None: all.
        on_progress: Called with the bytes copied or skipped since the last call.
    """
    origin = as_object_origin(open_origin(source))
    infos = {index: find_shard(origin, index) for index in list_shards(origin)}
    last, sizes = max(infos), {index: shard.num_bytes for index, shard in infos.items()}
    selected = list(infos) if shards is None else list(range(shards.start or 0, shards.stop or last + 1))
    if not selected or not set(selected) <= set(infos):
        raise UsageError(f"shards: expected some of {min(infos)} to {last}, got {selected[:20]}.")
    with _open_target(to) as target:
        store, folder = target.store, target.parts / "shards"
        if origin.url == open_origin(to).url:
            raise UsageError(f"mirror: expected another target than the source {store.url}. Name one.")
        absent = [index for index in selected if not _has_shard(store, infos[index])]
        skipped = [index for index in selected if index not in set(absent)]
        on_progress(sum(sizes[index] for index in skipped))
        waiting = [sizes[index] for index in absent]
        _check_room(target, sum(waiting) if store.folder else max(waiting, default=0))
        with ShardCache(source, folder, max_workers=max_workers) as cache:
            for index in absent:
                _copy_shard(cache, index, store, on_progress)
        shutil.rmtree(folder)
        missing = [index for index in infos if index not in selected and not _contains(store, infos[index])]
    return {
        "source": origin.url, "target": store.url, "shards": len(infos), "copied": absent, "skipped": skipped,
        "copied_bytes": sum(waiting), "skipped_bytes": sum(sizes[index] for index in skipped), "missing": missing,
        "complete": not missing,
    }  # fmt: skip


def _copy_shard(cache: ShardCache, index: int, store: Store, on_progress: OnProgress) -> None:
    shard, reported = cache.describe(index), 0

    def report(received: int, total: int) -> None:
        nonlocal reported
        if total == shard.tokens.num_bytes:  # Else it is of the ids.
            on_progress(received - reported)
            reported = received

    cache.obtain(index, threading.Event(), report).close()
    tokens, ids = shard.infos()
    for info in (ids, tokens):  # The ids first: a kill leaves no tokens without ids.
        store.put(info.name, cache.cache.path_of(info.sha256))
        cache.cache.discard(info.sha256)
    on_progress(shard.num_bytes - reported)
    log.info("shard %d copied to %s", index, store.url)


def _contains(store: Store, shard: ShardInfo) -> bool:
    return all(store.contains(part.name, part.num_bytes) for part in (shard.tokens, shard.ids))


def _has_shard(store: Store, shard: ShardInfo) -> bool:
    """Whether the target has a shard; in a directory its samples are checked."""
    if not _contains(store, shard):
        return False
    if (folder := store.folder) is not None:
        try:
            pair = read_layout(find_shard(PathOrigin(folder), shard.index), 0)
            verify_pair(folder, pair)
            pair_map(folder, pair).unlink()
        except (DatasetError, IntegrityError) as error:
            log.warning("%s Copying it again", error)
            return False
    return True
