"""Proof that a worker had a slice: a keyed digest over a range of it that the lease and the worker determine.

It comes with the first use of each lease. It shows that this worker read these bytes for this lease, not that it
trained on them: it cannot be made without the bytes, nor be another worker's. The scheduler checks it against a data
node: for a worker's first leases each time, later for one lease in 16, which nobody but the scheduler can foretell.
"""

import hashlib
import hmac
from pathlib import Path

RANGE_BYTES = 4 << 10
ALWAYS_CHECKED = 8
CHECKED_OF = 16


def is_checked(secret: bytes, lease_id: str, num_proven: int) -> bool:
    """Whether the proof of a lease is checked, of a worker that had so many proofs accepted."""
    chance = hmac.digest(secret, lease_id.encode(), "sha256")[0]
    return num_proven < ALWAYS_CHECKED or chance % CHECKED_OF == 0


def range_of(lease_id: str, peer_id: str, num_bytes: int) -> tuple[int, int]:
    """The range [start, stop) of a slice that a worker proves to have under a lease."""
    length = min(RANGE_BYTES, num_bytes)
    key = hashlib.sha256(f"range {lease_id} {peer_id}".encode()).digest()
    start = int.from_bytes(key[:8], "big") % (num_bytes - length + 1)
    return start, start + length


def proof_of(lease_id: str, peer_id: str, data: bytes) -> str:
    """The proof over the bytes of the range: the first 48 bits of an HMAC-SHA256, 12 hex digits."""
    return hmac.digest(f"{lease_id} {peer_id}".encode(), data, "sha256").hex()[:12]


def prove(lease_id: str, peer_id: str, path: Path, num_bytes: int) -> str:
    """The proof for a slice in a file. OSError if it cannot be read."""
    start, stop = range_of(lease_id, peer_id, num_bytes)
    with path.open("rb") as file:
        file.seek(start)
        return proof_of(lease_id, peer_id, file.read(stop - start))
