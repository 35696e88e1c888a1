"""What shards need of a machine, looked at before the first byte."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence

from forebay.errors import UsageError
from forebay.sizes import words_of_bytes, words_of_rate
from forebay.store.shards import ShardFolder

COMMON_BYTES_PER_S = 125e6  # 1 Gb/s
COMMON_MEM_BYTES = 4 * 10**9
COMMON_SHARDS = 750 / 215
_LEAST_S = 1.0
log = logging.getLogger("forebay.load")


def check_room(folder: ShardFolder, index: int, wanted: Sequence[int], count: int) -> None:
    """Refuse a disk without room for so many shards, and warn of one, or of a memory, smaller than is common.

    Args:
        index: The first that is fetched: all are taken to be of its size.
        wanted: Of which what lies there by now counts as room.

    Raises:
        UsageError: With the figures.
    """
    one = folder.sizes(index)
    held = sum(folder.on_disk(shard) for shard in wanted)
    free = shutil.disk_usage(folder.folder).free
    if free + held < count * one:
        raise UsageError(
            f"{folder.folder}: expected room for {count} shards of {words_of_bytes(one)} ({count * one} "
            f"bytes), got {free + held} bytes ({held} of them hold shards). Nothing was fetched. Free "
            f"{count * one - free - held} bytes, or choose another folder."
        )
    if free + held < COMMON_SHARDS * one:
        log.warning(
            "disk: room for %s in %s; %s or more is what runs like this have (750 GB for shards of 215 GB)",
            words_of_bytes(free + held), folder.folder, words_of_bytes(int(COMMON_SHARDS * one)),
        )  # fmt: skip
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory < COMMON_MEM_BYTES:
        log.warning("memory: %s; 4 GB or more is what runs like this have", words_of_bytes(memory))


def check_room_for(folder: ShardFolder, index: int) -> int:
    """Refuse to begin a shard that has no room by now; its bytes.

    Raises:
        UsageError: With the figures.
    """
    size = folder.sizes(index)
    need = max(0, size - folder.on_disk(index))
    free = shutil.disk_usage(folder.tmp_dir).free
    if free < need:
        raise UsageError(
            f"shard {index}: expected room for {need} bytes in {folder.tmp_dir}, got {free}. "
            "Free space there; what was fetched is kept and resumed."
        )
    return size


def tell_speed(index: int, num_bytes: int, seconds: float) -> None:
    """Warn of a network slower than is common."""
    if seconds > _LEAST_S and num_bytes / seconds < COMMON_BYTES_PER_S:
        rate = words_of_rate(num_bytes / seconds)
        log.warning("shard %d came at %s; runs like this have 1 Gb/s or more", index, rate)
