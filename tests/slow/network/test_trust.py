"""What each kind of hostile peer tries, against real servers; docs/reference/threat-model.md names these tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.data_node import DataNode
from forebay.dataset.reader import Dataset
from forebay.errors import DatasetError, NetworkError, UsageError
from forebay.lease.scheduler_client import SchedulerClient
from forebay.network.access import AccessPolicy
from forebay.network.addresses import parse_address
from forebay.network.admission import Admissions, AdmissionServer
from forebay.network.app import Response, make_app
from forebay.network.audit import AuditLog
from forebay.network.client import Client, RemoteError, WrongPeerError
from forebay.network.discovery import find_providers, read_claims, record_key
from forebay.network.join import JoinToken, join_by_token, sign_token
from forebay.network.peer import Scope
from forebay.network.pki.files import read_issuer
from forebay.network.pki.identity import Identity, create_organisation, join, revoke
from forebay.network.pki.revocation import MAX_REVOKED, sign_crl
from forebay.network.publications import sign_dataset
from forebay.network.revocation_sync import TrustWatch, send_crl
from forebay.network.server import Server
from forebay.scheduler.server import SchedulerService
from support.calibration import scaled
from support.local_discovery import LocalDiscovery
from support.nodes import HOST, NAME, make_dataset
from support.ports import free_port

Make = Callable[[str], Identity]
DATA = Scope(frozenset({"data"}))


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + scaled(timeout_s)
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.01)


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path / "data", 4, 100)


@pytest.fixture
def table() -> LocalDiscovery:
    return LocalDiscovery()


@pytest.fixture
def node(dataset: Dataset, table: LocalDiscovery, make_identity: Make, tmp_path: Path) -> Iterator[DataNode]:
    identity = make_identity("data")
    with AuditLog(tmp_path / "audit.log") as identity.audit, DataNode(identity, [dataset], HOST, 0, table) as node:
        yield node


@pytest.fixture
def client(make_identity: Make) -> Iterator[Client]:
    with Client(make_identity("client")) as client:
        yield client


def audit_events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def issued(tmp_path: Path, name: str, *roles: str, datasets: tuple[str, ...] = ()) -> Identity:
    return join(tmp_path / "network", tmp_path / "nodes" / name, name, scope=Scope(frozenset(roles), datasets))


def test_only_role_data_is_an_origin_and_only_of_what_it_covers(
    dataset: Dataset, table: LocalDiscovery, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for identity, reason in [
        (issued(tmp_path, "worker", "worker"), "lacks the role data"),
        (issued(tmp_path, "other", "data", datasets=("books",)), f"does not cover {NAME}"),
    ]:
        with pytest.raises(UsageError, match=reason):
            DataNode(identity, [dataset], HOST, 0, table)
        with monkeypatch.context() as patch:  # one whose program is changed claims all the same
            patch.setattr("forebay.data_node._check_scope", lambda *_: None)
            liar = DataNode(identity, [dataset], HOST, 0, table)
        with liar:
            assert find_providers(table, client, liar.identity.network_id, NAME, 1.0) == []
            with contextlib.suppress(WrongPeerError):
                assert read_claims(client, liar.address, NAME) == []


def test_a_scheduler_must_be_certified_as_one(
    node: DataNode, table: LocalDiscovery, make_identity: Make, tmp_path: Path
) -> None:
    """A member without the role stands in the DHT under the job's name: no worker believes it."""
    worker = make_identity("worker")

    def control() -> SchedulerClient:
        return SchedulerClient(worker, Client(worker), NAME, table, None, 0.3, threading.Event())

    def served(identity: Identity) -> SchedulerService:
        return SchedulerService(identity, NAME, table, Client(identity), tmp_path / identity.name, seq_len=8)

    false = served(issued(tmp_path, "false", "worker", "data"))
    false.start()
    try:
        with pytest.raises(NetworkError, match="role scheduler"):
            control().exchange({"want": 0})
    finally:
        false.stop()
    true = served(issued(tmp_path, "true", "scheduler"))
    true.start()
    try:
        assert control().exchange({"want": 0})["leases"] == []
        door = "/v1/job/pause"
        for name, roles, status in [("plain", ("worker",), 403), ("admin", ("admin",), 200)]:
            with Client(issued(tmp_path, name, *roles)) as asker:
                if status == 200:
                    asker.request_json(true.address, "POST", door, {})
                    continue
                with pytest.raises(RemoteError, match="lacks the role admin, which"):
                    asker.request_json(true.address, "POST", door, {})
        outsider = issued(tmp_path, "outsider", "worker", datasets=("books",))
        with Client(outsider) as asker, pytest.raises(RemoteError, match="does not cover"):
            asker.request_json(true.address, "POST", "/v2/exchange", {"want": 1})
    finally:
        true.stop()


