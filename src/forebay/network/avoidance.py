"""Whom a member of a swarm is not to be sent to: those that failed it lately, and those that lied. No clock of its own.

A node may take part by several processes, each a member of its own, known as `PEER_ID#SESSION` (`member_id`). Who
lied is the node: a ban covers all its members, and all its members together are one accuser.
"""

from collections.abc import Iterable

_AVOID_S, _MAX_AVOID_S = 1.0, 60.0
_ACCUSERS = 2
_DAMAGED = 2  # slices


def member_id(peer_id: str, session: str = "") -> str:
    """What a process of a node is known by in a swarm; the node's only one by the peer id alone."""
    return f"{peer_id}#{session}" if session else peer_id


def node_of(member: str) -> str:
    """The peer id of the node that a member is a process of."""
    return member.partition("#")[0]


class Avoidance:
    """Who avoids whom.

    Who fails somebody is avoided by that member for 1 s, then 2 s, up to a minute. Who gave somebody wrong bytes is
    banned for that node at once, and for all once a second node says so: one may lie. An origin whose disk has one
    damaged file is no liar: it is banned once it gave that node wrong bytes of a second slice.
    """

    def __init__(self) -> None:
        self._members: dict[str, set[str]] = {}  # by node
        self._until: dict[str, dict[str, tuple[float, float]]] = {}  # asker: member: (until, seconds)
        self._banned: dict[str, set[str]] = {}  # node: nodes
        self._accusers: dict[str, set[str]] = {}  # node: nodes
        self._banned_for_all: set[str] = set()
        self._damaged: dict[tuple[str, str], set[int]] = {}  # (accuser, origin): slices

    @property
    def banned(self) -> list[str]:
        """The nodes that nobody is sent to."""
        return sorted(self._banned_for_all)

    def join(self, member: str) -> None:
        """A member is here."""
        self._members.setdefault(node_of(member), set()).add(member)

    def leave(self, member: str) -> None:
        """A member is gone. What its node is banned for stays."""
        node = node_of(member)
        members = self._members.get(node, set())
        members.discard(member)
        if not members:
            self._members.pop(node, None)
        self._until.pop(member, None)

    def num_members(self, node: str) -> int:
        """How many members of a node are here."""
        return len(self._members.get(node, ()))

    def failed(self, asker: str, member: str, now: float) -> None:
        """It did not give the asker what it should have."""
        avoided = self._until.setdefault(asker, {})
        seconds = min(_MAX_AVOID_S, 2 * avoided[member][1] if member in avoided else _AVOID_S)
        avoided[member] = (now + seconds, seconds)

    def gave(self, asker: str, member: str) -> None:
        """It did now: what was before is forgotten."""
        self._until.get(asker, {}).pop(member, None)

    def lied(self, asker: str, member: str, damaged: int | None = None) -> None:
        """It gave the asker wrong bytes, says the asker.

        Args:
            damaged: Of an origin, the slice.
        """
        node, accuser = node_of(member), node_of(asker)
        if damaged is not None:
            slices = self._damaged.setdefault((accuser, node), set())
            slices.add(damaged)
            if len(slices) < _DAMAGED:
                return
            slices.intersection_update(list(slices)[:_DAMAGED])  # bounded: more say nothing new
        self._banned.setdefault(accuser, set()).add(node)
        accusers = self._accusers.setdefault(node, set())
        accusers.add(accuser)
        if len(accusers) >= _ACCUSERS:
            self._banned_for_all.add(node)

    def ban(self, member: str) -> None:
        """Nobody is sent to this member's node any more."""
        self._banned_for_all.add(node_of(member))

    def of(self, asker: str, now: float) -> Iterable[str]:
        """The members here that the asker is not to be sent to; those that are gone may be named too."""
        yield from (who for who, (until, _) in self._until.get(asker, {}).items() if until > now)
        for nodes in (self._banned_for_all, self._banned.get(node_of(asker), ())):
            for node in nodes:
                yield from self._members.get(node, ())
