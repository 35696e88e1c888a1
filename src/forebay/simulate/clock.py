"""Virtual time: events in order of their moment, and of their making where moments are equal.

Nothing sleeps and nothing asks a real clock, so that a run depends on its arguments alone. An event costs some 2 us.
"""

import heapq
import itertools
from collections.abc import Callable

Act = Callable[[], object]


class Clock:
    """Moments in seconds from the start of the world."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._queue: list[tuple[float, int, Act]] = []
        self._tie = itertools.count()

    def at(self, moment: float, act: Act) -> None:
        """Do it at a moment; at once, after what is due already, if that has passed."""
        heapq.heappush(self._queue, (max(moment, self.now), next(self._tie), act))

    def after(self, seconds: float, act: Act) -> None:
        """Do it after so long."""
        self.at(self.now + seconds, act)

    def run(self, is_over: Callable[[], bool], until: float) -> bool:
        """Lets time pass until it is over, nothing is left to happen, or a moment; whether it is over."""
        while not is_over():
            if not self._queue or self._queue[0][0] > until:
                return False
            self.now, _, act = heapq.heappop(self._queue)
            self.num_events += 1
            act()
        return True