def test_access_lists_and_quotas_at_the_door(
    dataset: Dataset, make_identity: Make, client: Client, tmp_path: Path
) -> None:
    row, rules = dataset.table.row(0), tmp_path / "access.toml"
    rules.write_text(f'[[dataset]]\nname = "{NAME}"\nbytes_per_day = {row.bytes + 10}\n')
    identity, path = make_identity("data"), f"/v1/slices/{row.sha256}"
    with (
        AuditLog(tmp_path / "audit.log") as identity.audit,
        DataNode(identity, [dataset], HOST, 0, None, access=AccessPolicy(rules)) as node,
    ):
        assert len(client.get_bytes(node.address, path, 1 << 20)) == row.bytes
        with pytest.raises(RemoteError, match="quota") as caught:
            client.get_bytes(node.address, path, 1 << 20)
        assert caught.value.status == 429
        rules.write_text(f'[[dataset]]\nname = "{NAME}"\ndeny = ["peer:{client.identity.peer_id}"]\n')  # type: ignore[union-attr]
        for door in (path, f"/v1/datasets/{dataset.id}/manifest.json"):
            with pytest.raises(RemoteError, match="not on the access list"):
                client.get_bytes(node.address, door, 1 << 20)
    assert [event["kind"] for event in audit_events(tmp_path / "audit.log")] == ["quota", "refused", "refused"]


def test_a_revocation_spreads_and_cuts_live_connections(
    node: DataNode, table: LocalDiscovery, make_identity: Make, network_dir: Path, client: Client, tmp_path: Path
) -> None:
    """Told to one node by an admin, learned by another, in force at both without a restart."""
    other = make_identity("data-2")
    thief = make_identity("thief")
    with Client(thief) as stolen, DataNode(other, [], HOST, 0, table) as second:
        stolen.request_json(second.address, "GET", "/v1/status")
        raw = socket.create_connection((HOST, second.port))
        with thief.client_context().wrap_socket(raw) as live:
            until(lambda: second.status()["connections"] >= 2)
            created = revoke(network_dir, thief.peer_id)
            assert created is not None
            assert send_crl(client, node.address, created) == (node.identity.peer_id, True)
            assert send_crl(client, node.address, created) == (node.identity.peer_id, False)
            watch = TrustWatch(other, Client(other), peers=lambda: [node.address], look_every_s=0.05).start()
            live.settimeout(20)
            assert live.recv(1) == b""  # cut, though nothing was asked
            watch.close()
        with pytest.raises(NetworkError):
            stolen.request_json(second.address, "GET", "/v1/status")
    assert list(other.revocations.crls().values()) == [created]
    with pytest.raises(RemoteError, match="malformed"):
        client.request_json(node.address, "POST", "/v1/crls", b"a list of old")
    assert client.get_bytes(node.address, f"/v1/crls/{created.issuer}", 1 << 20) == created.pem
    for path, status in [("/v1/crls/" + "a" * 32, 404), ("/v1/crls/../status", 404)]:
        with pytest.raises(RemoteError) as caught:
            client.get_bytes(node.address, path, 1 << 20)
        assert caught.value.status == status
    assert "refused" in [event["kind"] for event in audit_events(tmp_path / "audit.log")]
    decisions = audit_events(tmp_path / "audit.log.decisions")
    assert ("crl", created.number) in [(event["kind"], event["facts"].get("number")) for event in decisions]


