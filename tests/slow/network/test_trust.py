"""What each kind of hostile peer tries, against real servers; docs/reference/threat-model.md names these tests."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.data_node import DataNode
from forebay.dataset.reader import Dataset
from forebay.errors import DatasetError, NetworkError
from forebay.lease.scheduler_client import SchedulerClient
from forebay.network.access import AccessPolicy
from forebay.network.app import make_app
from forebay.network.audit import AuditLog
from forebay.network.client import Client, RemoteError, WrongPeerError
from forebay.network.crl_exchange import exchange_crls, send_crl
from forebay.network.discovery import find_providers, read_claims
from forebay.network.join import join_by_token
from forebay.network.pki import revocation
from forebay.network.pki.files import read_issuer, read_root
from forebay.network.pki.identity import Identity, revoke
from forebay.network.pki.revocation import MAX_REVOKED, parse_crl, sign_crl
from forebay.network.publications import sign_dataset
from forebay.network.server import Server
from forebay.scheduler.server import SchedulerService
from support.attackers import answers, ask, issue, organisation, request
from support.local_discovery import LocalDiscovery
from support.nodes import HOST, NAME, make_dataset
from support.ports import free_port
from support.wire import connect


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return make_dataset(tmp_path / "data", 4, 100)


@pytest.fixture
def node(dataset, table: LocalDiscovery, make_identity, tmp_path) -> Iterator[DataNode]:
    identity = make_identity("data")
    with AuditLog(tmp_path / "audit.log") as identity.audit, DataNode(identity, [dataset], HOST, 0, table) as node:
        yield node


def audit_events(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_only_role_data_is_an_origin_and_only_of_what_it_covers(
    dataset, table: LocalDiscovery, client: Client, network_dir, monkeypatch
):
    for identity in (issue(network_dir, "worker", "worker"), issue(network_dir, "other", "data", datasets=("books",))):
        with monkeypatch.context() as patch:  # one whose program is changed claims all the same
            patch.setattr(Identity, "check_role", lambda *_: None)
            liar = DataNode(identity, [dataset], HOST, 0, table)
        with liar:
            assert find_providers(table, client, identity.network_id, NAME, 1.0) == []
            with contextlib.suppress(WrongPeerError):
                assert read_claims(client, liar.address, NAME) == []


def test_a_scheduler_must_be_certified_as_one(
    node, table: LocalDiscovery, make_identity, network_dir, tmp_path,
    monkeypatch,
):  # fmt: skip
    """A member without the role is in the DHT under the job's name: no worker believes it."""
    worker = make_identity("worker")

    @contextlib.contextmanager
    def scheduler(identity):
        state, client = tmp_path / identity.name, Client(identity)
        service = SchedulerService(identity, NAME, table, client, state, seq_len=8)
        service.start()
        yield service, SchedulerClient(worker, Client(worker), NAME, table, None, 0.3, threading.Event())
        service.stop()

    with monkeypatch.context() as patch:  # its program is changed
        patch.setattr(Identity, "check_role", lambda *_: None)
        with (
            scheduler(issue(network_dir, "false", "worker", "data")) as (_, control),
            pytest.raises(NetworkError, match="role scheduler"),
        ):
            control.exchange({"want": 0})
    with scheduler(issue(network_dir, "true", "scheduler")) as (service, control):
        assert control.exchange({"want": 0})["leases"] == []
        outsider = issue(network_dir, "outsider", "worker", datasets=("books",))
        assert "does not cover" in ask(outsider, service.address, "POST", "/v2/exchange", {"want": 1})[1]["message"]


