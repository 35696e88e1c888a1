"""Join tokens and the server that honours them: over real sockets, with clocks of our own."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.network import join as joining
from forebay.network.admission import Admissions, AdmissionServer
from forebay.network.app import ApiError
from forebay.network.audit import AuditLog
from forebay.network.client import RemoteError
from forebay.network.join import check_token, join_by_token, read_token, renew_at, sign_token
from forebay.network.messages import AdmitRequest, RenewRequest
from forebay.network.peer import Scope
from forebay.network.pki.certificates import der_of
from forebay.network.pki.files import read_issuer, read_key, read_network
from forebay.network.pki.identity import create_network, create_organisation, join, revoke
from forebay.network.pki.record import MEMBERS_FILE, JoinToken, MemberRecord
from forebay.network.server_connections import ServerCore

WORKER = Scope(frozenset({"worker"}), ("c4-*",))


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=time.time())


@pytest.fixture
def server(network_dir, tmp_path, clock) -> Iterator[AdmissionServer]:
    """An organisation's admission server."""
    create_organisation(network_dir, tmp_path / "org", "acme", WORKER)
    with AuditLog(tmp_path / "audit.log") as audit:
        server = AdmissionServer(Admissions(tmp_path / "org", audit, lambda: clock.now)).start()
        yield server
        server.close()


def make_token(server: AdmissionServer, clock: SimpleNamespace, **changes: object) -> str:
    issuer = server.admissions.issuer
    names = read_network(server.admissions.directory).network_id, issuer.peer_id, server.address
    token = JoinToken("ab" * 16, *names, ("worker",), (), 1, clock.now + 3600, 30.0)
    return sign_token(issuer, replace(token, **changes))


def admit(admissions: Admissions, token: str, key: Path, name: str) -> dict:
    """Ask for a certificate of the key in a file."""
    return admissions.admit(AdmitRequest(token=token, name=name, request=joining.make_csr(read_key(key), name)), "x")


def kinds(tmp_path: Path) -> list[str]:
    """The events of the audit log, decisions first."""
    text = "".join((tmp_path / f"audit.log{part}").read_text() for part in (".decisions", ""))
    return [json.loads(line)["kind"] for line in text.splitlines()]


def test_a_machine_joins_with_a_key_that_stays_on_it(server, clock, tmp_path, monkeypatch):
    sent = []
    ask = joining._post
    monkeypatch.setattr(joining, "_post", lambda *args: sent.append(repr(args)) or ask(*args))
    node = join_by_token(make_token(server, clock), tmp_path / "n", "n")
    assert node.org == server.admissions.issuer.peer_id
    assert node.scope == Scope(frozenset({"worker"}), (), ("c4-*",))
    assert node.expires_at == pytest.approx(time.time() + 30 * 86400, abs=60)
    assert (node.node_dir / "node-key.pem").stat().st_mode & 0o777 == 0o600
    key = (node.node_dir / "node-key.pem").read_text().splitlines()[1]
    assert len(sent) == 1 and key not in sent[0] and "CERTIFICATE REQUEST" in sent[0]
    assert kinds(tmp_path) == ["admitted"]
    with pytest.raises(UsageError, match="already holds a member"):
        join_by_token(make_token(server, clock), tmp_path / "n", "n")


def test_joining_and_renewing_go_on_while_the_server_is_busy(server, clock, tmp_path, monkeypatch):
    """As long as the token is valid."""
    refusals = [ApiError(429, "busy", "others ask"), ApiError(503, "stopping", "restarts")]
    begin = ServerCore._check
    monkeypatch.setattr(ServerCore, "_check", lambda *args: refusals.pop() if refusals else begin(*args))
    monkeypatch.setattr(joining, "FIRST_RETRY_S", 0.0)
    join_by_token(make_token(server, clock), tmp_path / "a", "a")
    refusals.append(ApiError(429, "busy", "others ask"))
    with pytest.raises(RemoteError, match="others ask"):
        renew_at(server.address, tmp_path / "a")
    refusals.append(ApiError(429, "busy", "others ask"))
    assert renew_at(server.address, tmp_path / "a", until=time.time() + 600).name == "a"
    refusals.append(ApiError(429, "busy", "others ask"))
    with pytest.raises(RemoteError, match="others ask"):
        join_by_token(make_token(server, clock, id="cd" * 16, expires_at=time.time()), tmp_path / "b", "b")


