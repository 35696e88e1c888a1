"""Members of a swarm that an asker is not sent to: those that failed it lately, and those that sent wrong bytes.

Pure, without a clock. A node may have several processes, each a member, named `PEER_ID#SESSION` (`member_id`); a ban
covers all members of a node. An accuser is an organisation, or a node that belongs to none.
"""

from collections.abc import Iterable

from forebay.network.peer import node_of

_AVOID_S, _MAX_AVOID_S = 1.0, 60.0
_ACCUSERS = 2
_DAMAGED = 2  # slices
_MAX_ACCUSED = 256  # nodes that one accuser is remembered to have accused
_MAX_DISCREDITED = 4096


class PeerPenalties:
    """The avoided and banned members.

    A member that fails an asker is avoided by that asker for 1 s, then 2 s, up to a minute. One that sent wrong bytes
    is banned for the asker's node at once. Two accusers make a suspect: it is banned for all, or with `checks` once the
    tracker has fetched wrong bytes from it and called `ban`. An origin may have one corrupt file: it is banned once it
    sent a node wrong bytes of a second slice.
    """

    def __init__(self, checks: bool = False) -> None:
        self.checks = checks
        self._members: dict[str, set[str]] = {}  # by node
        self._until: dict[str, dict[str, tuple[float, float]]] = {}  # asker: member: (until, seconds)
        self._banned: dict[str, dict[str, None]] = {}  # node: nodes, the latest last
        self._accusers: dict[str, dict[str, int]] = {}  # node: accuser: the slice
        self._banned_for_all: set[str] = set()
        self._damaged: dict[tuple[str, str], set[int]] = {}  # (accuser, origin): slices
        self._discredited: dict[str, None] = {}  # accusers of a node that sent right bytes when it was checked

    @property
    def banned(self) -> list[str]:
        """The nodes that are banned for all."""
        return sorted(self._banned_for_all)

    def suspects(self) -> list[tuple[str, int]]:
        """Nodes with two accusers, each with a slice to check."""
        return [
            (node, next(reversed(accusers.values())))
            for node, accusers in self._accusers.items()
            if len(accusers) >= _ACCUSERS and node not in self._banned_for_all
        ]

    def join(self, member: str) -> None:
        """Add a member."""
        self._members.setdefault(node_of(member), set()).add(member)

    def leave(self, member: str) -> None:
        """Remove a member; bans of its node stay."""
        node = node_of(member)
        members = self._members.get(node, set())
        members.discard(member)
        if not members:
            self._members.pop(node, None)
        self._until.pop(member, None)

    def num_members(self, node: str) -> int:
        """The number of members of a node."""
        return len(self._members.get(node, ()))

    def failed(self, asker: str, member: str, now: float) -> None:
        """A member did not send the asker a slice."""
        avoided = self._until.setdefault(asker, {})
        seconds = min(_MAX_AVOID_S, 2 * avoided[member][1] if member in avoided else _AVOID_S)
        avoided[member] = (now + seconds, seconds)

    def gave(self, asker: str, member: str) -> None:
        """A member sent the asker a slice: earlier failures do not count."""
        self._until.get(asker, {}).pop(member, None)

    def lied(self, asker: str, member: str, index: int, accuser: str = "", is_origin: bool = False) -> None:
        """A member sent the asker wrong bytes of a slice; `accuser` is the asker's organisation, else its node."""
        node, own = node_of(member), node_of(asker)
        if is_origin:
            slices = self._damaged.setdefault((own, node), set())
            slices.add(index)
            if len(slices) < _DAMAGED:
                return
            slices.intersection_update(list(slices)[:_DAMAGED])  # bounded
        banned = self._banned.setdefault(own, {})
        banned[node] = None
        if len(banned) > _MAX_ACCUSED:
            del banned[next(iter(banned))]
        if (accuser or own) in self._discredited:
            return
        accusers = self._accusers.setdefault(node, {})
        accusers[accuser or own] = index
        if len(accusers) >= _ACCUSERS and not self.checks:
            self._banned_for_all.add(node)

    def ban(self, member: str) -> None:
        """Ban this member's node for all."""
        self._banned_for_all.add(node_of(member))

    def pardon(self, member: str) -> None:
        """Lift the bans of this member's node, and discredit its accusers.

        A check costs a slice: later accusations of a discredited accuser count for its own node only.
        """
        node = node_of(member)
        self._banned_for_all.discard(node)
        self._discredited.update(dict.fromkeys(self._accusers.pop(node, {})))
        for accuser in list(self._discredited)[:-_MAX_DISCREDITED]:
            del self._discredited[accuser]
        for banned in self._banned.values():
            banned.pop(node, None)
        for pair in [pair for pair in self._damaged if pair[1] == node]:
            del self._damaged[pair]

    def avoided_by(self, asker: str, now: float) -> Iterable[str]:
        """The members that failed the asker lately; some may have left."""
        yield from (member for member, (until, _) in self._until.get(asker, {}).items() if until > now)

    def banned_for(self, asker: str) -> Iterable[str]:
        """The members that are banned for the asker."""
        for nodes in (self._banned_for_all, self._banned.get(node_of(asker), ())):
            for node in nodes:
                yield from self._members.get(node, ())
