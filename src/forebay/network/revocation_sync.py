"""Keep a running node's trust current: serve and fetch CRLs, renew its certificate.

`GET /v1/crls` returns {"crls": {issuer: number}}, `GET /v1/crls/ISSUER` a CRL as PEM; `POST /v1/crls` takes a CRL and
returns {"new": whether it was accepted}. Cost: a thread, and every few seconds a small request to up to three peers; a
CRL reaches n nodes in about log n rounds.
"""

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.errors import ForebayError, NetworkError, ProtocolError
from forebay.network.client import Client
from forebay.network.discovery import Discovery, record_key
from forebay.network.join import admission_address, renew_at
from forebay.network.pki.identity import Identity
from forebay.network.pki.revocation import MAX_CRL_BYTES, MAX_ISSUERS, PEER_ID, Crl
from forebay.storage.hosts import join_address, parse_address
from forebay.threads import SupervisedThread

CRLS = "/v1/crls"
PEM_TYPE = "application/x-pem-file"
NUM_ASKED = 3
ASK_EVERY_S = 5.0
LOOK_EVERY_S = 1.0
ANNOUNCE_EVERY_S = 60.0
AVOID_S = 60.0  # no requests to a peer after it failed or lied
MAX_FETCHED = 8  # CRLs per peer and round
MAX_NUMBERS_BYTES = 128 << 10
log = logging.getLogger("forebay.network")


def receive_crl(identity: Identity, pem: bytes, sender: str) -> Crl | None:
    """Apply a CRL from a peer and record it in the audit log; None if it is not newer. Raises ProtocolError."""
    try:
        crl = identity.revocations.accept(pem)
    except ProtocolError as error:
        identity.record_event("refused", peer=sender, reason=str(error))
        raise
    if crl is not None:
        log.info("CRL accepted: issuer=%s number=%d revoked=%d", crl.issuer, crl.number, len(crl.serials))
        identity.record_event("crl", issuer=crl.issuer, number=crl.number, revoked=len(crl.serials), by=sender)
    return crl


def send_crl(client: Client, address: str, crl: Crl) -> tuple[str, bool]:
    """Send a CRL to a node; return the node's peer id, and whether it accepted the CRL as new."""
    answer, peer = client.request_json(address, "POST", CRLS, crl.pem)
    return peer.peer_id, answer.get("new") is True


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
    ask_every_s: float = ASK_EVERY_S
    look_every_s: float = LOOK_EVERY_S

    def __post_init__(self) -> None:
        self.look_every_s = min(self.look_every_s, self.ask_every_s)
        self._discovered: list[str] = []
        self._avoided: dict[str, float] = {}
        # At once: files may have changed while the node was down.
        self._ask_at = self._renew_at = time.monotonic()
        self._announce_at = time.monotonic() + self.look_every_s  # after the node's own announcements
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

    def ask(self, address: str) -> bool:
        """Fetch the CRLs that a node has newer; whether there were any. After a failure it is avoided for AVOID_S."""
        try:
            return self._fetch(address)
        except (ForebayError, OSError, UnicodeError) as error:
            log.info("revocation: %s not asked for %.0f s: %s", address, AVOID_S, error)
            self._avoided[address] = time.monotonic() + AVOID_S
            return False

    def _fetch(self, address: str) -> bool:
        answer, peer = self.client.request_json(address, "GET", CRLS, timeout_s=5.0, max_bytes=MAX_NUMBERS_BYTES)
        if peer.peer_id == self.identity.peer_id:
            self._discovered = [other for other in self._discovered if other != address]
            return False
        revocations = self.identity.revocations
        newer = [
            issuer for issuer, number in _parse_numbers(answer, address).items() if revocations.wants(issuer, number)
        ]
        for issuer in sorted(newer, key=lambda issuer: issuer != revocations.root_id)[:MAX_FETCHED]:
            pem = self.client.get_bytes(address, f"{CRLS}/{issuer}", MAX_CRL_BYTES, timeout_s=30.0)
            if receive_crl(self.identity, pem, peer.peer_id) is None:
                raise ProtocolError(f"peer at {address}: it does not have the CRL of {issuer} that it announced")
        return bool(newer)

    def _run(self) -> None:
        while not self._thread.stopping.is_set():
            if time.monotonic() >= self._ask_at:
                self._ask_at = time.monotonic() + self.ask_every_s * random.uniform(0.8, 1.2)
                self._discover()
                for address in self._choose():
                    self.ask(address)
            self.identity.refresh()
            stamp = self.identity.revocations.stamp()
            if stamp != self._stamp:
                self._stamp = stamp
                self.on_change()
            if time.monotonic() >= self._renew_at:
                self._renew()
            self._thread.stopping.wait(self.look_every_s)

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
        if address is None:
            identity.warn_of_expiry(time.time())
            return
        try:
            renew_at(address, identity.node_dir)
            identity.refresh()
        except (ForebayError, OSError) as error:
            log.warning("certificate of %s: %.1f h left, cannot renew it: %s", identity.name, remaining_s / 3600, error)

    def _discover(self) -> None:
        if self.discovery is None or time.monotonic() < self._announce_at:
            return
        self._announce_at = time.monotonic() + ANNOUNCE_EVERY_S
        key = record_key(self.identity.network_id, "revocations", "")
        try:
            if self.address is not None:
                self.discovery.announce(key, parse_address(self.address)[1])
            self._discovered = [join_address(*address) for address in self.discovery.find(key, 2.0)]
        except NetworkError as error:
            log.info("revocation: the DHT cannot be reached: %s", error)

    def _choose(self) -> list[str]:
        now = time.monotonic()
        self._avoided = {address: until for address, until in self._avoided.items() if until > now}
        skipped = {self.address, *self._avoided}
        addresses = [item for item in dict.fromkeys([*self.peers(), *self._discovered]) if item not in skipped]
        return random.sample(addresses, min(NUM_ASKED, len(addresses)))


def _parse_numbers(answer: dict[str, Any], address: str) -> dict[str, int]:
    """Check the answer of `GET /v1/crls`. Raises ProtocolError."""
    numbers = answer.get("crls")
    if (
        isinstance(numbers, dict)
        and len(numbers) <= MAX_ISSUERS
        and all(PEER_ID.fullmatch(issuer) and type(number) is int for issuer, number in numbers.items())
    ):
        return numbers
    raise ProtocolError(
        f"CRLs of the peer at {address}: expected numbers of at most {MAX_ISSUERS} issuers, got {str(answer)[:80]}"
    )
