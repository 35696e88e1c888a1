"""Access lists and quotas, the audit log, publishers' signatures: files and rules."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import LedgerError, ProtocolViolation, UsageError
from forebay.network.access import Access
from forebay.network.audit import AuditLog, read_audit
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
    with pytest.raises(UsageError, match="access list"):
        rules(tmp_path / "a.toml", text)


# The audit log.


def events(path: Path) -> list[tuple[int, str, int]]:
    return [(event.seq, event.kind, event.repeats) for event in read_audit(path)]


def test_events_follow_each_other_through_restarts(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    with AuditLog(path) as log:
        log.append("refused", peer="a", reason="revoked")
        log.append("ban", peer="b", num=3)
    path.write_bytes(path.read_bytes() + b'{"seq": 3, "at"')  # a killed process
    with AuditLog(path) as log:
        log.append("admitted", peer="c")
    assert events(path) == [(1, "refused", 0), (2, "ban", 0), (3, "admitted", 0)]
    assert next(read_audit(path)).facts == {"peer": "a", "reason": "revoked"}
    assert path.stat().st_mode & 0o777 == 0o600


@given(st.integers(0, 2), st.integers(0, 400), st.sampled_from(["flip", "drop", "swap"]))
def test_any_change_is_noticed(tmp_path_factory: pytest.TempPathFactory, line: int, at: int, how: str) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.log"
    path.unlink(missing_ok=True)
    with AuditLog(path) as log:
        for number in range(4):
            log.append("refused", number=number)
    lines = path.read_bytes().splitlines(keepends=True)
    if how == "flip":
        at %= len(lines[line]) - 1
        lines[line] = lines[line][:at] + bytes([lines[line][at] ^ 1]) + lines[line][at + 1 :]
    elif how == "drop":
        del lines[line + (line == 0)]  # the first ones may have been rotated away
    else:
        lines[line], lines[line + 1] = lines[line + 1], lines[line]
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match="audit"):
        list(read_audit(path))


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
    kept = list(read_audit(path))
    assert [event.seq for event in kept] == list(range(kept[0].seq, kept[-1].seq + 1))
    assert any(event.repeats == 499 for event in kept if event.facts["reason"] == "the same") or kept[-1].repeats
    assert kept[0].seq > 1


def test_logs_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--audit FILE"):
        list(read_audit(tmp_path / "none"))
    (tmp_path / "other").write_bytes(b"hello\n")
    with pytest.raises(LedgerError, match="line of JSON"):
        AuditLog(tmp_path / "other")


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
