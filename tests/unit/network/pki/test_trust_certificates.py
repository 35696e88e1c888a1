"""Organisations and scopes: certificates against each other over TLS in memory, and forged ones."""

import json
import ssl
import time
from base64 import b64encode
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from forebay.errors import ProtocolError, UsageError
from forebay.network.admission import Admissions
from forebay.network.join import make_csr
from forebay.network.messages import RenewRequest
from forebay.network.peer import Peer, Scope
from forebay.network.pki import certificates
from forebay.network.pki.certificates import ORGANISATION_OID, SCOPE_OID, Issuer, der_of, issue, verify_certificate
from forebay.network.pki.files import read_issuer, read_key, read_root, write_key
from forebay.network.pki.identity import (
    Identity,
    create_network,
    create_organisation,
    join,
    renew,
    renew_organisation,
)
from forebay.network.pki.revocation import parse_crl, sign_crl
from forebay.network.publications import read_publication

PEM = serialization.Encoding.PEM
DATA = Scope(frozenset({"data", "worker"}), ("c4-*",))


def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[bytes, bytes]:
    """A handshake in memory: the certificate that each side was shown, DER, server's first."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        (server.wrap_bio(to_server, to_client, server_side=True)),
        (client.wrap_bio(to_client, to_server, server_hostname=None)),
    ]
    for _ in range(4):
        for side in reversed(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    server_seen, client_seen = sides[1].getpeercert(binary_form=True), sides[0].getpeercert(binary_form=True)
    assert server_seen and client_seen
    return server_seen, client_seen


def meets(node: Identity, other: Identity) -> Peer:
    """The peer that `node` takes `other` for, after a handshake."""
    return node.peer(shake(node.server_context(), other.client_context())[1])


def shakes(folder: Path, key: Ed25519PrivateKey, *chain: x509.Certificate, server: Identity):
    """A handshake with this key and these certificates, as no Identity would load them."""
    folder.mkdir()
    write_key(folder / "key.pem", key)
    (folder / "cert.pem").write_bytes(b"".join(cert.public_bytes(PEM) for cert in chain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    shake(server.server_context(), context)


@pytest.fixture
def org_dir(network_dir, tmp_path) -> Path:
    create_organisation(network_dir, tmp_path / "org", "acme", DATA)
    return tmp_path / "org"


def test_an_organisations_node_says_whose_it_is_and_what_it_may(org_dir, tmp_path, make_identity):
    node = join(org_dir, tmp_path / "n", "n", scope=Scope(frozenset({"worker"}), ("c4-en",)))
    seen = meets(make_identity("r"), node)
    assert (seen.peer_id, seen.org) == (node.peer_id, read_issuer(org_dir).peer_id)
    assert seen.scope == Scope(frozenset({"worker"}), ("c4-en",), ("c4-*",))
    # Go programs can parse it: their numbers of extensions are below 2^31, and they compare the host name.
    cert = node.certificate
    assert max(int(part) for item in cert.extensions for part in item.oid.dotted_string.split(".")) < 1 << 31
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [certificates.SERVER_NAME]


def test_a_node_gets_no_more_than_its_organisation(org_dir, network_dir, tmp_path):
    with pytest.raises(UsageError, match="may give data, worker, got scheduler"):
        join(org_dir, tmp_path / "n", "n", scope=Scope(frozenset({"scheduler"})))
    wide = join(org_dir, tmp_path / "w", "w", scope=Scope(datasets=("*",))).scope
    assert wide.roles == DATA.roles and wide.covers("c4-en") and not wide.covers("books")
    with pytest.raises(UsageError, match="directory of a network"):
        create_organisation(org_dir, tmp_path / "o2", "below")
    with pytest.raises(UsageError, match="expected roles of"):
        join(network_dir, tmp_path / "x", "x", scope=Scope(frozenset({"king"})))


# Forged certificates.


def key_id_of(cert: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    return certificates.authority(cert)


def carried(cert: x509.Certificate) -> x509.UnrecognizedExtension:
    """A certificate as the organisation's that another carries."""
    return x509.UnrecognizedExtension(ORGANISATION_OID, der_of(cert))


