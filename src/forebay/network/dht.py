"""Discovery by a private Kademlia DHT: libtorrent's, with the network's own bootstrap nodes.

Source: BEP 5. An announcement is stored on the nodes nearest to its key. Its address is that of the sender, so this
node also announces to itself, from each address at which another host can reach it: then the first node of a network
can be found. Announcements are repeated when the routing table grows; the owner repeats them before they expire
(libtorrent drops them after some 45 minutes).

A bootstrap node that was away has forgotten all others, and they have forgotten it: libtorrent asks it again only while
it knows fewer than three others. So each node enters by it again and again: else those that came before and after would
not find each other.

Cost: a UDP port and three threads. Anyone who reaches the port can read the records, so they contain addresses only. A
node stores at most MAX_ADDRESSES under a key and returns 100 random ones: a flood can delay a search, not prevent it.
"""

import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import libtorrent

from forebay.errors import NetworkError
from forebay.network import log
from forebay.storage.hosts import HostPort, host_towards, join_address, parse_ip
from forebay.storage.retry import log_while_waiting
from forebay.threads import SupervisedThread

START_TIMEOUT_S = 10.0
QUIET_S = 0.4  # wait for further answers while no round-trip time is known
MIN_QUIET_S = 0.1
STATS_EVERY_S = 0.5
ANNOUNCE_S = 3.0  # for this node itself to take an announcement: on a busy machine, and it is not repeated
REJOIN_EVERY_S = 20.0  # by each bootstrap node
PING_S = 1.0
MAX_ADDRESSES = 5000  # stored under one key
lt: Any = libtorrent  # its type stubs are incomplete


