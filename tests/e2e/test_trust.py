"""What each kind of hostile peer tries, against real servers; docs/threat-model.md names these tests."""

from __future__ import annotations

import contextlib
import json
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
from nodes import HOST, NAME, make_dataset

from calibration import scaled
from forebay.dataset.reader import Dataset
from forebay.errors import DatasetError, NetworkError, ProtocolViolation, UsageError
from forebay.network.access import Access
from forebay.network.audit import AuditLog
from forebay.network.client import Client, RemoteError
from forebay.network.discovery import find_providers, read_claims, record_key
from forebay.network.identity import Identity, create_organisation, join, revoke
from forebay.network.joining import join_by_token
from forebay.network.peer import Scope
from forebay.network.publish import sign_dataset
from forebay.network.trust import TrustWatch, tell
from forebay.schedule.service import SchedulerService
from forebay.serve import DataNode
from forebay.worker.control import Control
from local_discovery import LocalDiscovery

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
    for identity, why in [
        (issued(tmp_path, "worker", "worker"), "lacks the role data"),
        (issued(tmp_path, "other", "data", datasets=("books",)), f"does not cover {NAME}"),
    ]:
        with pytest.raises(UsageError, match=why):
            DataNode(identity, [dataset], HOST, 0, table)
        with monkeypatch.context() as patch:  # one whose program is changed claims all the same
            patch.setattr("forebay.serve._check_scope", lambda *_: None)
            liar = DataNode(identity, [dataset], HOST, 0, table)
        with liar:
            assert find_providers(table, client, liar.identity.network_id, NAME, 1.0) == []
            with contextlib.suppress(ProtocolViolation):
                assert read_claims(client, liar.address) == []


def test_a_scheduler_must_be_certified_as_one(
    node: DataNode, table: LocalDiscovery, make_identity: Make, tmp_path: Path
) -> None:
    """A member without the role stands in the DHT under the job's name: no worker believes it."""
    worker = make_identity("worker")

    def control() -> Control:
        return Control(worker, Client(worker), NAME, table, None, 0.3, threading.Event())

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
        door = f"/v1/jobs/{NAME}/pause"
        for name, roles, status in [("plain", ("worker",), 403), ("admin", ("admin",), 200)]:
            with Client(issued(tmp_path, name, *roles)) as asker:
                if status == 200:
                    asker.request_json(true.address, "POST", door, {})
                    continue
                with pytest.raises(RemoteError, match="lacks the role admin, without which nobody can pause"):
                    asker.request_json(true.address, "POST", door, {})
        outsider = issued(tmp_path, "outsider", "worker", datasets=("books",))
        with Client(outsider) as asker, pytest.raises(RemoteError, match="does not cover"):
            asker.request_json(true.address, "POST", "/v1/exchange", {"want": 1})
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
        DataNode(identity, [dataset], HOST, 0, None, access=Access.load(rules)) as node,
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
            made = revoke(network_dir, thief.peer_id, client.identity.node_dir)  # type: ignore[union-attr]
            tell(client, node.address, client.identity)  # type: ignore[arg-type]
            watch = TrustWatch(other, Client(other), known=lambda: [node.address], look_every_s=0.05).start()
            live.settimeout(20)
            assert live.recv(1) == b""  # cut, though nothing was asked
            watch.close()
        with pytest.raises(RemoteError, match="revoked"):
            stolen.request_json(second.address, "GET", "/v1/status")
    assert made is not None and other.revocations.lists() == [made]
    with pytest.raises(RemoteError, match="malformed"):
        client.request_json(node.address, "POST", "/v1/revocations", {"lists": [{}]})
    kinds = [event["kind"] for event in audit_events(tmp_path / "audit.log")]
    assert "revocations" in kinds and "refused" in kinds


def test_a_revoked_organisation_is_out_with_all_its_nodes(node: DataNode, network_dir: Path, tmp_path: Path) -> None:
    org = create_organisation(network_dir, tmp_path / "org", "acme")
    with Client(join(tmp_path / "org", tmp_path / "n", "n")) as theirs:
        theirs.request_json(node.address, "GET", "/v1/status")
        revoke(network_dir, org, node.identity.node_dir)
        with pytest.raises(RemoteError, match="revoked"):
            theirs.request_json(node.address, "GET", "/v1/status")


