"""Exchanges a CPU second that the scheduler's core and journal take, and what 10,000 workers ask of one core.

    python -m benchmarks.leases [--slices 250000] [--workers 10000] [--exchanges 20000] [--group 8]

An exchange is one receipt and one lease, its events put into the ledger and SQLite, `--group` of them a commit, as
where that many workers wait for one fsync. Then the memory of the core, and a restart from what is on disk.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forebay.ledger.chain import Used
from forebay.network.peer import Provider
from forebay.scheduler.journal import Journal, job_body
from forebay.scheduler.leases import JobSpec
from forebay.scheduler.messages import ExchangeRequest, LeaseGrant

SAMPLES = 32


def rss() -> int:
    """Bytes resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=250_000)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--exchanges", type=int, default=20_000)
    parser.add_argument("--group", type=int, default=8)
    args = parser.parse_args()
    key = Ed25519PrivateKey.generate()
    spec = JobSpec("bench", "1" * 64, np.full(args.slices, SAMPLES, np.int64), lease_s=120.0)
    body = job_body(spec, seq_len=8, layout="tokens", scheduler=key.public_key().public_bytes_raw().hex())
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory)
        before = rss()
        with Journal.open(state, spec, body, key.sign, salt="a") as journal:
            journal.core.add_origins([Provider("origin", "10.0.0.1:1", True)], 0.0)
            held = first_leases(journal, args.workers)
            print(f"memory: {(rss() - before) / 1e6:.0f} MB for {args.slices:,} slices and {args.workers:,} workers")
            run(journal, held, args)
        for name, cleared in (("restart", False), ("restart with SQLite gone", True)):
            if cleared:
                for path in state.glob("journal.sqlite*"):
                    path.unlink()
            begun = time.perf_counter()
            with Journal.open(state, spec, body, key.sign, salt="b") as journal:
                entries = journal.ledger.next_seq
                leases = len(journal.core.table.leases)
            print(f"{name}: {time.perf_counter() - begun:.2f} s, {entries:,} ledger entries, {leases:,} live leases")
    print(f"peak: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB", file=sys.stderr)


def first_leases(journal: Journal, workers: int) -> list[LeaseGrant]:
    """Every worker says what it has cached, and gets two leases."""
    held = []
    for number in range(workers):
        ask = ExchangeRequest(session="s", want=2, address=f"10.0.0.2:{number}", cached={"1" * 64: ""})
        reply, happened = journal.core.exchange(f"worker{number:05d}", ask, 0.0)
        journal.wait(journal.put(happened))
        held.append(reply.leases[0])
    return held


def run(journal: Journal, held: list[LeaseGrant], args: argparse.Namespace) -> None:
    chance = np.random.default_rng(1)
    who = chance.integers(0, len(held), args.exchanges).tolist()
    receipt = "ab" * 64
    cpu, wall, core_s, now, ticket = time.process_time(), time.perf_counter(), 0.0, 1.0, 0
    longest = 0.0
    for number, worker in enumerate(who):
        grant = held[worker]
        used = Used(grant.lease_id, grant.epoch, grant.slice, grant.start, grant.stop, number)
        at = f"10.0.0.2:{worker}"
        ask = ExchangeRequest(session="s", address=at, job_id="x", uses=(used,), signature=receipt, want=1)
        now += 60.0 / len(held)
        begun = time.perf_counter()
        reply, happened = journal.core.exchange(f"worker{worker:05d}", ask, now)
        took = time.perf_counter() - begun
        core_s, longest = core_s + took, max(longest, took)
        ticket = journal.put(happened)
        held[worker] = reply.leases[0]
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
    share = len(held) / 60.0 * each
    print(f"{len(held):,} workers at one lease a minute: {share:.1%} of a core, without TLS and checks of signatures")


if __name__ == "__main__":
    main()
