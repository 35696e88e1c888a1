"""What of an epoch is to be had: slices nobody began, and parts that came back.

Which part a worker gets: a slice that it has cached; then a part that came back; then the next slice in the epoch's
order, a keyed permutation. A slice that another live worker has cached is left to that one while others remain.

Memory: 14 bytes a slice (the order, a bit, a count of who has it) and some 200 a part that came back. Nothing here
looks at all slices at once but `begin`; looking for the next one is done 256 slices at a time, in NumPy.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from forebay.errors import LeaseError
from forebay.order.bijection import derive_key, permute

# Slices, or parts that came back, looked at in one go.
STRIDE = 256
MAX_LOOKED_AT = 64

SampleRange = tuple[int, int, int]  # (slice, start, stop): samples [start, stop) of a slice.


@dataclass
class CachedSlices:
    """The slices that a worker has, int64 rising, and how far they were offered to it in this epoch."""

    indexes: NDArray[np.int64]
    at: int = 0

    def has(self, index: int) -> bool:
        at = int(np.searchsorted(self.indexes, index))
        return at < len(self.indexes) and int(self.indexes[at]) == index


class FreeRanges:
    """The parts of one epoch that nobody holds; `samples` is int64 [S]."""

    def __init__(self, samples: NDArray[np.int64], seed: int) -> None:
        self.samples = samples
        self.seed = seed
        self.cached_by: NDArray[np.int32] = np.zeros(len(samples), np.int32)
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """All samples of another epoch."""
        self.fresh: NDArray[np.bool_] = self.samples > 0
        self.returned: dict[tuple[int, int], int] = {}
        self._starts: dict[int, list[int]] = {}
        index = np.arange(len(self.samples), dtype=np.uint64)
        self._order = permute(index, len(self.samples), derive_key(self.seed, "lease slices", epoch)).astype(np.int64)
        self._cursor = 0
        self._left: deque[int] = deque()

    def give(self, index: int, start: int, stop: int) -> None:
        """A part comes back; it joins its neighbours, if they are here."""
        if start >= stop:
            return
        for other in list(self._starts.get(index, ())):
            end = self.returned[index, other]
            if end == start or other == stop:
                self._forget(index, other)
                start, stop = min(start, other), max(stop, end)
        self.returned[index, start] = stop
        self._starts.setdefault(index, []).append(start)

    def _forget(self, index: int, start: int) -> None:
        del self.returned[index, start]
        starts = self._starts[index]
        starts.remove(start)
        if not starts:
            del self._starts[index]

    def take(self, index: int, start: int, stop: int) -> None:
        """Takes samples out of what is to be had; LeaseError, and nothing taken, if they are not all here."""
        if self.fresh[index]:
            if not 0 <= start < stop <= int(self.samples[index]):
                raise LeaseError(f"slice {index}: it has no samples [{start}, {stop}).")
            self.fresh[index] = False
            self.give(index, 0, start)
            self.give(index, stop, int(self.samples[index]))
            return
        for at in self._starts.get(index, ()):
            end = self.returned[index, at]
            if at <= start < stop <= end:
                self._forget(index, at)
                self.give(index, at, start)
                self.give(index, stop, end)
                return
        raise LeaseError(f"slice {index}: samples [{start}, {stop}) are leased or used.")

    def take_slice(self, index: int) -> list[SampleRange]:
        """Takes all that is here of a slice."""
        if self.fresh[index]:
            self.fresh[index] = False
            return [(index, 0, int(self.samples[index]))]
        found = self.of_slice(index)
        for _, start, _ in found:
            self._forget(index, start)
        return found

    def of_slice(self, index: int) -> list[SampleRange]:
        """What is here of a slice."""
        if self.fresh[index]:
            return [(index, 0, int(self.samples[index]))]
        return [(index, start, self.returned[index, start]) for start in sorted(self._starts.get(index, ()))]

    def choose(
        self, cached: CachedSlices | None, avoided: Callable[[int], bool], offered: NDArray[np.bool_] | None = None
    ) -> SampleRange | None:
        """What this worker should get next; None if there is nothing. The caller takes it.

        Args:
            offered: [S] flags: `avoided` is true of all others that are not cached; None where it is of few.
        """
        index = self._of_the_cached(cached, avoided) if cached is not None else None
        if index is None and self.returned:
            part = self._of_the_returned(cached, avoided)
            if part is not None:
                return part
        if index is None and offered is not None:
            index = self._of_the_offered(offered, avoided)
        elif index is None:
            index = self._next_in_order(avoided)
        if index is None:
            index = self._of_those_left(avoided)
        return None if index is None else (index, 0, int(self.samples[index]))

    def _of_the_cached(self, cached: CachedSlices, avoided: Callable[[int], bool]) -> int | None:
        while cached.at < len(cached.indexes):
            some = cached.indexes[cached.at : cached.at + STRIDE]
            for at in np.flatnonzero(self.fresh[some]).tolist():
                if not avoided(int(some[at])):
                    cached.at += at
                    return int(some[at])
            cached.at += len(some)
        return None

    def _of_the_returned(self, cached: CachedSlices | None, avoided: Callable[[int], bool]) -> SampleRange | None:
        first: SampleRange | None = None
        for looked_at, ((index, start), stop) in enumerate(self.returned.items()):
            if looked_at >= MAX_LOOKED_AT:
                break
            if avoided(index):
                continue
            if cached is None or cached.has(index):
                return index, start, stop
            first = first or (index, start, stop)
        return first

    def _next_in_order(self, avoided: Callable[[int], bool]) -> int | None:
        while self._cursor < len(self._order):
            some = self._order[self._cursor : self._cursor + STRIDE]
            fresh = np.flatnonzero(self.fresh[some])
            held = self.cached_by[some[fresh]] > 0
            if len(fresh) and not held.all():
                first = int(np.argmin(held))
                self._left.extend(some[fresh[:first]].tolist())
                self._cursor += int(fresh[first])
                for at in fresh[first:][~held[first:]].tolist():
                    if not avoided(int(some[at])):
                        return int(some[at])
                return None  # this worker failed on all of them just now: others may have them
            self._left.extend(some[fresh].tolist())
            self._cursor += len(some)
        return None

    def _of_the_offered(self, offered: NDArray[np.bool_], avoided: Callable[[int], bool]) -> int | None:
        """While few can be had: whoever has them cached. A look over all slices, 1 ms for 250,000 of them."""
        some = self._order[(self.fresh & offered)[self._order]]
        return next((index for index in some[:MAX_LOOKED_AT].tolist() if not avoided(index)), None)

    def _of_those_left(self, avoided: Callable[[int], bool]) -> int | None:
        """A slice that somebody else has cached, now that no others remain."""
        while self._left and not self.fresh[self._left[0]]:
            self._left.popleft()
        for index in islice(self._left, MAX_LOOKED_AT):
            if self.fresh[index] and not avoided(index):
                return index
        return None
