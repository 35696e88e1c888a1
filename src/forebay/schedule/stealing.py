"""What an idle worker gets of what others hold: from whom, which lease, and how much of it.

The victim is who would finish last, by its speed, not who has fewest or most left. It loses a lease that it has not
begun, if it has another; else the far end of one, so much that it and the thief end together. A wish is only noted
here: the lease is cut when its owner next names its horizon, and hears so in the answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice

from forebay.schedule.owners import Lease, Owner, OwnerKey, Owners

# Who would finish last, second to last, …: so many are looked at for something to take.
CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class Wish:
    """A lease should end at `target`, for the sake of `thief`."""

    lease_id: str
    target: int
    thief: OwnerKey
    at: float


def plan(owners: Owners, thief: Owner, wished: dict[str, Wish], steal_s: float, now: float) -> Wish | None:
    """The best piece for an idle owner; None if nobody has enough left to be worth it.

    Args:
        wished: Leases that somebody waits for already.
        steal_s: An owner that needs no longer than this for all it has is left alone.
    """
    speed = owners.speed_of(thief)

    def is_spared(owner: Owner) -> bool:
        return owner.key == thief.key or any(lease_id in wished for lease_id in owner.leases)

    # Those spared do not count: else, where many are idle, only as many could steal at once as are looked at.
    for victim in islice(owners.slowest(is_spared), CANDIDATES):
        theirs = owners.speed_of(victim)
        left = victim.left
        if left / theirs <= steal_s:
            continue
        share = left * speed / (speed + theirs)
        lease = _choose(victim, share)
        target = lease.start if _is_whole(victim, lease, share) else lease.stop - math.ceil(min(share, lease.left - 1))
        if max(lease.position, lease.horizon if lease.begun else 0, target) < lease.stop:
            return Wish(lease.lease_id, max(target, lease.start), thief.key, now)
    return None


def _is_whole(victim: Owner, lease: Lease, share: float) -> bool:
    """Whether to take it altogether: not begun, not all that its owner has, not much more than the fair share."""
    return not lease.begun and len(victim.leases) > 1 and lease.left <= 1.5 * share


def _choose(victim: Owner, share: float) -> Lease:
    """The last lease that was not begun, if it may go as a whole; else the one with most left."""
    for lease in reversed(victim.leases.values()):
        if _is_whole(victim, lease, share):
            return lease
    return max(victim.leases.values(), key=lambda lease: lease.left)