def test_a_revoked_organisation_is_out_with_all_its_nodes(node: DataNode, network_dir: Path, tmp_path: Path) -> None:
    org = create_organisation(network_dir, tmp_path / "org", "acme")
    with Client(join(tmp_path / "org", tmp_path / "n", "n")) as theirs:
        assert theirs.request_json(node.address, "GET", "/v1/status")[0]["peer_id"] == node.identity.peer_id
        revoke(network_dir, org, node.identity.node_dir)

        def is_refused() -> bool:
            with contextlib.suppress(NetworkError):
                theirs.request_json(node.address, "GET", "/v1/status")
                return False
            return True

        until(is_refused)
        assert node.identity.refusal(theirs.identity.as_peer) and is_refused()
    with Client(join(tmp_path / "org", tmp_path / "m", "m")) as another, pytest.raises(NetworkError):
        another.request_json(node.address, "GET", "/v1/status")


def test_two_rogue_organisations_do_not_keep_the_roots_word_out(
    node: DataNode, client: Client, network_dir: Path, tmp_path: Path, make_identity: Make
) -> None:
    """Each organisation signs the largest CRL there is; the root's still reaches a node, and others learn all."""
    for name in ("one", "two"):
        create_organisation(network_dir, tmp_path / name, name)
        largest = sign_crl(read_issuer(tmp_path / name), [(1 << 158) + i for i in range(MAX_REVOKED)], 1)
        assert client.request_json(node.address, "POST", "/v1/crls", largest, timeout_s=60.0)[0] == {"new": True}
    thief, other = make_identity("thief"), make_identity("other")
    created = revoke(network_dir, thief.peer_id)
    assert created is not None and send_crl(client, node.address, created)[1]
    with Client(other) as asker:
        assert TrustWatch(other, asker).ask(node.address)
    assert (
        other.revocations.reason(thief.as_peer) is not None
        and other.revocations.numbers() == node.identity.revocations.numbers()
    )


def test_an_expired_certificate_ends_an_open_connection(node: DataNode, network_dir: Path, tmp_path: Path) -> None:
    brief = join(network_dir, tmp_path / "brief", "brief", valid_days=scaled(3.0) / 86400)
    with Client(brief) as asker:
        asker.request_json(node.address, "GET", "/v1/status")
        until(lambda: time.time() > brief.expires_at)
        with pytest.raises(RemoteError, match="403") as caught:
            asker.request_json(node.address, "GET", "/v1/status")
        assert caught.value.status == 403