def scoped(text: object, oid: x509.ObjectIdentifier = SCOPE_OID) -> x509.UnrecognizedExtension:
    return x509.UnrecognizedExtension(oid, text if isinstance(text, bytes) else json.dumps(text).encode())


def forge(issuer: Issuer, node: Identity, *extensions: x509.ExtensionType, names: tuple[str, ...] = ("x",)) -> bytes:
    """A certificate of a node's key that a rogue issuer signed with just these names and extensions, DER."""
    good, subject = node.certificate, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
    builder = x509.CertificateBuilder(good.issuer, subject, good.public_key(), good.serial_number)
    builder = builder.not_valid_before(good.not_valid_before_utc).not_valid_after(good.not_valid_after_utc)
    for extension in extensions:
        builder = builder.add_extension(extension, False)
    return der_of(builder.sign(issuer.key, None))


def test_a_name_that_is_no_text_is_refused_by_each_parser(network_dir, make_identity):
    """The library raises TypeError for a common name that is a string of bits."""
    node, root, key = make_identity("evil"), read_root(network_dir), Ed25519PrivateKey.generate()
    der = der_of(node.certificate)
    offset = der.index(b"\x0c\x04evil")
    invalid = der[:offset] + b"\x03\x04\x00vil" + der[offset + 6 :]
    pem = b"-----BEGIN CERTIFICATE-----\n" + b64encode(invalid) + b"\n-----END CERTIFICATE-----\n"
    crl = pem + sign_crl(read_issuer(network_dir), [1], 1)
    publication = {**dict.fromkeys(("dataset_id", "name", "publisher", "signature"), ""), "certificate": pem.decode()}
    body = {**publication, "serial": 1, "signed_at": 1, "expires_at": 2, "origins": [], "format": 4}
    for parse in (
        lambda: certificates.peer_of(invalid),
        lambda: node.peer(invalid),
        lambda: parse_crl(crl, root),
        lambda: read_publication(json.dumps(body).encode(), node),
        lambda: Admissions(network_dir).renew(RenewRequest(request=make_csr(key, "x")), "", invalid),
    ):
        with pytest.raises(ProtocolError, match="malformed: TypeError"):
            parse()


CROWN = {"roles": ["admin"], "datasets": []}


def test_forged_certificates_are_refused(org_dir, network_dir, tmp_path):
    """An organisation signs what it likes with its own key; a peer of the node decides by what the root gave."""
    node, root, org = join(org_dir, tmp_path / "n", "n"), read_issuer(network_dir), read_issuer(org_dir)
    create_organisation(network_dir, tmp_path / "rich", "rich")
    rich = read_issuer(tmp_path / "rich").cert
    wider = issue(Issuer(org.key, root.cert, True), "acme", org.key.public_key(), Scope(), 9, organisation=True)
    earlier = x509.ObjectIdentifier("2.25.147690550399236547233384196472556529584")
    own, by_org = key_id_of(org.cert), [key_id_of(org.cert), carried(org.cert)]
    assert verify_certificate(forge(org, node, *by_org), read_root(network_dir)).org == org.peer_id
    large = {"roles": ["worker"], "datasets": ["x" * 60] * 20_000}
    cases = [
        (org, [*by_org, scoped(CROWN)], "may give data, worker, got admin"),
        (org, [own, carried(wider), scoped(CROWN)], "signed by the network's root"),
        (org, [own, carried(rich), scoped(CROWN)], "organisation that issued its own"),
        (org, [key_id_of(rich), carried(rich)], "signed by its organisation"),
        (org, [key_id_of(root.cert)], "signed by the network's root"),
        (org, [], "expected the key id of its issuer"),
        # Without its scope the certificate would have every role.
        (root, [key_id_of(root.cert), scoped(CROWN, earlier)], "scope of this version, got an earlier"),
        (org, [*by_org, scoped(large)], "scope"),
        (org, [*by_org, scoped(b"[" * 100_000)], "scope"),
        (org, [*by_org, scoped({"roles": ["root"], "datasets": []})], "roles"),
    ]
    for issuer, extensions, message in cases:
        with pytest.raises(ProtocolError, match=message):
            node.peer(forge(issuer, node, *extensions))
    for names in [("x", "admin"), (), ("\x1b[2Jgone",), ("a b",), ("ä",), ("a\n",), ("../up",)]:
        with pytest.raises(ProtocolError, match="common name"):
            node.peer(forge(org, node, *by_org, names=names))


