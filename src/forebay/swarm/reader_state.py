"""A reader's part in a swarm as a state machine: what to say to the tracker, and what follows from its replies.

Pure: no socket, thread or clock. `SwarmReader` drives it from threads, `tests/sim` in virtual time. One request
is under way at a time: `request`, then `receive` or `unanswered`; a driver calls one method at a time. The tracker says
who may give what; whether bytes are right is found out by whoever fetches them, and said with `ended`.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from forebay.errors import IntegrityError, NetworkError, ProtocolViolation
from forebay.network.messages import MAX_SWARM_ITEMS, SwarmReply
from forebay.network.peer import Provider
from forebay.storage.base import PermanentError
from forebay.swarm.members import format_ranges
from forebay.swarm.tracker_client import provider_of

MAX_WANTED = 4096
"""Wanted slices that one request names."""
BUSY_S = 2.0
_HAVE_S = 10.0
_UNANSWERED_S = 0.5
_MUST_S = 5.0
_MAX_MUST = 8
_REFUSED_S = 10.0
_SETTLE_S = 4.0  # a sharer that began to track must be found by the others before it can tell that all have all

Body: TypeAlias = dict[str, Any]
Flags: TypeAlias = NDArray[np.bool_]


class SwarmReaderState:
    """One reader of one dataset.

    Args:
        now: Seconds; as in all methods, only differences count.
        session: Which process of its node this is. `address`: where it shares; "" if it does not.
        downloads: Slices at once. `slots`: slices that others may fetch from it at once.
        patience_s: Nothing came for so long, and nobody was there who might give it: what is wanted is given up.
    """

    def __init__(
        self,
        now: float,
        *,
        session: str = "",
        address: str = "",
        slots: int = 4,
        downloads: int = 4,
        patience_s: float = 120.0,
    ) -> None:
        self.wanted: dict[int, float] = {}  # when it was wanted first, of slices that are not being fetched
        self.running: dict[int, float] = {}  # the same of those that are
        self.settled = False  # whether all who share the dataset had all of it, as of the last reply
        self.counts = {"from_origins": 0, "from_peers": 0, "failed": 0}
        self._who = {"session": session, "address": address, "slots": slots}
        self._downloads, self._patience_s = downloads, patience_s
        # What the tracker is to learn, until a request carries it.
        self._news: dict[str, list[Any]] = {"finished": [], "failed": [], "dropped": [], "lost": []}
        self._wants = False  # something new
        self._reported: Flags | None = None  # what the tracker knows that is here
        self._reported_at = float("-inf")
        self._refused: dict[int, PermanentError] = {}  # by slice: the last URL that this reader did not open
        self._good_at = now
        self._needed: dict[int, float] = {}  # since when somebody waits for a slice
        self._asks_for_more = False

    # What its owner says.

    def want(self, index: int, now: float) -> None:
        """A slice is wanted."""
        self.wanted[index] = now
        self._wants = True

    def need(self, index: int, now: float) -> None:
        """Somebody waits for a slice: if its fetch has not begun after 5 s, it is taken from wherever it is."""
        self._needed.setdefault(index, now)

    def withdraw(self, index: int) -> bool:
        """A slice is wanted no longer; False if it was not waiting to be fetched."""
        self._needed.pop(index, None)
        return self.wanted.pop(index, None) is not None

    def lose(self, index: int) -> None:
        """A slice is here no longer."""
        self._news["lost"].append(index)

    def ask_soon(self) -> None:
        """A request is due now."""
        self._wants = True

    def ended(
        self,
        index: int,
        holder: Provider,
        error: Exception | None,
        now: float,
        *,
        wrong: bool = False,
        cancelled: bool = False,
    ) -> bool:
        """A fetch ended. Whether the slice is settled: it is here, or was given up; else it is wanted again. `wrong`:
        the holder gave wrong bytes or broke the protocol. `cancelled`: it is wanted no longer, so an error says nothing
        about the holder."""
        wanted_at = self.running.pop(index, now)
        self._good_at = now
        if error is None:
            self._refused.pop(index, None)
            self._news["finished"].append(index)
            self.counts["from_origins" if holder.is_origin else "from_peers"] += 1
        elif cancelled or self.is_final(error):
            self._news["dropped"].append(index)
        else:
            is_wrong = wrong or isinstance(error, (IntegrityError, ProtocolViolation))
            self._news["failed"].append({"index": index, "member": holder.peer_id, "wrong": is_wrong})
            self.counts["failed"] += 1
            if isinstance(error, PermanentError):
                self._refused[index] = error
            self.wanted[index] = wanted_at
            return False
        self._needed.pop(index, None)
        return True

    @staticmethod
    def is_final(error: Exception | None) -> bool:
        """Whether a fetch that ended so is not tried from another holder."""
        return not isinstance(error, NetworkError | IntegrityError)

    def give_up(self, now: float) -> list[tuple[int, PermanentError | None]]:
        """What need not be waited for any more: of each slice the URL's refusal, or None if nobody was there for long.

        Who steers may name a URL that this reader does not open: others may bring the slice, but not for ever.
        """
        late = [i for i, wanted_at in self.wanted.items() if i in self._refused and now - wanted_at > _REFUSED_S]
        ended: list[tuple[int, PermanentError | None]] = [(index, self._refused.pop(index)) for index in late]
        self._news["dropped"] += late
        if not self.running and now - self._good_at >= self._patience_s:
            ended += [(index, None) for index in self.wanted if index not in late]
        for index, _ in ended:
            self.withdraw(index)
        return ended

    # What it says to the tracker.

    @property
    def has_news(self) -> bool:
        """Whether a request is due now, whatever the tracker said of when."""
        return self._wants or any(self._news.values())

    def is_have_due(self, now: float) -> bool:
        """Whether the next request should be given what is here."""
        return bool(self._who["address"]) and (self._reported is None or now - self._reported_at > _HAVE_S)

    def request(self, now: float, held: Flags | None) -> Body:
        """The next request, whose news is news no longer. `held`: [num_slices] flags if `is_have_due`, else None."""
        waiting = list(self.wanted)[:MAX_WANTED]
        late = [index for index, at in self._needed.items() if index in self.wanted and now - at > _MUST_S]
        num, most = max(0, self._downloads - len(self.running)), MAX_SWARM_ITEMS
        self._asks_for_more = num > 0
        body: Body = {
            **self._who,
            "want": format_ranges(np.array(sorted(waiting), np.int64)),
            "num": num,
            **{name: items[:most] for name, items in self._news.items()},
            "must": late[:_MAX_MUST],
        }
        self._news, self._wants = {name: items[most:] for name, items in self._news.items()}, False
        if held is not None:
            if self._reported is None or not np.array_equal(held, self._reported):
                self.introduce(body, held)
            self._reported_at = now
        return body

    def introduce(self, body: Body, held: Flags | None) -> None:
        """The request goes to another tracker, which does not know this reader yet."""
        if held is not None:
            body["have"] = format_ranges(np.flatnonzero(held))
            self._reported = held

    def unanswered(self, body: Body) -> float:
        """No tracker answered: the news is news again. When to ask next, seconds from now."""
        self._news = {name: body[name] + items for name, items in self._news.items()}
        self._reported = None
        return _UNANSWERED_S

    def receive(
        self, reply: Body, now: float, tracker: Provider | None = None, tracked_s: float = 0.0
    ) -> tuple[list[tuple[int, Provider]], list[Provider], float]:
        """What a reply says: slices to fetch now, each from whom; other sharers; when to ask again, seconds from now.

        `tracker` is who replied, and for how long it has without another between. ProtocolViolation: leave it for the
        next.
        """
        try:
            message = SwarmReply.model_validate(reply)
        except ValidationError as error:
            raise ProtocolViolation(
                f"swarm: expected a SwarmReply, got {str(reply)[:200]}: {error.errors()[:1]}"
            ) from error
        named = [(one.index, one) for one in message.assignments]
        named += [(one.index, one.holders[0]) for one in message.must if one.holders]  # type: ignore[misc]
        assigned = [(index, provider_of(holder)) for index, holder in named]
        sharers = [provider_of(one) for one in message.sharers[:16]]
        is_origin = tracker is not None and tracker.is_origin
        self.settled = message.settled and tracker is not None and (is_origin or tracked_s >= _SETTLE_S)
        if assigned or sharers or is_origin:
            self._good_at = now  # somebody is there who may give; alone with itself it waits for nothing
        begun = []
        for index, holder in assigned:
            if (wanted_at := self.wanted.pop(index, None)) is not None:
                self.running[index] = wanted_at
                begun.append((index, holder))
        if message.tell_have:
            self._reported = None
            return begun, sharers, 0.0
        wait_s = min(10.0, max(0.02, message.wait_s))
        return begun, sharers, wait_s if self._asks_for_more else max(wait_s, BUSY_S)
