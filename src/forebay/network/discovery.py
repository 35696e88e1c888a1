"""Who has what: keys in the DHT, the claims that providers sign, and the way from a name to providers.

The DHT only says at which addresses to ask; it is open UDP and may lie. What counts is asked over mutual TLS:
the provider's claims, signed with the key that its certificate proves. The dead, the liars and the expired drop
out here.
"""

import hashlib
import json
import logging
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol
from urllib.parse import quote

from pydantic import TypeAdapter

from forebay.errors import NetworkError, ProtocolViolation
from forebay.network.addresses import check_url, join_address
from forebay.network.client import Client
from forebay.network.messages import Count, Sha256
from forebay.network.pki.identity import Identity, Peer, verify
from forebay.network.probe import ask_many

MAX_CLAIMS = 512
MAX_CLAIMS_BYTES = 64 << 10
MAX_CLAIM_S = 86_400.0  # a longer one is no claim: it would outlive its node
MAX_ADDRESSES = 4096  # asked in one search
ASK_TIMEOUT_S = 5.0
log = logging.getLogger("forebay.network")
Address = tuple[str, int]


class Discovery(Protocol):
    """Addresses under keys of 20 bytes. Safe to share between threads; `close` may be called twice."""

    def announce(self, key: bytes, port: int) -> None:
        """Say that this host answers for a key at a TCP port, until it expires or the process ends."""

    def find(self, key: bytes, timeout_s: float) -> list[Address]:
        """The addresses announced under a key, without duplicates; an empty list after `timeout_s` if none."""

    def close(self) -> None:
        """Stop taking part."""


def record_key(network_id: str, kind: Literal["dataset", "scheduler", "revocations"], name: str) -> bytes:
    """The key in the DHT (20 bytes) for a dataset's or a scheduler's name in one network; revocations have none."""
    return hashlib.sha1(f"forebay/2\n{network_id}\n{kind}\n{name}".encode(), usedforsecurity=False).digest()


@dataclass(frozen=True)
class Claim:
    """What a provider says it serves, until `expires_at` (unix seconds)."""

    name: str
    dataset_id: Sha256
    num_slices: Count
    peer_id: str
    address: str
    expires_at: float
    held: Count | None = None  # of the slices, by itself; None: all
    url: str = ""  # a web server or bucket that has them all, which the provider stands for; empty: none

    @property
    def is_whole(self) -> bool:
        """Whether it has every slice, or knows who has."""
        return self.held is None or self.url != ""

    def signed_bytes(self) -> bytes:
        """The canonical bytes that the signature covers."""
        return b"forebay/2 claim\n" + json.dumps(self._said(), sort_keys=True, separators=(",", ":")).encode()

    def to_json(self, identity: Identity) -> dict[str, Any]:
        """The claim with its provider's signature, as it stands in `GET /v1/claims`."""
        return {**self._said(), "signature": identity.sign(self.signed_bytes()).hex()}

    def _said(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None and value != ""}


_CLAIM = TypeAdapter(Claim)


def parse_claim(obj: Any, peer: Peer) -> Claim:
    """A claim that this very peer signed."""
    try:
        claim, signature = _CLAIM.validate_python(obj), bytes.fromhex(obj["signature"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolViolation(f"claim of {peer.peer_id}: malformed: {' '.join(str(error).split())[:400]}") from error
    if claim.peer_id != peer.peer_id:
        raise ProtocolViolation(f"claim: expected one of {peer.peer_id}, who answered, got one of {claim.peer_id}")
    if claim.url:
        check_url(claim.url)
    verify(peer.public_key, claim.signed_bytes(), signature)
    return claim


def read_claims(client: Client, address: str, name: str, timeout_s: float = ASK_TIMEOUT_S) -> list[Claim]:
    """What the peer at an address says it serves now under a name, checked; `address` of each is the one asked.

    A claim that is malformed or forged is left out; the others stand.
    """
    body, peer = client.request_json(
        address,
        "GET",
        f"/v1/claims?name={quote(name, safe='')}",
        timeout_s=timeout_s,
        max_bytes=MAX_CLAIMS_BYTES,
        role="data",
    )
    items = body.get("claims") if isinstance(body, dict) else None
    if not isinstance(items, list) or len(items) > MAX_CLAIMS:
        raise ProtocolViolation(f"claims of {peer.peer_id} at {address}: expected a list of at most {MAX_CLAIMS}")
    now, claims = time.time(), []
    for item in items:
        try:
            claim = parse_claim(item, peer)
        except ProtocolViolation as error:
            log.info("claims of %s at %s: one is left out: %s", peer.peer_id, address, error)
            continue
        if claim.name == name and peer.scope.covers(name) and now < claim.expires_at <= now + MAX_CLAIM_S:
            claims.append(replace(claim, address=address))
    return claims


def find_providers(
    discovery: Discovery, client: Client, network_id: str, name: str, timeout_s: float = 10.0
) -> list[Claim]:
    """Who serves a dataset of this name, one claim a peer and dataset id, in order of peer id.

    The list of addresses may be full of dead and forged ones: all are asked at once (see ask), and who does not answer,
    or answers wrongly, is left out and logged. Ends soon after somebody has answered well. The DHT is asked for
    `timeout_s`, again while only false addresses are found; the answers to the last question then have 5 seconds more.
    """
    key, deadline = record_key(network_id, "dataset", name), time.monotonic() + timeout_s

    def ask(where: Address) -> list[Claim] | None:
        address = join_address(*where)
        try:
            return read_claims(client, address, name) or None
        except NetworkError as error:
            log.info("providers of %s: %s left out: %s", name, address, error)
            return None

    asked: set[Address] = set()
    answers: list[list[Claim]] = []
    while not answers:
        found = discovery.find(key, max(0.0, deadline - time.monotonic()))
        fresh = [address for address in found if address not in asked][: MAX_ADDRESSES - len(asked)]
        if not fresh:
            break
        asked.update(fresh)
        try:
            answers = ask_many(fresh, ask, max(deadline, time.monotonic()) + ASK_TIMEOUT_S)
        except (OSError, RuntimeError) as error:  # no file descriptor or thread is left
            raise NetworkError(f"providers of {name}: cannot ask {len(fresh)} addresses now: {error}") from error
    unique = {(claim.peer_id, claim.dataset_id): claim for claims in reversed(answers) for claim in claims}
    return [unique[key] for key in sorted(unique)]
