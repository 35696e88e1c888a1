"""A run: which samples of which datasets a rank takes at each run step, over epochs, batch sizes and mixtures.

A run step is the number of global batches since the run began; everything is computed from it, without state. A batch
of one dataset never crosses the end of an epoch. In a mixture each source starts over, in another order, when it is
used up. Hash sharding: `assign_owners` and `OwnedRun`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.arrays import I64, U8, U16, U64
from forebay.errors import UsageError
from forebay.order.bijection import derive_key, random_words
from forebay.order.mixture import MixtureOrder, Weights
from forebay.order.plan import Order, part_of
from forebay.order.step_index import BatchSizes, RunProgress, Segment, StepIndex, check_range

NEVER = 1 << 62
_SCORES = 1 << 20  # Scores at once: 8 MiB.
_BLOCK = 1 << 16  # Samples of a mixture's global batches looked at in one go: 512 KiB an array.


@dataclass(frozen=True)
class Steps:
    """A rank's samples of run steps [first, first + n), one step after another: K samples in all."""

    first: int
    bounds: I64  # [n + 1], from 0 to K: step first + i has the samples [bounds[i], bounds[i + 1]).
    sources: I64  # [K], the dataset of each sample.
    slices: I64  # [K], index of the slice in its dataset.
    samples: I64  # [K], index of the sample in its slice.


