"""What keeps the trust of a running node up to date: it serves and fetches CRLs, and renews its own certificate.

`GET /v1/crls` answers {"crls": {issuer: number}}, `GET /v1/crls/ISSUER` a CRL as PEM. `POST /v1/crls` takes one from
anybody, as it is signed, and answers {"new": whether it was accepted}. Cost: a thread, and every few seconds a small
request to up to three peers; a CRL reaches n nodes in about log n rounds.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from forebay.errors import ForebayError, NetworkError, ProtocolError
from forebay.network.addresses import join_address, parse_address
from forebay.network.client import Client
from forebay.network.discovery import Discovery, record_key
from forebay.network.join import admission_address, renew_at
from forebay.network.pki.identity import Identity
from forebay.network.pki.revocation import MAX_CRL_BYTES, MAX_ISSUERS, PEER_ID, Crl
from forebay.threads import SupervisedThread

CRLS = "/v1/crls"
PEM_TYPE = "application/x-pem-file"
NUM_ASKED = 3
ASK_EVERY_S = 5.0
LOOK_EVERY_S = 1.0
ANNOUNCE_EVERY_S = 60.0
AVOID_S = 60.0  # a peer that could not be reached or lied
OVERDUE_EVERY_S = 86400.0
MAX_FETCHED = 8  # CRLs of one peer in one round
MAX_NUMBERS_BYTES = 128 << 10
log = logging.getLogger("forebay.network")


def receive_crl(identity: Identity, pem: bytes, sender: str) -> Crl | None:
    """Takes a CRL that a peer sent into force, and notes it in the audit log; None if it is not newer."""
    try:
        crl = identity.revocations.accept(pem)
    except ProtocolError as error:
        identity.record_event("refused", peer=sender, reason=str(error))
        raise
    if crl is not None:
        log.info("revocation: CRL %d of %s accepted: %d revoked", crl.number, crl.issuer, len(crl.serials))
        identity.record_event("crl", issuer=crl.issuer, number=crl.number, revoked=len(crl.serials), by=sender)
    return crl


def send_crl(client: Client, address: str, crl: Crl) -> tuple[str, bool]:
    """Brings a CRL to a node; returns the node's peer id, and whether it accepted the CRL as new."""
    answer, peer = client.request_json(address, "POST", CRLS, crl.pem)
    return peer.peer_id, isinstance(answer, dict) and answer.get("new") is True


