"""The order of a loader's run: the whole dataset's, which all ranks share, or of slices that each rank owns by hash."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forebay.dataset.reader import Dataset
from forebay.errors import UsageError
from forebay.load.samples import View
from forebay.order.homes import I64, homes_of

SHARDINGS = ("order", "hash")
SLACK = 0.1
"""A worker owns at most this part more slices than the mean, rounded up to a whole slice: with few slices a worker much
more than a tenth (81 slices on 8 workers: at most 12, 1.19 times the mean)."""


@dataclass(frozen=True)
class Share:
    """What one worker owns of a dataset.

    Attributes:
        view: The dataset's, with no samples in slices of others.
        num_samples: Of each worker, int64 [W].
        workers: Their names, by rank.
    """

    view: View
    num_samples: I64
    workers: tuple[str, ...]


def share_of(dataset: Dataset, view: View, rank: int, world_size: int, workers: Sequence[str] | None) -> Share:
    """A rank's part by rendezvous hashing of the slices' hashes.

    Args:
        workers: Names by rank, which decide; by default the ranks' numbers.

    Raises:
        UsageError: If the names are not as many as ranks, or a rank would own nothing.
    """
    names = tuple(map(str, range(world_size) if workers is None else workers))
    if len(names) != world_size:
        raise UsageError(f"workers: expected a name for each of {world_size} ranks, got {len(names)}.")
    homes = homes_of(dataset.table.sha256, names, SLACK)
    owned = np.bincount(homes, weights=view.counts, minlength=world_size).astype(np.int64)
    if not owned.all():
        raise UsageError(
            f"sharding='hash': expected samples for each of {world_size} workers, got none for "
            f"{names[int(owned.argmin())]!r}: {np.count_nonzero(view.counts)} slices are too few. Prepare smaller "
            "slices (--slice-bytes), or use sharding='order'."
        )
    return Share(replace(view, counts=np.where(homes == rank, view.counts, 0)), owned, names)
