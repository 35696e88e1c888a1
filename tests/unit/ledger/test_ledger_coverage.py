"""Receipts and coverage: what holds is shown, what was forged, lost, repeated or moved is found and named."""

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import LedgerError
from forebay.ledger import writer
from forebay.ledger.chain import Checkpoint, Used, make_entry
from forebay.ledger.index import open_index
from forebay.ledger.verify import cover, verify_ledger
from forebay.ledger.writer import Ledger
from forebay.network.peer import Scope
from forebay.observe.ledger_queries import replay
from support.ledgers import KEY, WORKER, WORKER_KEY, certificate_of, certify, sign, verified, write_job
from support.paths import GOLDEN


def append(path: Path, *entries: tuple[str, dict]):
    with Ledger.open(path, sign, now=lambda: 6.0) as ledger:
        for kind, body in entries:
            ledger.append(kind, body, sync=False)


USES = [Used("a", 0, 0, 0, 4, 2), Used("a", 0, 0, 4, 8, 4), Used("b", 0, 2, 0, 5, 7)]


# Coverage.

_INTERVALS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 7)), max_size=12)


@given(st.lists(st.integers(0, 7), min_size=4, max_size=4), _INTERVALS, _INTERVALS)
def test_coverage_equals_counting_points(samples, uses, gone):
    def fitting(rows):
        return [(i, a, min(a + n, samples[i])) for i, a, n in rows if a < samples[i]]

    uses_in, gone_in = fitting(uses), fitting(gone)
    table = np.array(uses_in, np.int64).reshape(-1, 3)
    result = cover(np.array(samples, np.int64), table[:, 0], table[:, 1], table[:, 2], gone_in)
    points = [np.zeros(n, np.int64) for n in samples]
    aside = [np.zeros(n, bool) for n in samples]
    for i, a, b in uses_in:
        points[i][a:b] += 1
    for i, a, b in gone_in:
        aside[i][a:b] = True
    flat, remaining = np.concatenate(points), np.concatenate(aside)
    assert result.counts["samples"] == flat.sum()
    assert result.counts["repeated"] == np.maximum(flat - 1, 0).sum()
    assert result.counts["missing"] == ((flat == 0) & ~remaining).sum()
    assert result.counts.get("set_aside", 0) == ((flat == 0) & remaining).sum()


# What verify finds and names.


def test_uses_after_the_end_of_their_epoch_are_found(tmp_path):
    path = tmp_path / "l"
    write_job(path, USES)
    append(path, ("epoch", {"epoch": 0, "samples": 13}))
    assert verified(path).ok
    append(path, ("uses", {"worker": WORKER, "uses": [Used("c", 0, 2, 0, 5, 9).to_row()], "receipt": ""}))
    assert "which had ended" in str(verify_ledger(path).problems)
    append(path, ("epoch", {"epoch": 0}))
    assert "had ended before" in str(verify_ledger(path).problems)


def test_set_aside_is_told_from_missing(tmp_path):
    path = tmp_path / "l"
    write_job(path, USES[:2])
    assert verify_ledger(path).missing == [{"epoch": 0, "slice": 2, "start": 0, "stop": 5}]
    append(path, ("set_aside", {"epoch": 0, "slice": 2, "start": 1, "stop": 5, "reason": "unreadable"}))
    (epoch,) = verify_ledger(path).epochs
    assert epoch == {"epoch": 0, "samples": 8, "missing": 1, "repeated": 0, "set_aside": 4}
    append(path, ("readmitted", {"slice": 2}))
    assert verify_ledger(path).epochs == [{"epoch": 0, "samples": 8, "missing": 5, "repeated": 0}]


def test_forged_repeated_and_moved_receipts_are_named(tmp_path):
    write_job(tmp_path / "forged", USES, forge=0)
    report = verified(tmp_path / "forged")
    assert not report.intact and report.problems[0].startswith("entry 2 (uses)")
    write_job(tmp_path / "twice", [*USES, USES[1]])
    report = verified(tmp_path / "twice")
    assert (
        report.intact
        and not report.ok
        and report.repeated == [{"epoch": 0, "slice": 0, "start": 4, "stop": 8, "entry": 3}]
    )
    write_job(tmp_path / "moved", [USES[1], USES[0], USES[2]])
    assert "out of order: lease a of slice 0" in verified(tmp_path / "moved").problems[0]
    write_job(tmp_path / "skipped", [USES[0], Used("a", 0, 0, 6, 8, 4)])
    report = verified(tmp_path / "skipped")
    assert "expected 4" in report.problems[0] and report.missing[0] == {"epoch": 0, "slice": 0, "start": 4, "stop": 6}


VALID, ENDED = certificate_of(WORKER_KEY, stop=-55), certificate_of(WORKER_KEY, stop=-56)


@pytest.mark.parametrize(
    "certificates, problem",
    [
        ([""], "expected a certificate of worker"),
        ([certificate_of(b"x" * 32)], "is not that of worker"),
        ([certificate_of(WORKER_KEY, start=6)], "no certificate in this ledger that was valid then"),
        ([VALID, ENDED], "no certificate in this ledger that was valid then"),
        ([ENDED, VALID], ""),
    ],
)
def test_a_worker_is_believed_by_its_last_certificate_if_it_was_valid_then(tmp_path, certificates, problem):
    write_job(tmp_path / "l", USES, certificates=certificates)
    report = verified(tmp_path / "l")
    assert report.ok == (not problem) and problem in str(report.problems)
    assert verify_ledger(tmp_path / "l").ok == (certificates != [""])


