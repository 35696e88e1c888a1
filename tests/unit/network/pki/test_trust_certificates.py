"""Organisations and scopes: certificates against each other over TLS in memory."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ProtocolError, UsageError
from forebay.files import atomic_write
from forebay.network.peer import ROLES, Peer, Scope
from forebay.network.pki import certificates
from forebay.network.pki.certificates import ORGANISATION_OID, SCOPE_OID, Issuer, der_of, issue, verify_certificate
from forebay.network.pki.files import (
    copy_shared,
    read_certs,
    read_issuer,
    read_key,
    read_root,
    renew_organisation,
    write_key,
)
from forebay.network.pki.identity import Identity, create_network, create_organisation, join, renew

Make = Callable[[str], Identity]
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


def meets(one: Identity, other: Identity) -> Peer:
    """The peer that `one` takes `other` for, after a handshake."""
    return one.peer(shake(one.server_context(), other.client_context())[1])


@pytest.fixture
def org_dir(network_dir: Path, tmp_path: Path) -> Path:
    create_organisation(network_dir, tmp_path / "org", "acme", DATA)
    return tmp_path / "org"


def forge(org_dir: Path, out: Path, *extensions: x509.ExtensionType) -> Path:
    """A node that a rogue organisation signed with just these extensions."""
    join(org_dir, out, "forged")
    key, issuer, good = read_key(out / "node-key.pem"), read_issuer(org_dir), read_certs(out / "node-cert.pem")[0]
    builder = x509.CertificateBuilder(good.issuer, good.subject, key.public_key(), good.serial_number)
    builder = builder.not_valid_before(good.not_valid_before_utc).not_valid_after(good.not_valid_after_utc)
    for extension in extensions:
        builder = builder.add_extension(extension, False)
    cert = builder.sign(issuer.key, None)
    (out / "node-cert.pem").write_bytes(cert.public_bytes(PEM) + issuer.cert.public_bytes(PEM))
    return out


def key_id_of(cert: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """A certificate as the issuer that another names."""
    return x509.AuthorityKeyIdentifier(certificates.own_key_id(cert), None, None)


def carried(cert: x509.Certificate) -> x509.UnrecognizedExtension:
    """A certificate as the organisation's that another carries."""
    return x509.UnrecognizedExtension(ORGANISATION_OID, der_of(cert))


