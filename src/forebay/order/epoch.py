"""One epoch: its slices in their order, and the sample at each position. Cost: 16 bytes a slice, 0.2 us a sample.

The samples are cut into C consecutive lanes; position t is the next sample of lane t mod C; inside each window of a
lane the samples are permuted by a key of their own. Lane l begins l / C into a window, so that lanes reach new windows
in turn.
"""

from dataclasses import dataclass

import numpy as np

from forebay.arrays import I64
from forebay.order.bijection import permute_each, subkeys

_CHUNK = 1 << 13  # Positions at once: 64 KiB an array, small enough for malloc to reuse and for the CPU cache.


@dataclass(frozen=True)
class Lanes:
    """The shape of an epoch: how many samples lie in each lane. Pure arithmetic.

    A lane's start counts samples of the epoch's sequence; windows, their starts and their stops count in their lanes.
    """

    num_samples: int
    num_lanes: int
    window: int

    def start(self, lane: I64) -> I64:
        turns, rest = divmod(self.num_samples, self.num_lanes)
        return lane * turns + np.minimum(lane, rest)

    def length(self, lane: I64) -> I64:
        turns, rest = divmod(self.num_samples, self.num_lanes)
        return turns + (lane < rest)

    def window_of(self, lane: I64, index: I64) -> I64:
        return (index + self._phase(lane)) // self.window

    def window_start(self, lane: I64, window: I64) -> I64:
        start: I64 = np.maximum(0, window * self.window - self._phase(lane))
        return start

    def window_stop(self, lane: I64, window: I64) -> I64:
        stop: I64 = np.minimum(self.length(lane), (window + 1) * self.window - self._phase(lane))
        return stop

    def _phase(self, lane: I64) -> I64:
        """The offset within a window at which each lane begins; 0 if each lane is one window."""
        if self.window * self.num_lanes >= self.num_samples:
            return np.zeros_like(lane)
        turns, rest = divmod(self.window, self.num_lanes)
        return lane * turns + lane * rest // self.num_lanes

    def split(self, positions: I64) -> tuple[I64, I64]:
        """Positions to (lane, index in the lane)."""
        turn = positions // self.num_lanes
        return positions - turn * self.num_lanes, turn


class Epoch:
    """The samples of one epoch by position. Safe to share between threads.

    `slices` are int64 [K], the indexes of those that have samples, in the epoch's order; `counts` int64 [K] the samples
    of each. `window_key` has 16 bytes.
    """

    def __init__(self, slices: I64, counts: I64, lanes: Lanes, window_key: bytes) -> None:
        self.slices = slices
        self.lanes = lanes
        self._bounds = np.zeros(len(slices) + 1, np.int64)  # Place p has the sequence [bounds[p], bounds[p + 1]).
        np.cumsum(counts, out=self._bounds[1:])
        self._window_key = window_key
        self._places_of: I64 | None = None  # By slice.

    def read(self, positions: I64) -> tuple[I64, I64]:
        """(slice index, sample within the slice) at positions of the epoch, each int64 [K]."""
        if 0 < len(positions) <= _CHUNK:
            places, samples = self._read_lanes(positions)
            return self.slices.take(places), samples
        places, samples = np.empty_like(positions), np.empty_like(positions)
        for start in range(0, len(positions), _CHUNK):
            stop = start + _CHUNK
            places[start:stop], samples[start:stop] = self._read_lanes(positions[start:stop])
        return self.slices.take(places), samples

    def positions_near(self, slices: I64, samples: I64) -> I64:
        """About where samples are in the epoch, int64 [K]: a window off at most."""
        lane, index = self._in_lanes(slices, samples)
        positions: I64 = index * self.lanes.num_lanes + lane
        return positions

    def window_stops(self, slices: I64, samples: I64) -> I64:
        """The position after the last sample of each sample's window, int64 [K]."""
        lane, index = self._in_lanes(slices, samples)
        stop = self.lanes.window_stop(lane, self.lanes.window_of(lane, index))
        positions: I64 = (stop - 1) * self.lanes.num_lanes + lane + 1
        return positions

    def _in_lanes(self, slices: I64, samples: I64) -> tuple[I64, I64]:
        """(lane, index in the lane) before the permutation in windows."""
        if self._places_of is None:
            self._places_of = np.full(int(self.slices.max(initial=0)) + 1, -1, np.int64)
            self._places_of[self.slices] = np.arange(len(self.slices))
        sequence = self._bounds[self._places_of[slices]] + samples
        turns, rest = divmod(self.lanes.num_samples, self.lanes.num_lanes)
        long = rest * (turns + 1)  # Samples of the lanes that have one more.
        lane = np.where(sequence < long, sequence // (turns + 1), rest + (sequence - long) // max(1, turns))
        return lane, sequence - self.lanes.start(lane)

    def _read_lanes(self, positions: I64) -> tuple[I64, I64]:
        lanes = self.lanes
        lane, index = lanes.split(positions)
        window = lanes.window_of(lane, index)
        lows = lanes.window_start(lane, window)
        sizes = lanes.window_stop(lane, window) - lows
        keys = subkeys(self._window_key, lane.view(np.uint64), window.view(np.uint64))
        permuted = permute_each((index - lows).view(np.uint64), sizes.view(np.uint64), keys)
        sequence = lanes.start(lane) + lows + permuted.view(np.int64)
        places = np.searchsorted(self._bounds, sequence, side="right") - 1
        return places, sequence - self._bounds[places]
