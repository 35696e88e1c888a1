"""Discovery by a private Kademlia DHT: libtorrent's, with the network's own bootstrap nodes.

BEP 5: a key of 20 bytes leads to the addresses that announced themselves under it. Each announcement is stored
on the nodes nearest to the key and, where this node's host is a plain address, on this node itself, so that the
very first node of a network can already be found. Announcements are repeated whenever the routing table grows;
the owner repeats them in time as well (libtorrent forgets one after some 45 minutes).

Other nodes store the address that an announcement came from, so that what they name is what they reached. This
node's own store is told by hand, from each address that it listens at and that another host may reach.

What the choice costs: one UDP port and two threads; the records are open to whoever reaches that port, which is
why they hold addresses only (see discovery). A node stores at most MAX_ADDRESSES under a key and names 100 of them,
drawn anew, in an answer: who floods a key makes a search longer, and cannot close it.
"""

import ipaddress
import logging
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import libtorrent

from forebay.errors import NetworkError
from forebay.network.addresses import host_towards, join_address
from forebay.network.discovery import Address
from forebay.network.retry import waiting
from forebay.threads import Supervised

START_TIMEOUT_S = 10.0
QUIET_S = 0.4  # how long to wait for another answer where no round trip is known yet
MIN_QUIET_S = 0.1
STATS_EVERY_S = 0.5
MAX_ADDRESSES = 5000  # stored under one key
log = logging.getLogger("forebay.network")
lt: Any = libtorrent  # its type stubs lag behind what it takes


