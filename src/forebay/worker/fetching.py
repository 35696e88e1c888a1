"""Brings the slices of leases into the cache: from other workers first, from origins last, each verified.

Who gives wrong bytes, another range, no end or no bytes, or is not who should stand there, is left out and told to
the scheduler; a slice is then asked of the others. A source that drips is left after ten seconds under 32 KiB/s.
A slice that came from somewhere but never with its hash counts as failed; one that nobody gives is given back.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forebay.cache.cache import Refusal, SliceCache
from forebay.cache.eviction import part_bytes
from forebay.dataset.manifest import SliceInfo
from forebay.errors import ForebayError, IntegrityError, NetworkError
from forebay.network.client import Client, WrongPeerError
from forebay.network.peer import Provider
from forebay.network.retry import backoff_s
from forebay.scheduler.messages import Lease, prove
from forebay.storage.base import Origin, TransientError
from forebay.storage.peer_source import ProviderSource
from forebay.storage.transfer_state import Transfer
from forebay.storage.transfers import Transfers
from forebay.storage.url_policy import FromUrls, open_foreign_origin
from forebay.swarm.members import format_ranges
from forebay.threads import Supervised
from forebay.worker.lease_buffer import LeaseBuffer
from forebay.worker.lease_state import MAX_FETCHES, ActiveLease

log = logging.getLogger("forebay.worker")
_LINE = re.compile(rb"^(\d{1,10}) (\d{1,18}) ([0-9a-f]{64})$", re.MULTILINE)
_NAME = re.compile(rb"^= ([^\x00-\x1f]{1,255})$", re.MULTILINE)
_FILE = re.compile(r"([0-9a-f]{64})\.known")


class CacheIndex:
    """What of each dataset lies in a cache. Threads and processes share it, as they do the cache.

    `sizes` has bytes and dataset's name of each slice that this worker was ever leased, by hash: what it may hand on.
    """

    def __init__(self, cache: SliceCache) -> None:
        self.sizes: dict[str, tuple[int, str]] = {}
        self._cache = cache
        self._lock = threading.Lock()
        self._indexes: dict[str, dict[str, int]] = {}  # dataset id -> sha256 -> index
        self._told: dict[str, str] = {}
        for item in os.scandir(cache.directory):
            if found := _FILE.fullmatch(item.name):
                indexes = self._indexes.setdefault(found[1], {})
                lines = Path(item.path).read_bytes()
                name = _NAME.search(lines)
                for index, num_bytes, sha256 in _LINE.findall(lines):
                    indexes[sha256.decode()] = int(index)
                    if name is not None:  # without it nobody can say who may have it
                        self.sizes[sha256.decode()] = int(num_bytes), name[1].decode()

    def add(self, slice_: Lease) -> None:
        """A slice was cached."""
        with self._lock:
            indexes = self._indexes.setdefault(slice_.dataset_id, {})
            if indexes.get(slice_.sha256) == slice_.index:
                return
            indexes[slice_.sha256] = slice_.index
            self.sizes[slice_.sha256] = slice_.bytes, slice_.dataset
        path = self._cache.directory / f"{slice_.dataset_id}.known"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            # The line feed first: it ends what a kill may have torn.
            name = f"\n= {slice_.dataset}" if not os.fstat(file).st_size else ""
            os.write(file, f"{name}\n{slice_.index} {slice_.bytes} {slice_.sha256}\n".encode())
        finally:
            os.close(file)

    def news(self, everything: bool = False) -> dict[str, str]:
        """Dataset id to the ranges of slices that are here now, of those that changed since `told`, or of all."""
        here = self._cache.held()
        with self._lock:
            ranges = {
                i: format_ranges(np.array(sorted(known[s] for s in known.keys() & here), np.int64))
                for i, known in self._indexes.items()
            }
            return {i: text for i, text in ranges.items() if everything or self._told.get(i, "") != text}

    def told(self, news: dict[str, str]) -> None:
        """The scheduler has heard them."""
        with self._lock:
            self._told.update(news)


_CONNECTIONS = 8
_STALL_S = 5.0
_PACE_S, _PACE_BYTES = 10.0, 10 * 32768
_ROOM_S = 0.05
_MAX_URLS = 64
_URLS_ONLY_S = 10.0  # with nothing but URLs that may not be read, the end comes sooner


class _NoSourceError(NetworkError):
    """Nobody who is said to have a slice can be asked."""


class SliceFetcher:
    """Fetches the slices of a worker's leases, `threads` at once, in threads of its own, from `start` to `close`.

    A slice that nobody gives for `patience_s`, and no other either, is the end of the worker.
    """

    def __init__(
        self,
        client: Client,
        cache: SliceCache,
        shelf: CacheIndex,
        leases: LeaseBuffer,
        patience_s: float,
        threads: int = MAX_FETCHES,
        from_urls: FromUrls = "",
    ) -> None:
        self.bytes = self.slices = self.bytes_from_workers = 0
        self.failure: Exception | None = None
        self._client = client
        self._peer_id = client.identity.peer_id if client.identity is not None else ""
        self._cache = cache
        self._shelf = shelf
        self._leases = leases
        self._patience_s = patience_s
        self._from_urls = from_urls
        self._origins: dict[str, Origin] = {}  # by URL
        self._transfers = Transfers(_CONNECTIONS, tries=2, patience_s=1.0, hedge_s=2.0, max_backoff_s=1.0)
        self._lock = threading.Lock()
        self._bad: set[tuple[str, str]] = set()
        self._away: set[tuple[str, str]] = set()
        self._misses = 0
        self._hit_at = time.monotonic()
        self._closing = threading.Event()
        self._threads = [Supervised(self._run, f"worker fetch {i}", stopping=self._closing) for i in range(threads)]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Give up what is under way and end the threads; what was fetched is kept and resumed. The buffer is closed."""
        self._closing.set()
        self._transfers.close()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (held := self._leases.next_to_fetch()) is not None:
            try:
                self._bring(held)
            except ForebayError as error:  # patience is over, or the cache too small: the caller of run_worker gets it
                if not self._closing.is_set():
                    self.failure = self.failure or error
                    self._leases.close()

    def _bring(self, held: ActiveLease) -> None:
        """The slice of one lease, pinned; or the lease is given back or failed."""
        grant, began = held.grant, time.monotonic()
        # Pinned first: another worker on this cache may make room between the fetch and the first step.
        self._cache.pin(grant.sha256)
        wanted = False
        try:
            if self._fetch(held):
                self._shelf.add(grant)
                path = self._cache.path_of(grant.sha256)
                proof = prove(grant.lease_id, self._peer_id, path, grant.bytes)
                wanted = self._leases.fetched(held, path, time.monotonic() - began, proof)
            self._misses, self._hit_at = 0, time.monotonic()
        except IntegrityError as error:
            self._leases.fail(held, str(error))
        except Exception as error:  # a full disk or no descriptor left too: it is tried again
            is_passing = isinstance(error, NetworkError) or isinstance(error.__cause__, OSError)
            if isinstance(error, ForebayError) and not is_passing:
                raise
            if not isinstance(error, NetworkError):
                log.exception("slice %s: cannot fetch it; its lease is released", grant.name)
            if not held.over:
                self._leases.release(held)
                self._missed(grant, error)
        finally:
            if not wanted:
                self._cache.unpin(grant.sha256)

    def _missed(self, grant: Lease, error: Exception) -> None:
        self._misses += 1
        patience_s = self._patience_s
        if not self.slices and grant.providers and all(provider.is_url for provider in grant.providers):
            patience_s = min(patience_s, _URLS_ONLY_S) if isinstance(error, _NoSourceError) else patience_s
        if self._misses >= 5 and time.monotonic() - self._hit_at > patience_s:
            if isinstance(error, ForebayError) and not isinstance(error, NetworkError):
                raise error  # the disk's: it says where and what to do
            raise NetworkError(
                f"worker: no provider gave any slice for {patience_s:g} s, "
                f"last {grant.name}: {error}. Is a data node running?"
            ) from error
        self._closing.wait(backoff_s(self._misses, 0.1, 2.0))

    def _fetch(self, held: ActiveLease) -> bool:
        """Waits for room, and for whoever else fetches it; whether the slice is here at the end."""
        grant = held.grant
        while not (held.over or self._closing.is_set()):
            room = self._cache.try_reserve(grant.sha256, part_bytes(grant.bytes), evict="any")
            if not isinstance(room, Refusal):
                try:
                    self._ask_all(held)
                except BaseException:
                    room.release()
                    raise
                room.commit()
                return True
            if self._cache.get(grant.sha256) is not None:
                return True
            self._closing.wait(_ROOM_S)
        return False

    def _ask_all(self, held: ActiveLease) -> None:
        """Into its partial file: from workers, then from origins, then from whoever is left."""
        grant = held.grant
        left = [p for p in grant.providers if (p.peer_id or p.address, grant.sha256) not in self._bad]
        workers, origins = [p for p in left if not p.is_origin], [p for p in left if p.is_origin]
        faults: list[NetworkError] = []
        for providers in (workers, origins):
            providers = [p for p in providers if (p.peer_id or p.address, grant.sha256) not in self._bad]
            if not providers:
                continue
            try:
                self._ask(held, providers)
            except NetworkError as error:
                # The slice itself is at fault only if all who gave it gave wrong bytes.
                passing = bool(faults) and not isinstance(faults[-1], IntegrityError)
                faults.append(faults[-1] if passing else error)
                continue
            with self._lock:
                self.bytes += grant.bytes
                self.slices += 1
                self.bytes_from_workers += 0 if providers[0].is_origin else grant.bytes
            return
        raise faults[-1] if faults else NetworkError(f"slice {grant.name}: nobody who may have it is known now")

    def _ask(self, held: ActiveLease, providers: Sequence[Provider]) -> None:
        """One transfer from all of them at once, as long as it moves."""
        grant = held.grant
        info = SliceInfo(grant.index, grant.name, grant.bytes, grant.sha256, 0, 0)
        sources = self._sources(grant, providers)
        part = self._cache.path_of(grant.sha256).with_name(f"{grant.sha256}.part")
        transfer = self._transfers.start(info, part, sources, lambda origin, why: self._exclude(grant, origin, why))
        received, since = 0, time.monotonic()
        while not transfer.wait(0.25):
            now = time.monotonic()
            if held.over or self._closing.is_set():
                self._transfers.cancel(transfer)
            elif now - since >= _PACE_S:
                if transfer.received - received < _PACE_BYTES:
                    self._leave(transfer, grant, sources)
                received, since = transfer.received, now
        if transfer.error is not None:
            raise transfer.error

    def _leave(self, transfer: Transfer, grant: Lease, sources: Sequence[Origin]) -> None:
        self._transfers.cancel(transfer)
        for source in sources:
            self._exclude(grant, source, f"gave under {_PACE_BYTES} bytes in {_PACE_S:g} s", wrong=False)

    def _sources(self, grant: Lease, providers: Sequence[Provider]) -> list[Origin]:
        """Those of the providers that can be asked; NetworkError with the last reason if there is none."""
        sources, why = list[Origin](), ""
        for provider in providers:
            try:
                sources.append(self._source(grant, provider))
            except (ForebayError, ValueError) as error:  # what is said of one provider is no fault of the others
                why = str(error)
        if not sources:
            raise _NoSourceError(f"slice {grant.name}: none of its providers can be asked: {why}")
        return sources

    def _source(self, grant: Lease, provider: Provider) -> Origin:
        if provider.is_url:
            url = provider.address
            with self._lock:
                if url not in self._origins:
                    if len(self._origins) >= _MAX_URLS:
                        self._origins.clear()
                    self._origins[url] = open_foreign_origin(url, self._from_urls)
                return self._origins[url]

        def on_fault(error: NetworkError) -> None:
            if isinstance(error.__cause__, WrongPeerError):
                self._exclude(grant, source, str(error), wrong=False)
            elif isinstance(error, TransientError) and not error.throttled:
                self._note(grant, provider.peer_id, str(error))

        source = ProviderSource(
            self._client,
            provider.peer_id,
            provider.address,
            grant.sha256,
            _STALL_S,
            on_fault,
            once=not provider.is_origin,
        )
        return source

    def _exclude(self, grant: Lease, source: Origin, reason: str, wrong: bool = True) -> None:
        """Ask this source for this slice no more, and report it to the scheduler."""
        who = source.peer_id if isinstance(source, ProviderSource) else source.url
        with self._lock:
            if (who, grant.sha256) in self._bad:
                return
            self._bad.add((who, grant.sha256))
        self._leases.report(who, grant.sha256, reason, wrong=wrong)

    def _note(self, grant: Lease, who: str, reason: str) -> None:
        """Tells the scheduler, once, of one that did not answer now: others know better who does; it is asked again."""
        with self._lock:
            if (who, grant.sha256) in self._bad or (who, grant.sha256) in self._away:
                return
            self._away.add((who, grant.sha256))
        self._leases.report(who, grant.sha256, reason, wrong=False, rejected=False)
