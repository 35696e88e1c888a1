"""Where a member is reached: what it should name, and whether it answers there. Behind NAT nobody must wait for it."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from forebay.errors import ForebayError
from forebay.network.client import Client, parse_address

CHECK_S, RECHECK_S = 3.0, 60.0
FORGET_S = 3600.0
AT_ONCE = 8


def named_host(host: str, towards: str) -> str:
    """What others are told of a server that listens at `host`: where that is everywhere, this host as seen by another.

    Args:
        towards: `host:port` of the other; nothing is sent to it.

    Raises:
        UsageError: If it is no address.
    """
    if host.strip("[]") not in ("", "0.0.0.0", "::"):
        return host
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(*parse_address(towards), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            found = str(probe.getsockname()[0])
    except OSError:  # no way there now: those on this machine reach it
        return "127.0.0.1"
    return f"[{found}]" if ":" in found else found


class Dialer:
    """Dials members back in the background, and remembers who was there. For many threads; `close` it.

    What the choice costs: a member is named as a provider one round trip later than it could be.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[tuple[str, str], tuple[bool | None, float]] = {}
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="dial")

    def reached(self, peer_id: str, address: str) -> bool:
        """Whether this very peer has answered there; the first question begins to find out, and says no."""
        return self.found(peer_id, address) is True

    def found(self, peer_id: str, address: str) -> bool | None:
        """As `reached`; None while it is being found out."""
        if not address:
            return False
        pair, now = (peer_id, address), self._clock()
        with self._lock:
            found, at = self._found.get(pair, (False, float("-inf")))
            if found is not False or now - at < RECHECK_S:
                return found
            self._found = {pair: held for pair, held in self._found.items() if now - held[1] < FORGET_S}
            self._found[pair] = (None, now)
        try:
            self._pool.submit(self._dial, pair)
        except RuntimeError:  # closed meanwhile
            return False
        return None

    def close(self) -> None:
        """Dial nobody any more. May be repeated."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _dial(self, pair: tuple[str, str]) -> None:
        try:
            self._client.request_json(pair[1], "GET", "/v1/claims", expect_peer=pair[0], timeout_s=CHECK_S)
            reached = True
        except ForebayError:
            reached = False
        with self._lock:
            self._found[pair] = (reached, self._clock())
