"""Decides which member of a swarm downloads which slice from which provider: a pure state machine.

The scheduler uses it for leases, each data node for readers, and the simulator. Time is an argument, and there is no
randomness: the same calls in the same order give the same answers.

The policy:
- Members that need many slices (`assign`): the rarest first. An origin uploads a slice once while a copy of it exists,
  or is being downloaded by a member that serves others; the others wait for that copy.
- A member that needs one slice (`providers`): all that have it, the least loaded first, origins last.
- A provider's uploads are bounded by its slots. One that fails is avoided by that asker for a while;
  one that sends wrong bytes is banned (`PeerPenalties`).

Cost: a bit for each member and slice (312 MB for 10,000 of 250,000); a call considers 4,096 of the requested slices.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from forebay.arrays import BOOL, I32, I64
from forebay.network.peer import Provider
from forebay.swarm.members import Download, Downloads, Members, PeerPenalties

PATIENCE_S = 60.0
_MAX_PROVIDERS = 4
_MAX_WANTED = 4096  # requested slices that one call considers
_TRIED = 64  # candidates whose providers one call considers, beside those it needs
_LOST_AFTER = 8.0  # times the mean duration of a download, before it counts as lost


class Swarm:
    """The members of one dataset's swarm, and the downloads between them.

    Args:
        ttl_s: Members that sent nothing for this many seconds are removed.
        slots, origin_slots: Simultaneous uploads of a member, and of an origin.
    """

    def __init__(self, num_slices: int, *, ttl_s: float = 30.0, slots: int = 4, origin_slots: int = 8) -> None:
        self.num_slices = num_slices
        self.ttl_s = ttl_s
        self.slots = slots
        self.origin_slots = origin_slots
        self._members = Members(num_slices)
        self._providers: dict[str, Provider] = {}
        self._downloads = Downloads(num_slices)
        self.penalties = PeerPenalties()
        self._counts = {"from_origins": 0, "from_peers": 0, "finished": 0, "failed": 0, "overdue": 0}

    # Members and their slices.

    def join(self, holder: Provider, have: BOOL | None, now: float) -> None:
        """Add or update a member.

        `have`: [num_slices] flags of its slices; None: as before. Ignored for an origin, which has all, and for a
        member without an address, which serves none.
        """
        members = self._members
        peer_id = holder.peer_id
        before = self._providers.get(peer_id)
        if before is not None and (before.is_origin, not before.address) != (holder.is_origin, not holder.address):
            self.leave(peer_id)
            before = None
        if before is None:
            members.add(peer_id, is_origin=holder.is_origin, gives=bool(holder.address))
            self.penalties.join(peer_id)
            members.slots[members.rows[peer_id]] = self.origin_slots if holder.is_origin else self.slots
        self._providers[peer_id] = holder
        members.seen_at[members.rows[peer_id]] = now
        if have is not None and not holder.is_origin and holder.address:
            members.set_all(peer_id, have)

    def leave(self, peer_id: str) -> None:
        """Remove a member; bans of it stay."""
        if peer_id not in self._providers:
            return
        for pair in self._downloads.of(peer_id):
            self.end(*pair)
        del self._providers[peer_id]
        self._members.remove(peer_id)
        self.penalties.leave(peer_id)

    def leave_origins(self) -> None:
        """Remove all origins."""
        for holder in [holder for holder in self._providers.values() if holder.is_origin]:
            self.leave(holder.peer_id)

    def expire(self, now: float) -> list[str]:
        """Remove members that sent nothing for `ttl_s`, and end overdue downloads. Returns their ids."""
        self._end_overdue(now)
        silent = np.flatnonzero(self._members.seen_at < now - self.ttl_s).tolist()
        expired = [peer_id for row in silent if (peer_id := self._members.ids[row])]
        for peer_id in expired:
            self.leave(peer_id)
        return expired

    # Downloads.

    def providers(self, index: int, asker: str, now: float) -> list[Provider]:
        """The providers of one slice that the asker needs, four at most: the least loaded first, origins last.

        The first counts as uploading it until `finished` or `failed`. Banned and avoided members are left
        out; those without a free slot come last.
        """
        self._end_overdue(now)
        members = self._members
        self.end(asker, index)
        willing = members.gives & ~self._shunned(asker, now)
        rows = np.flatnonzero(willing & (members.holders_of(index) | members.is_origin))
        uploads = members.uploads[rows]
        order = np.lexsort((rows, uploads, members.is_origin[rows], uploads >= members.slots[rows]))
        rows = rows[order[:_MAX_PROVIDERS]]
        providers = [self._providers[members.ids[row]] for row in rows.tolist()]
        if providers:
            self._begin(asker, index, providers[0], now)
        return providers

    def assign(self, asker: str, missing: I64, num: int, now: float) -> list[tuple[int, Provider]]:
        """The downloads that a member (`join` it first) should start now: at most `num`, fewer if waiting is better.

        Each is a slice and its provider. `missing` is [n] slices that it lacks and is not downloading, in any order. A
        slice in it that was assigned to the asker already is assigned again, and counts, so that a repeated call is
        harmless. A slice in it that the asker had before is taken as lost.
        """
        self._end_overdue(now)
        assigned = self._assigned_before(asker, missing, num, now)
        if len(assigned) >= num:
            return assigned
        missing = missing[~np.isin(missing, self._downloads.slices_of(asker))][:_MAX_WANTED]
        members = self._members
        if self._providers[asker].address:
            members.clear(asker, missing)
        willing = members.gives & ~self._shunned(asker, now)
        origins = np.flatnonzero(willing & members.is_origin)
        for index in self._candidates(asker, missing, num - len(assigned), origins):
            provider = self._source(index, willing, origins)
            if provider is not None:
                self._begin(asker, index, provider, now)
                assigned.append((index, provider))
                if len(assigned) == num:
                    break
        return assigned

    def finished(self, asker: str, index: int, now: float) -> None:
        """The asker has the slice, verified, from the provider that it was sent to, or another. It may have left."""
        done = self._downloads.get((asker, index))
        if done is not None and done.holder in self._providers:
            seconds = max(now - done.since, 1e-6)
            usual_s = self._downloads.usual_s
            self._downloads.usual_s = usual_s + 0.1 * (seconds - usual_s) if usual_s else seconds
            self.penalties.gave(asker, done.holder)
            self._counts["finished"] += 1
        self.end(asker, index)
        if (member := self._providers.get(asker)) is not None:
            self._members.seen_at[self._members.rows[asker]] = now
            if member.address and not member.is_origin:
                self._members.set(asker, index, True)

    def failed(self, asker: str, index: int, peer_id: str, now: float, wrong: bool = False) -> bool:
        """The asker did not get the slice from this provider; return whether it is banned for the asker's node now.

        `wrong`: it sent wrong bytes, or violated the protocol.
        """
        done = self._downloads.get((asker, index))
        if done is not None and done.holder == peer_id:
            self.end(asker, index)
        self._counts["failed"] += 1
        if wrong:
            holder = self._providers.get(peer_id)  # None: a replayed report, before any member has joined
            return self.penalties.lied(asker, peer_id, index, now, is_origin=holder is None or holder.is_origin)
        self.penalties.failed(asker, peer_id, now)
        return False

    def end(self, asker: str, index: int) -> None:
        """End a download, if there is one; the provider is not at fault."""
        if (done := self._downloads.end((asker, index))) is not None:
            self._members.uploads[self._members.rows[done.holder]] -= 1

    # Queries.

    def offers(self, asker: str, now: float) -> Callable[[int], bool] | None:
        """Return whether others can serve a slice to a member now; None: one is an origin, which has every slice."""
        willing = self._members.gives & ~self._shunned(asker, now)
        if (willing & self._members.is_origin).any():
            return None
        return lambda index: bool((self._members.holders_of(index) & willing).any())

    def copies(self) -> I32:
        """[num_slices] copies of each slice, without origins; a view."""
        return self._members.copies

    def __len__(self) -> int:
        return len(self._providers)

    def get(self, peer_id: str) -> Provider | None:
        """A member as it joined last; None if it is not a member."""
        return self._providers.get(peer_id)

    def sharers(self, max_sharers: int) -> list[Provider]:
        """Some of the members that serve and are no origins: those that joined first."""
        return list(islice((m for m in self._providers.values() if m.address and not m.is_origin), max_sharers))

    def status(self, now: float) -> dict[str, Any]:
        """Counts for status and metrics."""
        copies = self._members.copies
        return {
            "members": len(self._providers),
            "origins": sum(holder.is_origin for holder in self._providers.values()),
            "unreachable": sum(not holder.address for holder in self._providers.values()),
            "under_way": len(self._downloads),
            "slices_with_copies": int(np.count_nonzero(copies)),
            "least_copies": int(copies.min()) if self.num_slices else 0,
            "reported": self.penalties.reported(now),
            **self._counts,
        }

    def _assigned_before(self, asker: str, missing: I64, num: int, now: float) -> list[tuple[int, Provider]]:
        indexes = self._downloads.slices_of(asker)
        if not indexes:
            return []
        assigned = []
        shunned = self._shunned(asker, now)
        for index in np.intersect1d(indexes, missing)[:num].tolist():
            holder = self._downloads[asker, index].holder
            if shunned[self._members.rows[holder]]:
                self.end(asker, index)
            else:
                assigned.append((index, self._providers[holder]))
        return assigned

    def _shunned(self, asker: str, now: float) -> BOOL:
        """[rows] flags of the members that this asker is not sent to, itself included."""
        members = self._members
        shunned = np.zeros(len(members.ids), np.bool_)
        banned = [members.rows[peer_id] for peer_id in self.penalties.banned_for(asker, now)]
        if banned:
            # The last origin is never banned: wrong bytes cost a fetch, its loss the dataset.
            origins = members.is_origin.copy()
            origins[banned] = False
            if not origins.any():
                banned = [row for row in banned if not members.is_origin[row]]
        others = (asker, *self.penalties.avoided_by(asker, now))
        shunned[banned + [members.rows[peer_id] for peer_id in others if peer_id in self._providers]] = True
        return shunned

    def _candidates(self, asker: str, missing: I64, num: int, origins: I64) -> Iterator[int]:
        """Slices to consider: new ones if an origin has a slot, then the rarest."""
        members = self._members
        copies = members.copies[missing]
        # Ties are broken differently for each asker, so that they do not all get the same slice next.
        tie = (missing * 2654435761 + (members.rows[asker] + 1) * 40503) & 0xFFFFF
        if (members.uploads[origins] < members.slots[origins]).any():
            new = np.flatnonzero((copies == 0) & (self._downloads.coming[missing] == 0))
            yield from missing[new[np.argsort(tie[new], kind="stable")[:num]]].tolist()
        old = np.flatnonzero(copies > 0)
        order = np.argsort((copies[old].astype(np.int64) << 20) + tie[old], kind="stable")
        yield from missing[old[order[: num + _TRIED]]].tolist()

    def _source(self, index: int, willing: BOOL, origins: I64) -> Provider | None:
        """The provider of a slice now; None if it is better to wait."""
        members = self._members
        rows = members.holders_of(index).nonzero()[0]
        rows = rows[willing[rows]]
        if not len(rows):
            if self._downloads.coming[index] > 0:
                return None
            rows = origins
        rows = rows[members.uploads[rows] < members.slots[rows]]
        return self._providers[members.ids[rows[members.uploads[rows].argmin()]]] if len(rows) else None

    def _begin(self, asker: str, index: int, holder: Provider, now: float) -> None:
        member = self._providers.get(asker)
        passed_on = member is not None and member.address != "" and not member.is_origin
        self._downloads.start((asker, index), Download(holder.peer_id, now, passed_on))
        self._members.uploads[self._members.rows[holder.peer_id]] += 1
        self._counts["from_origins" if holder.is_origin else "from_peers"] += 1

    def _end_overdue(self, now: float) -> None:
        before = now - max(PATIENCE_S, _LOST_AFTER * self._downloads.usual_s)
        while self._downloads:
            pair, download = next(iter(self._downloads.items()))
            if download.since > before:
                break
            self._counts["overdue"] += 1
            self.end(*pair)
            # The provider is slow, or the asker is dead: only the asker avoids it, else three dead askers would hide an
            # origin from all.
            self.penalties.failed(pair[0], download.holder, now)
