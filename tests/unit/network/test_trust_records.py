"""Access lists and quotas, the audit log: files and rules."""

import json
from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.network import audit
from forebay.network.access import AccessPolicy
from forebay.network.audit import AuditLog
from forebay.network.peer import Peer, Scope

DAY_S = 86400
ID = "ab" * 32
ANNE = Peer("a" * 32, b"", "anne", "o" * 32)
BERT = Peer("b" * 32, b"", "bert", "o" * 32, Scope(frozenset({"worker"})))
CARL = Peer("c" * 32, b"", "carl", "", Scope(frozenset({"data"})))


def rules(path: Path, text: str) -> AccessPolicy:
    path.write_text(text)
    return AccessPolicy(path)


def test_scopes_count_without_a_file():
    narrow = Peer("n" * 32, b"", "n", "", Scope(datasets=("c4-*",)))
    assert AccessPolicy().check(narrow, "c4-en", ID, 1 << 40, 0.0) is None
    assert "does not cover dataset 'books'" in str(AccessPolicy().check(narrow, "books", ID, 0, 0.0))


@pytest.mark.parametrize(
    "rule, admitted",
    [
        ("", "abc"),
        (f'allow = ["peer:{"a" * 32}"]', "a"),
        (f'allow = ["org:{"o" * 32}"]', "ab"),
        (f'allow = ["org:{"o" * 32}"]\ndeny = ["peer:{"b" * 32}"]', "a"),
        ('allow = ["role:worker"]', "ab"),  # anne's certificate names no role: it has all
        ('deny = ["role:data"]', "ab"),
        ("allow = []", ""),
    ],
)
def test_who_may_read(rule, admitted, tmp_path):
    access = rules(tmp_path / "a.toml", f'[[dataset]]\nname = "c4-*"\n{rule}\n')
    allowed = [peer.peer_id[0] for peer in (ANNE, BERT, CARL) if access.check(peer, "c4-en", ID, 9, 0.0) is None]
    assert "".join(allowed) == admitted
    assert access.check(CARL, "books", ID, 9, 0.0) is None
    access.close()


def test_a_quota_holds_over_restarts_and_ends_with_the_day(tmp_path):
    text = f'[[dataset]]\nid = "{ID}"\nbytes_per_day = "100"\norg_bytes_per_day = 150\n'
    access = rules(tmp_path / "a.toml", text)
    assert access.check(ANNE, "x", ID, 60, 5.0) is None
    assert "60 of 100" in str(access.check(ANNE, "x", ID, 41, 5.0))
    assert access.check(ANNE, "x", ID, 40, 5.0) is None
    again = AccessPolicy(tmp_path / "a.toml")  # as after kill -9: nothing was closed
    assert "peer:" in str(again.check(ANNE, "x", ID, 1, 5.0)) and again.check(ANNE, "x", ID, 0, 5.0) is None
    assert again.check(BERT, "x", ID, 50, 5.0) is None
    assert "org:" in str(again.check(BERT, "x", ID, 1, 5.0))
    assert again.check(CARL, "x", ID, 100, 5.0) is None
    assert again.check(ANNE, "x", ID, 100, 5.0 + DAY_S) is None
    access.close(), again.close()


def test_rules_are_read_again_and_garbled_ones_let_nobody_in(tmp_path):
    path = tmp_path / "a.toml"
    access = rules(path, "")
    assert access.check(ANNE, "x", ID, 9, 0.0) is None
    path.write_text('[[dataset]]\nname = "*"\nallow = []\n')
    assert "not on the access list" in str(access.check(ANNE, "x", ID, 9, 0.0))
    path.write_text("[[dataset")
    assert "cannot be read" in str(access.check(ANNE, "x", ID, 9, 0.0))
    path.unlink()
    assert "cannot be read" in str(access.check(ANNE, "x", ID, 9, 0.0))
    path.write_text("# all may read all again")
    assert access.check(ANNE, "x", ID, 9, 0.0) is None
    access.close()


