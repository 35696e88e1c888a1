"""What this machine can do, and what a loader reaches of it: `python -m benchmarks.machine DATASET`.

Limits are measured in the same seconds as the loader, in turns, so that a busy machine slows both: copying memory,
hashing, reading the dataset's own files from the disk, and a bare NumPy gather-and-cast of the same samples in the
same order into one buffer, which is the least that any loader must do.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.reader import Dataset
from forebay.errors import UsageError
from forebay.load.loader import Loader
from forebay.load.sources import open_dataset

_COPY_BYTES = 64 << 20
_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class BenchReport:
    """Rates are medians of the rounds; `_s` are seconds. None: not measured here.

    Attributes:
        copy_bytes_per_s, hash_bytes_per_s: Of memory, and of sha256 on one core.
        disk_bytes_per_s: Reading slices that are not in the page cache, one after another.
        bare_tokens_per_s: NumPy's gather-and-cast from the page cache.
        loader_tokens_per_s: The loader's, on the same samples.
        cold_tokens_per_s: The loader's, from slices that are not in the page cache.
        first_batch_s: From the start of a Python process to the first batch.
        resume_s: From an open loader, set to the middle of an epoch, to its next batch.
        seek_s: Of it, what the order takes.
    """

    copy_bytes_per_s: float
    hash_bytes_per_s: float
    disk_bytes_per_s: float | None
    bare_tokens_per_s: float
    loader_tokens_per_s: float
    cold_tokens_per_s: float | None
    first_batch_s: float
    resume_s: float
    seek_s: float
    batch_bytes: int
    token_bytes: int

    @property
    def of_bare(self) -> float:
        """The loader's part of the bare gather."""
        return self.loader_tokens_per_s / self.bare_tokens_per_s

    @property
    def of_copy(self) -> float:
        """The bytes that the loader writes, as a part of what this machine copies."""
        return self.loader_tokens_per_s * 8 / self.copy_bytes_per_s

    @property
    def of_disk(self) -> float | None:
        """The bytes that the cold loader reads, as a part of what the disk gives."""
        if self.cold_tokens_per_s is None or not self.disk_bytes_per_s:
            return None
        return self.cold_tokens_per_s * self.token_bytes / self.disk_bytes_per_s

    def to_json(self) -> dict[str, Any]:
        """Every figure, and the three fractions."""
        return {**asdict(self), "of_bare": self.of_bare, "of_copy": self.of_copy, "of_disk": self.of_disk}


def bench_loader(
    dataset: Dataset, seq_len: int, batch_size: int, *, rounds: int = 3, max_steps: int = 2000
) -> BenchReport:
    """Measure; takes some ten seconds.

    Args:
        dataset: A local one, of layout `tokens`.
        max_steps: Steps of a round, from the first.

    Raises:
        UsageError: If the dataset is not local, or of another layout.
    """
    if dataset.manifest.layout != "tokens" or getattr(dataset, "origin", None) is not None:
        raise UsageError(f"benchmarks.machine: expected a local dataset of tokens, got {dataset!r}.")
    plan = Loader(dataset, seq_len=seq_len, batch_size=batch_size, steps=max_steps, rank=0, world_size=1)
    steps = min(max_steps, len(plan))
    bare = _bare(plan, steps)
    tokens = steps * batch_size * seq_len

    def loader() -> None:
        for _ in Loader(dataset, seq_len=seq_len, batch_size=batch_size, steps=steps, rank=0, world_size=1):
            pass

    bare()
    loader()
    source, target = np.ones(_COPY_BYTES, np.uint8), np.empty(_COPY_BYTES, np.uint8)
    functions: list[Callable[[], object]] = [
        bare, loader, lambda: np.copyto(target, source), lambda: hashlib.sha256(source.data).digest(),
    ]  # fmt: skip
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for own_times, function in zip(times, functions):
            own_times.append(_seconds(function))
    bare_s, loader_s, copy_s, hash_s = map(statistics.median, times)
    resume_s, seek_s = _resume(dataset, seq_len, batch_size)
    cold = _forget(dataset)
    disk = _disk(dataset) if cold else None
    cold_s = _seconds(loader) if cold and _forget(dataset) else None
    return BenchReport(
        _COPY_BYTES / copy_s, _COPY_BYTES / hash_s, disk, tokens / bare_s, tokens / loader_s,
        None if cold_s is None else tokens / cold_s, _first_batch(dataset, seq_len, batch_size), resume_s, seek_s,
        batch_size * seq_len * 8, 2 if dataset.manifest.dtype == "U16" else 4,
    )  # fmt: skip


