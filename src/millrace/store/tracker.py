"""The swarm's door for readers: members say what they have and want, and are told what to fetch from whom.

It stands in each data node, and in each worker that shares: where the data node died, a sharer steers the others.
A member's address is believed when its TLS server was reached there once, under its own id; until then, and without
one, it gets and is never named.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import MillraceError, ProtocolViolation
from millrace.network.client import Client
from millrace.network.exchange import BadRequestError
from millrace.network.peer import Peer
from millrace.network.ranges import parse_ranges
from millrace.network.swarm import Holder, Swarm

MAX_AT_ONCE = 64
MAX_REPORTS = 1024
_MAX_PEERS = 16  # sharers named in an answer, for when this tracker dies
_CHECK_S, _RECHECK_S = 3.0, 60.0
_WAIT_S, _IDLE_S, _MOST_ASKS_PER_S = 0.2, 2.0, 200.0
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class SwarmAsk:
    """What a member says.

    Attributes:
        have: What it holds; None: as before.
        want, num: What it lacks and is not fetching; how many it will begin now.
        must: Those it cannot do without: it is told who has them, whatever that costs.
        finished: Fetched and verified. `failed`: (slice, peer id, gave wrong bytes). `dropped`: fetched no longer.
    """

    address: str = ""
    slots: int | None = None
    have: Flags | None = None
    want: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    num: int = 0
    must: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    failed: tuple[tuple[int, str, bool], ...] = ()
    dropped: tuple[int, ...] = ()
    leave: bool = False


def parse_ask(body: Any, num_slices: int) -> SwarmAsk:
    """A member's message.

    Raises:
        BadRequestError: If it is malformed or names a slice that is not there.
    """

    def index_of(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_slices:
            raise BadRequestError(f"swarm: expected a slice in [0, {num_slices}), got {str(value)[:40]}")
        return value

    def listed(name: str) -> list[Any]:
        value = body.get(name, [])
        if not isinstance(value, list) or len(value) > MAX_REPORTS:
            raise BadRequestError(f"swarm: expected `{name}` to be a list of at most {MAX_REPORTS}")
        return value

    if not isinstance(body, dict):
        raise BadRequestError("swarm: expected an object")
    try:
        have, slots = body.get("have"), body.get("slots")
        return SwarmAsk(
            address=str(body.get("address", ""))[:300],
            slots=None if slots is None else min(MAX_AT_ONCE, max(0, int(slots))),
            have=None if have is None else parse_ranges(str(have), num_slices),
            want=np.flatnonzero(parse_ranges(str(body.get("want", "")), num_slices)),
            num=min(MAX_AT_ONCE, max(0, int(body.get("num", 0)))),
            must=tuple(index_of(item) for item in listed("must"))[:MAX_AT_ONCE],
            finished=tuple(index_of(item) for item in listed("finished")),
            failed=tuple(
                (index_of(item["index"]), str(item["peer_id"])[:300], item.get("wrong") is True)
                for item in listed("failed")
            ),
            dropped=tuple(index_of(item) for item in listed("dropped")),
            leave=body.get("leave") is True,
        )
    except (KeyError, TypeError, ValueError, OverflowError, ProtocolViolation) as error:
        raise BadRequestError(f"swarm: malformed: {type(error).__name__}: {error}") from error


@dataclass
class _Tracked:
    swarm: Swarm
    own: Sequence[Holder]
    held: Callable[[], Flags] | None
    told_at: float = float("-inf")


class Tracker:
    """The swarms of several datasets. Safe to share between threads; `close` may be called twice.

    Args:
        client: Dials members back. Stays the caller's.
        ttl_s: Who is not heard of for so long is gone.
    """

    def __init__(self, client: Client, *, ttl_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttl_s = ttl_s
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._tracked: dict[str, _Tracked] = {}
        self._checked: dict[tuple[str, str], tuple[bool | None, float]] = {}  # (peer id, address): (reached, when)
        self._dialers = ThreadPoolExecutor(4, thread_name_prefix="dial-back")

    def add(
        self,
        dataset_id: str,
        num_slices: int,
        own: Sequence[Holder],
        held: Callable[[], Flags] | None = None,
        *,
        slots: int = 4,
        origin_slots: int = 8,
    ) -> None:
        """Track a dataset.

        Args:
            own: Holders who live as long as this tracker: the node itself, or the origins behind it.
            held: What `own` hold, where they are no origins; asked for every second.
        """
        swarm = Swarm(num_slices, ttl_s=self.ttl_s, slots=slots, origin_slots=origin_slots)
        with self._lock:
            self._tracked.setdefault(dataset_id, _Tracked(swarm, own, held))

    def knows(self, dataset_id: str) -> bool:
        """Whether a dataset is tracked here."""
        return dataset_id in self._tracked

    def swarm_of(self, dataset_id: str) -> Swarm:
        """The state of a dataset; to look at where nobody else calls. Raises KeyError if it is not tracked."""
        return self._tracked[dataset_id].swarm

    def answer(self, peer: Peer, dataset_id: str, body: Any) -> dict[str, Any]:
        """What a member is told.

        Raises:
            BadRequestError: If its message is malformed.
            KeyError: If the dataset is not tracked here.
        """
        tracked = self._tracked[dataset_id]
        swarm = tracked.swarm
        ask = parse_ask(body, swarm.num_slices)
        now = self._clock()
        with self._lock:
            self._refresh(tracked, now)
            if ask.leave:
                swarm.leave(peer.peer_id)
                return _told(swarm, [], {}, 0.0, False, peer.peer_id)
            known = swarm.knows(peer.peer_id)
            address, is_checking = self._address(peer.peer_id, ask.address, now)
            is_new = known is None or known.address != address
            swarm.join(Holder(peer.peer_id, address, False), ask.have, now, slots=ask.slots)
            for index, who, wrong in ask.failed:
                swarm.failed(peer.peer_id, index, who, now, wrong)
            for index in ask.dropped:
                swarm.dropped(peer.peer_id, index)
            for index in ask.finished:
                swarm.finished(peer.peer_id, index, now)
            given = [] if is_checking else swarm.assign(peer.peer_id, ask.want, ask.num, now)
            late = set(ask.must) - {each.index for each in given}
            must = {index: swarm.providers(index, peer.peer_id, now) for index in sorted(late)}
            least_s = _WAIT_S if len(ask.want) else _IDLE_S
            wait_s = min(self.ttl_s / 3, max(least_s, len(swarm) / _MOST_ASKS_PER_S))
            wait_s = 0.05 if is_checking else wait_s
            return _told(swarm, given, must, wait_s, is_new and ask.have is None, peer.peer_id)

    def facts(self) -> dict[str, dict[str, Any]]:
        """Of each dataset, by id, for status and metrics."""
        with self._lock:
            return {dataset_id: tracked.swarm.facts() for dataset_id, tracked in self._tracked.items()}

    def close(self) -> None:
        """Dial nobody back any more."""
        self._dialers.shutdown(wait=False, cancel_futures=True)

    def _refresh(self, tracked: _Tracked, now: float) -> None:
        held = None
        if now - tracked.told_at >= 1.0:
            tracked.told_at = now
            held = tracked.held() if tracked.held is not None else None
        for holder in tracked.own:
            tracked.swarm.join(holder, held, now)
        tracked.swarm.expire(now)

    def _address(self, peer_id: str, address: str, now: float) -> tuple[str, bool]:
        """The address to name a member by, empty if it cannot be reached; and whether that is being found out."""
        if not address:
            return "", False
        pair = (peer_id, address)
        reached, at = self._checked.get(pair, (False, float("-inf")))
        if reached is None:
            return "", True
        if reached or now - at < _RECHECK_S:
            return address if reached else "", False
        self._checked[pair] = (None, now)
        self._checked = {
            pair: found for pair, found in self._checked.items() if found[0] is None or now - found[1] < 3600
        }
        self._dialers.submit(self._dial, pair)
        return "", True

    def _dial(self, pair: tuple[str, str]) -> None:
        try:
            self._client.request_json(pair[1], "GET", "/v1/claims", expect_peer=pair[0], timeout_s=_CHECK_S)
            reached = True
        except MillraceError:
            reached = False
        with self._lock:
            self._checked[pair] = (reached, self._clock())


def _told(
    swarm: Swarm,
    given: Sequence[Any],
    must: Mapping[int, Sequence[Holder]],
    wait_s: float,
    tell_have: bool,
    asker: str,
) -> dict[str, Any]:
    def holder(one: Holder) -> dict[str, Any]:
        return {"peer_id": one.peer_id, "address": one.address, "is_origin": one.is_origin}

    return {
        "assignments": [{"index": each.index, **holder(each.holder)} for each in given],
        "must": [{"index": index, "holders": [holder(one) for one in found]} for index, found in must.items()],
        "wait_s": wait_s,
        "tell_have": tell_have,
        "settled": swarm.is_settled,
        "sharers": [holder(one) for one in swarm.sharers(_MAX_PEERS) if one.peer_id != asker],
    }