def test_a_swapped_manifest_is_not_scheduled_for_who_demands_a_publisher(
    node: DataNode, dataset: Dataset, table: LocalDiscovery, make_identity: Make, tmp_path: Path
) -> None:
    """Another data node announces its own dataset under the name: only what the publisher signed counts."""
    anne, scheduler = make_identity("anne"), make_identity("scheduler")

    def schedule() -> SchedulerService:
        return SchedulerService(
            scheduler,
            NAME,
            table,
            Client(scheduler),
            tmp_path / "state",
            seq_len=8,
            wait_s=0.2,
            publishers=[anne.peer_id],
        )

    with pytest.raises(DatasetError, match="Not counted"):
        schedule().start()
    sign_dataset(anne, dataset.path, NAME)
    false = make_dataset(tmp_path / "false", 5, 120)
    (false.path / "manifest.sig.json").write_bytes((dataset.path / "manifest.sig.json").read_bytes())
    with DataNode(make_identity("liar"), [false], HOST, 0, table):
        service = schedule()
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
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            heard = plain.recv(1000)
    assert b"HTTP" not in heard
    until(lambda: len([e for e in audit_events(tmp_path / "audit.log") if e["kind"] == "stranger"]) >= 2)


def test_paths_climb_out_of_no_door(node: DataNode, dataset: Dataset, client: Client) -> None:
    up = ["..", "%2e%2e", "..%2f..", "%00", "/etc/passwd", "....//", "x" * 5000]
    doors = [f"/v1/slices/{p}" for p in up] + [f"/v1/datasets/{dataset.id}/{p}" for p in up]
    doors += [f"/v1/datasets/{p}/manifest.json" for p in up] + [f"/{p}" for p in up]
    doors += [f"/v1/datasets/{dataset.id}/slices/000000.safetensors", "/v1/revocations/../status"]
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
    kept = bytearray()
    listener = socket.create_server((HOST, 0))

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                kept.extend(data)
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
    at, row = f"{HOST}:{listener.getsockname()[1]}", dataset.table.row(0)
    body = client.get_bytes(at, f"/v1/slices/{row.sha256}", 1 << 20)
    assert read_claims(client, at)[0].name == NAME
    client.close()
    tapped.join(20)
    listener.close()
    assert len(kept) > len(body) + 1000
    secrets = [body[i : i + 16] for i in range(0, len(body) - 16, 64)] + [
        word.encode()
        for word in (NAME, row.sha256, dataset.id, node.identity.peer_id, "HTTP/1.1", "/v1/", "test-network")
    ]
    assert [secret for secret in secrets if secret in kept] == []


def test_claims_of_another_peer_are_refused(node: DataNode, make_identity: Make, table: LocalDiscovery) -> None:
    """A data node repeats what an honest one signed, from an address of its own."""
    liar, key = make_identity("liar"), record_key(node.identity.network_id, "dataset", NAME)
    with DataNode(liar, [], HOST, 0, None) as false, Client(make_identity("asker")) as asker:
        false.claims = node.claims  # type: ignore[method-assign]
        table.announce(key, false.port)
        with pytest.raises(ProtocolViolation, match="who answered, got one of"):
            read_claims(asker, false.address)
        found = find_providers(table, asker, node.identity.network_id, NAME, 1.0)
        assert [claim.peer_id for claim in found] == [node.identity.peer_id]


def test_the_admission_server_forgets_no_used_token_when_it_is_killed(network_dir: Path, tmp_path: Path) -> None:
    """kill -9 right after a join; the same token is refused by the next life."""

    def serve() -> tuple[subprocess.Popen[bytes], str]:
        command = [sys.executable, "-m", "forebay.cli", "network", "admit", str(network_dir), "--json"]
        process = subprocess.Popen(
            [*command, "--audit", str(tmp_path / "admit.log"), "--listen", at], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        return process, str(json.loads(process.stdout.readline())["address"])

    with socket.create_server((HOST, 0)) as free:
        at = f"{HOST}:{free.getsockname()[1]}"
    process, _ = serve()
    try:
        invite = [
            sys.executable,
            "-m",
            "forebay.cli",
            "network",
            "invite",
            str(network_dir),
            "--at",
            at,
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
    assert [event["kind"] for event in audit_events(tmp_path / "admit.log")] == ["admitted", "refused"]
