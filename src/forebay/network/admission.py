"""Admission: issue certificates for join tokens, and renew them. The nodes' keys never travel.

The server uses the key of the root or organisation for TLS 1.3, and tokens name that key, so a joiner can check it.
A request is a certificate request, signed by the node's key. A certificate, and the use of a token, is in the record
(`MemberRecord`) before it is sent, so a killed server counts each use; the same key again (after a lost answer) gets a
certificate and uses nothing.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from forebay.base import Json
from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.network import log
from forebay.network.app import JsonResponse, Request, Response, make_app
from forebay.network.audit import AuditLog
from forebay.network.client import Client
from forebay.network.discovery import Discovery
from forebay.network.join import check_token
from forebay.network.limits import ServerLimits
from forebay.network.messages import AdmitRequest, RenewRequest
from forebay.network.pki.certificates import EARLY, ROOT_VALID_DAYS, parsing, peer_of, scope_of, verify_certificate
from forebay.network.pki.files import check_name, read_issuer, read_network
from forebay.network.pki.identity import join, renew
from forebay.network.pki.record import MemberRecord
from forebay.network.pki.revocation import Revocations
from forebay.network.revocation_sync import TrustWatch
from forebay.network.server import Server
from forebay.peer_id import peer_id_of

TIMEOUT_S = 10.0
# Clients have no certificate yet: short time-outs, and connections of one address make room for others.
LIMITS = ServerLimits(
    connections=1024,
    connections_per_peer=128,
    connections_per_organisation=256,
    requests_per_s=200.0,
    body_bytes=256 << 10,
    idle_s=3.0,
    handshake_s=3.0,
    head_s=3.0,
    body_s=5.0,
    send_s=5.0,
)


@dataclass(eq=False)
class Admissions:
    """Issues and renews certificates; one per directory. Thread-safe."""

    directory: Path
    audit: AuditLog | None = None
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.issuer = read_issuer(self.directory)
        self._org = "" if self.issuer.is_root else self.issuer.peer_id  # of the nodes that it certifies
        self._network = read_network(self.directory)
        self._revocations = Revocations(self.directory)
        self._record = MemberRecord(self.directory, self.now)

    def admit(self, message: AdmitRequest, sender: str) -> Json:
        """A certificate for a token: {"certificate", "root", "network", "crls"}; `sender` is the client's address.

        PEM, the network's description, and the CRLs of the root and this issuer. Raises ProtocolError.
        """
        with self._recording_refusals("/v1/admit", sender):
            key = _requested_key(message.request)
            token = check_token(message.token, self.issuer.key.public_key().public_bytes_raw(), self.now())
            name = message.name
            peer_id = peer_id_of(key.public_bytes_raw())
            check_name("node", name)
            self._check_not_revoked(peer_id)
            is_new = peer_id not in self._record.users[token.id]
            certificate = self._record.issue(name, key, token.scope, token.valid_days, token=token)
            # Repeats by the same key are counted, not written: they must not rotate admissions out of the audit log.
            kind = "admitted" if is_new else "renewed"
            self._record_event(kind, peer=peer_id, name=name, token=token.id[:8], roles=",".join(sorted(token.roles)))
            return self._answer(certificate)

    def renew(self, message: RenewRequest, sender: str, shown: bytes) -> Json:
        """A renewed certificate, as `admit`, in place of `shown`, that of the handshake (DER), for the same key."""
        with self._recording_refusals("/v1/renew", sender):
            key = _requested_key(message.request)
            if not shown or peer_of(shown).public_key != key.public_bytes_raw():
                raise ProtocolError("renew: the request is not by the key of the handshake")
            peer = verify_certificate(shown, self._revocations.root)
            old = x509.load_der_x509_certificate(shown)
            who = peer.peer_id
            if peer.org != self._org:
                raise ProtocolError(f"renew: {who} was issued by {peer.org or 'the root'}. Ask that issuer.")
            if old.not_valid_after_utc.timestamp() < self.now():
                raise ProtocolError(f"renew: the certificate of {who} has expired. Join again with a token.")
            self._check_not_revoked(who)
            self._record_event("renewed", peer=who, name=peer.name)
            days = (old.not_valid_after_utc - old.not_valid_before_utc - EARLY).total_seconds() / 86400
            # The issuer's own expiry may have cut the old one short: that must not shorten later ones.
            if (last := self._record.certificates.get(who)) is not None:
                days = last.valid_days
            return self._answer(self._record.issue(peer.name, key, scope_of(old), days))

    @contextlib.contextmanager
    def _recording_refusals(self, route: str, sender: str) -> Iterator[None]:
        try:
            yield
        except (NetworkError, UsageError) as error:
            self._record_event("refused", route=route, address=sender, reason=str(error))
            raise ProtocolError(str(error)) from error

    def _answer(self, certificate: bytes) -> Json:
        crls = self._revocations.crls()
        issuers = {self._revocations.root_id, self.issuer.peer_id}
        return {
            "certificate": certificate.decode(),
            "root": (self.directory / "root-cert.pem").read_text(),
            "network": asdict(self._network),
            "crls": [crls[issuer].pem.decode() for issuer in sorted(issuers & crls.keys())],
        }

    def _check_not_revoked(self, peer_id: str) -> None:
        if (reason := self._revocations.reason(peer_id, self._org)) is not None:
            raise ProtocolError(reason)

    def _record_event(self, kind: str, **fields: Any) -> None:
        log.info("admission: %s %s", kind, " ".join(f"{name}={value}" for name, value in fields.items()))
        if self.audit is not None:
            self.audit.append(kind, **fields)


@contextlib.contextmanager
def sending_crls(directory: Path, discovery: Discovery) -> Iterator[None]:
    """Send an issuer's new CRLs to the running members while the block runs, as a node of its own: `admission`."""
    folder = directory / "admission"
    if (folder / "node-cert.pem").exists():  # It may have the earlier certificate of the organisation.
        node = renew(directory, folder, valid_days=ROOT_VALID_DAYS)
    else:  # It may have any role, as the issuer's key is beside its own.
        node = join(directory, folder, "admission", valid_days=ROOT_VALID_DAYS)
    node.revocations = Revocations(directory)
    with Client(node) as client, contextlib.closing(TrustWatch(node, client, discovery=discovery).start()):
        yield


