"""Which samples each step of a run takes: a pure function of counts, seed, epoch and step.

Hides lanes and windows. The slices are permuted by a keyed bijection; the resulting sequence of N samples is
cut into C lanes of ceil((N - c) / C) samples; inside each window of a lane the samples are permuted again; and
position t of the epoch reads lane t mod C at index t div C. A global batch is the positions of its step, put in
order of lane, so that a rank's share is a contiguous run of it and stays in few lanes.

What it costs: 16 bytes a slice for the current epoch and for the next (8 MB for 250 000 slices, built in a few
milliseconds), and under a millisecond for a step of 1 024 samples. What it buys: any step of any epoch on any
world size without replay, and a cache that needs the open windows only: at most C windows of w samples.
What it loses: samples of a window are mixed well, but samples further apart than a lane's window keep the
order of their slices. Slices are shuffled whole; lanes bring C windows from all over the dataset into a batch.

Locality: with W ranks, a rank reads about 1 / min(W, C) of the slices (ranks beyond C share a lane).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import UsageError
from millrace.order.bijection import derive_key, permute, permute_each, subkeys

I64 = NDArray[np.int64]

MAX_LANES = 64  # More lanes mix more of the dataset into a batch, and open more windows at once.
_FUTURE_CHUNK = 1 << 16  # Positions that `future` looks at in one go: a few MB.


@dataclass(frozen=True)
class Placing:
    """An epoch's slices in permuted order. Arrays are [K], K the number of slices that have samples."""

    slices: I64  # Slice index at each place.
    ends: I64  # Exclusive end of each place in the epoch's sequence of samples.
    shift: I64  # What to add to a position in the sequence to get the global sample id.


def samples_per_slice(counts: I64, seq_len: int | None, layout: str = "tokens") -> I64:
    """The samples in each slice: tokens // seq_len in the layout `tokens`, rows in the layout `rows`.

    Args:
        counts: int64 [S], tokens or rows of each slice.
        seq_len: Tokens in a sample; unused for rows.

    Raises:
        UsageError: If seq_len is not a positive integer, or the layout is unknown.
    """
    counts = np.asarray(counts, dtype=np.int64)
    if layout == "rows":
        return counts
    if layout != "tokens":
        raise UsageError(f"layout: expected 'tokens' or 'rows', got {layout!r}.")
    if seq_len is None or isinstance(seq_len, bool) or seq_len < 1:
        raise UsageError(f"seq_len: expected an integer from 1, got {seq_len!r}. Say how long a sample is.")
    return counts // int(seq_len)


