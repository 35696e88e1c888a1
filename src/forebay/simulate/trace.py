"""What is looked at while a world runs, at equal intervals of virtual time, for the plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from forebay.simulate.clock import Clock

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
