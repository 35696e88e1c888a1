"""What this machine can do, and what a loader reaches of it: `python -m benchmarks.machine [DATASET]`.

Limits are measured in the same seconds as the loader, in turns, so that a busy machine slows both: copying memory,
hashing, and a bare NumPy gather-and-cast of the same samples in the same order into one buffer, which is the least
that any loader must do. Without DATASET: 192 MiB of random tokens.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.data import make_dataset
from benchmarks.measure import Figure, interleaved, median, working_folder
from forebay.dataset.reader import Dataset
from forebay.errors import UsageError
from forebay.load.loader import Loader
from forebay.load.options import SampleOptions
from forebay.load.sources import open_dataset

COPY_BYTES = 64 << 20
Report = dict[str, float]


def measure_loader(dataset: Dataset, seq_len: int, batch_size: int, rounds: int = 3, max_steps: int = 2000) -> Report:
    """Medians of the rounds.

    Args:
        dataset: A local one, of layout `tokens`.
        max_steps: Steps of a round, from the first.

    Raises:
        UsageError: If the dataset is not local, or of another layout.
    """
    if dataset.manifest.layout != "tokens" or getattr(dataset, "origin", None) is not None:
        raise UsageError(f"benchmarks.machine: expected a local dataset of tokens, got {dataset!r}.")

    def open_loader(**more: Any) -> Loader:
        return Loader(dataset, seq_len=seq_len, batch_size=batch_size, rank=0, world_size=1, **more)

    plan = open_loader()
    steps = min(max_steps, len(plan))
    tokens = steps * batch_size * seq_len

    def read(prefetch: int) -> None:
        with open_loader(steps=steps, samples=SampleOptions(prefetch_batches=prefetch)) as loader:
            for _ in loader:
                pass

    bare = gather(plan, steps, batch_size)
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    functions = (
        bare, lambda: read(2), lambda: read(0), lambda: np.copyto(target, source),
        lambda: hashlib.sha256(source.data).digest(),
    )  # fmt: skip
    interleaved(1, *functions)
    costs = interleaved(rounds, *functions)
    bare_s, loader_s, no_thread_s, copy_s, hash_s = (median([cost.wall_s for cost in row]) for row in costs)
    bare_cpu_s, loader_cpu_s = (median([cost.cpu_s for cost in row]) for row in costs[:2])
    resume_s = []
    for part in (0.1, 0.5, 0.9):
        state = plan.state_at(int(part * len(plan)))
        with open_loader() as loader:
            loader.load_state_dict(state)
            resume_s.append(seconds(lambda loader=loader: next(iter(loader))))  # type: ignore[misc]
    return {
        "copy_bytes_per_s": COPY_BYTES / copy_s,
        "hash_bytes_per_s": COPY_BYTES / hash_s,
        "bare_tokens_per_s": tokens / bare_s,
        "loader_tokens_per_s": tokens / loader_s,
        "of_bare": bare_s / loader_s,
        "of_bare_without_thread": bare_s / no_thread_s,
        "cpu_of_bare": loader_cpu_s / max(bare_cpu_s, 1e-9),
        "resume_s": median(resume_s),
    }


def seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def gather(plan: Loader, steps: int, batch_size: int) -> Callable[[], None]:
    """A gather-and-cast that knows every slice and offset beforehand."""
    length = plan.seq_len
    assert length is not None
    taken = plan.run.steps(0, steps, 0, 1)
    arrays = {i: plan.dataset.open_slice(i).tokens for i in np.unique(taken.slices).tolist()}
    rows = list(zip(taken.slices.tolist(), (taken.samples * length).tolist()))
    batches = [rows[low:high] for low, high in zip(taken.bounds[:-1].tolist(), taken.bounds[1:].tolist())]
    buffer = np.empty((batch_size, length + 1), np.int64)

    def bare() -> None:
        for batch in batches:
            for row, (index, start) in enumerate(batch):
                piece = arrays[index][start : start + length + 1]
                buffer[row, : len(piece)] = piece

    return bare


def table(report: Report) -> str:
    """The report as a person reads it."""
    return """\
  copying memory                {copy_bytes_per_s:>16,.0f} B/s
  sha256, one core              {hash_bytes_per_s:>16,.0f} B/s
  NumPy's gather and cast       {bare_tokens_per_s:>16,.0f} tokens/s
  the loader                    {loader_tokens_per_s:>16,.0f} tokens/s
  the same                      {of_bare:>16.2f} of the bare gather, {cpu_of_bare:.2f} its CPU
  the loader, without a thread  {of_bare_without_thread:>16.2f} of the bare gather
  resumed in mid-epoch          {resume_s:>16.4f} s to the next batch""".format(**report)


def measure() -> list[Figure]:
    """The ratios of a loader of random tokens. Takes about ten seconds."""
    with working_folder(None) as folder:
        dataset = open_dataset(make_dataset(folder / "data", "benchmark", 24, 4 << 20))
        report = measure_loader(dataset, 2048, 32, rounds=7)
    names = {"loader_tokens_per_s": "tokens/s", "of_bare": "x speed", "of_bare_without_thread": "x speed"}
    names["cpu_of_bare"] = "x CPU"
    return [Figure(f"loader {name}", report[name], unit) for name, unit in names.items()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", nargs="?", help="a local dataset")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens a sample (2048)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples a step (8)")
    parser.add_argument("--steps", type=int, default=2000, help="steps of a round (2000)")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts (3)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    with working_folder(None) as folder:
        dataset = open_dataset(args.dataset or make_dataset(folder / "data", "benchmark", 24, 4 << 20))
        report = measure_loader(dataset, args.seq_len, args.batch_size, args.rounds, args.steps)
    print(json.dumps(report) if args.json else table(report))


if __name__ == "__main__":
    main()