def default_lanes(global_batch: int) -> int:
    """The batch if it is at most 64; else its largest divisor in [33, 64], or what comes nearest to one.

    Where C divides the batch, every step takes as many samples of each lane, and a rank keeps its lanes. Where
    the batch is one off a multiple of C, the shares' edges move by one sample from step to step.
    """
    if global_batch <= MAX_LANES:
        return global_batch
    candidates = range(MAX_LANES, MAX_LANES // 2, -1)
    return min(candidates, key=lambda lanes: (min(global_batch % lanes, -global_batch % lanes), -lanes))


def part_of(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """A rank's part [low, high) of a batch of `size`: parts differ by at most one sample.

    Raises:
        UsageError: If the rank is outside the world.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(f"rank: expected 0 <= rank < world_size, got rank {rank} of {world_size}.")
    return rank * size // world_size, (rank + 1) * size // world_size


def lease_order(seed: int, epoch: int, slice_index: int, num_samples: int, start: int, stop: int) -> I64:
    """The in-slice sample indexes at [start, stop) of a leased slice's own shuffled order.

    Depends on the arguments only: whoever takes a lease over at an offset goes on exactly there.

    Returns:
        int64 [stop - start], values in [0, num_samples); over [0, num_samples) a bijection.

    Raises:
        UsageError: If [start, stop) is not inside [0, num_samples).
    """
    if not 0 <= start <= stop <= num_samples:
        raise UsageError(f"lease_order: expected 0 <= start <= stop <= {num_samples}, got [{start}, {stop}).")
    if start == stop:
        return np.empty(0, np.int64)
    key = derive_key(seed, "lease", epoch, slice_index)
    return permute(np.arange(start, stop, dtype=np.uint64), num_samples, key).astype(np.int64)


@dataclass(frozen=True)
class Order:
    """The order of a run. Immutable; safe to share between threads; equal arguments give equal orders.

    Args:
        samples_per_slice: int64 [S], from `samples_per_slice`.
        seed: Any integer.
        global_batch: Samples in a step over all ranks, from 1.
        lanes: C; by default `default_lanes(global_batch)`.
        window: w, in samples of one lane; by default two mean slices' worth, at least 1.
        shuffle: False reads the samples in the dataset's order, through the same methods.
        drop_last: Leave out the short batch that ends an epoch.

    Raises:
        UsageError: If an argument is out of range.
    """

    samples_per_slice: I64
    seed: int
    global_batch: int
    lanes: int | None = None
    window: int | None = None
    shuffle: bool = True
    drop_last: bool = False
    num_samples: int = field(init=False)
    num_lanes: int = field(init=False)
    window_samples: int = field(init=False)
    _ends: I64 = field(init=False, repr=False, compare=False)
    _used: I64 | None = field(init=False, repr=False, compare=False)  # None: every slice has samples.
    _placings: dict[int, Placing] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = np.array(self.samples_per_slice, dtype=np.int64)
        if counts.ndim != 1 or (len(counts) and int(counts.min()) < 0):
            raise UsageError("samples_per_slice: expected counts from 0 in one dimension.")
        for name in ("global_batch", "lanes", "window"):
            value = getattr(self, name)
            if value is None and name != "global_batch":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise UsageError(f"{name}: expected an integer from 1, got {value!r}.")
        counts.flags.writeable = False
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        lanes = int(self.lanes) if self.lanes is not None else default_lanes(int(self.global_batch))
        used = np.flatnonzero(counts)
        window = int(self.window) if self.window is not None else max(1, 2 * total // max(len(used), 1))
        for name, value in {
            "samples_per_slice": counts,
            "num_samples": total,
            "num_lanes": lanes,
            "window_samples": window,
            "_ends": ends,
            "_used": used if len(used) < len(counts) else None,
            "_placings": {},
        }.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Order) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, ...]:
        return (
            self.samples_per_slice.tobytes(),
            self.seed,
            self.global_batch,
            self.num_lanes,
            self.window_samples,
            self.shuffle,
            self.drop_last,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, the same for every rank. The last may be short, unless drop_last."""
        if self.drop_last:
            return self.num_samples // self.global_batch
        return -(-self.num_samples // self.global_batch)

    def batch_len(self, step: int) -> int:
        """Samples in the global batch of a step: global_batch, or fewer in the epoch's last."""
        self._check_step(step)
        return min(self.global_batch, self.num_samples - step * self.global_batch)

    def global_batch_at(self, epoch: int, step: int) -> I64:
        """The global sample ids of a step, int64 [b]: what all ranks' shares make, one after another.

        Raises:
            UsageError: If the epoch is negative or the step outside [0, steps_per_epoch).
        """
        return self.share(epoch, step, 0, 1)

    def share(self, epoch: int, step: int, rank: int, world_size: int) -> I64:
        """A rank's part of the global batch: int64 global sample ids.

        Shares of a step differ by at most one in length (they may be empty where the batch is shorter than the
        world), follow one another in the global batch, and together are it, whatever the world size.

        Raises:
            UsageError: If epoch, step, rank or world_size is out of range.
        """
        return self.sample_ids_at(epoch, self.positions(step, rank, world_size))

    def shares(self, epoch: int, start: int, stop: int, rank: int, world_size: int) -> list[I64]:
        """`share` of each step in [start, stop): a tenth of the cost of asking step by step for small batches."""
        parts = [self.positions(step, rank, world_size) for step in range(start, stop)]
        if not parts:
            return []
        ids = self.sample_ids_at(epoch, np.concatenate(parts))
        return np.split(ids, np.cumsum([len(part) for part in parts])[:-1])

    def positions(self, step: int, rank: int, world_size: int) -> I64:
        """The positions in the epoch, int64, that a rank takes at a step: sorted by lane, then by position."""
        return self.share_of(step * self.global_batch, self.batch_len(step), rank, world_size)

    def share_of(self, first: int, size: int, rank: int, world_size: int) -> I64:
        """The positions, int64, of a rank's part of a batch of positions [first, first + size), sorted by lane."""
        return self.shares_of(first, size, 1, rank, world_size).reshape(-1)

    def shares_of(self, first: int, size: int, num_steps: int, rank: int, world_size: int) -> I64:
        """`share_of` for batches of one size, one after another: int64 [num_steps, samples of the share].

        Where the lanes divide the batch, all have one pattern, and it is computed once.
        """
        low, high = part_of(size, rank, world_size)
        firsts = first + size * np.arange(num_steps, dtype=np.int64)
        if not self.shuffle:
            return firsts[:, None] + np.arange(low, high, dtype=np.int64)
        phases, which = np.unique(firsts % self.num_lanes, return_inverse=True)
        lanes = (phases[:, None] + np.arange(size, dtype=np.int64)) % self.num_lanes
        kind = np.uint16 if self.num_lanes <= 1 << 16 else np.int64  # 16 bits are sorted by radix.
        patterns = np.argsort(lanes.astype(kind), axis=1, kind="stable")[:, low:high]
        shares: I64 = firsts[:, None] + patterns[which]
        return shares

    def sample_ids_at(self, epoch: int, positions: I64) -> I64:
        """The global sample ids at positions of an epoch. int64, the positions' shape [K].

        Args:
            positions: int64 [K], each in [0, num_samples).
        """
        if not self.shuffle:
            return positions
        sequence = self._sequence_at(epoch, positions)
        placing = self._placing(epoch)
        return sequence + placing.shift[np.searchsorted(placing.ends, sequence, side="right")]

    def places_at(self, epoch: int, positions: I64) -> tuple[I64, I64]:
        """`sample_ids_at` as (slice index, sample within the slice), both int64 [K]."""
        return self.locate(self.sample_ids_at(epoch, positions))

    def locate(self, sample_ids: I64) -> tuple[I64, I64]:
        """Global sample ids to (slice index, sample within the slice), both int64 of the same shape."""
        slices = np.searchsorted(self._ends, sample_ids, side="right")
        return slices, sample_ids - (self._ends[slices] - self.samples_per_slice[slices])

    def future(
        self, epoch: int, step: int, rank: int, world_size: int, num_steps: int | None = None
    ) -> tuple[I64, I64]:
        """The slices a rank will read from a step on, and the step at which each is read first.

        Exact, so that a prefetcher fetches what will be read and evicts what is read last.

        Args:
            num_steps: How far to look; by default to the end of the epoch.

        Returns:
            (slices, steps), both int64 [K]: distinct slices by first use, and steps counted in the epoch.
            A slice that is absent is not read again in [step, step + num_steps) by this rank.
        """
        stop = self.steps_per_epoch if num_steps is None else min(step + num_steps, self.steps_per_epoch)
        per_step = max(1, self.global_batch // world_size)
        chunk = max(1, _FUTURE_CHUNK // per_step)
        first_use: dict[int, int] = {}
        for start in range(step, stop, chunk):
            parts = [self.positions(s, rank, world_size) for s in range(start, min(start + chunk, stop))]
            steps = np.repeat(np.arange(start, start + len(parts)), [len(part) for part in parts])
            slices, _ = self.locate(self.sample_ids_at(epoch, np.concatenate(parts)))
            distinct, at = np.unique(slices, return_index=True)
            for by_use in np.argsort(at, kind="stable"):
                first_use.setdefault(int(distinct[by_use]), int(steps[at[by_use]]))
        return np.array(list(first_use), np.int64), np.array(list(first_use.values()), np.int64)

    def open_slices(self, epoch: int, step: int) -> I64:
        """The slices of all windows open at a step, over all ranks: what a whole cluster's caches need now.

        Every sample of the step lies in them. Bound: each lane opens at most two windows in a step of up to
        lanes * window samples; a window of w samples lies in at most 2 + (w - 2) // m slices, where m is the
        fewest samples of any slice that has some (w >= 2).

        Returns:
            int64 [K], distinct, ascending.
        """
        size = self.batch_len(step)
        first = step * self.global_batch
        if not self.shuffle:
            slices, _ = self.locate(np.array([first, first + size - 1]))
            span = np.arange(slices[0], slices[1] + 1, dtype=np.int64)
            return span[self.samples_per_slice[span] > 0]
        placing = self._placing(epoch)
        found = []
        for lane in range(min(self.num_lanes, self.num_samples)):
            start, length = self._lane(lane)
            low = -(-(first - lane) // self.num_lanes)
            high = -(-(first + size - lane) // self.num_lanes)
            if low >= high:
                continue
            from_index = low // self.window_samples * self.window_samples
            to_index = min(length, ((high - 1) // self.window_samples + 1) * self.window_samples)
            ends = np.array([start + from_index, start + to_index - 1])
            places = np.searchsorted(placing.ends, ends, side="right")
            found.append(placing.slices[places[0] : places[1] + 1])
        return np.unique(np.concatenate(found))

    def _lane(self, lane: int) -> tuple[int, int]:
        """(start in the epoch's sequence, length) of a lane."""
        base, extra = divmod(self.num_samples, self.num_lanes)
        return lane * base + min(lane, extra), base + (lane < extra)

    def _sequence_at(self, epoch: int, positions: I64) -> I64:
        """Where in the epoch's sequence of samples each position reads: lanes and windows, vectorised."""
        index, lane = np.divmod(positions, self.num_lanes)
        base, extra = divmod(self.num_samples, self.num_lanes)
        start = lane * base + np.minimum(lane, extra)
        length = base + (lane < extra)
        window, offset = np.divmod(index, self.window_samples)
        low = window * self.window_samples
        size = np.minimum(self.window_samples, length - low)
        keys = subkeys(derive_key(self.seed, "window", epoch), lane.astype(np.uint64), window.astype(np.uint64))
        mixed = permute_each(offset.astype(np.uint64), size.astype(np.uint64), keys)
        sequence: I64 = start + low + mixed.astype(np.int64)
        return sequence

    def _placing(self, epoch: int) -> Placing:
        if epoch < 0:
            raise UsageError(f"epoch: expected an integer from 0, got {epoch}.")
        placing = self._placings.get(epoch)
        if placing is None:
            placing = self._place(epoch)
            for old in sorted(self._placings):
                # The current epoch and the next are kept; two threads at once only build one twice.
                if len(self._placings) > 1:
                    self._placings.pop(old, None)
            self._placings[epoch] = placing
        return placing

    def _place(self, epoch: int) -> Placing:
        counts = self.samples_per_slice
        num_used = len(self._used) if self._used is not None else len(counts)
        key = derive_key(self.seed, "slices", epoch)
        slices = permute(np.arange(num_used, dtype=np.uint64), num_used, key).view(np.int64)
        if self._used is not None:
            slices = self._used[slices]
        ends = counts.take(slices)
        np.cumsum(ends, out=ends)
        shift = self._ends.take(slices)
        shift -= ends
        return Placing(slices, ends, shift)

    def _check_step(self, step: int) -> None:
        if not 0 <= step < self.steps_per_epoch:
            raise UsageError(f"step: expected 0 <= step < {self.steps_per_epoch} (steps of an epoch), got {step}.")
