"""The server side of a swarm: members report what they have and want, the response names providers for what to fetch.

It runs in each data node, and in each worker that shares, so a swarm survives its data node. A member is a process of a
node; the processes of one node have a session each, and are penalized together (`PeerPenalties`). The address of a
member is given to others only after a TLS connection to it showed its own certificate; a member without an address
downloads only.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from forebay.arrays import BOOL
from forebay.base import Json
from forebay.errors import ProtocolError
from forebay.network.client import Client
from forebay.network.messages import SwarmRequest
from forebay.network.peer import Peer, Provider, member_id, node_of
from forebay.network.reachability import ReachabilityChecker
from forebay.swarm.members import parse_ranges
from forebay.swarm.steering import Swarm

MAX_AT_ONCE = 64
_MAX_PEERS = 16  # sharers named in a response, as the next trackers
_MAX_SESSIONS, _MAX_SESSIONS_PER_ORGANISATION = 64, 2048  # of a node; each costs a bit per slice
_WAIT_S = 0.2
_IDLE_WAIT_S = 2.0
_MAX_REQUESTS_PER_S = 200.0
log = logging.getLogger("forebay.network")


@dataclass
class _TrackedSwarm:
    swarm: Swarm
    own: Provider
    own_flags: Callable[[], BOOL] | None
    read_flags_at: float = float("-inf")
    members_of: dict[str, set[str]] = field(default_factory=dict)  # by organisation


class Tracker:
    """The swarms of several datasets. Threads share it.

    `client`, the caller's, connects back to members. A member that sends nothing for 30 s is removed.
    """

    def __init__(self, client: Client) -> None:
        self._lock = threading.Lock()
        self._tracked: dict[str, _TrackedSwarm] = {}
        self._dialer = ReachabilityChecker(client)

    def add(self, dataset_id: str, num_slices: int, own: Provider, own_flags: Callable[[], BOOL] | None = None) -> None:
        """Track a dataset.

        Args:
            own: A provider that lives as long as this tracker: the node itself, or the origin behind it.
            own_flags: Slices that `own` has, if it is no origin; read every second.
        """
        tracked = _TrackedSwarm(Swarm(num_slices), own, own_flags)
        with self._lock:
            self._tracked.setdefault(dataset_id, tracked)

    def tracks(self, dataset_id: str) -> bool:
        """Whether a dataset is tracked here."""
        return dataset_id in self._tracked

    def handle(self, peer: Peer, dataset_id: str, request: SwarmRequest, source: str = "") -> Json:
        """Return the SwarmReply to a member at the IP address `source`.

        Raises:
            ProtocolError: If it names a slice outside the dataset, or has too many sessions.
            KeyError: If the dataset is not tracked here.
        """
        tracked = self._tracked[dataset_id]
        swarm = tracked.swarm
        highest = max((*request.finished, *request.dropped, *(fetch.index for fetch in request.failed)), default=-1)
        if highest >= swarm.num_slices:
            raise ProtocolError(f"swarm: expected slices in [0, {swarm.num_slices}), got {highest}")
        me = member_id(peer.peer_id, request.session)
        now = time.monotonic()
        with self._lock:
            self._refresh(tracked, now)
            own = tracked.own if tracked.own.peer_id == me else None
            if request.leave:
                if own is None:
                    swarm.leave(me)
                return _reply(swarm, me)
            if swarm.get(me) is None:
                if swarm.penalties.num_members(peer.peer_id) >= _MAX_SESSIONS:
                    raise ProtocolError(f"swarm: expected at most {_MAX_SESSIONS} processes of {peer.peer_id}")
                if peer.org:
                    self._add_session(tracked, peer.org, me)
            is_reached = own is not None or self._dialer.check(peer, request.address, source)
            return steer(
                swarm,
                own or Provider(me, request.address if is_reached else "", False),
                request,
                now,
                may_fetch=is_reached is not None,
            )

    def _add_session(self, tracked: _TrackedSwarm, org: str, member: str) -> None:
        """Count one more member of an organisation; ProtocolError if it has too many. With the lock held."""
        members = tracked.members_of.setdefault(org, set())
        if len(members) >= _MAX_SESSIONS_PER_ORGANISATION:
            members.difference_update([other for other in members if tracked.swarm.get(other) is None])
        if len(members) >= _MAX_SESSIONS_PER_ORGANISATION:
            raise ProtocolError(
                f"swarm: expected at most {_MAX_SESSIONS_PER_ORGANISATION} processes of organisation {org}"
            )
        members.add(member)

    def status(self) -> dict[str, Json]:
        """Return figures of each dataset, by id, for status and metrics."""
        with self._lock:
            now = time.monotonic()
            return {dataset_id: tracked.swarm.status(now) for dataset_id, tracked in self._tracked.items()}

    def close(self) -> None:
        """Stop connecting to members. May be called twice."""
        self._dialer.close()

    def _refresh(self, tracked: _TrackedSwarm, now: float) -> None:
        flags = None
        if tracked.own_flags is not None and now - tracked.read_flags_at >= 1.0:
            tracked.read_flags_at = now
            flags = tracked.own_flags()
        tracked.swarm.join(tracked.own, flags, now)
        tracked.swarm.expire(now)


def steer(swarm: Swarm, member: Provider, request: SwarmRequest, now: float, *, may_fetch: bool = True) -> Json:
    """Apply the request of a member to its swarm and return the SwarmReply.

    ProtocolError if ranges are malformed; nothing is applied then.

    Args:
        member: Name and address that others get; without an address it is not named to others.
        may_fetch: False while its address is being checked: it repeats the request in a moment.
    """
    me = member.peer_id
    registered = swarm.get(me)
    have = None
    if request.have is not None:
        have = np.zeros(swarm.num_slices, np.bool_)
        have[parse_ranges(request.have, swarm.num_slices)] = True
    want = parse_ranges(request.want, swarm.num_slices)
    is_new = registered is None or registered.address != member.address
    swarm.join(member, have, now)
    for failed in request.failed:
        is_known = swarm.get(failed.member) is not None  # else this tracker never named it
        if is_known and swarm.failed(me, failed.index, failed.member, now, failed.wrong):
            log.warning("%s reports wrong bytes of slice %d from %s", me, failed.index, failed.member)
    for index in request.dropped:
        swarm.end(me, index)
    for index in request.finished:
        swarm.finished(me, index, now)
    assigned = swarm.assign(me, want, min(MAX_AT_ONCE, request.num), now) if may_fetch else []
    wait_s = min(swarm.ttl_s / 3, max(_WAIT_S if len(want) else _IDLE_WAIT_S, len(swarm) / _MAX_REQUESTS_PER_S))
    reply = _reply(swarm, me, wait_s if may_fetch else 0.05, is_new and have is None)
    reply["assignments"] = [{"index": index, **_provider_json(provider)} for index, provider in assigned]
    return reply


def _reply(swarm: Swarm, member: str, wait_s: float = 0.0, tell_have: bool = False) -> Json:
    sharers = [_provider_json(sharer) for sharer in swarm.sharers(_MAX_PEERS) if sharer.peer_id != member]
    return {"assignments": [], "wait_s": wait_s, "tell_have": tell_have, "sharers": sharers}


def _provider_json(provider: Provider) -> Json:
    name = provider.peer_id
    peer_id = name if provider.is_url else node_of(name)
    return {"member": name, "peer_id": peer_id, "address": provider.address, "is_origin": provider.is_origin}