def test_access_lists_and_quotas_at_the_door(dataset, make_identity, client: Client, tmp_path):
    row, rules = dataset.table.row(0), tmp_path / "access.toml"
    rules.write_text(f'[[dataset]]\nname = "{NAME}"\nbytes_per_day = {row.bytes + 10}\n')
    identity, path = make_identity("data"), f"/v1/slices/{row.sha256}"
    with (
        AuditLog(tmp_path / "audit.log") as identity.audit,
        DataNode(identity, [dataset], HOST, 0, None, access=AccessPolicy(rules)) as node,
    ):
        assert len(client.get_bytes(node.address, path, 1 << 20)) == row.bytes
        with pytest.raises(RemoteError, match=r"refused with 429 .*quota"):
            client.get_bytes(node.address, path, 1 << 20)
        rules.write_text(f'[[dataset]]\nname = "{NAME}"\ndeny = ["peer:{client.identity.peer_id}"]\n')
        for method, door in [
            ("GET", path), ("GET", f"/v1/datasets/{dataset.id}/manifest.json"), ("POST", f"/v1/swarm/{dataset.id}"),
        ]:  # fmt: skip
            with pytest.raises(RemoteError, match=r"403 .*not on the access list"):
                client.request_json(node.address, method, door, None if method == "GET" else {})
    # The last line counts the repeats.
    assert [event["kind"] for event in audit_events(tmp_path / "audit.log")] == ["quota", "refused", "refused"]


# Revocation.


def test_a_crl_that_is_brought_cuts_live_connections_and_is_served_and_recorded(
    node, make_identity, network_dir, client: Client, tmp_path
):
    thief = make_identity("thief")
    with connect(thief, node.address) as live:
        assert answers(live, request("GET", "/v1/status"))[0].status == 200
        created = revoke(network_dir, thief.peer_id)
        assert send_crl(client, node.address, created) == (node.identity.peer_id, True)
        assert send_crl(client, node.address, created) == (node.identity.peer_id, False)
        live.settimeout(None)
        assert live.recv(1) == b""  # cut, though nothing was sent
    with Client(thief) as stolen, pytest.raises(NetworkError, match="revoked"):
        stolen.request_json(node.address, "GET", "/v1/status")
    with pytest.raises(RemoteError, match="malformed"):
        client.request_json(node.address, "POST", "/v1/crls", b"a list of old")
    assert client.get_bytes(node.address, f"/v1/crls/{created.issuer}", 1 << 20) == created.pem
    with pytest.raises(RemoteError, match="404"):
        client.get_bytes(node.address, "/v1/crls/" + "a" * 32, 1 << 20)
    assert "refused" in [event["kind"] for event in audit_events(tmp_path / "audit.log")]
    decisions = audit_events(tmp_path / "audit.log.decisions")
    assert ("crl", created.number) in [(event["kind"], event["facts"].get("number")) for event in decisions]


def post_crl(member: Identity, address: str, pem: bytes) -> Any:
    with Client(member) as client:
        return client.request_json(address, "POST", "/v1/crls", pem, timeout_s=60.0)[0]


def test_two_rogue_organisations_do_not_keep_the_roots_word_out(node, client: Client, network_dir, make_identity):
    """Each organisation signs the largest CRL there is; the root's still reaches a node, and others fetch all."""
    thief, other = make_identity("thief"), make_identity("other")
    for name in ("one", "two"):
        issuer = read_issuer(organisation(network_dir, name))
        largest = sign_crl(issuer, [(1 << 158) + i for i in range(MAX_REVOKED)], 1)
        assert post_crl(thief, node.address, largest) == {"new": True}
    assert send_crl(client, node.address, revoke(network_dir, thief.peer_id))[1]
    with Client(other) as reader:
        assert exchange_crls(reader, other, node.address)
    assert other.refusal(thief.as_peer) is not None
    assert other.revocations.numbers() == node.identity.revocations.numbers()


