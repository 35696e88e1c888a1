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

from forebay.arrays import Array, DType
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
from forebay.formats.token_stream import TokenDigest, TokenStream, build_stream
from forebay.formats.vectors import npy_header, sample_id
from forebay.storage.addresses import is_url, join_url

SHARD_TOKENS = 100 << 30
SEQ_LEN = 2048
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
    generation = "npy"  # Of the ids: see `write_shards`.

    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        """In a directory; the tokens after the last whole sample are left out."""
        stream, sink, files = build_stream(source, options, "none"), options.sink, list(options.sink.committed)
        kind, seq_len, digest = TOKEN_DTYPES[stream.dtype], options.seq_len or SEQ_LEN, TokenDigest()
        digest.num_tokens = sum(file.count for file in files)
        stream.num_written, suffix = (digest.num_tokens, 0), self.generation
        shard_samples = options.slice_bytes // (kind.itemsize * seq_len)
        out.mkdir(parents=True, exist_ok=True)
        remove_stale(out)
        blocks = _samples(stream, kind, seq_len, digest)
        block = next(blocks, None)
        while block is not None:
            index, sample_ids = len(files) // 2, array("Q")
            tokens, ids = out / f"train_{index:06d}.npy", out / f"sample_ids_{index:06d}.{suffix}"
            with open_atomic(tokens) as file:
                file.write(npy_header(kind, 0))
                while block is not None and (capacity := shard_samples - len(sample_ids)):
                    file.write(block[:capacity].view(np.uint8).data)
                    sample_ids.extend(map(sample_id, block[:capacity]))
                    block = block[capacity:] if len(block) > capacity else next(blocks, None)
                file.seek(0)
                file.write(npy_header(kind, len(sample_ids) * seq_len))
                raw = np.asarray(sample_ids, "<u8").view(np.uint8).data
                atomic_write(ids, [npy_header(np.dtype("<u8"), len(sample_ids)), raw] if suffix == "npy" else [raw])
            for path, count in ((ids, 0), (tokens, len(sample_ids) * seq_len)):
                sha256 = hash_file(path) if sink.is_remote else ""
                files.append(sink.commit(OutputFile(path.name, path.stat().st_size, sha256, count), path))
        if not files:
            raise DatasetError(f"{out}: expected at least one sample of {seq_len} tokens, got fewer tokens.")
        left_out = stream.digest.num_tokens - digest.num_tokens
        notes = (*stream.notes, *([f"left out {left_out} tokens after the last whole sample"] if left_out else []))
        names = tuple(Path(file.name) for file in files)
        return Written(names, digest.num_tokens, None, 0, digest.text, notes)


def write_shards(
    source: Dataset | Iterable[Array],
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
        UsageError: If an argument is out of range, or a token does not fit the type.
        DatasetError: If there is no whole sample.
        OSError: If they cannot be written.
    """
    if seq_len < 1 or shard_tokens < seq_len:
        raise UsageError(f"shards: expected shard_tokens >= seq_len >= 1, got {shard_tokens=}, {seq_len=}.")
    if generation not in ("bin", "npy"):
        raise UsageError(f"shards: expected generation 'bin' or 'npy', got {generation!r}.")
    tokens = _tokens_of_vectors(source) if not isinstance(source, Dataset) else tokens_of_dataset(source)
    if isinstance(source, Dataset) and source.manifest.layout != "tokens":
        raise UsageError(f"{source.path}: expected a dataset of layout tokens, got {source.manifest.layout}.")
    kind = token_dtype(tokens.dtype if dtype is None else dtype)
    name = next((name for name, own in TOKEN_DTYPES.items() if own == kind), "")
    if not name:
        raise UsageError(f"shards: expected uint16 or uint32, got {kind}. Set dtype=.")
    options = ConvertOptions(dtype=name, seq_len=seq_len, slice_bytes=shard_tokens * kind.itemsize)
    writer = Shards()
    writer.generation = generation
    folder: Any = out if is_url(out) else local_path(out)
    if is_url(out):
        written, _, _ = write_to_bucket(tokens, folder, f"shards {generation}", options, writer.write_tokens)
        files = [join_url(folder, str(name)) for name in written.files]
    else:
        written = writer.write_tokens(tokens, folder, options)
        files = [folder / name for name in written.files]
    full, total = shard_tokens // seq_len, (written.num_tokens or 0) // seq_len
    return [Shard(n, *pair, min(full, total - n * full)) for n, pair in enumerate(zip(files[1::2], files[::2]))]


def _samples(stream: TokenStream, kind: DType, seq_len: int, digest: TokenDigest) -> Iterator[Array]:
    pending = np.empty(0, kind)
    for part in stream.parts():
        pending = np.concatenate([pending, part.tokens])
        num_whole = len(pending) // seq_len * seq_len
        if num_whole:
            digest.add(TokenPart(pending[:num_whole], _NO_ENDS))
            yield pending[:num_whole].reshape(-1, seq_len)
            pending = pending[num_whole:]


def _tokens_of_vectors(source: Iterable[Array]) -> TokenSource:
    pieces = iter(source)
    first = next(pieces, np.empty(0, np.uint16))

    def read() -> Iterator[TokenPart]:
        for piece in chain([first], pieces):
            if piece.ndim != 1 or piece.dtype.kind not in "iu" or piece.min(initial=0) < 0:
                raise UsageError(f"shards: expected vectors of integers >= 0, got {piece.dtype} {list(piece.shape)}.")
            yield TokenPart(piece, _NO_ENDS)

    return TokenSource("vectors", str(first.dtype), None, 0, read)
