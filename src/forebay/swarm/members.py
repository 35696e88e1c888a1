"""The members of a swarm as arrays, one row each; the downloads between them; and who is avoided or banned.

Bits are laid out [slices / 8, rows]: the members that have a slice are read as one contiguous byte each (10 KB for
10,000), the slices of a member in strides. The operating system allocates only memory that was written to.

A node may have several processes, each a member, named `PEER_ID#SESSION` (`member_id`); a ban covers all members of a
node.
"""

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from forebay.arrays import BOOL, I64
from forebay.errors import ProtocolError
from forebay.network.peer import node_of
from forebay.recent import RecentDict

MAX_RANGES = 200_000


def format_ranges(indexes: I64) -> str:
    """Rising indexes as text like `0-15,17`; "" for none."""
    first = indexes[np.diff(indexes, prepend=-2) != 1]
    last = indexes[np.diff(indexes, append=-2) != 1]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(first.tolist(), last.tolist()))


def parse_ranges(text: str, stop: int) -> I64:
    """The indexes in [0, stop) of a text of `format_ranges`, rising. Costs some 0.3 us a range."""

    def wrong(expected: str) -> ProtocolError:
        return ProtocolError(f"slices: expected {expected}, got {text[:80]!r}")

    if not text:
        return np.empty(0, np.int64)
    if text.count(",") >= min(stop, MAX_RANGES):
        raise wrong(f"at most {min(stop, MAX_RANGES)} ranges")
    if not re.fullmatch(r"[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*", text):
        raise wrong("ranges like 0-15,17")
    numbers = np.fromstring(text.replace("-", ","), np.int64, sep=",")
    marks = np.frombuffer(text.encode(), np.uint8)
    is_dash = marks[marks < ord("0")] == ord("-")  # between two numbers
    first = numbers[np.append(True, ~is_dash)]
    last = numbers[np.append(~is_dash, True)]
    if (first > last).any() or (first[1:] <= last[:-1]).any() or last[-1] >= stop:
        raise wrong(f"ranges that rise within [0, {stop})")
    counts = last - first + 1
    offsets = np.repeat(first - counts.cumsum() + counts, counts)
    return np.asarray(offsets + np.arange(len(offsets)), np.int64)


_FIRST_ROWS = 64


