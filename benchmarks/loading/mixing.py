"""How well the default order mixes, beside a full shuffle: distances within a batch and between batches, and losses.

The worst case: text that lies unshuffled, book after book. `python -m benchmarks.loading.mixing BOOKS…` (text files)
trains a small model on one epoch in each order, from the same first weights, and tells the mean training loss and that
of held-out text; without files only the distances.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import Figure, median, show
from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_token_slice
from forebay.load.loader import Loader

SEQ_LEN, BATCH_SIZE, SLICE_TOKENS = 128, 32, 128 << 10
NEAR = 16  # Samples that lie so close are of one text.
HELD_OUT = 0.05
I64 = NDArray[np.int64]


def steps_of(order: str, dataset: Path, seed: int) -> list[I64]:
    """The ids of the samples of each step of an epoch."""
    loader = Loader(dataset, seq_len=SEQ_LEN, global_batch_size=BATCH_SIZE, seed=seed, shuffle=order != "as stored")
    if order == "full shuffle":
        ids = np.random.default_rng(seed).permutation(loader.order.num_samples)
        return [ids[start : start + BATCH_SIZE] for start in range(0, len(ids), BATCH_SIZE)]
    return [batch.sample_ids for batch in loader]


ORDERS = ("full shuffle", "forebay.Loader", "as stored")


def distances(dataset: Path, order: str, seed: int) -> tuple[float, float, float]:
    """Medians: samples to the nearest of the same batch; steps to the next of a near one; share of those within 16."""
    steps = steps_of(order, dataset, seed)
    nearest = np.concatenate([_to_nearest(np.sort(ids)) for ids in steps if len(ids) > 1])
    step_of = np.empty(sum(map(len, steps)), np.int64)
    step_of[np.concatenate(steps)] = np.repeat(np.arange(len(steps)), [len(ids) for ids in steps])
    later = np.full(len(step_of), len(steps))
    for distance in range(1, NEAR + 1):
        for one, other in (
            (slice(None, -distance), slice(distance, None)),
            (slice(distance, None), slice(None, -distance)),
        ):
            gap = step_of[other] - step_of[one]
            later[one] = np.minimum(later[one], np.where(gap >= 0, gap, len(steps)))
    return median(nearest.tolist()), median(later.tolist()), float(np.mean(later < NEAR))


def _to_nearest(ids: I64) -> I64:
    gaps = np.diff(ids)
    result: I64 = np.minimum(np.append(gaps, gaps[-1]), np.insert(gaps, 0, gaps[0]))
    return result


def write_text(files: Sequence[Path], folder: Path) -> NDArray[np.uint16]:
    """A dataset of the files' bytes, one after another; returns the tokens [n] that are held out, of all of them."""
    parts, held_out = [], []
    for path in files:
        data = np.frombuffer(path.read_bytes(), np.uint8).astype(np.uint16)
        size = int(len(data) * (1 - HELD_OUT))
        parts.append(data[:size])
        held_out.append(data[size:])
    _write(np.concatenate(parts), folder)
    return np.concatenate(held_out)


def _write(tokens: NDArray[np.uint16], folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, start in enumerate(range(0, len(tokens) - SEQ_LEN, SLICE_TOKENS)):
        part = tokens[start : start + SLICE_TOKENS]
        write_token_slice(folder / f"{number:05d}.safetensors", part, np.array([len(part)], np.uint64))
    import_slices(folder, "mixing")


def losses(dataset: Path, held_out: NDArray[np.uint16], order: str, seed: int) -> tuple[float, float]:
    """Mean losses, in nats a token: of the last tenth of an epoch's steps, before each is learnt; of the held-out text."""
    import torch

    torch.manual_seed(0)  # The same first weights for all.
    torch.set_num_threads(1)
    model = _model(torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = Loader(dataset, seq_len=SEQ_LEN, batch_size=1, shuffle=False)
    rows = np.stack([np.append(batch.inputs[0], batch.labels[0][-1]) for batch in loader])
    told = []
    steps = [ids for ids in steps_of(order, dataset, seed) if len(ids) == BATCH_SIZE]
    for number, ids in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (number + 1) / 50) * (1 - 0.9 * number / len(steps))
        loss = _loss(torch, model, rows[ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        told.append(float(loss.detach()))
    with torch.no_grad():
        windows = held_out[: len(held_out) // (SEQ_LEN + 1) * (SEQ_LEN + 1)].reshape(-1, SEQ_LEN + 1)
        pieces = [float(_loss(torch, model, piece)) for piece in np.array_split(windows, max(1, len(windows) // 64))]
    return float(np.mean(told[-len(told) // 10 :])), float(np.mean(pieces))


def _loss(torch: Any, model: Any, rows: NDArray[Any]) -> Any:
    tokens = torch.from_numpy(rows.astype(np.int64))
    labels = tokens[:, 1:].clone()
    labels[labels < 0] = -100
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten())


def _model(torch: Any) -> Any:
    """Bytes to logits: two layers of gated recurrence, which learn enough in one epoch to tell orders apart."""

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.bytes = torch.nn.Embedding(256, 96)
            self.layers = torch.nn.GRU(96, 192, 2, batch_first=True)
            self.out = torch.nn.Linear(192, 256)

        def forward(self, tokens: Any) -> Any:
            return self.out(self.layers(self.bytes(tokens))[0])

    return Model()


def measure(files: Sequence[Path], seeds: int, folder: Path) -> Iterator[Figure]:
    """The figures of each order."""
    if files:
        held_out = write_text(files, folder / "text")
    else:
        _write(np.zeros(1 << 22, np.uint16), folder / "text")
    for order in ORDERS:
        near, later, soon = (
            median(list(values)) for values in zip(*(distances(folder / "text", order, s) for s in range(seeds)))
        )
        detail = (
            f"samples to the nearest of a batch; a near one follows after {later:.0f} steps, {soon:.1%} within {NEAR}"
        )
        yield Figure(f"distance: {order}", near, "samples", detail)
    for order in ORDERS if files else ():
        trained = [
            losses(folder / "text", held_out, order, seed) for seed in range(seeds if order != "as stored" else 1)
        ]
        told = ", ".join(f"{held:.4f}" for _, held in trained)
        detail = f"held out, of seeds {told}; training, last tenth {np.mean([last for last, _ in trained]):.4f}"
        yield Figure(f"loss: {order}", float(np.mean([held for _, held in trained])), "nats", detail)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="text files, in the order in which they lie")
    parser.add_argument("--seeds", type=int, default=3, help="how many orders of each kind (3)")
    parser.add_argument("--bytes", type=int, default=3_000_000, help="of the files at most, in all (3000000)")
    args = parser.parse_args()
    sizes = list(itertools.accumulate(path.stat().st_size for path in args.files))
    files = [path for path, size in zip(args.files, sizes) if size <= args.bytes]
    with tempfile.TemporaryDirectory() as folder:
        show("mixing", list(measure(files, args.seeds, Path(folder))))


if __name__ == "__main__":
    main()