@pytest.mark.parametrize(
    "text, message",
    [
        ("[[dataset]]\n", "access list"),
        ('[[dataset]]\nname = "a"\nid = "b"\n', "dataset 1: expected either name or id"),
        ('[[dataset]]\nname = "a"\n\n[[dataset]]\nname = "b"\nalow = []\n', "dataset 2 alow"),
        ('[[dataset]]\nname = "a"\ndeny = ["everyone"]\n', "dataset 1 deny 1.*'everyone'"),
        ('[[dataset]]\nname = "a"\nallow = ["role:king"]\n', "dataset 1 allow 1.*'role:king'"),
        ('[[dataset]]\nname = "a"\nbytes_per_day = "much"\n', "dataset 1 bytes_per_day.*'much'"),
        ("dataset = 3\n", "access list"),
        ('[defaults]\nallow = []\n[[dataset]]\nname = "a"\n', "access list: defaults"),
        ("\x00", r"a\.toml:1: expected TOML"),
    ],
)
def test_rules_that_make_no_sense(text, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        rules(tmp_path / "a.toml", text)


# The audit log.


def events(path: Path) -> list[dict]:
    """Those of all parts of a file, the oldest first."""
    parts = sorted(path.parent.glob(path.name + ".[0-9]"), reverse=True)
    return [json.loads(line) for part in (*parts, path) for line in part.read_text().splitlines()]


def test_events_follow_each_other_through_restarts(tmp_path):
    path = tmp_path / "deep" / "audit.log"
    with AuditLog(path) as log:
        log.append("refused", peer="a", reason="revoked")
        log.append("ban", peer="b", num=3, reason="\x1b[2J")
    with AuditLog(path) as log:
        log.append("admitted", peer="c")
        log.append("quota", peer="c", reason="x" * 10_000)
        log.close()
    assert [(item["kind"], item["repeats"]) for item in events(path)] == [("refused", 0), ("quota", 0)]
    assert [item["kind"] for item in events(log.decisions_path)] == ["ban", "admitted"]
    assert events(path)[0]["facts"] == {"peer": "a", "reason": "revoked"}
    assert len(events(path)[1]["facts"]["reason"]) == 500
    for file in (path, log.decisions_path):
        assert file.stat().st_mode & 0o777 == 0o600 and b"\x1b" not in file.read_bytes()


def test_refusals_are_counted_by_peer_and_kind_whatever_their_text(tmp_path):
    """One certificate, a day long, each refusal with another text: no line of before is pushed out."""
    path, clock = tmp_path / "audit.log", [0.0]
    with AuditLog(path, now=lambda: clock[0]) as log:
        log.append("refused", peer="first", reason="a trace")
        for number in range(1000):
            clock[0] = number * 6.0
            log.append("refused", peer="evil", reason=f"{number}")
    first, *of_evil = events(path)
    assert first["facts"]["reason"] == "a trace" and len(of_evil) < 300
    assert sum(event["repeats"] or 1 for event in of_evil) == 1000


def test_many_addresses_are_counted_together(tmp_path):
    path, clock = tmp_path / "audit.log", [0.0]
    with AuditLog(path, now=lambda: clock[0]) as log:
        for number in range(10_000):
            log.append("stranger", address=f"10.0.{number >> 8}.{number & 255}", reason="no certificate")
        log.append("refused", peer="a", reason="of another kind")
    result = events(path)
    assert len(result) <= 70 and result[-1]["repeats"] > 9_000
    assert any(event["kind"] == "refused" for event in result)


def test_a_flood_fills_no_disk_and_washes_no_decision_away(tmp_path, monkeypatch):
    path, clock = tmp_path / "audit.log", [0.0]
    monkeypatch.setattr(audit, "MAX_PART_BYTES", 2000)
    monkeypatch.setattr(audit, "NUM_PARTS", 3)
    with AuditLog(path, now=lambda: clock[0]) as log:
        log.append("ban", peer="liar")
        for number in range(200):
            log.append("refused", peer=f"{number}", reason="x" * 10_000)
            clock[0] += 61
    sizes = [p.stat().st_size for p in tmp_path.iterdir()]
    assert len(sizes) == 4 and max(sizes) <= 2000
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in tmp_path.iterdir())
    assert [event["kind"] for event in events(log.decisions_path)] == ["ban"]


def test_a_disk_that_takes_no_line_is_told(tmp_path):
    with pytest.raises(OSError, match="directory"):
        AuditLog(tmp_path)
    with AuditLog(tmp_path / "audit.log") as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(log._counted, "shouldRollover", lambda record: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            log.append("refused")
