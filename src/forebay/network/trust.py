"""What keeps a running node's trust fresh: it serves and learns revocations, cuts whom they name, renews itself.

What the choice costs: one thread, and a request every few seconds to up to three peers; a list reaches n nodes in
about log n rounds of it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

from forebay.errors import NetworkError, UsageError
from forebay.network.client import Client, parse_address
from forebay.network.discovery import Discovery, record_key
from forebay.network.exchange import BadRequestError, Request, Response, error_response, json_response
from forebay.network.identity import Identity

REVOCATIONS = "/v1/revocations"
NUM_ASKED = 3
ASK_EVERY_S = 5.0
LOOK_EVERY_S = 1.0
ANNOUNCE_EVERY_S = 60.0
MAX_LISTS_BYTES = 8 << 20
log = logging.getLogger("forebay.network")


def answer_trust(identity: Identity, request: Request) -> Response | None:
    """The doors that each node has: `GET` and `POST /v1/revocations`. None: the request is for another door.

    GET with `have` (the digest known) answers without lists if there is nothing new. POST takes lists from whoever
    brings them: they are signed. What is forged, foreign or malformed is refused and noted.
    """
    if request.path != REVOCATIONS:
        return None
    if request.method == "GET":
        known = identity.revocations.digest()
        same = request.query.get("have") == known
        return json_response({"digest": known, "lists": []} if same else identity.revocations.to_json())
    if request.method != "POST":
        return error_response(405, "unknown_method", f"revocations: expected GET or POST, got {request.method}")
    try:
        take_lists(identity, request.json(), request.peer.peer_id)
    except BadRequestError:
        raise
    except NetworkError as error:
        return error_response(403, "bad_list", str(error))
    return json_response({"digest": identity.revocations.digest()})


def take_lists(identity: Identity, obj: object, giver: str) -> int:
    """Keeps the newer lists of an answer and notes them; returns how many there were.

    Raises:
        ProtocolViolation: If one is malformed, foreign or forged; that is noted, too.
    """
    try:
        newer = identity.revocations.accept(obj)
    except NetworkError as error:
        identity.note("refused", peer=giver, reason=str(error))
        raise
    for found in newer:
        log.info("revocation list %d of %s: %d revoked", found.number, found.issuer, len(found.revoked))
        identity.note("revocations", issuer=found.issuer, number=found.number, revoked=len(found.revoked), by=giver)
    return len(newer)


def tell(client: Client, address: str, identity: Identity) -> str:
    """Brings the lists that a node knows to another; returns that one's peer id.

    Raises:
        NetworkError: If it cannot be reached, or refuses them.
    """
    return client.request_json(address, "POST", REVOCATIONS, identity.revocations.to_json())[1].peer_id


class TrustWatch:
    """A node's background thread for trust, from `start` to `close`.

    Args:
        known: Addresses worth asking, such as those of schedulers and data nodes spoken to.
        discovery: Where nodes that serve revocations find each other; None: only `known` are asked.
        address: Ours, to be found at; None: we only ask.
        on_change: Called when somebody new is revoked: cut live connections here.
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
        self._announce_at = time.monotonic() + self._look_every_s  # after the node's own announcements
        self._thread = threading.Thread(target=self._run, name="trust", daemon=True)

    def start(self) -> TrustWatch:
        """Begin."""
        self._stamp = self._identity.revocations.stamp()
        self._thread.start()
        return self

    def close(self) -> None:
        """End; waits for a request under way. May be repeated."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def ask(self, address: str) -> bool:
        """Asks one node; whether it told something new. One that cannot be reached or lies is logged."""
        path = f"{REVOCATIONS}?have={self._identity.revocations.digest()}"
        try:
            answer, peer = self._client.request_json(address, "GET", path, timeout_s=5.0, max_bytes=MAX_LISTS_BYTES)
            if peer.peer_id == self._identity.peer_id:
                self._found = [other for other in self._found if other != address]
                return False
            return take_lists(self._identity, answer, peer.peer_id) > 0
        except NetworkError as error:
            log.info("revocations: %s left out: %s", address, error)
            return False

    def _run(self) -> None:
        ask_at = time.monotonic()  # at once: what happened while this node was down counts
        while not self._stopping.is_set():
            now = time.monotonic()
            try:
                if now >= ask_at:
                    self._meet(now)
                    for address in self._choose():
                        self.ask(address)
                    ask_at = time.monotonic() + self._ask_every_s * self._chance.uniform(0.8, 1.2)
                self._look()
            except (UsageError, OSError) as error:
                log.error("trust: %s", error)
            self._stopping.wait(self._look_every_s)

    def _look(self) -> None:
        self._identity.refresh()
        stamp = self._identity.revocations.stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            self._on_change()

    def _meet(self, now: float) -> None:
        if self._discovery is None or now < self._announce_at:
            return
        self._announce_at = now + ANNOUNCE_EVERY_S
        key = record_key(self._identity.network_id, "revocations", "")
        try:
            if self._address is not None:
                self._discovery.announce(key, parse_address(self._address)[1])
            found = self._discovery.find(key, 2.0)
        except NetworkError as error:
            log.info("revocations: the DHT is away: %s", error)
            return
        self._found = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in found]

    def _choose(self) -> list[str]:
        addresses = [a for a in dict.fromkeys([*self._known(), *self._found]) if a != self._address]
        return self._chance.sample(addresses, min(NUM_ASKED, len(addresses)))
