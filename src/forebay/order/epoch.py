"""One epoch: its slices in their order, and the sample at each position. Cost: 16 bytes a slice, 0.2 us a sample.

A head of h samples of the first slice comes first (h is 0 in all epochs but the first). The other samples are cut into
C consecutive lanes; position t >= h is the next sample of lane t mod C; inside each window of a lane the samples are
permuted by a key of their own. Lane l begins l / C into a window, so that lanes reach new slices in turn.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.order.bijection import permute, permute_each, subkeys

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_CHUNK = 1 << 13  # Positions at once: 64 KiB an array, small enough for malloc to reuse and for the CPU cache.


@dataclass(frozen=True)
class Lanes:
    """The shape of an epoch: how many samples lie in the head and in each lane. Pure arithmetic.

    A lane's start counts samples of the epoch's sequence; windows, their starts and their stops count in their lanes.
    `taken` are the samples of lanes before a position of the epoch.
    """

    num_samples: int
    head: int
    num_lanes: int
    window: int

    def start(self, lane: I64) -> I64:
        return self.head + self._before(self.num_samples, lane) - self._before(self.head, lane)

    def taken(self, position: int, lane: I64) -> I64:
        return self._share(max(position, self.head), lane) - self._share(self.head, lane)

    def length(self, lane: I64) -> I64:
        return self.taken(self.num_samples, lane)

    def window_of(self, lane: I64, index: I64) -> I64:
        return (index + self._phase(lane)) // self.window

    def window_start(self, lane: I64, window: I64) -> I64:
        start: I64 = np.maximum(0, window * self.window - self._phase(lane))
        return start

    def window_stop(self, lane: I64, window: I64) -> I64:
        stop: I64 = np.minimum(self.length(lane), (window + 1) * self.window - self._phase(lane))
        return stop

    def num_windows(self, lane: I64) -> I64:
        length = self.length(lane)
        counts: I64 = np.where(length > 0, self.window_of(lane, length - 1) + 1, 0)
        return counts

    def _phase(self, lane: I64) -> I64:
        """The offset within a window at which each lane begins; 0 if each lane is one window."""
        if self.window * self.num_lanes >= self.num_samples:
            return np.zeros_like(lane)
        turns, rest = divmod(self.window, self.num_lanes)
        return lane * turns + lane * rest // self.num_lanes

    def in_head(self, lane: I64) -> I64:
        return self._share(self.head, lane)

    def split(self, positions: I64) -> tuple[I64, I64]:
        """Positions from the head's end on to (lane, index in the lane)."""
        turn = positions // self.num_lanes
        lane = positions - turn * self.num_lanes
        return lane, turn - self._share(self.head, lane) if self.head else turn

    def _share(self, num_positions: int, lane: I64) -> I64:
        turns, rest = divmod(num_positions, self.num_lanes)
        return turns + (lane < rest)

    def _before(self, num_positions: int, lane: I64) -> I64:
        turns, rest = divmod(num_positions, self.num_lanes)
        return lane * turns + np.minimum(lane, rest)


class Epoch:
    """The samples of one epoch by position. Safe to share between threads.

    `slices` are int64 [K], the indexes of those that have samples, in the epoch's order; `counts` int64 [K] the samples
    of each. The head of `lanes` lies in the first slice. `window_key` and `head_key` have 16 bytes each.
    """

    def __init__(self, slices: I64, counts: I64, lanes: Lanes, window_key: bytes, head_key: bytes) -> None:
        self.slices = slices
        self.lanes = lanes
        self._bounds = np.zeros(len(slices) + 1, np.int64)  # Place p has the sequence [bounds[p], bounds[p + 1]).
        np.cumsum(counts, out=self._bounds[1:])
        self._window_key = window_key
        self._head_key = head_key

    def read(self, positions: I64) -> tuple[I64, I64]:
        """(slice index, sample within the slice) at positions of the epoch, each int64 [K]."""
        if 0 < len(positions) <= _CHUNK:
            places, samples = self._read_chunk(positions)
            return self.slices.take(places), samples
        places, samples = np.empty_like(positions), np.empty_like(positions)
        for start in range(0, len(positions), _CHUNK):
            stop = start + _CHUNK
            places[start:stop], samples[start:stop] = self._read_chunk(positions[start:stop])
        return self.slices.take(places), samples

    def _read_chunk(self, positions: I64) -> tuple[I64, I64]:
        head = self.lanes.head
        if not head or int(positions.min()) >= head:
            return self._read_lanes(positions)
        places, samples = np.zeros_like(positions), np.empty_like(positions)
        inside = positions < head
        samples[inside] = permute(positions[inside].view(np.uint64), head, self._head_key).view(np.int64)
        if not inside.all():
            places[~inside], samples[~inside] = self._read_lanes(positions[~inside])
        return places, samples

    def places_under(self, starts: I64, stops: I64) -> tuple[I64, I64]:
        """The places, in the order of slices, under each stretch [starts, stops) of the epoch's sequence, int64 [K].

        Returns (places, which stretch each is of), both int64 [P], stretch by stretch.
        """
        first, last = self._places(starts), self._places(stops - 1)
        counts = last - first + 1
        of_stretch = np.repeat(np.arange(len(starts), dtype=np.int64), counts)
        skipped = np.cumsum(counts) - counts
        return np.arange(int(counts.sum()), dtype=np.int64) + (first - skipped)[of_stretch], of_stretch

    def _read_lanes(self, positions: I64) -> tuple[I64, I64]:
        lanes = self.lanes
        lane, index = lanes.split(positions)
        window = lanes.window_of(lane, index)
        lows = lanes.window_start(lane, window)
        sizes = lanes.window_stop(lane, window) - lows
        keys = subkeys(self._window_key, lane.view(np.uint64), window.view(np.uint64))
        permuted = permute_each((index - lows).view(np.uint64), sizes.view(np.uint64), keys)
        sequence = lanes.start(lane) + lows + permuted.view(np.int64)
        places = self._places(sequence)
        return places, sequence - self._bounds[places]

    def _places(self, sequence: I64) -> I64:
        return np.searchsorted(self._bounds, sequence, side="right") - 1
