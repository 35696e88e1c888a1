"""The reading side of a swarm without threads: a reader as a state machine, and the choice of its tracker.

`SwarmReaderState` is pure: no socket or clock. `SwarmReader` drives it from threads, `tests/sim` in virtual time: one
request at a time, `request`, then `receive` or `unanswered`. The driver verifies the bytes and reports with `ended`.

`TrackerClient` asks the data nodes of a dataset, then members that share; when one dies, the next. All readers that
find the same trackers choose the same one, so the swarm is not split: the first by a hash of dataset, day and tracker,
which the choice of a key cannot influence. A malicious tracker can waste time only.
"""

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from pydantic import ValidationError

from forebay.arrays import BOOL
from forebay.errors import ForebayError, IntegrityError, NetworkError, ProtocolError
from forebay.network.client import Client, RemoteError
from forebay.network.messages import MAX_SWARM_ITEMS, ProviderReply, SwarmReply
from forebay.network.peer import Provider, node_of
from forebay.storage.base import PermanentError
from forebay.storage.hosts import check_url, parse_peer_address
from forebay.swarm.members import format_ranges

MAX_WANTED = 4096
"""Missing slices in one request."""
BUSY_S = 2.0
_HAVE_S = 10.0
_UNANSWERED_S = 0.5
_REFUSED_S = 10.0

REQUEST_TIMEOUT_S = 10.0
_HOME_S = 30.0  # between look-ups for a data node while a member is the tracker
_RETRY_S = 3.0  # until the next look-up after an empty one
_DEAD_S = 30.0  # how long a tracker that did not respond is not asked
_OVERLOADED_S = 1.0
_DAY_S = 86_400.0
_MAX_SHARERS_PER_REPLY, _MAX_SHARERS = 16, 256
_MAX_REPLY_BYTES = 1 << 20
log = logging.getLogger("forebay.swarm")

Body: TypeAlias = dict[str, Any]


def provider_of(reply: ProviderReply) -> Provider:
    """Return the provider that a reply names; ProtocolError if its address is neither `host:port` nor a URL."""
    (check_url if "://" in reply.address else parse_peer_address)(reply.address)
    return Provider(reply.member[:2048], reply.address, reply.is_origin)