def table(report: BenchReport) -> str:
    """The report as a person reads it."""

    def rate(value: float | None, unit: str) -> str:
        return "not measured" if value is None else f"{value / 1e6:>12,.0f} M{unit}/s"

    def part(value: float | None) -> str:
        return "" if value is None else f"{value:>6.2f}"

    rows = [
        ("this machine", "", ""),
        ("  copying memory", rate(report.copy_bytes_per_s, "B"), ""),
        ("  sha256, one core", rate(report.hash_bytes_per_s, "B"), ""),
        ("  disk, the dataset's files", rate(report.disk_bytes_per_s, "B"), ""),
        ("  bare NumPy gather and cast", rate(report.bare_tokens_per_s, " tokens"), ""),
        ("the loader", "", ""),
        (
            "  from the page cache",
            rate(report.loader_tokens_per_s, " tokens"),
            f"{part(report.of_bare)} of the bare gather",
        ),
        ("", "", f"{part(report.of_copy)} of copying, in bytes written"),
        (
            "  from the disk",
            rate(report.cold_tokens_per_s, " tokens"),
            "" if report.of_disk is None else f"{part(report.of_disk)} of the disk, in bytes read",
        ),
        ("  process start to first batch", f"{report.first_batch_s * 1e3:>12,.0f} ms", ""),
        ("  resumed in mid-epoch, next batch", f"{report.resume_s * 1e3:>12,.1f} ms", ""),
    ]
    return "\n".join(f"{name:<36} {value:<26} {comment}".rstrip() for name, value, comment in rows)


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _bare(plan: Loader, steps: int) -> Callable[[], None]:
    """A gather-and-cast that knows every slice and offset beforehand."""
    assert plan.seq_len is not None
    length = plan.seq_len
    taken = plan.run.steps(0, steps, 0, 1)
    arrays: dict[int, NDArray[Any]] = {i: plan.dataset.open_slice(i).tokens for i in np.unique(taken.slices).tolist()}
    rows = list(zip(taken.slices.tolist(), (taken.samples * length).tolist()))
    batches = [rows[low:high] for low, high in zip(taken.bounds[:-1].tolist(), taken.bounds[1:].tolist())]
    buffer = np.empty((max(map(len, batches)), length + 1), np.int64)

    def bare() -> None:
        for batch in batches:
            for row, (index, start) in enumerate(batch):
                piece = arrays[index][start : start + length + 1]
                buffer[row, : len(piece)] = piece

    return bare


def _resume(dataset: Dataset, seq_len: int, batch_size: int) -> tuple[float, float]:
    times, seeks = [], []
    for part in (0.1, 0.5, 0.9):
        loader = Loader(dataset, seq_len=seq_len, batch_size=batch_size, rank=0, world_size=1)
        state = loader.state_at(int(part * len(loader)))
        other = Loader(dataset, seq_len=seq_len, batch_size=batch_size, rank=0, world_size=1)
        began = time.perf_counter()
        other.load_state_dict(state)
        with other:
            next(iter(other))
        times.append(time.perf_counter() - began)
        step = int(part * len(loader))
        fresh = Loader(dataset, seq_len=seq_len, batch_size=batch_size, rank=0, world_size=1)
        seeks.append(_seconds(lambda fresh=fresh, step=step: fresh.run.steps(step, step + 1, 0, 1)))  # type: ignore[misc]
    return statistics.median(times), statistics.median(seeks)


def _first_batch(dataset: Dataset, seq_len: int, batch_size: int) -> float:
    code = (
        "import sys, forebay\n"
        "path, seq_len, batch_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])\n"
        "next(iter(forebay.Loader(path, seq_len=seq_len, batch_size=batch_size, rank=0, world_size=1)))"
    )
    command = [sys.executable, "-c", code, str(dataset.path), str(seq_len), str(batch_size)]
    return statistics.median(_seconds(lambda: subprocess.run(command, check=True)) for _ in range(3))


def _paths(dataset: Dataset) -> Iterator[Path]:
    return (dataset.slice_path(index) for index in range(dataset.num_slices))


def _forget(dataset: Dataset) -> bool:
    """Ask the kernel to drop the slices from the page cache; whether it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in _paths(dataset):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


def _disk(dataset: Dataset) -> float:
    buffer, total = bytearray(_READ_BYTES), 0
    began = time.perf_counter()
    for path in _paths(dataset):
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(buffer):
                total += got
    return total / (time.perf_counter() - began)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a local dataset")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens a sample (2048)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples a step (8)")
    parser.add_argument("--steps", type=int, default=2000, help="steps of a round (2000)")
    parser.add_argument("--rounds", type=int, default=3, help="the median counts (3)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    dataset = open_dataset(args.dataset)
    report = bench_loader(dataset, args.seq_len, args.batch_size, rounds=args.rounds, max_steps=args.steps)
    print(json.dumps(report.to_json()) if args.json else table(report))


if __name__ == "__main__":
    main()
