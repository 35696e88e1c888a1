"""Which chunks stay in the cache, and until when: those of plans, then the rest of the order's open windows.

When its window is read, a chunk may be evicted; the cache is told in which step of the next epoch it is read again, so
that it evicts what is read latest. Not safe for threads.
"""

import heapq
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from forebay.arrays import BOOL, I64
from forebay.fetch.cache import ChunkCache
from forebay.fetch.chunk_file import ABSENT
from forebay.fetch.needs import ChunkGroup, ChunkTable, PlanNeeds
from forebay.order.run import NEVER, Run


class ChunkPins:
    """The pins of chunks whose plans were released. `ranks` [first, stop) are those of this node."""

    def __init__(
        self, table: ChunkTable, run: Run, ranks: tuple[int, int], world_size: int
    ) -> None:  # fmt: skip
        self.cache: ChunkCache | None = None
        self.drops_read = False  # What was unpinned goes at once.
        self._table, self._run = table, run
        self._ranks, self._world_size = ranks, world_size
        self._counts = np.concatenate([order.samples_per_slice for order in run.orders])
        self._lingering: list[tuple[int, int, int, ChunkGroup]] = []  # A heap: until which step, number, plan, chunks.
        self._num_lingered = 0

    def __bool__(self) -> bool:
        return bool(self._lingering)

    def forget(self) -> None:
        """In a child after a fork: the pins are the parent's."""
        self._lingering, self.cache = [], None

    def linger(self, plan: PlanNeeds) -> None:
        """Leave a plan's chunks pinned until the windows are read that they lie in."""
        groups = [group for group in plan.groups if group.entry is not None]
        if not groups:
            return
        sizes = [len(group.chunks) for group in groups]
        keys = np.repeat([group.key for group in groups], sizes)
        until = self.window_ends(plan.first_step, keys, np.concatenate([group.chunks for group in groups]))
        for group, of_group in zip(groups, np.split(until, np.cumsum(sizes)[:-1])):
            self.keep(plan.first_step, group, group.chunks, of_group)

    def keep(self, step: int, group: ChunkGroup, chunks: I64, until: I64) -> None:
        """Leave pinned chunks of a group, read at `step` or later, pinned until `until`."""
        for end in np.unique(until).tolist():
            self._num_lingered += 1
            part = ChunkGroup(group.key, chunks[until == end], group.first_steps, group.entry)
            heapq.heappush(self._lingering, (end, self._num_lingered, step, part))

    def window_ends(self, step: int, keys: I64, chunks: I64) -> I64:
        """The step at which all of the windows is read that each chunk lies in, about."""
        # At both edges of a chunk: a window may end in it.
        edges = np.concatenate([chunks, chunks + 1])
        stops = self._of_chunks(self._run.window_ends, step, np.concatenate([keys, keys]), edges)
        stop: I64 = np.maximum(step, stops.reshape(2, -1).max(axis=0))
        return stop

    def _of_chunks(self, read: Callable[[int, int, I64, I64], I64], step: int, keys: I64, chunks: I64) -> I64:
        """`read` (step, dataset, slices, samples) of the sample at the beginning of each chunk."""
        sources = self._table.dataset_indexes(keys)
        samples, result = self._samples_at(keys, chunks), np.empty(len(keys), np.int64)
        for source in np.unique(sources).tolist():
            chosen = np.flatnonzero(sources == source)
            result[chosen] = read(step, source, keys[chosen] - self._table.first_key[source], samples[chosen])
        return result

    def unpin(self, step: int) -> None:
        """Unpin the chunks of released plans whose windows end at `step` at the latest."""
        read: dict[int, list[ChunkGroup]] = {}  # By the first step of their plan.
        while self._lingering and self._lingering[0][0] <= step:
            _, _, first_step, group = heapq.heappop(self._lingering)
            read.setdefault(first_step, []).append(group)
        if self.cache is not None:
            for first_step, groups in read.items():
                pins = [(group.entry, group.chunks) for group in groups if group.entry is not None]
                self.cache.unpin(pins, self._next_uses(first_step, groups))
                if self.drops_read:
                    self.cache.drop(pins)

    def _next_uses(self, step: int, groups: Sequence[ChunkGroup]) -> Sequence[int] | None:
        """When the first chunk of each group is read in the epoch after that of a step, about; None: unknown."""
        keys = np.array([group.key for group in groups], np.int64)
        samples = self._samples_at(keys, np.array([int(group.chunks[0]) for group in groups], np.int64))
        steps = self._run.next_steps(step, keys, samples, self._ranks, self._world_size)
        return None if steps is None else steps.tolist()

    def _samples_at(self, keys: I64, chunks: I64) -> I64:
        """The sample at the beginning of each chunk, as if all of a slice's had one size."""
        table, counts = self._table, self._counts[keys]
        before = np.where(table.token_bytes[keys] > 0, table.token_starts[keys], 0)
        places = chunks * table.chunk_bytes[keys] - before
        samples: I64 = places * counts // np.maximum(1, table.num_bytes[keys] - before)
        samples = np.maximum(0, np.minimum(samples, counts - 1))
        return samples

    def extend(self, plan: PlanNeeds, group: ChunkGroup, chunk: int, limit: int, until_step: int) -> I64:
        """A chunk and its absent neighbours, `limit` in all, that are pinned or read until a step; all pinned then."""
        entry = group.entry
        assert entry is not None and self.cache is not None
        if limit == 1:
            return np.array([chunk])
        near = np.arange(max(0, chunk - limit + 1), min(chunk + limit, entry.layout.num_chunks))
        index, keys = int(np.searchsorted(near, chunk)), np.full(len(near), group.key)
        until = self.window_ends(plan.first_step, keys, near)
        read_steps = partial(self._run.read_steps, ranks=self._ranks, world_size=self._world_size)
        steps = self._of_chunks(read_steps, plan.first_step, keys, near)
        is_open = (until > plan.first_step) & (steps < NEVER)  # Else another rank reads it, or its window was read.
        is_soon = (steps <= until_step) & (until > plan.next_step) | (until == until[index])
        is_required = (entry.refs[near] > 0) | is_open & is_soon
        is_required |= until_step == NEVER
        is_required &= entry.marks[near] == ABSENT
        is_required[index] = True
        after = min(_count_true(is_required[index:]), limit)
        before = min(_count_true(is_required[:index][::-1]), limit - after)
        run = slice(index - before, index + after)
        is_new = entry.refs[near[run]] == 0
        if is_new.any():
            self.cache.pin([(entry, near[run][is_new])])
            self.keep(plan.first_step, group, near[run][is_new], until[run][is_new])
        chosen: I64 = near[run]
        return chosen


def _count_true(flags: BOOL) -> int:
    """How many are true before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())