def test_an_organisation_cannot_pass_for_the_root_or_a_node_and_makes_no_organisation(
    org_dir, network_dir, tmp_path, make_identity
):
    """OpenSSL takes no certificate for the issuer whose key id is another's than the certificate names."""
    server, org, root = make_identity("one"), read_issuer(org_dir), read_issuer(network_dir)
    node = join(org_dir, tmp_path / "n", "n")
    key = read_key(node.node_dir / "node-key.pem")
    as_root = x509.load_der_x509_certificate(forge(org, node, key_id_of(root.cert)))
    # An organisation under the organisation: the path length says no.
    below = Ed25519PrivateKey.generate()
    middle = issue(Issuer(org.key, root.cert, True), "acme", below.public_key(), Scope(), 9, organisation=True)
    leaf = issue(Issuer(below, middle, False), "leaf", key.public_key(), Scope(), 9)
    for number, (own, *chain) in enumerate(
        [(key, as_root, org.cert), (org.key, org.cert), (key, leaf, middle, org.cert)]
    ):
        with pytest.raises(ssl.SSLCertVerificationError):
            shakes(tmp_path / f"{number}", own, *chain, server=server)


# Expiry and renewal.


def test_expiry_is_logged_and_refused(network_dir, org_dir, tmp_path, caplog):
    node = join(network_dir, tmp_path / "n", "n", valid_days=20)
    assert not caplog.records  # short-lived, and new
    node.warn_of_expiry(time.time() + 14 * 86400)
    assert "expires in 6 days" in caplog.text and "forebay network renew" in caplog.text
    # An organisation that has ended takes its nodes with it, whatever their own certificates say.
    org = read_issuer(org_dir)
    checked = verify_certificate(der_of(issue(org, "x", org.key.public_key(), Scope(), 99999)), read_root(org_dir))
    assert checked.valid_until == org.cert.not_valid_after_utc.timestamp()


def test_a_second_root_is_refused(network_dir, tmp_path):
    create_network(tmp_path / "evil", "test-network")
    pem = (network_dir / "root-cert.pem").read_bytes() + (tmp_path / "evil" / "root-cert.pem").read_bytes()
    (network_dir / "root-cert.pem").write_bytes(pem)
    with pytest.raises(UsageError, match="expected one certificate"):
        read_root(network_dir)


def test_a_renewed_certificate_is_taken_up_without_a_restart(network_dir, make_identity):
    node, other = make_identity("n"), make_identity("o")
    context = node.client_context()
    before = shake(other.server_context(), context)[1]
    assert not node.refresh()
    assert renew(network_dir, node.node_dir, valid_days=99).peer_id == node.peer_id
    assert node.refresh() and not node.refresh()
    after = shake(other.server_context(), context)[1]
    assert before != after and other.peer(after) == other.peer(before)
    assert node.expires_at == pytest.approx(time.time() + 99 * 86400, abs=60)


def test_an_organisation_is_renewed(network_dir, org_dir):
    before = read_issuer(org_dir)
    assert renew_organisation(network_dir, org_dir, valid_days=9) == before.peer_id
    after = read_issuer(org_dir)
    assert after.scope == before.scope and after.cert != before.cert