@pytest.mark.usefixtures("changes_at_once")
def test_a_crl_that_is_not_wanted_is_not_read(network_dir, monkeypatch):
    """Large CRLs, sent again and again, or a new one each second."""
    org, server, evil = organisation(network_dir, "acme"), issue(network_dir, "server"), issue(network_dir, "evil")
    crls = [sign_crl(read_issuer(org), range(1, 2000), number) for number in range(1, 6)]
    roots, org_id = read_root(network_dir), read_issuer(org).peer_id
    seen = []
    assert parse_crl(crls[0], roots, lambda *what: bool(seen.append(what))) is None and seen == [(org_id, 1)]
    read = []
    entries = revocation.Crl
    monkeypatch.setattr(revocation, "Crl", lambda *arguments: read.append(arguments[1]) or entries(*arguments))
    with Server(make_app("x"), server, HOST, 0) as running:
        accepted = [post_crl(evil, running.address, pem)["new"] for pem in crls * 3]
    assert accepted == [True] * 3 + [False] * 12 and server.revocations.numbers() == {org_id: 3}
    assert set(read) == {1, 2, 3} and len(read) <= 6  # once more from their file


# Data.


def test_a_swapped_manifest_is_not_scheduled_for_who_demands_a_publisher(
    node, dataset, table: LocalDiscovery, make_identity, tmp_path
):
    """Another data node announces its own dataset under the name: only what the publisher signed counts."""
    anne, scheduler = make_identity("anne"), make_identity("scheduler")
    settings = {"seq_len": 8, "publishers": [anne.peer_id]}

    def schedule(wait_s):
        state = tmp_path / "state"
        return SchedulerService(scheduler, NAME, table, Client(scheduler), state, wait_s=wait_s, **settings)

    with pytest.raises(DatasetError, match="not counted"):
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


def test_an_observer_sees_no_name_and_no_bytes(node, dataset, client: Client):
    """Everything passes through a wire that keeps a copy; certificates and names of members are encrypted, too."""
    seen = bytearray()
    listener = socket.create_server((HOST, 0))

    def carry(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def wire():
        near, _ = listener.accept()
        with near, socket.create_connection((HOST, node.port)) as far:
            back = threading.Thread(target=carry, args=(far, near))
            back.start()
            carry(near, far)
            back.join()

    tapped = threading.Thread(target=wire)
    tapped.start()
    with listener:
        address, row = f"{HOST}:{listener.getsockname()[1]}", dataset.table.row(0)
        body = client.get_bytes(address, f"/v1/slices/{row.sha256}", 1 << 20)
        assert read_claims(client, address, NAME)[0].name == NAME
        client.close()
        tapped.join()
    assert len(seen) > len(body) + 1000
    words = (NAME, row.sha256, dataset.id, node.identity.peer_id, "HTTP/1.1", "/v1/", "test-network")
    secrets = [body[i : i + 16] for i in range(0, len(body) - 16, 64)] + [word.encode() for word in words]
    assert [secret for secret in secrets if secret in seen] == []


def test_the_admission_server_forgets_no_used_token_when_it_is_killed(network_dir, tmp_path):
    """kill -9 right after a join; the same token is refused by the next life."""
    address, program = f"{HOST}:{free_port()}", [sys.executable, "-m", "forebay", "network"]
    environment = os.environ | {"FOREBAY_AUDIT_LOG": str(tmp_path / "admit.log")}

    @contextlib.contextmanager
    def admission():
        command = [*program, *f"admit {network_dir} --json --listen {address}".split()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout.readline()
            yield
            process.kill()

    invite = [*program, *f"invite {network_dir} --issuer {address} --role worker".split()]
    token = subprocess.run(invite, capture_output=True, check=True, text=True).stdout.strip()
    with admission():
        assert join_by_token(token, tmp_path / "a", "a").scope.roles == {"worker"}
    with admission(), pytest.raises(NetworkError, match="used up"):
        join_by_token(token, tmp_path / "b", "b")
    assert [event["kind"] for event in audit_events(tmp_path / "admit.log.decisions")] == ["admitted"]
    assert [event["kind"] for event in audit_events(tmp_path / "admit.log")] == ["refused"]