class LibtorrentDht:
    """A node of the DHT, running from construction to `close`.

    It listens at `host` (`0.0.0.0` or `::` for all but the loopback's; "" for the address from which the first
    bootstrap node is reached) and UDP `port` (0 takes a free one, the same on every address). Without `bootstrap` nodes
    to enter by it is the first of a network.
    """

    def __init__(self, host: str, port: int, bootstrap: Sequence[Address] = ()) -> None:
        host = host or host_towards(*bootstrap[:1])
        self.host = host
        self.port = port
        self._addresses: set[str] = set()
        self._changed = threading.Condition()
        self._found: dict[bytes, set[Address]] = {}
        self._told_at: dict[bytes, float] = {}  # when the first answer of another node came
        self._announced: dict[bytes, int] = {}
        self._num_nodes = 0
        self._failure = ""
        self._closed = False
        where = join_address(host, port)
        try:
            # The engine would take a port of its own for each address, or share a taken one without a word.
            port = _free_port(host, port)
            where = join_address(host, port)
            self._session = lt.session(_settings(where, bootstrap))
        except (OSError, OverflowError, RuntimeError) as error:
            raise NetworkError(
                f"DHT: cannot listen at {where} (UDP): {error}. Choose another port (0 takes a free one)."
            ) from error
        self._pump = Supervised(self._run, "dht")
        self._pump.start()
        with self._changed:
            self._changed.wait_for(lambda: self._addresses or self._failure, START_TIMEOUT_S)
        self.port = int(self._session.listen_port())
        if not self.port or self._failure:
            self.close()
            raise NetworkError(
                f"DHT: cannot listen at {where} (UDP): {self._failure or 'no answer from the engine'}. "
                "Choose another port (0 takes a free one)."
            )

    def nodes(self) -> int:
        """How many other nodes the routing table holds; up to half a second old."""
        with self._changed:
            return self._num_nodes

    def announce(self, key: bytes, port: int) -> None:
        """See Discovery. Returns at once; the nodes near the key hear of it within a round trip or two."""
        with self._changed:
            if self._closed:
                return
            self._announced[bytes(key)] = port
        self._say(bytes(key), port)

    def find(self, key: bytes, timeout_s: float) -> list[Address]:
        """See Discovery. Asks this node's own store and those near the key, again each second until one answers.

        Returns when no further answer came for twice as long as the first took, not after the first.
        """
        key = bytes(key)
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                if self._closed:
                    return []
                self._found[key], self._told_at[key] = set(), 0.0
                self._session.dht_get_peers(lt.sha1_hash(key))
                asked_at = time.monotonic()
            own = self._ask_itself(key)
            with self._changed:
                self._found[key] |= own
                wait_s = min(1.0, deadline - time.monotonic())
                self._changed.wait_for(lambda: self._closed or self._found[key], max(0.0, wait_s))
                seen = -1
                while not self._closed and len(self._found[key]) > seen:
                    seen = len(self._found[key])
                    first_s = self._told_at[key] - asked_at if self._told_at[key] else QUIET_S / 2
                    quiet_s = min(QUIET_S, max(MIN_QUIET_S, 2 * first_s))
                    self._changed.wait_for(lambda s=seen: len(self._found[key]) > s, quiet_s)  # type: ignore[misc]
                if self._found[key] or time.monotonic() >= deadline:
                    return sorted(self._found[key])

    def close(self) -> None:
        """See Discovery. Waits for the engine's threads."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._pump.stop()
        self._pump.join()
        del self._session  # returns once the engine's threads have ended

    def _say(self, key: bytes, port: int) -> None:
        with self._changed:
            if self._closed:
                return
            self._session.dht_announce(lt.sha1_hash(key), port, 0)
        self._tell_itself(key, port)

    def _run(self) -> None:
        """Take the engine's alerts until close; ask for figures now and then."""
        asked_at = 0.0
        while not self._closed:
            if time.monotonic() - asked_at >= STATS_EVERY_S:
                self._session.post_session_stats()
                asked_at = time.monotonic()
            self._session.wait_for_alert(100)
            for alert in self._session.pop_alerts():
                self._take(alert)

    def _take(self, alert: Any) -> None:
        grown = False
        with self._changed:
            if isinstance(alert, lt.dht_get_peers_reply_alert):
                key = alert.info_hash.to_bytes()
                if key in self._found:
                    self._found[key] |= {(str(host), int(port)) for host, port in alert.peers() if port}
                    self._told_at[key] = self._told_at[key] or time.monotonic()
            elif isinstance(alert, lt.session_stats_alert):
                num_nodes = int(alert.values.get("dht.dht_nodes", 0))
                grown = num_nodes > self._num_nodes
                self._num_nodes = num_nodes
            elif isinstance(alert, lt.listen_succeeded_alert):
                self._addresses.add(str(alert.address))
            elif isinstance(alert, lt.listen_failed_alert):
                self._failure = alert.message()
            self._changed.notify_all()
            announced = list(self._announced.items()) if grown else []
        for key, port in announced:
            self._say(key, port)

    def _ask_itself(self, key: bytes) -> set[Address]:
        """What this node's own store holds: a search asks other nodes only."""
        reply = self._query(self._own_addresses()[0], b"get_peers", {b"info_hash": key})
        values = reply.get(b"values", [])
        found = [_parse_compact(compact) for compact in values] if isinstance(values, list) else []
        return {address for address in found if address is not None}

    def _tell_itself(self, key: bytes, port: int) -> None:
        """Announce to this node's own store, from each address at which another host may reach this one."""
        for host in self._own_addresses():
            token = self._query(host, b"get_peers", {b"info_hash": key}).get(b"token")
            if token:
                body = {b"info_hash": key, b"port": port, b"token": token, b"implied_port": 0}
                self._query(host, b"announce_peer", body)

    def _own_addresses(self) -> list[str]:
        """Where this node answers. Listening at all addresses, the engine leaves out the loopback's."""
        with self._changed:
            addresses = sorted(self._addresses)
        return [host for host in addresses if not _is_local(host)] or addresses

    def _query(self, host: str, name: bytes, arguments: dict[bytes, Any]) -> dict[bytes, Any]:
        """One question of BEP 5 to this very node, over its UDP door at a host; {} if it does not answer."""
        body = {b"id": b"forebay-own-inquiry0", **arguments}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as door:
                door.bind((host, 0))
                door.settimeout(0.5)
                door.connect((host, self.port))  # nobody else's packet is an answer
                door.send(_query_bytes(name, body))
                reply = lt.bdecode(door.recv(65536))
        except (OSError, RuntimeError) as error:  # the engine's decoder raises the latter
            log.debug("DHT at %s did not answer itself (%s): %s", host, name.decode(), error)
            return {}
        answer = reply.get(b"r") if isinstance(reply, dict) else None
        return dict(answer) if isinstance(answer, dict) else {}


