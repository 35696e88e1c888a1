"""Copies token shards to a directory or a bucket: every sample is verified, shard by shard, resumed after a kill.

A shard counts as copied if, in a directory, every sample matches its id, which is read again; in a bucket, if the
objects have the right sizes, as they were verified before the upload.

Disk: besides the copy, one shard on its way to a bucket.
"""

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.dataset.manifest import MANIFEST_FILE
from forebay.dataset.slices import hash_file
from forebay.errors import DatasetError, IntegrityError, UsageError
from forebay.load.shard_folder import ShardFolder
from forebay.storage.base import ObjectMeta, as_object_origin, head_object
from forebay.storage.origins import open_origin
from forebay.storage.ranged_download import Workers
from forebay.storage.targets import FolderTarget, Target, open_target
from forebay.units import format_bytes

log = logging.getLogger("forebay.mirror")


@dataclass(frozen=True)
class ShardMirrorReport:
    """The result of a mirror of shards. Lists are of shard indexes."""

    source: str
    target: str
    shards: int  # of the source
    copied: list[int]
    skipped: list[int]  # they existed
    copied_bytes: int
    skipped_bytes: int
    missing: list[int]  # not in the target
    complete: bool


def holds_shards(source: str) -> bool:
    """Whether a source has shards, and no dataset of slices."""
    origin = open_origin(source)
    if not hasattr(origin, "head"):
        return False
    for name, is_of_shards in ((MANIFEST_FILE, False), ("train_000000.npy", True)):
        with contextlib.suppress(DatasetError):
            head_object(as_object_origin(origin), name)
            return is_of_shards
    names: Any = getattr(origin, "names", None)
    return names is not None and any(name.endswith(".npy") for name in names("train_"))


def mirror_shards(
    source: str,
    destination: str,
    *,
    temporary: Path,
    shards: slice | None = None,
    max_workers: Workers = None,
    chunk_size: int | None = None,
    on_progress: Callable[[int], object] = lambda _: None,
) -> ShardMirrorReport:
    """Copy shards; those that the destination has are skipped.

    Args:
        destination: A directory, `s3://`, `r2://` (with `R2_DATASET_WRITE_*`), `gs://` or `az://`.
        temporary: A directory of its own with room for one shard; on the disk of a destination directory.
        shards: Indexes to copy; by default all.
        on_progress: Called with the bytes copied or skipped since the last call.
    """
    origin = open_origin(source)
    folder = ShardFolder(origin, temporary, max_workers=max_workers, chunk_size=chunk_size)
    if origin.url in (destination, str(Path(destination).absolute())):
        raise UsageError(f"mirror: expected another target than the source {origin.url}. Name one.")
    target = open_target(destination, temporary / "upload")
    try:
        available = folder.indexes()
        selected = available
        if shards is not None:
            selected = list(range(shards.start or 0, available[-1] + 1 if shards.stop is None else shards.stop))
        if not selected or not set(selected) <= set(available):
            raise UsageError(f"shards: expected some of {available[0]} to {available[-1]}, got {selected[:20]}.")
        heads = {index: folder.heads(index) for index in available}
        sizes = {index: sum(head.bytes for head in pair.values()) for index, pair in heads.items()}
        skipped = [index for index in selected if _is_verified(folder, target, index, heads[index])]
        absent = [index for index in selected if index not in set(skipped)]
        folder.clean(set(absent))
        on_progress(sum(sizes[index] for index in skipped))
        _check_disk(folder, target, [sizes[index] for index in absent], sum(map(folder.on_disk, absent)))
        for index in absent:
            _copy(folder, target, index, sizes[index], on_progress)
        missing = [index for index in available if index not in selected and not _contains(target, heads[index])]
        return ShardMirrorReport(
            origin.url, target.url, len(available), absent, skipped,
            sum(sizes[i] for i in absent), sum(sizes[i] for i in skipped), missing, not missing,
        )  # fmt: skip
    finally:
        target.close()
        with contextlib.suppress(OSError):
            temporary.rmdir()


def _contains(target: Target, heads: Mapping[str, ObjectMeta]) -> bool:
    return all(target.contains(name, head.bytes, None) for name, head in heads.items())


def _is_verified(folder: ShardFolder, target: Target, index: int, heads: Mapping[str, ObjectMeta]) -> bool:
    """Whether the target has a shard; in a directory its samples are checked."""
    if not _contains(target, heads):
        return False
    if isinstance(target, FolderTarget):
        try:
            folder.check(index, *(target.folder / name for name in heads))
        except (DatasetError, IntegrityError) as error:
            log.warning("%s Copying it again", error)
            return False
    return True


def _copy(
    folder: ShardFolder, target: Target, index: int, num_bytes: int, on_progress: Callable[[int], object]
) -> None:
    reported = 0

    def report(received: int, total: int) -> None:
        nonlocal reported
        on_progress(received - reported)
        reported = received

    files, _ = folder.obtain(index, stop=threading.Event(), on_progress=report)
    # The ids first, as a copy: a kill then leaves a complete shard here, and no tokens without ids there.
    copy = target.part_path(files.ids.name)
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(files.ids, copy)
    target.commit(files.ids.name, copy, hash_file(copy))
    target.commit(files.tokens.name, files.tokens, hash_file(files.tokens))
    folder.remove(index)
    on_progress(num_bytes - reported)
    log.info("shard %d copied to %s", index, target.url)


def _check_disk(folder: ShardFolder, target: Target, sizes: list[int], present: int) -> None:
    """Raise UsageError if the shards that are copied do not fit; one is on its way to a bucket at a time."""
    needed = sum(sizes) if isinstance(target, FolderTarget) else max(sizes, default=0)
    free = shutil.disk_usage(folder.folder).free + present
    if needed > free:
        raise UsageError(
            f"{folder.folder}: expected room for {format_bytes(needed)} ({needed} bytes), got {free}. Nothing was "
            f"copied. Free {needed - free} bytes, copy fewer shards (--slices A:B), or choose another disk."
        )
