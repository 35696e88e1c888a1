"""One epoch: its slices in their order, and the sample at each position.

A head of h samples of the first slice comes first (h is 0 in all epochs but the first). The other samples are cut into
C consecutive lanes; position t >= h is the next sample of lane t mod C; inside each window of a lane the samples are
permuted by a key of their own. Lane l begins l / C into a window, so that lanes reach their next windows, and new
slices, in turn instead of all at one step.

Costs: 16 bytes a slice, and tables of the windows read last: for C lanes with windows of
w samples at most 64 C sqrt(w) bytes (1 MB for 64 lanes of 64 000), for up to four groups of windows. With the tables
a sample is found in about 40 ns, in blocks of some thousands; without, in about 150.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.order.bijection import (
    Tables,
    permute,
    permute_each,
    permute_tabulated,
    subkeys,
    table_entries,
    tabulate,
)

U64 = NDArray[np.uint64]
I64 = NDArray[np.int64]

_CHUNK = 1 << 13  # Positions at once: 64 KiB an array, small enough for malloc to reuse and for the CPU cache.
_MOST_ENTRIES = 1 << 20  # Of the tables of one group of windows: 4 MiB.
_MOST_SIZE = 1 << 31  # Of a window that has tables.
_ENTRIES_PER_SAMPLE = 6  # Computing a table entry costs a sixth of what it saves per sample.
_MAX_WINDOW_GROUPS = 4  # A reader and a prefetcher, each at the border of two groups.


@dataclass(frozen=True)
class Lanes:
    """The shape of an epoch: how many samples lie in the head and in each lane. Pure arithmetic."""

    num_samples: int
    head: int
    num_lanes: int
    window: int

    def start(self, lane: I64) -> I64:
        """The first sample of lanes, counted in the epoch's sequence."""
        return self.head + self._before(self.num_samples, lane) - self._before(self.head, lane)

    def taken(self, position: int, lane: I64) -> I64:
        """How many samples of lanes come before a position of the epoch."""
        return self._share(max(position, self.head), lane) - self._share(self.head, lane)

    def length(self, lane: I64) -> I64:
        """Samples of lanes."""
        return self.taken(self.num_samples, lane)

    def window_of(self, lane: I64, index: I64) -> I64:
        """The windows, counted in their lanes, in which samples of lanes lie."""
        return (index + self._phase(lane)) // self.window

    def window_start(self, lane: I64, window: I64) -> I64:
        """The first sample, counted in its lane, of windows."""
        start: I64 = np.maximum(0, window * self.window - self._phase(lane))
        return start

    def window_stop(self, lane: I64, window: I64) -> I64:
        """The end (exclusive) of windows, counted in their lanes."""
        stop: I64 = np.minimum(self.length(lane), (window + 1) * self.window - self._phase(lane))
        return stop

    def num_windows(self, lane: I64) -> I64:
        """Windows of lanes; 0 of a lane without samples."""
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
        """How many positions of the head would have belonged to lanes."""
        return self._share(self.head, lane)

    def split(self, positions: I64) -> tuple[I64, I64]:
        """Positions from the head's end on to (lane, index in the lane)."""
        turn = positions // self.num_lanes
        lane = positions - turn * self.num_lanes
        return lane, turn - self._share(self.head, lane) if self.head else turn

    def _share(self, num_positions: int, lane: I64) -> I64:
        """How many of the first positions of an epoch belong to each lane."""
        turns, rest = divmod(num_positions, self.num_lanes)
        return turns + (lane < rest)

    def _before(self, num_positions: int, lane: I64) -> I64:
        turns, rest = divmod(num_positions, self.num_lanes)
        return lane * turns + np.minimum(lane, rest)


