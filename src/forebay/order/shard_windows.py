"""Which shard and which of its samples a window of a run reads: a pure function, so that a validator can replay it.

Two samplers. `compat` draws as Templar's does: NumPy's `default_rng(seed32).choice` without replacement, which may
repeat samples over windows, may miss some, and depends on NumPy's stream (pinned by tests/golden, not promised by
NumPy). `forebay` uses a keyed bijection: no sample is read twice before all were read once.
"""

import hashlib
from collections.abc import Mapping
from typing import Literal

import numpy as np

from forebay.arrays import I64, U64
from forebay.errors import UsageError
from forebay.order.bijection import derive_key, permute

STEPS_PER_SHARD = 455
Sampler = Literal["compat", "forebay"]


def shard_of_step(
    step: int, num_shards: int, steps_per_shard: int, reset_step: int | None, remap: Mapping[int, int] | None
) -> int:
    """The shard that is read at a global step.

    Args:
        step: From 0, over the whole run, whenever it was resumed.
        num_shards: The first follows the last.
        reset_step: From here on it begins with shard 0 again.
        remap: Shards that are replaced, by index: {7: 13}.

    Raises:
        UsageError: If an argument is out of range.
    """
    if num_shards < 1:
        raise UsageError(f"shards: expected at least one, got {num_shards}.")
    index = shard_turn(step, steps_per_shard, reset_step)[0] % num_shards
    return (remap or {}).get(index, index)


def shard_turn(step: int, steps_per_shard: int, reset_step: int | None) -> tuple[int, int]:
    """(number of shards used up since the beginning or the reset, first step of the current one)."""
    if step < 0 or steps_per_shard < 1 or (reset_step is not None and reset_step < 0):
        raise UsageError(f"shards: expected step >= 0 and steps_per_shard >= 1, got {step=}, {steps_per_shard=}.")
    base = reset_step if reset_step is not None and step >= reset_step else 0
    turn = (step - base) // steps_per_shard
    return turn, base + turn * steps_per_shard


def next_shard_step(step: int, steps_per_shard: int, reset_step: int | None) -> int:
    """The first step after this one at which the shard is swapped."""
    after = shard_turn(step, steps_per_shard, reset_step)[1] + steps_per_shard
    return min(after, reset_step) if reset_step is not None and step < reset_step else after


def window_seed(uid: int, window: int) -> int:
    """Templar's 32-bit seed of a miner's window: uid 7, window 123 give 6999982."""
    return ((uid * 1_000_003) ^ window) & 0xFFFFFFFF


def window_sample_ids(
    uid: int, window: int, dataset_len: int, steps: int, batch: int, rank: int = 0, world: int = 1, *,
    mode: Sampler = "compat", seed: int = 42, first_window: int = 0,
) -> I64:  # fmt: skip
    """The samples of one window within a shard, for one rank.

    Args:
        uid: The miner's number.
        window: The window's number.
        dataset_len: Samples of the shard.
        steps, batch: The window is `steps` global batches of `batch` samples.
        rank, world: This rank takes every world-th, from the rank-th on.
        mode: `compat`: as Templar draws; `forebay`: see the module.
        seed, first_window: Of `forebay`: the run's seed, and the window at which the shard began. All samples of a
            shard are read once before one is read again.

    Returns:
        int64 [about steps * batch / world], indexes in [0, dataset_len).

    Raises:
        UsageError: If an argument is out of range; in mode `compat`, if the shard is smaller than the window.
    """
    count = steps * batch
    if min(steps, batch, dataset_len, world) < 1 or not 0 <= rank < world or min(uid, window) < 0:
        raise UsageError(
            f"window of samples: expected counts from 1 on, and rank in [0, world), got {steps=}, {batch=}, "
            f"{dataset_len=}, {rank=}, {world=}, {uid=}, {window=}."
        )
    if mode == "compat":
        if count > dataset_len:
            raise UsageError(
                f"window of samples: expected a shard of at least {count} samples, got {dataset_len}. "
                "Take fewer steps, or mode='forebay'."
            )
        drawn = np.random.default_rng(window_seed(uid, window)).choice(dataset_len, size=count, replace=False)
        return np.asarray(drawn[rank::world], np.int64)
    if mode != "forebay" or window < first_window:
        raise UsageError(
            f"window of samples: expected mode compat or forebay, and first_window <= window, got {mode=}, "
            f"{first_window=}, {window=}."
        )
    start = (window - first_window) * count
    places = np.arange(start + rank, start + count, world, dtype=np.uint64)
    out = np.empty(len(places), np.int64)
    passes = places // np.uint64(dataset_len)
    for turn in np.unique(passes).tolist():
        here = passes == turn
        key = derive_key(seed, "shard window", uid, first_window, int(turn), 0)
        out[here] = permute(places[here] - np.uint64(turn * dataset_len), dataset_len, key).astype(np.int64)
    return out


def receipt(sample_ids: U64) -> tuple[str, int]:
    """A digest of the samples used: the 128-bit BLAKE2b of their sorted ids (hex), and their count.

    Independent of the order in which they were read; repeated ids count repeatedly.
    """
    ids = np.sort(np.asarray(sample_ids, "<u8"))
    return hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest(), len(ids)
