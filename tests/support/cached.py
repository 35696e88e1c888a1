"""Slices put into a cache as those who fetch them do."""

from __future__ import annotations

import hashlib

from forebay.cache.cache import NotReserved, Reservation, SliceCache
from forebay.errors import UsageError


def reserve(cache: SliceCache, sha256: str, num_bytes: int) -> Reservation:
    """Room for a slice, whatever must go for it. Raises UsageError with the cache's reason if there is none."""
    reserved = cache.try_reserve(sha256, num_bytes, evict="any")
    if isinstance(reserved, NotReserved):
        raise UsageError(reserved.detail or reserved.reason)
    return reserved


def put(cache: SliceCache, content: bytes) -> str:
    """The name of a slice that is in the cache from now on."""
    sha256 = hashlib.sha256(content).hexdigest()
    if cache.get(sha256) is None:
        reserved = reserve(cache, sha256, len(content))
        assert cache.used_bytes() <= cache.budget_bytes
        try:
            reserved.part.write_bytes(content)
            reserved.commit()
        finally:
            reserved.release()
    return sha256
