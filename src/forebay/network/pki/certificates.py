"""Certificates: root → organisation → node, what each may do, and how a peer is judged by the one it shows.

The key identifier in a certificate is the 20 bytes behind the peer id of its key, and OpenSSL takes nobody for the
issuer whose own is not what the certificate names: so the authority key id of a node *is* its organisation.
A node's scope stands in a private extension. The node of an organisation also carries the organisation's
certificate in one: who judges the node reads there, signed by the root, what the organisation was given. No list of
organisations is fetched or kept. The serial number of a certificate derives from its key (`serial_number_of`), so
that an entry of a CRL revokes the key and all its certificates.

While a root is rotated a network has several roots: the first is self-signed, each further one is signed by the one
before it. Functions here take them as a tuple of DER certificates, the oldest first.

What the choice costs: some 500 bytes in the certificates of organisations' nodes, and one or two signature checks the
first time that a certificate is seen.
"""

import datetime as dt
import functools
import json
import re
from dataclasses import dataclass, replace

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from forebay.errors import ProtocolError, UsageError
from forebay.network.peer import ROLES, Peer, Scope
from forebay.peer_id import key_id_of, peer_id_of, serial_number_of

ROOT_VALID_DAYS = 3650
ORG_VALID_DAYS = 1825
NODE_VALID_DAYS = 90  # issued by hand; a node that an admission server renews has some days
EARLY = dt.timedelta(hours=1)  # members' clocks may differ
# Arcs under 2.25 are UUIDs, which need nobody's register.
SCOPE_OID = x509.ObjectIdentifier("2.25.147690550399236547233384196472556529584")
ORGANISATION_OID = x509.ObjectIdentifier("2.25.147690550399236547233384196472556529585")
MAX_PATTERNS = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a network, an organisation, a node


@dataclass(frozen=True)
class Issuer:
    """Who signs certificates: the network's root, or an organisation under it."""

    key: Ed25519PrivateKey
    cert: x509.Certificate  # its own; names what it may give
    is_root: bool

    @property
    def peer_id(self) -> str:
        return peer_id_of(self.key.public_key().public_bytes_raw())

    @property
    def scope(self) -> Scope:
        """What it was given itself; the root has no bounds."""
        return Scope() if self.is_root else scope_of(self.cert)


@dataclass(frozen=True)
class Judged:
    """A peer, and the time (unix seconds) in which each certificate of its chain is valid."""

    peer: Peer
    valid_from: float
    valid_until: float


def issue_root(name: str, key: Ed25519PrivateKey, valid_days: float, before: Issuer | None = None) -> x509.Certificate:
    """A root's certificate, signed by itself or by the root before it; organisations may stand under it, no more."""
    issuer = before.cert if before is not None else None
    builder = _builder(name, name if issuer is None else name_of(issuer), key.public_key(), valid_days, None)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
    builder = builder.add_extension(_key_usage(is_ca=True), critical=True)
    above = _key_id(key.public_key()) if issuer is None else own_key_id(issuer)
    signer = key if before is None else before.key
    return builder.add_extension(authority(above), critical=False).sign(signer, None)


def issue(
    issuer: Issuer, name: str, key: Ed25519PublicKey, scope: Scope, valid_days: float, *, organisation: bool = False
) -> x509.Certificate:
    """A certificate for a node's key, or an organisation's. It ends no later than the issuer's own."""
    check_scope(scope)
    path_length = issuer.cert.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length
    if organisation and not (issuer.is_root and path_length):
        raise UsageError(
            "organisation: expected a root that may have organisations (path length 1), got "
            + (f"one of path length {path_length}. Make a new network." if issuer.is_root else "an organisation.")
        )
    if beyond := scope.exceeds(issuer.scope):
        raise UsageError(
            f"certificate of {name}: this organisation may give {', '.join(sorted(issuer.scope.roles))}, "
            f"got {', '.join(sorted(beyond))}. Ask the root for them."
        )
    builder = _builder(name, name_of(issuer.cert), key, valid_days, issuer.cert)
    limits = x509.BasicConstraints(ca=organisation, path_length=0 if organisation else None)
    builder = builder.add_extension(limits, critical=True)
    builder = builder.add_extension(_key_usage(is_ca=organisation), critical=True)
    builder = builder.add_extension(authority(own_key_id(issuer.cert)), critical=False)
    if not organisation:
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(usage, critical=False)
    if scope != Scope():
        builder = builder.add_extension(x509.UnrecognizedExtension(SCOPE_OID, _scope_bytes(scope)), critical=False)
    if not issuer.is_root:
        above = x509.UnrecognizedExtension(ORGANISATION_OID, der_of(issuer.cert))
        builder = builder.add_extension(above, critical=False)
    return builder.sign(issuer.key, None)


