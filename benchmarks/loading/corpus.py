"""The one corpus of all peers: random U16 tokens from a seed, in samples of SEQ_LEN + 1 that overlap by one token.

Sample i is tokens [i * SEQ_LEN, i * SEQ_LEN + SEQ_LEN + 1), so that every peer has inputs and labels of the same
samples, whatever it calls a record. A sample is recognised by its first four tokens. Shards are as large for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEQ_LEN = 2048
VOCABULARY = 50_000
SHARD_BYTES = 64 << 20  # What most of the peers write by default.
_CHUNK = 16 << 20


@dataclass(frozen=True)
class Corpus:
    """`tokens`: U16 [num_samples * SEQ_LEN + 1], mapped."""

    folder: Path
    tokens: NDArray[np.uint16]

    @property
    def num_samples(self) -> int:
        return (len(self.tokens) - 1) // SEQ_LEN

    @property
    def shard_samples(self) -> int:
        """Samples of a shard: 64 MiB of them, or a sixth of a small corpus."""
        return max(1, min(SHARD_BYTES // (2 * SEQ_LEN), -(-self.num_samples // 6)))

    def shards(self) -> list[tuple[int, int]]:
        """[start, stop) of each shard, in samples."""
        starts = range(0, self.num_samples, self.shard_samples)
        return [(start, min(start + self.shard_samples, self.num_samples)) for start in starts]

    def records(self, start: int, stop: int) -> NDArray[np.uint16]:
        """Samples [start, stop) as rows [stop - start, SEQ_LEN + 1]; a view."""
        windows = np.lib.stride_tricks.sliding_window_view(self.tokens, SEQ_LEN + 1)
        return windows[start * SEQ_LEN : (stop - 1) * SEQ_LEN + 1 : SEQ_LEN]

    def names(self) -> NDArray[np.uint64]:
        """The first four tokens of each sample, as one integer each [num_samples]."""
        return name_rows(self.tokens[:-1].reshape(-1, SEQ_LEN))


def name_rows(rows: NDArray[Any]) -> NDArray[np.uint64]:
    """Rows [B, >= 4] of token ids to one integer each [B]."""
    return np.ascontiguousarray(rows[:, :4].astype("<u2")).view("<u8")[:, 0]


def make(folder: Path, num_samples: int) -> Corpus:
    """The corpus of a seed, in `folder`; an old one of the same size is used again."""
    folder.mkdir(parents=True, exist_ok=True)
    path, size = folder / f"tokens-{num_samples}.u16", num_samples * SEQ_LEN + 1
    if not path.exists():
        rng = np.random.default_rng(0)
        with path.with_suffix(".part").open("wb") as file:
            for start in range(0, size, _CHUNK):
                count = min(_CHUNK, size - start)
                file.write(rng.integers(0, VOCABULARY, count, dtype=np.uint16).astype("<u2").tobytes())
        path.with_suffix(".part").rename(path)
    return load(folder)


def load(folder: Path) -> Corpus:
    """The corpus that lies in `folder`."""
    (path,) = folder.glob("tokens-*.u16")
    return Corpus(folder, np.memmap(path, "<u2", "r").view(np.ndarray))
