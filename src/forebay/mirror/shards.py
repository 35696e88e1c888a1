"""Copy token shards to a directory or a bucket: every sample is verified, shard by shard, resumed after a kill.

A shard counts as copied if, in a directory, every sample matches its id, which is read again; in a bucket, if the
objects have the right sizes, as they were verified before the upload. The list of hashes (`shards.json`), if the source
has one, is copied after the last shard.

Disk: besides the copy, one shard on its way to a bucket.
"""

import contextlib
import hashlib
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.dataset.manifest import MANIFEST_FILE
from forebay.dataset.slices import hash_file
from forebay.errors import DatasetError, IntegrityError, UsageError
from forebay.formats.shard_writer import LIST_FILE
from forebay.load.shard_folder import ShardFolder
from forebay.storage.base import ObjectMeta, as_object_origin, head_object, read_small
from forebay.storage.origins import open_origin
from forebay.storage.ranged_download import Workers
from forebay.storage.targets import FolderTarget, Target, open_target
from forebay.units import format_bytes

_MAX_LIST_BYTES = 64 << 20
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


def holds_shards(source: str, prefix: str = "train") -> bool:
    """Whether a source has shards, and no dataset of slices."""
    origin = open_origin(source)
    if not hasattr(origin, "head"):
        return False
    for name, is_of_shards in ((MANIFEST_FILE, False), (LIST_FILE, True), (f"{prefix}_000000.npy", True)):
        with contextlib.suppress(DatasetError):
            head_object(as_object_origin(origin), name)
            return is_of_shards
    names: Any = getattr(origin, "names", None)
    return names is not None and any(name.endswith(".npy") for name in names(f"{prefix}_"))


def mirror_shards(
    source: str,
    destination: str,
    *,
    temporary: Path,
    shards: slice | None = None,
    sequence_length: int = 0,
    prefix: str = "train",
    max_workers: Workers = None,
    chunk_size: int | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> ShardMirrorReport:
    """Copy shards; those that the destination has are skipped.

    Args:
        destination: A directory, `s3://`, `r2://` (with `R2_DATASET_WRITE_*`), `gs://` or `az://`.
        temporary: A directory of its own with room for one shard; on the disk of a destination directory.
        shards: Indexes to copy; by default all.
        sequence_length: Tokens per sample; by default from the sizes.
        on_progress: Called with the bytes copied or skipped since the last call.
    """
    origin = open_origin(source)
    folder = ShardFolder(
        origin, temporary, sequence_length, prefix=prefix, max_workers=max_workers, chunk_size=chunk_size
    )
    if origin.url in (destination, str(Path(destination).absolute())):
        raise UsageError(f"mirror: expected another target than the source {origin.url}. Name one.")
    target = open_target(destination, temporary / "upload")
    try:
        mirror = _ShardMirror(folder, target, on_progress or (lambda _: None))
        available = folder.indexes()
        copied, skipped, sizes = mirror.run(_select(shards, available))
        missing = [
            index
            for index in available
            if index not in sizes and not mirror.contains(index, folder.heads(index), verify=False)
        ]
        if not missing:
            mirror.copy_list()
        return ShardMirrorReport(
            origin.url, target.url, len(available), copied, skipped,
            sum(sizes[i] for i in copied), sum(sizes[i] for i in skipped), missing, not missing,
        )  # fmt: skip
    finally:
        target.close()
        with contextlib.suppress(OSError):
            temporary.rmdir()


def _select(shards: slice | None, available: Sequence[int]) -> list[int]:
    selected = list(available)
    if shards is not None:
        selected = list(range(shards.start or 0, available[-1] + 1 if shards.stop is None else shards.stop))
    if not selected or not set(selected) <= set(available):
        raise UsageError(f"shards: expected some of {available[0]} to {available[-1]}, got {selected[:20]}.")
    return selected


class _ShardMirror:
    """Copies from one folder to one target."""

    def __init__(self, folder: ShardFolder, target: Target, on_progress: Callable[[int], object]) -> None:
        self._folder, self._target, self._on_progress = folder, target, on_progress

    def run(self, indexes: Sequence[int]) -> tuple[list[int], list[int], dict[int, int]]:
        """Copy shards; return the indexes copied, those skipped, and the bytes of each."""
        heads = {index: self._folder.heads(index) for index in indexes}
        sizes = {index: sum(meta.bytes for _, meta in pair) for index, pair in heads.items()}
        skipped = [index for index in indexes if self.contains(index, heads[index], verify=True)]
        absent = [index for index in indexes if index not in set(skipped)]
        self._folder.clean(set(absent))
        self._on_progress(sum(sizes[index] for index in skipped))
        self._check_room(absent, sizes)
        for index in absent:
            self._copy(index, sizes[index])
        return absent, skipped, sizes

    def contains(self, index: int, heads: Sequence[tuple[str, ObjectMeta]], *, verify: bool) -> bool:
        """Whether the target has a shard of these sizes; with `verify`, its samples are checked in a directory."""
        if not all(self._target.contains(name, meta.bytes, None) for name, meta in heads):
            return False
        if not (verify and isinstance(self._target, FolderTarget)):
            return True
        (tokens, meta), (ids, _) = heads
        try:
            self._folder.check(index, self._target.folder / ids, meta.bytes).finish(self._target.folder / tokens)
        except (DatasetError, IntegrityError) as error:
            log.warning("%s Copying it again", error)
            return False
        return True

    def copy_list(self) -> None:
        """Copy the list of hashes, if there is one."""
        origin = self._folder.origin
        assert origin is not None
        try:
            head_object(origin, LIST_FILE)
        except DatasetError:
            return
        data = read_small(origin, LIST_FILE, _MAX_LIST_BYTES)
        self._target.write(LIST_FILE, data, hashlib.sha256(data).hexdigest())

    def _copy(self, index: int, num_bytes: int) -> None:
        reported = 0

        def report(received: int, total: int) -> None:
            nonlocal reported
            self._on_progress(received - reported)
            reported = received

        pair, _ = self._folder.obtain(index, stop=threading.Event(), on_progress=report)
        # The ids first, as a copy: a kill then leaves a complete shard here, and no tokens without ids there.
        copy = self._target.part_path(pair.ids.name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(pair.ids, copy)
        self._target.commit(pair.ids.name, copy, hash_file(copy))
        self._target.commit(pair.tokens.name, pair.tokens, hash_file(pair.tokens))
        self._folder.remove(index)
        self._on_progress(num_bytes - reported)
        log.info("shard %d copied to %s", index, self._target.url)

    def _check_room(self, absent: Sequence[int], sizes: dict[int, int]) -> None:
        if not absent:
            return
        to_folder = isinstance(self._target, FolderTarget)
        needed = sum(sizes[index] for index in absent) if to_folder else max(sizes[index] for index in absent)
        free = shutil.disk_usage(self._folder.folder).free + sum(self._folder.on_disk(index) for index in absent)
        if needed > free:
            raise UsageError(
                f"{self._folder.folder}: expected room for {format_bytes(needed)} ({needed} bytes), got {free}. "
                f"Nothing was copied. Free {needed - free} bytes, copy fewer shards (--slices A:B), or choose "
                "another disk."
            )
