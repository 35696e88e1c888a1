"""How well the default order mixes, beside a full shuffle: distances within a batch and between batches.

`python -m benchmarks.loading.mixing`
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.data import make_dataset
from benchmarks.measure import Figure, median, show
from forebay.load.loader import Loader

SEQ_LEN, BATCH_SIZE, SLICE_TOKENS = 128, 32, 128 << 10
NEAR = 16  # Samples that lie so close are of one text.
I64 = NDArray[np.int64]


def list_steps(order: str, dataset: Path, seed: int) -> list[I64]:
    """The ids of the samples of each step of an epoch."""
    loader = Loader(dataset, seq_len=SEQ_LEN, global_batch_size=BATCH_SIZE, seed=seed, shuffle=order != "as stored")
    if order == "full shuffle":
        ids = np.random.default_rng(seed).permutation(loader.order.num_samples)
        return [ids[start : start + BATCH_SIZE] for start in range(0, len(ids), BATCH_SIZE)]
    return [batch.sample_ids for batch in loader]


ORDERS = ("full shuffle", "forebay.Loader", "as stored")


def distances(dataset: Path, order: str, seed: int) -> tuple[float, float, float]:
    """Medians: samples to the nearest of the same batch; steps to the next of a near one; share of those within 16."""
    steps = list_steps(order, dataset, seed)
    nearest = np.concatenate([_to_nearest(np.sort(ids)) for ids in steps if len(ids) > 1])
    step_index = np.empty(sum(map(len, steps)), np.int64)
    step_index[np.concatenate(steps)] = np.repeat(np.arange(len(steps)), [len(ids) for ids in steps])
    later = np.full(len(step_index), len(steps))
    for distance in range(1, NEAR + 1):
        low, high = slice(None, -distance), slice(distance, None)
        for first, second in ((low, high), (high, low)):
            gap = step_index[second] - step_index[first]
            later[first] = np.minimum(later[first], np.where(gap >= 0, gap, len(steps)))
    return median(nearest.tolist()), median(later.tolist()), float(np.mean(later < NEAR))


def _to_nearest(ids: I64) -> I64:
    gaps = np.diff(ids)
    result: I64 = np.minimum(np.append(gaps, gaps[-1]), np.insert(gaps, 0, gaps[0]))
    return result


def measure(seeds: int, folder: Path) -> list[Figure]:
    """The figures of each order."""
    dataset, figures = make_dataset(folder, "mixing", 32, SLICE_TOKENS), []
    for order in ORDERS:
        medians = [distances(dataset, order, seed) for seed in range(seeds)]
        near, later, soon = (median(list(values)) for values in zip(*medians))
        detail = f"to the nearest of a batch; a near one follows after {later:.0f} steps, {soon:.1%} within {NEAR}"
        figures.append(Figure(f"distance: {order}", near, "samples", detail))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many orders of each kind (3)")
    with tempfile.TemporaryDirectory() as folder:
        show("mixing", measure(parser.parse_args().seeds, Path(folder) / "data"))


if __name__ == "__main__":
    main()