def wait_for_bootstrap(addresses: Sequence[Address], timeout_s: float, stop: threading.Event | None = None) -> None:
    """Wait until a bootstrap node answers a ping, or `stop` is set; NetworkError with all states after `timeout_s`."""
    states = {join_address(*address): "no answer" for address in addresses}

    def asked() -> str:
        return ", ".join(f"{address}: {state}" for address, state in states.items())

    deadline = time.monotonic() + timeout_s
    with waiting(log, lambda: f"a bootstrap node of the DHT; asked {asked()}"):
        while True:
            if _ping(addresses, states, max(0.05, min(1.0, deadline - time.monotonic()))):
                return
            if stop is not None and stop.is_set():
                return
            if time.monotonic() >= deadline:
                raise NetworkError(
                    f"No bootstrap node answered ({asked()}); the DHT cannot be asked. Start one with `forebay dht`, "
                    "check that UDP reaches it, or name another with --bootstrap."
                )


def _ping(addresses: Sequence[Address], states: dict[str, str], timeout_s: float) -> bool:
    """Whether one of the nodes answers in time; `states` gets the reason of each that cannot be asked."""
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        deadline = time.monotonic() + timeout_s
        for address in addresses:
            try:
                family, kind, protocol, _, where = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
                door = stack.enter_context(socket.socket(family, kind, protocol))
                door.connect(where)
                door.send(_query_bytes(b"ping", {b"id": b"forebay-own-inquiry0"}))
                selector.register(door, selectors.EVENT_READ, join_address(*address))
            except OSError as error:
                states[join_address(*address)] = error.strerror or str(error)
        while (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                try:
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.recv(65536)
                    return True
                except OSError as error:  # an ICMP answer: nobody listens there
                    states[key.data] = error.strerror or str(error)
                    selector.unregister(key.fileobj)
        return False


def _query_bytes(name: bytes, body: dict[bytes, Any]) -> bytes:
    return bytes(lt.bencode({b"t": b"mr", b"y": b"q", b"q": name, b"a": body, b"ro": 1}))


def _is_local(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    return address.is_loopback or address.is_link_local


def _parse_compact(compact: object) -> Address | None:
    """An address of BEP 5: 4 or 16 bytes, then the port; None if it is none."""
    if not isinstance(compact, bytes) or len(compact) not in (6, 18) or compact[-2:] == b"\0\0":
        return None
    family = socket.AF_INET if len(compact) == 6 else socket.AF_INET6
    return socket.inet_ntop(family, compact[:-2]), int.from_bytes(compact[-2:], "big")


def _free_port(host: str, port: int) -> int:
    """The port, if nobody holds it at the host; a free one for 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as door:
        door.bind((host, port))
        return int(door.getsockname()[1])


def _settings(where: str, bootstrap: Sequence[Address]) -> dict[str, Any]:
    category = lt.alert.category_t
    return {
        "listen_interfaces": where,
        "max_retry_port_bind": 0,
        "enable_dht": True,
        "dht_bootstrap_nodes": ",".join(join_address(host, port) for host, port in bootstrap),
        # Many nodes may share one address: a lab, a rack behind one router, loopback.
        "dht_restrict_routing_ips": False,
        "dht_restrict_search_ips": False,
        "dht_enforce_node_id": False,
        "dht_block_ratelimit": 1000,
        "dht_upload_rate_limit": 1 << 20,
        "dht_max_peers": MAX_ADDRESSES,
        "allow_multiple_connections_per_ip": True,
        # The DHT alone: nothing of BitTorrent listens or calls out, nor does anything ask the router for ports.
        "enable_lsd": False,
        "enable_upnp": False,
        "enable_natpmp": False,
        "enable_incoming_tcp": False,
        "enable_outgoing_tcp": False,
        "enable_incoming_utp": False,
        "enable_outgoing_utp": False,
        "alert_mask": category.dht_notification
        | category.dht_operation_notification
        | category.error_notification
        | category.status_notification
        | category.stats_notification,
    }
