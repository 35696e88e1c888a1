"""A node's identity: its Ed25519 key and certificate, TLS contexts, and the verification of peers.

A network is a root key; a member has a certificate signed by the root or by an organisation. A peer id derives from the
public key, so it survives renewals of the certificate. Connections are TLS 1.3 with certificates of the network on both
sides. Host names are not checked: an address locates a peer, its key identifies it.

Cost: a handshake is two Ed25519 signatures and two checks (three for an organisation's node), under 1 ms of CPU a side.
"""

import datetime as dt
import ssl
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.files import atomic_write
from forebay.network import log
from forebay.network.audit import AuditLog
from forebay.network.messages import EXPIRED, REVOKED
from forebay.network.peer import UNBOUNDED, Contacts, Peer, Scope
from forebay.network.pki import files
from forebay.network.pki.certificates import NODE_VALID_DAYS, ORG_VALID_DAYS, der_of, scope_of, verify_certificate
from forebay.network.pki.files import create_network as create_network
from forebay.network.pki.record import MemberRecord
from forebay.network.pki.revocation import Revocations, file_stamp
from forebay.network.pki.revocation import revoke as revoke
from forebay.peer_id import peer_id_of
from forebay.units import format_seconds

EXPIRY_WARNING_DAYS = 30


def verify(public_key: bytes, message: bytes, signature: bytes) -> None:
    """Verify an Ed25519 signature (64 bytes) by its raw key (32 bytes). Raises ProtocolError."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError) as error:
        raise ProtocolError(
            f"signature: expected one by key {public_key.hex()[:16]}… over {len(message)} bytes, "
            "got one that does not fit. Do not trust the message."
        ) from error


class Identity:
    """A member of a network: its key, certificate and revocation lists. Create it by `load`. Thread-safe."""

    def __init__(self, node_dir: Path) -> None:
        self.node_dir = node_dir
        self.audit: AuditLog | None = None
        self.contacts = Contacts()
        network = files.read_network(node_dir)
        self._key = files.read_key(node_dir / "node-key.pem")
        self.network_id = network.network_id
        self.network_name = network.name
        self.bootstrap = list(network.bootstrap)
        self.public_key: bytes = self._key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.public_key)
        self.root = files.read_root(node_dir)
        self.revocations = Revocations(node_dir, self.root)
        self._cert_stamp = file_stamp(node_dir / "node-cert.pem")
        self._contexts = weakref.WeakSet[ssl.SSLContext]()
        self._read_certificate()

    @classmethod
    def load(cls, node_dir: str | Path) -> "Identity":
        """Load the identity of a node's directory. Raises UsageError."""
        return cls(Path(node_dir))

    def _read_certificate(self) -> None:
        cert = files.read_certs(self.node_dir / "node-cert.pem")[0]
        if files.peer_in(cert).public_key != self.public_key:
            raise UsageError(
                f"identity: node-cert.pem is of another key than node-key.pem ({self.node_dir}). "
                "Renew the certificate (forebay network renew), or join again in another directory."
            )
        peer = verify_certificate(der_of(cert), self.root)
        self.as_peer = peer
        self.certificate = cert
        self.name = peer.name
        self.org = peer.org
        self.scope = peer.scope
        self.expires_at = peer.valid_until
        self.valid_s = peer.valid_until - peer.valid_from
        self._warn_below_s = min(EXPIRY_WARNING_DAYS * 86400, self.valid_s / 3)
        self.warn_of_expiry(time.time())

    def warn_of_expiry(self, now: float, reason: str = "") -> None:
        """Log a warning when less than a third of the validity, or 30 days, remains at `now` (Unix seconds).

        Again when half of that remains. `reason`: why the node does not renew it itself.
        """
        remaining_s = self.expires_at - now
        if 0 < remaining_s < self._warn_below_s:
            self._warn_below_s = remaining_s / 2
            date = dt.datetime.fromtimestamp(self.expires_at, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
            text = reason or self.remedy(EXPIRED)
            log.warning("certificate of %s expires in %s (%s). %s", self.name, format_seconds(remaining_s), date, text)

    def peer(self, der_cert: bytes) -> Peer:
        """Verify the certificate of a TLS handshake; return its peer with organisation and scope.

        The caller must check `refusal` for each request, so that a revoked peer is told why it is refused. Raises
        ProtocolError if its chain is invalid, or exceeds an issuer's scope.
        """
        try:
            return verify_certificate(der_cert, self.root)
        except ProtocolError as error:
            self.record_event("refused", reason=str(error))
            raise

    def refusal(self, peer: Peer) -> tuple[str, str] | None:
        """Code and reason why a peer must be refused now, by expiry or revocation; None if it may go on.

        Check it for each request, on both sides: files are read once a second at most.
        """
        now = time.time()
        if not peer.valid_from <= now <= peer.valid_until:
            lapse = "has expired" if now > peer.valid_until else "is not valid yet: compare the clocks"
            return EXPIRED, f"peer {peer.peer_id} ({peer.name}): its certificate {lapse}"
        reason = self.revocations.reason(peer.peer_id, peer.org)
        return None if reason is None else (REVOKED, reason)

    def check_admitted(self) -> None:
        """Raise NetworkError if all members refuse this node: it is revoked, or its certificate has expired."""
        expired_s = time.time() - self.expires_at
        if (reason := self.revocations.find(self.peer_id, self.org)) is not None:
            code = REVOKED
        elif expired_s > 0:
            code = EXPIRED
            reason = f"expected a valid certificate, got one that expired {format_seconds(expired_s)} ago"
        else:
            return
        raise NetworkError(
            f"{self.name}: {reason}, so all members refuse this node ({self.node_dir}). {self.remedy(code)}"
        )

    def remedy(self, code: str) -> str:
        """Return what a node whose certificate is refused with this code can do."""
        if code == REVOKED:
            return "Ask the issuer why, and join again in another directory."
        return (
            f"Renew it where its issuer's directory is (forebay network renew ISSUER {self.node_dir}), or join again "
            "by a token in another directory."
        )

    def check_role(self, what: str, role: str, *datasets: str) -> None:
        """Check that the certificate has the role that `what` needs, and covers these names. Raises UsageError.

        NetworkError if all members refuse this node.
        """
        self.check_admitted()
        if not self.scope.allows(role) or not all(map(self.scope.covers, datasets)):
            raise UsageError(
                f"{what}: expected a certificate of scope {Scope(frozenset({role}), datasets)}, got {self.scope} "
                f"({self.node_dir}). Ask its issuer for another: `forebay network join`."
            )

    def record_event(self, kind: str, **fields: Any) -> None:
        """Write an event (a refusal, ban, CRL, admission, quota, pause) to the audit log, if there is one."""
        if self.audit is None:
            return
        try:
            self.audit.append(kind, **fields)
        except OSError as error:  # the node continues without the record
            log.error("audit: cannot write %s: %s", self.audit.path, error)

    def sign(self, message: bytes) -> bytes:
        """This node's Ed25519 signature over a message: 64 bytes."""
        return self._key.sign(message)

    def server_context(self) -> ssl.SSLContext:
        """TLS 1.3 for accepting; requires a certificate of this network."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no resumption: each connection shows its certificate
        return self._configure(context)

    def client_context(self) -> ssl.SSLContext:
        """TLS 1.3 for connecting; requires a certificate of this network, for any host name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._configure(context)

    def _configure(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            self._load_certificates(context)
        except OSError as error:  # also ssl.SSLError
            raise UsageError(f"identity: cannot load certificates from {self.node_dir}: {error}") from error
        self._contexts.add(context)
        return context

    def _load_certificates(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self.node_dir / "node-cert.pem", self.node_dir / "node-key.pem")
        context.load_verify_locations(self.node_dir / "root-cert.pem")

    def refresh(self) -> bool:
        """Use a renewed certificate for new connections; return whether there is one.

        Raises UsageError if the new files do not match; the old certificate stays in use.
        """
        stamp = file_stamp(self.node_dir / "node-cert.pem")
        if stamp == self._cert_stamp:
            return False
        self._cert_stamp = stamp
        self._read_certificate()
        for context in list(self._contexts):
            self._load_certificates(context)
        log.info("certificate renewed: name=%s", self.name)
        return True


def create_organisation(network_dir: str | Path, out_dir: str | Path, name: str, scope: Scope = UNBOUNDED) -> str:
    """Create an organisation with its own key; `scope` bounds its nodes' scopes. Returns its peer id."""
    _issue(network_dir, out_dir, "org", ORG_VALID_DAYS, name, scope)
    return files.read_issuer(out_dir).peer_id


def renew_organisation(network_dir: str | Path, org_dir: str | Path, *, valid_days: float = ORG_VALID_DAYS) -> str:
    """Issue a new certificate for an organisation's key, with the same scope. Returns its peer id."""
    _issue(network_dir, org_dir, "org", valid_days)
    return files.read_issuer(org_dir).peer_id


def join(
    network_dir: str | Path, out_dir: str | Path, name: str, *, valid_days: float = NODE_VALID_DAYS,
    scope: Scope = UNBOUNDED,
) -> Identity:  # fmt: skip
    """Create a node with a new key, certified by the network's root or an organisation. Returns it, loaded."""
    _issue(network_dir, out_dir, "node", valid_days, name, scope)
    return Identity.load(out_dir)


def renew(network_dir: str | Path, node_dir: str | Path, *, valid_days: float = NODE_VALID_DAYS) -> Identity:
    """Issue a new certificate for a node's key; its peer id and scope stay."""
    _issue(network_dir, node_dir, "node", valid_days)
    return Identity.load(node_dir)


def _issue(
    issuer_dir: str | Path, out_dir: str | Path, kind: files.Kind, valid_days: float, name: str | None = None,
    scope: Scope = UNBOUNDED,
) -> None:  # fmt: skip
    """Certify the key of a new member, or that of the directory's member again: `name` is None."""
    issuer_dir = Path(issuer_dir)
    folder = Path(out_dir)
    is_new = name is not None
    if name is not None:
        files.check_new(folder, kind, name)
    else:
        old = files.read_certs(folder / f"{kind}-cert.pem")[0]
        name = files.peer_in(old).name
        scope = scope_of(old)
    path = folder / f"{kind}-key.pem"
    key = Ed25519PrivateKey.generate() if is_new and not path.exists() else files.read_key(path)
    pem = MemberRecord(issuer_dir).issue(name, key.public_key(), scope, valid_days, is_organisation=kind == "org")
    root, network = ((issuer_dir / copied).read_bytes() for copied in ("root-cert.pem", "network.json"))
    write_member(folder, kind, key, pem, root, network, [crl.pem for crl in Revocations(issuer_dir).crls().values()])


def write_member(
    folder: Path, kind: files.Kind, key: Ed25519PrivateKey, pem: bytes, root: bytes, network: bytes,
    crls: Iterable[bytes],
) -> None:  # fmt: skip
    """Write the directory of a node or an organisation; the certificate last, which makes it one."""
    files.write_key(folder / f"{kind}-key.pem", key)
    atomic_write(folder / "root-cert.pem", root)
    atomic_write(folder / "network.json", network)
    revocations = Revocations(folder)
    for crl in crls:
        revocations.accept(crl)
    atomic_write(folder / f"{kind}-cert.pem", pem)
