"""Limits of a server per member and organisation, token buckets, and the upload limit of a node.

Shares of an upload are per connection; `connections_per_peer` and `bytes_per_s` bound a peer.
"""

import asyncio
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from forebay.errors import UsageError
from forebay.units import parse_size

BURST_S = 0.05  # burst of a bucket, in seconds of its rate
PIECE_S = 0.1  # maximum wait for a piece
MIN_PIECE_BYTES = 4096


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one server. An organisation's apply to all its members together; the root's own members have none."""

    connections: int = 256  # concurrent, handshakes included
    connections_per_peer: int = 64  # per key
    connections_per_organisation: int = 192
    handshakes_per_address: int = 64  # unfinished, per IP address
    requests_per_peer: int = 64  # concurrent, long polls included
    requests_per_organisation: int = 192
    requests_per_s: float = 2000.0  # the burst is twice as many
    organisation_requests_per_s: float = 8000.0
    bytes_per_s: float = 4e9  # of slices and files; sending waits beyond it
    organisation_bytes_per_s: float = 16e9
    body_bytes: int = 1 << 20  # per request
    idle_s: float = 60.0  # of a connection between requests
    handshake_s: float = 5.0  # for the client to complete it; likewise for a request's head and body
    head_s: float = 10.0
    body_s: float = 60.0
    send_s: float = 60.0  # for the client to read one piece of a response (1 MiB at most)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"limits: expected {name} > 0, got {value}")


def parse_limits(limits: ServerLimits, items: Iterable[str]) -> ServerLimits:
    """Replace limits by those of `NAME=NUMBER` items. Raises UsageError."""
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
    """`rate` tokens a second, at most `burst` saved. Pure: the caller passes `now` (s). Not thread-safe."""

    def __init__(self, rate: float, burst: float | None = None) -> None:
        if not rate > 0:
            raise UsageError(f"bucket: expected a rate > 0, got {rate}")
        self.rate = rate
        self.burst = rate * BURST_S if burst is None else burst
        self._level = self.burst
        self._filled_at: float | None = None

    def take(self, amount: float, now: float) -> float:
        """Take tokens, into debt if needed; return the seconds to wait before using them."""
        self._fill(now)
        self._level -= amount
        return max(0.0, -self._level / self.rate)

    def try_take(self, amount: float, now: float) -> float:
        """Take tokens if available and return 0, otherwise the seconds until they could be taken."""
        self._fill(now)
        missing = min(amount, self.burst) - self._level
        if missing > 1e-9 * amount:
            return missing / self.rate
        self._level -= amount
        return 0.0

    def _fill(self, now: float) -> None:
        if self._filled_at is not None and now > self._filled_at:
            self._level = min(self.burst, self._level + (now - self._filled_at) * self.rate)
        self._filled_at = now if self._filled_at is None else max(now, self._filled_at)


class Throttle:
    """The upload limit of a node to all peers together; servers with different loops may share it."""

    def __init__(self, upload_bytes_per_s: float | None = None) -> None:
        self._upload = TokenBucket(upload_bytes_per_s) if upload_bytes_per_s is not None else None
        self._lock = threading.Lock()

    def piece_bytes(self, max_bytes: int) -> int:
        """Size of a piece: `max_bytes`, or less if a low limit would make waits long."""
        if self._upload is None:
            return max_bytes
        return max(MIN_PIECE_BYTES, min(max_bytes, int(self._upload.rate * PIECE_S)))

    async def pace(self, num_bytes: int) -> None:
        """Wait until a piece of this length may be sent."""
        if self._upload is None:
            return
        with self._lock:
            wait_s = self._upload.take(num_bytes, time.monotonic())
        await asyncio.sleep(wait_s)