def test_tokens_that_do_not_count(server, clock, network_dir):
    good, other = make_token(server, clock), read_issuer(network_dir)
    public_key = server.admissions.issuer.key.public_key().public_bytes_raw()
    token, signed, signature = read_token(good)
    for invalid, reason in [
        (make_token(server, clock, expires_at=clock.now - 1), "expired"),
        (sign_token(other, replace(token, issuer=other.peer_id)), "not of this one"),
        (good[:-6] + ("AAAAAA" if not good.endswith("AAAAAA") else "BBBBBB"), "forged"),
        ("forebay1.e30.AA", "token: expected"),
        (good.replace(good[20:24], "AAAA"), "token"),
    ]:
        with pytest.raises(ProtocolError, match=reason):
            check_token(invalid, public_key, clock.now)
        with pytest.raises(ProtocolError):
            admit(server.admissions, invalid, network_dir / "root-key.pem", "n")
    assert check_token(good, public_key, clock.now).uses == 1 and signed and len(signature) == 64
    with pytest.raises(UsageError, match="may give worker, got data"):
        make_token(server, clock, roles=("data",))
    with pytest.raises(ProtocolError, match="or a part of a token"):
        read_token(good.rpartition(".")[0])


def test_a_token_is_used_as_often_as_it_says_and_replays_count_once(server, clock, tmp_path):
    text = make_token(server, clock, uses=2)
    a = join_by_token(text, tmp_path / "a", "a")
    # The same key again, as if the answer had been lost: the same peer, and no second use.
    assert admit(server.admissions, text, a.node_dir / "node-key.pem", "a")["certificate"]
    join_by_token(text, tmp_path / "b", "b")
    with pytest.raises(NetworkError, match="used up"):
        join_by_token(text, tmp_path / "c", "c")
    assert not (tmp_path / "c" / "node-cert.pem").exists()
    clock.now += 7200
    with pytest.raises(NetworkError, match="expired"):
        join_by_token(text, tmp_path / "c", "c")
    assert kinds(tmp_path) == ["admitted", "admitted", "renewed", "refused"]


def test_servers_of_one_directory_count_uses_together_and_an_unfinished_line_is_no_use(server, clock, tmp_path):
    text, path = make_token(server, clock), tmp_path / "org" / MEMBERS_FILE
    others = [Admissions(tmp_path / "org", now=lambda: clock.now)]
    join_by_token(text, tmp_path / "a", "a")
    path.write_bytes(path.read_bytes() + b'{"version":1,"at":1,"certificate":{"na')
    others.append(Admissions(tmp_path / "org", now=lambda: clock.now))
    for admissions in others:
        with pytest.raises(ProtocolError, match="used up"):
            admit(admissions, text, tmp_path / "network" / "root-key.pem", "b")
    join_by_token(make_token(server, clock, id="cd" * 16), tmp_path / "b", "b")
    assert MemberRecord(tmp_path / "org").users["cd" * 16]


def test_a_withdrawn_token_admits_nobody_from_then_on(server, clock, tmp_path):
    text = make_token(server, clock, uses=3)
    node = join_by_token(text, tmp_path / "a", "a")
    MemberRecord(tmp_path / "org").add(withdrawn="ab" * 16)
    for key in (node.node_dir / "node-key.pem", tmp_path / "network" / "root-key.pem"):
        with pytest.raises(ProtocolError, match="withdrawn"):
            admit(server.admissions, text, key, "b")
    assert renew_at(server.address, node.node_dir).peer_id == node.peer_id


def test_the_record_grows_by_uses_alone(server, clock, tmp_path):
    tokens = [make_token(server, clock, id=c * 32, valid_days=days) for c, days in (("a", 9), ("b", 3), ("c", 6))]
    key = join_by_token(tokens[0], tmp_path / "a", "a").node_dir / "node-key.pem"
    path = tmp_path / "org" / MEMBERS_FILE
    for token in tokens:
        admit(server.admissions, token, key, "a")
    size = path.stat().st_size
    for token in tokens * 3:
        admit(server.admissions, token, key, "a")
        with pytest.raises(ProtocolError, match="expected the name of its first certificate, a, got b"):
            admit(server.admissions, token, key, "b")
    assert path.stat().st_size - size < 400  # one line


def test_a_record_that_is_restored_is_read_again(server, clock, tmp_path):
    path, record = tmp_path / "org" / MEMBERS_FILE, MemberRecord(tmp_path / "org")
    record.add(withdrawn="a" * 32)
    old = path.read_bytes()
    for name in "bc":
        record.add(withdrawn=name * 32)
    path.write_bytes(old)
    record.add(withdrawn="d" * 32)
    assert record.withdrawn == MemberRecord(tmp_path / "org").withdrawn == {"a" * 32, "d" * 32}


