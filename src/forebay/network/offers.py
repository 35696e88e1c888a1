"""What the members of a swarm can give one of them, seen from who must decide what that one shall begin."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forebay.network.members import Members


class Offers:
    """Good until the swarm changes.

    Args:
        willing: [rows] flags of the members that the asker may be sent to.

    Attributes:
        is_all: Whether an origin is among them, which has every slice.
    """

    def __init__(self, members: Members, willing: NDArray[np.bool_]) -> None:
        self._members = members
        self._willing = willing
        self.is_all = bool((willing & members.is_origin).any())

    def has(self, index: int) -> bool:
        """Whether one of them has a slice."""
        return self.is_all or bool((self._members.holders_of(index) & self._willing).any())

    def copied(self) -> NDArray[np.bool_]:
        """[num_slices] flags of what anybody has who is no origin: `has` is true of no other, without an origin."""
        return self._members.copies > 0
