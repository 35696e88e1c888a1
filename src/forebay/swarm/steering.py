"""Who fetches which slice from whom: a pure state machine, steered by whoever tracks a dataset's holders.

It lives in the scheduler for leases, in each data node for readers, and in the simulator. Time is an argument, chance
is none: the same calls in the same order give the same answers.

The policy:
- Everybody wants much (`assign`): the rarest first. An origin gives a slice once while a copy of it lives, or is on
  its way to somebody who can pass it on; the others wait for that copy. New ones go to those who will soonest have
  passed on what they were given.
- Somebody must have one slice (`providers`): whoever holds it, the least loaded a slot first, origins last.
- A holder's uploads are bounded by its slots. Who fails is avoided by that asker for a while, and by all after three
  failures until it is heard of again; who lies is banned (`avoidance.py`).

What the choice costs: a bit for each member and slice (312 MB for 10,000 of 250,000), laid out so that the holders of
one slice are read in one piece; a look over 4,096 of the wanted slices a call, not over all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.network.peer import Provider, node_of
from forebay.swarm.members import Download, Downloads, Members, Offers
from forebay.swarm.penalties import PeerPenalties

__all__ = ["Assignment", "Provider", "Swarm"]

PATIENCE_S = 60.0
_LOOK = 4096  # wanted slices that one call looks at
_TRIED = 32  # candidates of each kind whose holders one call looks at, beside those it needs
_ROUNDS = 3  # calls in which somebody slow is passed over for a new slice
_SLOW = 2.0  # times the time in which the quickest of the rivals will have passed on what it got
_RIVAL_S = 2.0  # who asked so lately
_PATIENT = 8.0  # times the mean duration of a download, before it is given up for lost
_MAX_FAILURES = 3


@dataclass(frozen=True)
class Assignment:
    """Fetch this slice from this holder."""

    index: int
    holder: Provider


class Swarm:
    """The holders of one dataset, and what is under way between them.

    Who is not heard of for `ttl_s` is gone. A holder that does not say uploads `slots` at once, an origin
    `origin_slots`. A download is given up for lost after `patience_s`, or 8 times the usual duration if that is more.
    `checks`: somebody checks who two say gave wrong bytes, before it is banned for all.
    """

    def __init__(
        self,
        num_slices: int,
        *,
        ttl_s: float = 30.0,
        slots: int = 4,
        origin_slots: int = 8,
        patience_s: float = PATIENCE_S,
        checks: bool = False,
    ) -> None:
        if num_slices < 0 or not (ttl_s > 0 and slots > 0 and origin_slots > 0 and patience_s > 0):
            raise UsageError(f"swarm: expected positive numbers, got {num_slices=} {ttl_s=} {slots=} {origin_slots=}")
        self.num_slices = num_slices
        self.ttl_s = ttl_s
        self.slots = slots
        self.origin_slots = origin_slots
        self.patience_s = patience_s
        self._members = Members(num_slices)
        self._holders: dict[str, Provider] = {}
        self._under_way = Downloads(num_slices)
        self._avoidance = PeerPenalties(checks)
        self._cursor: dict[str, int] = {}
        self._passed_over: dict[str, int] = {}
        self._counts = {"from_origins": 0, "from_peers": 0, "finished": 0, "failed": 0, "overdue": 0}

    # Who is there, and what they have.

    def join(self, holder: Provider, have: NDArray[np.bool_] | None, now: float, *, slots: int | None = None) -> None:
        """A member is here, or still here. It uploads `slots` at once; 0: nothing now; None: as before, or the default.

        `have` are [num_slices] flags of what it holds; None: as before. Not looked at for an origin, which has all, nor
        for a member without an address, which gives nothing.
        """
        members, peer_id = self._members, holder.peer_id
        before = self._holders.get(peer_id)
        if before is not None and (before.is_origin, not before.address) != (holder.is_origin, not holder.address):
            self.leave(peer_id)
            before = None
        if before is None:
            members.add(peer_id, is_origin=holder.is_origin, gives=bool(holder.address))
            self._avoidance.join(peer_id)
        if before is None or slots is not None:
            default = self.origin_slots if holder.is_origin else self.slots
            members.slots[members.row(peer_id)] = default if slots is None else max(0, slots)
        self._holders[peer_id] = holder
        members.heard(peer_id, now)
        if have is not None and not holder.is_origin and holder.address:
            members.hold(peer_id, have)

    def gained(self, peer_id: str, index: int, now: float) -> None:
        """A member has a slice now, wherever from. Nothing, if it is not known."""
        self._end((peer_id, index))
        holder = self._holders.get(peer_id)
        if holder is None:
            return
        self._members.heard(peer_id, now)
        if holder.address and not holder.is_origin:
            self._members.set(peer_id, index, True)

    def lost(self, peer_id: str, index: int) -> None:
        """A member has a slice no longer."""
        if peer_id in self._holders and not self._holders[peer_id].is_origin:
            self._members.set(peer_id, index, False)

    def leave(self, peer_id: str) -> None:
        """A member is gone, with what it had. What it was banned for stays."""
        if peer_id not in self._holders:
            return
        for pair in self._under_way.of(peer_id):
            self._end(pair)
        del self._holders[peer_id]
        self._members.remove(peer_id)
        self._avoidance.leave(peer_id)
        self._cursor.pop(peer_id, None)
        self._passed_over.pop(peer_id, None)

    def expire(self, now: float) -> list[str]:
        """Let those go who were not heard of for `ttl_s`: their ids. Ends what is overdue too."""
        self._end_overdue(now)
        gone = [self._members.ids[row] for row in self._members.silent_since(now - self.ttl_s)]
        for peer_id in gone:
            self.leave(peer_id)
        return gone

    # Who gets what from whom.

    def providers(self, index: int, asker: str, now: float, limit: int = 4) -> list[Provider]:
        """Who may give one slice that the asker must have: the least loaded first, origins last.

        The first is taken to be busy with it until `gained`, `finished` or `failed`. Who is banned or avoided is never
        named; who has no free slot only if nobody has.
        """
        self._end_overdue(now)
        members = self._members
        self._end((asker, index))
        willing = members.gives & ~self._shunned(asker, now)
        rows = np.flatnonzero(members.holders_of(index) & willing)
        rows = np.concatenate([members.by_load(rows), members.by_load(np.flatnonzero(willing & members.is_origin))])
        free = members.uploads[rows] < members.slots[rows]
        rows = np.concatenate([rows[free], rows[~free]])[:limit]
        found = [self._holders[members.ids[row]] for row in rows.tolist()]
        if found:
            self._begin(asker, index, found[0], now)
        return found

    def assign(self, asker: str, wanted: NDArray[np.int64], num: int, now: float) -> list[Assignment]:
        """What a member (`join` it first) shall fetch now of what it wants: at most `num`, less if it had better wait.

        `wanted` is [n] slices that it lacks and is not fetching, in any order. A slice in it that is on its way to the
        asker already is answered again, and counts: so a repeated call is harmless, if what the asker is at is not in
        `wanted`. One that it was thought to have, it has no longer.
        """
        if asker not in self._holders:
            raise UsageError(f"swarm: expected {asker} to have joined before it asks. Call join first.")
        self._end_overdue(now)
        given = self._again(asker, wanted, num, now)
        if len(given) >= num:
            return given
        wanted = self._window(asker, wanted)
        members = self._members
        members.asked_at[members.row(asker)] = now
        if self._holders[asker].address:
            members.clear(asker, wanted)
        willing = members.gives & (members.slots > 0) & ~self._shunned(asker, now)
        origins = np.flatnonzero(willing & members.is_origin)
        for index in self._candidates(asker, wanted, num - len(given), origins, now):
            holder = self._source(index, willing, origins)
            if holder is not None:
                self._begin(asker, index, holder, now)
                given.append(Assignment(index, holder))
                if len(given) == num:
                    break
        return given

    def finished(self, asker: str, index: int, now: float) -> None:
        """The asker has the slice, verified, from the holder it was told."""
        done = self._under_way.get((asker, index))
        if done is not None and done.holder in self._holders:
            took_s = max(now - done.since, 1e-6)
            self._under_way.took(took_s)
            self._members.gave(done.holder, took_s)
            self._avoidance.gave(asker, done.holder)
            self._counts["finished"] += 1
            if done.fresh and asker in self._holders:
                self._members.owed[self._members.row(asker)] += 1
        self.gained(asker, index, now)

    def failed(self, asker: str, index: int, peer_id: str, now: float, wrong: bool = False, accuser: str = "") -> None:
        """The asker did not get the slice from this holder.

        `wrong`: it gave wrong bytes, or broke the protocol. `accuser`: the asker's organisation, if it has one.
        """
        done = self._under_way.get((asker, index))
        if done is not None and done.holder == peer_id:
            self._end((asker, index))
        self._counts["failed"] += 1
        if wrong:
            holder = self._holders.get(peer_id)  # None: a report that is read again before anybody has joined
            return self._avoidance.lied(asker, peer_id, index, accuser, holder is None or holder.is_origin)
        self._avoidance.failed(asker, peer_id, now)
        if peer_id in self._holders:
            self._members.failures[self._members.row(peer_id)] += 1

    def dropped(self, asker: str, index: int) -> None:
        """The asker fetches a slice no longer, and that is nobody's fault."""
        self._end((asker, index))

    def suspects(self) -> list[tuple[Provider, int]]:
        """Who two say gave wrong bytes, and is here: to fetch a slice from, and then to `ban` or to `pardon`."""
        found = []
        for node, index in self._avoidance.suspects():
            holder = next((one for one in self._holders.values() if node_of(one.peer_id) == node and one.address), None)
            if holder is not None:
                found.append((holder, index))
        return found

    def ban(self, peer_id: str) -> None:
        """Name a member to nobody, but for the last origin."""
        self._avoidance.ban(peer_id)

    def pardon(self, peer_id: str) -> None:
        """Name it again."""
        self._avoidance.pardon(peer_id)

    # What there is to know.

    def offers(self, asker: str, now: float) -> Offers:
        """What the others can give one of them now."""
        return Offers(self._members, self._members.gives & ~self._shunned(asker, now))

    def copies(self) -> NDArray[np.int32]:
        """[num_slices] living copies of each slice, origins not counted."""
        return self._members.copies.copy()

    def __len__(self) -> int:
        return len(self._holders)

    def get(self, peer_id: str) -> Provider | None:
        """A member as it joined last; None if it is not here."""
        return self._holders.get(peer_id)

    def num_members(self, node: str) -> int:
        """How many processes of a node are members."""
        return self._avoidance.num_members(node)

    @property
    def is_settled(self) -> bool:
        """Whether all who can be asked have every slice."""
        peers = int(np.count_nonzero(self._members.gives & ~self._members.is_origin))
        return not self.num_slices or int(self._members.copies.min()) >= peers

    def sharers(self, most: int) -> list[Provider]:
        """Some of those who can be asked and are no origins: who joined first."""
        return list(islice((one for one in self._holders.values() if one.address and not one.is_origin), most))

    def members(self) -> list[Provider]:
        """All who are here, origins too, by peer id."""
        return [self._holders[peer_id] for peer_id in sorted(self._holders)]

    def holds(self, peer_id: str) -> NDArray[np.bool_]:
        """[num_slices] flags of what a member is known to have."""
        holder = self._holders.get(peer_id)
        all_or_none = holder is None or holder.is_origin
        return np.full(self.num_slices, holder is not None) if all_or_none else self._members.held_by(peer_id)

    def status(self) -> dict[str, Any]:
        """Counts for status and metrics."""
        copies = self._members.copies
        return {
            "members": len(self._holders),
            "origins": sum(holder.is_origin for holder in self._holders.values()),
            "unreachable": sum(not holder.address for holder in self._holders.values()),
            "under_way": len(self._under_way),
            "slices_with_copies": int(np.count_nonzero(copies)),
            "least_copies": int(copies.min()) if self.num_slices else 0,
            "banned": self._avoidance.banned,
            **self._counts,
        }

    # Inside.

    def _again(self, asker: str, wanted: NDArray[np.int64], num: int, now: float) -> list[Assignment]:
        """What the asker was told before and asks for again."""
        told = self._under_way.told(asker)
        told = sorted(set(told).intersection(wanted.tolist())) if told else []
        given, shunned = [], self._shunned(asker, now) if told else None
        for index in told[:num]:
            download = self._under_way.get((asker, index))
            assert download is not None and shunned is not None
            if shunned[self._members.row(download.holder)]:
                self._end((asker, index))
            else:
                given.append(Assignment(index, self._holders[download.holder]))
        return given

    def _window(self, asker: str, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """As many of the wanted as one call looks at: each in its turn."""
        told = self._under_way.told(asker)
        if len(wanted) > _LOOK:
            start = self._cursor.get(asker, 0) % len(wanted)
            self._cursor[asker] = start + _LOOK
            wanted = np.concatenate([wanted[start : start + _LOOK], wanted[: max(0, start + _LOOK - len(wanted))]])
        return wanted[~np.isin(wanted, told)] if told else wanted

    def _shunned(self, asker: str, now: float) -> NDArray[np.bool_]:
        """[rows] whom this asker is not to be told of; itself, too."""
        members = self._members
        shunned = members.failures >= _MAX_FAILURES
        banned = [members.row(peer_id) for peer_id in self._avoidance.banned_for(asker) if peer_id in self._holders]
        if banned:
            # The last origin is never banned: a lie of it costs a fetch, its loss the dataset.
            origins = members.is_origin.copy()
            origins[banned] = False
            if not origins.any():
                banned = [row for row in banned if not members.is_origin[row]]
        others = (asker, *self._avoidance.avoided_by(asker, now))
        shunned[banned + [members.row(peer_id) for peer_id in others if peer_id in self._holders]] = True
        return shunned

    def _candidates(
        self, asker: str, wanted: NDArray[np.int64], num: int, origins: NDArray[np.int64], now: float
    ) -> Iterator[int]:
        """Slices worth a look: new ones if the asker may have them, the rarest, and then some of the rest."""
        members = self._members
        copies = members.copies[wanted]
        row = members.row(asker)
        # Ties are broken differently for each asker, so that they do not all want the same next.
        tie = (wanted * 2654435761 + (row + 1) * 40503) & 0xFFFFF
        new = np.flatnonzero((copies == 0) & (self._under_way.coming[wanted] == 0))
        if len(new) and self._may_have_new(asker, origins, now):
            yield from wanted[new[np.argsort(tie[new], kind="stable")[:num]]].tolist()
        old = np.flatnonzero(copies > 0)
        if not len(old):
            return
        order = (copies[old].astype(np.int64) << 20) + tie[old]
        most = min(len(old), num + _TRIED)
        part = np.argpartition(order, most - 1)
        rarest, is_rest = part[:most], np.ones(len(old), np.bool_)
        is_rest[rarest] = False
        rest = np.flatnonzero(is_rest)
        yield from wanted[old[rarest[np.argsort(order[rarest], kind="stable")]]].tolist()
        yield from wanted[old[rest[:: max(1, len(rest) // most)][:most]]].tolist()

    def _may_have_new(self, asker: str, origins: NDArray[np.int64], now: float) -> bool:
        """Whether an origin has a slot, and the asker passes on as soon as others do; if not, only now and then."""
        members = self._members
        if not (members.uploads[origins] < members.slots[origins]).any():
            return False
        row = members.row(asker)
        rivals = members.gives & ~members.is_origin & (members.asked_at > now - _RIVAL_S)
        owes_s = (members.owed + 1) / members.speeds()
        if not rivals.any() or (rivals[row] and owes_s[row] <= _SLOW * float(owes_s[rivals].min())):
            return True
        rounds = self._passed_over.get(asker, 0) + 1
        self._passed_over[asker] = rounds % _ROUNDS
        return rounds == _ROUNDS

    def _source(self, index: int, willing: NDArray[np.bool_], origins: NDArray[np.int64]) -> Provider | None:
        """Who of the willing gives a slice now; None if it is better to wait."""
        members = self._members
        rows = members.holders_of(index).nonzero()[0]
        rows = rows[willing[rows]]
        if not len(rows):
            if self._under_way.coming[index] > 0:
                return None
            rows = origins
        rows = rows[members.uploads[rows] < members.slots[rows]]
        return self._holders[members.ids[int(members.by_load(rows)[0])]] if len(rows) else None

    def _begin(self, asker: str, index: int, holder: Provider, now: float) -> None:
        to = self._holders.get(asker)
        passed_on = to is not None and to.address != "" and not to.is_origin
        self._under_way.begin((asker, index), Download(holder.peer_id, now, holder.is_origin, passed_on))
        self._members.uploads[self._members.row(holder.peer_id)] += 1
        self._counts["from_origins" if holder.is_origin else "from_peers"] += 1

    def _end(self, pair: tuple[str, int]) -> None:
        """What was under way is so no longer. Nothing, if it was not."""
        if (done := self._under_way.end(pair)) is not None:
            self._members.uploads[self._members.row(done.holder)] -= 1

    def _end_overdue(self, now: float) -> None:
        before = now - max(self.patience_s, _PATIENT * self._under_way.usual_s)
        while (oldest := self._under_way.oldest()) is not None and oldest[1].since <= before:
            pair, download = oldest
            self._counts["overdue"] += 1
            self._end(pair)
            # Its holder is slow, or the asker is gone: only the asker avoids it, as else the deaths of three askers
            # would hide an origin from all.
            self._avoidance.failed(pair[0], download.holder, now)
