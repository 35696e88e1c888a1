"""What one peer may take of a server: connections, and its turn of the upload.

Bytes go out in pieces, and a peer has at most one piece in the queue for the node's upload, however many connections
it opened: peers that download at once take turns, so their shares are equal. Who reads slowly asks for few pieces
and holds up nobody; what it leaves goes to the others.

What the choice costs: shares are equal while the upload cap is what limits. Without a cap TCP decides, a connection
a share, and `Bounds.per_peer` is what holds a peer back.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from forebay.errors import UsageError

BURST_S = 0.05  # a bucket saves up this much of its rate while nobody asks
PIECE_S = 0.1  # the longest turn of a peer
MIN_PIECE_BYTES = 4096
MAX_PEERS = 4096  # whose turns are kept; the one seen longest ago is forgotten first


@dataclass(frozen=True)
class Bounds:
    """How much of a server one client can hold; None: as many as the server has.

    Attributes:
        per_peer: Connections of one peer id. `per_address`: of one IP address.
        busy: Requests answered at once, a thread each. What waits for news in its handler counts.
        idle_s: How long a connection may rest between requests.
        handshake_s, head_s: How long it may make the server wait for the handshake, and for a request's head.
        body_bytes_per_s: Slower bodies are cut; each has `head_s` more.
        send_s: How long a reader may take nothing at all of an answer.
        gather_s: Under GATHER_FROM connections or more, requests that come within so long are answered together, by
            one thread: for handlers that are short, or return Pending.
    """

    per_peer: int | None = None
    per_address: int | None = None
    busy: int | None = None
    idle_s: float = 60.0
    handshake_s: float = 10.0
    head_s: float = 10.0
    body_bytes_per_s: float = 16384.0
    send_s: float = 60.0
    gather_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise UsageError(f"bounds: expected {name} > 0, got {value}")


class TokenBucket:
    """`rate` tokens a second, at most `burst` saved up. Pure: `now` (seconds, any origin) comes from the caller.

    Not for several threads at once without a lock of theirs.
    """

    def __init__(self, rate: float, burst: float | None = None) -> None:
        if not rate > 0:
            raise UsageError(f"bucket: expected a rate > 0, got {rate}")
        self.rate = rate
        self.burst = rate * BURST_S if burst is None else burst
        self._level = self.burst
        self._at: float | None = None

    def take(self, amount: float, now: float) -> float:
        """Take in any case, into debt if need be. Returns how long to wait before using what was taken, seconds."""
        self._fill(now)
        self._level -= amount
        return max(0.0, -self._level / self.rate)

    def try_take(self, amount: float, now: float) -> float:
        """Take only what is there. Returns 0 if it was taken, else in how many seconds it could be."""
        self._fill(now)
        missing = min(amount, self.burst) - self._level
        if missing > 1e-9 * amount:
            return missing / self.rate
        self._level -= amount
        return 0.0

    def _fill(self, now: float) -> None:
        if self._at is not None and now > self._at:
            self._level = min(self.burst, self._level + (now - self._at) * self.rate)
        self._at = now if self._at is None else max(now, self._at)


class Throttle:
    """The upload limit of a node; may be shared by several servers and all their threads. None: no limit.

    Args:
        upload_bytes_per_s: Of the node to all peers together.
    """

    def __init__(self, upload_bytes_per_s: float | None = None) -> None:
        self._upload = TokenBucket(upload_bytes_per_s) if upload_bytes_per_s is not None else None
        self._lock = threading.Lock()
        # By peer: held by that of its connections whose piece is next.
        self._turns: OrderedDict[str, threading.Lock] = OrderedDict()

    def piece_bytes(self, most: int) -> int:
        """How long a piece should be: `most`, or less where a slow limit would make turns long."""
        return most if self._upload is None else max(MIN_PIECE_BYTES, min(most, int(self._upload.rate * PIECE_S)))

    def pace(
        self,
        peer: str,
        num_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Wait until a piece of this length may go to a peer.

        Args:
            sleep: Given seconds; may come back early where the server is closing.
        """
        if self._upload is None:
            return
        with self._turn(peer):
            with self._lock:
                wait_s = self._upload.take(num_bytes, clock())
            if wait_s > 0:
                sleep(wait_s)

    def _turn(self, peer: str) -> threading.Lock:
        with self._lock:
            turn = self._turns.setdefault(peer, threading.Lock())
            self._turns.move_to_end(peer)
            if len(self._turns) > MAX_PEERS:
                self._turns.popitem(last=False)
            return turn
