"""Loader tokens/s against a bare NumPy gather-and-cast of the same bytes in the same order.

The yardstick knows every slice and offset in advance and writes into one buffer: the least work that any loader can
do. Both run in one process, in turns; ratios are of medians.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measure import Figure, interleaved, median, show
from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_token_slice
from forebay.load.loader import Loader
from forebay.load.options import SampleOptions

NUM_SLICES = 24
SLICE_TOKENS = 4 << 20  # 8 MiB of U16: 192 MiB in all.
SEQ_LEN = 2048
BATCH = 32


def make_dataset(folder: Path) -> None:
    """Deterministic random tokens, as an imported dataset."""
    rng = np.random.default_rng(0)
    for i in range(NUM_SLICES):
        tokens = rng.integers(0, 50_000, SLICE_TOKENS).astype(np.uint16)
        document_ends = np.arange(1000, SLICE_TOKENS + 1, 1000, dtype=np.uint64)
        document_ends[-1] = SLICE_TOKENS
        write_token_slice(folder / f"{i:06d}.safetensors", tokens, document_ends)
    import_slices(folder, "benchmark")


def measure(rounds: int = 7) -> list[Figure]:
    """The figures. Takes about ten seconds."""
    with tempfile.TemporaryDirectory() as name:
        make_dataset(Path(name))
        plan = Loader(name, seq_len=SEQ_LEN, batch_size=BATCH)
        tokens = [plan.dataset.open_slice(i).tokens for i in range(NUM_SLICES)]
        steps = []
        for step in range(plan.order.steps_per_epoch):
            slices, samples = plan.order.locate(plan.order.share(0, step, 0, 1))
            steps.append(list(zip(slices.tolist(), (samples * SEQ_LEN).tolist())))
        buffer = np.empty((BATCH, SEQ_LEN + 1), np.int64)

        def bare() -> None:
            for batch in steps:
                for row, (index, start) in enumerate(batch):
                    piece = tokens[index][start : start + SEQ_LEN + 1]
                    buffer[row, : len(piece)] = piece

        def loader(prefetch: int) -> None:
            samples = SampleOptions(prefetch_batches=prefetch)
            for _ in Loader(plan.dataset, seq_len=SEQ_LEN, batch_size=BATCH, samples=samples):
                pass

        for _ in range(2):
            bare()
        costs = interleaved(rounds, bare, lambda: loader(0), lambda: loader(2))
    wall = [median([cost.wall_s for cost in row]) for row in costs]
    cpu = [median([cost.cpu_s for cost in row]) for row in costs]
    total = plan.order.num_samples * SEQ_LEN
    return [
        Figure("bare gather and cast", total / wall[0], "tokens/s"),
        Figure("loader, no thread", total / wall[1], "tokens/s"),
        Figure("loader, prefetch 2", total / wall[2], "tokens/s"),
        Figure("loader/bare, no thread", wall[0] / wall[1], "x speed"),
        Figure("loader/bare, prefetch 2", wall[0] / wall[2], "x speed"),
        Figure("loader/bare CPU, no thread", cpu[1] / cpu[0], "x CPU"),
        Figure("loader/bare CPU, prefetch 2", cpu[2] / cpu[0], "x CPU"),
    ]


if __name__ == "__main__":
    show("loader", measure())
