"""What deduplication takes as the corpus grows, in one process: `python -m benchmarks.prepare.dedup_scale [METHOD…]`.

Documents of 3,000 bytes, a fifth of them copies with a word in 200 replaced, in splits of 64 MB; 1, 4 and 16 times
`--documents` (20,833, so that the last has 1 GB). Each size runs in a process of its own, for its peak of memory.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from benchmarks.prepare.dedup import cpu, measure_method
from forebay.prepare.dedup.methods import Dedup
from forebay.prepare.documents import text_column
from forebay.storage.store import open_store

METHODS = ("exact", "minhash", "lines", "sentences", "substring", "overlap")
WORDS, LETTERS, BATCH, SPLIT = 500, 6, 1000, 21_000
MEMORY_BYTES = 256 << 20


def batches(documents: int) -> Iterator[pa.RecordBatch]:
    """Documents of random words, a line each 50 words; every fifth is nearly one of those before it in its batch."""
    rng = np.random.default_rng(0)
    offsets = np.arange(BATCH + 1, dtype=np.int64) * (WORDS * LETTERS)
    for start in range(0, documents, BATCH):
        count = min(BATCH, documents - start)
        words = rng.integers(97, 123, (BATCH, WORDS, LETTERS), dtype=np.uint8)
        words[..., -1], words[:, 49::50, -1] = 32, 10
        words[:, 49::50, -2] = 46  # A sentence ends.
        new = words[4::5].copy()
        words[4::5] = words[:-1:5]
        replaced = rng.random(new.shape[:2]) < 0.005
        words[4::5][replaced] = new[replaced]
        yield pa.record_batch({"text": text_column(offsets[: count + 1], words[:count].reshape(-1))})


def measure(method: str, documents: int) -> dict[str, float]:
    """CPU seconds, bytes on disk a document, and the peak of memory of one method."""
    incoming = batches(documents)
    starts = range(0, documents, SPLIT)
    splits = (itertools.islice(incoming, -(-min(SPLIT, documents - start) // BATCH)) for start in starts)
    making_s = cpu(lambda: collections.deque(batches(documents), 0))
    with tempfile.TemporaryDirectory() as folder:
        config = Dedup(**{method: True})
        costs = measure_method(open_store(folder), splits, config, memory_bytes=MEMORY_BYTES)
    return {
        "signing_s": costs.signing_s - making_s, "finding_s": costs.finding_s,
        "signed": costs.signed_bytes / documents, "peak": costs.peak_bytes / documents,
        "final": costs.final_bytes / documents, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3,
    }  # fmt: skip


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--documents", type=int, default=20_833)
    parser.add_argument("--one", action="store_true", help="one size, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.methods[0], arguments.documents)))
        return
    print(
        "| method | documents | signing, CPU s | finding | signed, bytes a document | steps at most | stays | memory |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for method in arguments.methods or METHODS:
        for times in (1, 4, 16):
            documents = str(times * arguments.documents)
            command = [sys.executable, "-m", __spec__.name, method, "--one", "--documents", documents]
            row = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            seconds = f"| {method} | {documents} | {row['signing_s']:.1f} | {row['finding_s']:.1f} "
            print(seconds + "| {signed:.0f} | {peak:.0f} | {final:.0f} | {memory:.0f} MB |".format(**row), flush=True)


if __name__ == "__main__":
    main()
