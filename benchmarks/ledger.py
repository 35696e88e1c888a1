"""Costs of a ledger: `python benchmarks/ledger.py [--entries 1000000] [--dir DIR]`.

The ledger: 250 000 slices of 16 384 samples, 1 000 workers, entries of one use each. Entries are not signed, so that
writing them takes a minute; the cost of signed entries is measured apart.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forebay.ledger.index import open_index
from forebay.ledger.verify import verify_ledger
from forebay.ledger.writer import Ledger
from forebay.observe.ledger_queries import blame_step, who_saw
from forebay.peer_id import peer_id_of

SLICES, SAMPLES, WORKERS = 250_000, 16_384, 1_000


def unsigned(message: bytes) -> bytes:
    return b"s" * 64


@contextmanager
def timed(what: str, per: int = 0) -> Iterator[None]:
    started = time.perf_counter()
    yield
    elapsed_s = time.perf_counter() - started
    print(f"{what:<58} {elapsed_s:8.3f} s" + (f"  {1e6 * elapsed_s / per:8.1f} us each" if per else ""), flush=True)


def make(path: Path, entries: int) -> None:
    peers = [peer_id_of(number.to_bytes(32, "big")) for number in range(WORKERS)]
    parts = max(1, entries // SLICES)
    edges = [part * SAMPLES // parts for part in range(parts + 1)]
    with Ledger.open(path, unsigned) as ledger:
        body = {"samples_per_slice": [[SAMPLES, SLICES]], "scheduler": "00" * 32, "dataset_id": "d", "seed": 1}
        ledger.append("job", {**body, "seq_len": 2048, "layout": "tokens"}, sync=False)
        for number in range(entries):
            turn, part = divmod(number, parts)
            worker, mine = turn % WORKERS, turn // WORKERS * parts + part + 1
            row = [f"{turn:032x}", 0, turn % SLICES, edges[part], edges[part + 1], mine * 64]
            ledger.append("uses", {"worker": peers[worker], "uses": [row], "receipt": "c" * 128}, sync=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--dir", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        path = Path(directory) / "ledger.jsonl"
        with timed("append, unsigned, no fsync", args.entries):
            make(path, args.entries)
        print(f"{'bytes an entry':<58} {path.stat().st_size / args.entries:8.0f}")
        with timed("open without a checkpoint", args.entries):
            ledger = Ledger.open(path, unsigned)
        mark = ledger.checkpoint()
        ledger.close()
        with timed("open with a checkpoint"):
            Ledger.open(path, unsigned, checkpoint=mark).close()
        key = Ed25519PrivateKey.generate()
        with Ledger.open(Path(directory) / "signed", key.sign) as signed, timed("append, signed, one fsync", 5_000):
            for number in range(5_000):
                signed.append("paused", {"n": number}, sync=False)
            signed.sync()
        with timed("verify: chain and coverage", args.entries):
            report = verify_ledger(path)
        print(f"{'ok':<58} {report.ok!s:>8} {report.problems[:1]}")
        with timed("index", args.entries):
            index = open_index(path)
        with timed("blame: a step of a worker"):
            blame_step(index, 100, worker=index.workers[5][:12])
        with timed("blame: a step of all workers"):
            blame_step(index, 100)
        with timed("who: 2 048 tokens of a slice"):
            who_saw(index, 123, 40_960, 43_008)


if __name__ == "__main__":
    main()
