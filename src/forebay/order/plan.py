"""Which samples each step of a run takes: a pure function of counts, seed, epoch and step.

The slices are permuted by a keyed bijection; the sequence of samples is cut into C lanes and permuted inside their
windows; position t of the epoch reads lane t mod C (`epoch.py`). A global batch is put in order of lane. If C is a
multiple of the batch, as by default, each rank has lanes of its own, whatever the world size, and reads its share of
the bytes once: a lane goes through its slices window by window, and only its window has to be at hand. Any step is
reached without replay. Cost: 16 bytes a slice for the current epoch and the next, and under a millisecond for a step of
1 024 samples.
"""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.arrays import I64
from forebay.errors import UsageError
from forebay.order.bijection import derive_key, permute
from forebay.order.epoch import Epoch, Lanes
from forebay.order.step_index import check_integer

MAX_LANES = 4096
MIN_LANES = 512  # More than a batch needs: a batch takes its samples from other lanes than the last one.
# The windows of all lanes together: a cache of 2 % of the dataset, or 1 GiB, has room for them and for what comes next.
WINDOWS_OF_DATASET, MAX_WINDOW_BYTES = 160, 256 << 20
_MIN_WINDOW_CHUNKS, _LANE_CHUNKS = 2, 4
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


@dataclass(frozen=True)
class SampleSize:
    """What the defaults of lanes and window depend on beside the number of samples and the batch."""

    sample_bytes: float = 4096.0  # mean, as stored
    chunk_bytes: int = 1 << 16  # what is fetched and verified as a whole

    @classmethod
    def of(cls, slice_bytes: I64, slice_samples: I64, chunk_bytes: int) -> "SampleSize":
        """The sizes of a dataset's slices that have samples."""
        used = slice_bytes[slice_samples > 0]
        return cls(float(used.sum()) / max(1, int(slice_samples.sum())), chunk_bytes)