@dataclass(eq=False)
class SwarmReaderState:
    """One reader of one dataset.

    Args:
        now: Seconds, at the start; as in all methods, only differences count.
        session: The process of its node. `address`: where it shares; "" if it does not.
        downloads: Slices at once.
        patience_s: Requests fail after this many seconds without data and without an available provider.
    """

    now: float
    session: str = ""
    address: str = ""
    downloads: int = 4
    patience_s: float = 120.0

    def __post_init__(self) -> None:
        self.missing: dict[int, float] = {}  # slices that are not being downloaded, and when they were requested first
        self.running: dict[int, float] = {}  # the same of those that are being downloaded
        self.counts = {"from_origins": 0, "from_peers": 0, "failed": 0}
        # Updates for the tracker that the next request sends.
        self._updates: dict[str, list[Any]] = {"finished": [], "failed": [], "dropped": []}
        self._is_request_due = False
        self._reported: BOOL | None = None  # the slices that the tracker knows of
        self._reported_at = float("-inf")
        self._refused: dict[int, PermanentError] = {}  # by slice: why the last URL was not opened
        self._good_at = self.now
        self._asks_for_more = False

    # Calls of the owner.

    def want(self, index: int, now: float) -> None:
        """Request a slice."""
        self.missing[index] = now
        self._is_request_due = True

    def withdraw(self, index: int) -> bool:
        """Withdraw a request; False if its download has started, or it was not requested."""
        return self.missing.pop(index, None) is not None

    def ended(
        self, index: int, provider: Provider, error: Exception | None, now: float, *, wrong: bool = False,
        cancelled: bool = False,
    ) -> bool:  # fmt: skip
        """A download ended. Whether the slice is here, or its request has failed; else it is requested again.

        `wrong`: the provider sent wrong bytes or violated the protocol. `cancelled`: the request was withdrawn, so an
        error does not count against the provider.
        """
        requested_at = self.running.pop(index, now)
        self._good_at = now
        if error is None:
            self._refused.pop(index, None)
            self._updates["finished"].append(index)
            self.counts["from_origins" if provider.is_origin else "from_peers"] += 1
        elif cancelled or self.is_final(error):
            self._updates["dropped"].append(index)
        else:
            is_wrong = wrong or isinstance(error, (IntegrityError, ProtocolError))
            self._updates["failed"].append({"index": index, "member": provider.peer_id, "wrong": is_wrong})
            self.counts["failed"] += 1
            if isinstance(error, PermanentError):
                self._refused[index] = error
            self.missing[index] = requested_at
            return False
        return True

    @staticmethod
    def is_final(error: Exception | None) -> bool:
        """Whether a download that ended so is not tried from another provider."""
        return not isinstance(error, NetworkError | IntegrityError)

    def give_up(self, now: float) -> list[tuple[int, PermanentError | None]]:
        """The requests that fail now: slices, each with the error of its URL, or None if no provider was available.

        The tracker may name a URL that this reader does not open; other members may get the slice for a while.
        """
        late = [i for i, requested_at in self.missing.items() if i in self._refused and now - requested_at > _REFUSED_S]
        ended: list[tuple[int, PermanentError | None]] = [(index, self._refused.pop(index)) for index in late]
        self._updates["dropped"] += late
        if not self.running and now - self._good_at >= self.patience_s:
            ended += [(index, None) for index in self.missing if index not in late]
        for index, _ in ended:
            self.withdraw(index)
        return ended

    # Requests to the tracker.

    @property
    def is_request_due(self) -> bool:
        """Whether a request is due now, before the time that the tracker named."""
        return self._is_request_due or any(self._updates.values())

    def is_have_due(self, now: float) -> bool:
        """Whether the next request should report the slices that are here."""
        return bool(self.address) and (self._reported is None or now - self._reported_at > _HAVE_S)

    def request(self, now: float, available: BOOL | None) -> Body:
        """The next request, with all updates. `available`: [num_slices] flags if `is_have_due`, else None."""
        waiting = list(self.missing)[:MAX_WANTED]
        num = max(0, self.downloads - len(self.running))
        self._asks_for_more = num > 0
        body: Body = {
            "session": self.session,
            "address": self.address,
            "want": format_ranges(np.array(sorted(waiting), np.int64)),
            "num": num,
            **{name: items[:MAX_SWARM_ITEMS] for name, items in self._updates.items()},
        }
        self._updates = {name: items[MAX_SWARM_ITEMS:] for name, items in self._updates.items()}
        self._is_request_due = False
        if available is not None:
            if self._reported is None or not np.array_equal(available, self._reported):
                self.introduce(body, available)
            self._reported_at = now
        return body

    def introduce(self, body: Body, available: BOOL) -> None:
        """Complete a request for another tracker, which does not know this reader yet."""
        body["have"] = format_ranges(np.flatnonzero(available))
        self._reported = available

    def unanswered(self, body: Body) -> float:
        """No tracker answered: the updates are sent again. Seconds until the next request."""
        self._updates = {name: body[name] + items for name, items in self._updates.items()}
        self._reported = None
        return _UNANSWERED_S

    def receive(
        self, reply: Body, now: float, tracker: Provider | None = None
    ) -> tuple[list[tuple[int, Provider]], list[Provider], float]:
        """Apply a reply: slices to download now with their providers, other sharers, seconds until the next request.

        `tracker` replied. ProtocolError: use another tracker.
        """
        try:
            message = SwarmReply.model_validate(reply)
        except ValidationError as error:
            raise ProtocolError(
                f"swarm: expected a SwarmReply, got {str(reply)[:200]}: {error.errors()[:1]}"
            ) from error
        assigned = [(assignment.index, provider_of(assignment)) for assignment in message.assignments]
        sharers = [provider_of(sharer) for sharer in message.sharers[:16]]
        if assigned or sharers or (tracker is not None and tracker.is_origin):
            self._good_at = now  # a provider may be available; a reader that is alone has none
        started = []
        for index, provider in assigned:
            if (requested_at := self.missing.pop(index, None)) is not None:
                self.running[index] = requested_at
                started.append((index, provider))
        if message.tell_have:
            self._reported = None
            return started, sharers, 0.0
        wait_s = min(10.0, max(0.02, message.wait_s))
        return started, sharers, wait_s if self._asks_for_more else max(wait_s, BUSY_S)


