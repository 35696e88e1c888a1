"""Certificate revocation lists: signed, carried from node to node, bounded, and refused when they are not right."""

import datetime as dt
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from forebay.errors import ProtocolError, UsageError
from forebay.network.pki import revocation
from forebay.network.pki.certificates import Issuer, authority, der_of
from forebay.network.pki.files import read_certs, read_issuer, read_key, read_root
from forebay.network.pki.identity import Identity, create_network, create_organisation, join, renew, revoke
from forebay.network.pki.revocation import MAX_CRL_BYTES, MAX_REVOKED, Revocations, parse_crl, sign_crl
from forebay.peer_id import serial_number_of

PEM = serialization.Encoding.PEM
pytestmark = pytest.mark.usefixtures("changes_at_once")


@pytest.fixture
def org_dir(network_dir, tmp_path) -> Path:
    create_organisation(network_dir, tmp_path / "org", "acme")
    return tmp_path / "org"


def is_revoked(node: Identity, other: Identity) -> bool:
    return node.refusal(other.as_peer) is not None


def test_others_read_the_crl(network_dir, make_identity):
    """It is X.509: who knows only the standard finds the certificate in it."""
    a, b = make_identity("a"), make_identity("b")
    crl = revoke(network_dir, b.peer_id)
    standard, root = x509.load_pem_x509_crl(crl.pem), read_certs(network_dir / "root-cert.pem")[0]
    assert standard.is_signature_valid(root.public_key()) and standard.issuer == root.subject
    assert standard.get_revoked_certificate_by_serial_number(b.certificate.serial_number) is not None
    assert standard.get_revoked_certificate_by_serial_number(a.certificate.serial_number) is None
    assert standard.next_update_utc > dt.datetime.now(dt.UTC)


def test_a_crl_goes_from_node_to_node(network_dir, make_identity):
    a, b, c = make_identity("a"), make_identity("b"), make_identity("c")
    created = revoke(network_dir, c.peer_id, a.node_dir)
    assert is_revoked(a, c) and not is_revoked(b, c)
    stamp, pem, numbers = b.revocations.stamp(), a.revocations.crls()[created.issuer].pem, a.revocations.numbers()
    assert numbers == {created.issuer: created.number} and pem == created.pem
    assert b.revocations.wants(created.issuer, created.number) and b.revocations.accept(pem) == created
    assert is_revoked(b, c) and not is_revoked(b, a) and b.revocations.stamp() != stamp
    assert not b.revocations.wants(created.issuer, created.number) and b.revocations.accept(pem) is None
    again = Identity.load(b.node_dir)
    assert is_revoked(again, c) and again.revocations.numbers() == numbers
    assert (b.node_dir / "crls" / f"{created.issuer}.pem").stat().st_mode & 0o777 == 0o600
    assert "is revoked" in str(b.refusal(b.peer(der_of(c.certificate))))  # asked at each request


def test_older_forged_and_foreign_crls_are_refused(network_dir, tmp_path, make_identity):
    a, b = make_identity("a"), make_identity("b")
    root, revoked = read_issuer(network_dir), [serial_number_of(b.peer_id)]
    new = sign_crl(root, revoked, 8)
    assert a.revocations.accept(new) is not None
    for older in (sign_crl(root, [], 7), sign_crl(root, [], 8)):
        assert a.revocations.accept(older) is None and is_revoked(a, b)
    create_network(tmp_path / "other", "test-network")
    create_organisation(tmp_path / "other", tmp_path / "other-org", "acme")
    by_node = Issuer(read_key(b.node_dir / "node-key.pem"), root.cert, True)
    for invalid, reason in [
        (sign_crl(read_issuer(tmp_path / "other"), [], 99), "expected one by this network's root"),
        (sign_crl(read_issuer(tmp_path / "other-org"), [], 99), "signed by the network's root"),
        (sign_crl(by_node, [], 99), "forged"),
        (b.certificate.public_bytes(PEM) + sign_crl(by_node, [], 99), "may not issue others"),
        (new.replace(b"M", b"N", 1), "malformed"),
        (b"", "malformed"),
        (b.certificate.public_bytes(PEM), "malformed"),
    ]:
        with pytest.raises(ProtocolError, match=reason):
            a.revocations.accept(invalid)
    assert list(a.revocations.numbers().values()) == [8] and is_revoked(a, b)


def test_what_a_crl_may_not_say(network_dir):
    root, now = read_issuer(network_dir), dt.datetime.now(dt.UTC)
    builder = x509.CertificateRevocationListBuilder(root.cert.subject, now, now + dt.timedelta(1))
    named = builder.add_extension(authority(root.cert), critical=False)
    numbered = named.add_extension(x509.CRLNumber(3), critical=False)
    delta = numbered.add_extension(x509.DeltaCRLIndicator(2), critical=True)
    huge = named.add_extension(x509.CRLNumber(1 << 63), critical=False)
    unnamed = builder.add_extension(x509.CRLNumber(3), critical=False)
    assert parse_crl(numbered.sign(root.key, None).public_bytes(PEM), read_root(network_dir)).number == 3
    for invalid in (builder, named, delta, huge, unnamed):
        with pytest.raises(ProtocolError, match=r"CRL: malformed|expected the key id"):
            parse_crl(invalid.sign(root.key, None).public_bytes(PEM), read_root(network_dir))


