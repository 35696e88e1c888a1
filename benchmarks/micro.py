"""Costs of single parts of Forebay, in one process: `python -m benchmarks.micro [order shares ledger leases]`.

    order   a step of 15 trillion tokens in 250,000 slices: time to find its samples, samples a second, memory
    shares  hash sharding: the largest share, and the slices that move when a worker or data are added
    ledger  append, open, verify and query a ledger of a million entries
    leases  exchanges a CPU second of the scheduler's core and journal, with 10,000 workers

`--scale 0.01` makes all of them a hundred times smaller.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.measure import Figure, percentile, rss_bytes, show
from forebay.lease.messages import ExchangeRequest
from forebay.ledger.chain import Used
from forebay.ledger.index import open_index
from forebay.ledger.verify import verify_ledger
from forebay.ledger.writer import Ledger
from forebay.network.peer import Provider
from forebay.observe.ledger_queries import blame_step, who_saw
from forebay.order.plan import Order, samples_per_slice
from forebay.order.run import BatchSizes, Run, Weights, assign_owners
from forebay.peer_id import peer_id_of
from forebay.scheduler.journal import Journal, job_body
from forebay.scheduler.leases import JobSpec

NUM_SLICES, NUM_WORKERS = 250_000, 10_000


def timed(function: Callable[[], object]) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def measure_order(scale: float = 1.0) -> list[Figure]:
    """Cold: the first step that is requested of an epoch, which permutes the slices. Warm: a later one."""
    counts = samples_per_slice(np.full(int(NUM_SLICES * scale), 60_000_000), 2048)
    before = rss_bytes()
    order = Order(counts, 0, 1024)
    run, per_epoch = Run([order], BatchSizes.of(1024), epochs=None), order.steps_per_epoch
    firsts = range(7, 100 * per_epoch, per_epoch)
    cold = [1e3 * timed(lambda step=step: run.steps(step, step + 1, 3, 8)) for step in firsts]  # type: ignore[misc]
    steps = np.random.default_rng(0).integers(99 * per_epoch, 100 * per_epoch - 1, 2000).tolist()
    warm = [1e3 * timed(lambda step=step: run.steps(step, step + 1, 3, 8)) for step in steps]  # type: ignore[misc]
    grown = rss_bytes() - before
    figures = [
        Figure("order tokens", order.num_samples * 2048, "tokens", f"{len(counts)} slices, {order.num_lanes} lanes"),
        Figure("order cold p50", percentile(cold, 50), "ms", "first step of an epoch"),
        Figure("order cold p99", percentile(cold, 99), "ms"),
        Figure("order warm p50", percentile(warm, 50), "ms", "random steps, a rank of 8, global batch 1024"),
        Figure("order warm p99", percentile(warm, 99), "ms"),
        Figure("order memory", grown / 1e6, "MB", "growth of RSS"),
    ]
    single = Run([Order(counts, 0, 8)], BatchSizes.of(8), epochs=None)
    mixture = Run([Order(counts, seed, 8) for seed in (0, 1)], BatchSizes.of(8), weights=Weights(((0, (3, 1)),)))
    for name, run, block in (("run", single, 4096), ("run", single, 16384), ("mixture", mixture, 16384)):
        spent = []
        for start in range(10**6, 10**6 + 60 * block // 8, block // 8):
            began = time.thread_time()
            run.steps(start, start + block // 8, 0, 1)
            spent.append(time.thread_time() - began)
        figures.append(Figure(f"order {name}, blocks of {block}", block / percentile(spent, 50) / 1e6, "M samples/s"))
    return figures


def measure_shares(scale: float = 1.0) -> list[Figure]:
    """The largest share over the mean, and the part of the slices that move."""
    rng = np.random.default_rng(0)
    figures = []
    for num_slices, num_workers in ((1000, 8), (10_000, 8), (10_000, 32), (int(250_000 * scale), 64)):
        hashes = rng.integers(0, 256, (num_slices, 32), dtype=np.uint8)
        grown = np.concatenate([hashes, rng.integers(0, 256, (num_slices // 10, 32), dtype=np.uint8)])
        names = [f"worker-{i}" for i in range(num_workers)]
        owners = assign_owners(hashes, names)
        moved = (owners != assign_owners(hashes, [*names, "another"])).mean()
        moved_by_data = (owners != assign_owners(grown, names)[:num_slices]).mean()
        counts = np.bincount(owners, minlength=num_workers)
        detail = f"moved: {moved:.4f} by a worker more (1/(W+1): {1 / (num_workers + 1):.4f}), "
        detail += f"{moved_by_data:.4f} by 10 % more data"
        title = f"shares: {num_slices} slices on {num_workers} workers"
        figures.append(Figure(title, counts.max() / counts.mean(), "max/mean", detail))
    return figures


def measure_ledger(scale: float = 1.0) -> list[Figure]:
    """Entries of one use each, 16,384 samples a slice, 1,000 workers; not signed, so that writing takes a minute."""
    entries, num_slices, samples = int(1e6 * scale), int(NUM_SLICES * scale), 16_384
    parts = max(1, entries // num_slices)
    edges = [part * samples // parts for part in range(parts + 1)]
    peers = [peer_id_of(number.to_bytes(32, "big")) for number in range(1000)]

    def unsigned(message: bytes) -> bytes:
        return b"s" * 64

    def write() -> None:
        with Ledger.open(path, unsigned) as ledger:
            body = {"samples_per_slice": [[samples, num_slices]], "scheduler": "00" * 32, "dataset_id": "d", "seed": 1}
            ledger.append("job", {**body, "seq_len": 2048, "layout": "tokens"}, sync=False)
            for number in range(entries):
                turn, part = divmod(number, parts)
                mine = turn // len(peers) * parts + part + 1
                row = [f"{turn:032x}", 0, turn % num_slices, edges[part], edges[part + 1], mine * 64]
                body = {"worker": peers[turn % len(peers)], "uses": [row], "receipt": "c" * 128}
                ledger.append("uses", body, sync=False)

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.jsonl"
        spent = {"append, unsigned": timed(write)}
        size = path.stat().st_size
        spent["open without a checkpoint"] = timed(lambda: Ledger.open(path, unsigned).close())
        with Ledger.open(path, unsigned) as ledger:
            mark = ledger.checkpoint()
        spent["open with a checkpoint"] = timed(lambda: Ledger.open(path, unsigned, checkpoint=mark).close())
        spent["verify chain and coverage"] = timed(lambda: verify_ledger(path))
        spent["index"] = timed(lambda: open_index(path))
        index = open_index(path)
        spent["blame a step of a worker"] = timed(lambda: blame_step(index, 100, worker=index.workers[5][:12]))
        spent["blame a step of all workers"] = timed(lambda: blame_step(index, 100))
        spent["who saw 2,048 tokens"] = timed(lambda: who_saw(index, min(123, num_slices - 1), 40_960, 43_008))
    figures = [Figure(f"ledger: {name}", seconds, "s") for name, seconds in spent.items()]
    return [*figures, Figure("ledger: an entry", size / entries, "bytes", f"{entries:,} entries")]


def measure_leases(scale: float = 1.0) -> list[Figure]:
    """An exchange is a receipt and a lease; its events go into the ledger and SQLite, 8 exchanges a commit.

    Without TLS and checks of signatures, which `benchmarks.control` adds.
    """
    num_slices, workers, exchanges = int(NUM_SLICES * scale), int(NUM_WORKERS * scale), int(20_000 * scale)
    key = Ed25519PrivateKey.generate()
    spec = JobSpec("bench", "1" * 64, np.full(num_slices, 32, np.int64), lease_s=3600.0)
    body = job_body(spec, seq_len=8, layout="tokens", scheduler=key.public_key().public_bytes_raw().hex())
    with tempfile.TemporaryDirectory() as directory:
        state, before = Path(directory), rss_bytes()
        with Journal.open(state, spec, body, key.sign, salt="a") as journal:
            core = journal.core
            core.add_origins([Provider("origin", "10.0.0.1:1", True)], 0.0)
            grants = []
            for number in range(workers):
                request = ExchangeRequest(session="s", want=2, address=f"10.0.0.2:{number}", cached={"1" * 64: ""})
                reply, events = core.exchange(f"worker{number:05d}", request, 0.0)
                journal.wait(journal.put(events))
                grants.append(reply.leases[0])
            grown = rss_bytes() - before
            cpu, core_s = time.process_time(), 0.0
            for number, worker in enumerate(np.random.default_rng(1).integers(0, workers, exchanges).tolist()):
                grant, now = grants[worker], 1.0 + 60.0 / workers * number
                used = Used(grant.lease_id, grant.epoch, grant.slice, grant.start, grant.stop, number)
                request = ExchangeRequest(
                    session="s", address=f"10.0.0.2:{worker}", job_id="x", uses=(used,), signature="ab" * 64, want=1
                )  # fmt: skip
                began = time.process_time()
                reply, events = core.exchange(f"worker{worker:05d}", request, now)
                core_s += time.process_time() - began
                ticket, grants[worker] = journal.put(events), reply.leases[0]
                if number % 8 == 7:
                    journal.wait(ticket)
                    journal.put(core.expire(now))
            journal.wait(ticket)
            each = (time.process_time() - cpu) / exchanges
        restart = timed(lambda: Journal.open(state, spec, body, key.sign, salt="b").close())
        for path in state.glob("journal.sqlite*"):
            path.unlink()
        rebuilt = timed(lambda: Journal.open(state, spec, body, key.sign, salt="c").close())
    return [
        Figure("lease exchange", 1e3 * each, "ms CPU", f"{1e3 * core_s / exchanges:.3f} ms of it the core"),
        Figure("10,000 workers, a lease a minute", 100 * NUM_WORKERS / 60 * each, "% core"),
        Figure("lease memory", grown / 1e6, "MB", f"{num_slices:,} slices, {workers:,} workers"),
        Figure("scheduler restart", restart, "s", f"{rebuilt:.2f} s when SQLite is gone"),
    ]


PARTS = {"order": measure_order, "shares": measure_shares, "ledger": measure_ledger, "leases": measure_leases}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes (1)")
    args = parser.parse_args(argv)
    for name in args.parts or PARTS:
        show(name, PARTS[name](args.scale))


if __name__ == "__main__":
    main(sys.argv[1:])
