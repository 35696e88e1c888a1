"""Where a member is reached: the address it should name, and whether it answers there."""

import ipaddress
import logging
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from forebay.errors import ForebayError, ProtocolError
from forebay.network.addresses import host_towards, is_public, join_address, parse_peer_address
from forebay.network.client import Client
from forebay.network.discovery import MAX_CLAIMS_BYTES
from forebay.network.peer import Peer

log = logging.getLogger("forebay.network")
CHECK_S = 3.0
GRACE_S = 0.5  # so long an address counts as being checked; then its member is served as one without an address
PAUSE_S = 60.0  # after an address at which a peer was not reached, before another one of that peer is dialled
AT_ONCE, AT_ONCE_PER_ORGANISATION = 8, 4
MAX_PEERS, MAX_ADDRESSES = 16_384, 64  # remembered; addresses of one peer


def advertised_host(host: str, towards: str) -> str:
    """What others are told for `host`: where that is everywhere, this host as seen from `towards`, `host:port`."""
    if host.strip("[]") not in ("", "0.0.0.0", "::"):
        return host
    found = host_towards(parse_peer_address(towards))
    if found == "0.0.0.0":  # no way there now: those on this machine reach it
        return "127.0.0.1"
    return f"[{found}]" if ":" in found else found


def may_dial(ip: str, source: str) -> bool:
    """Whether a node connects to an IP address because a member whose connection comes from `source` asked for it.

    To the same address, and to public ones. To other private ones only for a member of a private network, to loopback
    only for a process of this machine, to link-local ones never: what a member could not reach by itself, it does not
    reach through this node.
    """
    try:
        there, here = (_ip(text) for text in (ip, source))
    except ValueError:
        return False
    if there == here:
        return True
    if there.is_loopback or here.is_loopback:
        return here.is_loopback and not (there.is_link_local or there.is_multicast)
    if there.is_link_local or there.is_multicast or there.is_unspecified:
        return False
    return is_public(str(there)) or not is_public(str(here))


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(text.partition("%")[0])
    return (address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None) or address


@dataclass(slots=True)
class _Address:
    """Whether a peer was reached here; None: not known yet. `asked_at`: when it was first asked for, or dialled."""

    source: str
    asked_at: float
    is_reached: bool | None = None


@dataclass(eq=False, slots=True)
class _Dialled:
    """What is known of one peer."""

    org: str
    addresses: OrderedDict[str, _Address] = field(default_factory=OrderedDict)
    is_active: bool = False
    paused_until: float = float("-inf")


class ReachabilityChecker:
    """Dials members back in the background, and remembers who was there. For many threads; `close` it.

    Peers take turns: one address of a peer is dialled at a time, and of the peers of one organisation half of what is
    dialled at once. Where a peer was not reached, no other address of it is dialled for PAUSE_S.

    What the choice costs: a member is named as a provider one round trip later than it could be.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, _Dialled] = OrderedDict()
        self._turns: OrderedDict[str, _Dialled] = OrderedDict()  # peers with an address to dial, the next first
        self._active_by_org: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="dial")

    def reached(self, peer: Peer, address: str, source: str) -> bool:
        """Whether this very peer, whose IP is `source`, has answered there; no until the first question found out."""
        return self.found(peer, address, source) is True

    def found(self, peer: Peer, address: str, source: str) -> bool | None:
        """As `reached`; None while it is being found out, for GRACE_S at most."""
        if not address:
            return False
        now = self._clock()
        with self._lock:
            dialled = self._peers.setdefault(peer.peer_id, _Dialled(peer.org))
            self._peers.move_to_end(peer.peer_id)
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
            known = dialled.addresses.get(address)
            if known is not None and known.is_reached is None:
                return None if now - known.asked_at < GRACE_S else False
            if known is not None and (known.is_reached or now - known.asked_at < PAUSE_S):
                return known.is_reached
            if now < dialled.paused_until:
                return False
            dialled.addresses[address] = _Address(source, now)
            dialled.addresses.move_to_end(address)
            if len(dialled.addresses) > MAX_ADDRESSES:
                dialled.addresses.popitem(last=False)
            self._turns.setdefault(peer.peer_id, dialled)
        return None if self._submit() else False

    def close(self) -> None:
        """Dial nobody any more. May be repeated."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self) -> bool:
        try:
            self._pool.submit(self._dial_next)
        except RuntimeError:  # closed meanwhile
            return False
        return True

    def _dial_next(self) -> None:
        with self._lock:
            turn = self._take_turn()
        if turn is None:
            return
        peer_id, dialled, text, address = turn
        is_reached = False
        try:
            is_reached = self._dial(peer_id, text, address.source)
        except Exception:
            log.exception("dialling %s at %s failed", peer_id, text)
        with self._lock:
            now = self._clock()
            address.is_reached, address.asked_at = is_reached, now
            dialled.is_active = False
            self._active_by_org[dialled.org] -= 1
            if not is_reached:
                dialled.paused_until = now + PAUSE_S
                for other in dialled.addresses.values():
                    if other.is_reached is None:
                        other.is_reached, other.asked_at = False, now
            has_more = bool(self._turns)
        if has_more:
            self._submit()

    def _take_turn(self) -> tuple[str, _Dialled, str, _Address] | None:
        """Whom to dial now, and where; None if nobody waits who may be dialled. With the lock held."""
        for peer_id, dialled in list(self._turns.items()):
            waiting = [pair for pair in dialled.addresses.items() if pair[1].is_reached is None]
            if not waiting:
                del self._turns[peer_id]
            elif not dialled.is_active and self._may_begin(dialled.org):
                dialled.is_active = True
                self._active_by_org[dialled.org] += 1
                del self._turns[peer_id]
                if len(waiting) > 1:
                    self._turns[peer_id] = dialled
                return peer_id, dialled, *waiting[0]
        return None

    def _may_begin(self, org: str) -> bool:
        return not org or self._active_by_org[org] < AT_ONCE_PER_ORGANISATION

    def _dial(self, peer_id: str, text: str, source: str) -> bool:
        try:
            host, port = parse_peer_address(text)
            ips = [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
            ip = next((ip for ip in ips if may_dial(ip, source)), None)
            if ip is None:
                raise ProtocolError(f"not an address that a member at {source} may have this node connect to")
            at = join_address(ip, port)
            self._client.request_json(
                at, "GET", "/v1/claims?name=", expect_peer=peer_id, timeout_s=CHECK_S, max_bytes=MAX_CLAIMS_BYTES
            )
        except (ForebayError, OSError, UnicodeError) as error:
            log.debug("%s is not reached at %s: %s", peer_id, text, error)
            return False
        return True
