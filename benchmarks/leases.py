"""Exchanges a CPU second of the scheduler's core and journal, and the load of 10,000 workers on one core.

    python -m benchmarks.leases [--slices 250000] [--workers 10000] [--exchanges 20000] [--group 8]

An exchange is one receipt and one lease; its events go into the ledger and SQLite, `--group` exchanges a commit, as
when that many workers wait for one fsync. Then the memory of the core, and a restart from disk.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.measure import rss_bytes
from forebay.lease.messages import ExchangeRequest, LeaseGrant
from forebay.ledger.chain import Used
from forebay.network.peer import Provider
from forebay.scheduler.journal import Journal, job_body
from forebay.scheduler.leases import JobSpec

SAMPLES = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=250_000)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--exchanges", type=int, default=20_000)
    parser.add_argument("--group", type=int, default=8)
    args = parser.parse_args()
    key = Ed25519PrivateKey.generate()
    spec = JobSpec("bench", "1" * 64, np.full(args.slices, SAMPLES, np.int64), lease_s=3600.0)
    body = job_body(spec, seq_len=8, layout="tokens", scheduler=key.public_key().public_bytes_raw().hex())
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory)
        before = rss_bytes()
        with Journal.open(state, spec, body, key.sign, salt="a") as journal:
            journal.core.add_origins([Provider("origin", "10.0.0.1:1", True)], 0.0)
            grants = first_leases(journal, args.workers)
            grown = (rss_bytes() - before) / 1e6
            print(f"memory: {grown:.0f} MB for {args.slices:,} slices and {args.workers:,} workers")
            run(journal, grants, args)
        for name, cleared in (("restart", False), ("restart with SQLite gone", True)):
            if cleared:
                for path in state.glob("journal.sqlite*"):
                    path.unlink()
            started = time.perf_counter()
            with Journal.open(state, spec, body, key.sign, salt="b") as journal:
                entries = journal.ledger.next_seq
                leases = len(journal.core.table.leases)
            print(f"{name}: {time.perf_counter() - started:.2f} s, {entries:,} ledger entries, {leases:,} live leases")
    print(f"peak: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB", file=sys.stderr)


def first_leases(journal: Journal, workers: int) -> list[LeaseGrant]:
    """Each worker reports an empty cache and gets two leases; the first lease of each."""
    grants = []
    for number in range(workers):
        request = ExchangeRequest(session="s", want=2, address=f"10.0.0.2:{number}", cached={"1" * 64: ""})
        reply, events = journal.core.exchange(f"worker{number:05d}", request, 0.0)
        journal.wait(journal.put(events))
        grants.append(reply.leases[0])
    return grants


def run(journal: Journal, grants: list[LeaseGrant], args: argparse.Namespace) -> None:
    chance = np.random.default_rng(1)
    workers_drawn = chance.integers(0, len(grants), args.exchanges).tolist()
    receipt = "ab" * 64
    cpu, wall, core_s, now, ticket = time.process_time(), time.perf_counter(), 0.0, 1.0, 0
    longest = 0.0
    for number, worker in enumerate(workers_drawn):
        grant = grants[worker]
        used = Used(grant.lease_id, grant.epoch, grant.slice, grant.start, grant.stop, number)
        address = f"10.0.0.2:{worker}"
        request = ExchangeRequest(session="s", address=address, job_id="x", uses=(used,), signature=receipt, want=1)
        now += 60.0 / len(grants)
        started = time.perf_counter()
        reply, events = journal.core.exchange(f"worker{worker:05d}", request, now)
        elapsed_s = time.perf_counter() - started
        core_s, longest = core_s + elapsed_s, max(longest, elapsed_s)
        ticket = journal.put(events)
        grants[worker] = reply.leases[0]
        if number % args.group == args.group - 1:
            journal.wait(ticket)
            journal.put(journal.core.expire(now))
    journal.wait(ticket)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    each = cpu / args.exchanges
    print(
        f"exchange: {1e3 * each:.3f} ms CPU with the journal ({1 / each:,.0f} a CPU second), "
        f"{1e3 * core_s / args.exchanges:.3f} ms of it the core, longest {1e3 * longest:.1f} ms; {wall:.1f} s wall"
    )
    share = len(grants) / 60.0 * each
    print(f"{len(grants):,} workers at one lease a minute: {share:.1%} of a core, without TLS and checks of signatures")


if __name__ == "__main__":
    main()
