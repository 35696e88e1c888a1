"""The swarm's door for readers: members say what they have and want, and are told what to fetch from whom.

It stands in each data node, and in each worker that shares: where the data node died, a sharer steers the others.
A member is a process of a node: those of one node say a session each, and share as they like (`avoidance.py`). Its
address is believed when its TLS server was reached there once, under its own id; until then, and without
one, it gets and is never named.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.manifest import SliceInfo
from forebay.errors import ProtocolViolation
from forebay.network.client import Client
from forebay.network.messages import SwarmRequest
from forebay.network.peer import Peer, Provider, member_id, node_of
from forebay.network.pki.identity import Identity
from forebay.network.reachability import Dialer
from forebay.storage.peer_source import gives_right_bytes
from forebay.swarm.members import parse_ranges
from forebay.swarm.steering import Swarm

MAX_AT_ONCE = 64
_MAX_PEERS = 16  # sharers named in an answer, for when this tracker dies
_MAX_SESSIONS, _MAX_SESSIONS_PER_ORGANISATION = 64, 2048  # of a node; each costs a bit a slice
_WAIT_S, _IDLE_S, _MOST_ASKS_PER_S = 0.2, 2.0, 200.0
Flags = NDArray[np.bool_]


@dataclass
class _Tracked:
    swarm: Swarm
    own: Sequence[Provider]
    held: Callable[[], Flags] | None
    slice_of: Callable[[int], SliceInfo] | None
    told_at: float = float("-inf")
    of_org: dict[str, set[str]] = field(default_factory=dict)


class Tracker:
    """The swarms of several datasets. Safe to share between threads; `close` may be called twice. `client`, the
    caller's, dials members back; who is not heard of for `ttl_s` is gone."""

    def __init__(self, client: Client, *, ttl_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._tracked: dict[str, _Tracked] = {}
        self._client = client
        self._dialer = Dialer(client, clock)
        self._checks = ThreadPoolExecutor(1, thread_name_prefix="check")
        self._checking: set[tuple[str, str]] = set()
        self._bans = BanNotes(client.identity)
        self._client_id = client.identity.peer_id if client.identity is not None else ""

    def add(
        self,
        dataset_id: str,
        num_slices: int,
        own: Sequence[Provider],
        held: Callable[[], Flags] | None = None,
        *,
        slice_of: Callable[[int], SliceInfo] | None = None,
        origin_slots: int = 8,
    ) -> None:
        """Track a dataset.

        Args:
            own: Holders who live as long as this tracker: the node itself, or the origins behind it.
            held: What `own` hold, where they are no origins; asked for every second.
            slice_of: The table's row of a slice, to check who is said to give wrong bytes; None: two are believed.
        """
        swarm = Swarm(num_slices, ttl_s=self.ttl_s, origin_slots=origin_slots, checks=slice_of is not None)
        with self._lock:
            self._tracked.setdefault(dataset_id, _Tracked(swarm, own, held, slice_of))

    def knows(self, dataset_id: str) -> bool:
        """Whether a dataset is tracked here."""
        return dataset_id in self._tracked

    def answer(self, peer: Peer, dataset_id: str, ask: SwarmRequest, source: str = "") -> dict[str, Any]:
        """The reply to a member's message from the IP address `source`; see SwarmReply. ProtocolViolation: it names a
        slice that is not there, or the member has too many sessions. KeyError: the dataset is not tracked here."""
        tracked = self._tracked[dataset_id]
        swarm = tracked.swarm
        named = (*ask.must, *ask.finished, *ask.dropped, *ask.lost, *(failed.index for failed in ask.failed))
        if named and max(named) >= swarm.num_slices:
            raise ProtocolViolation(f"swarm: expected slices in [0, {swarm.num_slices}), got {max(named)}")
        me = member_id(peer.peer_id, ask.session)
        now = self._clock()
        with self._lock:
            self._refresh(tracked, now)
            own = next((one for one in tracked.own if one.peer_id == me), None)  # It need not dial itself.
            if ask.leave:
                if own is None:
                    swarm.leave(me)
                return _reply(swarm, me)
            if swarm.get(me) is None and swarm.num_members(peer.peer_id) >= _MAX_SESSIONS:
                raise ProtocolViolation(f"swarm: expected at most {_MAX_SESSIONS} processes of {peer.peer_id}")
            if swarm.get(me) is None and peer.org:
                self._count_session(tracked, peer.org, me)
            is_reached = True if own is not None else self._dialer.found(peer, ask.address, source)
            member = own or Provider(me, ask.address if is_reached else "", False)
            reply = steer(swarm, member, ask, now, organisation=peer.org, may_fetch=is_reached is not None)
            if any(failed.wrong for failed in ask.failed):
                self._bans.look(dataset_id, swarm.status()["banned"], peer.peer_id)
                self._check_suspects(dataset_id, tracked)
            return reply

    def _count_session(self, tracked: _Tracked, org: str, member: str) -> None:
        """One more member of an organisation. ProtocolViolation if it has too many; with the lock held."""
        members = tracked.of_org.setdefault(org, set())
        if len(members) >= _MAX_SESSIONS_PER_ORGANISATION:
            members.difference_update([one for one in members if tracked.swarm.get(one) is None])
        if len(members) >= _MAX_SESSIONS_PER_ORGANISATION:
            most = _MAX_SESSIONS_PER_ORGANISATION
            raise ProtocolViolation(f"swarm: expected at most {most} processes of organisation {org}")
        members.add(member)

    def facts(self) -> dict[str, dict[str, Any]]:
        """Of each dataset, by id, for status and metrics."""
        with self._lock:
            return {dataset_id: tracked.swarm.status() for dataset_id, tracked in self._tracked.items()}

    def close(self) -> None:
        """Dial and check nobody any more."""
        self._dialer.close()
        self._checks.shutdown(wait=False, cancel_futures=True)

    def _check_suspects(self, dataset_id: str, tracked: _Tracked) -> None:
        """Have those checked whom two say to give wrong bytes. With the lock held."""
        for holder, index in tracked.swarm.suspects():
            pair = dataset_id, holder.peer_id
            is_own = any(one.peer_id == holder.peer_id for one in tracked.own)
            if tracked.slice_of is None or is_own or holder.is_url or pair in self._checking:
                continue
            self._checking.add(pair)
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._checks.submit(self._check, dataset_id, tracked, holder, index)

    def _check(self, dataset_id: str, tracked: _Tracked, holder: Provider, index: int) -> None:
        assert tracked.slice_of is not None
        try:
            is_right = gives_right_bytes(self._client, holder, tracked.slice_of(index))
        except Exception:
            log.exception("check of %s failed", holder.peer_id)
            is_right = None
        with self._lock:
            self._checking.discard((dataset_id, holder.peer_id))
            if is_right:
                tracked.swarm.pardon(holder.peer_id)
            elif is_right is False:
                tracked.swarm.ban(holder.peer_id)
                self._bans.look(dataset_id, tracked.swarm.status()["banned"], self._client_id, "wrong bytes")

    def _refresh(self, tracked: _Tracked, now: float) -> None:
        held = None
        if now - tracked.told_at >= 1.0:
            tracked.told_at = now
            held = tracked.held() if tracked.held is not None else None
        for holder in tracked.own:
            tracked.swarm.join(holder, held, now)
        tracked.swarm.expire(now)


def steer(
    swarm: Swarm, member: Provider, message: SwarmRequest, now: float, *, organisation: str = "", may_fetch: bool = True
) -> dict[str, Any]:
    """Apply a member's message to its swarm; the reply, a SwarmReply. ProtocolViolation, and nothing applied, if its
    ranges are malformed.

    Args:
        member: By whose name and address the others are told of it; without an address it is never named.
        organisation: To which its certificate belongs; its members accuse with one voice.
        may_fetch: False while it is being found out whether others reach it: it is to ask again in a moment.
    """
    me, known = member.peer_id, swarm.get(member.peer_id)
    have = None
    if message.have is not None:
        have = np.zeros(swarm.num_slices, np.bool_)
        have[parse_ranges(message.have, swarm.num_slices)] = True
    want = parse_ranges(message.want, swarm.num_slices)
    slots = None if message.slots is None else min(MAX_AT_ONCE, message.slots)
    is_new = known is None or known.address != member.address
    swarm.join(member, have, now, slots=slots)
    for failed in message.failed:
        if swarm.get(failed.member) is not None:  # it was never sent to a name that is not here
            swarm.failed(me, failed.index, failed.member, now, failed.wrong, organisation)
    for index in message.dropped:
        swarm.dropped(me, index)
    for index in message.finished:
        swarm.finished(me, index, now)
    for index in message.lost:
        swarm.lost(me, index)
    assigned = swarm.assign(me, want, min(MAX_AT_ONCE, message.num), now) if may_fetch else []
    late = set(message.must[:MAX_AT_ONCE]) - {each.index for each in assigned}
    wait_s = min(swarm.ttl_s / 3, max(_WAIT_S if len(want) else _IDLE_S, len(swarm) / _MOST_ASKS_PER_S))
    reply = _reply(swarm, me, wait_s if may_fetch else 0.05, is_new and have is None)
    reply["assignments"] = [{"index": each.index, **_holder(each.holder)} for each in assigned]
    reply["must"] = [
        {"index": i, "holders": [_holder(one) for one in swarm.providers(i, me, now)]} for i in sorted(late)
    ]
    return reply


def _reply(swarm: Swarm, asker: str, wait_s: float = 0.0, tell_have: bool = False) -> dict[str, Any]:
    return {
        "assignments": [],
        "must": [],
        "wait_s": wait_s,
        "tell_have": tell_have,
        "settled": swarm.is_settled,
        "sharers": [_holder(one) for one in swarm.sharers(_MAX_PEERS) if one.peer_id != asker],
    }


def _holder(one: Provider) -> dict[str, Any]:
    peer_id = one.peer_id if one.is_url else node_of(one.peer_id)
    return {"member": one.peer_id, "peer_id": peer_id, "address": one.address, "is_origin": one.is_origin}


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
