"""A worker's leases, granted by the test, and the fetcher that serves them."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forebay.dataset.reader import Dataset
from forebay.fetch.cache import ChunkCache
from forebay.lease.buffer import LeaseBuffer
from forebay.lease.fetching import SliceFetcher
from forebay.lease.messages import ExchangeReply
from forebay.lease.state import ActiveLease, LeaseState
from forebay.network.client import Client
from forebay.storage.peer_source import FromUrls
from support.waiting import until

DATASET = "ab" * 32
LEASE = """{"job": "j", "job_id": "j", "epoch": 0, "count": 9, "start": 0, "stop": 9, "sample_base": 0, "seed": 0,
    "seq_len": 1, "layout": "tokens", "dtype": "U16", "vocab_size": 1, "expires_in_s": 30.0}"""
REPLY = """{"uses": [], "refused": [], "active": {}, "lost": [], "leases": [], "wait_s": 0.1, "done": false,
    "paused": false, "report_cached": false}"""


class FetchingWorker:
    """Leases, and the fetcher that serves them."""

    def __init__(
        self, client: Client, directory: Path, cache_bytes: int = 1_000_000, from_urls: FromUrls = "any",
        dataset: Dataset | None = None,
    ) -> None:  # fmt: skip
        self.cache = ChunkCache(directory, cache_bytes)
        state = LeaseState(4, cache_bytes, 0.1, lambda grant: self.cache.unpin_slice(grant.sha256))
        self.leases = LeaseBuffer(state)
        self.fetcher = SliceFetcher(
            client, self.cache, self.leases, 0.2, from_urls, dataset or SimpleNamespace(num_slices=0)
        )
        self.fetcher.start()

    def lease(
        self, sha256: str, num_bytes: int, providers: Sequence[dict], lease_id: str = "1",
        chunk_bytes: int = 0, index: int = 3, name: str = "slices/3",
    ) -> ActiveLease:  # fmt: skip
        """Add a lease of a slice, as if the scheduler had granted it; providers are origins by default."""
        lease = json.loads(LEASE) | {
            "lease_id": lease_id, "slice": index, "dataset_id": DATASET, "name": name, "sha256": sha256,
            "bytes": num_bytes, "chunk_bytes": chunk_bytes,
            "providers": [{"peer_id": "", **provider} for provider in providers],
        }  # fmt: skip
        request = self.leases.state.request(time.monotonic())
        live = {lease: {"stop": 9, "expires_in_s": 30.0} for lease in request.known_leases}
        with self.leases.locked() as state:
            state.receive(request, answer(leases=[lease], active=live), time.monotonic())
        return next(lease for lease in self.leases.state.leases if lease.grant.lease_id == lease_id)

    def fetched(self, lease: ActiveLease) -> bytes:
        """Wait for its slice; return its bytes."""
        until(lambda: lease.path is not None or lease.ended or self.fetcher.failure is not None)
        return lease.path.read_bytes()

    def lost(self, lease: ActiveLease) -> str:
        """Wait until it is released, or failed; return the reason."""
        until(lambda: lease.ended)
        assert lease.path is None
        return lease.reason

    @property
    def rejected(self) -> list[tuple[str, bool]]:
        """The providers that were rejected; True for wrong bytes."""
        return [(invalid.peer_id, invalid.wrong) for invalid in self.leases.state.counts.rejected]

    def close(self) -> None:
        self.leases.close()
        self.fetcher.close()
        self.leases.state.clear()


def answer(**more: Any) -> ExchangeReply:
    return ExchangeReply.from_json(json.loads(REPLY) | more)
