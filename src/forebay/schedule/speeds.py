"""How fast an owner of leases uses samples, from what it acknowledged."""

from __future__ import annotations

import math
from dataclasses import dataclass

# After this long, what was seen before counts 1/e.
MEMORY_S = 30.0
# Times nearer to each other than this say little.
SHORTEST_S = 0.01


@dataclass(slots=True)
class Speed:
    """Samples a second as a mean that forgets; None before anything is known."""

    value: float | None = None
    since: float | None = None

    def begin(self, now: float) -> None:
        """The owner has something to use from now on; what it waited before says nothing of it."""
        if self.since is None:
            self.since = now

    def rest(self) -> None:
        """It has nothing to use."""
        self.since = None

    def used(self, num_samples: int, now: float) -> None:
        """It acknowledged samples."""
        since, self.since = self.since, now
        if since is None:
            return
        lasted = max(now - since, SHORTEST_S)
        seen = num_samples / lasted
        keep = math.exp(-lasted / MEMORY_S) if self.value is not None else 0.0
        self.value = keep * (self.value or 0.0) + (1.0 - keep) * seen

    def told(self, value: float) -> None:
        """What the owner says of itself, believed until something is seen."""
        if self.value is None and math.isfinite(value) and value > 0:
            self.value = value
