"""A simulated worker: holds leases, fetches their slices, uses samples at its speed, and speaks with the scheduler.

It keeps the worker's part of the protocol: one exchange at a time, repeated as it is while no answer comes; while one
is under way nothing is used beyond the horizons that it declared; two leases in hand, or more where they are short.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forebay.ledger import Used
from forebay.network.swarm import Holder
from forebay.schedule.ask import Ask, Bad, Failed, Grant, Reply
from forebay.simulate.book import Book, Range
from forebay.simulate.nodes import Fetch, Net, Node

_MAX_AHEAD = 16
STILL_S = 5.0
"""An exchange that was not answered for so long is given up."""
_MAX_WAIT_S = 10.0
_NEW_WEIGHT = 0.3


@dataclass(eq=False)
class Held:
    """A lease in hand: used up to `used`, on record to `acked`, not to be used beyond `limit` now."""

    grant: Grant
    stop: int
    acked: int
    used: int
    limit: int
    ready: bool = False
    over: bool = False
    lost: bool = False
    reason: str = ""
    fetch: Fetch | None = None

    @property
    def is_spent(self) -> bool:
        """Whether nothing more of it is to be used here."""
        return self.over or self.used >= self.stop


Send = Callable[["Worker", Ask], object]
"""Carries an exchange; the world calls `hear` or `hear_nothing` some time later."""


class Worker:
    """One process on one machine.

    Args:
        job: The job's name.
        send: Carries what it says to the scheduler.
    """

    def __init__(self, net: Net, node: Node, book: Book, job: str, dataset_id: str, send: Send) -> None:
        assert node.machine is not None
        self.net, self.node, self.book, self.machine = net, node, book, node.machine
        self._job, self._dataset_id, self._send = job, dataset_id, send
        self.session = f"{node.holder.peer_id}-session"
        self.held: dict[str, Held] = {}
        self.all_held: list[Held] = []  # Also those let go, for the record.
        self.alive, self.done = True, False
        self.waited_s = 0.0
        self._idle_since = net.clock.now
        self._current: Held | None = None
        self._position_at = 0.0  # When the current one's `used` was exact.
        self._said: Ask | None = None
        self._asked_at = self._not_before = -math.inf
        self._news = True  # Something in the cache that the scheduler was not told.
        self._bad: list[Bad] = []
        self._fetch_s = 0.0
        self._misses, self._fetch_at = 0, 0.0
        self._tries = 0
        self._spoken = self._foreseen = 0
        self.speak()

    @property
    def is_using(self) -> bool:
        """Whether it trains now."""
        return self._current is not None and self._current.used < self._current.limit

    def lived_s(self) -> float:
        """From its beginning to its end, or to now."""
        return min(self.net.clock.now, self.machine.dies_at) - self.machine.joins_at

    def die(self) -> None:
        """It is killed: nothing more is said; what was used to the last whole batch was used."""
        self._advance()
        self.alive = False
        for held in self.held.values():
            if held.fetch is not None:
                held.fetch.drop()

    # Speaking.

    def speak(self) -> None:
        """An exchange, unless one is under way."""
        if self._said is not None or not self.alive or self.done:
            return
        self._advance()
        uses = tuple(
            Used(id_, held.grant.epoch, held.grant.slice_index, held.acked, min(held.used, held.stop), 0)
            for id_, held in self.held.items()
            if min(held.used, held.stop) > held.acked
        )
        have = {}
        if self._news:
            have = {self._dataset_id: np.array(sorted(self.node.cache), np.int64)}
        self._said = Ask(
            job=self._job,
            session=self.session,
            address=self.node.holder.address,
            held=tuple(self.held),
            uses=uses,
            horizons=self._declare(),
            release=tuple(i for i, held in self.held.items() if held.over and not held.reason),
            failed=tuple(Failed(i, held.reason) for i, held in self.held.items() if held.reason),
            want=self._num_wanted(),
            have=have,
            bad=tuple(self._bad),
            speed=self.machine.speed,
        )
        self._news = False
        self._asked_at = self.net.clock.now
        self.net.counts["exchanges"] += 1
        self._foresee()
        self._send(self, self._said)

    def hear_nothing(self, said: Ask) -> None:
        """No answer came: the same is said again, later and later."""
        if self.alive and said is self._said:
            self._tries += 1
            self.net.clock.after(self.net.backoff.after(self._tries), lambda: self.alive and self._send(self, said))

    def hear(self, said: Ask, reply: Reply) -> None:
        """The scheduler's answer."""
        if not self.alive or said is not self._said:
            return
        self._advance()
        self._said, self._tries = None, 0
        now = self.net.clock.now
        accepted = {use.lease_id: use for use in reply.uses}
        refused = {no.lease_id: no for no in reply.refused}
        for use in said.uses:
            held = self.held[use.lease]
            if use.lease in accepted:
                held.acked, held.stop = accepted[use.lease].offset, accepted[use.lease].stop
            elif use.lease in refused and use.start < refused[use.lease].offset <= held.used:
                held.acked = refused[use.lease].offset
            else:
                self._lose(held)
        for lease_id in said.held or ():
            held = self.held[lease_id]
            if lease_id in reply.live:
                held.stop = reply.live[lease_id].stop
            elif not held.over and (held.acked < held.stop or lease_id in reply.lost):
                self._lose(held)
            if held.over or held.acked >= held.stop:
                self._drop(lease_id)
        del self._bad[: len(said.bad)]
        self._news = self._news or reply.tell_have
        for held in self.held.values():
            held.limit = held.stop
        for grant in reply.leases:
            self._take(grant)
        self._not_before = now if reply.leases else now + min(_MAX_WAIT_S, max(0.02, reply.wait_s))
        self.done = reply.done and not self.held
        self._foresee()
        self._schedule()

    def _take(self, grant: Grant) -> None:
        held = Held(grant, grant.stop, grant.start, grant.start, grant.stop)
        self.held[grant.lease_id] = held
        self.all_held.append(held)
        if grant.index in self.node.cache:
            self.node.cache.move_to_end(grant.index)
            held.ready = True
        self._fetch_next()

    def _lose(self, held: Held) -> None:
        held.over = held.lost = True
        self.net.counts["leases_lost"] += held.used > held.grant.start

    def _drop(self, lease_id: str) -> None:
        held = self.held.pop(lease_id)
        held.over = True
        if held.fetch is not None:
            held.fetch.drop()
            self._fetch_next()
        if held is self._current:
            self._current = None

    def _declare(self) -> dict[str, int]:
        """How far each lease may be used before the answer: what is used until the next exchange is due."""
        batch = self.net.settings.batch
        left = max(1, int(self.net.settings.exchange_s * self.machine.speed / batch)) * batch
        horizons = {}
        for held in sorted(self.held.values(), key=lambda held: (held is not self._current, not held.ready)):
            begun = held is self._current and held.used < held.limit
            taken = min(held.limit, held.used + batch) if begun else held.used  # The step under way counts.
            horizon = taken if held.over or not held.ready else max(taken, min(held.stop, held.used + left))
            left = max(0, left - (horizon - held.used))
            held.limit = horizons[held.grant.lease_id] = horizon
        return horizons

    def _num_wanted(self) -> int:
        left = [held for held in self.held.values() if not held.is_spent]
        return max(0, self._capacity(left) - len(left)) if self.net.clock.now >= self._fetch_at else 0

    def _capacity(self, left: list[Held]) -> int:
        samples = sum(held.stop - held.used for held in left)
        if not samples:
            return 2
        lease_s = samples / len(left) / self.machine.speed
        return 1 + min(_MAX_AHEAD - 1, max(1, math.ceil(2 * (self.net.settings.exchange_s + self._fetch_s) / lease_s)))

    def _schedule(self) -> None:
        """Speaks again when that is due."""
        if self._said is not None or not self.alive or self.done:
            return
        settings = self.net.settings
        left = [held for held in self.held.values() if not held.is_spent]
        at = math.inf if left else max(self._not_before, self._fetch_at)
        if self._bad or any(held.over for held in self.held.values()):
            at = self.net.clock.now
        if self.held:
            at = min(at, self._asked_at + min(settings.lease_s / 3, settings.exchange_s))
        if 2 * len(left) <= self._capacity(left):
            at = min(at, max(self._not_before, self._fetch_at))
        self._spoken += 1
        number = self._spoken
        at = max(at, self._asked_at + 0.01)
        self.net.clock.at(at, lambda: self.speak() if number == self._spoken else None)

    # Fetching.

    def _fetch_next(self) -> None:
        """Fetches the lease granted first that is not here; one at a time, so that the first comes soon."""
        waiting = [held for held in self.held.values() if not held.ready and not held.over]
        if waiting and not any(held.fetch is not None for held in waiting):
            self._fetch(waiting[0], list(waiting[0].grant.providers))

    def _fetch(self, held: Held, providers: list[Holder]) -> None:
        began_at, index = self.net.clock.now, held.grant.index
        wrong: list[str] = []

        def end(came: bool) -> None:
            if held.over or not self.alive:
                return
            held.fetch = None
            if came:
                self._fetch_s += (self.net.clock.now - began_at - self._fetch_s) * _NEW_WEIGHT
                self._keep(index)
                for other in self.held.values():
                    if other.grant.index == index:
                        other.ready = True
                self._foresee()
                self._misses = 0
            else:
                held.over = True
                held.reason = "all who gave it gave wrong bytes" if wrong else ""  # Else it is only given back.
                self.net.counts["failed"] += 1
                self._misses += 1
                self._fetch_at = self.net.clock.now + min(2.0, 0.1 * 2 ** min(self._misses, 5))
                self._schedule()
            self._fetch_next()

        def bad(peer_id: str, reason: str) -> None:
            wrong.append(peer_id)
            self._bad.append(Bad(peer_id, self._dataset_id, index, reason))
            self._schedule()

        held.fetch = Fetch(self.net, self.node, index, providers, end, bad).start()

    def _keep(self, index: int) -> None:
        """A slice is here; the one used longest ago makes room, unless it is in hand."""
        cache = self.node.cache
        cache[index] = None
        self._news = True
        in_hand = {held.grant.index for held in self.held.values()}
        for old in list(cache)[: max(0, len(cache) - self.net.settings.cache)]:
            if old not in in_hand:
                del cache[old]

    # Using.

    def _advance(self) -> None:
        """Counts the samples used since the last look, in whole batches."""
        held, now = self._current, self.net.clock.now
        if held is None or not self.alive:
            return
        batch, speed = self.net.settings.batch, self.machine.speed
        possible = (now - self._position_at) * speed
        if held.used + possible >= held.limit - 1e-6:
            used = held.limit
        else:
            used = held.used + int(possible / batch + 1e-9) * batch
        if used <= held.used:
            return
        self.book.trained.append(
            Range(held.grant.epoch, held.grant.slice_index, held.used, used, now, self.machine.index)
        )
        self._position_at += (used - held.used) / speed
        held.used = used

    def _foresee(self) -> None:
        """Chooses what to use, and foresees when that comes to its limit."""
        self._advance()
        now = self.net.clock.now
        if self._current is not None and (self._current.is_spent or self._current.over):
            self._current = None
        if self._current is None:
            ready = (held for held in self.held.values() if held.ready and not held.is_spent and held.used < held.limit)
            self._current = next(ready, None)
            if self._current is None:
                return
            self.waited_s += now - self._idle_since
            self._position_at = now
        held = self._current
        self._foreseen += 1
        number = self._foreseen
        if held.used < held.limit:
            self._position_at = max(self._position_at, now - (held.limit - held.used) / self.machine.speed)
            at = self._position_at + (held.limit - held.used) / self.machine.speed
            self.net.clock.at(at, lambda: self._reached() if number == self._foreseen else None)

    def _reached(self) -> None:
        """The current lease was used up to its limit."""
        if not self.alive:
            return
        self._advance()
        held = self._current
        self._idle_since = self.net.clock.now
        if held is not None and held.is_spent:
            self._current = None
        self._foresee()
        self._schedule()
