"""Fetches the slices of leases into the cache: from other workers first, from origins last, each verified.

A provider that sends wrong bytes or another range, does not answer, or has another peer's certificate is rejected for
the slice and reported to the scheduler; the slice is then requested from the others. A source that sends less than
32 KiB/s for ten seconds is rejected too. A lease whose slice was received with a wrong hash only counts as failed; one
that no provider sends is released.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forebay.dataset.chunks import CHUNKS_FILE, HASH_BYTES
from forebay.dataset.manifest import SliceInfo
from forebay.dataset.reader import Dataset
from forebay.errors import ForebayError, IntegrityError, NetworkError
from forebay.fetch.cache import ChunkCache
from forebay.fetch.engine import RunFetcher
from forebay.fetch.transfers import ChunkTransfer, Group
from forebay.lease.buffer import LeaseBuffer
from forebay.lease.messages import Lease, prove
from forebay.lease.state import MAX_FETCHES, ActiveLease
from forebay.network.client import Client, WrongPeerError
from forebay.network.peer import Provider
from forebay.network.retry import backoff_s
from forebay.storage.base import Origin, TransientError
from forebay.storage.peer_source import FromUrls, PeerSource, open_untrusted_origin
from forebay.swarm.members import format_ranges
from forebay.threads import SupervisedThread

log = logging.getLogger("forebay.worker")
_CONNECTIONS = 8
_STALL_S = 5.0
_PACE_S, _PACE_BYTES = 10.0, 10 * 32768
_RETRY_RESERVE_S = 0.05
_MAX_URLS = 64


class CacheIndex:
    """Which slices of a dataset are in a cache. Threads and processes share it, as they do the cache.

    `sizes` has bytes and dataset name of each slice, by hash: what this worker may serve. Memory: 250 bytes a slice.
    """

    def __init__(self, cache: ChunkCache, dataset: Dataset) -> None:
        hashes = [row.tobytes().hex() for row in dataset.table.sha256]
        self.sizes = {sha256: (size, dataset.name) for sha256, size in zip(hashes, dataset.table.bytes.tolist())}
        self._indexes = {sha256: index for index, sha256 in enumerate(hashes)}
        self._cache, self._dataset_id, self._reported = cache, dataset.id, ""

    def changes(self, everything: bool = False) -> dict[str, str]:
        """Dataset id to the ranges of slices in the cache, if they changed since `mark_reported`, or `everything`."""
        cached = self._indexes.keys() & self._cache.list_slices()
        ranges = format_ranges(np.array(sorted(self._indexes[sha256] for sha256 in cached), np.int64))
        return {self._dataset_id: ranges} if everything or ranges != self._reported else {}

    def mark_reported(self, changes: dict[str, str]) -> None:
        """The scheduler has received these changes."""
        self._reported = changes.get(self._dataset_id, self._reported)


@dataclass(eq=False)
class SliceFetcher:
    """Fetches the slices of a worker's leases, `MAX_FETCHES` at once, from `start` to `close`.

    If no provider sends any slice for `patience_s`, `failure` is set and the leases are closed. `dataset` says where
    the hashes of a slice's chunks are in the `chunks.sha256` of a web server.
    """

    client: Client
    cache: ChunkCache
    leases: LeaseBuffer
    patience_s: float
    from_urls: FromUrls
    dataset: Dataset

    def __post_init__(self) -> None:
        self.bytes = self.slices = self.bytes_from_workers = 0
        self.failure: Exception | None = None
        self._peer_id = self.client.identity.peer_id if self.client.identity is not None else ""
        self._origins: dict[str, Origin] = {}  # by URL
        self._fetcher = RunFetcher(_CONNECTIONS, tries=2, timeout_s=1.0, max_backoff_s=1.0)
        self._lock = threading.Lock()
        self._reported: dict[tuple[str, str], bool] = {}  # (peer id or URL, slice) to whether it is not asked again
        self._num_misses = 0
        self._last_hit_at = time.monotonic()
        self._closing = threading.Event()
        self._threads = [
            SupervisedThread(self._run, f"worker fetch {i}", stopping=self._closing) for i in range(MAX_FETCHES)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Cancel fetches and join the threads; what was received stays. The buffer must be closed."""
        self._closing.set()
        self._fetcher.close()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (lease := self.leases.next_to_fetch()) is not None:
            try:
                self._serve(lease)
            except ForebayError as error:  # no provider for too long, or the cache is too small
                if not self._closing.is_set():
                    self.failure = self.failure or error
                    self.leases.close()

    def _serve(self, lease: ActiveLease) -> None:
        grant, started = lease.grant, time.monotonic()
        path, is_needed = None, False
        try:
            # Pinned: another worker on this cache may evict slices between the fetch and the first step.
            if (path := self._fetch(lease)) is not None:
                proof = prove(grant.lease_id, self._peer_id, path, grant.bytes)
                with self.leases.locked() as state:
                    is_needed = state.fetched(lease, path, time.monotonic() - started, proof)
            self._num_misses, self._last_hit_at = 0, time.monotonic()
        except IntegrityError as error:
            with self.leases.locked() as state:
                state.fail(lease, str(error))
        except Exception as error:  # also a full disk or a missing descriptor: the fetch is repeated
            is_transient = isinstance(error, NetworkError) or isinstance(error.__cause__, OSError)
            if isinstance(error, ForebayError) and not is_transient:
                raise
            if not isinstance(error, NetworkError):
                log.exception("slice %s: cannot fetch it; its lease is released", grant.name)
            if not lease.ended:
                with self.leases.locked() as state:
                    state.release(lease)
                self._back_off(grant, error)
        finally:
            if path is not None and not is_needed:
                self.cache.unpin_slice(grant.sha256)

    def _back_off(self, grant: Lease, error: Exception) -> None:
        self._num_misses += 1
        if self._num_misses >= 5 and time.monotonic() - self._last_hit_at > self.patience_s:
            if isinstance(error, ForebayError) and not isinstance(error, NetworkError):
                raise error  # of the disk: it names the file and the next step
            raise NetworkError(
                f"worker: no provider gave any slice for {self.patience_s:g} s, "
                f"last {grant.name}: {error}. Is a data node running?"
            ) from error
        self._closing.wait(backoff_s(self._num_misses, 0.1, 2.0))

    def _fetch(self, lease: ActiveLease) -> Path | None:
        """Fetch the absent chunks, or wait for another process that does; the slice's file, pinned, or None."""
        info, cache = _info_of(lease.grant), self.cache
        while not (lease.ended or self._closing.is_set()):
            if (path := cache.get(info.sha256, pin=True)) is not None:
                return path
            claimed, _ = cache.claim_slice(info)
            if claimed is None:
                self._closing.wait(_RETRY_RESERVE_S)
                continue
            try:
                self._fetch_from_providers(lease, claimed)
            except BaseException:
                cache.complete(*claimed)
                cache.unpin_slice(info.sha256)
                raise
            cache.complete(*claimed)
            if claimed[0].is_complete():
                return claimed[0].path
            cache.unpin_slice(info.sha256)
        return None

    def _fetch_from_providers(self, lease: ActiveLease, claimed: Group) -> None:
        grant = lease.grant
        faults: list[NetworkError] = []
        for is_origin in (False, True):
            providers = [
                p for p in grant.providers
                if p.is_origin == is_origin and not self._reported.get((p.peer_id or p.address, grant.sha256))
            ]  # fmt: skip
            if not providers:
                continue
            try:
                self._transfer(lease, claimed, providers)
            except NetworkError as error:
                # The slice itself is at fault only if all that sent it sent wrong bytes.
                is_transient = bool(faults) and not isinstance(faults[-1], IntegrityError)
                faults.append(faults[-1] if is_transient else error)
                continue
            with self._lock:
                self.bytes += grant.bytes
                self.slices += 1
                self.bytes_from_workers += 0 if is_origin else grant.bytes
            return
        raise faults[-1] if faults else NetworkError(f"slice {grant.name}: no usable provider is known now")

    def _transfer(self, lease: ActiveLease, claimed: Group, providers: Sequence[Provider]) -> None:
        """One transfer from all of these providers at once, for as long as it is fast enough."""
        grant = lease.grant
        sources = self._sources(grant, providers)
        received, since = 0, time.monotonic()
        transfer = ChunkTransfer(
            self._fetcher, claimed[0], _info_of(grant), sources, chunks=claimed[1],
            read_leaves=lambda: self._read_leaves(grant, sources),
            on_wrong=lambda source, reason: self._reject(grant, source, reason),
        ).start()  # fmt: skip
        while not transfer.wait(0.25):
            now = time.monotonic()
            if lease.ended or self._closing.is_set():
                transfer.cancel()
            elif now - since >= _PACE_S:
                if transfer.received - received < _PACE_BYTES:
                    transfer.cancel()
                    for source in sources:
                        self._reject(grant, source, f"gave under {_PACE_BYTES} bytes in {_PACE_S:g} s", wrong=False)
                received, since = transfer.received, now
        if transfer.error is not None:
            raise transfer.error

    def _read_leaves(self, grant: Lease, sources: Sequence[Origin]) -> bytes:
        """The hashes of a slice's chunks, not verified, of the first web server that has them; else none."""
        if grant.slice < self.dataset.num_slices:
            start, stop = (self.dataset.first_chunks[grant.slice : grant.slice + 2] * HASH_BYTES).tolist()
            for source in (source for source in sources if not isinstance(source, PeerSource)):
                with contextlib.suppress(NetworkError):
                    return b"".join(map(bytes, source.read(CHUNKS_FILE, start, stop)))
        return b""

    def _sources(self, grant: Lease, providers: Sequence[Provider]) -> list[Origin]:
        """The usable providers; NetworkError with the last reason if there is none."""
        sources, reason = list[Origin](), ""
        for provider in providers:
            try:
                sources.append(self._source(grant, provider))
            except (ForebayError, ValueError) as error:  # does not affect the other providers
                reason = str(error)
        if not sources:
            raise NetworkError(f"slice {grant.name}: none of its providers can be used: {reason}")
        return sources

    def _source(self, grant: Lease, provider: Provider) -> Origin:
        if provider.is_url:
            url = provider.address
            with self._lock:
                if url not in self._origins:
                    if len(self._origins) >= _MAX_URLS:
                        self._origins.clear()
                    self._origins[url] = open_untrusted_origin(url, self.from_urls)
                return self._origins[url]

        def on_fault(error: NetworkError) -> None:
            if isinstance(error.__cause__, WrongPeerError):
                self._reject(grant, source, str(error), wrong=False)
            elif isinstance(error, TransientError) and not error.throttled:
                self._reject(grant, source, str(error), wrong=False, final=False)

        source = PeerSource(
            self.client, provider.peer_id, provider.address, lambda name: grant.sha256, _STALL_S, on_fault=on_fault,
            once=not provider.is_origin,
        )  # fmt: skip
        return source

    def _reject(self, grant: Lease, source: Origin, reason: str, wrong: bool = True, final: bool = True) -> None:
        """Report a source to the scheduler, once; if `final`, it is not asked for this slice again."""
        name = source.peer_id or "" if isinstance(source, PeerSource) else source.url
        with self._lock:
            reported = self._reported.get((name, grant.sha256))
            if reported is not None and reported >= final:
                return
            self._reported[name, grant.sha256] = final
        with self.leases.locked() as state:
            state.report(name, grant.sha256, reason, wrong=wrong, rejected=final)


def _info_of(grant: Lease) -> SliceInfo:
    return SliceInfo(grant.slice, grant.name, grant.bytes, grant.sha256, 0, 0, grant.chunk_bytes)
