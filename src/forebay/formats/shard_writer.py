"""Writes Templar's token shards: `train_%06d.npy` and the ids of their samples, in bounded memory.

Tokens are cut at a fixed count across documents. Each file is written atomically, the ids before their tokens, so a
shard whose tokens exist is complete. Memory: some 8 MiB, and 8 bytes for each sample of a shard.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.reader import Dataset
from forebay.errors import DatasetError, UsageError
from forebay.files import atomic_write, open_atomic, remove_stale
from forebay.formats.external import token_dtype
from forebay.formats.vectors import npy_header, sample_id

SHARD_TOKENS = 100 << 30
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Shard:
    """A pair of files with `num_samples` * seq_len tokens."""

    index: int
    tokens: Path
    ids: Path
    num_samples: int


def write_shards(
    source: Dataset | Iterable[NDArray[Any]],
    out: str | Path,
    *,
    seq_len: int = 2048,
    shard_tokens: int = SHARD_TOKENS,
    dtype: Any = None,
    generation: Literal["bin", "npy"] = "npy",
) -> list[Shard]:
    """Write tokens as shards. Existing shards of the same names are replaced.

    The tokens after the last whole sample, fewer than `seq_len`, are left out.

    Args:
        source: A dataset of layout `tokens`, or consecutive vectors of tokens.
        out: A directory, created if absent.
        shard_tokens: Tokens of each shard but the last; rounded down to whole samples.
        dtype: uint16 or uint32; by default that of the source.
        generation: Format of the ids: `bin`: raw u64, as in the first generation of shards; `npy`.

    Raises:
        UsageError: If an argument is out of range.
        DatasetError: If a token does not fit the type, or there is no whole sample.
        OSError: If they cannot be written.
    """
    out = Path(out)
    if seq_len < 1 or shard_tokens < seq_len:
        raise UsageError(f"shards: expected shard_tokens >= seq_len >= 1, got {shard_tokens=}, {seq_len=}.")
    if generation not in ("bin", "npy"):
        raise UsageError(f"shards: expected generation 'bin' or 'npy', got {generation!r}.")
    pieces = _pieces(source)
    first = next(pieces, np.empty(0, np.uint16))
    kind = token_dtype(first.dtype if dtype is None else dtype)
    if kind not in (np.dtype("<u2"), np.dtype("<u4")):
        raise UsageError(f"shards: expected uint16 or uint32, got {kind}. Set dtype=.")
    out.mkdir(parents=True, exist_ok=True)
    remove_stale(out)
    blocks = _samples(chain([first], pieces), kind, seq_len, out)
    block = next(blocks, None)
    shards: list[Shard] = []
    while block is not None:
        tokens, ids = out / f"train_{len(shards):06d}.npy", out / f"sample_ids_{len(shards):06d}.{generation}"
        sample_ids = array("Q")
        with open_atomic(tokens) as file:
            file.write(npy_header(kind, 0))
            while block is not None and (capacity := shard_tokens // seq_len - len(sample_ids)):
                file.write(block[:capacity].view(np.uint8).data)
                sample_ids.extend(map(sample_id, block[:capacity]))
                block = block[capacity:] if len(block) > capacity else next(blocks, None)
            file.seek(0)
            file.write(npy_header(kind, len(sample_ids) * seq_len))
            raw = np.asarray(sample_ids, "<u8").view(np.uint8).data
            atomic_write(ids, [npy_header(np.dtype("<u8"), len(sample_ids)), raw] if generation == "npy" else [raw])
        shards.append(Shard(len(shards), tokens, ids, len(sample_ids)))
    if not shards:
        raise DatasetError(f"{out}: expected at least one sample of {seq_len} tokens, got fewer tokens.")
    return shards


def _samples(pieces: Iterable[NDArray[Any]], kind: np.dtype[Any], seq_len: int, out: Path) -> Iterator[NDArray[Any]]:
    limit = np.iinfo(kind).max
    pending = np.empty(0, kind)
    step = max(1, _BLOCK_BYTES // (seq_len * kind.itemsize)) * seq_len
    for piece in pieces:
        for start in range(0, len(piece), step):
            tokens = piece[start : start + step]
            if tokens.dtype != kind and (int(tokens.min()) < 0 or int(tokens.max()) > limit):
                token = int(tokens[(tokens < 0) | (tokens > limit)][0])
                raise DatasetError(f"{out}: expected tokens in [0, {limit}], got {token}. Write them as uint32.")
            pending = np.concatenate([pending, tokens.astype(kind, copy=False)])
            num_whole = len(pending) // seq_len * seq_len
            if num_whole:
                yield pending[:num_whole].reshape(-1, seq_len)
                pending = pending[num_whole:]


def _pieces(source: Dataset | Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    if not isinstance(source, Dataset):
        for piece in source:
            if piece.ndim != 1 or piece.dtype.kind not in "iu":
                raise UsageError(f"shards: expected vectors of integers, got {piece.dtype} {list(piece.shape)}.")
            yield piece
        return
    if source.manifest.layout != "tokens":
        raise UsageError(f"{source.path}: expected a dataset of layout tokens, got {source.manifest.layout}.")
    for index in range(source.num_slices):
        yield source.open_slice(index).tokens
