"""Shards as Templar's are: `train_%06d.npy` and the ids of its samples, of both generations, in bounded memory.

Tokens are cut at a fixed count across documents. A shard is written under a temporary name with NumPy's header of the
count that it will have, its samples are hashed as they come, and it gets its names last: first the ids, then the
tokens. `shards.json`, written at the very end, has each file's size and sha256; a client that fetches
shards beside it compares them.

Memory: some 8 MiB, and 8 bytes for each sample of a shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.reader import Dataset
from forebay.dataset.slices import hash_file
from forebay.errors import DatasetError, UsageError
from forebay.files import atomic_write, open_atomic, remove_stale
from forebay.formats.external import token_dtype
from forebay.formats.vectors import npy_header, sample_id

LIST_FILE = "shards.json"
LIST_FORMAT = "forebay shards 2"
SHARD_TOKENS = 100 << 30
Generation = Literal["bin", "npy"]
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Shard:
    """One pair of files. `num_samples` * seq_len tokens."""

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
    generation: Generation = "npy",
    prefix: str = "",
) -> list[Shard]:
    """Write tokens as shards. Shards of an earlier run of these names are replaced.

    The tokens after the last whole sample, fewer than `seq_len`, are left out: a shard is a whole number of samples.

    Args:
        source: A dataset of layout `tokens`, or vectors of tokens that follow each other.
        out: A directory, made if absent.
        shard_tokens: Of each shard but the last; rounded down to whole samples.
        dtype: uint16 or uint32; by default that of the source.
        generation: `bin`: ids as raw u64 in `.bin`, the first generation's way; `npy`: in `.npy`.

    Raises:
        UsageError: If an argument is out of range, or the source has no tokens.
        DatasetError: If a token does not fit the type, or fewer than one sample came.
        OSError: If they cannot be written.
    """
    out = Path(out)
    if seq_len < 1 or shard_tokens < seq_len:
        raise UsageError(f"shards: expected shard_tokens >= seq_len >= 1, got {shard_tokens=}, {seq_len=}.")
    if generation not in ("bin", "npy"):
        raise UsageError(f"shards: expected generation 'bin' or 'npy', got {generation!r}.")
    pieces = _pieces(source)
    first = next(pieces, None)
    if first is None:
        raise DatasetError(f"{out}: expected tokens to write, got none. Nothing was written.")
    kind = token_dtype(dtype if dtype is not None else first.dtype)
    if kind not in (np.dtype("<u2"), np.dtype("<u4")):
        raise UsageError(f"shards: expected uint16 or uint32, got {kind}. Say dtype=.")
    out.mkdir(parents=True, exist_ok=True)
    remove_stale(out)
    (out / LIST_FILE).unlink(missing_ok=True)
    blocks, shard_samples = _samples(chain([first], pieces), kind, seq_len, out), shard_tokens // seq_len
    block = next(blocks, None)
    shards: list[Shard] = []
    while block is not None:
        tokens = out / f"{prefix or 'train'}_{len(shards):06d}.npy"
        ids = out / f"sample_ids_{prefix and prefix + '_'}{len(shards):06d}.{generation}"
        sample_ids: list[NDArray[np.uint64]] = []
        count = 0
        with open_atomic(tokens) as file:
            file.write(npy_header(kind, 0))
            while block is not None and count < shard_samples:
                here, block = block[: shard_samples - count], block[shard_samples - count :]
                file.write(here.view(np.uint8).data)
                sample_ids.append(np.array([sample_id(row) for row in here], "<u8"))
                count += len(here)
                block = block if len(block) else next(blocks, None)
            file.seek(0)
            file.write(npy_header(kind, count * seq_len))
            raw = np.concatenate(sample_ids).view(np.uint8).data
            atomic_write(ids, [npy_header(np.dtype("<u8"), count), raw] if generation == "npy" else [raw])
        shards.append(Shard(len(shards), tokens, ids, count))
    if not shards:
        raise DatasetError(f"{out}: expected at least one sample of {seq_len} tokens, got fewer tokens.")
    _write_list(out, shards, seq_len, kind)
    return shards


def _samples(pieces: Iterable[NDArray[Any]], kind: np.dtype[Any], seq_len: int, out: Path) -> Iterator[NDArray[Any]]:
    pending = np.empty(0, kind)
    step = max(1, _BLOCK_BYTES // (seq_len * kind.itemsize)) * seq_len
    for piece in pieces:
        for start in range(0, len(piece), step):
            pending = np.concatenate([pending, _narrowed(piece[start : start + step], kind, out)])
            num_whole = len(pending) // seq_len * seq_len
            if num_whole:
                yield pending[:num_whole].reshape(-1, seq_len)
                pending = pending[num_whole:]


def _narrowed(tokens: NDArray[Any], kind: np.dtype[Any], out: Path) -> NDArray[Any]:
    limit = np.iinfo(kind).max
    if tokens.dtype != kind and len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) > limit):
        index = int(np.flatnonzero((tokens < 0) | (tokens > limit))[0])
        raise DatasetError(f"{out}: expected tokens in [0, {limit}], got {int(tokens[index])}. Write them as uint32.")
    return tokens.astype(kind, copy=False)


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


def _write_list(out: Path, shards: list[Shard], seq_len: int, kind: np.dtype[Any]) -> None:

    def file(path: Path) -> dict[str, Any]:
        return {"name": path.name, "bytes": path.stat().st_size, "sha256": hash_file(path)}

    rows = [{"samples": s.num_samples, "tokens": file(s.tokens), "ids": file(s.ids)} for s in shards]
    listing = {"format": LIST_FORMAT, "seq_len": seq_len, "dtype": kind.name, "shards": rows}
    atomic_write(out / LIST_FILE, json.dumps(listing, indent=1).encode() + b"\n")
