"""Slices put into a cache as those who fetch them do."""

from pathlib import Path

import numpy as np

from forebay.dataset.chunks import ChunkHasher, num_chunks, root_of
from forebay.dataset.manifest import SliceInfo
from forebay.errors import UsageError
from forebay.fetch.cache import ChunkCache
from forebay.fetch.chunk_file import PRESENT, ChunkFile

CHUNK = 4096


def content(number: int, size: int = 3 * CHUNK + 1000) -> bytes:
    """Return bytes of a slice, by default of four chunks."""
    return np.random.default_rng(number).bytes(size)


def disk_bytes(folder: Path) -> int:
    """Return the bytes on disk that count against a cache's budget."""
    files = [*folder.iterdir(), *(folder / "chunks").iterdir()]
    return sum(path.stat().st_blocks * 512 for path in files if path.is_file() and path.name != "state")


def info_of(content: bytes, chunk_bytes: int = 1 << 24) -> SliceInfo:
    """Return a table's row of a slice with these bytes."""
    return SliceInfo(0, "slice", len(content), root_of(leaves_of(content, chunk_bytes)), 0, 0, chunk_bytes)


def leaves_of(content: bytes, chunk_bytes: int = 1 << 24) -> bytes:
    hasher = ChunkHasher(chunk_bytes)
    hasher.update(content)
    return hasher.leaves()


def put(cache: ChunkCache, content: bytes, chunk_bytes: int = 1 << 24) -> str:
    """Put a complete slice into the cache; return its id. Raises UsageError with the cache's reason."""
    info = info_of(content, chunk_bytes)
    if cache.get(info.sha256) is None:
        chunks = np.arange(num_chunks(len(content), chunk_bytes))
        cache.unpin([(put_chunks(cache, content, chunk_bytes, chunks.tolist()), chunks)])
        assert cache.used_bytes() <= cache.budget_bytes
    return info.sha256


def put_chunks(cache: ChunkCache, content: bytes, chunk_bytes: int, chunks: list[int]) -> ChunkFile:
    """Put chunks of a slice into the cache and pin them; return its file."""
    entry = cache.open(info_of(content, chunk_bytes))
    if not entry.has_leaves:
        entry.set_leaves(leaves_of(content, chunk_bytes))
    cache.pin([(entry, np.array(chunks))])
    claimed, reason = cache.claim(entry, np.array(chunks))
    if reason:
        cache.unpin([(entry, np.array(chunks))])
        raise UsageError(reason)
    write(entry.path, content, entry.chunk_bytes, claimed.tolist())
    entry.marks[claimed] = PRESENT
    cache.complete(entry, claimed)
    return entry


def write(path: Path, content: bytes, chunk_bytes: int, chunks: list[int]) -> None:
    with path.open("r+b") as file:
        for chunk in chunks:
            file.seek(chunk * chunk_bytes)
            file.write(content[chunk * chunk_bytes : (chunk + 1) * chunk_bytes])