def num_streams(batch: int, limit: int = MAX_LANES) -> int:
    """A batch of up to `limit`, else its largest divisor in (limit / 2, limit], else `limit`."""
    if batch <= limit:
        return batch
    return next((number for number in range(limit, limit // 2, -1) if batch % number == 0), limit)


def default_lanes(global_batch: int, num_samples: int, size: SampleSize) -> int:
    """C, by default: a multiple of the batch, as many as have windows of four chunks, at most 512; the batch at least.

    So each of 1 to `global_batch` ranks has whole lanes. Of a batch above 4096 it is the largest divisor in
    (2048, 4096], or 4096; of whole slices as chunks (other formats) the largest divisor that leaves a lane four
    slices.
    """
    total_bytes = num_samples * size.sample_bytes
    if size.chunk_bytes > MAX_WINDOW_BYTES // MIN_LANES:
        return num_streams(global_batch, max(1, min(MAX_LANES, int(total_bytes / (_LANE_CHUNKS * size.chunk_bytes)))))
    if global_batch > MAX_LANES:
        return num_streams(global_batch)
    windows = min(MAX_WINDOW_BYTES, total_bytes / WINDOWS_OF_DATASET)
    fitting = min(MIN_LANES, int(windows / (_LANE_CHUNKS * size.chunk_bytes)))
    return global_batch * max(1, fitting // global_batch)


def default_window(lanes: int, num_samples: int, size: SampleSize) -> int:
    """w, in samples of one lane: the lane's part of all windows, and at least two chunks."""
    windows = min(MAX_WINDOW_BYTES, num_samples * size.sample_bytes / WINDOWS_OF_DATASET)
    window_bytes = max(_MIN_WINDOW_CHUNKS * size.chunk_bytes, windows / lanes)
    return max(2, int(window_bytes / max(size.sample_bytes, 1.0)))


def part_of(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """A rank's part [low, high) of a batch of `size`: parts differ by at most one sample."""
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(f"rank: expected 0 <= rank < world_size, got rank {rank} of {world_size}.")
    return rank * size // world_size, (rank + 1) * size // world_size


def batch_parts(first: int, size: int, num_steps: int, cycle: int, rank: int, world_size: int) -> I64:
    """The positions of a rank's parts of batches of one size, one after another: int64 [num_steps, samples].

    The first batch has the positions [first, first + size). Batches are put in order of position modulo `cycle`, then
    divided. If `cycle` divides the size, all batches have one pattern, which is computed once.
    """
    low, high = part_of(size, rank, world_size)
    firsts = first + size * np.arange(num_steps, dtype=np.int64)
    phases, which = np.array([first % cycle]), np.zeros(1, np.int64)
    if num_steps > 1 and size % cycle:
        phases, which = np.unique(firsts % cycle, return_inverse=True)
    patterns = np.empty((len(phases), high - low), np.int64)
    dtype = np.uint16 if cycle <= 1 << 16 else np.int64  # 16 bits are sorted by radix.
    for i, phase in enumerate(phases.tolist()):
        residues = np.arange(phase, phase + size) % cycle
        patterns[i] = np.argsort(residues.astype(dtype), kind="stable")[low:high]
    return firsts[:, None] + patterns[which]


def ranks_of(first: int, size: int, cycle: int, positions: I64, world_size: int) -> I64:
    """The rank that takes each position, int64 [K], of batches of one size from `first` on: as `batch_parts`."""
    batches, offsets = np.divmod(positions - first, size)
    starts, residues = (first + batches * size) % cycle, positions % cycle
    turns, rest = divmod(size, cycle)  # A batch has `turns` positions of each residue, one more of `rest` of them.
    more = np.maximum(0, np.minimum(residues, starts + rest) - starts)
    more += np.minimum(residues, np.maximum(0, starts + rest - cycle))
    ranks: I64 = ((turns * residues + more + offsets // cycle + 1) * world_size - 1) // size
    return ranks


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
        lanes, window: C, and w in samples of one lane; by default `default_lanes` and `default_window`.
        shuffle: False reads the samples in the dataset's order, through the same methods.
        drop_last: Leave out the short batch that ends an epoch.
        size: For the defaults.
        window_bytes: In place of `window`.
    """

    def __init__(
        self, samples_per_slice: I64, seed: int, global_batch: int, lanes: int | None = None, window: int | None = None,
        shuffle: bool = True, drop_last: bool = False, size: SampleSize | None = None,
        window_bytes: int | None = None,
    ) -> None:  # fmt: skip
        counts = np.array(samples_per_slice, dtype=np.int64)
        if counts.ndim != 1 or (len(counts) and int(counts.min()) < 0):
            raise UsageError("samples_per_slice: expected counts from 0 in one dimension.")
        if global_batch is None:
            raise UsageError("global_batch: expected an integer from 1, got None.")
        for name, value in (("global_batch", global_batch), ("lanes", lanes), ("window", window)):
            check_integer(name, value, 1)
        counts.flags.writeable = False
        used = np.flatnonzero(counts)
        self.samples_per_slice, self.seed, self.global_batch = counts, seed, global_batch
        self.shuffle, self.drop_last = shuffle, drop_last
        self._stops = np.cumsum(counts)
        self.num_samples = int(self._stops[-1]) if len(counts) else 0
        size, num_samples = size or SampleSize(), self.num_samples
        self.num_lanes = default_lanes(int(global_batch), num_samples, size) if lanes is None else int(lanes)
        if window is None and window_bytes is not None:
            window = max(1, round(window_bytes / size.sample_bytes))
        self.window_samples = default_window(self.num_lanes, num_samples, size) if window is None else int(window)
        self.is_fixed = lanes is not None or window is not None
        self.size, self._earlier = size, list[tuple[int, Order]]()
        self._used = used if len(used) < len(counts) else None  # None: every slice has samples.
        self._epochs: dict[int, Epoch] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, the same for every rank. The last may be short, unless drop_last."""
        if self.drop_last:
            return self.num_samples // self.global_batch
        return -(-self.num_samples // self.global_batch)

    def sample_ids_of(self, slices: I64, samples: I64) -> I64:
        """Global sample ids, int64 [K], of samples of slices; the inverse of `locate`."""
        return self._stops[slices] - self.samples_per_slice[slices] + samples

    def samples_at(self, epoch: int, positions: I64) -> tuple[I64, I64]:
        """(slice index, sample within the slice) at positions of an epoch, all int64 [K]. Fastest for neighbours."""
        return self.epoch_at(epoch).read(positions) if self.shuffle else self.locate(positions)

    def locate(self, sample_ids: I64) -> tuple[I64, I64]:
        """Global sample ids to (slice index, sample within the slice), both int64 of the same shape."""
        slices = np.searchsorted(self._stops, sample_ids, side="right")
        return slices, sample_ids - (self._stops[slices] - self.samples_per_slice[slices])

    @property
    def cycle(self) -> int:
        """Positions of an epoch that are equal modulo this are neighbours: of one lane."""
        return self.num_lanes if self.shuffle else 1

    @property
    def shape(self) -> dict[str, int]:
        """What decides the order beside the samples, the seed and `shuffle`. Plain JSON values; part of a state."""
        return {"lanes": self.num_lanes, "window": self.window_samples}

    def __str__(self) -> str:
        return f"lanes={self.num_lanes}, window={self.window_samples} samples" if self.shuffle else "as in the dataset"

    def reshaped(self, lanes: int | None, window: int | None, num_slices: int | None = None) -> "Order":
        """The order of the same samples, or those of the first slices, with other lanes and window."""
        return Order(
            self.samples_per_slice[:num_slices], self.seed, self.global_batch, lanes, window, self.shuffle,
            self.drop_last, self.size,
        )  # fmt: skip

    def after(self, earlier: Sequence[tuple[int, "Order"]]) -> "Order":
        """This order from an epoch on. Epochs before are of `earlier`: (the epoch at which one ends, it), rising."""
        order = copy.copy(self)
        order._earlier = list(earlier)
        return order

    @property
    def phases(self) -> list[tuple[int, "Order"]]:
        """(first epoch, its order) of each dataset of which the order is, smaller ones first; see `after`."""
        stops = [0, *(stop for stop, _ in self._earlier)]
        return list(zip(stops, [*(order for _, order in self._earlier), self]))

    def epoch_order(self, epoch: int) -> "Order":
        """The order of an epoch: of this dataset, or of a smaller one from which it grew."""
        return next((order for stop, order in self._earlier if epoch < stop), self)

    def passes(self, positions: I64) -> tuple[I64, I64]:
        """Positions in the samples of all epochs, one epoch after another, to (epoch, position in it)."""
        epochs, within = np.divmod(positions, max(1, self.epoch_order(0).num_samples))
        for epoch, order in self.phases[1:]:
            later = np.flatnonzero(positions >= self.position(epoch))
            of_phase = np.divmod(positions[later] - self.position(epoch), max(1, order.num_samples))
            epochs[later], within[later] = of_phase[0] + epoch, of_phase[1]
        return epochs, within

    def position(self, epoch: int) -> int:
        """The inverse of `passes` for the start of an epoch."""
        bounds = [*(first for first, _ in self.phases if first < epoch), epoch]
        return sum((stop - first) * self.epoch_order(first).num_samples for first, stop in itertools.pairwise(bounds))

    def positions_near(self, epoch: int, slices: I64, samples: I64) -> I64:
        """About where samples are in an epoch, int64 [K]: a window off at most."""
        if not self.shuffle:
            return self.sample_ids_of(slices, samples)
        return self.epoch_at(epoch).positions_near(slices, samples)

    def window_stops(self, epoch: int, slices: I64, samples: I64) -> I64:
        """The position in an epoch after the last sample of each sample's window, int64 [K]."""
        if not self.shuffle:
            return self.sample_ids_of(slices, samples) + 1
        return self.epoch_at(epoch).window_stops(slices, samples)

    def epoch_at(self, epoch: int) -> Epoch:
        """The tables of an epoch, shared by all readers; only for shuffled orders."""
        if epoch < 0:
            raise UsageError(f"epoch: expected an integer from 0, got {epoch}.")
        if (order := self.epoch_order(epoch)) is not self:
            return order.epoch_at(epoch)
        tables = self._epochs.get(epoch)
        if tables is None:
            slices = self._slices_at(epoch)
            lanes = Lanes(self.num_samples, self.num_lanes, self.window_samples)
            key = derive_key(self.seed, "window", epoch)
            tables = Epoch(slices, self.samples_per_slice.take(slices), lanes, key)
            # The current epoch and the next are kept, and more where they are small; two threads may build one twice.
            spare = len(self._epochs) + 1 - max(2, _MAX_SLICES_OF_EPOCHS // max(1, len(slices)))
            for old in sorted(self._epochs)[: max(0, spare)]:
                self._epochs.pop(old, None)
            self._epochs[epoch] = tables
        return tables

    def _slices_at(self, epoch: int) -> I64:
        """The slices that have samples, in the epoch's order."""
        num_used = len(self._used) if self._used is not None else len(self.samples_per_slice)
        index = np.arange(num_used, dtype=np.uint64)
        slices = permute(index, num_used, derive_key(self.seed, "slices", epoch)).view(np.int64)
        return slices if self._used is None else self._used[slices]
