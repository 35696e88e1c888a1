"""Shards to one's own bucket or directory: judged on the way, shard by shard, gone on with after a kill.

What counts as there: in a directory, a pair of which every sample has its id, read anew; in a bucket, objects of the
right sizes, which carry the sha256 of what was judged when they were sent. The list of hashes (`shards.json`), where
the source has one, comes last, with the last shard.

Disk: beside what is copied, one pair at a time on its way to a bucket.
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
from forebay.load.shard_folder import Pair, ShardFolder
from forebay.storage.base import Head, read_small
from forebay.storage.origins import open_origin
from forebay.storage.ranged_download import Workers, head_of, head_origin
from forebay.storage.targets import FolderTarget, Target, open_target
from forebay.units import format_bytes

_MOST_LIST_BYTES = 64 << 20
log = logging.getLogger("forebay.load")


@dataclass(frozen=True)
class ShardMirrorReport:
    """What a mirror of shards did."""

    source: str
    target: str
    shards: int  # That the source has.
    copied: list[int]  # Indexes, now.
    skipped: list[int]  # Indexes of those that were there.
    copied_bytes: int
    skipped_bytes: int
    missing: list[int]  # Indexes that the target has not yet.
    complete: bool  # The target has all.


def holds_shards(source: str, prefix: str = "train") -> bool:
    """Whether there are shards at a source, and no dataset of slices."""
    origin = open_origin(source)
    if not hasattr(origin, "head"):
        return False
    for name, there in ((MANIFEST_FILE, False), (LIST_FILE, True), (f"{prefix}_000000.npy", True)):
        with contextlib.suppress(DatasetError):
            head_of(head_origin(origin), name)
            return there
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
    """Copy shards; what was copied before and is whole there is left out.

    Args:
        destination: A directory, `s3://`, `r2://` (with `R2_DATASET_WRITE_*`), `gs://` or `az://`.
        temporary: A directory of its own, with room for one pair; on the destination's disk, if that is a directory.
        shards: Which; by default, and where an end is open, all there are.
        sequence_length: By default as the counts tell.
        on_progress: Told the bytes that came since its last call, those that are skipped included.
    """
    origin = open_origin(source)
    folder = ShardFolder(
        origin, temporary, sequence_length, prefix=prefix, max_workers=max_workers, chunk_size=chunk_size
    )
    if origin.url in (destination, str(Path(destination).absolute())):
        raise UsageError(f"mirror: expected another place than {origin.url}. Name one.")
    target = open_target(destination, temporary / "upload")
    say = on_progress or (lambda _: None)
    try:
        mirror = _Mirror(folder, target, say)
        there = folder.indexes()
        wanted = _wanted(shards, there)
        copied, skipped, sizes = mirror.run(wanted)
        known = {*copied, *skipped}
        missing = [i for i in there if i not in known and not mirror.has(i, folder.heads(i), verify=False)]
        if not missing:
            mirror.finish()
        return ShardMirrorReport(
            origin.url, target.url, len(there), copied, skipped,
            sum(sizes[i] for i in copied), sum(sizes[i] for i in skipped), missing, not missing,
        )  # fmt: skip
    finally:
        target.close()
        with contextlib.suppress(OSError):
            temporary.rmdir()


def _wanted(shards: slice | None, there: Sequence[int]) -> list[int]:
    wanted = list(there)
    if shards is not None:
        wanted = list(range(shards.start or 0, there[-1] + 1 if shards.stop is None else shards.stop))
    if not wanted or not set(wanted) <= set(there):
        raise UsageError(f"shards: expected some of {there[0]} to {there[-1]}, got {wanted[:20]}.")
    return wanted


class _Mirror:
    """From one folder to one target."""

    def __init__(self, folder: ShardFolder, target: Target, say: Callable[[int], object]) -> None:
        self._folder, self._target, self._say = folder, target, say

    def run(self, wanted: Sequence[int]) -> tuple[list[int], list[int], dict[int, int]]:
        """Indexes copied, indexes skipped, bytes of each."""
        heads = {index: self._folder.heads(index) for index in wanted}
        sizes = {index: sum(head.bytes for _, head in pair) for index, pair in heads.items()}
        absent = [index for index in wanted if not self.has(index, heads[index], verify=True)]
        skipped = [index for index in wanted if index not in set(absent)]
        self._folder.clean(set(absent))
        self._say(sum(sizes[index] for index in skipped))
        self._check_room(absent, sizes)
        for index in absent:
            self._copy(index, sizes[index])
        return absent, skipped, sizes

    def has(self, index: int, heads: Sequence[tuple[str, Head]], *, verify: bool) -> bool:
        """Whether the target has a pair of these sizes; and right, if it can be read at once."""
        if not all(self._target.has(name, head.bytes, None) for name, head in heads):
            return False
        if not (verify and isinstance(self._target, FolderTarget)):
            return True
        (tokens, head), (ids, _) = heads
        try:
            self._folder.check(index, self._target.folder / ids, head.bytes).finish(self._target.folder / tokens)
        except (DatasetError, IntegrityError) as error:
            log.warning("%s Copying it again", error)
            return False
        return True

    def finish(self) -> None:
        """The list of hashes, if there is one."""
        origin = self._folder.origin
        assert origin is not None
        try:
            head_of(origin, LIST_FILE)
        except DatasetError:
            return
        data = read_small(origin, LIST_FILE, _MOST_LIST_BYTES)
        self._target.write(LIST_FILE, data, hashlib.sha256(data).hexdigest())

    def _copy(self, index: int, num_bytes: int) -> None:
        seen = 0

        def progress(received: int, total: int) -> None:
            nonlocal seen
            self._say(received - seen)
            seen = received

        pair, _ = self._folder.obtain(index, stop=threading.Event(), on_progress=progress)
        self._place(pair)
        self._folder.remove(index)
        self._say(num_bytes - seen)
        log.info("shard %d copied to %s", index, self._target.url)

    def _place(self, pair: Pair) -> None:
        """The ids first, as a copy, so that a kill leaves a whole pair here; who sees the tokens finds their ids."""
        copy = self._target.part_of(pair.ids.name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(pair.ids, copy)
        self._target.place(pair.ids.name, copy, hash_file(copy))
        self._target.place(pair.tokens.name, pair.tokens, hash_file(pair.tokens))

    def _check_room(self, absent: Sequence[int], sizes: dict[int, int]) -> None:
        if not absent:
            return
        to_folder = isinstance(self._target, FolderTarget)
        need = sum(sizes[index] for index in absent) if to_folder else max(sizes[index] for index in absent)
        held = sum(self._folder.on_disk(index) for index in absent)
        free = shutil.disk_usage(self._folder.folder).free
        if need > free + held:
            raise UsageError(
                f"{self._folder.folder}: expected room for {format_bytes(need)} ({need} bytes), got {free + held}. "
                f"Nothing was copied. Free {need - free - held} bytes, copy fewer shards (--shards A:B), or choose "
                "another disk."
            )
