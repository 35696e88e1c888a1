"""Slices put into a cache as those who fetch them do."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forebay.cache.cache import ChunkCache
from forebay.dataset.chunks import ChunkHasher, root_of
from forebay.dataset.manifest import SliceInfo
from forebay.errors import UsageError
from forebay.storage.chunk_file import PRESENT, ChunkFile


def info_of(content: bytes, chunk_bytes: int = 0) -> SliceInfo:
    """What a table says of a slice with these bytes."""
    return SliceInfo(0, "slice", len(content), root_of(leaves_of(content, chunk_bytes)), 0, 0, chunk_bytes)


def leaves_of(content: bytes, chunk_bytes: int = 0) -> bytes:
    hasher = ChunkHasher(chunk_bytes)
    hasher.update(content)
    return hasher.leaves()


def put(cache: ChunkCache, content: bytes, chunk_bytes: int = 0) -> str:
    """The id of a slice that is in the cache from now on, complete. Raises UsageError with the cache's reason."""
    info = info_of(content, chunk_bytes)
    if cache.get(info.sha256) is None:
        claimed, reason = cache.claim_slice(info)
        if claimed is None:
            raise UsageError(reason)
        assert cache.used_bytes() <= cache.budget_bytes
        entry, chunks = claimed
        if not entry.has_leaves:
            entry.set_leaves(leaves_of(content, chunk_bytes))
        write(entry.path, content, entry.chunk_bytes, chunks.tolist())
        entry.marks[chunks] = PRESENT
        cache.complete(entry, chunks)
        cache.unpin_slice(info.sha256)
    return info.sha256


def put_chunks(cache: ChunkCache, content: bytes, chunk_bytes: int, chunks: list[int]) -> ChunkFile:
    """The file of a slice of which these chunks are in the cache from now on, and pinned."""
    info = info_of(content, chunk_bytes)
    entry = cache.open(info)
    if not entry.has_leaves:
        entry.set_leaves(leaves_of(content, chunk_bytes))
    cache.pin([(entry, np.array(chunks))])
    claimed, reason = cache.claim(entry, np.array(chunks))
    if reason:
        cache.unpin([(entry, np.array(chunks))])
        raise UsageError(reason)
    write(entry.path, content, chunk_bytes, claimed.tolist())
    entry.marks[claimed] = PRESENT
    cache.complete(entry, claimed)
    return entry


def write(path: Path, content: bytes, chunk_bytes: int, chunks: list[int]) -> None:
    with path.open("r+b") as file:
        for chunk in chunks:
            file.seek(chunk * chunk_bytes)
            file.write(content[chunk * chunk_bytes : (chunk + 1) * chunk_bytes])
