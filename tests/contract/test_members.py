"""Members of a network: every certificate is recorded, roles are asked for, and the revoked are told why."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from forebay.cli import main, running
from forebay.coordinator.server import Coordinator
from forebay.data_node import DataNode
from forebay.dataset.reader import Dataset
from forebay.errors import ForebayError, NetworkError, ProtocolError, UsageError
from forebay.lease.scheduler_client import SchedulerClient
from forebay.network.admission import Admissions
from forebay.network.client import Client
from forebay.network.join import make_csr, sign_token
from forebay.network.messages import AdmitRequest, RenewRequest
from forebay.network.peer import ROLES, Scope
from forebay.network.pki import identity as pki
from forebay.network.pki.certificates import der_of
from forebay.network.pki.files import read_issuer, read_key
from forebay.network.pki.identity import Identity
from forebay.network.pki.record import MEMBERS_FILE, JoinToken, MemberRecord
from forebay.observe.views import view_of
from forebay.peer_id import serial_number_of
from forebay.scheduler.server import SchedulerService
from forebay.storage.origins import open_remote
from forebay.worker.membership import Membership
from support.attackers import ask, issue
from support.local_discovery import LocalDiscovery
from support.nodes import HOST, NAME, Network, make_dataset
from support.waiting import until

WORKER = Scope(frozenset({"worker"}))


def admit(folder: Path, out: Path):
    issuer = read_issuer(folder)
    token = JoinToken("ab" * 16, "", issuer.peer_id, f"{HOST}:1", ("worker",), (), 2, 4e9, 3.0)
    request = AdmitRequest(token=sign_token(issuer, token), name="n", request=make_csr(issuer.key, "n"))
    Admissions(folder).admit(request, "")


def renew_at_server(folder: Path, out: Path):
    node = pki.join(folder, out, "n", scope=WORKER, valid_days=3.0)
    (folder / MEMBERS_FILE).unlink()
    request = RenewRequest(request=make_csr(read_key(out / "node-key.pem"), "n"))
    Admissions(folder).renew(request, "", der_of(node.certificate))


WAYS: dict[str, Callable[[Path, Path], object]] = {
    "join": lambda folder, out: pki.join(folder, out, "n", scope=WORKER, valid_days=3.0),
    "renew": lambda folder, out: pki.join(folder, out, "n", scope=WORKER) and pki.renew(folder, out, valid_days=3.0),
    "admit": admit,
    "renew at the server": renew_at_server,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_certificate_is_recorded(way, network_dir, tmp_path):
    org, scope = tmp_path / "org", Scope(frozenset({"worker", "data"}), ("c4-*",))
    pki.create_organisation(network_dir, org, "acme", scope)
    pki.renew_organisation(network_dir, org, valid_days=9.0)
    (issued,) = MemberRecord(network_dir).certificates.values()
    assert (issued.name, issued.is_organisation, issued.datasets, issued.valid_days) == ("acme", True, ("c4-*",), 9.0)
    WAYS[way](org, tmp_path / "n")
    (issued,) = MemberRecord(org).certificates.values()
    assert (issued.name, issued.roles, issued.datasets, issued.is_organisation) == ("n", ("worker",), ("c4-*",), False)
    assert issued.serial == f"{serial_number_of(issued.peer_id):X}" and issued.valid_days == pytest.approx(3.0)
    assert issued.token == ("ab" * 16 if way == "admit" else "")


def test_a_record_grows_with_what_is_new_and_is_of_one_version(network_dir, tmp_path):
    node, path = pki.join(network_dir, tmp_path / "n", "n"), network_dir / MEMBERS_FILE
    record = MemberRecord(network_dir)
    key = read_key(node.node_dir / "node-key.pem").public_key()
    for days, grows in [(90.0, False), (180.0, True), (180.0, False)]:
        before = path.stat().st_size
        record.issue("n", key, node.scope, days)
        assert (path.stat().st_size > before) == grows
    with pytest.raises(ProtocolError, match="expected the name of its first certificate, n, got alice"):
        record.issue("alice", key, node.scope, 90.0)
    good = path.read_bytes()
    for line in (b"garbage\n", good.splitlines(True)[0].replace(b'"version":1', b'"version":2')):
        path.write_bytes(good + line)
        with pytest.raises(UsageError, match=f"at byte {len(good)} "):
            MemberRecord(network_dir)


def test_an_owner_lists_members_and_tokens_withdraws_and_revokes_by_name(tmp_path, capsys):
    def run(text: str, code: int = 0) -> str:
        assert main(text.replace("./", f"{tmp_path}/").split()) == code
        out, error = capsys.readouterr()
        return error if code else out

    run("network init ./net")
    for name, folder in [("alice", "a"), ("bob", "b"), ("bob", "c"), ("carol", "d")]:
        run(f"network join ./net ./{folder} --name {name} --role worker --dataset c4-*")
    a, b, c, d = (Identity.load(tmp_path / folder).peer_id for folder in "abcd")
    assert "name" in run(f"network join ./net ./e --name {a} --role worker", 2)  # the peer id of another
    token = json.loads(run("network invite ./net --issuer 127.0.0.1:1 --role viewer --uses 3 --json"))["id"]
    assert f"{token}  valid" in run("network tokens ./net")
    assert "network tokens" in run("network withdraw ./net none", 2)
    run(f"network withdraw ./net {token}")
    assert f"{token}  withdrawn" in run("network tokens ./net")
    run(f"network revoke {a} ./net")
    shown = run("network revoke bob ./net", 2)
    assert b in shown and c in shown
    run(f"network revoke {serial_number_of(b):X} ./net")
    first = {row["peer_id"]: row for row in json.loads(run("network members ./net --json"))}
    run("network revoke bob ./net")  # one is left
    run("network revoke bob ./net")  # again, as for a node that had no list
    assert "expected the name of a member" in run("network revoke bert ./net", 2)
    rows = {row["peer_id"]: row for row in json.loads(run("network members ./net --json"))}
    assert [rows[id]["state"] for id in (a, b, c, d)] == ["revoked"] * 3 + ["valid"]
    assert first[a]["revoked_at"] == rows[a]["revoked_at"]  # later lists keep when it was
    assert f"carol  {d}  valid" in run("network members ./net")
    assert "got one without its key" in run("network admit ./a", 2)


def command(words: str, node: Identity) -> int:
    """In a network without a DHT node: what it says of the role comes before it joins."""
    return main([*words.split(), "--identity", str(node.node_dir)])


STARTS: dict[str, tuple[str, Callable[[Identity, Dataset], object]]] = {
    "serve": ("data", lambda node, data: DataNode(node, [data], HOST, 0, None)),
    "scheduler": ("scheduler", lambda node, data: SchedulerService(node, NAME, LocalDiscovery(), Client(node), "x")),
    "coordinator": ("scheduler", lambda node, data: Coordinator(identity=node)),
    "worker": ("worker", lambda node, data: SchedulerClient(node, Client(node), NAME, None, f"{HOST}:1", 1.0)),
    "worker of a coordinator": ("worker", lambda node, data: Membership(f"{HOST}:1", identity=node)),
    "serve, the command": ("data", lambda node, data: command(f"serve {data.path}", node)),
    "scheduler, the command": ("scheduler", lambda node, data: command(f"scheduler {NAME}", node)),
    "worker, the command": ("worker", lambda node, data: command(f"worker {NAME}", node)),
    "top": ("viewer", lambda node, data: main(f"top {HOST}:1 --identity {node.node_dir}".split())),
    "dashboard": ("viewer", lambda node, data: main(f"dashboard {HOST}:1 --identity {node.node_dir}".split())),
}


def error_of(start: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> str:
    """What a start that fails says, by an exception or on stderr."""
    error = ""
    try:
        assert start()
    except ForebayError as raised:
        error = str(raised)
    return error + capsys.readouterr().err


@pytest.mark.parametrize("what", STARTS)
def test_a_role_is_asked_for_where_it_starts(what, network_dir, tmp_path, capsys):
    (role, start), dataset = STARTS[what], make_dataset(tmp_path / "data", 2, 40)
    nodes = [issue(network_dir, "wrong", *(ROLES - {role, "admin"}))]
    if what in ("serve", "scheduler", "worker"):
        nodes.append(issue(network_dir, "narrow", role, datasets=("books",)))
    for node in nodes:
        error = error_of(lambda node=node: start(node, dataset), capsys)
        assert f"{what.split()[0].rstrip(',')}: expected a certificate of scope {role} for " in error
        assert f"got {node.scope} ({node.node_dir}). Ask its issuer" in error


COMMANDS = [
    "find x", f"status {HOST}:1", f"job pause --scheduler {HOST}:1", f"inspect forebay://test-network/{NAME}",
    "scheduler x", "worker x", f"network renew {{}} --issuer {HOST}:1",
]  # fmt: skip


@pytest.mark.parametrize("reason, advice", [("expired", "network renew ISSUER"), ("is revoked", "Ask the issuer why")])
@pytest.mark.parametrize("what", [*STARTS, *COMMANDS])
def test_who_is_refused_by_all_is_told_before_it_asks_anybody(what, reason, advice, network_dir, tmp_path, capsys):
    role, start = STARTS.get(what, ("admin", None))
    scope, folder = Scope(frozenset({role})), tmp_path / "n"
    node = pki.join(network_dir, folder, "n", scope=scope, valid_days=1e-9 if reason == "expired" else 1.0)
    pki.revoke(folder, node.peer_id if reason == "is revoked" else "a" * 32)
    words = [*what.format(folder).split(), "--identity", str(folder)]
    dataset, node = make_dataset(tmp_path / "data", 2, 40), Identity.load(folder)
    error = error_of(lambda: start(node, dataset) if start else main(words), capsys)
    assert reason in error and f"all members refuse this node ({folder}). " in error and advice in error


READERS, WORKERS, ADMINS = ROLES - {"viewer"}, {"worker"}, {"admin"}
ROUTES = {
    "every node": {
        "GET /metrics": ROLES, "GET /v1/crls": ROLES, "GET /v1/crls/{issuer}": ROLES, "POST /v1/crls": ROLES,
    },
    "data node": {
        "GET /v1/status": ROLES, "GET /v1/claims": ROLES, "GET /v1/slices/{sha256}": READERS,
        "GET /v1/slices/{sha256}/chunks": READERS, "GET /v1/datasets/{dataset_id}/{name}": READERS,
        "POST /v1/swarm/{dataset_id}": READERS,
    },
    "scheduler": {
        "GET /v1/status": ROLES, "GET /v1/job": ROLES, "GET /v1/datasets/{dataset_id}/{name}": WORKERS,
        "POST /v2/exchange": WORKERS, "POST /v1/job/pause": ADMINS, "POST /v1/job/resume": ADMINS,
        "POST /v1/job/readmit": ADMINS,
    },
    "coordinator": {
        "GET /v1/status": ROLES, "GET /v1/log": ROLES, "POST /v1/config": WORKERS, "POST /v1/members/join": WORKERS,
        "POST /v1/members/ready": WORKERS, "POST /v1/members/heartbeat": WORKERS, "POST /v1/members/leave": WORKERS,
        "POST /v1/members/meet": WORKERS,
    },
}  # fmt: skip


def test_every_route_is_for_its_roles(tmp_path):
    """A viewer sees what an admin sees; it reads no data and changes nothing."""
    with ExitStack() as stack:
        network = Network(tmp_path, stack)
        dataset = make_dataset(tmp_path / "tiny", 4, 40)
        node, service = network.serve(dataset), network.schedule(seq_len=8)
        coordinator = stack.enter_context(Coordinator(identity=network.identity("scheduler")))
        row, worker = dataset.table.row(0), issue(tmp_path / "network", "busy", "worker")
        ask(worker, node.address, "GET", f"/v1/slices/{row.sha256}")
        ask(worker, service.address, "POST", "/v2/exchange", {})
        members = {role: issue(tmp_path / "network", role, role) for role in ROLES}
        names = ("sha256", "dataset_id", "name", "issuer", "peer_id")
        values = dict(zip(names, (row.sha256, dataset.id, "manifest.json", "x", "x")))
        for kind, server in [("data node", node), ("scheduler", service), ("coordinator", coordinator)]:
            routes, paths = ROUTES["every node"] | ROUTES[kind], server._server.app.openapi()["paths"]
            assert {f"{method.upper()} {path}" for path in paths for method in paths[path]} == routes.keys()
            for route, allowed in routes.items():
                method, path = route.format(**values).split()
                for role, member in members.items():
                    body = {} if method == "POST" else None
                    status, answer = ask(member, server.address, method, f"{path}?chunk_bytes=65536", body)
                    is_refused = status == 403 and answer["error"] != "bad_crl"
                    assert is_refused == (role not in allowed), (kind, route, role, answer)
        for role, member in members.items():
            sees = role in ("viewer", "admin")
            job, data = (ask(member, server.address, "GET", "/v1/status")[1] for server in (service, node))
            assert bool(job["workers"]) is bool(job["events"]) is bool(data["peers"]) is sees
            assert ("shown to the roles viewer and admin" in view_of(job).get("message", "")) is not sees
        assert ask(members["viewer"], node.address, "GET", "/v1/claims")[1] == {"claims": []}


@pytest.mark.usefixtures("changes_at_once")
@pytest.mark.parametrize("by", ["network", "acme"])
def test_a_revoked_member_loses_its_leases_and_its_rank_at_once_and_is_told_why(by, tmp_path):
    with ExitStack() as stack:
        network = Network(tmp_path, stack)
        pki.create_organisation(tmp_path / "network", tmp_path / "acme", "acme")
        worker, identity = pki.join(tmp_path / by, tmp_path / "w", "w"), network.identity("scheduler")
        data = network.serve(make_dataset(tmp_path / "tiny", 4, 40))
        service = network.schedule(seq_len=8, lease_s=3600.0)
        coordinator = stack.enter_context(Coordinator(identity=identity))
        leasing, late = (SchedulerClient(worker, Client(worker), NAME, None, service.address, 3600.0) for _ in range(2))
        assert len(leasing.exchange({"session": "s", "want": 2})["leases"]) == 2
        membership = stack.enter_context(Membership(coordinator.address, identity=worker, patience_s=3600.0))
        membership.join()

        pki.revoke(tmp_path / by, worker.peer_id, data.identity.node_dir, identity.node_dir)
        until(lambda: service.status()["slices_leased"] == 0)
        assert [row["state"] for row in view_of(service.status())["workers"]] == ["revoked"]
        texts = [event["text"] for event in service.status()["events"]]
        assert texts.count("w is revoked") == texts.count("w is revoked: 2 slices are free") == 1
        until(lambda: not coordinator.status()["members"] and membership.changing)
        for request in (
            lambda: leasing.exchange({}), late.read_job, membership.join,
            lambda: open_remote(f"forebay://test/{NAME}", identity=worker, discovery=network.discovery),
        ):  # fmt: skip
            with pytest.raises(ForebayError, match=r"(403 revoked|w): peer .* is revoked"):
                request()

        # A server that finds itself in a list ends.
        pki.revoke(identity.node_dir, identity.peer_id)
        with pytest.raises(NetworkError, match="all members refuse this node"):
            running.until_stopped(SimpleNamespace(wait=lambda s: False), identity=identity)
