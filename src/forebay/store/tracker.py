"""The swarm's door for readers: members say what they have and want, and are told what to fetch from whom.

It stands in each data node, and in each worker that shares: where the data node died, a sharer steers the others.
A member is a process of a node: those of one node say a session each, and share as they like (`avoidance.py`). Its
address is believed when its TLS server was reached there once, under its own id; until then, and without
one, it gets and is never named.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ProtocolViolation
from forebay.network.avoidance import member_id, node_of
from forebay.network.client import Client
from forebay.network.dialing import Dialer
from forebay.network.exchange import BadRequestError
from forebay.network.identity import Identity
from forebay.network.members import parse_ranges
from forebay.network.peer import Peer
from forebay.network.swarm import Holder, Swarm

MAX_AT_ONCE = 64
MAX_REPORTS = 1024
_MAX_PEERS = 16  # sharers named in an answer, for when this tracker dies
_MAX_SESSIONS = 64  # of a node
_WAIT_S, _IDLE_S, _MOST_ASKS_PER_S = 0.2, 2.0, 200.0
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class SwarmAsk:
    """What a member says.

    Attributes:
        session: Which process of its node it is; "" where there is one only.
        have: What it holds; None: as before. `lost`: what it holds no longer.
        want, num: What it lacks and is not fetching; how many it will begin now.
        must: Those it cannot do without: it is told who has them, whatever that costs.
        finished: Fetched and verified. `failed`: (slice, member, gave wrong bytes). `dropped`: fetched no longer.
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
    lost: tuple[int, ...] = ()
    session: str = ""
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
            have=None if have is None else _flags(parse_ranges(have, num_slices), num_slices),
            want=parse_ranges(body.get("want", ""), num_slices),
            num=min(MAX_AT_ONCE, max(0, int(body.get("num", 0)))),
            must=tuple(index_of(item) for item in listed("must"))[:MAX_AT_ONCE],
            finished=tuple(index_of(item) for item in listed("finished")),
            failed=tuple(
                (index_of(item["index"]), str(item["member"])[:300], item.get("wrong") is True)
                for item in listed("failed")
            ),
            dropped=tuple(index_of(item) for item in listed("dropped")),
            lost=tuple(index_of(item) for item in listed("lost")),
            leave=body.get("leave") is True,
            session=_session(body.get("session", "")),
        )
    except (KeyError, TypeError, ValueError, OverflowError, ProtocolViolation) as error:
        raise BadRequestError(f"swarm: malformed: {type(error).__name__}: {error}") from error


def _flags(indexes: NDArray[np.int64], num_slices: int) -> NDArray[np.bool_]:
    flags = np.zeros(num_slices, np.bool_)
    flags[indexes] = True
    return flags


def _session(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{0,32}", value):
        raise BadRequestError(f"swarm: expected a session of at most 32 hex digits, got {str(value)[:40]!r}")
    return value


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
        self._clock = clock
        self._lock = threading.Lock()
        self._tracked: dict[str, _Tracked] = {}
        self._dialer = Dialer(client, clock)
        self._bans = BanNotes(client.identity)

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
            me = member_id(peer.peer_id, ask.session)
            own = next((one for one in tracked.own if one.peer_id == me), None)  # It need not dial itself.
            if ask.leave:
                if own is None:
                    swarm.leave(me)
                return _told(swarm, [], {}, 0.0, False, me)
            known = swarm.knows(me)
            if known is None and swarm.num_members(peer.peer_id) >= _MAX_SESSIONS:
                raise BadRequestError(f"swarm: expected at most {_MAX_SESSIONS} processes of {peer.peer_id}")
            found = own is not None or self._dialer.found(peer.peer_id, ask.address)
            address, is_checking = ask.address if found else "", found is None
            is_new = known is None or known.address != address
            swarm.join(own or Holder(me, address, False), ask.have, now, slots=ask.slots)
            for index, who, wrong in ask.failed:
                swarm.failed(me, index, who, now, wrong)
            if any(wrong for _, _, wrong in ask.failed):
                self._bans.look(dataset_id, swarm.facts()["banned"], peer.peer_id)
            for index in ask.dropped:
                swarm.dropped(me, index)
            for index in ask.finished:
                swarm.finished(me, index, now)
            for index in ask.lost:
                swarm.lost(me, index)
            given = [] if is_checking else swarm.assign(me, ask.want, ask.num, now)
            late = set(ask.must) - {each.index for each in given}
            must = {index: swarm.providers(index, me, now) for index in sorted(late)}
            least_s = _WAIT_S if len(ask.want) else _IDLE_S
            wait_s = min(self.ttl_s / 3, max(least_s, len(swarm) / _MOST_ASKS_PER_S))
            wait_s = 0.05 if is_checking else wait_s
            return _told(swarm, given, must, wait_s, is_new and ask.have is None, me)

    def facts(self) -> dict[str, dict[str, Any]]:
        """Of each dataset, by id, for status and metrics."""
        with self._lock:
            return {dataset_id: tracked.swarm.facts() for dataset_id, tracked in self._tracked.items()}

    def close(self) -> None:
        """Dial nobody back any more."""
        self._dialer.close()

    def _refresh(self, tracked: _Tracked, now: float) -> None:
        held = None
        if now - tracked.told_at >= 1.0:
            tracked.told_at = now
            held = tracked.held() if tracked.held is not None else None
        for holder in tracked.own:
            tracked.swarm.join(holder, held, now)
        tracked.swarm.expire(now)


def _told(
    swarm: Swarm,
    given: Sequence[Any],
    must: Mapping[int, Sequence[Holder]],
    wait_s: float,
    tell_have: bool,
    asker: str,
) -> dict[str, Any]:
    def holder(one: Holder) -> dict[str, Any]:
        peer_id = one.peer_id if one.is_url else node_of(one.peer_id)
        return {"member": one.peer_id, "peer_id": peer_id, "address": one.address, "is_origin": one.is_origin}

    return {
        "assignments": [{"index": each.index, **holder(each.holder)} for each in given],
        "must": [{"index": index, "holders": [holder(one) for one in found]} for index, found in must.items()],
        "wait_s": wait_s,
        "tell_have": tell_have,
        "settled": swarm.is_settled,
        "sharers": [holder(one) for one in swarm.sharers(_MAX_PEERS) if one.peer_id != asker],
    }


log = logging.getLogger("forebay.network")


class BanNotes:
    """What a node that steers swarms has noted of whom they ban; `identity` None: only in the program's log."""

    def __init__(self, identity: Identity | None) -> None:
        self._identity = identity
        self._noted: set[tuple[str, str]] = set()

    def know(self, dataset_id: str, banned: Iterable[str]) -> list[str]:
        """Takes them for noted; returns who is new."""
        new = [peer_id for peer_id in banned if (dataset_id, peer_id) not in self._noted]
        self._noted.update((dataset_id, peer_id) for peer_id in new)
        return new

    def look(self, dataset_id: str, banned: Iterable[str], by: str, reason: str = "") -> None:
        """Notes who is newly banned, after `by` reported."""
        for peer_id in self.know(dataset_id, banned):
            log.warning("nobody is sent to %s any more for slices of %s: %s", peer_id, dataset_id, reason)
            if self._identity is not None:
                facts = {"reason": reason} if reason else {}
                self._identity.note("ban", peer=peer_id, dataset=dataset_id, by=by, **facts)