def issue_server(issuer: Issuer) -> x509.Certificate:
    """A certificate of an issuer's own key for its admission server: it says the key, and nothing that others trust."""
    name = name_of(issuer.cert)
    builder = _builder(name, name, issuer.key.public_key(), NODE_VALID_DAYS, None)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    return builder.add_extension(_key_usage(is_ca=False), critical=True).sign(issuer.key, None)


def name_of(cert: x509.Certificate) -> str:
    """The common name of a certificate of ours."""
    return str(cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def der_of(cert: x509.Certificate) -> bytes:
    """A certificate's bytes, DER."""
    return cert.public_bytes(serialization.Encoding.DER)


def check_scope(scope: Scope) -> None:
    """Refuses what no certificate should say: unknown roles; patterns that are empty, long or too many."""
    if unknown := scope.roles - ROLES:
        raise UsageError(f"scope: expected roles of {', '.join(sorted(ROLES))}, got {', '.join(sorted(unknown))}")
    if len(scope.datasets) > MAX_PATTERNS or not all(0 < len(p) <= 256 and p.isprintable() for p in scope.datasets):
        raise UsageError(f"scope: expected at most {MAX_PATTERNS} dataset patterns of 1 to 256 printable characters")


@functools.lru_cache(maxsize=4096)
def peer_of(der_cert: bytes) -> Peer:
    """The peer that a certificate names, with nobody above it. Whether to trust it is `judge`'s to say."""
    return _read(_parse(der_cert))


@functools.lru_cache(maxsize=4096)
def judge(der_cert: bytes, roots: tuple[bytes, ...]) -> Judged:
    """The peer of a node's certificate, its organisation and scope, once each signature up to a root is checked.

    Whether the certificates are valid now is for the caller to check: see `Judged`.
    """
    cert = _parse(der_cert)
    peer = _read(cert)
    if _is_ca(cert):
        raise ProtocolError(f"peer {peer.peer_id} ({peer.name}): expected a node's certificate, got an issuer's")
    issuer_key_id = authority_key_id(cert)
    if (root := _root_of(issuer_key_id, roots)) is not None:
        _check_signature(cert, root, f"peer {peer.peer_id} ({peer.name})", "the network's root")
        return _judged(peer, cert, root)
    carried = _extension(cert, ORGANISATION_OID)
    if carried is None:
        raise ProtocolError(
            f"peer {peer.peer_id} ({peer.name}): its issuer is neither our root nor an organisation that it shows. "
            "Both sides need a certificate of the same network: see `forebay network join`."
        )
    above = organisation_of(carried, roots)
    org = above.peer
    if key_id_of(org.peer_id) != issuer_key_id:
        raise ProtocolError(
            f"peer {peer.peer_id} ({peer.name}): expected the certificate of the organisation that issued its own, "
            f"got that of {org.peer_id} ({org.name}). Do not trust it."
        )
    _check_signature(cert, _parse(carried), f"peer {peer.peer_id} ({peer.name})", "its organisation")
    if beyond := peer.scope.exceeds(org.scope):
        raise ProtocolError(
            f"peer {peer.peer_id} ({peer.name}): its organisation {org.peer_id} ({org.name}) may give "
            f"{', '.join(sorted(org.scope.roles))}, got {', '.join(sorted(beyond))}. Do not trust it."
        )
    bounded = replace(peer, org=org.peer_id, scope=peer.scope.bounded_by(org.scope))
    return _judged(bounded, cert, _parse(carried), _root_of(authority_key_id(_parse(carried)), roots))


@functools.lru_cache(maxsize=256)
def organisation_of(der_cert: bytes, roots: tuple[bytes, ...]) -> Judged:
    """The organisation that a certificate names, once a root's signature on it is checked."""
    cert = _parse(der_cert)
    org, root = _read(cert), _root_of(authority_key_id(cert), roots)
    _check_signature(cert, root, f"organisation {org.peer_id} ({org.name})", "the network's root")
    if not _is_ca(cert):
        raise ProtocolError(f"organisation {org.peer_id} ({org.name}): its certificate may not issue others")
    return _judged(org, cert, root)


def check_roots(roots: tuple[bytes, ...], network_id: str) -> None:
    """Checks that the first root has the network's key, and that each further one is signed by the one before it."""
    first = peer_of(roots[0]).peer_id
    if first != network_id:
        raise ProtocolError(f"root-cert.pem: expected a root of network {network_id}, got {first}")
    for older, newer in zip((roots[0], *roots), roots, strict=False):
        found = peer_of(newer)
        _check_signature(_parse(newer), _parse(older), f"root {found.peer_id} ({found.name})", "the root before it")
        if not _is_ca(_parse(newer)):
            raise ProtocolError(f"root {found.peer_id} ({found.name}): its certificate may not issue others")


def _judged(peer: Peer, *chain: x509.Certificate | None) -> Judged:
    starts = [cert.not_valid_before_utc.timestamp() for cert in chain if cert is not None]
    ends = [cert.not_valid_after_utc.timestamp() for cert in chain if cert is not None]
    return Judged(replace(peer, valid_until=min(ends)), max(starts), min(ends))


def _root_of(key_id: bytes, roots: tuple[bytes, ...]) -> x509.Certificate | None:
    return next((root for root in map(_parse, roots) if own_key_id(root) == key_id), None)


def _check_signature(cert: x509.Certificate, issuer: x509.Certificate | None, what: str, whose: str) -> None:
    try:
        if issuer is None:
            raise InvalidSignature
        key = issuer.public_key()
        assert isinstance(key, Ed25519PublicKey)  # _parse saw to it
        key.verify(cert.signature, cert.tbs_certificate_bytes)
    except InvalidSignature as error:
        raise ProtocolError(f"{what}: expected a certificate signed by {whose}, got another") from error


def scope_of(cert: x509.Certificate) -> Scope:
    """The scope that a certificate states; all, if it states none."""
    raw = _extension(cert, SCOPE_OID)
    if raw is None:
        return Scope()
    try:
        body = json.loads(raw)
        scope = Scope(frozenset(body["roles"]), tuple(body["datasets"]))
        if not all(isinstance(item, str) for item in (*scope.roles, *scope.datasets)):
            raise TypeError("expected strings")
        check_scope(scope)
    except (ValueError, KeyError, TypeError, RecursionError, UsageError) as error:
        raise ProtocolError(f"peer's certificate: no scope in {raw[:80]!r}: {error}") from error
    return scope


_PARSER_ERRORS = (
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
    x509.DuplicateExtension,
    x509.AttributeNotFound,
)


def _parse(der_cert: bytes) -> x509.Certificate:
    try:
        cert = x509.load_der_x509_certificate(der_cert)
        key = cert.public_key()
        num_names = len(cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME))
        _ = cert.extensions  # parsed when asked for, and may be malformed
    except (ValueError, *_PARSER_ERRORS) as error:
        raise ProtocolError(f"peer's certificate: expected X.509 in DER, got {error}") from error
    if not isinstance(key, Ed25519PublicKey) or num_names != 1:
        raise ProtocolError(
            f"peer's certificate: expected an Ed25519 key and one common name, got {type(key).__name__} "
            f"and {num_names} names. Issue the node's certificate with `forebay network join`."
        )
    return cert


