"""Writes Templar's token shards: `train_%06d.npy` and the ids of their samples, in bounded memory.

Tokens are cut at a fixed count across documents. Each file is written atomically, the ids before their tokens, so a
shard whose tokens exist is complete. Memory: some 8 MiB, and 8 bytes for each sample of a shard.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.dataset.reader import Dataset, local_path
from forebay.dataset.slices import hash_file
from forebay.errors import DatasetError, UsageError
from forebay.files import atomic_write, open_atomic, remove_stale
from forebay.formats.base import Format
from forebay.formats.bucket_sink import write_to_bucket
from forebay.formats.conversion import ConvertOptions, OutputFile, TokenPart, TokenSource, Written
from forebay.formats.external import token_dtype
from forebay.formats.sources import tokens_of_dataset
from forebay.formats.token_stream import TokenDigest, build_stream
from forebay.formats.vectors import npy_header, sample_id
from forebay.storage.addresses import is_url, join_url

SHARD_TOKENS = 100 << 30
SEQ_LEN = 2048
_BLOCK_BYTES = 4 << 20
_NO_ENDS = np.empty(0, np.uint64)


@dataclass(frozen=True)
class Shard:
    """A pair of paths, or in a bucket of URLs, with `num_samples` * seq_len tokens."""

    index: int
    tokens: Any
    ids: Any
    num_samples: int


class Shards(Format):
    """Shards and the ids of their samples, of `seq_len` tokens each; a shard has at most `slice_bytes`."""

    name = "shards"
    generation = "npy"

    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        """In a directory; the tokens after the last whole sample are left out."""
        stream, sink, files = build_stream(source, options, "none"), options.sink, list(options.sink.committed)
        kind, seq_len = TOKEN_DTYPES[stream.dtype], options.seq_len or SEQ_LEN
        digest = TokenDigest()
        digest.num_tokens = sum(file.count for file in files)
        stream.num_written = digest.num_tokens, 0

        def commit(path: Path, count: int) -> None:
            sha256 = hash_file(path) if sink.is_remote else ""
            files.append(sink.commit(OutputFile(path.name, path.stat().st_size, sha256, count), path))

        def blocks() -> Iterator[NDArray[Any]]:
            for block in _samples((part.tokens for part in stream.parts()), kind, seq_len, out):
                digest.add(TokenPart(block.reshape(-1), _NO_ENDS))
                yield block

        out.mkdir(exist_ok=True)
        num_tokens = options.slice_bytes // kind.itemsize
        _write(blocks(), kind, seq_len, num_tokens, self.generation, out, commit, len(files) // 2)
        if not files:
            raise _no_sample(out, seq_len)
        left_out = stream.digest.num_tokens - digest.num_tokens
        notes = (*stream.notes, *([f"left out {left_out} tokens after the last whole sample"] if left_out else []))
        names = tuple(Path(file.name) for file in files)
        return Written(names, digest.num_tokens, None, 0, digest.text, notes)


class _BinShards(Shards):
    generation = "bin"


def write_shards(
    source: Dataset | Iterable[NDArray[Any]],
    out: str | Path,
    *,
    seq_len: int = SEQ_LEN,
    shard_tokens: int = SHARD_TOKENS,
    dtype: Any = None,
    generation: Literal["bin", "npy"] = "npy",
) -> list[Shard]:
    """Write tokens as shards. In a directory, existing shards of the same names are replaced.

    The tokens after the last whole sample, fewer than `seq_len`, are left out. In a bucket, two shards at most are on
    this machine's disk (TMPDIR), each is read back, and a run after a kill goes on behind the last one.

    Args:
        source: A dataset of layout `tokens`, also a remote one, or consecutive vectors of tokens.
        out: A directory, created if absent, or a bucket and a prefix without objects.
        shard_tokens: Tokens of each shard but the last; rounded down to whole samples.
        dtype: uint16 or uint32; by default that of the source.
        generation: Format of the ids: `bin`: raw u64, as in the first generation of shards; `npy`.

    Raises:
        UsageError: If an argument is out of range.
        DatasetError: If a token does not fit the type, or there is no whole sample.
        OSError: If they cannot be written.
    """
    if seq_len < 1 or shard_tokens < seq_len:
        raise UsageError(f"shards: expected shard_tokens >= seq_len >= 1, got {shard_tokens=}, {seq_len=}.")
    if generation not in ("bin", "npy"):
        raise UsageError(f"shards: expected generation 'bin' or 'npy', got {generation!r}.")
    pieces = _pieces(source)
    first = next(pieces, np.empty(0, np.uint16))
    kind = token_dtype(first.dtype if dtype is None else dtype)
    if kind not in (np.dtype("<u2"), np.dtype("<u4")):
        raise UsageError(f"shards: expected uint16 or uint32, got {kind}. Set dtype=.")
    pieces = chain([first], pieces)
    if is_url(out):
        name = "U16" if kind.itemsize == 2 else "U32"
        if isinstance(source, Dataset):
            tokens = tokens_of_dataset(source)
        else:
            tokens = TokenSource("tokens", name, None, 0, lambda: (TokenPart(piece, _NO_ENDS) for piece in pieces))
        options = ConvertOptions(dtype=name, seq_len=seq_len, slice_bytes=shard_tokens * kind.itemsize)
        writer = Shards() if generation == "npy" else _BinShards()
        written, _, _ = write_to_bucket(tokens, str(out), f"shards {generation}", options, writer.write_tokens)
        ids, names = ([join_url(str(out), str(name)) for name in written.files[part::2]] for part in (0, 1))
        full, total = shard_tokens // seq_len, (written.num_tokens or 0) // seq_len
        counts = [min(full, total - index * full) for index in range(len(ids))]
        return [Shard(index, *pair) for index, pair in enumerate(zip(names, ids, counts))]
    out = local_path(out)
    out.mkdir(parents=True, exist_ok=True)
    remove_stale(out)
    shards = _write(_samples(pieces, kind, seq_len, out), kind, seq_len, shard_tokens, generation, out)
    if not shards:
        raise _no_sample(out, seq_len)
    return shards


def _write(
    blocks: Iterator[NDArray[Any]], kind: np.dtype[Any], seq_len: int, shard_tokens: int, generation: str, out: Path,
    commit: Callable[[Path, int], object] = lambda path, count: None, num_committed: int = 0,
) -> list[Shard]:  # fmt: skip
    block = next(blocks, None)
    shards: list[Shard] = []
    while block is not None:
        index = num_committed + len(shards)
        tokens, ids = out / f"train_{index:06d}.npy", out / f"sample_ids_{index:06d}.{generation}"
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
        commit(ids, 0)
        commit(tokens, len(sample_ids) * seq_len)
        shards.append(Shard(index, tokens, ids, len(sample_ids)))
    return shards


def _no_sample(out: Path, seq_len: int) -> DatasetError:
    return DatasetError(f"{out}: expected at least one sample of {seq_len} tokens, got fewer tokens.")


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
        yield source.read_slice(index).tokens
