"""What one member and one organisation may take of a server, and the turns of an upload.

Bytes go out in pieces, and a peer has at most one piece in the queue for the node's upload, however many connections
it opened: peers that download at once take turns, so their shares are equal. A slow reader asks for few pieces and
delays nobody; what it leaves goes to the others.

Costs: shares are equal while the upload limit is what limits. Without one TCP decides, a connection a share, and
`connections_per_peer` is what bounds a peer.
"""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from forebay.errors import UsageError
from forebay.units import parse_size

BURST_S = 0.05  # a bucket saves up this much of its rate while nobody asks
PIECE_S = 0.1  # the longest turn of a peer
MIN_PIECE_BYTES = 4096
MAX_PEERS = 4096  # whose turns are kept; the one seen longest ago is forgotten first


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one server. An organisation's are for all its members together; the root's own members have none."""

    connections: int = 256  # at once, those in their handshake included
    connections_per_peer: int = 64  # of one certificate's key
    connections_per_organisation: int = 192
    handshakes_per_address: int = 64  # unfinished ones of one IP address
    requests_per_peer: int = 64  # being answered at once; what waits for news counts
    requests_per_organisation: int = 192
    requests_per_s: float = 2000.0  # twice as many at once after a rest
    organisation_requests_per_s: float = 8000.0
    bytes_per_s: float = 4e9  # of slices and files sent; what is beyond waits
    organisation_bytes_per_s: float = 16e9
    body_bytes: int = 1 << 20  # of one request
    idle_s: float = 60.0  # how long a connection may rest between requests
    handshake_s: float = 5.0  # how long a client may take for it; likewise for a request's head and body
    head_s: float = 10.0
    body_s: float = 60.0
    send_s: float = 60.0  # how long a client may take to read one piece of an answer (1 MiB at most)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"limits: expected {name} > 0, got {value}")


def parse_limits(limits: ServerLimits, items: Iterable[str]) -> ServerLimits:
    """Limits with those of `NAME=NUMBER` in their place."""
    changes: dict[str, float] = {}
    for item in items:
        name, _, text = item.partition("=")
        if name not in vars(limits):
            raise UsageError(f"--limit: expected NAME=NUMBER of {', '.join(vars(limits))}, got {item!r}")
        try:
            changes[name] = type(vars(limits)[name])(
                parse_size(text) if name.endswith(("bytes", "bytes_per_s")) else float(text)
            )
        except ValueError as error:
            raise UsageError(f"--limit {name}: expected a number, got {text!r}") from error
    return replace(limits, **changes)  # type: ignore[arg-type]


class TokenBucket:
    """`rate` tokens a second, at most `burst` saved up. Pure: `now` (s) comes from the caller. Not safe for threads."""

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
    """The upload limit of a node to all peers together; several servers, each in a loop of its own, may share it."""

    def __init__(self, upload_bytes_per_s: float | None = None) -> None:
        self._upload = TokenBucket(upload_bytes_per_s) if upload_bytes_per_s is not None else None
        self._lock = threading.Lock()
        # By loop and peer: held by that of its connections whose piece is next.
        self._turns: OrderedDict[tuple[int, str], asyncio.Lock] = OrderedDict()

    def piece_bytes(self, most: int) -> int:
        """How long a piece should be: `most`, or less where a slow limit would make turns long."""
        return most if self._upload is None else max(MIN_PIECE_BYTES, min(most, int(self._upload.rate * PIECE_S)))

    async def pace(
        self,
        peer: str,
        num_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Wait until a piece of this length may go to a peer."""
        if self._upload is None:
            return
        async with self._turn(peer):
            with self._lock:
                wait_s = self._upload.take(num_bytes, clock())
            if wait_s > 0:
                await sleep(wait_s)

    def _turn(self, peer: str) -> asyncio.Lock:
        key = id(asyncio.get_running_loop()), peer
        with self._lock:
            turn = self._turns.setdefault(key, asyncio.Lock())
            self._turns.move_to_end(key)
            if len(self._turns) > MAX_PEERS:
                self._turns.popitem(last=False)
            return turn