def test_the_largest_crl_fits_and_a_larger_one_is_refused(network_dir, org_dir):
    org, roots = read_issuer(org_dir), read_root(network_dir)
    serials = [(1 << 158) + i for i in range(MAX_REVOKED + 1)]
    largest = sign_crl(org, serials[:-1], (1 << 63) - 1)
    assert len(largest) <= MAX_CRL_BYTES and len(parse_crl(largest, roots).serials) == MAX_REVOKED
    with pytest.raises(UsageError, match="at most 19,000"):
        sign_crl(org, serials, 1)
    with pytest.raises(ProtocolError, match="at most 1,048,576 bytes"):
        parse_crl(largest + b"x" * (MAX_CRL_BYTES - len(largest) + 1), roots)
    short = sign_crl(org, range(1, 12), 1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ProtocolError, match="entries"):
        patch.setattr(revocation, "MAX_REVOKED", 10)
        parse_crl(short, roots)


def test_an_organisation_revokes_its_own_and_no_other(network_dir, org_dir, tmp_path, make_identity):
    item, node = make_identity("one"), join(org_dir, tmp_path / "n", "n")
    for peer_id in (node.peer_id, item.peer_id, read_issuer(network_dir).peer_id):
        revoke(org_dir, peer_id, item.node_dir)
    assert "by its organisation" in str(item.refusal(node.as_peer))
    assert item.refusal(item.as_peer) is None and not is_revoked(item, item)
    # A key is revoked, not a certificate; the same key under the root is the root's to judge.
    renewed = renew(org_dir, node.node_dir, valid_days=9)
    assert is_revoked(item, renewed) and item.refusal(replace(renewed.as_peer, org="")) is None


def test_revoking_an_organisation_revokes_its_nodes(network_dir, org_dir, tmp_path, make_identity):
    item, node = make_identity("one"), join(org_dir, tmp_path / "n", "n")
    assert not is_revoked(item, node)
    revoke(network_dir, node.org, item.node_dir)
    assert "organisation" in str(item.refusal(node.as_peer))


def test_a_fourth_crl_of_an_organisation_waits_a_minute_and_the_roots_never(network_dir, org_dir):
    now, org, root = 1000.0, read_issuer(org_dir), read_issuer(network_dir)
    registered = Revocations(org_dir, read_root(network_dir), lambda: now)
    for number in (1, 2, 3):
        assert registered.accept(sign_crl(org, [number], number)) is not None
    for number in (4, 6, 5):
        assert registered.accept(sign_crl(org, [number], number)) is None and not registered.wants(org.peer_id, number)
    for number in (1, 2, 3):
        assert registered.accept(sign_crl(root, [number], number)) is not None
    now += 59
    assert registered.numbers() == {root.peer_id: 3, org.peer_id: 3}
    now += 2  # The newest of those that came early applies now.
    assert registered.numbers() == {root.peer_id: 3, org.peer_id: 6} and not registered.wants(org.peer_id, 7)
    assert registered.crls().keys() == {root.peer_id, org.peer_id}


def test_numbers_rise_though_the_directory_was_restored(network_dir, make_identity):
    first = revoke(network_dir, make_identity("a").peer_id)
    (network_dir / "crls" / f"{first.issuer}.pem").unlink()
    second = revoke(network_dir, make_identity("b").peer_id)
    assert second.number > first.number and first.serials.keys() < second.serials.keys()


def test_an_unreadable_crl_refuses_everybody_until_it_is_gone(network_dir, make_identity, caplog):
    a, b = make_identity("a"), make_identity("b")
    created = revoke(network_dir, b.peer_id, a.node_dir)
    assert a.refusal(a.as_peer) is None
    stamp, path = a.revocations.stamp(), a.node_dir / "crls" / f"{created.issuer}.pem"
    path.write_text("garbage")
    for _ in range(3):
        assert "see its log" in str(a.refusal(a.as_peer))
    assert caplog.text.count("Every peer is refused") == 1 and a.revocations.stamp() == stamp
    path.unlink()
    assert a.refusal(a.as_peer) is None and is_revoked(a, b)
    (network_dir / "crls" / path.name).write_text("garbage")
    with pytest.raises(UsageError, match="cannot read"):  # else the next CRL would forget whom it revoked
        revoke(network_dir, a.peer_id)


def test_a_full_disk_does_not_keep_a_revocation_out_of_force(network_dir, make_identity):
    a, b = make_identity("a"), make_identity("b")
    created = revoke(network_dir, b.peer_id)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(revocation, "atomic_write", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space"):
            a.revocations.accept(created.pem)
    assert is_revoked(a, b)