class TrustWatch:
    """A node's background thread for trust, from `start` to `close`. No exception ends it.

    `known` are addresses worth asking, such as those of schedulers and data nodes spoken to; with `discovery` other
    nodes that serve CRLs are asked, too, and find us at `address`, if we have one. `on_change` is called when somebody
    new is revoked: cut live connections there.
    """

    def __init__(
        self,
        identity: Identity,
        client: Client,
        *,
        known: Callable[[], Sequence[str]] = tuple,
        discovery: Discovery | None = None,
        address: str | None = None,
        on_change: Callable[[], object] = lambda: None,
        ask_every_s: float = ASK_EVERY_S,
        look_every_s: float = LOOK_EVERY_S,
        chance: random.Random | None = None,
    ) -> None:
        self._identity = identity
        self._client = client
        self._known = known
        self._discovery = discovery
        self._address = address
        self._on_change = on_change
        self._ask_every_s = ask_every_s
        self._look_every_s = min(look_every_s, ask_every_s)
        self._chance = chance or random.Random()
        self._stopping = threading.Event()
        self._found: list[str] = []
        self._avoided: dict[str, float] = {}
        self._ask_at = self._overdue_at = self._renew_at = time.monotonic()  # at once: what changed while we were down
        self._announce_at = time.monotonic() + self._look_every_s  # after the node's own announcements
        self._stamp = identity.revocations.stamp()
        self._thread = SupervisedThread(self._run, "trust", stopping=self._stopping, first_wait_s=self._look_every_s)

    def start(self) -> TrustWatch:
        """Begin."""
        self._thread.start()
        return self

    def close(self) -> None:
        """End; waits for a request under way. May be repeated."""
        self._stopping.set()
        self._thread.join(10.0)

    def ask(self, address: str) -> bool:
        """Fetches the CRLs that a node has newer; whether one was new. If it fails, it is not asked for AVOID_S."""
        try:
            return self._ask(address)
        except (ForebayError, OSError, UnicodeError) as error:
            log.info("revocation: %s not asked for %.0f s: %s", address, AVOID_S, error)
            self._avoided[address] = time.monotonic() + AVOID_S
            return False

    def _ask(self, address: str) -> bool:
        answer, peer = self._client.request_json(address, "GET", CRLS, timeout_s=5.0, max_bytes=MAX_NUMBERS_BYTES)
        if peer.peer_id == self._identity.peer_id:
            self._found = [other for other in self._found if other != address]
            return False
        revocations = self._identity.revocations
        newer = [issuer for issuer, number in _numbers(answer, address).items() if revocations.wants(issuer, number)]
        roots_first = sorted(newer, key=lambda issuer: issuer not in revocations.root_ids)
        for issuer in roots_first[:MAX_FETCHED]:
            pem = self._client.get_bytes(address, f"{CRLS}/{issuer}", MAX_CRL_BYTES, timeout_s=30.0)
            if receive_crl(self._identity, pem, peer.peer_id) is None:
                raise ProtocolError(f"peer at {address}: it does not have the CRL of {issuer} that it says it has")
        return bool(newer)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._step()
            self._stopping.wait(self._look_every_s)

    def _step(self) -> None:
        if time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + self._ask_every_s * self._chance.uniform(0.8, 1.2)
            self._meet()
            for address in self._choose():
                self.ask(address)
        self._look()
        if time.monotonic() >= self._renew_at:
            self._renew()

    def _look(self) -> None:
        """Follows the files: a renewed certificate, changed revocations, CRLs that are overdue."""
        self._identity.refresh()
        stamp = self._identity.revocations.stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            self._on_change()
        if time.monotonic() >= self._overdue_at:
            self._overdue_at = time.monotonic() + OVERDUE_EVERY_S
            for issuer in self._identity.revocations.overdue(time.time()):
                log.warning(
                    "revocation: the next CRL of %s is overdue; the known one stays in force. Its issuer signs one "
                    "with `forebay network revoke`.", issuer,
                )  # fmt: skip

    def _renew(self) -> None:
        """Renews the certificate at the issuer's admission server once less than a third of its lifetime is left."""
        identity = self._identity
        left_s = identity.expires_at - time.time()
        until_due_s = left_s - identity.valid_s / 3
        if until_due_s > 0:
            self._renew_at = time.monotonic() + min(until_due_s, 3600.0)  # the clock may be set meanwhile
            return
        address = admission_address(identity.node_dir)
        self._renew_at = time.monotonic() + min(3600.0, max(self._look_every_s, abs(left_s) / 10))
        if address is None:
            identity.warn_of_expiry(time.time())
            return
        try:
            renew_at(address, identity.node_dir)
            identity.refresh()
        except (ForebayError, OSError) as error:
            log.warning("certificate of %s: %.1f h left, cannot renew it: %s", identity.name, left_s / 3600, error)

    def _meet(self) -> None:
        if self._discovery is None or time.monotonic() < self._announce_at:
            return
        self._announce_at = time.monotonic() + ANNOUNCE_EVERY_S
        key = record_key(self._identity.network_id, "revocations", "")
        try:
            if self._address is not None:
                self._discovery.announce(key, parse_address(self._address)[1])
            found = self._discovery.find(key, 2.0)
        except NetworkError as error:
            log.info("revocation: the DHT cannot be reached: %s", error)
            return
        self._found = [join_address(*where) for where in found]

    def _choose(self) -> list[str]:
        now = time.monotonic()
        self._avoided = {address: until for address, until in self._avoided.items() if until > now}
        skipped = {self._address, *self._avoided}
        addresses = [address for address in dict.fromkeys([*self._known(), *self._found]) if address not in skipped]
        return self._chance.sample(addresses, min(NUM_ASKED, len(addresses)))


def _numbers(answer: Any, address: str) -> dict[str, int]:
    """The answer of `GET /v1/crls`, checked."""
    numbers = answer.get("crls") if isinstance(answer, dict) else None
    if isinstance(numbers, dict) and len(numbers) <= MAX_ISSUERS:
        checked = {issuer: n for issuer, n in numbers.items() if PEER_ID.fullmatch(issuer) and type(n) is int}
        if len(checked) == len(numbers):
            return checked
    raise ProtocolError(
        f"CRLs of the peer at {address}: expected numbers of at most {MAX_ISSUERS} issuers, got {str(answer)[:80]}"
    )
