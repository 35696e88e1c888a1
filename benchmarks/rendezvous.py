"""Balance of hash sharding, and slices that move when workers or data are added: `python -m benchmarks.rendezvous`."""

from __future__ import annotations

import time

import numpy as np

from forebay.order.run import assign_owners

SLACKS = (None, 0.25, 0.1, 0.05, 0.0)


def main() -> None:
    rng = np.random.default_rng(0)
    head = ("slices", "slack", "largest/mean", "moved: one worker more", "1/(W+1)", "moved: 10 % more data", "CPU s")
    print("".join(f"{name:>24}" for name in head))
    for num_slices, num_workers in ((200, 8), (1000, 8), (10_000, 8), (10_000, 32), (250_000, 64)):
        hashes = rng.integers(0, 256, (num_slices, 32), dtype=np.uint8)
        grown = np.concatenate([hashes, rng.integers(0, 256, (num_slices // 10, 32), dtype=np.uint8)])
        names = [f"worker-{i}" for i in range(num_workers)]
        for slack in SLACKS:
            began = time.process_time()
            owners = assign_owners(hashes, names, slack)
            elapsed_s = time.process_time() - began
            with_another = assign_owners(hashes, [*names, "another"], slack)
            with_more_data = assign_owners(grown, names, slack)[:num_slices]
            counts = np.bincount(owners, minlength=num_workers)
            row = (
                f"{num_slices:,} on {num_workers}", "none" if slack is None else f"{slack:g}",
                f"{counts.max() / counts.mean():.3f}", f"{(owners != with_another).mean():.4f}",
                f"{1 / (num_workers + 1):.4f}", f"{(owners != with_more_data).mean():.4f}", f"{elapsed_s:.2f}",
            )  # fmt: skip
            print("".join(f"{value:>24}" for value in row))


if __name__ == "__main__":
    main()
