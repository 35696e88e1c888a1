"""Huge shards, one trained on while the next one comes: `SharedShardedDatasetManager`.

    with SharedShardedDatasetManager(sequence_length=2048, rank=0, world_size=1) as shards:
        for batch in shards.batches(start_step=resumed_at, batch_size=256, inner_steps=30):
            ...

Hides: when a shard is due, that it comes in the background, that the ranks of a machine share one copy, and that the
old one goes. Which shard and which samples a step reads follows from its number alone, so that a run resumed at any
step, and whoever checks one, sees the same.

Costs: the disk holds the shard in use and the next one; memory is 8 MiB and `max_workers` x 2 MiB, and what the
system caches.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forebay.errors import UsageError
from forebay.load.batch import IGNORE_INDEX, Batch
from forebay.load.shard_dataset import Arrival, ShardDataset
from forebay.load.shard_folder import Pair
from forebay.load.shard_helper import LEAST_APART_BYTES, obtain_apart, open_folder
from forebay.order.shard_windows import (
    STEPS_PER_SHARD,
    Sampler,
    next_shard_step,
    shard_of_step,
    shard_turn,
    window_sample_ids,
)
from forebay.storage.base import require_env
from forebay.storage.ranged_download import Workers
from forebay.units import format_bytes, format_rate

COMMON_BYTES_PER_S = 125e6  # 1 Gb/s
COMMON_MEM_BYTES = 4 * 10**9
COMMON_SHARDS = 750 / 215  # of 215 GB, on a disk of 750 GB
_LEAST_S = 1.0


__all__ = ["ShardDataset", "SharedShardedDatasetManager"]

log = logging.getLogger("forebay.load")


class SharedShardedDatasetManager:
    """The shards of a bucket, each local and judged before it is trained on. Threads must not share it.

    Args:
        sequence_length: Tokens of a sample.
        rank, world_size: Of the run; batches are divided by them.
        comms: Not used; callers of another project's class of this name pass it.
        url: Where the shards are; by default the bucket of `R2_DATASET_*` below `DATASET_BINS_PATH`.
        folder: Where they are kept; by default `DATASET_BINS_PATH`. The same directory as `url`: they are used there.
        local_rank: Of the machine: 0 cleans up and deletes. By default `LOCAL_RANK`, else `rank`.
        keep_shards: Delete nothing.
        chunk_size, max_workers: Of downloads, see `plan_download`; `max_workers="all"`: one a range.
        tmp_dir: Where partial files lie; by default in `folder`. On another volume, a file is copied and judged anew.
        steps_per_shard, reset_step, num_shards, remap: See `shard_of_step`; `num_shards` is listed if None.
        generation: Of the files of ids: `bin`, `npy`, or as found.
        token_dtype: uint16 or uint32; the shards must be of it. By default as they are.
        prefix: `train` or `anneal`.
        least_shards: Of which the disk must have room at the start: the one in use, the next, a third while ranks
            let go of the old. With 2, a fetch may have to wait for that.
        patience_s: An attempt fails when no byte, or no answer, came for so long; a quarter more at the most.
        swap_patience_s: How long a swap waits for a shard whose download keeps failing.
        fetch: Upcoming shards come in a process of their own, of priority `nice`, or in threads of this one; shards
            below 64 MiB come in threads.

    Raises:
        UsageError: If an argument or an environment variable is missing or wrong.
    """

    def __init__(
        self,
        sequence_length: int = 2048,
        rank: int = 0,
        world_size: int = 1,
        comms: object = None,
        *,
        url: str | Path | None = None,
        folder: str | Path | None = None,
        local_rank: int | None = None,
        keep_shards: bool = False,
        chunk_size: int | None = None,
        max_workers: Workers = None,
        tmp_dir: str | Path | None = None,
        steps_per_shard: int = STEPS_PER_SHARD,
        reset_step: int | None = None,
        num_shards: int | None = None,
        generation: Literal["auto", "bin", "npy"] = "auto",
        remap: Mapping[int, int] | None = None,
        token_dtype: Any = None,
        prefix: str = "train",
        least_shards: int = 3,
        patience_s: float = 300.0,
        swap_patience_s: float = 3600.0,
        fetch: Literal["process", "thread"] = "process",
        nice: int = 19,
    ) -> None:
        del comms
        if sequence_length < 1 or not 0 <= rank < world_size or least_shards < 2 or fetch not in ("process", "thread"):
            raise UsageError(
                "shards: expected sequence_length >= 1, 0 <= rank < world_size, least_shards >= 2, fetch 'process' or "
                f"'thread', got {sequence_length=}, {rank=}, {world_size=}, {least_shards=}, {fetch=}."
            )
        if any(index < 0 for pair in (remap or {}).items() for index in pair):
            raise UsageError(f"remap: expected indexes of shards, got {dict(remap or {})}.")
        shard_turn(0, steps_per_shard, reset_step)
        self.sequence_length = sequence_length
        self.rank, self.world_size = rank, world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK") or rank) if local_rank is None else local_rank
        self.keep_shards = keep_shards
        self.steps_per_shard, self.reset_step = steps_per_shard, reset_step
        self.remap = dict(remap or {})
        self.shard_index = -1
        self.active_dataset: ShardDataset | None = None
        self.upcoming_dataset: Arrival | None = None
        self._num_shards = num_shards
        self._least_shards = least_shards
        self._swap_patience_s = swap_patience_s
        self._old: set[int] = set()
        self._keep: set[int] = set()
        self._checked_room = False
        self._stats: dict[str, Any] = {
            "start_s": 0.0, "stall_s": 0.0, "swaps": 0, "late_swaps": 0, "fetched_bytes": 0, "fetch_s": 0.0,
        }  # fmt: skip
        home = Path(folder if folder is not None else require_env("DATASET_BINS_PATH", "shards")).absolute()
        source = "r2://" if url is None else str(url) if "://" in str(url) else str(Path(url).absolute())
        settings: dict[str, Any] = {
            "sequence_length": sequence_length, "kind": None if token_dtype is None else token_dtype(token_dtype),
            "tmp_dir": None if tmp_dir is None else Path(tmp_dir).absolute(), "chunk_size": chunk_size,
            "max_workers": max_workers, "generation": generation, "prefix": prefix, "patience_s": patience_s,
        }  # fmt: skip
        self._folder = open_folder(source, home, settings)
        self._obtain_apart = partial(obtain_apart, (source, home, settings), nice)
        self._apart = fetch == "process" and self._folder.origin is not None
        if self.remap:
            log.warning("shards replaced as asked: %s", ", ".join(f"{a} by {b}" for a, b in self.remap.items()))

    @property
    def num_shards(self) -> int:
        """How many there are; listed once. Errors as of `ShardFolder.count`."""
        if self._num_shards is None:
            self._num_shards = self._folder.count()
        return self._num_shards

    def at_step(self, global_step: int) -> ShardDataset:
        """The shard of a step; the step's own first call swaps, and waits where it is late.

        Raises:
            ForebayError: If the shard cannot be had.
        """
        index = self._shard(global_step)
        follows = next_shard_step(global_step, self.steps_per_shard, self.reset_step)
        self._move(index, self._shard(follows))
        self.shard_index = shard_turn(global_step, self.steps_per_shard, self.reset_step)[0] % self.num_shards
        assert self.active_dataset is not None
        return self.active_dataset

    def batches(
        self,
        start_step: int = 0,
        stop_step: int | None = None,
        *,
        batch_size: int,
        inner_steps: int = 1,
        uid: int = 0,
        mode: Sampler = "forebay",
        seed: int = 42,
    ) -> Iterator[Batch]:
        """This rank's batches from a global step on; endless without `stop_step`.

        A global step is a window of `inner_steps` batches. In `Batch`, `sample_ids` are places in the shard,
        `sources` the shard; `active_dataset.sample_ids` has the ids. The label after a sample's last token is -100.

        Args:
            batch_size: Global; a multiple of the world size.
            uid, mode, seed: See `window_sample_ids`.
        """
        if batch_size < 1 or batch_size % self.world_size:
            raise UsageError(f"batches: expected a multiple of {self.world_size} ranks, got {batch_size=}.")
        step = start_step
        while stop_step is None or step < stop_step:
            data = self.at_step(step)
            turn, first = shard_turn(step, self.steps_per_shard, self.reset_step)
            places = window_sample_ids(
                uid, step, len(data), inner_steps, batch_size, self.rank, self.world_size,
                mode=mode, seed=seed, first_window=first,
            )  # fmt: skip
            for inner, part in enumerate(np.split(places, inner_steps)):
                rows = np.full((len(part), self.sequence_length + 1), IGNORE_INDEX, np.int64)
                rows[:, :-1] = data.take(part)
                yield Batch(
                    rows[:, :-1], rows[:, 1:], part, turn // self.num_shards, inner,
                    sources=np.full(len(part), data.index, np.int64), run_step=step,
                )  # fmt: skip
            step += 1

    async def initialize_datasets(self, current_shard_index: int) -> ShardDataset:
        """Have this shard active, and the next one on its way."""
        await asyncio.to_thread(self._move, self._mapped(current_shard_index), self._mapped(current_shard_index + 1))
        self.shard_index = current_shard_index % self.num_shards
        assert self.active_dataset is not None
        return self.active_dataset

    async def swap_datasets(self) -> ShardDataset:
        """Have the next shard active, and the one after it on its way; the old one is deleted."""
        return await self.initialize_datasets(self.shard_index + 1)

    def prepare_shard(self, shard_index: int) -> asyncio.Task[Pair]:
        """Fetch a shard without opening it. In a running event loop."""
        arrival = self._start(self._mapped(shard_index))

        async def come() -> Pair:
            try:
                await asyncio.to_thread(arrival.wait, 0.0)
                assert arrival.pair is not None
                return arrival.pair
            finally:
                arrival.stop()

        return asyncio.get_running_loop().create_task(come())

    async def create_dataset(self, shard_index: int) -> ShardDataset:
        """Fetch a shard and open it; whoever calls closes it."""
        arrival = self._start(self._mapped(shard_index))
        await asyncio.to_thread(arrival.wait, 0.0)
        return arrival.open(self.sequence_length)

    def stats(self) -> dict[str, Any]:
        """`start_s` (waited for the first shard), `stall_s` (for later ones), `swaps`, `late_swaps`, `fetched_bytes`,
        `fetch_s`, `active`, and of the upcoming shard its `index`, `received`, `total`."""
        coming = self.upcoming_dataset
        told = None if coming is None else {"index": coming.index, "received": coming.received, "total": coming.total}
        active = None if self.active_dataset is None else self.active_dataset.index
        return {**self._stats, "active": active, "upcoming": told}

    def close(self) -> None:
        """End what is under way; what was fetched stays, to be gone on with. May be called twice."""
        if self.upcoming_dataset is not None:
            self.upcoming_dataset.stop()
        if self.active_dataset is not None:
            self.active_dataset.close()
        self._prune()
        self.active_dataset = self.upcoming_dataset = None

    def __enter__(self) -> SharedShardedDatasetManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _move(self, index: int, upcoming: int) -> None:
        """Make a shard active, unless it is, and start the one that follows."""
        if self.active_dataset is not None and self.active_dataset.index == index:
            self._follow(index, upcoming)
            return
        first = self.active_dataset is None
        arrival, self.upcoming_dataset = self.upcoming_dataset, None
        if arrival is not None and arrival.index != index:
            arrival.stop()
            self._old.add(arrival.index)
            arrival = None
        if arrival is None:
            self._check_room(index, upcoming)
            arrival = self._start(index)
        late = arrival.pair is None
        try:
            waited_s = arrival.wait(0.0 if first else self._swap_patience_s)
        except BaseException:
            arrival.stop()
            raise
        old, self.active_dataset = self.active_dataset, arrival.open(self.sequence_length)
        self._stats["start_s" if first else "stall_s"] += waited_s
        if old is not None:
            self._stats["swaps"] += 1
            self._stats["late_swaps"] += late
            log.log(
                logging.WARNING if late else logging.INFO,
                "shard %d follows shard %d%s", index, old.index, f", {waited_s:.1f} s late" if late else "",
            )  # fmt: skip
            old.close()
            self._old.add(old.index)
        self._follow(index, upcoming)

    def _follow(self, index: int, upcoming: int) -> None:
        self._keep = {index, upcoming}
        self._old -= self._keep
        self._prune()
        coming = self.upcoming_dataset
        if upcoming == index or (coming is not None and coming.index == upcoming):
            return
        if coming is not None:
            coming.stop()
            self._old.add(coming.index)
        self.upcoming_dataset = self._start(upcoming)

    def _start(self, index: int) -> Arrival:
        return Arrival(index, self._folder.use(index), self._obtain)

    def _obtain(self, index: int, **given: Any) -> Pair:
        """The shard, once there is room for it: by a process of its own, where training would feel it."""
        self._prune()
        folder, size = self._folder, 0
        if folder.origin is not None and folder.ready(index) is None:
            size = folder.sizes(index)
            need, free = max(0, size - folder.on_disk(index)), shutil.disk_usage(folder.tmp_dir).free
            if free < need:
                raise UsageError(
                    f"shard {index}: expected room for {need} bytes in {folder.tmp_dir}, got {free}. "
                    "Free space there; what was fetched is kept and resumed."
                )
        apart = self._apart and self.active_dataset is not None and size >= LEAST_APART_BYTES
        pair, fetched = (self._obtain_apart if apart else folder.obtain)(index, **given)
        if fetched is not None:
            self._stats["fetched_bytes"] += fetched.bytes_fetched
            self._stats["fetch_s"] += fetched.seconds
            if fetched.seconds > _LEAST_S and fetched.bytes_fetched / fetched.seconds < COMMON_BYTES_PER_S:
                rate = format_rate(fetched.bytes_fetched / fetched.seconds)
                log.warning("shard %d came at %s; runs like this have 1 Gb/s or more", index, rate)
        return pair

    def _check_room(self, index: int, upcoming: int) -> None:
        """Before the first byte: clean up, refuse a disk that cannot do, and warn of what is smaller than is common.

        All shards are taken to be of the first one's size.
        """
        folder = self._folder
        if self._checked_room or folder.origin is None:
            return
        self._checked_room = True
        if self.local_rank == 0:
            everything = set(range(self.num_shards)) | set(self.remap.values())
            folder.clean(everything if self.keep_shards else {index, upcoming})
        wanted = set(range(self.num_shards)) if self.keep_shards else {index, upcoming}
        count = len(wanted) if self.keep_shards else min(self._least_shards, self.num_shards)
        one, held = folder.sizes(index), sum(map(folder.on_disk, wanted))
        free = shutil.disk_usage(folder.folder).free
        if free + held < count * one:
            raise UsageError(
                f"{folder.folder}: expected room for {count} shards of {format_bytes(one)} ({count * one} "
                f"bytes), got {free + held} bytes ({held} of them hold shards). Nothing was fetched. Free "
                f"{count * one - free - held} bytes, or choose another folder."
            )
        if free + held < COMMON_SHARDS * one:
            log.warning(
                "disk: room for %s in %s; %s or more is what runs like this have (750 GB for shards of 215 GB)",
                format_bytes(free + held), folder.folder, format_bytes(int(COMMON_SHARDS * one)),
            )  # fmt: skip
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if memory < COMMON_MEM_BYTES:
            log.warning("memory: %s; 4 GB or more is what runs like this have", format_bytes(memory))

    def _prune(self) -> None:
        """Remove what was used up, on local rank 0, as soon as no rank uses it."""
        if self.keep_shards or self.local_rank != 0 or self._folder.origin is None:
            return
        for index in list(self._old - self._keep):
            if self._folder.remove(index):
                self._old.discard(index)

    def _shard(self, step: int) -> int:
        return shard_of_step(step, self.num_shards, self.steps_per_shard, self.reset_step, self.remap)

    def _mapped(self, index: int) -> int:
        return self.remap.get(index % self.num_shards, index % self.num_shards)
