"""A reader of a swarm as a state machine: the requests to the tracker, and what follows from its replies.

Pure: no socket, thread or clock. `SwarmReader` drives it from threads, `tests/sim` in virtual time. One request is
active at a time: `request`, then `receive` or `unanswered`; a driver calls one method at a time. The tracker names the
providers; the driver verifies the bytes, and reports the result with `ended`.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from forebay.errors import IntegrityError, NetworkError, ProtocolError
from forebay.network.messages import MAX_SWARM_ITEMS, SwarmReply
from forebay.network.peer import Provider
from forebay.storage.base import PermanentError
from forebay.swarm.members import format_ranges
from forebay.swarm.tracker_client import provider_of

MAX_WANTED = 4096
"""Missing slices in one request."""
BUSY_S = 2.0
_HAVE_S = 10.0
_UNANSWERED_S = 0.5
_REFUSED_S = 10.0

Body: TypeAlias = dict[str, Any]
Flags: TypeAlias = NDArray[np.bool_]


class SwarmReaderState:
    """One reader of one dataset.

    Args:
        now: Seconds; as in all methods, only differences count.
        session: The process of its node. `address`: where it shares; "" if it does not.
        downloads: Slices at once.
        patience_s: Requests fail after this many seconds without data and without an available provider.
    """

    def __init__(
        self, now: float, *, session: str = "", address: str = "", downloads: int = 4, patience_s: float = 120.0
    ) -> None:
        self.missing: dict[int, float] = {}  # slices that are not being downloaded, and when they were requested first
        self.running: dict[int, float] = {}  # the same of those that are being downloaded
        self.counts = {"from_origins": 0, "from_peers": 0, "failed": 0}
        self._who = {"session": session, "address": address}
        self._downloads, self._patience_s = downloads, patience_s
        # Updates for the tracker that the next request sends.
        self._updates: dict[str, list[Any]] = {"finished": [], "failed": [], "dropped": []}
        self._is_request_due = False  # a request is due
        self._reported: Flags | None = None  # the slices that the tracker knows of
        self._reported_at = float("-inf")
        self._refused: dict[int, PermanentError] = {}  # by slice: why the last URL was not opened
        self._good_at = now
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
        self,
        index: int,
        provider: Provider,
        error: Exception | None,
        now: float,
        *,
        wrong: bool = False,
        cancelled: bool = False,
    ) -> bool:
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
        if not self.running and now - self._good_at >= self._patience_s:
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
        return bool(self._who["address"]) and (self._reported is None or now - self._reported_at > _HAVE_S)

    def request(self, now: float, available: Flags | None) -> Body:
        """The next request, with all updates. `available`: [num_slices] flags if `is_have_due`, else None."""
        waiting = list(self.missing)[:MAX_WANTED]
        num = max(0, self._downloads - len(self.running))
        self._asks_for_more = num > 0
        body: Body = {
            **self._who,
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

    def introduce(self, body: Body, available: Flags | None) -> None:
        """Complete a request for another tracker, which does not know this reader yet."""
        if available is not None:
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
