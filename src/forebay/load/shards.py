"""Trains on huge shards, one at a time, while the next one is downloaded: `SharedShardedDatasetManager`.

The ranks of a machine share one copy, in a cache of chunks; used shards are removed. The shard and the samples of a
step follow from its number alone, so a resumed run, or a validator, reads the same. Cost: the disk has the active shard
and the next one; memory is 8 MiB and `max_workers` x 3 MiB, and the page cache.
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from forebay.arrays import I64, Array
from forebay.base import Closing, Json
from forebay.dataset.reader import local_path
from forebay.errors import ForebayError, UsageError, full_url
from forebay.fetch.downloads import Workers
from forebay.load.batch import IGNORE_INDEX, NumpyTokens, TokenBatch
from forebay.load.shard_cache import ShardCache, ShardFetch
from forebay.load.shard_files import ShardDataset
from forebay.machine import memory_bytes
from forebay.order.shard_windows import (
    STEPS_PER_SHARD,
    Sampler,
    next_shard_step,
    shard_of_step,
    shard_turn,
    window_sample_ids,
)
from forebay.storage.addresses import is_url
from forebay.storage.base import load_env_file, require_env
from forebay.units import format_bytes

COMMON_MEM_BYTES = 4 * 10**9
COMMON_SHARDS = 750 / 215  # 215 GB of shards on a disk of 750 GB.
_MIN_SHARDS = 3  # On the disk at the start: the active one, the next, and one that slow ranks still use.
_SWAP_TIMEOUT_S = 3600.0  # How long a swap waits for a shard whose download keeps failing.

log = logging.getLogger("forebay.load")


class SharedShardedDatasetManager(Closing):
    """The shards of a bucket, each local and verified before it is trained on. Not thread-safe.

    The last process of a machine that uses a shard removes it.

    Args:
        sequence_length: Tokens of a sample.
        rank, world_size: Of the run; batches are divided by them.
        comms: Not used; callers of another project's class of this name pass it.
        url: Location of the shards; by default the bucket of `R2_DATASET_*` below `DATASET_BINS_PATH`.
        folder: Local directory, for shards alone; by default `DATASET_BINS_PATH`. Shards that it has under their own
            names are used in place and never removed; it may be the same as `url`.
        env_file: File of these variables, see `load_env_file`.
        keep_shards: Remove nothing.
        chunk_size, max_workers: Of downloads, see `forebay.fetch.downloads.plan_download`.
        steps_per_shard, reset_step, num_shards, remap: See `shard_of_step`; `num_shards` is listed if None.
        timeout_s: An attempt fails after this time without a byte or an answer; at most a quarter more.

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
        env_file: str | Path | None = None,
        keep_shards: bool = False,
        chunk_size: int | None = None,
        max_workers: Workers = None,
        steps_per_shard: int = STEPS_PER_SHARD,
        reset_step: int | None = None,
        num_shards: int | None = None,
        remap: Mapping[int, int] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        del comms
        self.remap = dict(remap or {})
        if min([*self.remap, *self.remap.values()], default=0) < 0 or not 0 <= rank < world_size or sequence_length < 1:
            raise UsageError(
                "shards: expected sequence_length >= 1, 0 <= rank < world_size and a remap of indexes, got "
                f"{sequence_length=}, {rank=}, {world_size=}, {remap=}."
            )
        if self.remap:
            log.warning("shards replaced (remap): %s", ", ".join(f"{a} by {b}" for a, b in self.remap.items()))
        shard_turn(0, steps_per_shard, reset_step)  # Checks them.
        self.sequence_length = sequence_length
        self.rank, self.world_size = rank, world_size
        self.keep_shards = keep_shards
        self.steps_per_shard, self.reset_step = steps_per_shard, reset_step
        self.shard_index = -1
        self.active_dataset: ShardDataset | None = None
        self.upcoming_dataset: ShardFetch | None = None
        self._num_shards = num_shards
        self._checked_disk = False
        self._stats: Json = {"start_s": 0.0, "stall_s": 0.0, "swaps": 0, "late_swaps": 0}
        if env_file is not None:
            load_env_file(env_file)
        directory = local_path(folder if folder is not None else require_env("DATASET_BINS_PATH", "shards")).absolute()
        source = "r2://" if url is None else full_url(url) if is_url(url) else str(local_path(url).absolute())
        self._shards = ShardCache(source, directory, sequence_length, chunk_size, max_workers, timeout_s)

    @property
    def num_shards(self) -> int:
        """The number of shards; listed once. Raises DatasetError or NetworkError."""
        if self._num_shards is None:
            self._num_shards = self._shards.indexes()[-1] + 1
        return self._num_shards

    def at_step(self, global_step: int) -> ShardDataset:
        """The shard of a step. At the first step of its window this swaps shards, and waits for a late one.

        Raises:
            ForebayError: If the shard cannot be fetched or verified.
        """
        next_step = next_shard_step(global_step, self.steps_per_shard, self.reset_step)
        dataset = self._activate(self._shard(global_step), self._shard(next_step))
        self.shard_index = shard_turn(global_step, self.steps_per_shard, self.reset_step)[0] % self.num_shards
        return dataset

    def batches(
        self, start_step: int = 0, stop_step: int | None = None, *, batch_size: int, inner_steps: int = 1, uid: int = 0,
        mode: Sampler = "forebay", seed: int = 42,
    ) -> Iterator[NumpyTokens]:  # fmt: skip
        """This rank's batches of global steps [start_step, stop_step); endless without `stop_step`.

        A global step is a window of `inner_steps` batches. In a batch, `sample_ids` are positions in the shard,
        `dataset_index` the shard; `active_dataset.sample_ids` has the ids. The label after a sample's last token
        is -100.

        Args:
            batch_size: Global; a multiple of the world size.
            uid, mode, seed: See `window_sample_ids`.
        """
        if batch_size < 1 or batch_size % self.world_size:
            raise UsageError(f"batches: expected a multiple of {self.world_size} ranks, got {batch_size=}.")
        step = start_step
        while stop_step is None or step < stop_step:
            dataset = self.at_step(step)
            turn, _ = shard_turn(step, self.steps_per_shard, self.reset_step)
            positions = self._positions(step, len(dataset), inner_steps, batch_size, uid, mode, seed)
            for inner, part in enumerate(np.split(positions, inner_steps)):
                rows = np.full((len(part), self.sequence_length + 1), IGNORE_INDEX, np.int64)
                rows[:, :-1] = dataset[part]
                yield TokenBatch(
                    inputs=rows[:, :-1], labels=rows[:, 1:], sample_ids=part, epoch=turn // self.num_shards, step=step,
                    epoch_step=inner, _dataset_index=np.full(len(part), dataset.index, np.int64),
                )  # fmt: skip
            step += 1

    def read_window(
        self, global_step: int, *, batch_size: int, inner_steps: int = 1, uid: int = 0, mode: Sampler = "forebay",
        seed: int = 42,
    ) -> tuple[int, I64, Array]:  # fmt: skip
        """A window of any step, also of a shard that is not active: shard, positions [B] and tokens [B, L] of a rank.

        Only these samples are read, by ranges, and each is verified by its id; nothing is stored, and the active shard
        and the next one stay.

        Args:
            global_step: The window.
            batch_size, inner_steps, uid, mode, seed: As of `batches`.

        Raises:
            ForebayError: If the samples cannot be read or verified.
        """
        index = self._shard(global_step)
        active = self.active_dataset
        shard = self._shards.describe(index)
        positions = self._positions(global_step, shard.num_samples, inner_steps, batch_size, uid, mode, seed)
        if active is not None and active.index == index:
            return index, positions, active[positions]
        return index, positions, self._shards.read(shard, positions)

    async def initialize_datasets(self, current_shard_index: int) -> ShardDataset:
        """Make this shard active, and start to download the next one."""
        shards = [
            shard_of_step(index, self.num_shards, 1, None, self.remap)
            for index in (current_shard_index, current_shard_index + 1)
        ]
        dataset = await asyncio.to_thread(self._activate, *shards)
        self.shard_index = current_shard_index % self.num_shards
        return dataset

    async def swap_datasets(self) -> ShardDataset:
        """Make the next shard active, remove the old one, and start to download the one after it."""
        return await self.initialize_datasets(self.shard_index + 1)

    def stats(self) -> Json:
        """`start_s` (waited for the first shard), `stall_s` (for later ones), `swaps`, `late_swaps`, `fetched_bytes`,
        `fetch_s`, `active`, and of the upcoming shard its `index`, `received`, `total`."""
        upcoming, shards = self.upcoming_dataset, self._shards
        return {
            **self._stats, "fetched_bytes": shards.fetched_bytes, "fetch_s": shards.fetch_s,
            "active": None if self.active_dataset is None else self.active_dataset.index,
            "upcoming": None if upcoming is None
            else {name: getattr(upcoming, name) for name in ("index", "received", "total")},
        }  # fmt: skip

    def close(self) -> None:
        """Cancel the download; what was received stays and is resumed. May be called twice."""
        for shard in (self.upcoming_dataset, self.active_dataset):
            if shard is not None:
                shard.close()
        self.active_dataset = self.upcoming_dataset = None
        self._shards.close()

    def _activate(self, index: int, upcoming: int) -> ShardDataset:
        old = self.active_dataset
        if old is None or old.index != index:
            self._check_disk(index, upcoming)
            fetch, started = self._fetch(index), time.monotonic()
            is_late, self.upcoming_dataset = not fetch.result.done(), None
            try:
                self.active_dataset = fetch.wait(0.0 if old is None else _SWAP_TIMEOUT_S)
            except BaseException:
                fetch.close()
                raise
            self._shards.is_training, waited_s = True, time.monotonic() - started
            self._stats["start_s" if old is None else "stall_s"] += waited_s
            if old is not None:
                self._stats["swaps"] += 1
                self._stats["late_swaps"] += is_late
                late = f", {waited_s:.1f} s late" if is_late else ""
                log.log(
                    logging.WARNING if is_late else logging.INFO, "shard %d follows shard %d%s", index, old.index, late
                )
                if not self.keep_shards:
                    old.close()
                    self._shards.evict((index, upcoming))
        if upcoming != index:
            self._fetch(upcoming)
        assert self.active_dataset is not None
        return self.active_dataset

    def _fetch(self, index: int) -> ShardFetch:
        """Return the fetch of a shard as the upcoming one, in place of another."""
        fetch = self.upcoming_dataset
        if fetch is None or fetch.index != index:
            if fetch is not None:
                fetch.close()
            fetch = self.upcoming_dataset = ShardFetch(index, self._shards)
        return fetch

    def _check_disk(self, index: int, upcoming: int) -> None:
        """Before the first download: refuse a disk that is too small, warn of a small disk or memory, clean up."""
        if self._checked_disk or self._shards.is_in_place(shard := self._shards.find(index)):
            return
        self._checked_disk = True
        count = self.num_shards if self.keep_shards else min(_MIN_SHARDS, self.num_shards)
        folder, needed = self._shards.cache.directory, count * shard.num_bytes
        present = self._shards.cache.used_bytes()
        available = shutil.disk_usage(folder).free + present
        if available < needed:
            raise UsageError(
                f"{folder}: expected room for {count} shards of {format_bytes(shard.num_bytes)} ({needed} bytes), got "
                f"{available} bytes ({present} of them hold shards). Nothing was fetched. Free {needed - available} "
                "bytes, or choose another folder."
            )
        if available < COMMON_SHARDS * shard.num_bytes:
            usual = format_bytes(int(COMMON_SHARDS * shard.num_bytes))
            log.warning("disk: room for %s in %s; runs like this have %s", format_bytes(available), folder, usual)
        memory = memory_bytes()
        if memory < COMMON_MEM_BYTES:
            log.warning("memory: %s; 4 GB or more is what runs like this have", format_bytes(memory))
        for shard_index in (index, upcoming):
            with contextlib.suppress(ForebayError):  # It is raised when the shard is fetched.
                self._shards.describe(shard_index)
        if not self.keep_shards:
            self._shards.evict((index, upcoming))

    def _positions(
        self, step: int, num_samples: int, inner_steps: int, batch_size: int, uid: int, mode: Sampler, seed: int
    ) -> I64:  # fmt: skip
        """Return what this rank reads of a window, as positions in its shard."""
        _, first = shard_turn(step, self.steps_per_shard, self.reset_step)
        return window_sample_ids(
            uid, step, num_samples, inner_steps, batch_size, self.rank, self.world_size,
            mode=mode, seed=seed, first_window=first,
        )  # fmt: skip

    def _shard(self, step: int) -> int:
        return shard_of_step(step, self.num_shards, self.steps_per_shard, self.reset_step, self.remap)
