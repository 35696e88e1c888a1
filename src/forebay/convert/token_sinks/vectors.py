"""Tokens to files that hold one vector each: nanoGPT's and llm.c's .bin, Psyche's .ds, Templar's .npy with sample ids.

Hides: how a stream is cut into files of known lengths, as headers come first. A piece is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from forebay.convert.content import Options, TokenSource, Written
from forebay.convert.streams import Stream, settle
from forebay.dataset.manifest import TOKEN_DTYPES
from forebay.errors import UsageError
from forebay.formats.npy import npy_head, sample_id

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
    is_raw = options.more.get("generation", "npy") == "bin"
    out.mkdir()
    files: list[Path] = []
    ids: list[NDArray[np.uint64]] = []
    held: list[NDArray[Any]] = []
    with _Opened() as opened:
        for index, count, tokens, is_last in _runs(stream, per_file):
            if opened.file is None:
                files.append(Path(f"train_{index:06d}.npy"))
                opened.begin(out / files[-1], npy_head(TOKEN_DTYPES[stream.dtype], count))
            opened.write(tokens, is_last)
            ids.append(_ids(held, tokens, seq_len))
            if is_last:
                files.append(Path(f"sample_ids_{index:06d}.{'bin' if is_raw else 'npy'}"))
                head = b"" if is_raw else npy_head(np.dtype("<u8"), count // seq_len)
                (out / files[-1]).write_bytes(head + np.concatenate(ids).astype("<u8").tobytes())
                ids = []
    stream.notes.append(f"samples of {seq_len} tokens")
    return stream.written(files, stream.num_tokens // seq_len)


def _write(stream: Stream, out: Path, options: Options, suffix: str, header: Any, per_file: int) -> Written:
    is_file = out.suffix == suffix
    if is_file and per_file < stream.num_tokens:
        raise UsageError(f"{out.name}: expected a directory for files of --shard-tokens {per_file}, got one file.")
    if not is_file:
        out.mkdir()
    name = options.name or "train"
    files: list[Path] = []
    with _Opened() as opened:
        for index, count, tokens, is_last in _runs(stream, per_file):
            if opened.file is None:
                files.append(Path(f"{name}_{index:06d}{suffix}" if options.shard_tokens else f"{name}{suffix}"))
                opened.begin(out if is_file else out / files[-1], header(count))
            opened.write(tokens, is_last)
    return stream.written([Path()] if is_file else files)


class _Opened:
    """The file that is being written; closed with its last token, and where writing fails."""

    def __init__(self) -> None:
        self.file: BinaryIO | None = None

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def begin(self, path: Path, header: bytes) -> None:
        self.file = path.open("wb")
        self.file.write(header)

    def write(self, tokens: NDArray[Any], is_last: bool) -> None:
        assert self.file is not None
        self.file.write(np.ascontiguousarray(tokens).view(np.uint8).data)
        if is_last:
            self.__exit__()


def _runs(stream: Stream, per_file: int) -> Iterator[tuple[int, int, NDArray[Any], bool]]:
    """(file, its tokens, some of them, whether these are its last)."""
    index, left, room = 0, stream.num_tokens, 0
    count = 0
    for part in stream.parts():
        tokens = part.tokens
        while len(tokens):
            if not room:
                room = count = min(per_file, left)
            some, tokens = tokens[:room], tokens[room:]
            room, left = room - len(some), left - len(some)
            yield index, count, some, not room
            index += not room


def _ids(held: list[NDArray[Any]], tokens: NDArray[Any], seq_len: int) -> NDArray[np.uint64]:
    """The ids of the samples that are whole with these tokens; the rest is held."""
    whole = np.concatenate([*held, tokens]) if held else tokens
    stop = len(whole) // seq_len * seq_len
    held[:] = [whole[stop:]] if stop < len(whole) else []
    return np.array([sample_id(row) for row in whole[:stop].reshape(-1, seq_len)], np.uint64)
