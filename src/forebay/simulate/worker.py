"""A simulated worker: the worker's own `Hand` of leases, on a machine that fetches and uses at its speed.

The hand keeps the worker's part of the protocol: one exchange at a time; while one is under way nothing is used beyond
the horizons that it declared. Here an exchange that was not answered is repeated, slices are fetched one at a time,
and samples are used in whole batches, without an event for each.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from forebay.schedule.ask import Ask, Bad, Reply
from forebay.simulate.book import Book, Range
from forebay.simulate.nodes import Fetch, Net, Node
from forebay.worker.answers import Answer, Lease
from forebay.worker.hand import Hand, Held

STILL_S = 5.0
"""An exchange that was not answered for so long is given up."""
_log = logging.getLogger("forebay.simulate")
_log.setLevel(logging.ERROR)  # A use that is refused is no news here: it is counted.
_HERE = Path("slice")  # Stands for the file of a slice that is in the cache.


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
        settings = net.settings
        self.hand = Hand(
            settings.batch,
            None,
            settings.cache * settings.slice_bytes,
            2 * settings.exchange_s,
            lambda lease: None,
            lambda: net.clock.now,
        )
        self.hand.log = _log
        self.hand.samples_per_s = self.machine.speed
        self.all_held: dict[str, Held] = {}  # Also those let go, for the record.
        self.alive = True
        self.waited_s = 0.0
        self._idle_since = net.clock.now
        self._current: Held | None = None
        self._position_at = 0.0  # When the current one's `used` was exact.
        self._said: Ask | None = None
        self._news = True  # Something in the cache that the scheduler was not told.
        self._fetching: tuple[Held, Fetch] | None = None
        self._misses, self._fetch_at = 0, 0.0
        self._tries = self._attempt = 0
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
        self._drop_fetch()

    # Speaking.

    def speak(self) -> None:
        """An exchange, unless one is under way."""
        if self._said is not None or not self.alive or self.hand.done:
            return
        self._advance()
        said = self.hand.state()
        have = {}
        if self._news:
            have = {self._dataset_id: np.array(sorted(self.node.cache), np.int64)}
        self._news = False
        self.net.counts["exchanges"] += 1
        self._attempt += 1
        self._said = replace(
            said,
            job=self._job,
            session=self.session,
            attempt=self._attempt,
            address=self.node.holder.address,
            have=have,
            bad=tuple(Bad(r.peer_id, self._dataset_id, int(r.sha256, 16), r.reason, r.wrong) for r in said.reports),
            speed=self.machine.speed,
        )
        self._foresee()
        self._send(self, self._said)

    def hear_nothing(self, said: Ask) -> None:
        """No answer came: the same is said again, later and later."""
        if self.alive and said is self._said:
            self._tries += 1
            self.net.clock.after(self.net.backoff.after(self._tries), self._repeat)

    def _repeat(self) -> None:
        if self.alive and self._said is not None:
            self._attempt += 1
            self._said = replace(self._said, attempt=self._attempt)
            self._send(self, self._said)

    def apply_reply(self, ask: Ask, reply: Reply) -> None:
        """The scheduler's answer."""
        if not self.alive or ask is not self._said:
            return
        self._advance()
        self._said, self._tries = None, 0
        leases = tuple(
            Lease(
                **vars(grant), job_id=grant.job, dataset=grant.job, name=str(grant.index), sha256=f"{grant.index:064x}",
                bytes=self.net.settings.slice_bytes, sample_base=0, seed=0, seq_len=1, layout="tokens", dtype="U16",
                vocab_size=1,
            )
            for grant in reply.leases
        )  # fmt: skip
        self.hand.apply_answer(ask, Answer(**{**vars(reply), "leases": leases}))
        for lease in leases:
            held = self.all_held[lease.lease_id] = self.hand[lease.lease_id]
            if lease.index in self.node.cache:
                self.node.cache.move_to_end(lease.index)
                self.hand.note_fetched(held, _HERE, 0.0)
        self._news = self._news or reply.tell_have
        if self._fetching is not None and self._fetching[0].over:
            self._drop_fetch()
        self._fetch_next()
        self._foresee()
        self._schedule()

    def _schedule(self) -> None:
        """Speaks again when that is due."""
        if self._said is not None or not self.alive or self.hand.done:
            return
        self._spoken += 1
        number = self._spoken
        at = self.hand.due_at(self.net.clock.now)
        self.net.clock.at(at, lambda: self.speak() if number == self._spoken else None)

    # Fetching.

    def _fetch_next(self) -> None:
        """Fetches the lease granted first that is not here; one at a time, so that the first comes soon."""
        if self._fetching is not None or not self.alive:
            return
        if self.net.clock.now < self._fetch_at:
            return self.net.clock.at(self._fetch_at, self._fetch_next)
        held = next((held for held in self.hand.held if held.path is None and not held.is_spent), None)
        if held is not None:
            self._fetch(held)

    def _fetch(self, held: Held) -> None:
        began_at, index = self.net.clock.now, held.grant.index
        wrong: list[str] = []

        def end(came: bool) -> None:
            if not self.alive:
                return
            self._fetching = None
            if came:
                self._keep(index)
                for other in self.hand.held:
                    if other.grant.index == index:
                        self.hand.note_fetched(other, _HERE, self.net.clock.now - began_at)
                self._foresee()
                self._misses = 0
            else:
                if wrong:
                    self.hand.fail(held, "all who gave it gave wrong bytes")
                else:
                    self.hand.give_back(held)
                self.net.counts["failed"] += 1
                self._misses += 1
                self._fetch_at = self.net.clock.now + min(2.0, 0.1 * 2 ** min(self._misses, 5))
            self._schedule()
            self._fetch_next()

        def bad(peer_id: str, reason: str) -> None:
            wrong.append(peer_id)
            self.hand.note_bad(peer_id, held.grant.sha256, reason, True)
            self._schedule()

        self._fetching = held, Fetch(self.net, self.node, index, held.grant.providers, end, bad).start()

    def _drop_fetch(self) -> None:
        fetching, self._fetching = self._fetching, None
        if fetching is not None:
            fetching[1].drop()

    def _keep(self, index: int) -> None:
        """A slice is here; the one used longest ago makes room, unless it is in hand."""
        cache = self.node.cache
        cache[index] = None
        self._news = True
        in_hand = {held.grant.index for held in self.hand.held}
        for old in list(cache)[: max(0, len(cache) - self.net.settings.cache)]:
            if old not in in_hand:
                del cache[old]

    # Using.

    def _advance(self) -> None:
        """Counts the samples used since the last look, in whole batches; the batch under way is taken."""
        held, now = self._current, self.net.clock.now
        if held is None or not self.alive:
            return
        batch, speed = self.net.settings.batch, self.machine.speed
        possible = (now - self._position_at) * speed
        if held.used + possible >= held.limit - 1e-6:
            used = held.limit
        else:
            used = held.used + int(possible / batch + 1e-9) * batch
        if used > held.used:
            grant = held.grant
            self.book.trained.append(Range(grant.epoch, grant.slice_index, held.used, used, now, self.machine.index))
            self._position_at += (used - held.used) / speed
            held.used = used
        held.taken = max(held.used, min(held.limit, held.used + batch))

    def _foresee(self) -> None:
        """Chooses what to use, and foresees when that comes to its limit."""
        self._advance()
        now = self.net.clock.now
        if self._current is not None and self._current.is_spent:
            self._current.training = False
            self._current = None
        if self._current is None:
            ready = (held for held in self.hand.held if held.path and not held.is_spent and held.used < held.limit)
            self._current = next(ready, None)
            if self._current is None:
                return
            self._current.training = True
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
        self._idle_since = self.net.clock.now
        self._foresee()
        self._schedule()
