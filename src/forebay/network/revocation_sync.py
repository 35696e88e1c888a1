"""Keep a running node's trust current: exchange CRLs, renew its certificate.

CRLs pass over every connection (`crl_exchange.py`). Besides, this thread exchanges them every few seconds with up to
three members, and after a change with all whose addresses it knows. Members are known once they proved themselves by
their certificate; the DHT is one way to find some, and of what it says one host or network counts like another, however
many addresses it announced.
"""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.errors import ForebayError, UsageError
from forebay.network.client import Client
from forebay.network.crl_exchange import PAUSE_S, exchange_crls
from forebay.network.discovery import Discovery, ask_many, record_key, spread
from forebay.network.join import admission_address, renew_at
from forebay.network.pki.identity import Identity
from forebay.storage.hosts import HostPort, join_address, parse_address
from forebay.threads import SupervisedThread

NUM_ASKED = 3
ASK_S = 10.0
LOOK_EVERY_S = 1.0
DISCOVER_EVERY_S = 60.0
NUM_SEARCHES, MAX_FOUND = 4, 64  # of the DHT, while no member is known; addresses that are asked after each
MAX_FOUND_PER_HOST = 2


@dataclass(eq=False)
class TrustWatch:
    """A node's background thread for CRLs and renewal, from `start` to `close`.

    Args:
        peers: Returns addresses of nodes to query, such as schedulers and data nodes in use.
        discovery: Finds further nodes that serve CRLs, and announces this node's `address`, if it has one.
        on_change: Called when a peer was revoked, to cut open connections.
        ask_every_s: Between rounds of requests. `look_every_s`: between checks of files and expiry.
    """

    identity: Identity
    client: Client
    peers: Callable[[], Sequence[str]] = tuple
    discovery: Discovery | None = None
    address: str | None = None
    on_change: Callable[[], object] = lambda: None
    ask_every_s: float = PAUSE_S
    look_every_s: float = LOOK_EVERY_S

    def __post_init__(self) -> None:
        self.look_every_s = min(self.look_every_s, self.ask_every_s)
        # At once: files may have changed while the node was down.
        self._ask_at = self._renew_at = time.monotonic()
        self._discover_at = time.monotonic() + self.look_every_s  # after its own announcements
        self._stamp = self.identity.revocations.stamp()
        self._thread = SupervisedThread(self._run, "trust", first_wait_s=self.look_every_s)

    def start(self) -> "TrustWatch":
        """Start the thread."""
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop; waits for a request in progress. May be repeated."""
        self._thread.stop()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._thread.stopping.is_set():
            self.identity.refresh()
            stamp = self.identity.revocations.stamp()
            if stamp != self._stamp:
                self._stamp = stamp
                self.on_change()
                self._ask(self._members(), is_urgent=True)
            if time.monotonic() >= self._ask_at:
                self._ask_at = time.monotonic() + self.ask_every_s * random.uniform(0.8, 1.2)
                members = self._members()
                self._ask(random.sample(members, min(NUM_ASKED, len(members))))
                self._discover()
            if time.monotonic() >= self._renew_at:
                self._renew()
            self._thread.stopping.wait(self.look_every_s)

    def _members(self) -> list[HostPort]:
        """Return addresses of members, without this node's own."""
        members = list[HostPort]()
        for address in dict.fromkeys([*self.peers(), *self.identity.contacts.addresses()]):
            with contextlib.suppress(UsageError):
                if address != self.address:
                    members.append(parse_address(address))
        return members

    def _ask(self, addresses: Sequence[HostPort], *, is_urgent: bool = False) -> None:
        """Exchange CRLs with nodes, with all at once."""

        def ask(address: HostPort) -> bool | None:
            return exchange_crls(self.client, self.identity, join_address(*address), ASK_S, is_urgent=is_urgent) or None

        ask_many(addresses, ask, time.monotonic() + ASK_S)

    def _renew(self) -> None:
        """Renew the certificate at the issuer's admission server once less than a third of its validity remains."""
        identity = self.identity
        remaining_s = identity.expires_at - time.time()
        until_due_s = remaining_s - identity.valid_s / 3
        if until_due_s > 0:
            self._renew_at = time.monotonic() + min(until_due_s, 3600.0)  # the clock may be set meanwhile
            return
        address = admission_address(identity.node_dir)
        self._renew_at = time.monotonic() + min(3600.0, max(self.look_every_s, abs(remaining_s) / 10))
        reason = ""
        try:
            if address is not None:
                renew_at(address, identity.node_dir)
                identity.refresh()
                return
        except (ForebayError, OSError) as error:
            reason = f"This node cannot renew it: {error}"
        identity.warn_of_expiry(time.time(), reason)

    def _discover(self) -> None:
        """Announce this node, and ask some of the nodes that others announced; more often while no member is known."""
        now = time.monotonic()
        if self.discovery is None or now < self._discover_at:
            return
        key = record_key(self.identity.network_id, "revocations", "")
        if self.address is not None:
            self.discovery.announce(key, parse_address(self.address)[1])
        for _ in range(NUM_SEARCHES):
            self._ask(_choose(self.discovery.find(key, 2.0)))
            if self._members():
                self._discover_at = now + DISCOVER_EVERY_S
                break


def _choose(addresses: Sequence[HostPort]) -> list[HostPort]:
    """Return MAX_FOUND addresses at most, by chance: of each host a few, and networks (/24, /48) in turn."""
    by_host = Counter[str]()
    chosen = []
    for address in random.sample(addresses, len(addresses)):
        by_host[address[0]] += 1
        if by_host[address[0]] <= MAX_FOUND_PER_HOST:
            chosen.append(address)
    return spread(chosen)[:MAX_FOUND]
