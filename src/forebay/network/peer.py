"""Peers: what a certificate allows its owner (`Scope`), who is connected (`Peer`), who has slices (`Provider`).

No cryptography here, so that these can be used without the packages of the extra `network`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

ROLES = frozenset({"worker", "data", "scheduler", "admin"})


@dataclass(frozen=True)
class Scope:
    """What a certificate lets its holder do. Without `roles` all of them; without `datasets` all."""

    roles: frozenset[str] = frozenset()  # of ROLES
    datasets: tuple[str, ...] = ()  # glob patterns of names
    within: tuple[str, ...] = ()  # the organisation's own patterns: a name must match one of them, too

    def allows(self, role: str) -> bool:
        """Whether the holder may act in a role."""
        return not self.roles or role in self.roles

    def covers(self, name: str) -> bool:
        """Whether the holder may read, serve or schedule the dataset of this name."""
        return all(
            not globs or any(fnmatchcase(name, glob) for glob in globs) for globs in (self.datasets, self.within)
        )

    def exceeds(self, outer: Scope) -> frozenset[str]:
        """The roles here that `outer` does not give."""
        return self.roles - outer.roles if outer.roles else frozenset()

    def bounded_by(self, outer: Scope) -> Scope:
        """This scope in the bounds of an organisation's; its roles must not exceed them."""
        return Scope(self.roles or outer.roles, self.datasets, outer.datasets)


@dataclass(frozen=True)
class Peer:
    """Who is at the other end of a connection, proven by its certificate; over plain HTTP `peer_id` is empty.

    `valid_until` is when the first certificate of its chain expires, unix seconds. It is not part of equality: a
    renewed certificate makes no other peer.
    """

    peer_id: str
    public_key: bytes
    name: str
    org: str = ""  # peer id of the organisation that signed the certificate; empty: the root did
    scope: Scope = Scope()  # in the bounds of its organisation's
    valid_until: float = field(default=math.inf, compare=False)


@dataclass(frozen=True)
class Provider:
    """Something that has slices of a dataset.

    Args:
        peer_id: The node, or one process of it (`member_id`).
        address: `host:port`, or the URL of a web server or bucket; empty if it cannot be reached.
        is_origin: Whether it has all slices.
    """

    peer_id: str
    address: str
    is_origin: bool = True

    @property
    def is_url(self) -> bool:
        """Whether it is a web server or bucket, which is asked for names instead of hashes."""
        return "://" in self.address


def member_id(peer_id: str, session: str = "") -> str:
    """The id in a swarm of one process of a node; of a node's only process, its peer id."""
    return f"{peer_id}#{session}" if session else peer_id


def node_of(member: str) -> str:
    """The peer id of the node that a member belongs to."""
    return member.partition("#")[0]