def shown(node_dir: Path, one: Identity) -> bytes:
    """What a node shows `one` in the handshake, though it could not load its own certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(node_dir / "node-cert.pem", node_dir / "node-key.pem")
    return shake(one.server_context(), context)[1]


def test_an_organisations_node_says_whose_it_is_and_what_it_may(
    network_dir: Path, org_dir: Path, tmp_path: Path, make_identity: Make
) -> None:
    of_root, node = (
        make_identity("r"),
        join(org_dir, tmp_path / "n", "n", scope=Scope(frozenset({"worker"}), ("c4-en",))),
    )
    org_id = read_issuer(org_dir).peer_id
    for seen in (meets(of_root, node), of_root.peer(shake(node.server_context(), of_root.client_context())[0])):
        assert (seen.peer_id, seen.org) == (node.peer_id, org_id)
        assert seen.scope == Scope(frozenset({"worker"}), ("c4-en",), ("c4-*",))
    assert meets(node, of_root) == Peer(of_root.peer_id, of_root.public_key, "r", "", Scope())
    assert (node.org, of_root.org) == (org_id, "")


def test_a_node_gets_no_more_than_its_organisation(org_dir: Path, network_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="may give data, worker, got scheduler"):
        join(org_dir, tmp_path / "n", "n", scope=Scope(frozenset({"scheduler"})))
    wide = join(org_dir, tmp_path / "w", "w", scope=Scope(datasets=("*",))).scope
    assert wide.roles == DATA.roles and wide.covers("c4-en") and not wide.covers("books")
    with pytest.raises(UsageError, match="directory of a network"):
        create_organisation(org_dir, tmp_path / "o2", "below")
    with pytest.raises(UsageError, match="expected roles of"):
        join(network_dir, tmp_path / "x", "x", scope=Scope(frozenset({"king"})))


def test_go_programs_can_parse_certificates(org_dir: Path, tmp_path: Path) -> None:
    """Their numbers of extensions are below 2^31, and the host name that they compare is there."""
    node = join(org_dir, tmp_path / "n", "n", scope=Scope(frozenset({"worker"}))).certificate
    assert max(int(part) for item in node.extensions for part in item.oid.dotted_string.split(".")) < 1 << 31
    names = node.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [certificates.SERVER_NAME]


def test_a_scope_of_an_earlier_version_is_refused(network_dir: Path, tmp_path: Path, make_identity: Make) -> None:
    """Read without it, the certificate would have every role."""
    item, root = make_identity("one"), read_issuer(network_dir)
    earlier = x509.ObjectIdentifier("2.25.147690550399236547233384196472556529584")
    scope = x509.UnrecognizedExtension(earlier, json.dumps({"roles": ["worker"], "datasets": []}).encode())
    invalid = forge(network_dir, tmp_path / "e", key_id_of(root.cert), scope)
    with pytest.raises(ProtocolError, match="scope of this version, got an earlier"):
        item.peer(shown(invalid, item))


def test_an_organisation_that_exceeds_its_scope_is_refused(org_dir: Path, tmp_path: Path, make_identity: Make) -> None:
    """It signs what it likes with its own key; who meets the node judges by what the root gave."""
    item, org, root = make_identity("one"), read_issuer(org_dir), read_issuer(tmp_path / "network")
    crown = x509.UnrecognizedExtension(SCOPE_OID, json.dumps({"roles": ["admin"], "datasets": []}).encode())
    of_itself = key_id_of(org.cert)
    invalid = forge(org_dir, tmp_path / "a", of_itself, carried(org.cert), crown)
    with pytest.raises(ProtocolError, match="may give data, worker, got admin"):
        item.peer(shown(invalid, item))

    wider = issue(Issuer(org.key, root.cert, True), "acme", org.key.public_key(), Scope(), 9, organisation=True)
    invalid = forge(org_dir, tmp_path / "b", of_itself, carried(wider), crown)
    with pytest.raises(ProtocolError, match="signed by the network's root, got another"):
        item.peer(shown(invalid, item))

    create_organisation(tmp_path / "network", tmp_path / "rich", "rich")
    invalid = forge(org_dir, tmp_path / "c", of_itself, carried(read_issuer(tmp_path / "rich").cert), crown)
    with pytest.raises(ProtocolError, match="organisation that issued its own"):
        item.peer(shown(invalid, item))


def test_an_organisation_cannot_pass_for_the_root(org_dir: Path, tmp_path: Path, make_identity: Make) -> None:
    """OpenSSL takes nobody for the issuer whose key id is another's than the certificate names."""
    item = make_identity("one")
    as_root = forge(org_dir, tmp_path / "a", key_id_of(read_certs(org_dir / "root-cert.pem")[0]))
    with pytest.raises(ssl.SSLCertVerificationError):
        shown(as_root, item)
    with pytest.raises(ProtocolError, match="expected the key id of its issuer"):
        item.peer(shown(forge(org_dir, tmp_path / "b"), item))


def test_an_organisations_key_is_no_node_and_makes_no_organisation(
    org_dir: Path, tmp_path: Path, make_identity: Make
) -> None:
    item, org = make_identity("one"), read_issuer(org_dir)
    fake = tmp_path / "fake"
    fake.mkdir()
    write_key(fake / "node-key.pem", org.key)
    atomic_write(fake / "node-cert.pem", org.cert.public_bytes(PEM))
    with pytest.raises(ssl.SSLCertVerificationError):
        shown(fake, item)
    # An organisation under the organisation: the path length says no.
    below, node_key = Ed25519PrivateKey.generate(), read_key(item.node_dir / "node-key.pem")
    as_root = Issuer(org.key, read_issuer(tmp_path / "network").cert, True)
    middle = issue(as_root, "acme", below.public_key(), Scope(), 9, organisation=True)
    leaf = issue(Issuer(below, middle, False), "leaf", node_key.public_key(), Scope(), 9)
    write_key(fake / "node-key.pem", node_key)
    atomic_write(fake / "node-cert.pem", b"".join(cert.public_bytes(PEM) for cert in (leaf, middle, org.cert)))
    with pytest.raises(ssl.SSLCertVerificationError):
        shown(fake, item)


def test_another_networks_organisation_is_a_stranger(tmp_path: Path, make_identity: Make) -> None:
    create_network(tmp_path / "other", "test-network")
    create_organisation(tmp_path / "other", tmp_path / "other-org", "acme")
    stranger = join(tmp_path / "other-org", tmp_path / "s", "s")
    with pytest.raises(ssl.SSLCertVerificationError):
        meets(make_identity("one"), stranger)