@dataclass(eq=False)
class TrackerClient:
    """The trackers of one dataset. For one thread.

    `find` looks up trackers, origins first. `own`: this node's tracker, used if there is no other; None if it does not
    share.
    """

    client: Client
    dataset_id: str
    find: Callable[[], Iterable[Provider]]
    own: Provider | None
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.current: Provider | None = None  # the last one that responded
        self._day = 0
        self._looked_up_at = float("-inf")
        self._was_alone = True  # no other tracker was found so far
        self._ranked: list[Provider] = []
        self._sharers: dict[str, Provider] = {}  # by address
        self._dead: dict[str, float] = {}  # until when, by address

    def add_sharers(self, sharers: Iterable[Provider]) -> None:
        """Add members that can be asked if no other tracker responds: 16 per reply, the last 256 in all."""
        for sharer in itertools.islice(sharers, _MAX_SHARERS_PER_REPLY):
            self._sharers.pop(sharer.address, None)
            self._sharers[sharer.address] = sharer
        while len(self._sharers) > _MAX_SHARERS:
            del self._sharers[next(iter(self._sharers))]

    def drop_current(self) -> None:
        """Ask the next tracker from now on: the response of the current one was malformed."""
        if self._ranked and self._ranked[0] == self.current:
            self._drop_first()

    def request(self, body: dict[str, Any], introduce: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
        """Return the response of the first tracker that sends one; None if no tracker does.

        `introduce` completes the request for a tracker that does not know this member.
        """
        now = time.monotonic()
        is_home_due = bool(self._ranked) and not self._ranked[0].is_origin and now - self._looked_up_at > _HOME_S
        if not self._ranked or is_home_due or int(self.now() // _DAY_S) != self._day:
            self._look_up(now)
        elif not self._ranked[0].is_origin:
            self._rank(self._ranked)
        while self._ranked:
            reply = self._post(self._ranked[0], body, REQUEST_TIMEOUT_S)
            if reply is not None:
                self.current = self._ranked[0]
                return reply
            self._drop_first()
            introduce(body)
        return None

    def leave(self, body: dict[str, Any]) -> None:
        """Tell the current tracker that this member leaves."""
        if self._ranked:
            self._post(self._ranked[0], {**body, "leave": True}, 1.0)

    def _drop_first(self) -> None:
        lost, now = self._ranked.pop(0), time.monotonic()
        self._sharers.pop(lost.address, None)
        self._dead = {address: until for address, until in self._dead.items() if until > now}
        self._dead[lost.address] = now + _DEAD_S

    def _look_up(self, now: float) -> None:
        self._looked_up_at = now
        trackers: list[Provider] = []
        try:
            trackers = list(self.find())
        except (ForebayError, OSError) as error:
            log.info("swarm of %s: no tracker was found: %s", self.dataset_id[:12], error)
        is_alone = not trackers and not self._sharers
        if is_alone:
            self._looked_up_at = now - _HOME_S + _RETRY_S
        # The others do not know a new member yet, which would wait for them if it asked itself.
        if self.own is not None and (is_alone or not self._was_alone):
            trackers.append(self.own)
        self._rank(trackers)
        self._was_alone = self._was_alone and is_alone

    def _rank(self, trackers: Sequence[Provider]) -> None:
        by_address = {**self._sharers, **{tracker.address: tracker for tracker in trackers}}
        now = time.monotonic()
        alive = [tracker for tracker in by_address.values() if self._dead.get(tracker.address, 0.0) <= now]
        self._day = int(self.now() // _DAY_S)

        def rank(tracker: Provider) -> tuple[bool, bytes, str]:
            text = f"forebay/2 tracker\n{self.dataset_id}\n{self._day}\n{node_of(tracker.peer_id)}"
            return not tracker.is_origin, hashlib.sha256(text.encode()).digest(), tracker.address

        self._ranked = sorted(alive, key=rank)

    def _post(self, tracker: Provider, body: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        path = f"/v1/swarm/{self.dataset_id}"
        try:
            return self.client.request_json(
                tracker.address, "POST", path, body, node_of(tracker.peer_id), timeout_s, _MAX_REPLY_BYTES
            )[0]
        except NetworkError as error:
            log.info("swarm of %s: tracker %s: %s", self.dataset_id[:12], tracker.address, error)
            if isinstance(error, RemoteError) and error.status in (429, 503):
                return {"wait_s": max(_OVERLOADED_S, error.wait_s)}
            return None
