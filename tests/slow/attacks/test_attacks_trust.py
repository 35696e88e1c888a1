"""What a member or an organisation does with what it may sign, and with answers that are kept for repeats."""

from __future__ import annotations

import datetime as dt
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID
from starlette.responses import Response

from forebay.errors import ProtocolError
from forebay.network.admission import Admissions
from forebay.network.app import JsonResponse, make_app
from forebay.network.limits import MAX_REPLIES_PER_PEER
from forebay.network.messages import RenewRequest
from forebay.network.pki import revocation
from forebay.network.pki.certificates import SCOPE_OID, authority, der_of, verify_certificate
from forebay.network.pki.files import read_certs, read_issuer, read_key, read_root
from forebay.network.pki.identity import Identity
from forebay.network.pki.revocation import parse_crl, sign_crl
from forebay.network.publications import read_publication, sign_dataset
from forebay.network.server import Server
from forebay.peer_id import serial_number_of
from support.attackers import HOST, answers, ask, connection, issue, organisation, request
from support.handlers import Request, serve

pytestmark = pytest.mark.usefixtures("changes_at_once")
PEM = serialization.Encoding.PEM


def _count() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


@pytest.fixture
def server(network_dir: Path) -> Iterator[Server]:
    numbers = _count()

    def handle(request: Request) -> Response:
        return JsonResponse({"number": next(numbers), "for": request.peer.peer_id})

    with serve(issue(network_dir, "server"), handle) as server:
        yield server


def test_an_answer_kept_for_a_repeat_is_its_members_alone(server: Server, network_dir: Path) -> None:
    """Another member's Idempotency-Key, or a path that ends like one, gets no answer of that member's."""
    honest, evil = issue(network_dir, "honest"), issue(network_dir, "evil")
    first = ask(honest, server.address, "POST", "/a", {}, Idempotency_Key="k")
    assert ask(honest, server.address, "POST", "/a", {}, Idempotency_Key="k") == first
    for path, key in (("/a", "k"), ("/a%20k", ""), ("/", "a k"), ("/a", "k "), ("/a", "K")):
        assert ask(evil, server.address, "POST", path, {}, Idempotency_Key=key)[1]["for"] == evil.peer_id
    assert ask(honest, server.address, "POST", "/a", {}, Idempotency_Key="k") == first


def test_kept_answers_of_one_member_push_out_no_others(server: Server, network_dir: Path) -> None:
    honest, evil = issue(network_dir, "honest"), issue(network_dir, "evil")
    first = ask(honest, server.address, "POST", "/a", {}, Idempotency_Key="k")
    with connection(evil, server.address) as sock:
        answers(sock, *(request("POST", "/a", {}, Idempotency_Key=f"{i}") for i in range(3 * MAX_REPLIES_PER_PEER)))
    assert ask(honest, server.address, "POST", "/a", {}, Idempotency_Key="k") == first
    assert len(server._core.replies._replies) == MAX_REPLIES_PER_PEER + 1


def test_without_certificates_clients_share_no_kept_answers() -> None:
    """Over plain HTTP the address tells them apart: 127.0.0.1 and 127.0.0.2 here."""
    numbers = _count()
    with serve(None, lambda request: JsonResponse({"number": next(numbers)})) as server:
        result = []
        for source in ("127.0.0.1", "127.0.0.2", "127.0.0.1"):
            with socket.create_connection((HOST, server.port), 20, source_address=(source, 0)) as sock:
                result += answers(sock, request("POST", "/a", {}, Idempotency_Key="k"))  # type: ignore[arg-type]
        assert [answer.json()["number"] for answer in result] == [0, 1, 0]


def test_another_members_certificate_is_not_renewed(network_dir: Path) -> None:
    victim, evil = issue(network_dir, "victim"), issue(network_dir, "evil")
    key = read_key(evil.node_dir / "node-key.pem")
    own = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, None).public_bytes(PEM).decode()
    admissions = Admissions(network_dir)
    for shown in (der_of(victim.certificate), b""):
        with pytest.raises(ProtocolError, match="renew"):
            admissions.renew(RenewRequest(request=own), HOST, shown)
    admissions.close()


def forged(org_dir: Path, node: Identity, subject: x509.Name, scope: bytes | None = None) -> bytes:
    """A certificate for a member's key that its organisation's key signed, with this subject and scope."""
    issuer, good, now = read_issuer(org_dir), read_certs(node.node_dir / "node-cert.pem")[0], dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder(issuer.cert.subject, subject, good.public_key(), good.serial_number)
    builder = builder.not_valid_before(now - dt.timedelta(1)).not_valid_after(now + dt.timedelta(1))
    builder = builder.add_extension(authority(issuer.cert), False)
    for extension in good.extensions:
        if isinstance(extension.value, x509.UnrecognizedExtension):
            value = extension.value
            if extension.oid == SCOPE_OID and scope is not None:
                value = x509.UnrecognizedExtension(SCOPE_OID, scope)
            builder = builder.add_extension(value, extension.critical)
    return builder.sign(issuer.key, None).public_bytes(serialization.Encoding.DER)


