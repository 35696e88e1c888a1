"""Hash sharding: which worker owns which slice, so that little moves when data or workers come and go.

Rendezvous hashing: every pair of a slice and a worker has a score, a pure function of the slice's hash and the
worker's name; a slice is at home where its score is highest. A worker that joins takes about 1 / W of the slices from
all others alike, one that leaves gives its slices to all; no other slice moves, and data that is appended moves none.

Pure hashing is uneven: with n slices a worker, shares differ by some 1 / sqrt(n). `slack` bounds that: no worker
owns more than (1 + slack) times the mean, rounded up to a whole slice. A slice whose first choice is full goes to its
next, those with the highest scores first; then a few slices more move. Measured (`python -m benchmarks.homes`):
docs/sharding.md.

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


def homes_of(hashes: NDArray[np.uint8], workers: Sequence[str], slack: float | None = None) -> I64:
    """The worker that owns each slice, int64 [S], values in [0, W). A pure function of its arguments.

    `hashes` are uint8 [S, 32], the slices' sha256; equal ones have one home. Of `workers` the names decide, not their
    places; each comes once. `slack` is from 0; None for no bound.

    Cost: O(S W), 10 ns a pair; memory O(S + W), with slack O(W) for each slice that is turned away.
    """
    if not workers or len(set(workers)) != len(workers):
        raise UsageError(f"homes: expected names of workers, each once, got {list(workers)[:8]}.")
    if slack is not None and not 0 <= slack < math.inf:
        raise UsageError(f"homes: expected slack from 0, got {slack!r}.")
    words, back = np.unique(np.ascontiguousarray(hashes[:, :8]).view("<u8").reshape(-1), return_inverse=True)
    keys = [derive_key(0, "home", name) for name in workers]
    homes, scores = _best(words, keys, None)
    if slack is not None:
        _bound(words, keys, homes, scores, math.ceil((1 + slack) * len(words) / len(keys)))
    return homes[back]


def _best(words: U64, keys: Sequence[bytes], below: U64 | None) -> tuple[I64, U64]:
    """For each slice the worker of the highest score (below a bound), and that score; 0 where none is left."""
    homes, best = np.full(len(words), -1, np.int64), np.zeros(len(words), np.uint64)
    for start in range(0, len(words), _BLOCK):
        part = slice(start, start + _BLOCK)
        for index, key in enumerate(keys):
            scores = random_words(key, words[part].copy())
            wins = scores > best[part]
            if below is not None:
                wins &= scores < below[part]
            homes[part][wins], best[part][wins] = index, scores[wins]
    return homes, best


def _bound(words: U64, keys: Sequence[bytes], homes: I64, scores: U64, most: int) -> None:
    """Deferred acceptance in place: workers beyond `most` turn away their lowest scores, who ask the next."""
    while True:
        turn = np.lexsort((scores, homes))[::-1]  # By worker, highest score first.
        of = homes[turn]
        place = np.arange(len(of)) - np.searchsorted(-of, -of, side="left")
        away = turn[place >= most]
        if not len(away):
            return
        homes[away], scores[away] = _best(words[away], keys, scores[away])
