"""A worker's leases, granted by the test, and the fetcher that serves them."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from forebay.dataset.manifest import SliceInfo, SliceTable
from forebay.dataset.reader import Dataset
from forebay.fetch.cache import CacheSettings
from forebay.fetch.feed import ChunkFeed
from forebay.lease.fetching import GrantedProviders, LeaseFetches
from forebay.lease.messages import ExchangeReply
from forebay.lease.state import ActiveLease, LeaseState
from forebay.network.client import Client
from forebay.network.peer_source import FromUrls
from forebay.order.plan import Order
from forebay.order.run import Run
from forebay.order.step_index import BatchSizes
from support.waiting import until

DATASET = "ab" * 32
LEASE = """{"job": "j", "job_id": "j", "epoch": 0, "count": 9, "start": 0, "stop": 9, "sample_base": 0, "seed": 0,
    "seq_len": 1, "layout": "tokens", "dtype": "U16", "vocab_size": 1, "expires_in_s": 30.0}"""
REPLY = """{"uses": [], "refused": [], "active": {}, "lost": [], "leases": [], "wait_s": 0.1, "done": false,
    "paused": false, "report_cached": false}"""


def table_of(sha256: str, num_bytes: int, chunk_bytes: int = 0) -> SliceTable:
    """Return a table of four slices, the last of which has these values; by default a slice is one chunk."""
    values = [(f"{i:064x}", 1) for i in range(3)] + [(sha256, num_bytes)]
    rows = [SliceInfo(i, f"{i}.safetensors", size, sha256, 9, 1) for i, (sha256, size) in enumerate(values)]
    return SliceTable.from_rows(rows, chunk_bytes or num_bytes)


def lease_of(row: SliceInfo, dataset_id: str, providers: Sequence[dict], lease_id: str = "1") -> dict[str, Any]:
    """Return a lease of a slice as a scheduler grants it."""
    return json.loads(LEASE) | {
        "lease_id": lease_id, "slice": row.index, "dataset_id": dataset_id, "sha256": row.sha256,
        "bytes": row.bytes,
        "providers": [{"peer_id": "", **provider} for provider in providers],
    }  # fmt: skip


class FetchingWorker:
    """Leases, and the feed that fetches their slices: those of a dataset, or of a table."""

    def __init__(
        self, client: Client, directory: Path, cache_bytes: int = 1_000_000, from_urls: FromUrls = "any",
        dataset: Dataset | None = None, table: SliceTable | None = None,
    ) -> None:  # fmt: skip
        manifest = SimpleNamespace(layout="rows", dtype="")
        self.dataset = dataset or SimpleNamespace(
            table=table, id=DATASET, manifest=manifest, name="j", url="j", leaves=lambda index: b""
        )
        granted, run = GrantedProviders(), Run([Order(np.full(4, 9), 0, 1)], BatchSizes.of(1), epochs=None)
        self.feed = ChunkFeed(
            [self.dataset], [True], run, (0, 1), 1, CacheSettings(directory, cache_bytes, 8, None, False),
            lambda cache, on_change: granted, tries=2, timeout_s=1.0, max_backoff_s=1.0,
        )  # fmt: skip
        self.cache = self.feed.open_cache()
        self.leases = LeaseState(4, cache_bytes, 0.1, lambda grant: self.fetcher.release(grant))
        job = SimpleNamespace(
            identity=client.identity, client=client, patience_s=0.2, from_urls=from_urls, dataset=self.dataset
        )
        self.fetcher = LeaseFetches(job, self.feed, granted, 0, self.leases)

    def lease(self, providers: Sequence[dict], lease_id: str = "1", index: int = 3) -> ActiveLease:
        """Add a lease of a slice, as if the scheduler had granted it; providers are origins by default."""
        lease = lease_of(self.dataset.table.row(index), self.dataset.id, providers, lease_id)
        request = self.leases.request(time.monotonic())
        live = {lease: {"stop": 9, "expires_in_s": 30.0} for lease in request.known_leases}
        with self.leases.locked():
            self.leases.receive(request, answer(leases=[lease], active=live), time.monotonic())
        self.fetcher.update()
        return next(lease for lease in self.leases.leases if lease.grant.lease_id == lease_id)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait, and look at the leases meanwhile, as a session does."""

        def update():
            self.fetcher.update()
            return condition()

        until(update)

    def fetched(self, lease: ActiveLease) -> bytes:
        """Wait for its slice; return its bytes."""
        self.until(lambda: lease.path is not None or lease.ended or self.fetcher.failure is not None)
        return lease.path.read_bytes()

    def lost(self, lease: ActiveLease) -> str:
        """Wait until it is released, or failed; return the reason."""
        self.until(lambda: lease.ended)
        assert lease.path is None
        return lease.reason

    @property
    def rejected(self) -> list[tuple[str, bool]]:
        """The providers that were rejected; True for wrong bytes."""
        return [(invalid.peer_id, invalid.wrong) for invalid in self.leases.rejected]

    def close(self) -> None:
        self.leases.close()
        self.leases.clear()
        self.feed.close()


def answer(**more: Any) -> ExchangeReply:
    return ExchangeReply.from_json(json.loads(REPLY) | more)