class LibtorrentDht:
    """A DHT node, running from construction to `close`. Implements `Discovery`.

    Args:
        host: Address to listen at: `0.0.0.0` or `::` for all but loopback; "" for the one that routes to the first
            bootstrap node.
        port: UDP port, the same on every address; 0 takes a free one.
        bootstrap: Nodes to join by; without any it is the first node of a network.
    """

    def __init__(self, host: str, port: int, bootstrap: Sequence[HostPort] = ()) -> None:
        host = host or host_towards(*bootstrap[:1])
        self.host = host
        self.port = port
        self.fault = ""  # see Discovery
        self._bootstrap = list(bootstrap)
        self._addresses = set[str]()
        self._changed = threading.Condition()
        self._results: dict[bytes, set[HostPort]] = {}
        self._answered_at: dict[bytes, float] = {}  # first answer of another node
        self._announced: dict[bytes, int] = {}
        self.num_nodes = 0  # others in the routing table, up to half a second ago
        self._failure = ""
        self._closed = False
        try:
            # libtorrent would choose another port for each address, or share a used one silently.
            self.port = _free_port(host, port)
            self._session = lt.session(_settings(join_address(host, self.port), bootstrap))
        except (OSError, OverflowError, RuntimeError) as error:
            raise self._listen_error(error) from error
        self._pump = SupervisedThread(self._run, "dht").start()
        self._joiner = SupervisedThread(self._keep_joined, "dht-join")
        with self._changed:
            self._changed.wait_for(lambda: self._addresses or self._failure, START_TIMEOUT_S)
        listening = int(self._session.listen_port())
        if not listening or self._failure:
            self.close()
            raise self._listen_error(self._failure or "no answer from libtorrent")
        self.port = listening
        if bootstrap:
            self._joiner.start()

    def _listen_error(self, reason: object) -> NetworkError:
        return NetworkError(
            f"DHT: cannot listen at {join_address(self.host, self.port)} (UDP): {reason}. "
            "Choose another port (0 takes a free one)."
        )

    def announce(self, key: bytes, port: int) -> None:
        """See Discovery. Returns at once; the nodes near the key receive it within one or two round trips."""
        with self._changed:
            if self._closed:
                return
            self._announced[key] = port
            self._session.dht_announce(lt.sha1_hash(key), port, 0)
        for host in self._own_addresses():
            token = self._query(host, b"get_peers", {b"info_hash": key}, ANNOUNCE_S).get(b"token")
            if token:
                self._query(
                    host,
                    b"announce_peer",
                    {b"info_hash": key, b"port": port, b"token": token, b"implied_port": 0},
                    ANNOUNCE_S,
                )

    def find(self, key: bytes, timeout_s: float) -> list[HostPort]:
        """See Discovery. Queries this node's store and the nodes near the key, each second until one answers.

        Returns when no further answer came for twice the time of the first one.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                if self._closed:
                    return []
                self._results[key] = set()
                self._answered_at[key] = 0.0
                self._session.dht_get_peers(lt.sha1_hash(key))
                asked_at = time.monotonic()
            # In this node's own store: libtorrent's search queries other nodes only.
            values = self._query(self._own_addresses()[0], b"get_peers", {b"info_hash": key}).get(b"values")
            parsed = map(_parse_compact, values) if isinstance(values, list) else ()
            own = {address for address in parsed if address is not None}
            with self._changed:
                self._results[key] |= own
                wait_s = min(1.0, deadline - time.monotonic())
                self._changed.wait_for(lambda: self._closed or self._results[key], max(0.0, wait_s))
                seen = -1
                while not self._closed and len(self._results[key]) > seen:
                    seen = len(self._results[key])
                    first_s = self._answered_at[key] - asked_at if self._answered_at[key] else QUIET_S / 2
                    quiet_s = min(QUIET_S, max(MIN_QUIET_S, 2 * first_s))
                    self._changed.wait_for(lambda s=seen: len(self._results[key]) > s, quiet_s)  # type: ignore[misc]
                if self._results[key] or time.monotonic() >= deadline:
                    return sorted(self._results[key])

    def close(self) -> None:
        """See Discovery. Waits for libtorrent's threads."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for thread in (self._joiner, self._pump):
            thread.stop()
            thread.join()
        del self._session  # returns when libtorrent's threads have ended

    def _run(self) -> None:
        """Handle libtorrent's alerts until `close`; request its statistics."""
        asked_at = 0.0
        while not self._closed:
            if time.monotonic() - asked_at >= STATS_EVERY_S:
                self._session.post_session_stats()
                asked_at = time.monotonic()
            self._session.wait_for_alert(100)
            for alert in self._session.pop_alerts():
                self._handle(alert)

    def _keep_joined(self) -> None:
        """Enter the DHT again by the bootstrap nodes that answer, until `close`; two rounds without any are a fault."""
        num_failed = 0
        while not self._joiner.stopping.wait(REJOIN_EVERY_S):
            states = {address: "" if self._closed else ping(address, PING_S) for address in self._bootstrap}
            for address, state in states.items():
                if not state:
                    self._session.add_dht_node(address)
            num_failed = num_failed + 1 if all(states.values()) else 0
            before, self.fault = self.fault, ""
            if num_failed > 1:
                self.fault = (
                    f"the DHT: no bootstrap node answers ({_describe(states)}): nodes that start now are not found; "
                    "start one again (forebay dht)"
                )
            if bool(before) != bool(self.fault):
                log.warning("%s", self.fault or "the DHT: a bootstrap node answers again")

    def _handle(self, alert: Any) -> None:
        announced: list[tuple[bytes, int]] = []
        with self._changed:
            if isinstance(alert, lt.dht_get_peers_reply_alert):
                key = alert.info_hash.to_bytes()
                if key in self._results:
                    self._results[key] |= {(str(host), int(port)) for host, port in alert.peers() if port}
                    self._answered_at[key] = self._answered_at[key] or time.monotonic()
            elif isinstance(alert, lt.session_stats_alert):
                num_nodes = int(alert.values.get("dht.dht_nodes", 0))
                if num_nodes > self.num_nodes:
                    announced = list(self._announced.items())
                self.num_nodes = num_nodes
            elif isinstance(alert, lt.listen_succeeded_alert):
                self._addresses.add(str(alert.address))
                announced = list(self._announced.items())  # until now to the other addresses only
            elif isinstance(alert, lt.listen_failed_alert):
                self._failure = alert.message()
            self._changed.notify_all()
        for key, port in announced:
            self.announce(key, port)

    def _own_addresses(self) -> list[str]:
        """Addresses at which this node answers, without local ones if there are others."""
        with self._changed:
            addresses = sorted(self._addresses)
        ips = map(parse_ip, addresses)
        return [host for host, ip in zip(addresses, ips) if not (ip.is_loopback or ip.is_link_local)] or addresses

    def _query(self, host: str, name: bytes, arguments: dict[bytes, Any], wait_s: float = 0.5) -> dict[bytes, Any]:
        """Send a BEP 5 query to this node itself, from one of its addresses; {} if there is no answer."""
        try:
            reply = lt.bdecode(_send_query((host, self.port), name, arguments, wait_s, source=host))
        except (OSError, RuntimeError) as error:  # bdecode raises the latter
            log.debug("DHT at %s did not answer its own query (%s): %s", host, name.decode(), error)
            return {}
        answer = reply.get(b"r") if isinstance(reply, dict) else None
        return answer if isinstance(answer, dict) else {}