class Members:
    """Rows by peer id; a row is reused after its member left. All arrays are [rows] except `copies`.

    `gives`: it serves slices. `is_origin`: it has all. `uploads` and `slots`: how many it uploads now, and may.
    `seen_at`: when it sent its last message.
    """

    def __init__(self, num_slices: int) -> None:
        self.num_slices = num_slices
        self.ids: list[str] = []  # "" for a free row
        num_bytes = (num_slices + 7) // 8
        self._copies = np.zeros((num_bytes, 8), np.int32)  # by bit of `_bits`
        self.copies = self._copies.ravel()[:num_slices]  # [num_slices], members that have each slice
        self.rows: dict[str, int] = {}
        self._free: list[int] = []
        self._bits = np.zeros((num_bytes, 0), np.uint8)
        self.gives = self.is_origin = np.zeros(0, np.bool_)
        self.uploads = self.slots = np.zeros(0, np.int32)
        self.seen_at = np.zeros(0)
        self._grow()

    def add(self, peer_id: str, *, is_origin: bool, gives: bool) -> None:
        """Add a member without slices."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.ids[row] = peer_id
        self.rows[peer_id] = row
        self.is_origin[row] = is_origin
        self.gives[row] = gives
        self.uploads[row] = 0

    def remove(self, peer_id: str) -> None:
        """Remove a member and free its row."""
        self.set_all(peer_id, np.zeros(self.num_slices, np.bool_))
        row = self.rows.pop(peer_id)
        self.ids[row] = ""
        self.is_origin[row] = self.gives[row] = False
        self._free.append(row)

    def set_all(self, peer_id: str, have: BOOL) -> None:
        """The member has exactly these slices: [num_slices] flags."""
        row = self.rows[peer_id]
        new = np.packbits(have, bitorder="little")
        old = self._bits[:, row].copy()
        changed = np.flatnonzero(new != old)
        if not len(changed):
            return
        self._bits[changed, row] = new[changed]
        was, now = (np.unpackbits(x[changed], bitorder="little").astype(np.int32) for x in (old, new))
        self._copies[changed] += (now - was).reshape(-1, 8)

    def set(self, peer_id: str, index: int, value: bool) -> None:
        """The member has one slice, or not."""
        byte = (index >> 3, self.rows[peer_id])
        bit = np.uint8(1 << (index & 7))
        if bool(self._bits[byte] & bit) != value:
            self._bits[byte] ^= bit
            self.copies[index] += 1 if value else -1

    def clear(self, peer_id: str, indices: I64) -> None:
        """The member has none of these slices."""
        bits = self._bits[indices >> 3, self.rows[peer_id]] >> (indices & 7).astype(np.uint8) & 1
        for index in indices[bits.astype(np.bool_)].tolist():
            self.set(peer_id, index, False)

    def holders_of(self, index: int) -> BOOL:
        """[rows] flags of the members that have a slice, without origins."""
        return np.asarray(self._bits[index >> 3] & np.uint8(1 << (index & 7)), np.bool_)

    def _grow(self) -> None:
        """Double the rows."""
        before = len(self.ids)
        more = before or _FIRST_ROWS
        bits = np.zeros((len(self._bits), before + more), np.uint8)
        bits[:, :before] = self._bits
        self._bits = bits
        for name in ("gives", "is_origin", "uploads", "slots", "seen_at"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(more, old.dtype)]))
        self.ids += [""] * more
        self._free = list(range(before, before + more))[::-1]


Pair = tuple[str, int]  # (asker, slice)


@dataclass(frozen=True)
class Download:
    """A download of a slice by an asker."""

    holder: str
    since: float
    passed_on: bool  # the asker will serve it to others


class Downloads(OrderedDict[Pair, Download]):
    """The active downloads by asker and slice, the oldest first."""

    def __init__(self, num_slices: int) -> None:
        super().__init__()
        self.coming = np.zeros(num_slices, np.int32)  # of each slice, by askers that serve it to others
        self.usual_s = 0.0  # moving average of durations; 0.0: unknown
        self._of: dict[str, set[Pair]] = {}  # from or to a member

    def of(self, member: str) -> list[Pair]:
        """The downloads from or by a member."""
        return list(self._of.get(member, ()))

    def slices_of(self, asker: str) -> list[int]:
        """The slices that an asker downloads."""
        return [index for who, index in self._of.get(asker, ()) if who == asker]

    def start(self, pair: Pair, download: Download) -> None:
        """Start a download; there was none of this asker and slice."""
        asker, index = pair
        self[pair] = download
        for member in (asker, download.holder):
            self._of.setdefault(member, set()).add(pair)
        self.coming[index] += download.passed_on

    def end(self, pair: Pair) -> Download | None:
        """End a download; None if there was none."""
        download = self.pop(pair, None)
        if download is None:
            return None
        for member in {pair[0], download.holder}:
            pairs = self._of[member]
            pairs.discard(pair)
            if not pairs:
                del self._of[member]
        self.coming[pair[1]] -= download.passed_on
        return download


_AVOID_S = 1.0
_MAX_AVOID_S = 60.0
BAN_S = 3600.0
_DAMAGED = 2  # slices
_MAX_BANNED = 256  # nodes that are banned for one


class PeerPenalties:
    """The members to which an asker is not sent, by what they sent to its own node.

    What others say does not count: each node finds out for itself, for the price of one chunk. A member that fails an
    asker is avoided by that asker for 1 s, then 2 s, up to a minute. One that sent wrong bytes is banned for that
    node for an hour; an origin, which may have one corrupt file, once it sent wrong bytes of a second slice.
    """

    def __init__(self) -> None:
        self._members: dict[str, set[str]] = {}  # by node
        self._until: dict[str, dict[str, tuple[float, float]]] = {}  # asker: node: (until, seconds)
        self._banned: dict[str, dict[str, float]] = {}  # node: nodes and until when
        self._damaged: dict[tuple[str, str], set[int]] = {}  # (node, origin): slices

    def reported(self, now: float) -> dict[str, int]:
        """Return how many nodes each node is banned for."""
        counts = Counter(node for banned in self._banned.values() for node, until in banned.items() if until > now)
        return dict(sorted(counts.items()))

    def join(self, member: str) -> None:
        """Add a member."""
        self._members.setdefault(node_of(member), set()).add(member)

    def leave(self, member: str) -> None:
        """Remove a member; bans of its node stay."""
        node = node_of(member)
        self._members[node].discard(member)
        if not self._members[node]:
            del self._members[node]
        self._until.pop(member, None)

    def num_members(self, node: str) -> int:
        """The number of members of a node."""
        return len(self._members.get(node, ()))

    def failed(self, asker: str, member: str, now: float) -> None:
        """A member did not send the asker a slice."""
        avoided = self._until.setdefault(asker, {})
        node = node_of(member)
        seconds = min(_MAX_AVOID_S, 2 * avoided[node][1] if node in avoided else _AVOID_S)
        avoided[node] = (now + seconds, seconds)

    def gave(self, asker: str, member: str) -> None:
        """A member sent the asker a slice: earlier failures do not count."""
        self._until.get(asker, {}).pop(node_of(member), None)

    def lied(self, asker: str, member: str, index: int, now: float, *, is_origin: bool) -> bool:
        """A member sent the asker wrong bytes of a slice; return whether it is banned for the asker's node now."""
        node = node_of(member)
        own = node_of(asker)
        if is_origin:
            slices = self._damaged.setdefault((own, node), set())
            if len(slices) < _DAMAGED:
                slices.add(index)
            if len(slices) < _DAMAGED:
                return False
        self._banned.setdefault(own, RecentDict(_MAX_BANNED))[node] = now + BAN_S
        return True

    def avoided_by(self, asker: str, now: float) -> Iterable[str]:
        """The members of the nodes that failed the asker lately."""
        for node, (until, _) in self._until.get(asker, {}).items():
            if until > now:
                yield from self._members.get(node, ())

    def banned_for(self, asker: str, now: float) -> Iterable[str]:
        """The members that are banned for the asker."""
        for node, until in self._banned.get(node_of(asker), {}).items():
            if until > now:
                yield from self._members.get(node, ())
