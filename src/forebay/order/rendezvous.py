"""Hash sharding: which worker owns which slice; few slices move when data or workers are added or removed.

Rendezvous hashing: every pair of a slice and a worker has a score, a pure function of the slice's hash and the
worker's name; the worker with the highest score owns the slice. A worker that joins takes about 1 / W of the slices
evenly from all others; the slices of one that leaves are spread over all; no other slice moves, and appended data
moves none.

Pure hashing is uneven: with n slices a worker, shares differ by some 1 / sqrt(n). `slack` bounds that: no worker
owns more than (1 + slack) times the mean, rounded up to a whole slice. A slice whose best worker is full goes to
its next best, in descending order of score; a few more slices then move. Measured (`python -m benchmarks.rendezvous`):
docs/how-to/load.md.

Sources: Thaler and Ravishankar 1998 (highest random weight); Mirrokni, Thorup and Zadimoghaddam 2018 (bounded loads);
Gale and Shapley 1962: as a slice's score and a worker's are the same number, there is one stable matching.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.order.bijection import derive_key, random_words

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]

_BLOCK = 1 << 20  # Scores at once: 8 MiB.


def assign_owners(hashes: NDArray[np.uint8], workers: Sequence[str], slack: float | None = None) -> I64:
    """The worker that owns each slice, int64 [S], values in [0, W). A pure function of its arguments.

    `hashes` are uint8 [S, 32], the slices' sha256; equal hashes have the same owner. The names of `workers`
    decide, not their order; each name occurs once. `slack` is at least 0; None for no bound.

    Cost: O(S W), 10 ns a pair; memory O(S + W), with slack O(W) for each slice that is rejected.
    """
    if not workers or len(set(workers)) != len(workers):
        raise UsageError(f"rendezvous: expected distinct names of workers, got {list(workers)[:8]}.")
    if slack is not None and not 0 <= slack < math.inf:
        raise UsageError(f"rendezvous: expected slack >= 0, got {slack!r}.")
    words, back = np.unique(np.ascontiguousarray(hashes[:, :8]).view("<u8").reshape(-1), return_inverse=True)
    keys = [derive_key(0, "home", name) for name in workers]
    owners, scores = _best(words, keys, None)
    if slack is not None:
        _bound(words, keys, owners, scores, math.ceil((1 + slack) * len(words) / len(keys)))
    return owners[back]


def _best(words: U64, keys: Sequence[bytes], below: U64 | None) -> tuple[I64, U64]:
    """For each slice the worker of the highest score (below a bound), and that score; 0 where no worker remains."""
    owners, best = np.full(len(words), -1, np.int64), np.zeros(len(words), np.uint64)
    for start in range(0, len(words), _BLOCK):
        part = slice(start, start + _BLOCK)
        for index, key in enumerate(keys):
            scores = random_words(key, words[part].copy())
            wins = scores > best[part]
            if below is not None:
                wins &= scores < below[part]
            owners[part][wins], best[part][wins] = index, scores[wins]
    return owners, best


def _bound(words: U64, keys: Sequence[bytes], owners: I64, scores: U64, max_slices: int) -> None:
    """Deferred acceptance, in place: a worker with more than `max_slices` rejects those of the lowest scores."""
    while True:
        turn = np.lexsort((scores, owners))[::-1]  # By worker, highest score first.
        owner_of = owners[turn]
        rank_of_slice = np.arange(len(owner_of)) - np.searchsorted(-owner_of, -owner_of, side="left")
        rejected = turn[rank_of_slice >= max_slices]
        if not len(rejected):
            return
        owners[rejected], scores[rejected] = _best(words[rejected], keys, scores[rejected])
