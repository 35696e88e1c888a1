"""A worker's hand and what fetches for it, granted leases by the test."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calibration import scaled
from forebay.network.client import Client
from forebay.store.cache import SliceCache
from forebay.worker.answers import Answer
from forebay.worker.fetching import Fetcher, Shelf
from forebay.worker.hand import Hand, Held

DATASET = "ab" * 32


class FetchingWorker:
    """A hand and what fetches for it."""

    def __init__(self, client: Client, directory: Path, cache_bytes: int = 1_000_000) -> None:
        self.cache = SliceCache(directory, cache_bytes)
        self.hand = Hand(4, None, cache_bytes, 0.1, lambda grant: self.cache.unpin(grant.sha256))
        self.shelf = Shelf(self.cache)
        self.fetcher = Fetcher(client, self.cache, self.shelf, self.hand, 0.2, threads=2)
        self.fetcher.start()

    def lease(self, sha256: str, num_bytes: int, providers: Sequence[dict[str, Any]], lease_id: str = "1") -> Held:
        """A lease of slice 3 of some dataset, as if the scheduler had granted it."""
        lease = {
            "lease_id": lease_id, "job": "j", "job_id": "j", "epoch": 0, "slice": 3, "index": 3, "dataset_id": DATASET,
            "name": "slices/3", "sha256": sha256, "bytes": num_bytes, "count": 9, "start": 0, "stop": 9,
            "sample_base": 0, "seed": 0, "seq_len": 1, "layout": "tokens", "dtype": "U16", "vocab_size": 1,
            "providers": list(providers), "expires_in_s": 30.0,
        }  # fmt: skip
        said = self.hand.state()
        live = {held: {"stop": 9, "expires_in_s": 30.0} for held in said.held}
        self.hand.apply_answer(said, answer(leases=[lease], live=live))
        return next(held for held in self.hand.held if held.grant.lease_id == lease_id)

    def fetched(self, held: Held) -> bytes:
        """Waits until its slice is here."""
        deadline = time.monotonic() + scaled(10)
        while held.path is None and time.monotonic() < deadline:
            assert not held.over and self.fetcher.failure is None, (held.reason, self.fetcher.failure)
            time.sleep(0.005)
        assert held.path is not None
        return held.path.read_bytes()

    def lost(self, held: Held) -> str:
        """Waits until it is given back, or failed: then why."""
        deadline = time.monotonic() + scaled(10)
        while not held.over and time.monotonic() < deadline:
            time.sleep(0.005)
        assert held.over and held.path is None
        return held.reason

    @property
    def bad(self) -> list[tuple[str, bool]]:
        """Who was left out, and whether for wrong bytes."""
        return [(bad.peer_id, bad.wrong) for bad in self.hand.tally.bad]

    def close(self) -> None:
        self.hand.close()
        self.fetcher.close()
        self.hand.empty()


def answer(**more: Any) -> Answer:
    empty = {
        "uses": [], "refused": [], "live": {}, "lost": [], "leases": [], "wait_s": 0.1, "done": False, "paused": False,
        "tell_have": False,
    }  # fmt: skip
    return Answer.from_json({**empty, **more})
