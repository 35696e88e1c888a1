"""Certificates: root → organisation → node; their scopes, and the verification of a peer's certificate.

The key identifier in a certificate is the 20 bytes of its key's peer id, and OpenSSL requires that the authority key
identifier matches the issuer's: so it identifies a node's organisation. A private extension contains a node's scope.
A node of an organisation carries the organisation's certificate, signed by the root, in another extension: no list of
organisations is distributed. A serial number derives from the key (`serial_number_of`), so a CRL entry revokes the key.

Cost: some 500 bytes in the certificates of organisations' nodes, and one or two signature checks per new certificate.
"""

import datetime as dt
import functools
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID

from forebay.errors import ProtocolError, UsageError, printable
from forebay.ledger.chain import canonical_json
from forebay.network.peer import ROLES, UNBOUNDED, Peer, Scope
from forebay.peer_id import key_id_of, peer_id_of, serial_number_of

ROOT_VALID_DAYS = 3650
ORG_VALID_DAYS = 1825
NODE_VALID_DAYS = 90  # issued by hand; certificates that an admission server renews are valid for days
EARLY = dt.timedelta(hours=1)  # tolerated difference of clocks
# Microsoft's arc for a UUID in parts needs no registration. Go's TLS refuses numbers over 2^31, so not one under 2.25.
_ARC = "1.2.840.113556.1.8000.2554.28444.10836.32014.19212.39473.3038604.9742256"
SCOPE_OID = x509.ObjectIdentifier(f"{_ARC}.1")
ORGANISATION_OID = x509.ObjectIdentifier(f"{_ARC}.2")
_EARLIER_SCOPE_OID = x509.ObjectIdentifier("2.25.147690550399236547233384196472556529584")
SERVER_NAME = "forebay"
MAX_PATTERNS = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a network, an organisation, a node


@dataclass(frozen=True)
class Issuer:
    """A signer of certificates: the network's root, or an organisation."""

    key: Ed25519PrivateKey
    cert: x509.Certificate
    is_root: bool

    @property
    def peer_id(self) -> str:
        return peer_id_of(self.key.public_key().public_bytes_raw())

    @property
    def scope(self) -> Scope:
        """The scope that it may issue; the root's is unbounded."""
        return UNBOUNDED if self.is_root else scope_of(self.cert)


def issue_root(name: str, key: Ed25519PrivateKey, valid_days: float) -> x509.Certificate:
    """A root's certificate, signed by itself; it may issue organisations."""
    return _sign(key, None, name, key.public_key(), valid_days, 1)


def issue(
    issuer: Issuer, name: str, key: Ed25519PublicKey, scope: Scope, valid_days: float, *, organisation: bool = False
) -> x509.Certificate:
    """A certificate for a node's or an organisation's key. It ends no later than the issuer's own."""
    check_scope(scope, issuer.scope)
    if organisation and not issuer.is_root:
        raise UsageError("organisation: expected the directory of a network, got an organisation's.")
    extensions: list[x509.ExtensionType] = []
    if not organisation:
        extensions += [
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            # Programs that compare host names, such as Prometheus, expect this one at any address.
            x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]),
        ]
    if scope != UNBOUNDED:
        raw = canonical_json({"roles": sorted(scope.roles), "datasets": scope.datasets})
        extensions.append(x509.UnrecognizedExtension(SCOPE_OID, raw))
    if not issuer.is_root:
        extensions.append(x509.UnrecognizedExtension(ORGANISATION_OID, der_of(issuer.cert)))
    return _sign(issuer.key, issuer.cert, name, key, valid_days, 0 if organisation else None, extensions)


def _sign(
    signer: Ed25519PrivateKey, issuer: x509.Certificate | None, name: str, key: Ed25519PublicKey, days: float,
    path_length: int | None, extensions: Iterable[x509.ExtensionType] = (),
) -> x509.Certificate:  # fmt: skip
    """A certificate with what all have in common, and `extensions`.

    `issuer` None: it is its own issuer. `path_length` None: it may not issue others.
    """
    now = dt.datetime.now(dt.UTC)
    is_ca = path_length is not None
    peer_id = peer_id_of(key.public_bytes_raw())
    subject = issuer_name = common_name(name)
    subject_key = x509.SubjectKeyIdentifier(key_id_of(peer_id))
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject_key)
    end = now + dt.timedelta(days=days)
    if issuer is not None:
        issuer_name = issuer.subject
        issuer_key = authority(issuer)
        end = min(end, issuer.not_valid_after_utc)
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    usage = x509.KeyUsage(
        digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca, decipher_only=False,
        **dict.fromkeys(unused, False),
    )  # fmt: skip
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer_name)
        .public_key(key)
        .serial_number(serial_number_of(peer_id))
        .not_valid_before(now - EARLY)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=path_length), critical=True)
        .add_extension(usage, critical=True)
    )
    for extension in (subject_key, issuer_key, *extensions):
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(signer, None)


