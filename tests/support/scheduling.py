"""Exchanges with a scheduler's core, by hand, and a scheduler's journal of a small job."""

import secrets
from pathlib import Path
from typing import Any

import numpy as np

from forebay.lease.messages import ExchangeRequest, ExchangeResult, LeaseGrant
from forebay.ledger.chain import Used
from forebay.scheduler.core import SchedulerCore
from forebay.scheduler.journal import Journal, job_body
from forebay.scheduler.leases import JobSpec

SAMPLES = [4, 0, 3, 5]


def exchange(core: SchedulerCore, worker: str, now: float = 0.0, **fields: Any) -> ExchangeResult:
    """Return the core's reply to a request with these fields."""
    return core.exchange(worker, ExchangeRequest(**fields), now)[0]


def full_use(grant: LeaseGrant) -> Used:
    """Return the use of all samples of a lease."""
    return Used(grant.lease_id, grant.epoch, grant.slice, grant.start, grant.stop, 1)


def signer(message: bytes) -> bytes:
    return b"signature"


def open_journal(
    directory: Path, epochs: int = 2, now: float = 0.0, samples: list[int] | None = None, seed: int = 1,
    dataset_id: str = "1" * 64, **body: object,
) -> Journal:  # fmt: skip
    counts = np.array(SAMPLES if samples is None else samples, np.int64)
    spec = JobSpec("d", dataset_id, counts, seed=seed, epochs=epochs, lease_s=10.0, max_failures=1)
    fields = job_body(spec, **({"seq_len": 8, "layout": "tokens", "scheduler": "00" * 32} | body))
    return Journal.open(directory, spec, fields, signer, salt=secrets.token_hex(4), now=lambda: now)


def record(journal: Journal, worker: str, now: float = 0.0, **fields: Any) -> ExchangeResult:
    """Return the reply to a request, once its events are on disk."""
    reply, events = journal.core.exchange(worker, ExchangeRequest(session="s", **fields), now)
    journal.wait(journal.put(events))
    return reply


def lease(journal: Journal, worker: str) -> LeaseGrant:
    (grant,) = record(journal, worker, want=1).leases
    return grant


def use(journal: Journal, worker: str, grant: LeaseGrant, start: int, stop: int) -> ExchangeResult:
    used = Used(grant.lease_id, grant.epoch, grant.slice, start, stop, 1)
    return record(journal, worker, uses=(used,), signature="ab")


def finish(journal: Journal) -> None:
    """One more worker uses what remains."""
    now = 0.0
    while not journal.core.table.done:
        now += 1e3
        journal.wait(journal.put(journal.core.expire(now)))
        for grant in record(journal, "last", now, want=1).leases:
            record(journal, "last", now, uses=(full_use(grant),), signature="ab")
