"""The exchange of CRLs: every response over mutual TLS says which ones its sender has.

The header `Forebay-CRLs` is a digest of their numbers. A client whose own one differs fetches the newer CRLs and sends
those that the server lacks, so a CRL passes over each connection in both directions, whichever side has it first.

`client` is a `forebay.network.client.Client`, which calls this module.

`GET /v1/crls` returns {"crls": {issuer: number}}, `GET /v1/crls/ISSUER` a CRL as PEM; `POST /v1/crls` takes a CRL and
returns {"new": whether it was accepted}.
"""

import time
from typing import Any

from forebay.errors import ProtocolError
from forebay.network import log
from forebay.network.pki.identity import Identity
from forebay.network.pki.revocation import MAX_CRL_BYTES, MAX_ISSUERS, PEER_ID, Crl

CRLS = "/v1/crls"
PAUSE_S = 5.0  # between two exchanges with an address
AVOID_S = 60.0  # after an address failed or lied
MAX_EXCHANGED = 8  # CRLs in each direction; the root's first
MAX_NUMBERS_BYTES = 128 << 10


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


def send_crl(client: Any, address: str, crl: Crl) -> tuple[str, bool]:
    """Send a CRL to a node; return the node's peer id, and whether it accepted the CRL as new."""
    answer, peer = client.request_json(address, "POST", CRLS, crl.pem)
    return peer.peer_id, answer.get("new") is True


def exchange_crls(
    client: Any, identity: Identity, address: str, timeout_s: float = PAUSE_S, *, is_urgent: bool = False
) -> bool:
    """Exchange CRLs with a node within some `timeout_s`; return whether it answered as a member.

    Not more often than every PAUSE_S unless it is urgent, and after a fault not for AVOID_S; False then.
    """
    contacts = identity.contacts
    started = time.monotonic()
    if not contacts.begin(address, started, PAUSE_S, is_urgent=is_urgent):
        return False
    try:
        _exchange(client, identity, address, started + timeout_s)
    except Exception as error:  # noqa: BLE001 - whatever a peer sends ends no other request, and no thread
        is_news = contacts.avoid(address, time.monotonic() + AVOID_S)
        (log.info if is_news else log.debug)("CRLs: %s is not asked for %.0f s: %s", address, AVOID_S, error)
        return False
    return True


def _exchange(client: Any, identity: Identity, address: str, deadline: float) -> None:
    def remaining_s() -> float:
        return max(0.1, deadline - time.monotonic())

    answer, peer = client.request_json(address, "GET", CRLS, timeout_s=remaining_s(), max_bytes=MAX_NUMBERS_BYTES)
    revocations = identity.revocations
    numbers = _parse_numbers(answer, address)
    if peer.peer_id == identity.peer_id:
        return
    newer = [issuer for issuer, number in numbers.items() if revocations.wants(issuer, number)]
    for issuer in _root_first(newer, revocations.root_id):
        pem = client.get_bytes(address, f"{CRLS}/{issuer}", MAX_CRL_BYTES, timeout_s=remaining_s())
        if receive_crl(identity, pem, peer.peer_id) is None and revocations.wants(issuer, numbers[issuer]):
            raise ProtocolError(f"peer at {address}: it does not have the CRL of {issuer} that it announced")
    own = revocations.crls()
    older = [issuer for issuer, crl in own.items() if crl.number > numbers.get(issuer, 0)]
    for issuer in _root_first(older, revocations.root_id):
        client.request_json(address, "POST", CRLS, own[issuer].pem, timeout_s=remaining_s())


def _root_first(issuers: list[str], root_id: str) -> list[str]:
    return sorted(issuers, key=lambda issuer: issuer != root_id)[:MAX_EXCHANGED]


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
