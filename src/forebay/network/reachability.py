"""Reachability of members: the address that a node advertises, and whether a member answers at the one it names."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from forebay.errors import ForebayError, ProtocolError
from forebay.network import log
from forebay.network.client import Client
from forebay.network.discovery import MAX_CLAIMS_BYTES
from forebay.network.peer import Peer
from forebay.recent import RecentDict
from forebay.storage.hosts import host_towards, is_public, join_address, parse_ip, parse_peer_address

CHECK_S = 3.0
GRACE_S = 0.5  # an address counts as being checked for this time; then its member is served as one without an address
PAUSE_S = 60.0  # after a failure, before another address of the peer is checked
AT_ONCE = 8
AT_ONCE_PER_ORGANISATION = 4
MAX_PEERS, MAX_ADDRESSES = 16_384, 64  # remembered; addresses of one peer


def advertised_host(host: str, towards: str) -> str:
    """The host to announce for a listening `host`: if that is a wildcard, this host's address towards `host:port`."""
    if host.strip("[]") not in ("", "0.0.0.0", "::"):
        return host
    own = host_towards(parse_peer_address(towards))
    if own == "0.0.0.0":  # no route now: reachable on this machine
        return "127.0.0.1"
    return f"[{own}]" if ":" in own else own


def may_dial(ip: str, source: str) -> bool:
    """Whether a node may connect to an IP address named by a member whose connection comes from `source`.

    Allowed are the same address and public ones; other private ones only for a member of a private network, loopback
    only for a process of this machine, link-local never. A member reaches nothing through this node that it could not
    reach itself.
    """
    try:
        target = parse_ip(ip)
        origin = parse_ip(source)
    except ValueError:
        return False
    if target == origin:
        return True
    if target.is_loopback or origin.is_loopback:
        return origin.is_loopback and not (target.is_link_local or target.is_multicast)
    if target.is_link_local or target.is_multicast or target.is_unspecified:
        return False
    return is_public(str(target)) or not is_public(str(origin))


@dataclass(slots=True)
class _PeerState:
    checking: str = ""  # the address that is being checked
    since: float = 0.0
    paused_until: float = float("-inf")
    # By address: whether it was reached, and when.
    results: dict[str, tuple[bool, float]] = field(default_factory=lambda: RecentDict(MAX_ADDRESSES))


@dataclass(eq=False)
class ReachabilityChecker:
    """Connects to members in the background and remembers the results. Thread-safe; `close` it.

    One address of a peer is checked at a time, and the peers of an organisation, or of none, have at most half of the
    checks in progress.
    After a failure no address of the peer is checked for PAUSE_S.

    Cost: a member is named as a provider one round trip later.
    """

    client: Client
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._peers = RecentDict[str, _PeerState](MAX_PEERS)
        self._active_by_org = Counter[str]()
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="dial")

    def check(self, peer: Peer, address: str, source: str) -> bool | None:
        """Whether this peer, whose IP is `source`, answered at an address; None for GRACE_S while it is checked.

        False also while other checks are in progress: ask again later.
        """
        if not address:
            return False
        now = self.clock()
        active = self._active_by_org
        with self._lock:
            self._peers[peer.peer_id] = state = self._peers.get(peer.peer_id) or _PeerState()
            is_reached, checked_at = state.results.get(address, (False, float("-inf")))
            if is_reached or now - checked_at < PAUSE_S:
                return is_reached
            if address == state.checking:
                return None if now - state.since < GRACE_S else False
            org_is_busy = active[peer.org] >= AT_ONCE_PER_ORGANISATION
            if state.checking or org_is_busy or active.total() >= AT_ONCE or now < state.paused_until:
                return False
            try:
                self._pool.submit(self._check, peer, state, address, source)
            except RuntimeError:  # closed
                return False
            state.checking = address
            state.since = now
            active[peer.org] += 1
            return None

    def close(self) -> None:
        """Stop checking. May be repeated."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check(self, peer: Peer, state: _PeerState, address: str, source: str) -> None:
        is_reached = False
        try:
            host, port = parse_peer_address(address)
            ips = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
            ip = next((ip for ip in ips if may_dial(ip, source)), None)
            if ip is None:
                raise ProtocolError(f"not an address that a member at {source} may have this node connect to")
            self.client.request_json(
                join_address(ip, port), "GET", "/v1/claims?name=",
                expect_peer=peer.peer_id, timeout_s=CHECK_S, max_bytes=MAX_CLAIMS_BYTES,
            )  # fmt: skip
            is_reached = True
        except (ForebayError, OSError, UnicodeError) as error:
            log.debug("peer not reached: peer_id=%s address=%s reason=%s", peer.peer_id, address, error)
        except Exception:  # noqa: BLE001 - logged with its traceback
            log.exception("reachability check failed: peer_id=%s address=%s", peer.peer_id, address)
        with self._lock:
            now = self.clock()
            state.checking = ""
            state.results[address] = is_reached, now
            if not is_reached:
                state.paused_until = now + PAUSE_S
            self._active_by_org[peer.org] -= 1
