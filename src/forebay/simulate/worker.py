"""A simulated worker: production's `LeaseState` on a machine with its own speeds, in virtual time.

All decisions are those of `LeaseState`. This class does what a worker's threads do: it fetches some slices at once,
uses one step after the other, and sends a request when one is due. Steps cost no event: those that ended are entered,
with their own times, before anything else changes.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from forebay.lease.messages import ExchangeReply, ExchangeRequest, ExchangeResult, Lease
from forebay.lease.scheduler_client import FIRST_WAIT_S, MAX_WAIT_S
from forebay.lease.state import MAX_FETCHES, ActiveLease, LeaseState
from forebay.simulate.network import SimFetch, SimNetwork, SimNode
from forebay.simulate.scenario import UsageRecord, UsedRange
from forebay.storage.retry import backoff_s
from forebay.swarm.members import format_ranges

_log = logging.getLogger("forebay.simulate")
_log.setLevel(logging.ERROR)  # refused uses are counted, not logged
_PATH = Path("slice")  # stands for the file of a slice in the cache

Send = Callable[["Worker", ExchangeRequest], object]
"""Sends one attempt of a request; later `receive`, `unanswered` or `refused` is called."""


@dataclass(eq=False)
class Worker:
    """One process on one machine.

    Args:
        job: The job's name.
        send: Carries requests to the scheduler.
    """

    net: SimNetwork
    node: SimNode
    record: UsageRecord
    job: str
    dataset_id: str
    send: Send

    def __post_init__(self) -> None:
        assert self.node.machine is not None
        self.machine, settings = self.node.machine, self.net.settings
        self.state = LeaseState(
            settings.batch, settings.cache * settings.slice_bytes, 2 * settings.exchange_s, lambda lease: None
        )
        self.state.log = _log
        self.all_leases: list[ActiveLease] = []  # including ended ones, for the record
        self.alive = True
        self.error = ""
        self.waited_s = 0.0  # for leases, or for their slices
        self.silence_s = 0.0  # the longest time without a reply
        self._replied_at = self._free_at = self.net.clock.now
        self._num_steps = 0
        self._lease: ActiveLease | None = None
        self._step: tuple[int, int, float] | None = None  # samples [start, stop), and when they will be used
        self._request: ExchangeRequest | None = None
        self._attempt, self._tried = 0, 0
        self._is_cache_new = True  # the scheduler does not know all that is cached
        self._fetches: dict[int, tuple[SimFetch, list[ActiveLease]]] = {}
        self._num_free, self._misses = MAX_FETCHES, 0
        self._timer = 0
        self._act()

    def die(self) -> None:
        """The process is killed; steps that ended count as used."""
        self._use()
        self.alive = False
        for fetch, _ in self._fetches.values():
            fetch.drop()

    def _act(self) -> None:
        """Update everything to now, then wait until something is due."""
        if not self.alive:
            return
        self._use()
        if self._fetch_next():
            self._use()
        if self._request is not None or self.state.done:
            return
        now = self.net.clock.now
        due_at = self.state.due_at(now)
        if due_at <= now:
            return self._send_request()
        self._timer += 1
        number = self._timer
        self.net.clock.call_at(min(due_at, self._changes_at()), lambda: self._act() if number == self._timer else None)

    # Use.

    def _use(self) -> None:
        if not self.alive:
            return
        time = now = self.net.clock.now
        state, first = self.state, None
        while True:
            lease, step = self._lease, self._step
            if step is not None:
                assert lease is not None
                if step[2] > now:
                    break
                self._num_steps += 1
                time = self._free_at = step[2]
                state.used([(lease, lease.started)], self._num_steps, time)
                first, self._step = step[0] if first is None else first, None
            elif lease is None:
                self._lease = state.next_to_use()
                if self._lease is None:
                    return
            elif (samples := state.take(lease, time)) is not None:
                self.waited_s += time - self._free_at
                self._step = *samples, time + (samples[1] - samples[0]) / self.machine.speed
            elif lease.ended or lease.started >= lease.stop:
                self._record(lease, first)
                state.finish(lease)
                self._lease = first = None
            else:
                break
        self._record(lease, first)

    def _record(self, lease: ActiveLease | None, first: int | None) -> None:
        if lease is not None and first is not None:
            use = lease.grant.epoch, lease.grant.slice, first, lease.used, self.net.clock.now
            self.record.trained.append(UsedRange(*use, self.machine.index))

    def _changes_at(self) -> float:
        """When use changes what is due: at the first use to acknowledge, or where use has to stop."""
        lease, step = self._lease, self._step
        if lease is None or step is None:
            return float("inf")
        if not any(other.used > other.acknowledged for other in self.state.leases):
            return step[2]
        more = min(lease.stop, lease.allowed_until) - lease.started
        if lease.allowed_until < lease.stop:
            more -= more % self.net.settings.batch
        return step[2] + max(0, more) / self.machine.speed

    # Fetching.

    def _fetch_next(self) -> bool:
        is_cached = False
        while self._num_free and (lease := self.state.next_to_fetch()) is not None:
            index = lease.grant.slice
            if index in self.node.cache:
                self.node.cache.move_to_end(index)
                is_cached = self.state.fetched(lease, _PATH, 0.0) or is_cached
            elif index in self._fetches:
                self._fetches[index][1].append(lease)
            else:
                self._num_free -= 1
                self._fetches[index] = self._fetch(lease, self.net.clock.now), [lease]
        return is_cached

    def _fetch(self, lease: ActiveLease, started_at: float) -> SimFetch:
        index, wrong = lease.grant.slice, list[str]()

        def end(arrived: bool) -> None:
            if not self.alive:
                return
            self._use()
            leases = self._fetches.pop(index)[1]
            self._misses = 0 if arrived else self._misses + 1
            if arrived:
                self._cache(index)
            for waiting in leases:
                if arrived:
                    self.state.fetched(waiting, _PATH, self.net.clock.now - started_at)
                elif wrong:
                    self.state.fail(waiting, "all providers sent wrong bytes")
                else:
                    waiting.is_dropped = True
            if arrived:
                self._num_free += 1
            else:
                self.net.counts["failed"] += 1
                self.net.clock.call_later(min(2.0, 0.1 * 2 ** min(self._misses, 5)), self._free_fetcher)
            self._act()

        def report(peer_id: str, reason: str) -> None:
            wrong.append(peer_id)
            self.state.report(peer_id, lease.grant.sha256, reason, wrong=True)
            self._act()

        return SimFetch(self.net, self.node, index, lease.grant.providers, end, report).start()

    def _free_fetcher(self) -> None:
        self._num_free += 1
        self._act()

    def _cache(self, index: int) -> None:
        cache = self.node.cache
        cache[index] = None
        self._is_cache_new = True
        leased = {lease.grant.slice for lease in self.state.leases}
        for old in list(cache)[: max(0, len(cache) - self.net.settings.cache)]:
            if old not in leased:
                del cache[old]

    # Requests.

    def _send_request(self) -> None:
        cached = np.array(sorted(self.node.cache), np.int64)
        have = {self.dataset_id: format_ranges(cached)} if self._is_cache_new else {}
        self._is_cache_new = False
        self.net.counts["exchanges"] += 1
        request = self.state.request(self.net.clock.now)
        self._attempt, self._tried = self._attempt + 1, 0
        self._request = replace(
            request, job=self.job, session=f"{self.node.provider.peer_id}-session", attempt=self._attempt,
            address=self.node.provider.address, cached=have,
        )  # fmt: skip
        self.send(self, self._request)

    def _send_again(self) -> None:
        if self.alive and self._request is not None:
            self._attempt += 1
            self._request = replace(self._request, attempt=self._attempt)
            self.send(self, self._request)

    def unanswered(self, request: ExchangeRequest) -> None:
        """This attempt got no reply: send the same request again, under another number."""
        if self.alive and request is self._request:
            self._tried += 1
            wait_s = backoff_s(self._tried, FIRST_WAIT_S, MAX_WAIT_S, chance=self.net.retry_chance)
            self.net.clock.call_later(wait_s, self._send_again)

    def refused(self, request: ExchangeRequest, error: str) -> None:
        """The scheduler refused this attempt: the worker ends."""
        if self.alive and request is self._request:
            self.error = error
            self.die()

    def receive(self, request: ExchangeRequest, reply: ExchangeResult) -> None:
        """The scheduler's reply to an attempt."""
        if not self.alive or request is not self._request:
            return
        self._use()
        now, self._request = self.net.clock.now, None
        self.silence_s, self._replied_at = max(self.silence_s, now - self._replied_at), now
        leases = tuple(
            Lease(
                **vars(grant), job_id=grant.job, sha256=f"{grant.slice:064x}",
                bytes=self.net.settings.slice_bytes, sample_base=0, seed=0,
            )
            for grant in reply.leases
        )  # fmt: skip
        self.state.receive(request, ExchangeReply(**{**vars(reply), "leases": leases}), now)
        granted = {lease.lease_id for lease in leases}
        self.all_leases += [lease for lease in self.state.leases if lease.grant.lease_id in granted]
        self._is_cache_new = self._is_cache_new or reply.report_cached
        for index, (fetch, wanting) in list(self._fetches.items()):
            if all(lease.ended for lease in wanting):
                fetch.drop()
                del self._fetches[index]
                self._num_free += 1
        self._act()
