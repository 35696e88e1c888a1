"""What deduplication takes as the corpus grows, in one process: `python -m benchmarks.prepare.dedup_scale [METHOD…]`.

Documents of 3,000 bytes, a fifth of them copies with a word in 200 replaced, in splits of 64 MB; 1, 4 and 16 times
`--documents` (20,833, so that the last has 1 GB). Each size runs in a process of its own, for its peak of memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.prepare.cuts import cpu
from forebay.prepare.dedup.deduplicate import deduplicate
from forebay.prepare.dedup.methods import Dedup, Signed
from forebay.prepare.documents import text_column
from forebay.prepare.tasks.text import open_documents
from forebay.storage.store import Store, open_store

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


def sign(store: Store, documents: int, config: Dedup) -> list[Signed]:
    signed, incoming = [], batches(documents)
    for index, start in enumerate(range(0, documents, SPLIT)):
        with open_documents(store, f"part{index}", config) as part:
            for _ in range(start, min(documents, start + SPLIT), BATCH):
                part.add(next(incoming))
        assert part.signed is not None
        signed.append(part.signed)
    return signed


def measure(method: str, documents: int) -> dict[str, float]:
    """CPU seconds, bytes on disk and the peak of memory of one method."""
    config, signed, peak_bytes = Dedup(**{method: True}), [], 0
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)

        def run(function: Callable[[Any, int], Any], tasks: Sequence[Any]) -> list[Any]:
            nonlocal peak_bytes
            done = [function(task, 0) for task in tasks]
            peak_bytes = max(peak_bytes, sum(store.sizes("dedup/").values()))
            return done

        making = cpu(lambda: [None for _ in batches(documents)])
        signing = cpu(lambda: signed.extend(sign(store, documents, config))) - making
        before_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signed_bytes = sum(size for name, size in store.sizes().items() if not name.endswith(".arrow"))
        results: list[Any] = []
        finding = cpu(lambda: results.append(deduplicate(signed, config, store, run, memory_bytes=MEMORY_BYTES)))
        final_bytes = sum(store.sizes("dedup/").values())
    return {
        "documents": documents, "signing_s": signing, "finding_s": finding, "signed_bytes": signed_bytes,
        "peak_bytes": peak_bytes, "final_bytes": final_bytes, "memory_signing": before_bytes,
        "memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "dropped": sum(results[0].dropped), "cut": sum(results[0].units_cut.values()),
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
            sizes = (row[name] / row["documents"] for name in ("signed_bytes", "peak_bytes", "final_bytes"))
            print(
                f"| {method} | {row['documents']:,} | {row['signing_s']:.1f} | {row['finding_s']:.1f} | "
                + " | ".join(f"{size:.0f}" for size in sizes)
                + f" | {row['memory'] / 1e6:.0f} MB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