@pytest.mark.parametrize(
    "scope, key, problem",
    [
        (Scope(frozenset({"scheduler"})), KEY, "certificate for a worker"),
        (Scope(frozenset({"worker"}), ("other",)), KEY, "certificate for a worker"),
        (Scope(frozenset({"worker"})), WORKER_KEY, "expected another key than the scheduler's"),
        (Scope(frozenset({"worker"})), KEY, ""),
    ],
)
def test_who_is_no_worker_signs_no_receipt(tmp_path, scope, key, problem):
    write_job(tmp_path / "l", USES)
    report = verify_ledger(tmp_path / "l", key, lambda *_: None, certify=lambda raw: replace(certify(raw), scope=scope))
    assert report.ok == (not problem) and problem in str(report.problems)


def test_receipts_by_sample_ids(tmp_path):
    write_job(tmp_path / "plain", USES)
    job = open_index(tmp_path / "plain").job
    signed = [Used(*use.to_row(), replay(job, use.epoch, use.slice, use.start, use.stop)[1]) for use in USES]
    write_job(tmp_path / "right", signed)
    assert verified(tmp_path / "right", replay=replay).ok
    write_job(tmp_path / "wrong", [signed[0], Used(*USES[1].to_row(), signed[0].digest), signed[2]])
    assert verified(tmp_path / "wrong").ok
    assert "it read other samples" in verified(tmp_path / "wrong", replay=replay).problems[0]


# Writing.


def test_a_checkpoint_reads_the_tail_only_and_one_that_does_not_fit_is_not_used(tmp_path):
    path = tmp_path / "l"
    write_job(path, USES)
    with Ledger.open(path, sign) as ledger:
        mark = Checkpoint.from_json(json.loads(json.dumps(asdict(ledger.checkpoint()))))
        assert list(ledger.entries(mark.seq, mark)) == []
        ledger.append("paused", {})
        assert [e.kind for e in ledger.entries(mark.seq, mark)] == ["paused"]
    size = path.stat().st_size
    with Ledger.open(path, sign, checkpoint=mark) as ledger:
        assert ledger.next_seq == mark.seq + 1 and ledger.read_bytes < size / 2
        assert ledger.first.kind == "job"
        ledger.append("resumed", {})
    for change in (
        {"prev": "0" * 64}, {"size": mark.size - 1}, {"size": 10 * size}, {"seq": mark.seq - 1}, {"first": "1" * 64}
    ):  # fmt: skip
        with Ledger.open(path, sign, checkpoint=replace(mark, **change)) as ledger:
            assert ledger.next_seq == mark.seq + 2 and ledger.read_bytes == path.stat().st_size
    assert verified(path).intact
    assert Checkpoint.from_json({"seq": 1}) is None and Checkpoint.from_json(None) is None


def test_entries_behind_a_forged_one_are_not_signed_over(tmp_path):
    path = tmp_path / "l"
    write_job(path, USES)
    with Ledger.open(path, sign) as ledger:
        pass
    forged = make_entry(ledger.next_seq, ledger._prev, 7.0, "paused", {}, lambda message: b"mine")
    with path.open("ab") as file:
        file.write(forged.line + b"\n")
    with pytest.raises(LedgerError, match="not signed with this scheduler's key"):
        Ledger.open(path, sign)
    report = verified(path)
    assert not report.intact and "entry 4 (paused): it is not signed" in report.problems[0]


def test_a_full_disk_leaves_it_whole(tmp_path, monkeypatch):
    path = tmp_path / "l"
    with Ledger.open(path, sign) as ledger:
        ledger.append("job", {"samples_per_slice": [8, 0, 5], "scheduler": KEY.hex()})
        with monkeypatch.context() as patch:
            full = writer.os.write
            patch.setattr(writer.os, "write", lambda fd, data: full(fd, data[:9]))
            with pytest.raises(LedgerError, match="Is the disk full"):
                ledger.append("paused", {})
        ledger.append("paused", {})
        ledger.append("resumed", {}, sync=False)
        with monkeypatch.context() as patch:

            def no_room(fd):
                raise OSError(28, "No space left on device")

            patch.setattr(writer.os, "fsync", no_room)
            with pytest.raises(LedgerError, match="cannot flush"):
                ledger.sync()
        with pytest.raises(LedgerError, match="start again"):
            ledger.append("resumed", {})
    with Ledger.open(path, sign) as ledger:
        assert [e.kind for e in ledger.entries()] == ["job", "paused"] and ledger.truncated_bytes == 0


def test_a_torn_line_that_stays_ends_a_ledger_until_it_is_opened_again(tmp_path, monkeypatch):
    def fail(fd, size):
        raise OSError(errno.EIO, "cannot")

    write = os.write
    with Ledger.open(tmp_path / "l", sign) as ledger:
        ledger.append("job", {})
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        monkeypatch.setattr(os, "ftruncate", fail)
        for _ in range(2):
            with pytest.raises(LedgerError, match="10 of"):
                ledger.append("note", {})
            monkeypatch.undo()
    with Ledger.open(tmp_path / "l", sign) as ledger:
        assert ledger.truncated_bytes == 10
        assert ledger.append("note", {"n": 3}).seq == 1


def test_the_form_on_disk(tmp_path):
    """The bytes of format 3: a change of them changes what all ledgers are."""
    path = tmp_path / "l"
    write_job(path, USES)
    golden = GOLDEN / "ledger.jsonl"
    assert path.read_bytes() == golden.read_bytes()
    assert verified(golden).ok and not verified(golden, b"x" * 32).ok
