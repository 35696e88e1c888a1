"""Shared shards as a bucket keeps them, and a view of a directory into which they are fetched."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import numpy as np

from forebay.fetch.cache import SHA256
from forebay.fetch.chunk_file import ABSENT, PRESENT, ChunkFile, read_info
from forebay.formats.shard_writer import write_shards
from forebay.formats.vectors import sample_id
from forebay.load.shard_cache import ShardFetch

L, SAMPLES, SHARDS = 128, 2000, 4
TOKEN_BYTES, HEADER_BYTES = SAMPLES * L * 2, 128  # of a shard
PREFIX = "remote/tokenized"
SETTINGS = {"sequence_length": L, "steps_per_shard": 3, "chunk_size": 1 << 16}


def shard_tokens(index: int) -> Any:
    return np.random.default_rng(index).integers(0, 50_000, SAMPLES * L).astype(np.uint16)


def write_bucket(folder: Path) -> None:
    """Write four shards of generation `bin` below the prefix."""
    tokens = [shard_tokens(index) for index in range(SHARDS)]
    write_shards(tokens, folder / PREFIX, seq_len=L, shard_tokens=SAMPLES * L, generation="bin")


def file_names(index: int) -> list[str]:
    return [f"sample_ids_{index:06d}.bin", f"train_{index:06d}.npy"]


def sent_bytes(server: Any, index: int) -> int:
    """Bytes of a shard's tokens that a server has sent."""
    return sum(size for name, size in server.bytes_sent.items() if f"train_{index:06d}" in name)


def await_shard(shard: ShardFetch | None) -> None:
    """Wait for a shard on its way."""
    assert len(shard.wait(float("inf"))) == SAMPLES


def read_chunks(folder: Path) -> dict[str, list[int]]:
    """The state of each chunk of the objects in a cache, which are `ids N` or `tokens N`; checks their bytes."""
    chunks = {}
    for path in folder.iterdir() if folder.exists() else ():
        if SHA256.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # Removed meanwhile.
                info = read_info(folder / "chunks" / path.name)
                if path.stat().st_size < info.offset + info.bytes:  # It is being made; the cache's lock is not ours.
                    continue
                entry = ChunkFile(path, folder / "chunks" / path.name, info)
                marks, data = entry.marks.copy(), path.read_bytes()
                marks[entry.marks != marks] = ABSENT  # Stored or removed meanwhile.
                chunks |= _compare(data, info, marks)
    return chunks


def complete_shards(folder: Path) -> list[int]:
    """The shards of which a cache has all samples and ids."""
    complete = {name for name, marks in read_chunks(folder).items() if set(marks) == {PRESENT}}
    return [index for index in range(SHARDS) if {f"tokens {index}", f"ids {index}"} <= complete]


@functools.cache
def _objects():
    result = {}
    for index in range(SHARDS):
        tokens = shard_tokens(index)
        result[f"tokens {index}"] = tokens.tobytes()
        result[f"ids {index}"] = np.array([sample_id(row) for row in tokens.reshape(-1, L)], "<u8").tobytes()
    return result


def _compare(data, info, marks):
    """Find out which object it is by its present chunks, all of which must be equal."""
    present = np.flatnonzero(marks == PRESENT)
    for name, content in _objects().items():
        parts = [slice(k * info.chunk_bytes, (k + 1) * info.chunk_bytes) for k in present.tolist()]
        if len(content) == info.bytes and all(data[info.offset :][part] == content[part] for part in parts):
            return {name if len(present) else f"nothing {info.bytes}": marks.tolist()}
    raise AssertionError(f"chunks {present} of an object of {info.bytes} bytes are not those of any")
