"""The journal: killed anywhere, the scheduler's memory comes back with nothing lost and nothing twice."""

import os
import threading

import pytest

from forebay.errors import LedgerError, StateError
from forebay.lease.messages import ExchangeRequest, FailedLease
from forebay.ledger.verify import verify_ledger
from forebay.ledger.writer import Ledger
from forebay.peer_id import peer_id_of
from forebay.scheduler import journal as journals
from forebay.scheduler.journal import JOURNAL_NAME, LEDGER_NAME, Journal
from support.scheduling import finish, full_use, lease, open_journal, record, signer, use

WORKER = peer_id_of(b"k" * 32)


def kill(journal: Journal):
    """Leave the files as a kill does."""
    journal.database.close()
    os.close(journal.ledger.fd)
    journal.ledger.fd = -1
    journal._files.close()  # Only the lock: the others are closed.


def test_each_start_knows_every_lease_and_reads_only_what_is_new(tmp_path):
    with open_journal(tmp_path, samples=[500]) as journal:
        grant = lease(journal, "w")
        for start in range(300):
            use(journal, "w", grant, start, start + 1)
        kill(journal)
    for _ in range(3):
        with open_journal(tmp_path, samples=[500], now=500.0) as journal:
            assert list(journal.core.table.leases) == [grant.lease_id] and journal.core.table.used == 300
            assert journal.core.table.sessions.all["w", "s"].deadline == 510.0
            assert use(journal, "w", grant, 299, 300).uses[0].offset == 300 and journal.ledger.next_seq == 301
            assert journal.ledger.read_bytes < (tmp_path / LEDGER_NAME).stat().st_size / 4
            kill(journal)


def test_a_lost_journal_is_rebuilt_from_the_ledger(tmp_path):
    with open_journal(tmp_path) as journal:
        for _ in range(2):
            grant = lease(journal, "w")
            use(journal, "w", grant, grant.start, grant.start + 1)
            record(journal, "w", release=(grant.lease_id,))
        journal.wait(journal.put(journal.core.pause(True)))
        live = len(journal.core.table.leases)
        used = journal.core.table.used_before + journal.core.table.used
    for path in tmp_path.glob(JOURNAL_NAME + "*"):
        path.unlink()
    with open_journal(tmp_path) as journal:
        job = journal.core
        assert (job.table.used_before + journal.core.table.used, job.paused, live) == (used, True, 0)
        journal.wait(journal.put(journal.core.pause(False)))
        finish(journal)
    (tmp_path / JOURNAL_NAME).write_bytes(b"not a database" * 100)
    with open_journal(tmp_path) as journal:
        assert journal.core.table.done
    assert verify_ledger(tmp_path / LEDGER_NAME).ok


def test_a_use_that_only_the_ledger_knows_ends_what_the_journal_thinks_is_leased(tmp_path):
    """As after a loss of power: the cut and the thief's lease are gone, what the thief used is not."""
    with open_journal(tmp_path, samples=[10]) as journal:
        grant = lease(journal, "w")
        kill(journal)
    ledger = Ledger.open(tmp_path / LEDGER_NAME, signer)
    ledger.append("uses", {"worker": "thief", "uses": [["gone", 0, 0, 6, 9, 1]], "receipt": "ab"})
    ledger.close()
    with open_journal(tmp_path, samples=[10]) as journal:
        assert record(journal, "w", known_leases=(grant.lease_id,)).lost == (grant.lease_id,)
        finish(journal)
    assert verify_ledger(tmp_path / LEDGER_NAME).ok


def test_a_slice_set_aside_is_in_the_ledger_and_stays_so(tmp_path):
    with open_journal(tmp_path) as journal:
        grant = lease(journal, "w")
        record(journal, "w", failed=(FailedLease(grant.lease_id, "torn"),))
    for path in tmp_path.glob(JOURNAL_NAME + "*"):
        path.unlink()
    with open_journal(tmp_path) as journal:
        assert journal.core.reasons == {grant.slice: "torn"}
        finish(journal)
    for share in (0.0, 0.01):
        assert not verify_ledger(tmp_path / LEDGER_NAME, max_set_aside=share).ok
    report = verify_ledger(tmp_path / LEDGER_NAME, max_set_aside=1.0)
    assert report.ok
    assert [epoch["set_aside"] for epoch in report.epochs] == [grant.count, grant.count]


def test_a_ledger_of_another_job_is_refused_and_a_second_scheduler_too(tmp_path):
    open_journal(tmp_path).close()
    for changes in ({"dataset_id": "2" * 64}, {"seed": 2}, {"seq_len": 9}, {"scheduler": "11" * 32}):
        with pytest.raises(StateError, match="another job"):
            open_journal(tmp_path, **changes)
    with open_journal(tmp_path), pytest.raises(LedgerError, match="another process"):
        open_journal(tmp_path)


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.parametrize("step", ["before ledger", "after ledger", "in database"])
def test_killed_between_any_two_steps(tmp_path, step, monkeypatch):
    journal = open_journal(tmp_path)
    grant = lease(journal, "w")

    def die(*args, **settings):
        raise Killed

    if step == "before ledger":
        monkeypatch.setattr(journal.ledger, "append", die)
    elif step == "after ledger":
        sync = journal.ledger.sync
        monkeypatch.setattr(journal.ledger, "sync", lambda: die(sync()))
    else:
        monkeypatch.setattr(journals, "to_row", die)
    with pytest.raises(Killed):
        use(journal, "w", grant, 0, 2)
    monkeypatch.undo()
    kill(journal)
    with open_journal(tmp_path, now=500.0) as journal:
        assert journal.core.table.sessions.all["w", "s"].deadline == 510.0
        assert journal.core.table.used_before + journal.core.table.used == (0 if step == "before ledger" else 2)
        assert use(journal, "w", grant, 0, 2).uses[0].offset == 2
        finish(journal)
    assert verify_ledger(tmp_path / LEDGER_NAME).ok


@pytest.mark.parametrize("fault", [LedgerError("no space"), MemoryError("no space")])
def test_what_could_not_be_written_is_not_answered_then_or_later(fault, tmp_path, monkeypatch):
    journal = open_journal(tmp_path)
    grant = lease(journal, "w")

    def full():
        raise fault

    monkeypatch.setattr(journal.ledger, "sync", full)
    with pytest.raises(LedgerError, match="no space"):
        use(journal, "w", grant, 0, 2)
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="no space"):
        use(journal, "w", grant, 0, 2)
    journal.close()
    with open_journal(tmp_path) as journal:
        assert use(journal, "w", grant, 0, 2).uses[0].offset == 2
        finish(journal)
    assert verify_ledger(tmp_path / LEDGER_NAME).ok


def test_who_waits_together_shares_one_fsync(tmp_path, monkeypatch):
    with open_journal(tmp_path, samples=[1] * 40) as journal:
        tickets = []
        for number in range(20):
            grant = journal.core.exchange(f"w{number}", ExchangeRequest(session="s", want=1), 0.0)[0].leases[0]
            request = ExchangeRequest(session="s", uses=(full_use(grant),), signature="ab")
            _, happened = journal.core.exchange(f"w{number}", request, 0.0)
            tickets.append(journal.put(happened))
        syncs, sync = [], os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: (syncs.append(fd), sync(fd)))
        threads = [threading.Thread(target=journal.wait, args=(ticket,)) for ticket in tickets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert syncs.count(journal.ledger.fd) == 1 and journal.ledger.next_seq == 21
