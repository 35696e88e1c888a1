"""Keys, state and logs are for their owner alone, under an ordinary umask."""

import argparse
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cli import main
from forebay.cli.arguments import days
from forebay.coordinator.store import RunStore
from forebay.ledger.writer import Ledger
from forebay.network.access import AccessPolicy
from forebay.network.audit import AuditLog
from forebay.network.pki.identity import Identity, create_network, create_organisation, join, revoke
from forebay.scheduler.journal import _open_database, lock_state
from forebay.storage.locks import try_acquire


@pytest.fixture(autouse=True)
def ordinary_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """Files that others could read if the directories above let them."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077
    )


def test_state_is_private(tmp_path, make_identity):
    state = tmp_path / "state"
    lock_state(state).release()
    database = _open_database(state / "journal.sqlite")
    database.execute("CREATE TABLE t (x)")
    roster = RunStore(state / "run")
    ledger = Ledger.open(state / "ledger.jsonl", make_identity("s").sign)
    lock = try_acquire(state / "room")
    rules = tmp_path / "access.toml"
    rules.write_text("")
    access = AccessPolicy(rules)
    with AuditLog(state / "logs" / "audit.log") as log:
        log.append("ban", peer="x")
        assert open_to_others(state) == []
        assert not [path for path in tmp_path.glob("access.toml.used*") if path.stat().st_mode & 0o077]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (state, state / "run", state / "logs")} == {0o700}
    lock.release(), ledger.close(), database.close(), access.close()
    roster._database.close()


def test_directories_of_keys_are_private(tmp_path):
    create_network(tmp_path / "net", "n")
    create_organisation(tmp_path / "net", tmp_path / "org", "o")
    node = join(tmp_path / "org", tmp_path / "deep" / "node", "node")
    revoke(tmp_path / "org", "a" * 32, node.node_dir)
    folders = [tmp_path / "net", tmp_path / "org", node.node_dir, node.node_dir / "crls"]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    public = {"root-cert.pem", "network.json", "org-cert.pem", "node-cert.pem"}
    assert {Path(name).name for name in open_to_others(tmp_path)} <= public


def test_a_token_comes_from_a_file_or_standard_input(tmp_path, capsys, monkeypatch):
    (tmp_path / "token").write_text("forebay1.none\n")
    assert main(f"network join {tmp_path}/n --name n --token {tmp_path}/token".split()) == 1
    assert "token: expected" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("forebay1.none\n"))
    assert main(f"network join {tmp_path}/n --name n --token -".split()) == 1
    assert "token: expected" in capsys.readouterr().err
    assert main(f"network join {tmp_path}/n --name n --token {tmp_path}/no".split()) == 2
    assert "cannot read the token" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x"])
def test_days_are_above_zero(text):
    assert days("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match="days above zero"):
        days(text)


def test_the_commands_of_a_networks_owner(tmp_path, capsys):
    """init, join, revoke, show, renew: as they are typed."""
    net, node = tmp_path / "net", tmp_path / "node"
    assert main(f"network init {net}".split()) == 0
    assert main(f"network join {net} {node} --name n --role worker --days 0.5".split()) == 0
    assert main(f"network revoke {'b' * 32} {net} {node}".split()) == 0
    assert "is revoked by CRL" in capsys.readouterr().out
    assert main(f"network show {node}".split()) == 0
    assert "1 revoked by" in capsys.readouterr().out
    assert main(f"network renew {net} {node}".split()) == 0
    assert Identity.load(node).valid_s > 89 * 86400
    (node / "crls" / "x.pem").write_text("garbage")
    assert main(f"network show {node}".split()) == 2
    assert "cannot read" in capsys.readouterr().err
