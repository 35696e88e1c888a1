"""The desk: who gets which lease of which job from whom, as a function of what workers say. (Under way.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from millrace.network.swarm import Holder, Swarm
from millrace.schedule.ask import Ask, Reply
from millrace.schedule.events import Event


@dataclass(frozen=True)
class Source:
    """A dataset of a job: `samples` is int64 [S], the samples of each slice; `weight` its share in a mixture."""

    name: str
    dataset_id: str
    samples: NDArray[np.int64]
    weight: float = 1.0


@dataclass(frozen=True)
class JobSpec:
    """What a job is.

    Args:
        sources: One dataset, or several as a mixture by weights in samples.
        changes: (samples used by the job, weight of each source): weights that hold from there on.
        priority: Workers that name no job get leases of the job with the highest one that has any; among
            equals by `weight`, in samples.
        stall_s: A worker that acknowledges nothing for so long loses its leases, however alive it is.
        max_failures: A slice on which so many different workers failed is set aside.
        steal_s: Leases are cut for an idle worker only if their owner would need longer than this.
    """

    name: str
    sources: tuple[Source, ...]
    seed: int = 0
    epochs: int = 1
    lease_s: float = 30.0
    stall_s: float = 600.0
    max_failures: int = 3
    steal_s: float = 2.0
    priority: int = 0
    weight: float = 1.0
    changes: tuple[tuple[int, tuple[float, ...]], ...] = field(default=())


class Desk:
    """Several jobs and their swarms. Pure: no clock, disk or socket, and no chance.

    Args:
        salt: Begins the ids of leases: another one after each restart, so that no id is given twice.
    """

    def __init__(self, jobs: Sequence[JobSpec], *, salt: str = "") -> None:
        self.swarms: dict[str, Swarm] = {}

    def exchange(self, peer_id: str, ask: Ask, now: float) -> tuple[Reply, list[Event]]:
        """Takes what a worker says and answers it; the events are on disk before the reply goes out."""
        raise NotImplementedError

    def expire(self, now: float) -> list[Event]:
        """Takes back what is late; call it every second or so."""
        raise NotImplementedError

    def apply(self, event: Event, now: float = 0.0) -> None:
        """Replays an event."""
        raise NotImplementedError

    def origins(self, dataset_id: str, holders: Sequence[Holder], now: float) -> None:
        """The data nodes that serve a dataset now; call it within the swarm's time to live."""
        raise NotImplementedError

    def pause(self, job: str, paused: bool) -> list[Event]:
        """No new leases of a job, or again; what is leased is used up."""
        raise NotImplementedError

    def readmit(self, job: str, slices: Sequence[int] | None = None) -> list[Event]:
        """Leases slices again that were set aside; None for all of them."""
        raise NotImplementedError

    def reweight(self, job: str, weights: Mapping[str, float], at: int | None = None) -> list[Event]:
        """Other weights, from the `at`-th sample used on; None: from now on."""
        raise NotImplementedError

    def done(self) -> bool:
        """Whether every job is done."""
        raise NotImplementedError
