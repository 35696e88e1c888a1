"""The journal: killed anywhere, the scheduler's memory comes back with nothing lost and nothing twice.

FOREBAY_JOURNAL_ENTRIES=1000000 restarts from that many entries and 250,000 slices, instead of a hundredth of them;
with --timeout 600, for to write them takes three minutes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from forebay.errors import LedgerError, StateError
from forebay.lease.messages import ExchangeRequest, ExchangeResult, FailedLease, LeaseGrant
from forebay.ledger.chain import Used
from forebay.ledger.verify import verify_ledger
from forebay.ledger.writer import Ledger
from forebay.peer_id import peer_id_of
from forebay.scheduler import journal as journals
from forebay.scheduler.events import WorkerEnlisted
from forebay.scheduler.journal import JOURNAL_NAME, LEDGER_NAME, Journal, job_body
from forebay.scheduler.leases import JobSpec
from support.calibration import scaled

WORKER = peer_id_of(b"k" * 32)
SAMPLES = [4, 0, 3, 5]


def signer(message: bytes) -> bytes:
    return b"signature"


def open_journal(
    directory: Path, epochs: int = 2, now: float = 0.0, samples: list[int] | None = None, **changes: object
) -> Journal:
    counts = np.array(SAMPLES if samples is None else samples, np.int64)
    settings = {"seed": 1, "epochs": epochs, "lease_s": 10.0, "max_failures": 1}
    settings |= {key: changes.pop(key) for key in ("seed",) if key in changes}
    spec = JobSpec("d", str(changes.pop("dataset_id", "1" * 64)), counts, **settings)  # type: ignore[arg-type]
    body = job_body(spec, **({"seq_len": 8, "layout": "tokens", "scheduler": "00" * 32} | changes))
    salt = f"{time.monotonic_ns():x}"
    return Journal.open(directory, spec, body, signer, salt=salt, now=lambda: now)


def say(journal: Journal, worker: str, ask: ExchangeRequest, now: float = 0.0) -> ExchangeResult:
    reply, happened = journal.core.exchange(worker, ask, now)
    journal.wait(journal.put(happened))
    return reply


def lease(journal: Journal, worker: str) -> LeaseGrant:
    (grant,) = say(journal, worker, ExchangeRequest(session="s", want=1)).leases
    return grant


def use(journal: Journal, worker: str, grant: LeaseGrant, start: int, stop: int) -> ExchangeResult:
    used = Used(grant.lease_id, grant.epoch, grant.slice, start, stop, 1)
    return say(journal, worker, ExchangeRequest(session="s", uses=(used,), signature="ab"))


def kill(journal: Journal) -> None:
    """What a kill leaves: the files as they are."""
    journal._database.close()
    os.close(journal.ledger._fd)
    journal.ledger._fd = -1
    journal._files.close()  # Only the lock: the others are closed.


def finish(journal: Journal) -> None:
    now = 0.0
    while not journal.core.table.done:
        now += 1e3
        journal.wait(journal.put(journal.core.expire(now)))
        for grant in say(journal, "last", ExchangeRequest(session=str(now), want=1), now).leases:
            used = Used(grant.lease_id, grant.epoch, grant.slice, grant.start, grant.stop, 1)
            say(journal, "last", ExchangeRequest(session=str(now), uses=(used,), signature="ab"), now)


def test_everything_comes_back(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.wait(journal.put([WorkerEnlisted(WORKER, (b"k" * 32).hex(), "worker")]))
        item = lease(journal, "w")
        use(journal, "w", item, 0, 2)
        other = lease(journal, "v")
        say(journal, "v", ExchangeRequest(session="s", release=(other.lease_id,)))
        before = journal.core.snapshot()
        kill(journal)
    with open_journal(tmp_path, now=500.0) as journal:
        table = journal.core.table
        assert list(table.leases) == [item.lease_id]
        assert table.sessions.all["w", "s"].deadline == 510.0
        assert journal.core.snapshot()["table"] == before["table"]
        entries = journal.ledger.next_seq
        # The receipt whose answer was lost is asked again, and recorded once.
        assert use(journal, "w", item, 0, 2).uses[0].offset == 2
        assert journal.ledger.next_seq == entries == 3
        finish(journal)
    report = verify_ledger(tmp_path / LEDGER_NAME)
    assert report.ok


def test_a_lost_journal_is_rebuilt_from_the_ledger(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        for _ in range(2):
            grant = lease(journal, "w")
            use(journal, "w", grant, grant.start, grant.start + 1)
            say(journal, "w", ExchangeRequest(session="s", release=(grant.lease_id,)))
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


def test_a_use_that_only_the_ledger_knows_ends_what_the_journal_thinks_is_leased(tmp_path: Path) -> None:
    """As after a loss of power: the cut and the thief's lease are gone, what the thief used is not."""
    with open_journal(tmp_path, samples=[10]) as journal:
        grant = lease(journal, "w")
        kill(journal)
    ledger = Ledger.open(tmp_path / LEDGER_NAME, signer)
    ledger.append("uses", {"worker": "thief", "uses": [["gone", 0, 0, 6, 9, 1]], "receipt": "ab"})
    ledger.close()
    with open_journal(tmp_path, samples=[10]) as journal:
        assert say(journal, "w", ExchangeRequest(session="s", known_leases=(grant.lease_id,))).lost == (grant.lease_id,)
        finish(journal)
    assert verify_ledger(tmp_path / LEDGER_NAME).ok