@pytest.mark.parametrize("name", ["a2" * 16, "0F" * 20])
def test_no_node_is_named_like_a_peer_id_or_serial_number(server, clock, name, tmp_path):
    with pytest.raises(ProtocolError, match="form of a peer id or serial number"):
        admit(server.admissions, make_token(server, clock), tmp_path / "network" / "root-key.pem", name)


def test_another_servers_key_is_told_nothing(server, clock, tmp_path):
    create_network(tmp_path / "evil", "test-network")
    evil = AdmissionServer(Admissions(tmp_path / "evil")).start()
    try:
        with pytest.raises(NetworkError, match="Nothing was sent"):
            join_by_token(make_token(server, clock, address=evil.address), tmp_path / "n", "n")
        assert not (tmp_path / "evil" / MEMBERS_FILE).read_bytes()
    finally:
        evil.close()


@pytest.mark.usefixtures("changes_at_once")
def test_a_certificate_is_renewed_from_afar(server, clock, tmp_path):
    node = join_by_token(make_token(server, clock, valid_days=2.0), tmp_path / "n", "n")
    renewed = renew_at(server.address, node.node_dir)
    assert (renewed.peer_id, renewed.scope, renewed.org) == (node.peer_id, node.scope, node.org)
    assert renewed.expires_at == pytest.approx(node.expires_at, abs=30)
    # Another key asks for its certificate; the revoked and the expired ask for their own.
    thief = joining.make_csr(read_key(tmp_path / "network" / "root-key.pem"), "n")
    own = joining.make_csr(read_key(node.node_dir / "node-key.pem"), "n")
    shown = der_of(renewed.certificate)
    for request, handshake in [(thief, shown), (thief, b""), (own, b""), (own, der_of(server.admissions.issuer.cert))]:
        with pytest.raises(ProtocolError, match="not by the key"):
            server.admissions.renew(RenewRequest(request=request), "x", handshake)
    clock.now += 3 * 86400
    with pytest.raises(NetworkError, match="Join again"):
        renew_at(server.address, node.node_dir)
    clock.now -= 3 * 86400
    revoke(tmp_path / "org", node.peer_id)
    with pytest.raises(NetworkError, match="revoked"):
        renew_at(server.address, node.node_dir)


def test_a_node_of_the_root_is_not_the_organisations_to_renew(server, network_dir, tmp_path):
    node = join(network_dir, tmp_path / "n", "n")
    with pytest.raises(NetworkError, match="Nothing was sent"):
        renew_at(server.address, node.node_dir)
    request = joining.make_csr(read_key(node.node_dir / "node-key.pem"), "n")
    with pytest.raises(ProtocolError, match="Ask that issuer"):
        server.admissions.renew(RenewRequest(request=request), "x", der_of(node.certificate))


def test_strangers_at_the_door(server, clock, tmp_path):
    """Plain HTTP, silence, an endless body: each is dropped, and the next is served."""
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port))):  # says nothing
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"POST /v1/admit HTTP/1.1\r\n\r\n")
            received = b""
            with contextlib.suppress(ConnectionResetError):
                received = plain.recv(100)
            assert b"HTTP" not in received
        with pytest.raises(NetworkError, match="413"):
            joining._post(server.address, server.admissions.issuer.peer_id, "/v1/admit", {"token": "x" * 300_000})
        with pytest.raises(NetworkError, match="404"):
            joining._post(server.address, server.admissions.issuer.peer_id, "/../org-key.pem", {})
        assert join_by_token(make_token(server, clock), tmp_path / "n", "n").name == "n"


@pytest.fixture(scope="module")
def root_admissions(tmp_path_factory) -> Admissions:
    folder = tmp_path_factory.mktemp("root")
    create_network(folder, "n")
    return Admissions(folder)


@given(
    token=st.text(max_size=80), name=st.text(max_size=200), request=st.text(max_size=80), shown=st.binary(max_size=80)
)
def test_garbage_is_refused(root_admissions, token, name, request, shown):
    with pytest.raises(ProtocolError):
        root_admissions.admit(AdmitRequest(token=token, name=name, request=request), "x")
    with pytest.raises(ProtocolError):
        root_admissions.renew(RenewRequest(request=request), "x", shown)


@given(st.text(max_size=60))
def test_garbage_is_no_token(text):
    for form in (text, f"forebay1.{text}", f"forebay1.{text}.{text}"):
        with pytest.raises(ProtocolError, match="token"):
            read_token(form)
