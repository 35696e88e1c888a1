"""The trackers of a dataset's swarm, of which a reader asks one.

They are the data nodes of the dataset, then members that share; when one dies, or too little comes of its answers, the
next is asked. The order of data nodes is by a hash of dataset, day, reader and data node: no choice of a key makes one
first for all. The order of members that share is the same for all readers, so that they meet at one.
"""

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from forebay.base import Json
from forebay.errors import ForebayError, NetworkError
from forebay.network.client import Client, RemoteError
from forebay.network.peer import Provider, node_of
from forebay.recent import RecentDict

REQUEST_TIMEOUT_S = 10.0
_HOME_S = 30.0  # between look-ups for a data node while a member is the tracker
_RETRY_S = 3.0  # until the next look-up after an empty one
_DEAD_S = 30.0  # how long a tracker that did not respond is not asked
_LEFT_S = 300.0  # how long a tracker of which too little came is asked after the others
_OVERLOADED_S = 1.0
_DAY_S = 86_400.0
_MAX_SHARERS_PER_REPLY = 16
_MAX_SHARERS = 256
_MAX_REPLY_BYTES = 1 << 20
log = logging.getLogger("forebay.swarm")


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
        self._sharers = RecentDict[str, Provider](_MAX_SHARERS)  # by address
        self._dead: dict[str, float] = {}  # until when, by address
        self._idle_since: dict[str, float] = {}  # since when, by address

    def add_sharers(self, sharers: Iterable[Provider]) -> None:
        """Add members that can be asked if no other tracker responds: 16 per reply, the last 256 in all."""
        for sharer in itertools.islice(sharers, _MAX_SHARERS_PER_REPLY):
            self._sharers[sharer.address] = sharer

    def leave_current(self) -> None:
        """Ask the others first from now on: too little came of the responses of the current one."""
        if self.current is not None:
            self._idle_since[self.current.address] = time.monotonic()
        self._ranked = []

    def drop_current(self) -> None:
        """Ask the next tracker from now on: the response of the current one was malformed."""
        if self._ranked and self._ranked[0] == self.current:
            self._drop_first()

    def request(self, body: Json, introduce: Callable[[Json], None]) -> Json | None:
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

    def leave(self, body: Json) -> None:
        """Tell the current tracker that this member leaves."""
        if self._ranked:
            self._post(self._ranked[0], {**body, "leave": True}, 1.0)

    def _drop_first(self) -> None:
        lost = self._ranked.pop(0)
        self._sharers.pop(lost.address, None)
        self._dead[lost.address] = time.monotonic() + _DEAD_S

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
        self._dead = {address: until for address, until in self._dead.items() if until > now}
        self._idle_since = {address: since for address, since in self._idle_since.items() if now - since < _LEFT_S}
        alive = [tracker for tracker in by_address.values() if tracker.address not in self._dead]
        self._day = int(self.now() // _DAY_S)
        own = self.client.identity.peer_id if self.client.identity is not None else ""

        def rank(tracker: Provider) -> tuple[float, bool, bytes, str]:
            reader = own if tracker.is_origin else ""
            text = f"forebay/3 tracker\n{self.dataset_id}\n{self._day}\n{reader}\n{node_of(tracker.peer_id)}"
            left_at = self._idle_since.get(tracker.address, float("-inf"))
            return left_at, not tracker.is_origin, hashlib.sha256(text.encode()).digest(), tracker.address

        self._ranked = sorted(alive, key=rank)

    def _post(self, tracker: Provider, body: Json, timeout_s: float) -> Json | None:
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