def common_name(name: str) -> x509.Name:
    """The subject or issuer of this name."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def der_of(cert: x509.Certificate) -> bytes:
    """A certificate as DER."""
    return cert.public_bytes(Encoding.DER)


def pem_of(*items: x509.Certificate | x509.CertificateRevocationList | x509.CertificateSigningRequest) -> bytes:
    """Certificates, CRLs or requests as PEM, one after the other."""
    return b"".join(item.public_bytes(Encoding.PEM) for item in items)


def check_scope(scope: Scope, issuer: Scope = UNBOUNDED) -> None:
    """Refuse unknown roles, those that an issuer may not give, and patterns that are empty, too long or too many.

    Raises UsageError.
    """
    if unknown := scope.roles - ROLES:
        raise UsageError(f"scope: expected roles of {', '.join(sorted(ROLES))}, got {', '.join(sorted(unknown))}")
    if len(scope.datasets) > MAX_PATTERNS or not all(0 < len(p) <= 256 and p.isprintable() for p in scope.datasets):
        raise UsageError(f"scope: expected at most {MAX_PATTERNS} dataset patterns of 1 to 256 printable characters")
    if beyond := scope.exceeds(issuer):
        raise UsageError(
            f"scope: this organisation may give {', '.join(sorted(issuer.roles))}, "
            f"got {', '.join(sorted(beyond))}. Ask the root for them."
        )


@functools.lru_cache(maxsize=4096)
def peer_of(der_cert: bytes) -> Peer:
    """The peer that a certificate names, unverified and without its organisation. See `verify_certificate`."""
    return _read(_parse(der_cert))


@functools.lru_cache(maxsize=4096)
def verify_certificate(der_cert: bytes, root: bytes) -> Peer:
    """Verify the signatures of a node's certificate up to the root (DER); return its peer, organisation and scope.

    The caller must check that the chain is valid now, and revocation. Raises ProtocolError.
    """
    cert = _parse(der_cert)
    root_cert = _parse(root)
    peer = _read(cert)
    who = f"peer {peer.peer_id} ({peer.name})"
    if _is_ca(cert):
        raise ProtocolError(f"{who}: expected a node's certificate, got an issuer's")
    issuer_key_id = authority_key_id(cert)
    if issuer_key_id == key_id_of(_read(root_cert).peer_id):
        _check_signature(cert, root_cert, who, "the network's root")
        return _verified(peer, cert, root_cert)
    carried = _extension(cert, ORGANISATION_OID)
    if carried is None:
        raise ProtocolError(
            f"{who}: its issuer is neither our root nor an organisation that it shows. "
            "Both sides need a certificate of the same network: see `forebay network join`."
        )
    org = organisation_of(carried.value, root)
    org_cert = _parse(carried.value)
    if key_id_of(org.peer_id) != issuer_key_id:
        raise ProtocolError(
            f"{who}: expected the certificate of the organisation that issued its own, "
            f"got that of {org.peer_id} ({org.name}). Do not trust it."
        )
    _check_signature(cert, org_cert, who, "its organisation")
    if beyond := peer.scope.exceeds(org.scope):
        raise ProtocolError(
            f"{who}: its organisation {org.peer_id} ({org.name}) may give "
            f"{', '.join(sorted(org.scope.roles))}, got {', '.join(sorted(beyond))}. Do not trust it."
        )
    return _verified(replace(peer, org=org.peer_id, scope=peer.scope.bounded_by(org.scope)), cert, org_cert, root_cert)


@functools.lru_cache(maxsize=256)
def organisation_of(der_cert: bytes, root: bytes) -> Peer:
    """Verify that the root signed an organisation's certificate; return the organisation. Raises ProtocolError."""
    cert = _parse(der_cert)
    root_cert = _parse(root)
    org = _read(cert)
    _check_issuer(cert, root_cert, f"organisation {org.peer_id} ({org.name})", "the network's root")
    return _verified(org, cert, root_cert)


def check_root(root: bytes, network_id: str) -> None:
    """Check that a root certificate (DER) has the network's key and is signed by it. Raises ProtocolError."""
    cert = _parse(root)
    peer_id = peer_of(root).peer_id
    if peer_id != network_id:
        raise ProtocolError(f"root-cert.pem: expected the root of network {network_id}, got {peer_id}")
    _check_issuer(cert, cert, f"root {peer_id}", "itself")


