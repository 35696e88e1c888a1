"""A lower bound of the time of a simulation, to compare its result with.

Samples are used at most at the speed of the machines that are alive and can have a slice. A machine can have one once a
whole slice came through its own link; the k-th machine once k slices were sent, where only machines with a slice send,
the origin first. The last sample cannot be used before the origin has sent every slice once. The bound does not include
work that is lost with killed machines, nor waits for leases to expire.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.simulate.faults import Machine
from forebay.simulate.settings import SimulationSettings


@dataclass(frozen=True)
class Bound:
    """The seconds that each limit allows for, by name; the largest is the bound."""

    parts: dict[str, float]

    @property
    def limit(self) -> str:
        """The name of the limit that sets the bound."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def seconds(self) -> float:
        return self.parts[self.limit]


def lease_bound(settings: SimulationSettings, machines: Sequence[Machine]) -> Bound:
    """The least time in which the samples of all epochs can be used."""
    sending_s = settings.slices * settings.slice_bytes / (settings.origin_up * settings.origins)
    work = float(settings.slices * settings.samples * settings.epochs)
    compute_s = work_done_s(work, _supply(settings, machines))
    return Bound({"compute": compute_s, "origin": sending_s + 2 * settings.latency_s})


def _supply(settings: SimulationSettings, machines: Sequence[Machine]) -> list[tuple[float, float]]:
    """(time, samples/s from then on): the maximum that can be used."""
    size = settings.slice_bytes
    changes: list[tuple[float, float]] = []
    for machine in machines:
        starts_at = machine.joins_at + 4 * machine.latency_s + size / machine.down
        if starts_at < machine.dies_at:
            changes += [(starts_at, machine.speed), (machine.dies_at, -machine.speed)]
    changes.sort()
    speeds = np.concatenate(([0.0], np.cumsum(sorted((machine.speed for machine in machines), reverse=True))))
    filled = filling(settings, machines)
    times = sorted({0.0, *(time for time, _ in changes if time < float("inf")), *filled})
    supply, rate, num_applied = [], 0.0, 0
    for time in times:
        while num_applied < len(changes) and changes[num_applied][0] <= time:
            rate += changes[num_applied][1]
            num_applied += 1
        k = int(np.searchsorted(filled, time, side="right"))
        supply.append((time, max(0.0, min(rate, float(speeds[k])))))
    return supply


def filling(settings: SimulationSettings, machines: Sequence[Machine]) -> list[float]:
    """The time before which no k machines can have a slice, for k from 1."""
    times, time, sending = [], 2 * settings.latency_s, settings.origin_up * settings.origins
    for up in sorted((machine.up for machine in machines), reverse=True):
        time += settings.slice_bytes / sending
        times.append(time)
        sending += up
    return times


def work_done_s(work: float, supply: Sequence[tuple[float, float]]) -> float:
    """When so much work can be done, of (time, work a second from then on); inf if never."""
    for (start, rate), (stop, _) in zip(supply, [*supply[1:], (float("inf"), 0.0)]):
        if rate > 0 and rate * (stop - start) >= work:
            return start + work / rate
        if rate > 0:
            work -= rate * (stop - start)
    return float("inf")
