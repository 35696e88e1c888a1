"""A step of 15 trillion tokens in 250 000 slices: time to find its samples, samples a second, memory.

Cold: the first step requested of an epoch (the slices are permuted). Warm: any later one.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.measure import Figure, percentile, rss_bytes, show
from forebay.order.plan import Order, samples_per_slice
from forebay.order.run import BatchSizes, Run, Weights

NUM_SLICES = 250_000
TOKENS_PER_SLICE = 60_000_000
SEQ_LEN = 2048
GLOBAL_BATCH = 1024


def _run_figures(counts: np.ndarray, rounds: int = 60) -> list[Figure]:
    """Samples a CPU second of a run read in blocks by one process, in global batches of 8."""
    single = Run([Order(counts, 0, 8)], BatchSizes.of(8), epochs=None)
    mixture = Run([Order(counts, seed, 8) for seed in (0, 1)], BatchSizes.of(8), weights=Weights(((0, (3, 1)),)))
    figures = []
    for name, run, block in (("run", single, 4096), ("run", single, 16384), ("mixture", mixture, 16384)):
        steps, spent = block // 8, []
        for start in range(10**8, 10**8 + rounds * steps, steps):
            began = time.thread_time()
            run.steps(start, start + steps, 0, 1)
            spent.append(time.thread_time() - began)
        rate = block / percentile(spent, 50)
        figures.append(Figure(f"order {name} {block}", rate / 1e6, "M samples/s", f"in blocks of {block}"))
    return figures


def measure(cold_rounds: int = 100, warm_rounds: int = 2000) -> list[Figure]:
    """The figures. Takes a few seconds."""

    counts = samples_per_slice(np.full(NUM_SLICES, TOKENS_PER_SLICE), SEQ_LEN)
    before = rss_bytes()
    order = Order(counts, 0, GLOBAL_BATCH)
    steps = np.random.default_rng(0).integers(0, order.steps_per_epoch - 1, warm_rounds).tolist()

    def timed(epoch: int, step: int) -> float:
        began = time.perf_counter()
        order.share(epoch, step, 3, 8)
        return 1e3 * (time.perf_counter() - began)

    cold = [timed(epoch, steps[epoch]) for epoch in range(cold_rounds)]
    warm = [timed(cold_rounds, step) for step in [0, *steps]][1:]
    grown = rss_bytes() - before
    total = order.num_samples * SEQ_LEN
    return [
        Figure("order tokens", total, "tokens", f"{NUM_SLICES} slices, {order.num_lanes} lanes"),
        Figure("order cold p50", percentile(cold, 50), "ms", "first step of an epoch; promise < 10"),
        Figure("order cold p99", percentile(cold, 99), "ms"),
        Figure("order warm p50", percentile(warm, 50), "ms", "random steps, a rank of 8, global batch 1024"),
        Figure("order warm p99", percentile(warm, 99), "ms"),
        *_run_figures(counts),
        Figure("order memory", grown / 1e6, "MB", "growth of RSS; promise < 100"),
    ]


if __name__ == "__main__":
    show("order", measure())
