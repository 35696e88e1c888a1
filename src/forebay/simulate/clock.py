"""Virtual time: events in order of their moment, and of their making where moments are equal.

Nothing sleeps and nothing asks a real clock, so that a run depends on its arguments alone. An event costs some 2 us.
"""

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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


Progress = Callable[[float, float], object]
"""Told the part of the work that is done, 0 to 1, and the virtual seconds passed."""


@dataclass
class Trace:
    """Curves by name; all have a value at each of `moments`."""

    moments: list[float] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)

    def follow(
        self,
        clock: Clock,
        every_s: float,
        look: Callable[[], Mapping[str, float]],
        progress: Progress | None,
    ) -> None:
        """Looks now and then for ever; `look` gives each curve's value, and the part done as `done`."""

        def again() -> None:
            values = dict(look())
            if progress is not None:
                progress(values["done"], clock.now)
            self.moments.append(clock.now)
            for name, value in values.items():
                self.curves.setdefault(name, []).append(value)
            clock.after(every_s, again)

        again()