class AdmissionServer(Server):
    """Serves `Admissions` over TLS 1.3 with the issuer's key, from `start` to `close`; clients need no certificate."""

    def __init__(self, admissions: Admissions, host: str = "127.0.0.1", port: int = 0) -> None:
        self.admissions = admissions
        app = make_app("Forebay admission", errors={ProtocolError: (403, "refused")})
        app.post("/v1/admit", summary="A certificate for a token.")(self._admit)
        app.post("/v1/renew", summary="Another certificate for a key that has one.")(self._renew)
        # The issuer's own certificate proves its key. Clients that renew show theirs; those that join have none.
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.minimum_version = ssl.TLSVersion.TLSv1_3
        kind = "root" if admissions.issuer.is_root else "org"
        tls.load_cert_chain(admissions.directory / f"{kind}-cert.pem", admissions.directory / f"{kind}-key.pem")
        tls.verify_mode = ssl.CERT_OPTIONAL
        tls.load_verify_locations(admissions.directory / "root-cert.pem")
        super().__init__(app, None, host, port, limits=LIMITS, tls=tls)

    def close(self) -> None:
        """Finish the requests in progress and stop."""
        self.drain(TIMEOUT_S)
        super().close()

    async def _admit(self, request: Request, message: AdmitRequest) -> Response:
        return JsonResponse(await asyncio.to_thread(self.admissions.admit, message, request.state.peer.name))

    async def _renew(self, request: Request, message: RenewRequest) -> Response:
        tls = request.state.connection.transport.get_extra_info("ssl_object")
        shown: bytes = tls.getpeercert(binary_form=True) or b""
        return JsonResponse(await asyncio.to_thread(self.admissions.renew, message, request.state.peer.name, shown))


@parsing("request")
def _requested_key(pem: str) -> Ed25519PublicKey:
    """The key of a certificate request, whose signature is checked. Raises ProtocolError."""
    request = x509.load_pem_x509_csr(pem.encode())
    key = request.public_key()
    if not isinstance(key, Ed25519PublicKey) or not request.is_signature_valid:
        raise ValueError("expected a certificate request in PEM, signed by its own Ed25519 key")
    return key
