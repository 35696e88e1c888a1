"""Tokens to files that hold one vector each: nanoGPT's and llm.c's .bin, Psyche's .ds, Templar's .npy with sample ids.

Hides: how a stream is cut into files of known lengths, as headers come first. A piece is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.convert.content import Options, TokenSource, Written
from forebay.convert.streams import Stream, settle
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.errors import UsageError
from forebay.formats.shard_writer import write_unlisted

_LLMC = {"U16": (20240520, 1), "U32": (20240801, 7)}  # What the 256 int32 of the header begin with: magic and version.
_LLMC_MOST = (1 << 31) - 1
_SEQ_LEN = 2048


def write_bin(source: TokenSource, out: Path, options: Options) -> Written:
    """Headerless little-endian tokens, as nanoGPT has them; with `more["header"]`, llm.c's header before them.

    One file where `out` ends so; else a directory with `<name>.bin`, or `<name>_000000.bin` … of `shard_tokens`.
    """
    stream = settle(source, options, "none")
    per_file = options.shard_tokens or max(1, stream.num_tokens)
    has_header = bool(options.more.get("header"))
    if has_header and min(per_file, stream.num_tokens) > _LLMC_MOST:
        raise UsageError(
            f"bin: expected at most {_LLMC_MOST} tokens in a file with llm.c's header, got {stream.num_tokens}. "
            "Give --shard-tokens 100000000."
        )

    def header(count: int) -> bytes:
        if not has_header:
            return b""
        return np.array([*_LLMC[stream.dtype], count] + [0] * 253, "<i4").tobytes()

    return _write(stream, out, options, ".bin", header, per_file)


def write_ds(source: TokenSource, out: Path, options: Options) -> Written:
    """As headerless .bin, under Psyche's suffix."""
    stream = settle(source, options, "none")
    return _write(stream, out, options, ".ds", lambda count: b"", options.shard_tokens or max(1, stream.num_tokens))


def write_npy(source: TokenSource, out: Path, options: Options) -> Written:
    """Templar's shards: `train_%06d.npy` with NumPy's header, and the id of each sample of `seq_len` (2048) tokens.

    With `more["generation"]` `npy` (the default) the ids are `sample_ids_%06d.npy`, with `bin` raw `.bin`.
    """
    seq_len = options.seq_len or source.seq_len or _SEQ_LEN
    stream = settle(source, options, "none", whole=seq_len)
    if not stream.num_tokens:
        raise UsageError(f"npy: expected at least one sample of {seq_len} tokens, got {source.num_tokens} tokens.")
    per_file = options.shard_tokens or stream.num_tokens
    if per_file % seq_len:
        raise UsageError(f"npy: expected shards of whole samples of {seq_len} tokens, got --shard-tokens {per_file}.")
    out.mkdir()
    tokens = (part.tokens for part in stream.parts())
    generation = options.more.get("generation", "npy")
    shards = write_unlisted(tokens, out, seq_len, per_file // seq_len, TOKEN_DTYPES[stream.dtype], generation)
    stream.notes.append(f"samples of {seq_len} tokens")
    files = [Path(path.name) for shard in shards for path in (shard.tokens, shard.ids)]
    return stream.written(files, stream.num_tokens // seq_len)


def _write(stream: Stream, out: Path, options: Options, suffix: str, header: Any, per_file: int) -> Written:
    is_file = out.suffix == suffix
    if is_file and per_file < stream.num_tokens:
        raise UsageError(f"{out.name}: expected a directory for files of --shard-tokens {per_file}, got one file.")
    if not is_file:
        out.mkdir()
    name = options.name or "train"
    files: list[Path] = []
    with ExitStack() as opened:
        for index, count, tokens in _runs(stream, per_file):
            if index == len(files):
                opened.close()
                files.append(Path(f"{name}_{index:06d}{suffix}" if options.shard_tokens else f"{name}{suffix}"))
                file = opened.enter_context((out if is_file else out / files[-1]).open("wb"))
                file.write(header(count))
            file.write(np.ascontiguousarray(tokens).view(np.uint8).data)
    return stream.written([Path()] if is_file else files)


def _runs(stream: Stream, per_file: int) -> Iterator[tuple[int, int, NDArray[Any]]]:
    """(file, its tokens, some of them)."""
    index, left, room = 0, stream.num_tokens, 0
    count = 0
    for part in stream.parts():
        tokens = part.tokens
        while len(tokens):
            if not room:
                room = count = min(per_file, left)
            some, tokens = tokens[:room], tokens[room:]
            room, left = room - len(some), left - len(some)
            yield index, count, some
            index += not room
