"""Which samples each step of a run takes: a pure function of counts, seed, epoch and step.

The slices are permuted by a keyed bijection; the sequence of samples is cut into C lanes and permuted inside their
windows; position t of the epoch reads lane t mod C (`epoch.py`). A global batch is put in order of lane, so that a
rank's share stays in few lanes: it reads about 1 / min(W, C) of the slices. Any step is reached without replay. Cost:
16 bytes a slice for the current epoch and the next, and under a millisecond for a step of 1 024 samples.
"""

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.order.bijection import derive_key, permute
from forebay.order.epoch import Epoch, Lanes
from forebay.order.step_index import check_integer

I64 = NDArray[np.int64]

MAX_LANES = 64  # More lanes mix more of the dataset into a batch, and open more windows at once.
# By default at least so many: a lane has some three slices open, and both lanes at a border read the slice there.
SLICES_PER_LANE = 16
_MAX_SLICES_OF_EPOCHS = 1 << 12  # Epochs are kept for so many slices in all, and two in any case.


def samples_per_slice(counts: I64, seq_len: int | None, layout: str = "tokens") -> I64:
    """Samples of each slice, int64 [S], of its tokens or rows, `counts`: tokens // seq_len, or the rows themselves."""
    counts = np.asarray(counts, dtype=np.int64)
    if layout == "rows":
        return counts
    if layout != "tokens":
        raise UsageError(f"layout: expected 'tokens' or 'rows', got {layout!r}.")
    if seq_len is None or isinstance(seq_len, bool) or seq_len < 1:
        raise UsageError(f"seq_len: expected an integer from 1, got {seq_len!r}. Say how long a sample is.")
    return counts // int(seq_len)


