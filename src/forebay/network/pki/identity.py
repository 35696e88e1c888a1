"""Who is who: Ed25519 keys, peer ids, certificates of one network, revocation.

A network is a root key; a member holds a certificate that the root, or an organisation under it, signed. A peer's id
comes from its public key alone, so that it survives the renewal of its certificate. Every connection is TLS 1.3 with
a certificate on both sides: who has none of this network gets no byte. Host names are not checked: an address says
where a peer is, its key says who it is.

What the choice costs: one handshake is two Ed25519 signatures and two checks (three each for an organisation's node),
under 1 ms of CPU a side.
"""

from __future__ import annotations

import datetime as dt
import logging
import ssl
import time
import weakref
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from forebay.errors import ProtocolError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.network.audit import AuditLog
from forebay.network.peer import Peer as Peer
from forebay.network.peer import Scope as Scope
from forebay.network.pki.certificates import NODE_VALID_DAYS as NODE_VALID_DAYS
from forebay.network.pki.certificates import Judged, der_of, judge, scope_of
from forebay.network.pki.certificates import peer_of as peer_of
from forebay.network.pki.files import (
    check_name,
    check_vacant,
    copy_shared,
    key_pem,
    make_private,
    node_pem,
    peer_in,
    read_cert,
    read_issuer,
    read_key,
    read_network,
    read_roots,
)
from forebay.network.pki.files import create_network as create_network
from forebay.network.pki.files import create_organisation as create_organisation
from forebay.network.pki.revocation import Revocations, file_stamp
from forebay.network.pki.revocation import revoke as revoke
from forebay.peer_id import peer_id_of

EXPIRY_WARNING_DAYS = 30
log = logging.getLogger("forebay.network")