@dataclass
class _Windows:
    """G neighbouring windows, lane by lane: all that is needed to read them. Only `asked` and `tables` change."""

    starts: I64  # [G], in the epoch's sequence.
    lows: I64  # [G], in their lanes.
    sizes: U64  # [G], at least 1.
    keys: U64  # [G]
    places: I64  # [P], indexes of the windows' slices in the epoch's order of slices, rising.
    place_starts: I64  # [P], first of each place in the sequence.
    asked: int = 0  # Samples read so far.
    tables: Tables | None = None

    def read(self, index: I64, group: I64) -> tuple[I64, I64]:
        """Indexes within lanes to (place, sample within its slice)."""
        sequence = self.starts.take(group)
        sequence += self._permuted(index - self.lows.take(group), group)
        index_of_place = np.searchsorted(self.place_starts, sequence, side="right")
        index_of_place -= 1
        return self.places.take(index_of_place), sequence - self.place_starts.take(index_of_place)

    def _permuted(self, index: I64, group: I64) -> I64:
        self.asked += len(index)
        tables = self.tables
        if tables is None and self._worth_tables():
            tables = self.tables = tabulate(self.sizes, self.keys)
        if tables is not None:
            return permute_tabulated(index, group, tables)
        return permute_each(index.view(np.uint64), self.sizes[group], self.keys[group]).view(np.int64)

    def _worth_tables(self) -> bool:
        entries = table_entries(self.sizes)
        return entries <= min(_MOST_ENTRIES, _ENTRIES_PER_SAMPLE * self.asked) and int(self.sizes.max()) < _MOST_SIZE


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
        self._windows: dict[tuple[int, int, int, int], _Windows] = {}

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
        lane, index = self.lanes.split(positions)
        window = self.lanes.window_of(lane, index)
        low, high = int(lane.min()), int(lane.max())
        first, last = int(window.min()), int(window.max())
        num_windows = last - first + 1
        if (high - low + 1) * num_windows > max(64, len(positions)):
            return self._read_scattered(lane, index, window)
        group = lane - low
        if num_windows > 1:
            group *= num_windows
            group += window
            group -= first
        return self._open(low, high, first, last).read(index, group)

    def _read_scattered(self, lane: I64, index: I64, window: I64) -> tuple[I64, I64]:
        lows, sizes, keys = self._shape(lane, window)
        offset = index - lows
        sequence = self.lanes.start(lane) + lows + permute_each(offset.view(np.uint64), sizes, keys).view(np.int64)
        places = self._places(sequence)
        return places, sequence - self._bounds[places]

    def _places(self, sequence: I64 | list[int]) -> I64:
        return np.searchsorted(self._bounds, sequence, side="right") - 1

    def _shape(self, lane: I64, window: I64) -> tuple[I64, U64, U64]:
        """(first sample in the lane, size, key) of windows; sizes are at least 1, even beyond a lane's end."""
        lows = self.lanes.window_start(lane, window)
        sizes = np.maximum(1, self.lanes.window_stop(lane, window) - lows)
        keys = subkeys(self._window_key, lane.view(np.uint64), window.view(np.uint64))
        return lows, sizes.view(np.uint64), keys

    def _open(self, low: int, high: int, first: int, last: int) -> _Windows:
        """Windows [first, last] of lanes [low, high], lane by lane."""
        key = (low, high, first, last)
        windows = self._windows.get(key)
        if windows is None:
            windows = self._windows_of(low, high, first, last)
            for old in list(self._windows)[: max(0, len(self._windows) + 1 - _MAX_WINDOW_GROUPS)]:
                self._windows.pop(old, None)  # Another thread may have been quicker.
            self._windows[key] = windows
        return windows

    def _windows_of(self, low: int, high: int, first: int, last: int) -> _Windows:
        num_windows = last - first + 1
        lane = np.repeat(np.arange(low, high + 1, dtype=np.int64), num_windows)
        window = np.tile(np.arange(first, last + 1, dtype=np.int64), high - low + 1)
        lows, sizes, keys = self._shape(lane, window)
        starts = self.lanes.start(lane) + lows
        is_used = lows < self.lanes.length(lane)
        from_place = self._places(starts[is_used])
        to_place = self._places((starts + sizes.view(np.int64) - 1)[is_used])
        # Windows follow one another in the sequence, so that places rise; two neighbours may share one.
        counts = to_place - from_place + 1
        skipped = np.cumsum(counts) - counts
        places = np.repeat(from_place - skipped, counts) + np.arange(int(counts.sum()))
        return _Windows(starts, lows, sizes, keys, places, self._bounds[places])
