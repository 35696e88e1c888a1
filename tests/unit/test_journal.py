"""The journal: killed anywhere, the scheduler's memory comes back with nothing lost and nothing twice."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from millrace.errors import LedgerError, StateError
from millrace.ledger import verify_ledger
from millrace.peer_id import peer_id_of
from millrace.schedule.journal import JOURNAL_NAME, LEDGER_NAME, Journal
from millrace.schedule.leases import Lease, LeaseLostError

WORKER = peer_id_of(b"k" * 32)
SAMPLES = np.array([4, 0, 3, 5], np.int64)
JOB = {"name": "d", "dataset_id": "1" * 64, "layout": "tokens", "seq_len": 8, "seed": 1, "scheduler": "00" * 32}


def open_journal(directory: Path, epochs: int = 2, now: float = 0.0, **changes: object) -> Journal:
    return Journal.open(
        directory,
        job={**JOB, **changes},
        samples_per_slice=SAMPLES,
        epochs=epochs,
        lease_s=10.0,
        signer=lambda message: b"signature",
        now=lambda: now,
    )


def grant(journal: Journal, worker: str, lease_id: str) -> Lease:
    lease = journal.grant(worker, "s", lease_id, [], 0.0)
    assert isinstance(lease, Lease)
    return lease


def state(journal: Journal) -> tuple[object, ...]:
    table = journal.table
    return table.epoch, table.offsets.tolist(), table.used, table.num_used_slices, dict(table.remembered)


def finish(journal: Journal) -> None:
    number = 0
    while not journal.table.done:
        number += 1
        journal.expire(1e9)
        lease = journal.grant("last", "s", f"last{number}-{time.monotonic_ns()}", [], 0.0)
        assert isinstance(lease, Lease)
        stop = int(SAMPLES[lease.slice_index])
        journal.use("last", lease.lease_id, lease.start, stop, number, "ab", 0.0)


def test_everything_comes_back(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        journal.register(WORKER, b"k" * 32, "worker")
        journal.register(WORKER, b"k" * 32, "worker")
        lease = grant(journal, "w", "one")
        journal.use("w", "one", 0, 2, 1, "ab", 0.0)
        other = grant(journal, "v", "two")
        journal.release("v", "two")
        before, live = state(journal), dict(journal.table.leases)
        assert other.slice_index != lease.slice_index
    with open_journal(tmp_path, now=500.0) as journal:
        assert state(journal) == before
        assert set(journal.table.leases) == set(live) == {"one"}
        assert journal.table.leases["one"].deadline == 510.0
        journal.register(WORKER, b"k" * 32, "worker")
        assert journal.ledger.next_seq == 3
        # The receipt whose answer was lost is asked again, and recorded once.
        journal.use("w", "one", 0, 2, 1, "ab", 0.0)
        assert journal.ledger.next_seq == 3
        finish(journal)
    assert verify_ledger(tmp_path / LEDGER_NAME).ok


def test_a_lost_journal_is_rebuilt_from_the_ledger(tmp_path: Path) -> None:
    with open_journal(tmp_path) as journal:
        for number in range(2):
            lease = grant(journal, "w", str(number))
            journal.use("w", str(number), lease.start, lease.start + 1, number, "ab", 0.0)
            journal.release("w", str(number))
        grant(journal, "w", "live")
        before = state(journal)
    for path in tmp_path.glob(JOURNAL_NAME + "*"):
        path.unlink()
    with open_journal(tmp_path) as journal:
        assert state(journal) == before
        with pytest.raises(LeaseLostError):
            journal.renew("w", "live", 0.0)
        finish(journal)
    (tmp_path / JOURNAL_NAME).write_bytes(b"not a database" * 100)
    with open_journal(tmp_path) as journal:
        assert journal.table.done
    assert verify_ledger(tmp_path / LEDGER_NAME).ok


def test_a_ledger_of_another_job_is_refused(tmp_path: Path) -> None:
    open_journal(tmp_path).close()
    for changes in ({"dataset_id": "2" * 64}, {"seed": 2}, {"seq_len": 9}, {"scheduler": "11" * 32}):
        with pytest.raises(StateError, match="another job"):
            open_journal(tmp_path, **changes)
    with open_journal(tmp_path), pytest.raises(LedgerError, match="another process"):
        open_journal(tmp_path)


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.parametrize("step", ["before ledger", "after ledger", "in database", "before commit"])
def test_killed_between_any_two_steps(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path)
    lease = grant(journal, "w", "one")

    def die(*args: object) -> None:
        raise Killed

    if step == "before ledger":
        monkeypatch.setattr(journal.ledger, "append", die)
    elif step == "after ledger":
        monkeypatch.setattr(journal, "_transaction", die)
    elif step == "in database":
        monkeypatch.setattr(journal, "_apply", die)
    else:
        apply = journal._apply

        def apply_and_die(*args: object) -> None:
            apply(*args)  # type: ignore[arg-type]
            raise Killed

        monkeypatch.setattr(journal, "_apply", apply_and_die)
    with pytest.raises(Killed):
        journal.use("w", "one", 0, 2, 1, "ab", 0.0)
    journal.close()
    with open_journal(tmp_path) as journal:
        recorded = step != "before ledger"
        assert int(journal.table.offsets[lease.slice_index]) == (2 if recorded else 0)
        journal.use("w", "one", 0, 2, 1, "ab", 0.0)
        assert int(journal.table.offsets[lease.slice_index]) == 2
        finish(journal)
    assert verify_ledger(tmp_path / LEDGER_NAME).ok


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_journal import finish, open_journal
journal = open_journal(Path(sys.argv[1]), epochs=40)
print("up", flush=True)
finish(journal)
"""


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    chance = random.Random(7)
    for _ in range(6):
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
