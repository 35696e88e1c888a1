"""Access lists and quotas, the audit log, publishers' signatures: files and rules."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ProtocolViolation, UsageError
from forebay.network.access import Access
from forebay.network.audit import AuditLog
from forebay.network.identity import Identity, revoke
from forebay.network.peer import Peer, Scope
from forebay.network.publish import SIGNATURE_NAME, check_publication, read_publication, sign_dataset

Make = Callable[[str], Identity]
DAY_S = 86400
ID = "ab" * 32
ANNE = Peer("a" * 32, b"", "anne", "o" * 32)
BERT = Peer("b" * 32, b"", "bert", "o" * 32, Scope(frozenset({"worker"})))
CARL = Peer("c" * 32, b"", "carl", "", Scope(frozenset({"data"})))


def rules(path: Path, text: str) -> Access:
    path.write_text(text)
    return Access.load(path)


def test_scopes_count_without_a_file() -> None:
    narrow = Peer("n" * 32, b"", "n", "", Scope(datasets=("c4-*",)))
    assert Access().check(narrow, "c4-en", ID, 1 << 40, 0.0) is None
    assert "does not cover dataset 'books'" in str(Access().check(narrow, "books", ID, 0, 0.0))


@pytest.mark.parametrize(
    ("rule", "admitted"),
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
def test_who_may_read(rule: str, admitted: str, tmp_path: Path) -> None:
    access = rules(tmp_path / "a.toml", f'[[dataset]]\nname = "c4-*"\n{rule}\n')
    allowed = [peer.peer_id[0] for peer in (ANNE, BERT, CARL) if access.check(peer, "c4-en", ID, 9, 0.0) is None]
    assert "".join(allowed) == admitted
    assert access.check(CARL, "books", ID, 9, 0.0) is None
    access.close()


def test_a_quota_holds_over_restarts_and_ends_with_the_day(tmp_path: Path) -> None:
    text = f'[[dataset]]\nid = "{ID}"\nbytes_per_day = "100"\norg_bytes_per_day = 150\n'
    access = rules(tmp_path / "a.toml", text)
    assert access.check(ANNE, "x", ID, 60, 5.0) is None
    assert "60 of 100" in str(access.check(ANNE, "x", ID, 41, 5.0))
    assert access.check(ANNE, "x", ID, 40, 5.0) is None
    again = Access.load(tmp_path / "a.toml")  # as after kill -9: nothing was closed
    assert "peer:" in str(again.check(ANNE, "x", ID, 1, 5.0)) and again.check(ANNE, "x", ID, 0, 5.0) is None
    assert again.check(BERT, "x", ID, 50, 5.0) is None
    assert "org:" in str(again.check(BERT, "x", ID, 1, 5.0))
    assert again.check(CARL, "x", ID, 100, 5.0) is None
    assert again.check(ANNE, "x", ID, 100, 5.0 + DAY_S) is None
    access.close(), again.close()


def test_rules_are_read_again_and_garbled_ones_let_nobody_in(tmp_path: Path) -> None:
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
    "text",
    [
        "[[dataset]]\n",
        '[[dataset]]\nname = "a"\nid = "b"\n',
        '[[dataset]]\nname = "a"\nalow = []\n',
        '[[dataset]]\nname = "a"\nallow = ["everyone"]\n',
        '[[dataset]]\nname = "a"\nallow = ["role:king"]\n',
        '[[dataset]]\nname = "a"\nbytes_per_day = "much"\n',
        "dataset = 3\n",
        "quota = 3\n",
        "\x00",
    ],
)
def test_rules_that_make_no_sense(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"access list|expected TOML"):
        rules(tmp_path / "a.toml", text)


# The audit log.


def events(path: Path) -> list[dict[str, Any]]:
    """Those of all parts, the oldest first."""
    parts = sorted(path.parent.glob("audit.log*"), reverse=True)
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


def test_events_follow_each_other_through_restarts(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    with AuditLog(path) as log:
        log.append("refused", peer="a", reason="revoked")
        log.append("ban", peer="b", num=3, reason="\x1b[2J")
    with AuditLog(path) as log:
        log.append("admitted", peer="c")
        log.close()
    assert [(one["kind"], one["repeats"]) for one in events(path)] == [("refused", 0), ("ban", 0), ("admitted", 0)]
    assert events(path)[0]["facts"] == {"peer": "a", "reason": "revoked"}
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"\x1b" not in path.read_bytes()


def test_a_flood_fills_no_disk(tmp_path: Path) -> None:
    path, clock = tmp_path / "audit.log", [0.0]
    with AuditLog(path, part_bytes=2000, num_parts=3, now=lambda: clock[0]) as log:
        for number in range(100):
            log.append("refused", reason="x" * 10_000, number=number)
            for _ in range(50):
                log.append("refused", reason="the same")
            clock[0] += 1
    sizes = [p.stat().st_size for p in tmp_path.iterdir()]
    assert len(sizes) == 3 and max(sizes) <= 2000
    kept = events(path)
    numbers = [event["facts"]["number"] for event in kept if "number" in event["facts"]]
    assert numbers == list(range(numbers[0], 100)) and numbers[0] > 1
    assert any(event["repeats"] == 499 for event in kept if event["facts"]["reason"] == "the same")
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in tmp_path.iterdir())


def test_a_disk_that_takes_no_line_is_told(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        AuditLog(tmp_path)
    with AuditLog(tmp_path / "audit.log") as log, pytest.MonkeyPatch.context() as patch:
        patch.setattr(log._handler, "shouldRollover", lambda record: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            log.append("refused")


# Publishers.


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "manifest.json").write_text('{"name": "c4"}')
    return tmp_path / "d"


def test_a_publisher_vouches_for_name_and_id(dataset: Path, make_identity: Make) -> None:
    anne, bert = make_identity("anne"), make_identity("bert")
    made = sign_dataset(anne, dataset, "c4", at=5.0)
    data = (dataset / SIGNATURE_NAME).read_bytes()
    assert check_publication(data, "c4", made.dataset_id, {anne.peer_id}, bert.is_revoked) == made
    for name, dataset_id, publishers, why in [
        ("c4", made.dataset_id, {bert.peer_id}, "expected a signature of"),
        ("books", made.dataset_id, {anne.peer_id}, "copied from another dataset"),
        ("c4", ID, {anne.peer_id}, "copied from another dataset"),
    ]:
        with pytest.raises(ProtocolViolation, match=why):
            check_publication(data, name, dataset_id, publishers, bert.is_revoked)
    revoke(bert.node_dir, anne.peer_id)
    with pytest.raises(ProtocolViolation, match="revoked"):
        check_publication(data, "c4", made.dataset_id, {anne.peer_id}, bert.is_revoked)


def test_forged_publications(dataset: Path, make_identity: Make) -> None:
    anne, bert = make_identity("anne"), make_identity("bert")
    sign_dataset(anne, dataset, "c4")
    body = json.loads((dataset / SIGNATURE_NAME).read_bytes())
    for change in (
        {"dataset_id": ID},
        {"name": "books"},
        {"at": 0.0},
        {"key": bert.public_key.hex()},
        {"publisher": bert.peer_id},
        {"signature": os.urandom(64).hex()},
        {"signature": 3},
    ):
        with pytest.raises(ProtocolViolation):
            read_publication(json.dumps({**body, **change}).encode())
    with pytest.raises(ProtocolViolation):
        read_publication(b"[" * 100_000)
    with pytest.raises(ProtocolViolation, match=r"expected format 2, got 1\. Sign it again"):
        read_publication(json.dumps({**body, "format": 1}).encode())
    with pytest.raises(UsageError, match="expected a dataset"):
        sign_dataset(anne, dataset / "none", "c4")