def verify(public_key: bytes, message: bytes, signature: bytes) -> None:
    """Check an Ed25519 signature (64 bytes) by its raw key (32 bytes); ProtocolError if it does not fit."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise ProtocolError(
            f"signature: expected one by key {public_key.hex()[:16]}… over {len(message)} bytes, "
            "got one that does not fit. Do not trust the message."
        ) from error


class Identity:
    """A member of a network: its key, certificate, and whom it refuses. Made by `load`; safe to share."""

    def __init__(
        self,
        node_dir: Path,
        key: Ed25519PrivateKey,
        network: dict[str, Any],
        cert: x509.Certificate,
        roots: tuple[bytes, ...],
    ) -> None:
        self.node_dir = node_dir
        self.audit: AuditLog | None = None
        self.network_id: str = network["network_id"]
        self.network_name: str = network["name"]
        self.bootstrap: list[tuple[str, int]] = [(str(host), int(port)) for host, port in network["bootstrap"]]
        self._key = key
        self.public_key: bytes = key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.public_key)
        self.revocations = Revocations(node_dir, roots)
        self._use(cert, roots)
        self._cert_stamp = file_stamp(node_dir / "node-cert.pem")
        self._contexts: weakref.WeakSet[ssl.SSLContext] = weakref.WeakSet()

    def _use(self, cert: x509.Certificate, roots: tuple[bytes, ...]) -> None:
        judged = judge(der_of(cert), roots)
        self.certificate = cert
        self.roots = self.revocations.roots = roots
        self.as_peer = judged.peer
        self.name, self.org, self.scope = judged.peer.name, judged.peer.org, judged.peer.scope
        self.expires_at = judged.valid_until
        self.valid_s = judged.valid_until - judged.valid_from

    @classmethod
    def load(cls, node_dir: str | Path) -> Identity:
        """The identity in a directory which `join` made."""
        folder = Path(node_dir)
        network = read_network(folder)
        key = read_key(folder / "node-key.pem")
        cert = read_cert(folder / "node-cert.pem")
        peer = peer_in(cert)
        if peer.public_key != key.public_key().public_bytes_raw():
            raise UsageError(
                f"identity: node-cert.pem is of another key than node-key.pem ({folder}). "
                "Renew the certificate (forebay network renew), or join anew in another directory."
            )
        identity = cls(folder, key, network, cert, read_roots(folder))
        identity.warn_of_expiry(time.time())
        return identity

    def warn_of_expiry(self, now: float) -> None:
        """Logs a warning once the certificate has less than a third of its time, or 30 days, left at `now` (unix s)."""
        days = (self.expires_at - now) / 86400
        if days < min(EXPIRY_WARNING_DAYS, self.valid_s / 86400 / 3):
            at = dt.datetime.fromtimestamp(self.expires_at, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
            state = f"expires in {days:.1f} days" if days > 0 else "has expired: nobody lets this node in"
            log.warning("certificate of %s %s (%s). Renew it with `forebay network renew`.", self.name, state, at)

    def peer(self, der_cert: bytes) -> Peer:
        """The peer behind a certificate whose chain the TLS layer checked: its organisation, what it may do.

        ProtocolError if a certificate of its chain is not valid now or revoked, or exceeds its organisation's.
        """
        try:
            judged = judge(der_cert, self.roots)
        except ProtocolError as error:
            self.record_event("refused", reason=str(error))
            raise
        if (reason := self._invalid(judged) or self.revocations.reason(judged.peer)) is not None:
            self.record_event("refused", peer=judged.peer.peer_id, reason=reason)
            raise ProtocolError(reason)
        return judged.peer

    def refusal(self, peer: Peer) -> str | None:
        """Why an open connection of a peer must not be used any longer; None if it may.

        Its certificate or one above it has expired, or the peer or its organisation is revoked. For each request of a
        kept connection, on both sides: files are looked at once a second at most.
        """
        if time.time() > peer.valid_until:
            return f"peer {peer.peer_id} ({peer.name}): its certificate has expired"
        return self.revocations.reason(peer)

    def _invalid(self, judged: Judged) -> str | None:
        if judged.valid_from <= time.time() <= judged.valid_until:
            return None
        what = "has expired" if time.time() > judged.valid_until else "is not valid yet: compare the clocks"
        return f"peer {judged.peer.peer_id} ({judged.peer.name}): its certificate {what}"

    def record_event(self, kind: str, **facts: Any) -> None:
        """Puts an event (a refusal, ban, revocation, admission, quota, pause) into the audit log, if there is one."""
        if self.audit is None:
            return
        try:
            self.audit.append(kind, **facts)
        except OSError as error:  # the node goes on refusing, though nobody will read of it
            log.error("audit: cannot write %s: %s", self.audit.path, error)

    def sign(self, message: bytes) -> bytes:
        """This node's Ed25519 signature over a message: 64 bytes."""
        return self._key.sign(message)

    def server_context(self) -> ssl.SSLContext:
        """TLS 1.3 for accepting: demands a certificate of this network."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no resumption: each connection proves itself anew
        return self._finish(context)

    def client_context(self) -> ssl.SSLContext:
        """TLS 1.3 for connecting: demands a certificate of this network, whatever the host's name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._finish(context)

    def _finish(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        # Each certificate in root-cert.pem is an anchor, also one that the root before it signed.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_cert_chain(self.node_dir / "node-cert.pem", self.node_dir / "node-key.pem")
            context.load_verify_locations(self.node_dir / "root-cert.pem")
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"identity: cannot load certificates from {self.node_dir}: {error}") from error
        self._contexts.add(context)
        return context

    def refresh(self) -> bool:
        """Takes up a renewed certificate for connections to come, without a restart; whether there was one.

        UsageError if the new files do not belong together; the old certificate stays in use.
        """
        stamp = file_stamp(self.node_dir / "node-cert.pem")
        if stamp == self._cert_stamp:
            return False
        self._cert_stamp = stamp
        fresh = Identity.load(self.node_dir)
        if fresh.peer_id != self.peer_id:
            raise UsageError(
                f"identity: expected {self.peer_id}, got {fresh.peer_id} ({self.node_dir}). Restart the node."
            )
        for context in list(self._contexts):
            context.load_cert_chain(self.node_dir / "node-cert.pem", self.node_dir / "node-key.pem")
            context.load_verify_locations(self.node_dir / "root-cert.pem")
        self._use(fresh.certificate, fresh.roots)
        log.info("certificate of %s renewed", self.name)
        return True

    def is_revoked(self, peer: Peer | str) -> bool:
        """Whether `refusal` says why a peer is refused, or, for an id alone, whether it is revoked."""
        return (self.revocations.reason(peer) if isinstance(peer, str) else self.refusal(peer)) is not None


def join(
    network_dir: str | Path,
    out_dir: str | Path,
    name: str,
    *,
    force: bool = False,
    valid_days: float = NODE_VALID_DAYS,
    scope: Scope = Scope(),  # noqa: B008 - frozen
) -> Identity:
    """Issue a member, loaded: a new key and its certificate, signed by the network's root or an organisation."""
    folder = Path(out_dir)
    check_name("node", name)
    check_vacant(folder, force)
    return _issue(Path(network_dir), folder, name, Ed25519PrivateKey.generate(), scope, valid_days)


def renew(network_dir: str | Path, node_dir: str | Path, *, valid_days: float = NODE_VALID_DAYS) -> Identity:
    """Give a node a new certificate for the key it has: its peer id and scope stay."""
    folder = Path(node_dir)
    key = read_key(folder / "node-key.pem")
    old = read_cert(folder / "node-cert.pem")
    return _issue(Path(network_dir), folder, peer_in(old).name, key, scope_of(old), valid_days)


def _issue(source: Path, folder: Path, name: str, key: Ed25519PrivateKey, scope: Scope, valid_days: float) -> Identity:
    pem = node_pem(read_issuer(source), name, key.public_key(), scope, valid_days)
    make_private(folder)
    remove_stale(folder)  # A killed run's may hold a key.
    atomic_write(folder / "node-key.pem", key_pem(key), 0o600)
    atomic_write(folder / "node-cert.pem", pem)
    copy_shared(source, folder)
    return Identity.load(folder)
