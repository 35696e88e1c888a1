"""Keys, ids, certificates, files of a node, and its list of revoked peers."""

import pytest

from forebay.errors import ProtocolError, UsageError
from forebay.network.pki.certificates import peer_of
from forebay.network.pki.identity import Identity, create_network, join, revoke


def test_a_join_that_was_killed_is_continued_with_its_key(network_dir, make_identity):
    node = make_identity("a")
    for name in ("node-cert.pem", "network.json", "root-cert.pem"):  # In the order in which they would be missing.
        (node.node_dir / name).unlink()
        (node.node_dir / "node-cert.pem").unlink(missing_ok=True)
        assert join(network_dir, node.node_dir, "a").peer_id == node.peer_id


def test_files_that_do_not_belong_together(tmp_path, make_identity):
    a, b = make_identity("a"), make_identity("b")
    (a.node_dir / "node-cert.pem").write_bytes((b.node_dir / "node-cert.pem").read_bytes())
    with pytest.raises(UsageError, match="another key"):
        Identity.load(a.node_dir)
    create_network(tmp_path / "other", "other")
    (b.node_dir / "root-cert.pem").write_bytes((tmp_path / "other" / "root-cert.pem").read_bytes())
    with pytest.raises(UsageError, match="of network"):
        Identity.load(b.node_dir)


@pytest.mark.parametrize("name", ["node-key.pem", "node-cert.pem", "root-cert.pem", "network.json"])
def test_missing_and_garbled_files_are_named(name, make_identity):
    path = make_identity("a").node_dir / name
    path.write_bytes(b"{garbage")
    with pytest.raises(UsageError, match=name):
        Identity.load(path.parent)
    path.unlink()
    with pytest.raises(UsageError, match=name):
        Identity.load(path.parent)


@pytest.mark.usefixtures("changes_at_once")
def test_a_garbled_revocation_list_lets_nobody_in(make_identity, caplog):
    a = make_identity("a")
    (a.node_dir / "revoked.txt").write_text(f"# stolen laptop\n{a.peer_id[:-1]}\n")
    assert a.revocations.reason(a.peer_id) is not None and "revoked.txt:2" in caplog.text
    assert "revoked.txt" not in str(a.refusal(a.as_peer))  # which strangers read
    (a.node_dir / "revoked.txt").write_text("# no peer\n")
    peer_ids = [make_identity(name).peer_id for name in "bc"]
    for peer_id in peer_ids:
        revoke(a.node_dir, peer_id)
    assert a.refusal(a.as_peer) is None and all(map(a.revocations.reason, peer_ids))
    with pytest.raises(UsageError, match="expected the name of a member"):
        revoke(a.node_dir, "../x")


def test_garbage_is_no_certificate():
    with pytest.raises(ProtocolError, match="certificate"):
        peer_of(b"\x30\x03garbage")


@pytest.mark.parametrize("name", ["", "a b", "../up", "x" * 65, "-x"])
def test_names(name, network_dir, tmp_path):
    with pytest.raises(UsageError, match="name"):
        join(network_dir, tmp_path / "x", name)
