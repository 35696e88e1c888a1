"""The scheduler's check that a worker which uses a slice has it, by the proofs of `messages.py`.

The proofs of a worker's first leases are compared with the bytes of a data node, later those of one lease in 16.
"""

import asyncio
import hashlib
import hmac
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.lease.messages import UseMessage, is_checked, proof_of, range_of
from forebay.network.app import ApiError
from forebay.network.peer import Peer
from forebay.network.pki.identity import Identity
from forebay.scheduler.catalog import Catalog
from forebay.scheduler.core import SchedulerCore

MAX_TOKENS_PER_S = 1e8  # of one lease; uses that claim more are refused until so much time has passed


@dataclass(eq=False)
class ProofChecker:
    """Checks the proofs of a request. Its choice of leases is the same after a restart, and unknown to workers."""

    identity: Identity
    catalog: Catalog
    lock: threading.Lock

    def __post_init__(self) -> None:
        self._secret = hashlib.sha256(self.identity.sign(b"forebay/1 checks of leases")).digest()
        self._num_proven = Counter[str]()  # by peer: proofs that were checked and valid

    async def check(self, peer: Peer, uses: Sequence[UseMessage], core: SchedulerCore) -> None:
        """Raise ApiError for a first use without a proof that the worker has its slice, and for a use too soon."""
        now = time.monotonic()
        for use in {use.lease_id: use for use in reversed(uses)}.values():
            lease = core.table.leases.get(use.lease_id)
            if lease is None or lease.worker != peer.peer_id or lease.position > lease.start:
                continue  # the core refuses it, or its proof was accepted before
            subject = f"uses of lease {use.lease_id}"
            tokens = (use.stop - use.start) * self.catalog.seq_len
            if (wait_s := tokens / MAX_TOKENS_PER_S - (now - lease.progress_at)) > 0:
                raise ApiError(429, "too_fast", f"{subject}: {tokens:,} tokens too soon", wait_s)
            if not use.proof:
                raise ApiError(400, "no_proof", f"{subject}: expected a proof that the worker has its slice")
            if not is_checked(self._secret, use.lease_id, self._num_proven[peer.peer_id]):
                continue
            is_valid = await asyncio.to_thread(self._is_valid, lease.slice_index, use, peer.peer_id)
            if is_valid is False:
                with self.lock:
                    core.bar(peer.peer_id, time.monotonic())
                self.identity.record_event("false_proof", peer=peer.peer_id, lease=use.lease_id)
                raise ApiError(403, "false_proof", f"{subject}: the proof does not match its slice's bytes")
            self._num_proven[peer.peer_id] += is_valid is True

    def _is_valid(self, index: int, use: UseMessage, peer_id: str) -> bool | None:
        """Whether a proof matches a slice's bytes, as an origin sends them; None: none that sends right ones answers.

        Where no origin's bytes match, it is false only if one of them has the whole slice: others are corrupt, or lie.
        """
        row = self.catalog.table.row(index)
        others = []
        for origin, data in self.catalog.read_range(index, *range_of(use.lease_id, peer_id, row.bytes)):
            if hmac.compare_digest(use.proof, proof_of(use.lease_id, peer_id, data)):
                return True
            others.append(origin)
        return False if any(self.catalog.check_slice(index, origin) for origin in others) else None