def _read(cert: x509.Certificate) -> Peer:
    key = cert.public_key()
    assert isinstance(key, Ed25519PublicKey)  # _parse saw to it
    name = name_of(cert)
    if not NAME.fullmatch(name):  # it is printed and logged
        raise ProtocolError(f"certificate: expected a common name of {NAME.pattern}, got {ascii(name)[:80]}")
    raw = key.public_bytes_raw()
    return Peer(peer_id_of(raw), raw, name, scope=scope_of(cert))


def _extension(cert: x509.Certificate, oid: x509.ObjectIdentifier) -> bytes | None:
    try:
        value = cert.extensions.get_extension_for_oid(oid).value
    except x509.ExtensionNotFound:
        return None
    assert isinstance(value, x509.UnrecognizedExtension)
    return value.value


def _is_ca(cert: x509.Certificate) -> bool:
    try:
        return cert.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def authority_key_id(cert: x509.Certificate | x509.CertificateRevocationList) -> bytes:
    """The key identifier of who issued a certificate or CRL. ProtocolError if it names none."""
    try:
        key_id = cert.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    except x509.ExtensionNotFound:
        key_id = None
    if key_id is None:
        raise ProtocolError("certificate: expected the key id of its issuer, got none. Do not trust it.")
    return key_id


def own_key_id(cert: x509.Certificate) -> bytes:
    """The key identifier of a certificate of an issuer. ProtocolError if it has none."""
    try:
        return cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
    except x509.ExtensionNotFound as error:
        raise ProtocolError("certificate of an issuer: expected its own key id, got none.") from error


def _key_id(key: Ed25519PublicKey) -> bytes:
    return key_id_of(peer_id_of(key.public_bytes_raw()))


def authority(key_id: bytes) -> x509.AuthorityKeyIdentifier:
    """The extension that names the issuer of a certificate or CRL by the identifier of its key."""
    return x509.AuthorityKeyIdentifier(key_id, None, None)


def _scope_bytes(scope: Scope) -> bytes:
    body = {"roles": sorted(scope.roles), "datasets": list(scope.datasets)}
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _builder(
    name: str, issuer: str, key: Ed25519PublicKey, days: float, above: x509.Certificate | None
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    end = now + dt.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(serial_number_of(peer_id_of(key.public_bytes_raw())))
        .not_valid_before(now - EARLY)
        .not_valid_after(end if above is None else min(end, above.not_valid_after_utc))
        .add_extension(x509.SubjectKeyIdentifier(_key_id(key)), critical=False)
    )


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
