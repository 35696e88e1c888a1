"""The members of a swarm as arrays, one row each: their slices, uploads and speeds; and the downloads between them.

Bits are laid out [slices / 8, rows]: the members that have a slice are read as one contiguous byte each (10 KB for
10,000), the slices of a member in strides. The operating system allocates only memory that was written to.
"""

import re
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ProtocolError, UsageError

MAX_RANGES = 200_000


def format_ranges(indexes: NDArray[np.int64]) -> str:
    """Rising indexes as text like `0-15,17`; "" for none."""
    if len(indexes) == 0:
        return ""
    edges = np.flatnonzero(np.diff(indexes) != 1)
    first, last = indexes[np.concatenate([[0], edges + 1])], indexes[np.concatenate([edges, [len(indexes) - 1]])]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first.tolist(), last.tolist()))


def parse_ranges(text: object, stop: int) -> NDArray[np.int64]:
    """The indexes in [0, stop) of a text of `format_ranges`, rising. Costs some 0.5 us a range."""

    def wrong(expected: str) -> ProtocolError:
        return ProtocolError(f"slices: expected {expected}, got {str(text)[:80]!r}")

    if not isinstance(text, str) or not text.isascii():
        raise wrong("ranges like 0-15,17")
    if not text:
        return np.empty(0, np.int64)
    if text.count(",") >= min(stop, MAX_RANGES):
        raise wrong(f"at most {min(stop, MAX_RANGES)} ranges")
    if not re.fullmatch(r"\d{1,9}(-\d{1,9})?(,\d{1,9}(-\d{1,9})?)*", text):
        raise wrong("ranges like 0-15,17")
    pairs = [(int(a), int(b or a)) for a, b in re.findall(r"(\d+)(?:-(\d+))?", text)]
    first, last = np.array(pairs, np.int64).T
    if (first > last).any() or (first[1:] <= last[:-1]).any() or last[-1] >= stop:
        raise wrong(f"ranges that rise within [0, {stop})")
    counts = last - first + 1
    offsets = np.repeat(first - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    return np.asarray(offsets + np.arange(int(counts.sum())), np.int64)


_FIRST_ROWS = 64
_NEW_WEIGHT = 0.3


class Members:
    """Rows by peer id; a row is reused after its member left. All arrays are [rows] except `copies`.

    `gives`: it serves slices. `is_origin`: it has all. `uploads` and `slots`: how many it uploads now, and may.
    `failures`: in a row, since its last message.
    """

    def __init__(self, num_slices: int) -> None:
        self.num_slices = num_slices
        self.ids: list[str] = []  # "" for a free row
        self.copies = np.zeros(num_slices, np.int32)  # [num_slices], members that have each slice
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._bits = np.zeros(((num_slices + 7) // 8, 0), np.uint8)
        self.gives = self.is_origin = np.zeros(0, np.bool_)
        self.uploads = self.slots = self.failures = np.zeros(0, np.int32)
        self._seen_at = np.zeros(0)
        self._speed = np.zeros(0)
        self._mean_speed: float | None = None  # None: to be computed again
        self._grow(_FIRST_ROWS)

    def row(self, peer_id: str) -> int:
        """The row of a member."""
        return self._rows[peer_id]

    def add(self, peer_id: str, *, is_origin: bool, gives: bool) -> None:
        """Add a member without slices."""
        if not self._free:
            self._grow(2 * len(self.ids))
        row = self._free.pop()
        self.ids[row] = peer_id
        self._rows[peer_id] = row
        self.is_origin[row], self.gives[row] = is_origin, gives
        self.uploads[row] = self.failures[row] = 0
        self._speed[row] = np.nan

    def remove(self, peer_id: str) -> None:
        """Remove a member and free its row."""
        row = self._rows.pop(peer_id)
        self._write(row, np.zeros(self.num_slices, np.bool_))
        self.ids[row] = ""
        self.is_origin[row] = self.gives[row] = False
        self.slots[row] = 0
        self._speed[row] = np.nan
        self._mean_speed = None
        self._free.append(row)

    def touch(self, peer_id: str, now: float) -> None:
        """The member sent a message."""
        row = self._rows[peer_id]
        self._seen_at[row] = now
        self.failures[row] = 0

    def silent_since(self, time_s: float) -> list[int]:
        """Rows of the members that sent nothing since a time."""
        return [row for row in np.flatnonzero(self._seen_at < time_s).tolist() if self.ids[row]]

    def set_all(self, peer_id: str, have: NDArray[np.bool_]) -> None:
        """The member has exactly these slices."""
        if have.shape != (self.num_slices,):
            raise UsageError(f"swarm: expected flags of {self.num_slices} slices, got {have.shape}")
        self._write(self._rows[peer_id], have)

    def set(self, peer_id: str, index: int, value: bool) -> None:
        """The member has one slice, or not."""
        byte, bit = (index >> 3, self._rows[peer_id]), np.uint8(1 << (index & 7))
        if bool(self._bits[byte] & bit) != value:
            self._bits[byte] ^= bit
            self.copies[index] += 1 if value else -1

    def clear(self, peer_id: str, indices: NDArray[np.int64]) -> None:
        """The member has none of these slices."""
        bits = self._bits[indices >> 3, self._rows[peer_id]] >> (indices & 7).astype(np.uint8) & 1
        for index in indices[bits.astype(np.bool_)].tolist():
            self.set(peer_id, index, False)

    def holders_of(self, index: int) -> NDArray[np.bool_]:
        """[rows] flags of the members that have a slice, without origins."""
        flags: NDArray[np.bool_] = (self._bits[index >> 3] & np.uint8(1 << (index & 7))) != 0
        return flags

    def slices_of(self, peer_id: str) -> NDArray[np.bool_]:
        """[num_slices] flags of the slices of a member."""
        column = np.ascontiguousarray(self._bits[:, self._rows[peer_id]])
        return np.unpackbits(column, count=self.num_slices, bitorder="little").astype(np.bool_)

    def by_load(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows by the end of one more upload, the soonest first; then by number."""
        if len(rows) < 2:
            return rows
        durations = (self.uploads[rows] + 1) / self._speeds_of(self._speed[rows])
        return rows[np.lexsort((rows, durations))]

    def gave(self, peer_id: str, took_s: float) -> None:
        """The member uploaded a slice in `took_s` seconds."""
        row = self._rows[peer_id]
        speed = max(1, int(self.uploads[row])) / took_s
        before = self._speed[row]
        self._speed[row] = speed if np.isnan(before) else before + _NEW_WEIGHT * (speed - before)
        self._mean_speed = None
        self.failures[row] = 0

    def _speeds_of(self, measured: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._mean_speed is None:
            speeds = self._speed[~np.isnan(self._speed)]
            self._mean_speed = float(speeds.mean()) if len(speeds) else 1.0
        return np.where(np.isnan(measured), self._mean_speed, measured)

    def _write(self, row: int, have: NDArray[np.bool_]) -> None:
        new = np.packbits(have, bitorder="little")
        old = self._bits[:, row].copy()
        changed = np.flatnonzero(new != old)
        if not len(changed):
            return
        self._bits[changed, row] = new[changed]
        slices = (changed[:, None] * 8 + np.arange(8)).ravel()
        was, now = (np.unpackbits(x[changed], bitorder="little").astype(np.int32) for x in (old, new))
        inside = slices < self.num_slices
        self.copies[slices[inside]] += (now - was)[inside]

    def _grow(self, num_rows: int) -> None:
        before = len(self.ids)
        bits = np.zeros((self._bits.shape[0], num_rows), np.uint8)
        bits[:, :before] = self._bits
        self._bits = bits
        more = num_rows - before
        for name in ("gives", "is_origin", "uploads", "slots", "failures", "_seen_at", "_speed"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(more, old.dtype)]))
        self._speed[before:] = np.nan
        self.ids += [""] * more
        self._free = list(range(num_rows - 1, before - 1, -1))


class Offers:
    """The slices of the members that an asker may be sent to (`willing`, [rows]). Valid until the swarm changes."""

    def __init__(self, members: Members, willing: NDArray[np.bool_]) -> None:
        self._members = members
        self._willing = willing
        self.is_all = bool((willing & members.is_origin).any())  # one is an origin, which has every slice

    def includes(self, index: int) -> bool:
        """Whether one of these members has a slice."""
        return self.is_all or bool((self._members.holders_of(index) & self._willing).any())

    def copied(self) -> NDArray[np.bool_]:
        """[num_slices] flags of what non-origins have; without an origin `includes` is false of all others."""
        return self._members.copies > 0


Pair = tuple[str, int]  # (asker, slice)


@dataclass(frozen=True)
class Download:
    """A download of a slice by an asker."""

    holder: str
    since: float
    passed_on: bool  # the asker will serve it to others


class Downloads:
    """The active downloads by asker and slice, the oldest first."""

    def __init__(self, num_slices: int) -> None:
        self.coming = np.zeros(num_slices, np.int32)  # of each slice, by askers that serve it to others
        self.usual_s = 0.0  # moving average of durations; 0.0: unknown
        self._downloads: OrderedDict[Pair, Download] = OrderedDict()
        self._of: dict[str, set[Pair]] = {}  # from or to a member

    def __len__(self) -> int:
        return len(self._downloads)

    def get(self, pair: Pair) -> Download | None:
        """The download of a slice by an asker; None if there is none."""
        return self._downloads.get(pair)

    def of(self, member: str) -> list[Pair]:
        """The downloads from or by a member."""
        return list(self._of.get(member, ()))

    def slices_of(self, asker: str) -> list[int]:
        """The slices that an asker downloads."""
        return [index for who, index in self._of.get(asker, ()) if who == asker]

    def oldest(self) -> tuple[Pair, Download] | None:
        """The oldest download."""
        return next(iter(self._downloads.items()), None)

    def start(self, pair: Pair, download: Download) -> None:
        """Start a download; there was none of this asker and slice."""
        asker, index = pair
        self._downloads[pair] = download
        for member in (asker, download.holder):
            self._of.setdefault(member, set()).add(pair)
        self.coming[index] += download.passed_on

    def end(self, pair: Pair) -> Download | None:
        """End a download; None if there was none."""
        download = self._downloads.pop(pair, None)
        if download is None:
            return None
        for member in {pair[0], download.holder}:
            pairs = self._of[member]
            pairs.discard(pair)
            if not pairs:
                del self._of[member]
        self.coming[pair[1]] -= download.passed_on
        return download

    def add_duration(self, seconds: float) -> None:
        """Add the duration of a successful download to `usual_s`."""
        self.usual_s = seconds if not self.usual_s else self.usual_s + 0.1 * (seconds - self.usual_s)