def test_expiry_is_told_and_refused(
    network_dir: Path, org_dir: Path, tmp_path: Path, make_identity: Make, caplog: pytest.LogCaptureFixture
) -> None:
    node = join(network_dir, tmp_path / "n", "n", valid_days=20)
    assert not caplog.records  # short-lived, and new
    node.warn_of_expiry(time.time() + 14 * 86400)
    assert "expires in 6.0 days" in caplog.text and "forebay network renew" in caplog.text
    # An organisation that has ended takes its nodes with it, whatever their own certificates say.
    org = read_issuer(org_dir)
    checked = verify_certificate(der_of(issue(org, "x", org.key.public_key(), Scope(), 99999)), read_root(org_dir))
    assert checked.valid_until == org.cert.not_valid_after_utc.timestamp()


def test_an_open_connection_ends_with_the_certificate(network_dir: Path, tmp_path: Path, make_identity: Make) -> None:
    item, other = make_identity("one"), join(network_dir, tmp_path / "n", "n", valid_days=20)
    peer = meets(item, other)
    assert peer.valid_until == pytest.approx(other.expires_at) and item.refusal(peer) is None
    assert "has expired" in str(item.refusal(replace(peer, valid_until=time.time() - 1)))


def test_a_signature_counts_without_tls(org_dir: Path, network_dir: Path, tmp_path: Path) -> None:
    """`judge` is all that stands between a publication and its reader: key identifiers are not enough."""
    stolen = forge(org_dir, tmp_path / "a", key_id_of(read_certs(network_dir / "root-cert.pem")[0]))
    with pytest.raises(ProtocolError, match="signed by the network's root"):
        verify_certificate(der_of(read_certs(stolen / "node-cert.pem")[0]), read_root(network_dir))
    create_organisation(network_dir, tmp_path / "rich", "rich")
    rich = read_issuer(tmp_path / "rich").cert
    stolen = forge(org_dir, tmp_path / "b", key_id_of(rich), carried(rich))
    with pytest.raises(ProtocolError, match="signed by its organisation"):
        verify_certificate(der_of(read_certs(stolen / "node-cert.pem")[0]), read_root(network_dir))


# Rotation of the root.


def test_a_second_root_is_refused(network_dir: Path, tmp_path: Path) -> None:
    create_network(tmp_path / "evil", "test-network")
    pem = (network_dir / "root-cert.pem").read_bytes() + (tmp_path / "evil" / "root-cert.pem").read_bytes()
    (network_dir / "root-cert.pem").write_bytes(pem)
    with pytest.raises(UsageError, match="expected one certificate"):
        read_root(network_dir)


def test_what_a_node_gets_is_for_its_owner(network_dir: Path, tmp_path: Path) -> None:
    node = join(network_dir, tmp_path / "deep" / "n", "n")
    assert [path.stat().st_mode & 0o777 for path in (node.node_dir, network_dir)] == [0o700, 0o700]
    (network_dir / "revoked.txt").write_text("# nobody\n")
    copy_shared(network_dir, node.node_dir)
    assert (node.node_dir / "revoked.txt").exists()


def test_a_renewed_certificate_is_taken_up_without_a_restart(
    network_dir: Path, tmp_path: Path, make_identity: Make
) -> None:
    node, other = make_identity("n"), make_identity("o")
    context = node.client_context()
    before = shake(other.server_context(), context)[1]
    assert not node.refresh()
    renew(network_dir, node.node_dir, valid_days=99)
    assert node.refresh() and not node.refresh()
    after = shake(other.server_context(), context)[1]
    assert before != after and other.peer(after) == other.peer(before)
    assert node.expires_at == pytest.approx(time.time() + 99 * 86400, abs=60)


def test_an_organisation_is_renewed(network_dir: Path, org_dir: Path) -> None:
    before = read_issuer(org_dir)
    assert renew_organisation(network_dir, org_dir, valid_days=9) == before.peer_id
    after = read_issuer(org_dir)
    assert after.scope == before.scope and after.cert != before.cert


@given(st.frozensets(st.sampled_from(sorted(ROLES))), st.frozensets(st.sampled_from(sorted(ROLES)), min_size=1))
def test_bounds_only_narrow(mine: frozenset[str], given: frozenset[str]) -> None:
    inner, outer = Scope(mine, ("a*",)), Scope(given, ("*b",))
    if not inner.exceeds(outer):
        bounded = inner.bounded_by(outer)
        assert all(outer.allows(role) for role in ROLES if bounded.allows(role))
        assert bounded.covers("ab") and not bounded.covers("a") and not bounded.covers("b")


def test_a_name_is_one_that_a_terminal_can_show(network_dir: Path) -> None:
    root, key = read_issuer(network_dir), Ed25519PrivateKey.generate()
    for name in ("\x1b[2Jgone", "a b", "ä", "a\n", "../up"):
        cert = issue(root, name, key.public_key(), Scope(), 9)
        with pytest.raises(ProtocolError, match="expected a common name"):
            verify_certificate(der_of(cert), read_root(network_dir))
