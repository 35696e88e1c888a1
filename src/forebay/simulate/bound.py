"""The time that no plan could beat, so that a result has something to be measured against.

Samples are used at no more than the speed of the machines that are alive, and of those that can have something to use.
A machine can once a whole slice came down its own link; and the k-th of them once k slices went up somebody's link,
where only who has a slice sends, the origin first (the pipeline's filling). Nor can the last sample be used before the
origin has sent every slice once. Work that dies with a machine is not in the bound: it is a loss of the plan, as a
lease that waits for its end is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.simulate.faults import Machine
from forebay.simulate.settings import SimulationSettings


@dataclass(frozen=True)
class Bound:
    """The least seconds that each part of the world needs, by what binds it."""

    parts: dict[str, float]

    @property
    def why(self) -> str:
        """What binds."""
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def seconds(self) -> float:
        return self.parts[self.why]


def lease_bound(settings: SimulationSettings, machines: Sequence[Machine]) -> Bound:
    """The least time in which the samples of all epochs can be used."""
    sending_s = settings.slices * settings.slice_bytes / (settings.origin_up * settings.origins)
    work = float(settings.slices * settings.samples * settings.epochs)
    compute_s = work_done_s(work, _supply(settings, machines))
    return Bound({"compute": compute_s, "origin": sending_s + 2 * settings.latency_s})


def _supply(settings: SimulationSettings, machines: Sequence[Machine]) -> list[tuple[float, float]]:
    """(moment, samples/s from then on), the most that could be used, by moment."""
    size = settings.slice_bytes
    changes: list[tuple[float, float]] = []
    for one in machines:
        begins_at = one.joins_at + 4 * one.latency_s + size / one.down
        if begins_at < one.dies_at:
            changes += [(begins_at, one.speed), (one.dies_at, -one.speed)]
    own = sorted(changes)
    speeds = np.concatenate(([0.0], np.cumsum(sorted((one.speed for one in machines), reverse=True))))
    filled = filling(settings, machines)
    moments = sorted({0.0, *(at for at, _ in own if at < float("inf")), *filled})
    supply, rate, at_own = [], 0.0, 0
    for moment in moments:
        while at_own < len(own) and own[at_own][0] <= moment:
            rate += own[at_own][1]
            at_own += 1
        k = int(np.searchsorted(filled, moment, side="right"))
        supply.append((moment, max(0.0, min(rate, float(speeds[k])))))
    return supply


def filling(settings: SimulationSettings, machines: Sequence[Machine]) -> list[float]:
    """The moment before which no k machines can have a slice, for k from 1."""
    ups = sorted((one.up for one in machines), reverse=True)
    moments, at, sending = [], 2 * settings.latency_s, settings.origin_up * settings.origins
    for up in ups:
        at += settings.slice_bytes / sending
        moments.append(at)
        sending += up
    return moments


def work_done_s(work: float, supply: Sequence[tuple[float, float]]) -> float:
    """When so much work can be done, of (moment, work a second from then on); inf if never."""
    for (at, rate), (until, _) in zip(supply, [*supply[1:], (float("inf"), 0.0)]):
        if rate > 0 and rate * (until - at) >= work:
            return at + work / rate
        if rate > 0:
            work -= rate * (until - at)
    return float("inf")