def wait_for_bootstrap(addresses: Sequence[HostPort], timeout_s: float, stop: threading.Event | None = None) -> None:
    """Wait until a bootstrap node answers a ping or `stop` is set. NetworkError with all states after `timeout_s`."""
    states = dict.fromkeys(addresses, "no answer")
    deadline = time.monotonic() + timeout_s
    with log_while_waiting(log, lambda: f"a bootstrap node of the DHT; asked {_describe(states)}"):
        while True:
            for address in addresses:
                wait_s = max(0.05, min(PING_S, deadline - time.monotonic()) / len(addresses))
                states[address] = ping(address, wait_s)
                if not states[address]:
                    return
            if (stop or threading.Event()).wait(0.05):
                return
            if time.monotonic() >= deadline:
                raise NetworkError(
                    f"No bootstrap node answered ({_describe(states)}); the DHT cannot be queried. Start one with "
                    "`forebay dht`, check that UDP reaches it, or name another with --bootstrap."
                )


def ping(address: HostPort, timeout_s: float) -> str:
    """Send a ping; return why there is no answer, "" if there is one."""
    try:
        _send_query(address, b"ping", {}, timeout_s)
        return ""
    except OSError as error:  # without `strerror` it is the time-out; ICMP: no process listens at the port
        return error.strerror or "no answer"


def _describe(states: dict[HostPort, str]) -> str:
    return ", ".join(f"{join_address(*address)}: {state or 'answers'}" for address, state in states.items())


def _send_query(
    target: HostPort, name: bytes, arguments: dict[bytes, Any], timeout_s: float, source: str = ""
) -> bytes:
    """The reply to a BEP 5 query, from the address `source`. Raises OSError."""
    body = {b"id": b"forebay-own-inquiry0", **arguments}
    query = lt.bencode({b"t": b"mr", b"y": b"q", b"q": name, b"a": body, b"ro": 1})
    family, kind, protocol, _, sockaddr = socket.getaddrinfo(*target, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as sock:
        if source:
            sock.bind((source, 0))
        sock.settimeout(timeout_s)
        sock.connect(sockaddr)  # packets from other addresses are dropped
        sock.send(query)
        return sock.recv(65536)


def _parse_compact(compact: object) -> HostPort | None:
    """Parse a compact address (4 or 16 bytes, then the port; BEP 5); None if malformed."""
    if not isinstance(compact, bytes) or len(compact) not in (6, 18) or compact[-2:] == b"\0\0":
        return None
    family = socket.AF_INET if len(compact) == 6 else socket.AF_INET6
    return socket.inet_ntop(family, compact[:-2]), int.from_bytes(compact[-2:], "big")


def _free_port(host: str, port: int) -> int:
    """The port if it is free at the host; for 0 a free one. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((host, port))
        return int(sock.getsockname()[1])


def _settings(listen: str, bootstrap: Sequence[HostPort]) -> dict[str, Any]:
    category = lt.alert.category_t
    disabled = ("lsd", "upnp", "natpmp", "incoming_tcp", "outgoing_tcp", "incoming_utp", "outgoing_utp")
    return {
        "listen_interfaces": listen,
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
        # The DHT alone: no BitTorrent connections, no requests to the router.
        **{f"enable_{name}": False for name in disabled},
        "alert_mask": category.dht_notification
        | category.dht_operation_notification
        | category.error_notification
        | category.status_notification
        | category.stats_notification,
    }