def default_lanes(global_batch: int, num_slices: int) -> int:
    """The batch if it is at most M; else its largest divisor in (M / 2, M], or the number that is nearest to one.

    M is a sixteenth of the slices with samples, at least 1 and at most 64: then the open windows are about a fifth of
    the dataset. If C divides the batch, every step takes equally many samples of each lane, and a rank keeps its lanes.
    If the batch differs by one from a multiple of C, the edges of the ranks' shares move by one sample per step.
    """
    max_lanes = max(1, min(MAX_LANES, num_slices // SLICES_PER_LANE))
    if global_batch <= max_lanes:
        return global_batch
    candidates = range(max_lanes, max_lanes // 2, -1)
    return min(candidates, key=lambda lanes: (min(global_batch % lanes, -global_batch % lanes), -lanes))


def part_of(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """A rank's part [low, high) of a batch of `size`: parts differ by at most one sample."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(f"rank: expected 0 <= rank < world_size, got rank {rank} of {world_size}.")
    return rank * size // world_size, (rank + 1) * size // world_size


def lease_order(seed: int, epoch: int, slice_index: int, num_samples: int, start: int, stop: int) -> I64:
    """The in-slice sample indexes at [start, stop) of a leased slice's own shuffled order: int64 [stop - start].

    Over [0, num_samples) a bijection. A pure function of its arguments: a worker that takes a lease over at an
    offset continues exactly there.
    """
    if not 0 <= start <= stop <= num_samples:
        raise UsageError(f"lease_order: expected 0 <= start <= stop <= {num_samples}, got [{start}, {stop}).")
    if start == stop:
        return np.empty(0, np.int64)
    key = derive_key(seed, "lease", epoch, slice_index)
    return permute(np.arange(start, stop, dtype=np.uint64), num_samples, key).astype(np.int64)


class Order:
    """The order of samples of one dataset. Immutable and safe to share between threads; equal arguments, equal order.

    Args:
        samples_per_slice: int64 [S], from `samples_per_slice`.
        seed: Any integer.
        global_batch: Samples in a step over all ranks, from 1.
        lanes: C; by default `default_lanes` of the batch and the slices that have samples.
        window: w, in samples of one lane; by default two mean slices' worth, at least 1.
        shuffle: False reads the samples in the dataset's order, through the same methods.
        drop_last: Leave out the short batch that ends an epoch.
        head: h, at most that many samples begin epoch 0 from one slice; by default that slice's, but no more
            than an eighth of the epoch. 0: no head. Without shuffling there is none.
    """

    def __init__(
        self, samples_per_slice: I64, seed: int, global_batch: int, lanes: int | None = None, window: int | None = None,
        shuffle: bool = True, drop_last: bool = False, head: int | None = None,
    ) -> None:  # fmt: skip
        counts = np.array(samples_per_slice, dtype=np.int64)
        if counts.ndim != 1 or (len(counts) and int(counts.min()) < 0):
            raise UsageError("samples_per_slice: expected counts from 0 in one dimension.")
        if global_batch is None:
            raise UsageError("global_batch: expected an integer from 1, got None.")
        for name, value, minimum in (
            ("global_batch", global_batch, 1), ("lanes", lanes, 1), ("window", window, 1), ("head", head, 0),
        ):  # fmt: skip
            check_integer(name, value, minimum)
        counts.flags.writeable = False
        used = np.flatnonzero(counts)
        self.samples_per_slice, self.seed, self.global_batch = counts, seed, global_batch
        self.shuffle, self.drop_last = shuffle, drop_last
        self._stops = np.cumsum(counts)
        self.num_samples = int(self._stops[-1]) if len(counts) else 0
        self.num_lanes = int(lanes) if lanes is not None else default_lanes(int(global_batch), len(used))
        self.window_samples = int(window) if window is not None else max(1, 2 * self.num_samples // max(len(used), 1))
        self._used = used if len(used) < len(counts) else None  # None: every slice has samples.
        self._epochs: dict[int, Epoch] = {}
        self.head_samples = self._head_samples(head)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, the same for every rank. The last may be short, unless drop_last."""
        if self.drop_last:
            return self.num_samples // self.global_batch
        return -(-self.num_samples // self.global_batch)

    def share(self, epoch: int, step: int, rank: int, world_size: int) -> I64:
        """A rank's part of the global batch: int64 global sample ids.

        Shares of a step differ by at most one in length (they may be empty where the batch is shorter than the
        world size); concatenated by rank they are the global batch, whatever the world size.
        """
        return self.sample_ids_at(epoch, self.positions(step, rank, world_size))

    def positions(self, step: int, rank: int, world_size: int) -> I64:
        """The positions in the epoch, int64, that a rank takes at a step: sorted by lane, then by position."""
        if not 0 <= step < self.steps_per_epoch:
            raise UsageError(f"step: expected 0 <= step < {self.steps_per_epoch} (steps of an epoch), got {step}.")
        first = step * self.global_batch
        size = min(self.global_batch, self.num_samples - first)  # The epoch's last may be short.
        return self.shares_of(first, size, 1, rank, world_size).reshape(-1)

    def shares_of(self, first: int, size: int, num_steps: int, rank: int, world_size: int) -> I64:
        """The positions of a rank's parts of batches of one size, one after another: int64 [num_steps, samples].

        The first batch has the positions [first, first + size); each part is sorted by lane.
        If the number of lanes divides the batch, all batches have one pattern, which is computed once.
        """
        low, high = part_of(size, rank, world_size)
        firsts = first + size * np.arange(num_steps, dtype=np.int64)
        if not self.shuffle:
            return firsts[:, None] + np.arange(low, high, dtype=np.int64)
        phases, which = np.array([first % self.num_lanes]), np.zeros(1, np.int64)
        if num_steps > 1 and size % self.num_lanes:
            phases, which = np.unique(firsts % self.num_lanes, return_inverse=True)
        patterns = np.empty((len(phases), high - low), np.int64)
        dtype = np.uint16 if self.num_lanes <= 1 << 16 else np.int64  # 16 bits are sorted by radix.
        for i, phase in enumerate(phases.tolist()):
            lanes = np.arange(phase, phase + size) % self.num_lanes
            patterns[i] = np.argsort(lanes.astype(dtype), kind="stable")[low:high]
        return firsts[:, None] + patterns[which]

    def sample_ids_at(self, epoch: int, positions: I64) -> I64:
        """The global sample ids, int64 [K], at positions of an epoch, int64 [K], each in [0, num_samples)."""
        if not self.shuffle:
            return positions
        slices, samples = self.samples_at(epoch, positions)
        return self._stops[slices] - self.samples_per_slice[slices] + samples

    def samples_at(self, epoch: int, positions: I64) -> tuple[I64, I64]:
        """`sample_ids_at` as (slice index, sample within the slice), both int64 [K]. Fastest for neighbours."""
        return self.epoch_at(epoch).read(positions) if self.shuffle else self.locate(positions)

    def locate(self, sample_ids: I64) -> tuple[I64, I64]:
        """Global sample ids to (slice index, sample within the slice), both int64 of the same shape."""
        slices = np.searchsorted(self._stops, sample_ids, side="right")
        return slices, sample_ids - (self._stops[slices] - self.samples_per_slice[slices])

    def _head_samples(self, head: int | None) -> int:
        if not self.shuffle or self.num_samples == 0 or head == 0:
            return 0
        first = int(self.samples_per_slice[self._slices_at(0, 1)[0]])
        return min(first, self.num_samples // 8 if head is None else head)

    def epoch_at(self, epoch: int) -> Epoch:
        """The tables of an epoch, shared by all readers; only for shuffled orders."""
        if epoch < 0:
            raise UsageError(f"epoch: expected an integer from 0, got {epoch}.")
        tables = self._epochs.get(epoch)
        if tables is None:
            slices = self._slices_at(epoch)
            head = self.head_samples if epoch == 0 else 0
            lanes = Lanes(self.num_samples, head, self.num_lanes, self.window_samples)
            keys = (derive_key(self.seed, "window", epoch), derive_key(self.seed, "head"))
            tables = Epoch(slices, self.samples_per_slice.take(slices), lanes, *keys)
            # The current epoch and the next are kept, and more where they are small; two threads may build one twice.
            spare = len(self._epochs) + 1 - max(2, _MAX_SLICES_OF_EPOCHS // max(1, len(slices)))
            for old in sorted(self._epochs)[: max(0, spare)]:
                self._epochs.pop(old, None)
            self._epochs[epoch] = tables
        return tables

    def _slices_at(self, epoch: int, num_places: int | None = None) -> I64:
        """The slices that have samples, in the epoch's order: all, or the first few."""
        num_used = len(self._used) if self._used is not None else len(self.samples_per_slice)
        index = np.arange(num_used if num_places is None else num_places, dtype=np.uint64)
        slices = permute(index, num_used, derive_key(self.seed, "slices", epoch)).view(np.int64)
        return slices if self._used is None else self._used[slices]
