"""A node's trust is kept current: it renews its certificate, fetches CRLs, and outlives faulty peers and callbacks."""

import contextlib
import os
import time
from types import SimpleNamespace

import pytest

from forebay.network import revocation_sync
from forebay.network.admission import Admissions, AdmissionServer, sending_crls
from forebay.network.app import Response, make_app
from forebay.network.client import RemoteError
from forebay.network.crl_exchange import AVOID_S, exchange_crls
from forebay.network.discovery import record_key
from forebay.network.join import join_by_token, sign_token
from forebay.network.peer import Contacts
from forebay.network.pki.files import read_issuer
from forebay.network.pki.identity import Identity, revoke
from forebay.network.pki.record import JoinToken
from forebay.network.pki.revocation import sign_crl
from forebay.network.revocation_sync import TrustWatch
from forebay.network.server import Server
from support.handlers import FOREVER_S, PatientClient
from support.local_discovery import LocalDiscovery
from support.waiting import until


class Clock:
    """Of the watch alone: certificates are issued at the real time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.later_s = 0.0
        clocks = {name: lambda name=name: getattr(time, name)() + self.later_s for name in ("time", "monotonic")}
        monkeypatch.setattr(revocation_sync, "time", SimpleNamespace(**clocks))


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def test_a_node_renews_itself_while_it_runs(network_dir, tmp_path, clock, monkeypatch, caplog):
    """In the last third of its validity; while the issuer is unreachable it says so; without one it warns."""
    with contextlib.closing(AdmissionServer(Admissions(network_dir)).start()) as admission:
        issuer = read_issuer(network_dir)
        names, days = (issuer.peer_id, issuer.peer_id, admission.address), 30.0
        token = JoinToken("ab" * 16, *names, (), (), 1, time.time() + 3600, days)
        node = join_by_token(sign_token(issuer, token), tmp_path / "n", "n")
        path = node.node_dir / "node-cert.pem"
        os.utime(path, (0, 0))
        with PatientClient(node) as client:
            watch = TrustWatch(node, client)
            clock.later_s = 19 * 86400.0
            watch._renew()
            assert path.stat().st_mtime == 0 and caplog.text == ""
            clock.later_s = 21 * 86400.0
            with monkeypatch.context() as patch:
                patch.setattr(revocation_sync, "admission_address", lambda node_dir: "127.0.0.1:1")
                for _ in range(2):  # Once, and again at half of the time that was left.
                    watch._renew()
                assert caplog.text.count("expires in 9 days") == 1 and "This node cannot renew it" in caplog.text
                patch.setattr(revocation_sync, "admission_address", lambda node_dir: None)
                clock.later_s = 26 * 86400.0
                watch._renew()
            assert "4 days" in caplog.text and f"(forebay network renew ISSUER {node.node_dir})" in caplog.text
            assert path.stat().st_mtime == 0
            watch._renew()
            assert path.stat().st_mtime > 0
            again = Identity.load(node.node_dir)
            assert (again.peer_id, again.certificate) == (node.peer_id, node.certificate)


def test_a_peer_without_the_crls_that_it_names_is_left_alone_for_a_while(make_identity, network_dir):
    """It says the highest number there is, and hands out an old CRL, or none: it is asked for it once."""
    liar, reader = make_identity("liar"), make_identity("reader")
    old, paths, app = sign_crl(read_issuer(network_dir), [], 1), [], make_app("liar")

    @app.get("/v1/crls")
    async def numbers() -> dict[str, dict[str, int]]:
        paths.append("/v1/crls")
        return {"crls": {liar.network_id: (1 << 63) - 1, "a" * 32: 9, "b" * 32: 9}}

    @app.get("/v1/crls/{issuer}")
    async def crl(issuer: str) -> Response:
        paths.append(f"/v1/crls/{issuer}")
        return Response(old)

    with Server(app, liar, "127.0.0.1", 0) as server, PatientClient(reader) as client:
        reader.contacts.add(server.address)
        assert not exchange_crls(client, reader, server.address, FOREVER_S)
        assert not exchange_crls(client, reader, server.address, FOREVER_S)
        assert reader.contacts.addresses() == []
        assert reader.contacts.begin(server.address, time.monotonic() + AVOID_S, 5.0)
    # The root's first: accepted, as none was known; the next is no newer one of the issuer asked for.
    assert paths == ["/v1/crls", f"/v1/crls/{liar.network_id}", "/v1/crls/" + "a" * 32]


@pytest.mark.usefixtures("changes_at_once")
@pytest.mark.parametrize("first", ["client", "server"])
def test_a_crl_passes_over_any_connection_in_both_directions(make_identity, network_dir, first):
    """An ordinary request is enough, also one that is refused."""
    nodes = {name: make_identity(name) for name in ("client", "server")}
    thief = make_identity("thief")
    revoke(network_dir, thief.peer_id, nodes[first].node_dir)
    with Server(make_app("x"), nodes["server"], "127.0.0.1", 0) as server, PatientClient(nodes["client"]) as client:
        with pytest.raises(RemoteError, match="404"):
            client.request_json(server.address, "GET", "/v1/nothing")
        assert all(node.revocations.reason(thief.peer_id) is not None for node in nodes.values())
        named = server._core.state.default_headers
        until(lambda: named[0][1].decode() == nodes["client"].revocations.digest())


@pytest.mark.usefixtures("changes_at_once")
def test_a_node_tells_all_that_it_knows_of_a_new_crl(make_identity, network_dir):
    """By hand, the next round of three being hours away."""
    thief, teller = make_identity("thief"), make_identity("teller")
    receivers = [make_identity(f"node{number}") for number in range(5)]
    with contextlib.ExitStack() as stack:
        for node in receivers:
            server = stack.enter_context(Server(make_app("x"), node, "127.0.0.1", 0))
            teller.contacts.add(server.address)
        client = stack.enter_context(PatientClient(teller))
        watch = TrustWatch(teller, client, ask_every_s=86400.0, look_every_s=0.01)
        watch._ask_at = float("inf")
        stack.callback(watch.start().close)
        revoke(network_dir, thief.peer_id, teller.node_dir)
        assert until(lambda: all(node.revocations.reason(thief.peer_id) is not None for node in receivers))


@pytest.mark.usefixtures("changes_at_once")
def test_a_running_admission_server_sends_what_its_owner_revokes(make_identity, network_dir):
    node, discovery = make_identity("node"), LocalDiscovery()
    key = record_key(node.network_id, "revocations", "")
    for thief in (make_identity("thief"), make_identity("another")):  # the second time it is there
        with Server(make_app("x"), node, "127.0.0.1", 0) as server, sending_crls(network_dir, discovery):
            discovery.announce(key, server.port)
            revoke(network_dir, thief.peer_id)
            assert until(lambda peer_id=thief.peer_id: node.revocations.reason(peer_id))


def test_announcements_of_one_host_or_network_are_few_voices():
    honest = [("10.0.1.2", 7001), ("10.0.2.3", 7002), ("2001:db8::5", 7003)]
    crowd = [("10.0.1.9", port) for port in range(1, 5000)]
    crowd += [(f"10.7.{number // 250}.{number % 250}", 1) for number in range(5000)]
    chosen = revocation_sync._choose(crowd + honest)
    assert len(chosen) == revocation_sync.MAX_FOUND and set(honest) <= set(chosen)
    assert sum(host == "10.0.1.9" for host, _ in chosen) <= 2


def test_contacts_are_bounded():
    contacts = Contacts()
    for number in range(10_000):
        contacts.add(f"host{number}:1")
        assert contacts.begin(f"host{number}:1", float(number), 5.0)
    assert contacts.addresses()[-1] == "host9999:1" and len(contacts.addresses()) == 64
    assert not contacts.begin("host9999:1", 10_000.0, 5.0) and contacts.begin("host9999:1", 10_005.0, 5.0)
    contacts.avoid("host9999:1", 20_000.0)
    assert "host9999:1" not in contacts.addresses() and not contacts.begin("host9999:1", 19_999.0, 5.0)


@pytest.mark.usefixtures("changes_at_once")
def test_trust_goes_on_after_any_fault_of_a_peer_or_of_the_node(make_identity, network_dir, caplog):
    """Malformed addresses, a callback that raises: logged, and the next step comes. A new CRL calls back."""
    node, reader, thief = make_identity("node"), make_identity("reader"), make_identity("thief")
    revoke(network_dir, thief.peer_id, node.node_dir)
    faults, changes = [RuntimeError("a fault of ours")], []
    with Server(make_app("x"), node, "127.0.0.1", 0) as server, PatientClient(reader) as client:

        def peers():
            if faults:
                raise faults.pop()
            return ["a..b:1", "nonsense", server.address]

        watch = TrustWatch(
            reader, client, peers=peers, ask_every_s=0.01, look_every_s=0.01, on_change=lambda: changes.append("cut")
        ).start()
        until(lambda: changes)
        watch.close()
    assert reader.revocations.reason(thief.peer_id) is not None and "a fault of ours" in caplog.text
