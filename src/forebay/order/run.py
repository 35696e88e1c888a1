"""A run: which samples of which datasets a rank takes at each run step, over epochs, batch sizes and mixtures.

A run step is the number of global batches since the run began; everything is computed from it, without state. A batch
of one dataset never crosses the end of an epoch. In a mixture each source starts over, in another order, when it is
used up. Hash sharding: `assign_owners` and `OwnedRun`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forebay.arrays import I64, U8, U64
from forebay.base import Json
from forebay.errors import UsageError
from forebay.order.bijection import derive_key, random_words
from forebay.order.mixture import MixtureOrder, Weights
from forebay.order.plan import MAX_LANES, Order, batch_parts, num_streams, part_of, ranks_of
from forebay.order.step_index import BatchSizes, RunProgress, Segment, StepIndex, check_range

NEVER = 1 << 62
_SCORES = 1 << 20  # Scores at once: 8 MiB.


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
    `drop_last` the short last batch of each epoch is left out. `streams` of a mixture, G, follow from the largest batch
    by default.
    """

    def __init__(
        self, orders: Sequence[Order], batches: BatchSizes, *, weights: Weights | None = None, epochs: int | None = 1,
        num_steps: int | None = None, drop_last: bool = False, streams: int | None = None,
    ) -> None:  # fmt: skip
        self.orders = tuple(orders)
        self.batches = batches
        self.weights = weights
        self.drop_last, self.limits = drop_last, Json(epochs=epochs, num_steps=num_steps)
        if len(self.orders) != (1 if weights is None else weights.num_sources):
            actual = "no weights" if weights is None else f"weights of {weights.num_sources}"
            raise UsageError(f"run: expected weights for each of {len(self.orders)} datasets, got {actual}.")
        self.streams = None if weights is None else streams or num_streams(batches.largest)
        self._step_index = StepIndex(**self._steps(), **self.limits, drop_last=drop_last)
        # The dataset of each sample of the run; None for a single dataset.
        self.mixture = None if weights is None else self._mix(weights)

    def _steps(self) -> Json:
        """The batches and the samples of epochs, for `StepIndex`."""
        sizes = [] if self.weights is not None else [(first, of.num_samples) for first, of in self.orders[0].phases]
        return {"batches": self.batches, "num_samples": sizes}

    def of(self, orders: Sequence[Order], streams: int | None = None) -> "Run":
        """The same run with other orders of its datasets."""
        return Run(
            orders, self.batches, weights=self.weights, drop_last=self.drop_last, streams=streams, **self.limits
        )  # fmt: skip

    @property
    def shape(self) -> Json:
        """What decides a step's samples, beside datasets, seed, batches and weights. Plain JSON values."""
        return {
            "shuffle": self.orders[0].shuffle,
            "drop_last": self.drop_last,
            "streams": self.streams,
            "order": [order.shape for order in self.orders],
        }

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

    def unread_epochs(self, step: int) -> list[int]:
        """The first epoch of each dataset of which nothing is read before a run step."""
        before = self.progress(step)
        if self.mixture is None:
            return [before.epoch + (before.step_in_epoch > 0)]
        reached = self.mixture.reached(before.samples_taken)
        return [int(of.passes(n - 1)[0][0]) + 1 for of, n in zip(self.orders, np.split(reached, len(reached)))]

    def epoch_of(self, step: int, source: int) -> tuple[int | None, int | None]:
        """The epoch of a dataset at a run step, and the step at which that epoch ends; None where unknown.

        For a mixture the end is unknown; so is the epoch at a step that reads nothing of the dataset, or two epochs.
        """
        if self.num_steps is not None and step >= self.num_steps:
            return None, None
        if self.mixture is None:
            return self.progress(step).epoch, self.epoch_stop(step)
        taken = self.progress(step).samples_taken
        sources, own = self.mixture.locate(np.arange(taken, taken + self._mean_size(step)))
        epochs = np.unique(self.orders[source].passes(own[sources == source])[0])
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
        epoch = self.progress(end).epoch
        positions = self.orders[0].epoch_order(epoch).positions_near(epoch, slices, samples)
        return self._steps_at(end, 0, positions, ranks, world_size)

    def window_ends(self, step: int, source: int, slices: I64, samples: I64) -> I64:
        """About the first step at which the windows of samples are read to their ends, int64 [K].

        The samples of dataset `source` are some that run step `step` reads, or a step after it in the same epoch.
        """
        last = self._positions_of(step, source, lambda order, epoch: order.window_stops(epoch, slices, samples) - 1)
        return step - np.minimum(0, self.progress(step).samples_taken - last - 1) // self._mean_size(step)

    def read_steps(
        self, step: int, source: int, slices: I64, samples: I64, ranks: tuple[int, int], world_size: int
    ) -> I64:
        """About the steps at which ranks [start, stop) read samples in the epoch of a run step, int64 [K].

        A window off at most; `NEVER` for those of other ranks.
        """
        positions = self._positions_of(step, source, lambda order, epoch: order.positions_near(epoch, slices, samples))
        return self._steps_at(step, self.progress(step).samples_taken, positions, ranks, world_size)

    def _positions_of(self, step: int, source: int, locate: Callable[[Order, int], I64]) -> I64:
        """The positions in the run, or the epoch, that a dataset's order has in the epoch of a run step."""
        before, order = self.progress(step), self.orders[source]
        if self.mixture is None:
            return locate(order, before.epoch)
        epoch = int(order.passes(np.array([self.mixture.next_own(source, before.samples_taken)]))[0][0])
        return self.mixture.positions(source, order.position(epoch) + locate(order, epoch))

    def _mean_size(self, step: int) -> int:
        return self._segments(step, step + 1)[0].size

    def _steps_at(self, step: int, taken: int, positions: I64, ranks: tuple[int, int], world_size: int) -> I64:
        """When ranks read positions of the epoch of a run step before which `taken` were read; `NEVER`: others do."""
        size, before = self._mean_size(step), self.progress(step)
        steps: I64 = step + (positions - taken) // size
        if ranks == (0, world_size):
            return steps
        rank = ranks_of(taken, size, self._cycle(before.epoch), positions, world_size)
        return np.where((rank >= ranks[0]) & (rank < ranks[1]), steps, NEVER)

    def _cycle(self, epoch: int) -> int:
        """Positions that are equal modulo this are neighbours in a batch."""
        return self.streams or self.orders[0].epoch_order(epoch).cycle

    def progress_table(self, start: int, stop: int) -> tuple[I64, I64, I64]:
        parts: list[I64] = [np.empty((3, 0), np.int64)]
        for segment in self._segments(start, stop):
            turn = np.arange(segment.num_steps, dtype=np.int64)
            epochs = np.full_like(turn, segment.before.epoch)
            parts.append(np.stack([epochs, segment.before.step_in_epoch + turn, self._taken(segment)[:-1]]))
        epochs, steps, taken = np.concatenate(parts, axis=1)
        return epochs, steps, taken

    def batch_lens(self, start: int, stop: int) -> I64:
        lengths = [np.diff(self._all_taken(segment), axis=0).sum(axis=1) for segment in self._segments(start, stop)]
        return np.concatenate([np.empty(0, np.int64), *lengths])

    def steps(self, start: int, stop: int, rank: int, world_size: int) -> Steps:
        """A rank's samples of run steps [start, stop). Cheapest for some thousand samples at once.

        Concatenated by rank, the parts of a step are its global batch, which does not depend on the world size.
        """
        part_of(0, rank, world_size)
        lengths, read = [np.zeros(1, np.int64)], [np.empty((3, 0), np.int64)]
        for segment in self._segments(start, stop):
            counts, positions = self._positions(segment, rank, world_size)
            lengths.append(counts)
            read.append(np.stack(self._read(segment.before.epoch, positions)))
        return Steps(start, np.cumsum(np.concatenate(lengths)), *np.concatenate(read, axis=1))

    def _taken(self, segment: Segment) -> I64:
        """The samples of the epoch before each step of a segment and after the last, [n + 1]."""
        return segment.before.samples_taken + segment.size * np.arange(segment.num_steps + 1, dtype=np.int64)

    def _all_taken(self, segment: Segment) -> I64:
        """`_taken`, [n + 1, 1]; where ranks differ, of each, [n + 1, W]."""
        return self._taken(segment)[:, None]

    def _positions(self, segment: Segment, rank: int, world_size: int) -> tuple[I64, I64]:
        """How many samples a rank takes at each step of a segment, [n], and their positions, [K]."""
        before, size = segment.before, segment.size
        cycle = self._cycle(before.epoch)
        positions = batch_parts(before.samples_taken, size, segment.num_steps, cycle, rank, world_size)
        return np.full(segment.num_steps, positions.shape[1]), positions.reshape(-1)

    def _segments(self, start: int, stop: int) -> list[Segment]:
        check_range(start, stop, self.num_steps)
        return list(self._step_index.segments(start, stop))

    def _read(self, epoch: int, positions: I64) -> tuple[I64, I64, I64]:
        """(sources, slices, samples) at positions of an epoch."""
        if self.mixture is None:
            return np.zeros_like(positions), *self.orders[0].samples_at(epoch, positions)
        sources, own = self.mixture.locate(positions)
        slices, samples = np.empty_like(sources), np.empty_like(sources)
        for source, order in enumerate(self.orders):
            mine = np.flatnonzero(sources == source)
            if not len(mine):
                continue
            epochs, within = order.passes(own[mine])
            for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
                of_epoch = np.flatnonzero(epochs == epoch)
                slices[mine[of_epoch]], samples[mine[of_epoch]] = order.samples_at(epoch, within[of_epoch])
        return sources, slices, samples

    def _mix(self, weights: Weights) -> MixtureOrder:
        for (step, _), quotas in zip(weights.changes, weights.quotas):
            for source, order in enumerate(self.orders):
                if quotas[source] and not order.num_samples:
                    raise UsageError(
                        f"run: expected samples in dataset {source}, which has a weight at step {step}, got none."
                    )
        last, streams = self.num_steps, self.streams or 0
        if not 1 <= streams <= MAX_LANES:
            raise UsageError(f"streams of a mixture: expected 1 to {MAX_LANES}, got {streams}.")
        reached = [step for step, _ in weights.changes if last is None or step < last]
        starts = [self.progress(step).samples_taken for step in reached]
        # Where a dataset grew, its samples are divided among the streams as they were at first.
        cycles = [order.epoch_order(0).cycle for order in self.orders]
        return MixtureOrder(weights.quotas[: len(reached)], starts, streams, cycles)


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
        self._owners, self._counts = owners, counts
        super().__init__([order], BatchSizes.of(batch_size), epochs=epochs, num_steps=num_steps)

    def of(self, orders: Sequence[Order], streams: int | None = None) -> Run:
        return OwnedRun(orders[0], self.batches.largest, self._owners, self._counts, **self.limits)

    def _steps(self) -> Json:
        """See `Run._steps`; each step of an epoch counts as one sample."""
        self._tables = []  # One for each dataset that joined: first epoch, order, samples of ranks, S.
        for first, order in self.orders[0].phases:
            stop = len(order.samples_per_slice)
            of_ranks = np.bincount(self._owners[:stop], weights=self._counts[:stop]).astype(np.int64)
            self._tables.append((first, order, of_ranks, -(-int(of_ranks.max()) // self.batches.largest)))
        return {"batches": BatchSizes.of(1), "num_samples": [(first, num) for first, _, _, num in self._tables]}

    def _epoch(self, epoch: int) -> tuple[Order, I64, int]:
        """The order of an epoch, the samples of each rank, int64 [W], and S."""
        return next(table[1:] for table in reversed(self._tables) if table[0] <= epoch)

    @property
    def steps_per_epoch(self) -> int:
        """The same for every rank."""
        return self._epoch(NEVER)[2]

    def progress(self, step: int) -> RunProgress:
        before = super().progress(step)
        order, _, num_steps = self._epoch(before.epoch)
        return replace(before, samples_taken=before.step_in_epoch * order.num_samples // num_steps)

    def _mean_size(self, step: int) -> int:
        order, _, num_steps = self._epoch(self.progress(step).epoch)
        return max(1, order.num_samples // num_steps)

    def _steps_at(self, step: int, taken: int, positions: I64, ranks: tuple[int, int], world_size: int) -> I64:
        order, _, num_steps = self._epoch(self.progress(step).epoch)
        return step + (positions - taken) * num_steps // max(1, order.num_samples)

    def _taken(self, segment: Segment) -> I64:
        order, _, num_steps = self._epoch(segment.before.epoch)
        return _edges(segment) * order.num_samples // num_steps

    def _all_taken(self, segment: Segment) -> I64:
        _, of_ranks, num_steps = self._epoch(segment.before.epoch)
        return _edges(segment)[:, None] * of_ranks // num_steps

    def _positions(self, segment: Segment, rank: int, world_size: int) -> tuple[I64, I64]:
        taken = self._taken(segment)
        return np.diff(taken), np.arange(taken[0], taken[-1])


def _edges(segment: Segment) -> I64:
    """The steps of the epoch, and the one behind them, [n + 1]."""
    return segment.before.step_in_epoch + np.arange(segment.num_steps + 1)


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