def test_certificates_that_say_two_things_or_too_much(network_dir: Path) -> None:
    """A rogue organisation signs what it likes: two names, a scope of a megabyte, one of another form."""
    org = organisation(network_dir, "acme")
    node, roots = issue(network_dir, "member", "worker", by=org), read_root(network_dir)
    name = x509.NameAttribute(NameOID.COMMON_NAME, "member")
    item, two = x509.Name([name]), x509.Name([name, x509.NameAttribute(NameOID.COMMON_NAME, "admin")])
    assert verify_certificate(forged(org, node, item), roots).name == "member"
    large = json.dumps({"roles": ["worker"], "datasets": ["x" * 60] * 20_000}).encode()
    for subject, scope in [
        (two, None),
        (x509.Name([]), None),
        (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a\x1b[2Jb")]), None),
        (item, large),
        (item, b"[" * 100_000),
        (item, b'{"roles": ["root"], "datasets": []}'),
    ]:
        with pytest.raises(ProtocolError):
            verify_certificate(forged(org, node, subject, scope), roots)


def test_a_crl_that_is_not_wanted_is_not_read(network_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding 23: large CRLs, sent again and again, or a new one each second."""
    org, server, evil = organisation(network_dir, "acme"), issue(network_dir, "server"), issue(network_dir, "evil")
    crls = [sign_crl(read_issuer(org), range(1, 2000), number) for number in (1, 2)]
    roots, org_id = read_root(network_dir), read_issuer(org).peer_id
    seen: list[tuple[str, int]] = []
    assert parse_crl(crls[0], roots, lambda *what: bool(seen.append(what))) is None and seen == [(org_id, 1)]
    read: list[int] = []
    entries = revocation.Crl
    monkeypatch.setattr(revocation, "Crl", lambda *facts: read.append(facts[1]) or entries(*facts))
    with Server(make_app("x"), server, HOST, 0) as running, connection(evil, running.address) as sock:
        for pem in (*crls, *crls, *crls):
            head = f"POST /v1/crls HTTP/1.1\r\nHost: x\r\nContent-Length: {len(pem)}\r\n\r\n".encode()
            assert answers(sock, head + pem)[0].status == 200
    assert server.revocations.numbers() == {org_id: 1}
    assert set(read) == {1} and len(read) <= 2  # once more from its file


def test_an_organisations_crl_takes_nobody_elses_member_out(network_dir: Path) -> None:
    org, other = organisation(network_dir, "acme"), organisation(network_dir, "other")
    server, victim = issue(network_dir, "server"), issue(network_dir, "victim", by=other)
    own = issue(network_dir, "own", by=org)
    serials = [serial_number_of(item.peer_id) for item in (victim, own, server)]
    crl = sign_crl(read_issuer(org), serials, 1).decode()
    with Server(make_app("x"), server, HOST, 0) as running:
        with connection(own, running.address) as sock:
            head = f"POST /v1/crls HTTP/1.1\r\nHost: x\r\nContent-Length: {len(crl)}\r\n\r\n"
            assert answers(sock, (head + crl).encode())[0].json() == {"new": True}
        assert ask(victim, running.address, "GET", "/v1/crls")[0] == 200
        with pytest.raises(OSError):
            ask(own, running.address, "GET", "/v1/crls")


def test_a_publication_is_of_one_name_one_dataset_and_one_network(network_dir: Path, tmp_path: Path) -> None:
    publisher, reader = issue(network_dir, "publisher"), issue(network_dir, "reader")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "manifest.json").write_bytes(b"{}")
    sign_dataset(publisher, tmp_path / "d", "good", "cd" * 32, valid_days=1)
    signed = json.loads((tmp_path / "d" / "manifest.sig.json").read_bytes())
    assert read_publication(json.dumps(signed).encode(), reader).name == "good"
    for field, value in [
        ("name", "other"), ("dataset_id", "ab" * 32), ("serial", signed["serial"] + 1),
        ("expires_at", time.time() + 1e6), ("origins", ["https://evil.example/d"]), ("serial", 1 << 63), ("serial", -1),
    ]:  # fmt: skip
        with pytest.raises(ProtocolError):
            read_publication(json.dumps(signed | {field: value}).encode(), reader)