def test_a_node_renews_itself_while_it_runs(
    network_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate of some seconds from a token; the issuer is away for a while, then a new one comes by itself."""
    admissions = AdmissionServer(Admissions(network_dir), HOST, free_port()).start()
    host, port = parse_address(admissions.address)
    issuer, days = read_issuer(network_dir), scaled(6.0) / 86400
    token = JoinToken(
        "ab" * 16, issuer.peer_id, issuer.peer_id, admissions.address, (), (), 1, time.time() + 3600, days
    )
    node = join_by_token(sign_token(issuer, token), tmp_path / "n", "n")
    first = node.expires_at
    admissions.close()
    with Client(node) as asker:
        watch = TrustWatch(node, asker, look_every_s=0.05).start()
        try:
            until(lambda: "cannot renew it" in caplog.text)
            assert "h left" in caplog.text and node.expires_at == first
            admissions = AdmissionServer(Admissions(network_dir), host, port).start()
            until(lambda: node.expires_at > first)
            renewed = Identity.load(node.node_dir)
            assert (renewed.peer_id, renewed.scope, renewed.expires_at) == (node.peer_id, node.scope, node.expires_at)
        finally:
            watch.close()
            admissions.close()


def test_trust_goes_on_whatever_a_peer_or_the_node_itself_does(
    make_identity: Make, network_dir: Path, node: DataNode, caplog: pytest.LogCaptureFixture
) -> None:
    """Addresses that make no sense, a callback that raises: it is logged, and the next step comes."""
    asker, calls = make_identity("asker"), []

    def known() -> list[str]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("a fault of ours")
        return ["a..b:1", "nonsense", node.address]

    thief = make_identity("thief")
    revoke(network_dir, thief.peer_id, node.identity.node_dir)
    with Client(asker) as client:
        watch = TrustWatch(asker, client, peers=known, ask_every_s=0.05, look_every_s=0.05).start()
        until(lambda: asker.revocations.reason(thief.peer_id) is not None)
        watch.close()
    assert "a fault of ours" in caplog.text and "Traceback" in caplog.text


def test_a_peer_that_has_not_what_it_says_is_left_alone_for_a_while(make_identity: Make, network_dir: Path) -> None:
    """It says the highest number there is, and hands out an old CRL, or none: it is asked for it once."""
    liar, asker = make_identity("liar"), make_identity("asker")
    old = sign_crl(read_issuer(network_dir), [], 1)
    asked: list[str] = []

    app = make_app("liar")

    @app.get("/v1/crls")
    def numbers() -> dict[str, dict[str, int]]:
        asked.append("/v1/crls")
        return {"crls": {liar.network_id: (1 << 63) - 1, "a" * 32: 9, "b" * 32: 9}}

    @app.get("/v1/crls/{issuer}")
    def crl(issuer: str) -> Response:
        asked.append(f"/v1/crls/{issuer}")
        return Response(old)

    server = Server(app, liar, HOST, 0)
    server.start()
    try:
        with Client(asker) as client:
            watch = TrustWatch(asker, client, peers=lambda: [server.address], ask_every_s=0.05, look_every_s=0.02)
            watch.start()
            until(lambda: len(asked) >= 3)
            time.sleep(0.5)  # some 10 rounds
            watch.close()
        # The root's first: accepted, as none was known; the next is no newer one of the issuer asked for.
        assert asked == ["/v1/crls", f"/v1/crls/{liar.network_id}", "/v1/crls/" + "a" * 32]
    finally:
        server.close()


def test_a_swapped_manifest_is_not_scheduled_for_who_demands_a_publisher(
    node: DataNode, dataset: Dataset, table: LocalDiscovery, make_identity: Make, tmp_path: Path
) -> None:
    """Another data node announces its own dataset under the name: only what the publisher signed counts."""
    anne, scheduler = make_identity("anne"), make_identity("scheduler")

    def schedule(wait_s: float) -> SchedulerService:
        return SchedulerService(
            scheduler,
            NAME,
            table,
            Client(scheduler),
            tmp_path / "state",
            seq_len=8,
            wait_s=wait_s,
            publishers=[anne.peer_id],
        )

    with pytest.raises(DatasetError, match="Not counted"):
        schedule(0.2).start()
    sign_dataset(anne, dataset.path, NAME, dataset.id)
    false = make_dataset(tmp_path / "false", 5, 120)
    (false.path / "manifest.sig.json").write_bytes((dataset.path / "manifest.sig.json").read_bytes())
    with DataNode(make_identity("liar"), [false], HOST, 0, table):
        service = schedule(30.0)
        service.start()
        try:
            assert service.status()["dataset_id"] == dataset.id
        finally:
            service.stop()


def test_tls_1_2_and_plain_http_get_nothing(node: DataNode, client: Client, tmp_path: Path) -> None:
    identity = client.identity
    assert identity is not None
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.load_cert_chain(identity.node_dir / "node-cert.pem", identity.node_dir / "node-key.pem")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection((HOST, node.port)) as plain, pytest.raises(OSError):
        old.wrap_socket(plain)
    with socket.create_connection((HOST, node.port)) as plain:
        plain.sendall(b"GET /v1/claims HTTP/1.1\r\n\r\n")
        plain.settimeout(20)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            received = plain.recv(1000)
    assert b"HTTP" not in received

    def num_strangers() -> int:
        assert node.identity.audit is not None
        node.identity.audit.close()  # writes what was only counted
        result = [event for event in audit_events(tmp_path / "audit.log") if event["kind"] == "stranger"]
        return sum(event["repeats"] or 1 for event in result)

    until(lambda: num_strangers() >= 2)


def test_paths_climb_out_of_no_door(node: DataNode, dataset: Dataset, client: Client) -> None:
    up = ["..", "%2e%2e", "..%2f..", "%00", "/etc/passwd", "....//", "x" * 5000]
    doors = [f"/v1/slices/{p}" for p in up] + [f"/v1/datasets/{dataset.id}/{p}" for p in up]
    doors += [f"/v1/datasets/{p}/manifest.json" for p in up] + [f"/{p}" for p in up]
    doors += [f"/v1/datasets/{dataset.id}/slices/000000.safetensors", "/v1/crls/../status"]
    for door in doors:
        with pytest.raises(RemoteError) as caught:
            client.get_bytes(node.address, door, 1 << 20)
        assert caught.value.status in (404, 405), door
    with pytest.raises((RemoteError, NetworkError)):
        client.get_bytes(node.address, "/" + "x" * 100_000, 1 << 20)
    assert client.get_bytes(node.address, f"/v1/slices/{dataset.table.row(0).sha256}", 1 << 20)


def test_an_observer_sees_no_name_and_no_bytes(
    node: DataNode, dataset: Dataset, client: Client, tmp_path: Path
) -> None:
    """Everything passes through a wire that keeps a copy; certificates and names of members are encrypted, too."""
    retained = bytearray()
    listener = socket.create_server((HOST, 0))

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                retained.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def wire() -> None:
        near, _ = listener.accept()
        far = socket.create_connection((HOST, node.port))
        with near, far:
            back = threading.Thread(target=carry, args=(far, near))
            back.start()
            carry(near, far)
            back.join()

    tapped = threading.Thread(target=wire)
    tapped.start()
    address, row = f"{HOST}:{listener.getsockname()[1]}", dataset.table.row(0)
    body = client.get_bytes(address, f"/v1/slices/{row.sha256}", 1 << 20)
    assert read_claims(client, address, NAME)[0].name == NAME
    client.close()
    tapped.join()
    listener.close()
    assert len(retained) > len(body) + 1000
    secrets = [body[i : i + 16] for i in range(0, len(body) - 16, 64)] + [
        word.encode()
        for word in (NAME, row.sha256, dataset.id, node.identity.peer_id, "HTTP/1.1", "/v1/", "test-network")
    ]
    assert [secret for secret in secrets if secret in retained] == []


def test_claims_of_another_peer_are_refused(node: DataNode, make_identity: Make, table: LocalDiscovery) -> None:
    """A data node repeats what an honest one signed, from an address of its own."""
    liar, key = make_identity("liar"), record_key(node.identity.network_id, "dataset", NAME)
    with DataNode(liar, [], HOST, 0, None) as false, Client(make_identity("asker")) as asker:
        false.claims = node.claims  # type: ignore[method-assign]
        table.announce(key, false.port)
        assert node.claims(asker.identity.as_peer) and read_claims(asker, false.address, NAME) == []
        result = find_providers(table, asker, node.identity.network_id, NAME, 1.0)
        assert [claim.peer_id for claim in result] == [node.identity.peer_id]


def test_the_admission_server_forgets_no_used_token_when_it_is_killed(network_dir: Path, tmp_path: Path) -> None:
    """kill -9 right after a join; the same token is refused by the next life."""

    def serve() -> tuple[subprocess.Popen[bytes], str]:
        command = [sys.executable, "-m", "forebay", "network", "admit", str(network_dir), "--json"]
        environment = os.environ | {"FOREBAY_AUDIT_LOG": str(tmp_path / "admit.log")}
        process = subprocess.Popen([*command, "--listen", address], stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        return process, str(json.loads(process.stdout.readline())["address"])

    address = f"{HOST}:{free_port()}"
    process, _ = serve()
    try:
        invite = [
            sys.executable,
            "-m",
            "forebay",
            "network",
            "invite",
            str(network_dir),
            "--issuer",
            address,
            "--role",
            "worker",
        ]
        token = subprocess.run(invite, capture_output=True, check=True, text=True).stdout.strip()
        assert join_by_token(token, tmp_path / "a", "a").scope.roles == {"worker"}
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        process, _ = serve()
        with pytest.raises(NetworkError, match="used up"):
            join_by_token(token, tmp_path / "b", "b")
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert [event["kind"] for event in audit_events(tmp_path / "admit.log.decisions")] == ["admitted"]
    assert [event["kind"] for event in audit_events(tmp_path / "admit.log")] == ["refused"]
