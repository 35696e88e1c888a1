"""Whom a reader asks what to fetch: first a dataset's data nodes, then those who share it; when one dies, the next.

All who know the same trackers choose the same, so that one of them steers the swarm and not each its own part of it:
the first by a hash of the dataset, the day and the tracker's id. So a key that steers one dataset today steers neither
another nor the same tomorrow, while a hash with the reader's own id, which nobody could aim at all readers, would split
the swarm. What a malicious tracker can do is waste time: it is left for the next on the first malformed answer.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from forebay.errors import ForebayError, NetworkError
from forebay.network.addresses import check_url, peer_address
from forebay.network.client import Client, RemoteError
from forebay.network.messages import ProviderReply
from forebay.network.peer import Provider, node_of

ASK_S = 10.0
_HOME_S = 30.0  # so often, who asks a sharer looks whether a data node is back
_AGAIN_S = 3.0  # so often, who found nobody looks again
_DEAD_S = 30.0  # a tracker that did not answer is left alone so long
_BUSY_S = 1.0
_DAY_S = 86_400.0
_MAX_SHARERS_AT_ONCE, _MAX_SHARERS = 16, 256  # of one answer, and in all
_MAX_ANSWER_BYTES = 1 << 20
log = logging.getLogger("forebay.swarm")


def provider_of(reply: ProviderReply) -> Provider:
    """Whom a reply names, at `host:port` or a URL; ProtocolViolation if its address is neither."""
    (check_url if "://" in reply.address else peer_address)(reply.address)
    return Provider(reply.member[:2048], reply.address, reply.is_origin)


class TrackerClient:
    """The trackers of one dataset. One thread.

    `find` finds them anew, when one is needed: those that are origins first. `own` is this node's, the last resort;
    None if it does not share.
    """

    def __init__(
        self,
        client: Client,
        dataset_id: str,
        find: Callable[[], Iterable[Provider]],
        own: Provider | None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.num_lost = 0  # trackers that answered no more
        self.answering: Provider | None = None  # which one answered last,
        self.since = float("-inf")  # and when it began to, without another between
        self._client, self._dataset_id, self._find, self._own, self._clock = client, dataset_id, find, own, clock
        self._now, self._day = now, 0
        self._found_at = float("-inf")
        self._is_new = True  # nobody else was found so far
        self._ranked: list[Provider] = []
        self._sharers: dict[str, Provider] = {}  # by address
        self._dead: dict[str, float] = {}  # by address, until when

    def met(self, sharers: Iterable[Provider]) -> None:
        """These can be asked when nobody else is left: 16 of an answer, and 256 in all, those named last."""
        for one in itertools.islice(sharers, _MAX_SHARERS_AT_ONCE):
            self._sharers.pop(one.address, None)
            self._sharers[one.address] = one
        while len(self._sharers) > _MAX_SHARERS:
            del self._sharers[next(iter(self._sharers))]

    def drop(self) -> None:
        """Leave the tracker that answered last for the next: its answer made no sense."""
        if self._ranked and self._ranked[0] == self.answering:
            self._lose()

    def ask(self, body: dict[str, Any], introduce: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
        """The answer of the first that gives one; None if nobody does. `introduce` adds to the question what one needs
        that hears of this member for the first time."""
        now = self._clock()
        is_home_due = bool(self._ranked) and not self._ranked[0].is_origin and now - self._found_at > _HOME_S
        if not self._ranked or is_home_due or int(self._now() // _DAY_S) != self._day:
            self._look_up(now)
        elif not self._ranked[0].is_origin:
            self._rank(self._ranked)
        while self._ranked:
            answer = self._tell(self._ranked[0], body, ASK_S)
            if answer is not None:
                if self.answering is None or self.answering.address != self._ranked[0].address:
                    self.since = self._clock()
                self.answering = self._ranked[0]
                return answer
            self._lose()
            introduce(body)
        return None

    def _lose(self) -> None:
        lost, now = self._ranked.pop(0), self._clock()
        self.num_lost += 1
        self._sharers.pop(lost.address, None)
        self._dead = {address: until for address, until in self._dead.items() if until > now}
        self._dead[lost.address] = now + _DEAD_S

    def leave(self, body: dict[str, Any]) -> None:
        """Tell the tracker that was asked last, if it is there."""
        if self._ranked:
            self._tell(self._ranked[0], {**body, "leave": True}, 1.0)

    def _look_up(self, now: float) -> None:
        self._found_at = now
        found: list[Provider] = []
        try:
            found = list(self._find())
        except (ForebayError, OSError) as error:
            log.info("swarm of %s: no tracker was found: %s", self._dataset_id[:12], error)
        is_alone = not found and not self._sharers
        if is_alone:
            self._found_at = now - _HOME_S + _AGAIN_S
        # The others do not know a newcomer yet: one that asked itself would wait until they do.
        self._rank([*found, self._own] if self._own is not None and (is_alone or not self._is_new) else found)
        self._is_new = self._is_new and is_alone

    def _rank(self, found: Sequence[Provider]) -> None:
        known = {**self._sharers, **{one.address: one for one in found}}
        alive = [one for one in known.values() if self._dead.get(one.address, 0.0) <= self._clock()]
        self._day = int(self._now() // _DAY_S)
        self._ranked = sorted(
            alive, key=lambda one: (not one.is_origin, self._place(node_of(one.peer_id)), one.address)
        )

    def _place(self, peer_id: str) -> bytes:
        return hashlib.sha256(f"forebay/2 tracker\n{self._dataset_id}\n{self._day}\n{peer_id}".encode()).digest()

    def _tell(self, tracker: Provider, body: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        path = f"/v1/swarm/{self._dataset_id}"
        try:
            answer, _ = self._client.request_json(
                tracker.address, "POST", path, body, node_of(tracker.peer_id), timeout_s, _MAX_ANSWER_BYTES
            )
        except NetworkError as error:
            log.info("swarm of %s: tracker %s: %s", self._dataset_id[:12], tracker.address, error)
            if isinstance(error, RemoteError) and error.status in (429, 503):
                return {"wait_s": max(_BUSY_S, error.wait_s)}
            return None
        return answer if isinstance(answer, dict) else None
