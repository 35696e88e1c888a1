"""The time that no plan could beat, so that a result has something to be measured against.

Leases: samples are used at no more than the speed of the machines that are alive, and of those that can have
something to use. A machine can once a whole slice came down its own link; and the k-th of them once k slices went up
somebody's link, where only who has a slice sends, the origin first (the pipeline's filling). Nor can the last sample
be used before the origin has sent every slice once. Work that dies with a machine is not in the bound: it is a loss
of the plan, as a lease that waits for its end is.

Steps of ranks: each is as slow as its slowest rank that is alive then, with the larger parts at the fastest, from
when each can have its first slice. What a change of the membership costs is no part of it.

Broadcast: the slowest of three: the origin sends everything once; the narrowest link takes everything; all links up
together carry a copy for each worker. Source: Kumar and Ross 2006, Peer-assisted file distribution, theorem 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.simulate.faults import Machine
from forebay.simulate.settings import Settings


@dataclass(frozen=True)
class Bound:
    """Seconds; `why` names what binds. `curve`: (moment, part of the work that could be done by then)."""

    seconds: float
    why: str
    parts: dict[str, float]
    curve: tuple[tuple[float, float], ...] = ()


def _largest(parts: dict[str, float], curve: tuple[tuple[float, float], ...] = ()) -> Bound:
    why = max(parts, key=lambda name: parts[name])
    return Bound(parts[why], why, parts, curve or ((0.0, 0.0), (parts[why], 1.0)))


def lease_bound(settings: Settings, machines: Sequence[Machine]) -> Bound:
    """The least time in which the samples of all epochs can be used."""
    size, origin_up = settings.slice_bytes, settings.origin_up * settings.origins
    work = float(settings.slices * settings.samples * settings.epochs)
    done = _work_done(work, _supply(settings, machines))
    parts = {
        "compute": done[-1][0] if done[-1][1] >= 1 else float("inf"),
        "origin": settings.slices * size / origin_up + 2 * settings.latency_s,
    }
    return _largest(parts, tuple(done))


def order_bound(settings: Settings, machines: Sequence[Machine]) -> Bound:
    """The least time for all steps, where everybody alive has a part of each and parts differ by one sample at most."""
    size, origin_up = settings.slice_bytes, settings.origin_up * settings.origins
    batch = settings.workers * settings.batch
    first = [one for one in machines if one.joins_at == 0.0]
    begins_at = max(_filling(settings, first)[-1], *(4 * one.latency_s + size / one.down for one in first))
    moments = sorted({begins_at, *(at for one in machines for at in (one.joins_at, one.dies_at) if at < float("inf"))})
    supply = [(0.0, 0.0)]
    for moment in moments:
        speeds = [one.speed for one in machines if one.joins_at <= moment < one.dies_at]
        if speeds and moment >= begins_at:
            supply.append((moment, batch / _step_s(batch, speeds)))
    work = float(settings.slices * settings.samples * settings.epochs)
    done = _work_done(work, supply)
    parts = {
        "slowest rank": done[-1][0] if done[-1][1] >= 1 else float("inf"),
        "origin": settings.slices * size / origin_up + 2 * settings.latency_s,
    }
    return _largest(parts, tuple(done))


def _step_s(batch: int, speeds: Sequence[float]) -> float:
    """A step of all, if the larger parts are those of the fastest."""
    least, more = divmod(batch, len(speeds))
    ordered = sorted(speeds, reverse=True)
    return max(least / ordered[-1], (least + 1) / ordered[more - 1] if more else 0.0)


def swarm_bound(settings: Settings, machines: Sequence[Machine]) -> Bound:
    """The least time in which every machine that lives to the end can have every slice."""
    staying = [one for one in machines if one.dies_at == float("inf")]
    everything = float(settings.slices * settings.slice_bytes)
    origin_up = settings.origin_up * settings.origins
    all_up = origin_up + sum(one.up for one in machines)
    return _largest(
        {
            "origin": everything / origin_up,
            "narrowest link": max((one.joins_at + everything / one.down for one in staying), default=0.0),
            "all links": len(staying) * everything / all_up,
        }
    )


def _supply(settings: Settings, machines: Sequence[Machine]) -> list[tuple[float, float]]:
    """(moment, samples/s from then on), the most that could be used, by moment."""
    size = settings.slice_bytes
    changes: list[tuple[float, float]] = []
    for one in machines:
        begins_at = one.joins_at + 4 * one.latency_s + size / one.down
        if begins_at < one.dies_at:
            changes += [(begins_at, one.speed), (one.dies_at, -one.speed)]
    own = sorted(changes)
    speeds = np.concatenate(([0.0], np.cumsum(sorted((one.speed for one in machines), reverse=True))))
    filled = _filling(settings, machines)
    moments = sorted({0.0, *(at for at, _ in own if at < float("inf")), *filled})
    supply, rate, at_own = [], 0.0, 0
    for moment in moments:
        while at_own < len(own) and own[at_own][0] <= moment:
            rate += own[at_own][1]
            at_own += 1
        k = int(np.searchsorted(filled, moment, side="right"))
        supply.append((moment, max(0.0, min(rate, float(speeds[k])))))
    return supply


def _filling(settings: Settings, machines: Sequence[Machine]) -> list[float]:
    """The moment before which no k machines can have a slice, for k from 1."""
    ups = sorted((one.up for one in machines), reverse=True)
    moments, at, sending = [], 2 * settings.latency_s, settings.origin_up * settings.origins
    for up in ups:
        at += settings.slice_bytes / sending
        moments.append(at)
        sending += up
    return moments


def _work_done(work: float, supply: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(moment, part of the work that can have been done by then), up to the end if it is ever reached."""
    done, curve = 0.0, [(0.0, 0.0)]
    for (at, rate), (until, _) in zip(supply, [*supply[1:], (float("inf"), 0.0)]):
        if rate > 0 and done + rate * (until - at) >= work:
            return [*curve, (at + (work - done) / rate, 1.0)]
        if rate > 0:
            done += rate * (until - at)
        curve.append((until, done / work))
    return [point for point in curve if point[0] < float("inf")]
