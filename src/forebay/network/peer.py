"""Peers: what a certificate allows (`Scope`), who is connected (`Peer`), who has slices (`Provider`).

No cryptography, so that these can be used without the packages of the extra `network`.
"""

import ipaddress
import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

from forebay.recent import RecentDict
from forebay.storage.hosts import parse_ip

ROLES = frozenset({"worker", "data", "scheduler", "viewer", "admin"})


@dataclass(frozen=True)
class Scope:
    """Permissions of a certificate. Empty `roles`: all roles; empty `datasets`: all datasets."""

    roles: frozenset[str] = frozenset()  # of ROLES
    datasets: tuple[str, ...] = ()  # glob patterns of names
    within: tuple[str, ...] = ()  # the organisation's patterns, one of which must match, too

    def __str__(self) -> str:
        roles = ", ".join(sorted(self.roles))
        patterns = ", ".join(self.datasets or self.within)
        return f"{roles or 'all roles'} for {f'datasets {patterns}' if patterns else 'all datasets'}"

    def allows(self, role: str) -> bool:
        """Whether the certificate has a role; an admin may look at all that a viewer may."""
        return not self.roles or role in self.roles or (role == "viewer" and "admin" in self.roles)

    def covers(self, name: str) -> bool:
        """Whether the certificate allows reading, serving and scheduling the dataset of this name: no viewer's does."""
        return self.roles != {"viewer"} and self.includes(name)

    def includes(self, name: str) -> bool:
        """Whether the certificate's patterns match the name of a dataset."""
        return all(
            not globs or any(fnmatchcase(name, glob) for glob in globs) for globs in (self.datasets, self.within)
        )

    def exceeds(self, outer: "Scope") -> frozenset[str]:
        """Roles of this scope that `outer` lacks."""
        return self.roles - outer.roles if outer.roles else frozenset()

    def bounded_by(self, outer: "Scope") -> "Scope":
        """This scope within an organisation's; its roles must not exceed them."""
        return Scope(self.roles or outer.roles, self.datasets, outer.datasets)


UNBOUNDED = Scope()


@dataclass(frozen=True)
class Peer:
    """The other end of a connection, proven by its certificate; over plain HTTP `peer_id` is empty."""

    peer_id: str
    public_key: bytes
    name: str
    org: str = ""  # peer id of the issuing organisation; empty: issued by the root
    scope: Scope = UNBOUNDED  # within its organisation's
    certificate: str = field(default="", compare=False, repr=False)  # DER in base64; empty: unverified
    # Validity of its whole chain, Unix seconds. Not compared: a renewed certificate is the same peer.
    valid_from: float = field(default=-math.inf, compare=False)
    valid_until: float = field(default=math.inf, compare=False)

    @property
    def party(self) -> str:
        """To whom limits apply: the peer id; without a certificate the IP address, of IPv6 its /64."""
        return self.peer_id or network_prefix(self.name, 32, 64)

    @property
    def group(self) -> str:
        """To which parties limits apply together: an organisation; without a certificate the /24, of IPv6 the /48."""
        return self.org if self.peer_id else network_prefix(self.name, 24, 48)


@dataclass(frozen=True)
class Provider:
    """A node or origin that has slices of a dataset.

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
        """Whether it is a web server or bucket, which serves names instead of hashes."""
        return "://" in self.address


@lru_cache(4096)
def network_prefix(ip: str, v4_bits: int, v6_bits: int) -> str:
    """Return the network of an IP address, such as `10.1.2.0/24`; other texts as they are."""
    try:
        address = parse_ip(ip)
    except ValueError:
        return ip
    return str(ipaddress.ip_network((address, v4_bits if address.version == 4 else v6_bits), strict=False))


MAX_CONTACTS = 64
MAX_PAUSED = 4096


class Contacts:
    """The addresses at which members answered last, proven by their certificates. Threads may share it."""

    def __init__(self) -> None:
        self._proven = RecentDict[str, None](MAX_CONTACTS)
        self._next_at = RecentDict[str, float](MAX_PAUSED)  # when CRLs may be exchanged with an address again

    def add(self, address: str) -> None:
        """Add an address; the oldest are forgotten."""
        self._proven[address] = None

    def addresses(self) -> list[str]:
        """Return the addresses, the oldest first."""
        return list(self._proven)

    def begin(self, address: str, now: float, pause_s: float, *, is_urgent: bool = False) -> bool:
        """Return whether CRLs may be exchanged with an address now; if so, not again for `pause_s` but urgently."""
        if now < self._next_at.get(address, -math.inf) and not is_urgent:
            return False
        self._next_at[address] = now + pause_s
        return True

    def avoid(self, address: str, until: float) -> bool:
        """As `forget`; exchange nothing with the address until a time (of time.monotonic)."""
        self._next_at[address] = until
        return self.forget(address)

    def forget(self, address: str) -> bool:
        """Forget an address; return whether it is news that it fails: a member answered there before."""
        return address in self._proven and self._proven.pop(address) is None


def member_id(peer_id: str, session: str) -> str:
    """The swarm id of one process of a node; for a node's only process, its peer id."""
    return f"{peer_id}#{session}" if session else peer_id


def node_of(member: str) -> str:
    """The peer id of a member's node."""
    return member.partition("#")[0]