def test_a_slice_set_aside_is_in_the_ledger_and_stays_so(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        grant = lease(journal, "w")
        say(journal, "w", ExchangeRequest(session="s", failed=(FailedLease(grant.lease_id, "torn"),)))
    for path in tmp_path.glob(JOURNAL_NAME + "*"):
        path.unlink()
    with open_journal(tmp_path) as journal:
        assert journal.core.reasons == {grant.slice: "torn"}
        finish(journal)
    assert (
        not verify_ledger(tmp_path / LEDGER_NAME).ok
        and not verify_ledger(tmp_path / LEDGER_NAME, max_set_aside=0.01).ok
    )
    report = verify_ledger(tmp_path / LEDGER_NAME, max_set_aside=1.0)
    assert report.ok
    assert [epoch["set_aside"] for epoch in report.epochs] == [grant.count, grant.count]


def test_a_ledger_of_another_job_is_refused_and_a_second_scheduler_too(tmp_path: Path) -> None:
    open_journal(tmp_path).close()
    for changes in ({"dataset_id": "2" * 64}, {"seed": 2}, {"seq_len": 9}, {"scheduler": "11" * 32}):
        with pytest.raises(StateError, match="another job"):
            open_journal(tmp_path, **changes)
    with open_journal(tmp_path), pytest.raises(StateError, match="another process"):
        open_journal(tmp_path)


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.parametrize("step", ["before ledger", "after ledger", "in database"])
def test_killed_between_any_two_steps(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path)
    grant = lease(journal, "w")

    def die(*args: object, **settings: object) -> None:
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
    with open_journal(tmp_path) as journal:
        assert journal.core.table.used_before + journal.core.table.used == (0 if step == "before ledger" else 2)
        assert use(journal, "w", grant, 0, 2).uses[0].offset == 2
        finish(journal)
    assert verify_ledger(tmp_path / LEDGER_NAME).ok


@pytest.mark.parametrize("fault", [LedgerError("no space"), MemoryError("no space")])
def test_what_could_not_be_written_is_not_answered_then_or_later(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(tmp_path)
    grant = lease(journal, "w")

    def full() -> None:
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


def test_who_waits_together_shares_one_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_journal(tmp_path, samples=[1] * 40) as journal:
        tickets = []
        for number in range(20):
            grant = journal.core.exchange(f"w{number}", ExchangeRequest(session="s", want=1), 0.0)[0].leases[0]
            used = Used(grant.lease_id, 0, grant.slice, 0, 1, 1)
            _, happened = journal.core.exchange(
                f"w{number}", ExchangeRequest(session="s", uses=(used,), signature="ab"), 0.0
            )
            tickets.append(journal.put(happened))
        syncs, sync = [], os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: (syncs.append(fd), sync(fd)))
        threads = [threading.Thread(target=journal.wait, args=(ticket,)) for ticket in tickets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(syncs) == 1 and journal.ledger.next_seq == 21


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from unit.scheduler.test_journal import finish, open_journal
from forebay.scheduler import journal as journals
journals.SNAPSHOT_EVENTS = 9
journal = open_journal(Path(sys.argv[1]), epochs=40)
print("up", flush=True)
finish(journal)
"""


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    chance = random.Random(7)
    for _ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), str(Path(__file__).parent)], stdout=subprocess.PIPE
        )
        with child:
            assert child.stdout is not None and child.stdout.readline() == b"up\n"
            time.sleep(chance.uniform(0.0, 0.08))
            child.send_signal(signal.SIGKILL)
    with open_journal(tmp_path, epochs=40) as journal:
        finish(journal)
    report = verify_ledger(tmp_path / LEDGER_NAME)
    assert report.ok and len(report.epochs) == 40, report.problems


def test_a_restart_does_not_read_the_whole_ledger(tmp_path: Path) -> None:
    entries = int(os.environ.get("FOREBAY_JOURNAL_ENTRIES", "10000"))
    num_slices = entries // 4
    with open_journal(tmp_path, epochs=2, samples=[8] * num_slices) as journal:
        for number in range(num_slices):
            reply, granted = journal.core.exchange("w", ExchangeRequest(session="s", want=1), 0.0)
            (grant,) = reply.leases
            happened = list(granted)
            for start in range(0, 8, 2):
                used = Used(grant.lease_id, grant.epoch, grant.slice, start, start + 2, 1)
                happened += journal.core.exchange(
                    "w", ExchangeRequest(session="s", uses=(used,), signature="ab" * 64), 0.0
                )[1]
            ticket = journal.put(happened)
            if number % 500 == 0:
                journal.wait(ticket)
        journal.wait(ticket)
        kill(journal)
    started = time.perf_counter()
    with open_journal(tmp_path, epochs=2, samples=[8] * num_slices) as journal:
        took_s = time.perf_counter() - started
        assert journal.core.table.used_before + journal.core.table.used == 8 * num_slices
        assert journal.ledger.read_bytes < 100_000
    print(f"restart: {took_s:.2f} s, {entries:,} entries, {num_slices:,} slices")
    assert took_s < scaled(2.0)