def scope_of(cert: x509.Certificate) -> Scope:
    """The scope in a certificate; unbounded if it has none. Raises ProtocolError."""
    extension = _extension(cert, SCOPE_OID)
    if _extension(cert, _EARLIER_SCOPE_OID) is not None:  # its scope is not unbounded
        raise ProtocolError(
            "certificate: expected a scope of this version, got an earlier one's. Join again: `forebay network join`."
        )
    if extension is None:
        return UNBOUNDED
    try:
        body = json.loads(extension.value)
        scope = Scope(frozenset(body["roles"]), tuple(body["datasets"]))
        if not all(isinstance(item, str) for item in (*scope.roles, *scope.datasets)):
            raise TypeError("expected strings")
        check_scope(scope)
    except (ValueError, KeyError, TypeError, RecursionError, UsageError) as error:
        raise ProtocolError(f"peer's certificate: no scope in {extension.value[:80]!r}: {error}") from error
    return scope


def authority_key_id(cert: x509.Certificate | x509.CertificateRevocationList) -> bytes:
    """The key identifier of a certificate's or CRL's issuer. Raises ProtocolError if it has none."""
    extension = _extension(cert, ExtensionOID.AUTHORITY_KEY_IDENTIFIER)
    if extension is None or extension.key_identifier is None:
        raise ProtocolError("certificate: expected the key id of its issuer, got none. Do not trust it.")
    return bytes(extension.key_identifier)


def authority(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """The extension that names the issuer of a certificate or CRL by its key identifier."""
    return x509.AuthorityKeyIdentifier(key_id_of(_read(issuer).peer_id), None, None)


def _verified(peer: Peer, *chain: x509.Certificate) -> Peer:
    start = max(cert.not_valid_before_utc.timestamp() for cert in chain)
    stop = min(cert.not_valid_after_utc.timestamp() for cert in chain)
    return replace(peer, certificate=b64encode(der_of(chain[0])).decode(), valid_from=start, valid_until=stop)


def _check_issuer(cert: x509.Certificate, issuer: x509.Certificate, what: str, whose: str) -> None:
    _check_signature(cert, issuer, what, whose)
    if not _is_ca(cert):
        raise ProtocolError(f"{what}: its certificate may not issue others")


def _check_signature(cert: x509.Certificate, issuer: x509.Certificate, what: str, whose: str) -> None:
    try:
        key = issuer.public_key()
        assert isinstance(key, Ed25519PublicKey)  # checked by _parse
        key.verify(cert.signature, cert.tbs_certificate_bytes)
    except InvalidSignature as error:
        raise ProtocolError(f"{what}: its certificate is not signed by {whose}") from error


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Turn each exception of a parser of others' bytes into a ProtocolError; libraries raise any, such as TypeError."""
    try:
        yield
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"{what}: malformed: {type(error).__name__}: {str(error)[:300]}") from error


@parsing("peer's certificate")
def _parse(der_cert: bytes) -> x509.Certificate:
    cert = x509.load_der_x509_certificate(der_cert)
    key = cert.public_key()
    num_names = len(cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME))
    _ = cert.extensions, cert.not_valid_before_utc, cert.not_valid_after_utc  # parsed lazily, and may be malformed
    if not isinstance(key, Ed25519PublicKey) or num_names != 1:
        raise ProtocolError(
            f"peer's certificate: expected an Ed25519 key and one common name, got {type(key).__name__} "
            f"and {num_names} names. Issue the node's certificate with `forebay network join`."
        )
    return cert


def _read(cert: x509.Certificate) -> Peer:
    key = cert.public_key()
    assert isinstance(key, Ed25519PublicKey)  # checked by _parse
    name = printable(str(cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value), 200)
    if not NAME.fullmatch(name):  # it is printed and logged
        raise ProtocolError(f"certificate: expected a common name of {NAME.pattern}, got {ascii(name)[:80]}")
    raw = key.public_bytes_raw()
    return Peer(peer_id_of(raw), raw, name, scope=scope_of(cert))


def _extension(cert: x509.Certificate | x509.CertificateRevocationList, oid: x509.ObjectIdentifier) -> Any:
    """The value of an extension; None if it is missing."""
    try:
        return cert.extensions.get_extension_for_oid(oid).value
    except x509.ExtensionNotFound:
        return None


def _is_ca(cert: x509.Certificate) -> bool:
    constraints = _extension(cert, ExtensionOID.BASIC_CONSTRAINTS)
    return constraints is not None and bool(constraints.ca)