class Run:
    """The samples of a run, by run step. Safe to share between threads.

    `orders` are made with the largest batch size as global batch. `weights` of the datasets are None for a single one
    in epochs. `epochs` and `num_steps` limit the run; None for no limit. A mixture ends by num_steps alone. With
    `drop_last` the short last batch of each epoch is left out.
    """

    def __init__(
        self, orders: Sequence[Order], batches: BatchSizes, *, weights: Weights | None = None, epochs: int | None = 1,
        num_steps: int | None = None, drop_last: bool = False,
    ) -> None:  # fmt: skip
        self.orders = tuple(orders)
        self.batches = batches
        self.weights = weights
        if len(self.orders) != (1 if weights is None else weights.num_sources):
            actual = "no weights" if weights is None else f"weights of {weights.num_sources}"
            raise UsageError(f"run: expected weights for each of {len(self.orders)} datasets, got {actual}.")
        self._num_slices = np.array([len(order.samples_per_slice) for order in self.orders], np.int64)
        self._num_samples = np.array([order.num_samples for order in self.orders], np.int64)
        num_samples = self.orders[0].num_samples if weights is None else None
        self._step_index = StepIndex(batches, num_samples, epochs=epochs, num_steps=num_steps, drop_last=drop_last)
        # The dataset of each sample of the run; None for a single dataset.
        self.mixture = None if weights is None else self._mix(weights)

    @property
    def num_steps(self) -> int | None:
        """Run steps in all, the same for every rank. None: no end."""
        return self._step_index.num_steps

    @property
    def steps_per_epoch(self) -> int:
        """Of the first dataset, with the largest batches."""
        return self.orders[0].steps_per_epoch

    def progress(self, step: int) -> RunProgress:
        return self._step_index.progress(step)

    def epoch_stop(self, step: int) -> int | None:
        return self._step_index.epoch_stop(step)

    def of(self, order: Order, first_step: int, *, epochs: int | None = None, num_steps: int | None = None) -> "Run":
        """The run of another order of the dataset; its step 0 is `first_step` of this one, at the start of an epoch."""
        started = [change for change in self.batches.changes if change[0] <= first_step][-1]
        later = [(first - first_step, size) for first, size in self.batches.changes if first > first_step]
        sizes = BatchSizes(((0, started[1]), *later))
        return Run([order], sizes, epochs=epochs, num_steps=num_steps, drop_last=order.drop_last)

    def epoch_of(self, step: int, source: int) -> tuple[int | None, int | None]:
        """The epoch of a dataset at a run step, and the step at which that epoch ends; None where unknown.

        For a mixture the end is unknown; so is the epoch at a step that reads nothing of the dataset, or two epochs.
        """
        if self.num_steps is not None and step >= self.num_steps:
            return None, None
        if self.mixture is None:
            return self.progress(step).epoch, self.epoch_stop(step)
        taken = self.progress(step).samples_taken
        sources, positions = self.mixture.locate(taken, taken + int(self.batch_lens(step, step + 1)[0]))
        epochs = np.unique(self.orders[source].passes(positions[sources == source])[0])
        return (int(epochs[0]) if len(epochs) == 1 else None), None

    def next_steps(self, step: int, slices: I64, samples: I64, ranks: tuple[int, int], world_size: int) -> I64 | None:
        """About when samples are read in the epoch after that of run step `step`, int64 [K]; None in a mixture.

        `NEVER` for those that no rank in [start, stop) reads, or that the run does not reach.
        """
        end = None if self.mixture is not None else self.epoch_stop(step)
        if end is None:
            return None
        if self.num_steps is not None and end >= self.num_steps:
            return np.full(len(slices), NEVER)
        return self._next_steps(end, slices, samples, ranks, world_size)

    def window_ends(self, step: int, source: int, slices: I64, samples: I64) -> I64:
        """About the first step at which the windows of samples are read to their ends, int64 [K].

        The samples of dataset `source` are some that run step `step` reads, or a step after it in the same epoch.
        """
        order, epoch, taken, size = self._position_at(step, source)
        if not order.shuffle:
            stops = order.sample_ids_of(slices, samples) + 1
        else:
            stops = order.epoch_at(epoch).window_stops(slices, samples)
        return step - np.minimum(0, taken - stops) // size

    def read_steps(self, step: int, source: int, slices: I64, samples: I64) -> I64:
        """About the steps at which samples are read in the epoch of a run step, int64 [K]; a window off at most."""
        order, epoch, taken, size = self._position_at(step, source)
        if not order.shuffle:
            positions = order.sample_ids_of(slices, samples)
        else:
            positions = order.epoch_at(epoch).positions_near(slices, samples)
        return step + (positions - taken) // size

    def _position_at(self, step: int, source: int) -> tuple[Order, int, int, int]:
        """(order, epoch, position in it, samples of a step) of a dataset at a run step."""
        order, progress = self.orders[source], self.progress(step)
        taken, size = progress.samples_taken, int(self.batch_lens(step, step + 1)[0])
        if self.mixture is None:
            return order, progress.epoch, taken, size
        sources, positions = self.mixture.locate(taken, taken + size)
        positions = positions[sources == source]
        if not len(positions):
            return order, 0, NEVER, 1
        epochs, within = order.passes(positions[:1])
        return order, int(epochs[0]), int(within[0]), len(positions)

    def _next_steps(self, end: int, slices: I64, samples: I64, ranks: tuple[int, int], world_size: int) -> I64:
        order, size = self.orders[0], int(self.batch_lens(end, end + 1)[0])
        epoch = self.progress(end).epoch
        if not order.shuffle:
            return end + order.sample_ids_of(slices, samples) // size
        positions = order.epoch_at(epoch).positions_near(slices, samples)
        steps: I64 = end + positions // size
        if order.num_lanes % size == 0 and ranks != (0, world_size):
            slots = positions % size
            rank = ((slots + 1) * world_size - 1) // size
            steps = np.where((rank >= ranks[0]) & (rank < ranks[1]), steps, NEVER)
        return steps

    def progress_table(self, start: int, stop: int) -> tuple[I64, I64, I64]:
        parts: list[I64] = [np.empty((3, 0), np.int64)]
        for segment in self._segments(start, stop):
            turn = np.arange(segment.num_steps, dtype=np.int64)
            before = segment.before
            epochs = np.full_like(turn, before.epoch)
            parts.append(np.stack([epochs, before.step_in_epoch + turn, before.samples_taken + segment.size * turn]))
        epochs, steps, taken = np.concatenate(parts, axis=1)
        return epochs, steps, taken

    def batch_lens(self, start: int, stop: int) -> I64:
        return _joined([np.full(segment.num_steps, segment.size, np.int64) for segment in self._segments(start, stop)])

    def steps(self, start: int, stop: int, rank: int, world_size: int) -> Steps:
        """A rank's samples of run steps [start, stop). Cheapest for some thousand samples at once.

        Concatenated by rank, the parts of a step are its global batch, which does not depend on the world size.
        """
        segments = self._segments(start, stop)
        lengths = [np.zeros(1, np.int64)]
        for segment in segments:
            low, high = part_of(segment.size, rank, world_size)
            lengths.append(np.full(segment.num_steps, high - low, np.int64))
        bounds = np.cumsum(np.concatenate(lengths))
        read = self._single if self.mixture is None else self._mixed
        sources, slices, samples = read(segments, rank, world_size)
        return Steps(start, bounds, sources, slices, samples)

    def uses(self, start: int, stop: int, rank: int, world_size: int) -> tuple[I64, I64, I64]:
        """Distinct (steps, sources, slices) that a rank reads in [start, stop), int64 [K], in order of first use."""
        read = self.steps(start, stop, rank, world_size)
        steps = np.repeat(np.arange(stop - start, dtype=np.int64), np.diff(read.bounds))
        bases = np.cumsum(self._num_slices) - self._num_slices
        use = steps * self._num_slices.sum() + bases[read.sources] + read.slices
        fresh = np.flatnonzero(np.diff(use, prepend=-1))  # Neighbours in a batch are mostly of one lane and slice.
        first = np.zeros(len(fresh), bool)
        first[np.unique(use[fresh], return_index=True)[1]] = True
        rows = fresh[first]
        return steps.take(rows) + start, read.sources.take(rows), read.slices.take(rows)

    def _segments(self, start: int, stop: int) -> list[Segment]:
        check_range(start, stop, self.num_steps)
        return list(self._step_index.segments(start, stop))

    def _single(self, segments: Sequence[Segment], rank: int, world_size: int) -> tuple[I64, I64, I64]:
        order, slices, samples = self.orders[0], [], []
        for segment in segments:
            before = segment.before
            positions = order.shares_of(before.samples_taken, segment.size, segment.num_steps, rank, world_size)
            of_segment = order.samples_at(before.epoch, positions.reshape(-1))
            slices.append(of_segment[0])
            samples.append(of_segment[1])
        all_slices = _joined(slices)
        return np.zeros_like(all_slices), all_slices, _joined(samples)

    def _mixed(self, segments: Sequence[Segment], rank: int, world_size: int) -> tuple[I64, I64, I64]:
        assert self.mixture is not None
        all_sources, all_positions = [], []
        for segment in segments:
            size, per_block = segment.size, max(1, _BLOCK // segment.size)
            low, high = part_of(size, rank, world_size)
            for step in range(0, segment.num_steps, per_block):
                count = min(per_block, segment.num_steps - step)
                taken = segment.before.samples_taken + step * size
                of_batches, positions = self.mixture.locate(taken, taken + count * size)
                turn = np.argsort(self.keys_in_batch(of_batches, positions).reshape(count, size), axis=1, kind="stable")
                chosen = (turn[:, low:high] + size * np.arange(count, dtype=np.int64)[:, None]).reshape(-1)
                all_sources.append(of_batches[chosen])
                all_positions.append(positions[chosen])
        sources, positions = _joined(all_sources), _joined(all_positions)
        slices, samples = np.empty_like(sources), np.empty_like(sources)
        for source, order in enumerate(self.orders):
            mine = np.flatnonzero(sources == source)
            if not len(mine):
                continue
            epochs, within = order.passes(positions[mine])
            for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
                of_epoch = np.flatnonzero(epochs == epoch)
                slices[mine[of_epoch]], samples[mine[of_epoch]] = order.samples_at(epoch, within[of_epoch])
        return sources, slices, samples

    def keys_in_batch(self, sources: I64, positions: I64) -> U16:
        """What a mixture's batches are sorted by: of any number of ranks, each reads few lanes beside its own."""
        keys = np.empty(len(sources), np.uint16)  # 16 bits are sorted by radix.
        for source, order in enumerate(self.orders):
            mine = np.flatnonzero(sources == source)
            keys[mine] = order.places_of(positions[mine])
        return keys

    def _mix(self, weights: Weights) -> MixtureOrder:
        for (step, _), quotas in zip(weights.changes, weights.quotas):
            for source in np.flatnonzero((quotas > 0) & (self._num_samples == 0)).tolist():
                raise UsageError(
                    f"run: expected samples in dataset {source}, which has a weight at step {step}, got none."
                )
        last = self.num_steps
        reached = [step for step, _ in weights.changes if last is None or step < last]
        return MixtureOrder(weights.quotas[: len(reached)], [self.progress(step).samples_taken for step in reached])


class OwnedRun(Run):
    """A `Run` for one rank that owns slices, the same in all epochs: hash sharding.

    Ranks that own unequal numbers of samples take equally many steps: a rank spreads its samples evenly over an epoch's
    S steps, so its batches differ by at most one sample and are at most `batch_size`. The samples of a rank depend on
    the other ranks. The arguments rank and world_size of the methods are unused.

    `order` has this rank's samples: slices of others count 0. `owners` and `counts`, int64 [S], are the rank of each
    slice and its samples: all of them determine the steps of an epoch.
    """

    def __init__(
        self, order: Order, batch_size: int, owners: I64, counts: I64, *, epochs: int | None,
        num_steps: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__([order], BatchSizes.of(batch_size), epochs=epochs)
        self._owners, self._counts = owners, counts
        num_slices = len(order.samples_per_slice)
        self._of_ranks = np.bincount(owners[:num_slices], weights=counts[:num_slices]).astype(np.int64)
        self._per_epoch = -(-int(self._of_ranks.max()) // batch_size)
        limits = [limit for limit in (None if epochs is None else epochs * self._per_epoch, num_steps) if limit]
        self._end = min(limits) if limits else None

    def of(self, order: Order, first_step: int, *, epochs: int | None = None, num_steps: int | None = None) -> Run:
        """See `Run.of`; also of the first slices alone."""
        size = self.batches.largest
        return OwnedRun(order, size, self._owners, self._counts, epochs=epochs, num_steps=num_steps)

    @property
    def num_steps(self) -> int | None:
        """Run steps in all, the same for every rank. None: no end."""
        return self._end

    @property
    def steps_per_epoch(self) -> int:
        """The same for every rank."""
        return self._per_epoch

    def progress(self, step: int) -> RunProgress:
        check_range(step, step, self._end)
        epoch, within = divmod(step, self._per_epoch)
        return RunProgress(epoch, within, within * self.orders[0].num_samples // self._per_epoch)

    def epoch_stop(self, step: int) -> int | None:
        stop = (step // self._per_epoch + 1) * self._per_epoch
        return stop if self._end is None else min(stop, self._end)

    def _position_at(self, step: int, source: int) -> tuple[Order, int, int, int]:
        order, before = self.orders[0], self.progress(step)
        return order, before.epoch, before.samples_taken, max(1, order.num_samples // self._per_epoch)

    def _next_steps(self, end: int, slices: I64, samples: I64, ranks: tuple[int, int], world_size: int) -> I64:
        order = self.orders[0]
        if not order.shuffle:
            positions = order.sample_ids_of(slices, samples)
        else:
            positions = order.epoch_at(end // self._per_epoch).positions_near(slices, samples)
        return end + positions * self._per_epoch // max(1, order.num_samples)

    def progress_table(self, start: int, stop: int) -> tuple[I64, I64, I64]:
        check_range(start, stop, self._end)
        epochs, within = np.divmod(np.arange(start, stop, dtype=np.int64), self._per_epoch)
        return epochs, within, within * self.orders[0].num_samples // self._per_epoch

    def batch_lens(self, start: int, stop: int) -> I64:
        check_range(start, stop, self._end)
        within = np.arange(start, stop, dtype=np.int64)[:, None] % self._per_epoch
        taken = (within + 1) * self._of_ranks // self._per_epoch - within * self._of_ranks // self._per_epoch
        total: I64 = taken.sum(axis=1, dtype=np.int64)
        return total

    def steps(self, start: int, stop: int, rank: int, world_size: int) -> Steps:
        """This rank's samples of run steps [start, stop)."""
        check_range(start, stop, self._end)
        order, num_samples = self.orders[0], self.orders[0].num_samples
        edges = np.arange(start, stop + 1, dtype=np.int64)
        epochs, within = np.divmod(edges, self._per_epoch)
        taken = epochs * num_samples + within * num_samples // self._per_epoch
        slices, samples = np.empty((2, int(taken[-1] - taken[0])), np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            low, high = np.clip(taken[[0, -1]] - epoch * num_samples, 0, num_samples).tolist()
            into = slice(epoch * num_samples + low - int(taken[0]), epoch * num_samples + high - int(taken[0]))
            slices[into], samples[into] = order.samples_at(epoch, np.arange(low, high, dtype=np.int64))
        return Steps(start, taken - taken[0], np.zeros_like(slices), slices, samples)


def _joined(parts: list[I64]) -> I64:
    if not parts:
        return np.empty(0, np.int64)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def assign_owners(hashes: U8, workers: Sequence[str], slack: float | None = None) -> I64:
    """The worker that owns each slice, int64 [S], values in [0, W): rendezvous hashing with bounded loads.

    The worker with the highest score of its name and the slice's hash owns the slice. If workers join or leave, few
    slices move; appended data moves none. With `slack` no worker owns more than (1 + slack) times the mean, rounded up
    to a whole slice: a slice whose best worker is full goes to its next best, and a few more slices then move.

    `hashes` are uint8 [S, 32], the slices' sha256; equal hashes have the same owner. The names of `workers`
    decide, not their order; each name occurs once. `slack` is at least 0; None for no bound.

    Cost: O(S W), 10 ns a pair; memory O(S + W), with slack O(W) for each slice that is rejected.

    Sources: Thaler and Ravishankar 1998 (highest random weight); Mirrokni, Thorup and Zadimoghaddam 2018 (bounded
    loads); Gale and Shapley 1962: as a slice's score and a worker's are the same number, there is one stable matching.
    """
    if not workers or len(set(workers)) != len(workers):
        raise UsageError(f"rendezvous: expected distinct names of workers, got {list(workers)[:8]}.")
    if slack is not None and not 0 <= slack < math.inf:
        raise UsageError(f"rendezvous: expected slack >= 0, got {slack!r}.")
    words, back = np.unique(np.ascontiguousarray(hashes[:, :8]).view("<u8").reshape(-1), return_inverse=True)
    keys = [derive_key(0, "home", name) for name in workers]
    owners, scores = _best(words, keys, None)
    if slack is not None:
        _bound(words, keys, owners, scores, math.ceil((1 + slack) * len(words) / len(keys)))
    return owners[back]


def _best(words: U64, keys: Sequence[bytes], below: U64 | None) -> tuple[I64, U64]:
    """For each slice the worker of the highest score (below a bound), and that score; 0 where no worker remains."""
    owners, best = np.full(len(words), -1, np.int64), np.zeros(len(words), np.uint64)
    for start in range(0, len(words), _SCORES):
        part = slice(start, start + _SCORES)
        for index, key in enumerate(keys):
            scores = random_words(key, words[part].copy())
            wins = scores > best[part]
            if below is not None:
                wins &= scores < below[part]
            owners[part][wins], best[part][wins] = index, scores[wins]
    return owners, best


def _bound(words: U64, keys: Sequence[bytes], owners: I64, scores: U64, max_slices: int) -> None:
    """Deferred acceptance, in place: a worker with more than `max_slices` rejects those of the lowest scores."""
    while True:
        turn = np.lexsort((scores, owners))[::-1]  # By worker, highest score first.
        owner_of = owners[turn]
        rank_of_slice = np.arange(len(owner_of)) - np.searchsorted(-owner_of, -owner_of, side="left")
        rejected = turn[rank_of_slice >= max_slices]
        if not len(rejected):
            return
        owners[rejected], scores[rejected] = _best(words[rejected], keys, scores[rejected])
