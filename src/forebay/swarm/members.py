"""The members of a swarm as arrays, one row each: what they hold, give and owe. No policy here.

Bits are laid out [slices / 8, rows]: who holds one slice is read in one piece of a byte a member (10 KB for 10,000),
what one member holds by steps. Memory that nobody wrote to is not taken.
"""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ProtocolViolation, UsageError

MAX_RANGES = 200_000


def format_ranges(indexes: NDArray[np.int64]) -> str:
    """The text for rising indexes; empty for none."""
    if len(indexes) == 0:
        return ""
    edges = np.flatnonzero(np.diff(indexes) != 1)
    first, last = indexes[np.concatenate([[0], edges + 1])], indexes[np.concatenate([edges, [len(indexes) - 1]])]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first.tolist(), last.tolist()))


def parse_ranges(text: object, stop: int) -> NDArray[np.int64]:
    """The indexes in [0, stop) that a text names, rising. Costs some 20 ns a character."""

    def wrong(expected: str) -> ProtocolViolation:
        return ProtocolViolation(f"slices: expected {expected}, got {str(text)[:80]!r}")

    if not isinstance(text, str) or not text.isascii():
        raise wrong("ranges like 0-15,17")
    if not text:
        return np.empty(0, np.int64)
    if text.count(",") >= min(stop, MAX_RANGES):
        raise wrong(f"at most {min(stop, MAX_RANGES)} ranges")
    data = np.frombuffer(f"{text},".encode(), np.uint8)
    is_comma, is_dash = data == ord(","), data == ord("-")
    ends = np.flatnonzero(is_comma | is_dash)  # of each number
    begins = np.concatenate([[0], ends[:-1] + 1])
    lengths, follows_dash = ends - begins, np.concatenate([[False], is_dash[ends[:-1]]])
    digits = np.where(is_comma | is_dash, 0, data.astype(np.int64) - ord("0"))
    if lengths.min() < 1 or lengths.max() > 9 or digits.min() < 0 or digits.max() > 9:
        raise wrong("ranges like 0-15,17")
    if (follows_dash & is_dash[ends]).any():  # 1-2-3
        raise wrong("ranges like 0-15,17")
    places = np.maximum(np.repeat(ends, lengths + 1) - np.arange(len(data)) - 1, 0)
    values = np.add.reduceat(digits * 10**places, begins)
    last, first = values[is_comma[ends]], values[~follows_dash]
    if (first > last).any() or (first[1:] <= last[:-1]).any() or last[-1] >= stop:
        raise wrong(f"ranges that rise within [0, {stop})")
    counts = last - first + 1
    offsets = np.repeat(first - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    return np.asarray(offsets + np.arange(int(counts.sum())), np.int64)


_FIRST_ROWS = 64
_NEW_WEIGHT = 0.3


class Members:
    """Rows by peer id; a row is used again when its member left. All arrays are [rows] but for `copies`.

    `gives` and `is_origin` are flags: can be asked; has everything. `uploads` and `slots` are how many it uploads now,
    and may. `failures` are in a row, since it was last heard of. `owed` counts new slices that it got from an origin,
    less those it gave since; never below 0.
    """

    def __init__(self, num_slices: int) -> None:
        self.num_slices = num_slices
        self.ids: list[str] = []  # empty for a free row
        self.copies = np.zeros(num_slices, np.int32)  # [num_slices], members that hold each slice
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._bits = np.zeros(((num_slices + 7) // 8, 0), np.uint8)
        self.gives = self.is_origin = np.zeros(0, np.bool_)
        self.uploads = self.slots = self.failures = self.owed = np.zeros(0, np.int32)
        self._heard_at = np.zeros(0)
        self.asked_at = np.zeros(0)  # when it last wanted something
        self._speed = np.zeros(0)
        self._mean_speed: float | None = None  # None: to be found anew
        self._grow(_FIRST_ROWS)

    def row(self, peer_id: str) -> int:
        """The row of a member."""
        return self._rows[peer_id]

    def add(self, peer_id: str, *, is_origin: bool, gives: bool) -> None:
        """A row for a new member, which holds nothing."""
        if not self._free:
            self._grow(2 * len(self.ids))
        row = self._free.pop()
        self.ids[row] = peer_id
        self._rows[peer_id] = row
        self.is_origin[row], self.gives[row] = is_origin, gives
        self.uploads[row] = self.failures[row] = self.owed[row] = 0
        self._speed[row] = np.nan
        self.asked_at[row] = -np.inf

    def remove(self, peer_id: str) -> None:
        """Give a row back, and forget what its member held."""
        row = self._rows.pop(peer_id)
        self._write(row, np.zeros(self.num_slices, np.bool_))
        self.ids[row] = ""
        self.is_origin[row] = self.gives[row] = False
        self.slots[row] = 0
        self._speed[row] = np.nan
        self._mean_speed = None
        self._free.append(row)

    def heard(self, peer_id: str, now: float) -> None:
        """It lives."""
        row = self._rows[peer_id]
        self._heard_at[row] = now
        self.failures[row] = 0

    def silent_since(self, at: float) -> list[int]:
        """Rows of those who were last heard of before a moment."""
        return [row for row in np.flatnonzero(self._heard_at < at).tolist() if self.ids[row]]

    def hold(self, peer_id: str, have: NDArray[np.bool_]) -> None:
        """It holds exactly these."""
        if have.shape != (self.num_slices,):
            raise UsageError(f"swarm: expected flags of {self.num_slices} slices, got {have.shape}")
        self._write(self._rows[peer_id], have)

    def set(self, peer_id: str, index: int, value: bool) -> None:
        """It holds one slice, or not."""
        at, bit = (index >> 3, self._rows[peer_id]), np.uint8(1 << (index & 7))
        if bool(self._bits[at] & bit) != value:
            self._bits[at] ^= bit
            self.copies[index] += 1 if value else -1

    def clear(self, peer_id: str, indices: NDArray[np.int64]) -> None:
        """It holds none of these."""
        bits = self._bits[indices >> 3, self._rows[peer_id]] >> (indices & 7).astype(np.uint8) & 1
        for index in indices[bits.astype(np.bool_)].tolist():
            self.set(peer_id, index, False)

    def holders_of(self, index: int) -> NDArray[np.bool_]:
        """[rows] who holds a slice; origins are not among them."""
        held: NDArray[np.bool_] = (self._bits[index >> 3] & np.uint8(1 << (index & 7))) != 0
        return held

    def held_by(self, peer_id: str) -> NDArray[np.bool_]:
        """[num_slices] what a member holds."""
        column = np.ascontiguousarray(self._bits[:, self._rows[peer_id]])
        return np.unpackbits(column, count=self.num_slices, bitorder="little").astype(np.bool_)

    def speeds(self) -> NDArray[np.float64]:
        """[rows] slices a second that each gives, all uploads together; where unknown, the mean of the others."""
        return self._speeds_of(self._speed)

    def by_load(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those rows, by when one more upload would be done: the soonest first, then who owes most, then by row."""
        if len(rows) < 2:
            return rows
        ends = (self.uploads[rows] + 1) / self._speeds_of(self._speed[rows])
        return rows[np.lexsort((rows, -self.owed[rows], ends))]

    def gave(self, peer_id: str, took_s: float) -> None:
        """It gave a slice in so long a time."""
        row = self._rows[peer_id]
        speed = max(1, int(self.uploads[row])) / took_s
        before = self._speed[row]
        self._speed[row] = speed if np.isnan(before) else before + _NEW_WEIGHT * (speed - before)
        self._mean_speed = None
        self.failures[row] = 0
        self.owed[row] = max(0, int(self.owed[row]) - 1)

    def _speeds_of(self, measured: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._mean_speed is None:
            known = self._speed[~np.isnan(self._speed)]
            self._mean_speed = float(known.mean()) if len(known) else 1.0
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
        for name in ("gives", "is_origin", "uploads", "slots", "failures", "owed", "_heard_at", "asked_at", "_speed"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(more, old.dtype)]))
        self._speed[before:] = np.nan
        self.ids += [""] * more
        self._free = list(range(num_rows - 1, before - 1, -1))


class Offers:
    """What the `willing` members ([rows] flags) that an asker may be sent to have. Good until the swarm changes."""

    def __init__(self, members: Members, willing: NDArray[np.bool_]) -> None:
        self._members = members
        self._willing = willing
        self.is_all = bool((willing & members.is_origin).any())  # an origin, which has every slice, is among them

    def includes(self, index: int) -> bool:
        """Whether one of them has a slice."""
        return self.is_all or bool((self._members.holders_of(index) & self._willing).any())

    def copied(self) -> NDArray[np.bool_]:
        """[num_slices] flags of what non-origins have; without an origin `includes` is false of all others."""
        return self._members.copies > 0


Pair = tuple[str, int]  # (asker, slice)


@dataclass(frozen=True)
class Download:
    """A slice on its way from a holder to an asker."""

    holder: str
    since: float
    fresh: bool  # it comes from an origin
    passed_on: bool  # the asker will give it to others


class Downloads:
    """Downloads by asker and slice, the oldest first."""

    def __init__(self, num_slices: int) -> None:
        self.coming = np.zeros(num_slices, np.int32)  # of each slice, to somebody who passes it on
        self.usual_s = 0.0  # how long one takes, the last ones weighing most; 0.0: not known
        self._downloads: OrderedDict[Pair, Download] = OrderedDict()
        self._of: dict[str, set[Pair]] = {}  # from or to a member

    def __len__(self) -> int:
        return len(self._downloads)

    def get(self, pair: Pair) -> Download | None:
        """The download of a slice by an asker; None if there is none."""
        return self._downloads.get(pair)

    def of(self, member: str) -> list[Pair]:
        """What is under way from or to a member."""
        return list(self._of.get(member, ()))

    def told(self, asker: str) -> list[int]:
        """The slices on their way to an asker."""
        return [index for who, index in self._of.get(asker, ()) if who == asker]

    def oldest(self) -> tuple[Pair, Download] | None:
        """What has been under way longest."""
        return next(iter(self._downloads.items()), None)

    def begin(self, pair: Pair, download: Download) -> None:
        """A download begins; there was none of this asker and slice."""
        asker, index = pair
        self._downloads[pair] = download
        for member in (asker, download.holder):
            self._of.setdefault(member, set()).add(pair)
        self.coming[index] += download.passed_on

    def end(self, pair: Pair) -> Download | None:
        """It is under way no more; None if it was not."""
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

    def took(self, seconds: float) -> None:
        """One that ended well took so long."""
        self.usual_s = seconds if not self.usual_s else self.usual_s + 0.1 * (seconds - self.usual_s)
