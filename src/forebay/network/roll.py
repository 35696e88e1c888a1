"""Who is connected: counts by peer and by address, and who makes room when the house is full. No sockets here."""

import threading
from collections import Counter

from forebay.network.limits import Bounds
from forebay.network.parking import Connection

LEAST_PER_PEER = 8


class Roll:
    """The connections of a server; safe for several threads.

    Args:
        has_peers: Whether clients prove who they are; if not, only addresses are counted.
    """

    def __init__(self, most: int, bounds: Bounds, has_peers: bool) -> None:
        self.most = most
        self.per_address = bounds.per_address or most
        self.per_peer = bounds.per_peer or max(LEAST_PER_PEER, most // 4)
        self.has_peers = has_peers
        self.num_refused = 0
        self.num_busy = 0
        self._lock = threading.Lock()
        self._all: set[Connection] = set()
        self._by_address: Counter[str] = Counter()
        self._by_peer: Counter[str] = Counter()
        # Not proven yet, the oldest first, by address.
        self._strangers: dict[str, dict[Connection, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def all(self) -> list[Connection]:
        """Everyone on it now."""
        with self._lock:
            return list(self._all)

    def admit(self, connection: Connection) -> tuple[bool, Connection | None]:
        """Whether a new connection may stay, and who must go for it.

        In a full house the oldest that has not proven itself goes, of the address that has most such; of an address
        with no more room, its own. Who only opens connections takes no place from a member.
        """
        with self._lock:
            evicted = None
            crowded = self._by_address[connection.address] >= self.per_address
            if crowded or len(self._all) >= self.most:
                most = max(self._strangers, key=lambda address: len(self._strangers[address]), default="")
                strangers = self._strangers.get(connection.address if crowded else most)
                if not strangers:
                    self.num_refused += 1
                    return False, None
                evicted = next(iter(strangers))
                self._drop(evicted)  # it counts no longer, though its holder has yet to close it
                self.num_refused += 1
            self._all.add(connection)
            self._by_address[connection.address] += 1
            self._strangers.setdefault(connection.address, {})[connection] = None
            return True, evicted

    def prove(self, connection: Connection) -> bool:
        """A connection's peer is known: whether it may have one more."""
        assert connection.peer is not None
        with self._lock:
            if connection not in self._all:
                return False  # it had to make room
            self._forget_stranger(connection)
            if self.has_peers:
                self._by_peer[connection.peer.peer_id] += 1
                connection.counted = True
                if self._by_peer[connection.peer.peer_id] > self.per_peer:
                    self.num_refused += 1
                    return False
            return True

    def refuse(self) -> None:
        """One more that did not prove itself."""
        with self._lock:
            self.num_refused += 1

    def begin(self, connection: Connection) -> None:
        """It is being answered."""
        with self._lock:
            connection.busy = True
            self.num_busy += 1

    def finish(self, connection: Connection) -> None:
        """It has been answered. May be repeated."""
        with self._lock:
            self.num_busy -= connection.busy
            connection.busy = False

    def remove(self, connection: Connection) -> None:
        """It is closed. May be repeated."""
        with self._lock:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if connection not in self._all:
            return
        self._all.discard(connection)
        self._forget_stranger(connection)
        self.num_busy -= connection.busy
        connection.busy = False
        _less(self._by_address, connection.address)
        if connection.counted and connection.peer is not None:
            _less(self._by_peer, connection.peer.peer_id)

    def _forget_stranger(self, connection: Connection) -> None:
        same = self._strangers.get(connection.address)
        if same is not None and same.pop(connection, 0) is None and not same:
            del self._strangers[connection.address]


def _less(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]
