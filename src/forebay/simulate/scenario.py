"""The scenario of a simulation: sizes, machines, links, faults, a lower bound of its time; its record and result.

A scenario and the code determine the result. Each purpose has a random generator of its own, named by the seed and the
purpose, so that one more fault of a kind does not change the others.

The record is kept outside the code under test: each sample of each epoch must be acknowledged once, and used once apart
from wasted uses. What a worker used and could not acknowledge, because it was killed or lost the lease, is wasted.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from forebay.arrays import I64
from forebay.errors import UsageError

Share = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(ge=0, lt=1)]
"""A share that leaves something."""
Lie = Literal["", "wrong", "silent", "refuse"]
_LIES: tuple[Lie, ...] = ("wrong", "silent", "refuse")
_NEVER = float("inf")
REPLACE_S = 30.0
"""After so many seconds another machine replaces a killed one."""


class Scenario(BaseModel):
    """A simulated network.

    Args:
        churn: Share of the workers that are killed, at moments drawn evenly over the run.
        samples: Of each slice. `batch`: of a step of one worker.
        speed: Samples a second of the median worker. `spread`: sigma of the logarithms of speeds, links and latencies.
        up, down: Bytes/s of the median worker. `origin_up`: of the data node.
        latency_s: One way, of the median worker.
        liars: Share of the workers that send others wrong bytes, nothing, or a refusal.
        slow: Share that is ten times as slow at computing and sending.
        restarts: How often the scheduler is killed; it restarts 10 s later.
        partitions: How often a tenth of the workers is cut off from all others for `partition_s`.
        lost: Share of the requests whose connection closes before the reply, that get no reply, or that come late.
        cache: Slices in the cache of a worker.
        lease_s, exchange_s: How long a lease lives without contact; the interval of a worker's requests.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: PositiveInt = 1000
    slices: PositiveInt = 10_000
    churn: Share = 0.0
    seed: int = 0
    epochs: PositiveInt = 1
    samples: PositiveInt = 512
    batch: PositiveInt = 8
    slice_bytes: PositiveInt = 64 << 20
    speed: PositiveFloat = 4.0
    spread: Annotated[float, Field(ge=0)] = 0.4
    up: PositiveFloat = 12.5e6
    down: PositiveFloat = 25e6
    origin_up: PositiveFloat = 1.25e9
    latency_s: PositiveFloat = 0.03
    liars: Part = 0.0
    slow: Share = 0.0
    restarts: NonNegativeInt = 0
    partitions: NonNegativeInt = 0
    partition_s: PositiveFloat = 60.0
    lost: Part = 0.0
    cache: PositiveInt = 64
    lease_s: PositiveFloat = 30.0
    exchange_s: PositiveFloat = 5.0

    @property
    def num_samples(self) -> int:
        """Samples of all epochs."""
        return self.slices * self.samples * self.epochs


@dataclass(frozen=True)
class Machine:
    """A worker's machine. Bytes/s up and down; samples/s; times in seconds."""

    index: int
    speed: float
    up: float
    down: float
    latency_s: float
    lie: Lie = ""
    joins_at: float = 0.0
    dies_at: float = _NEVER


@dataclass(frozen=True)
class Partition:
    """Machines [first, stop) cannot send or receive in [starts_at, stops_at)."""

    starts_at: float
    stops_at: float
    first: int
    stop: int


@dataclass(frozen=True)
class Faults:
    """The machines and faults of a simulation."""

    machines: tuple[Machine, ...]
    restarts: tuple[float, ...]
    partitions: tuple[Partition, ...]

    def is_cut(self, index: int, now: float) -> bool:
        """Whether a machine is cut off now."""
        return any(p.starts_at <= now < p.stops_at and p.first <= index < p.stop for p in self.partitions)


def draw(scenario: Scenario, about_s: float) -> Faults:
    """Draw the faults of a simulation that takes about so long: kills, restarts and partitions fall into that time."""
    chance = {name: random.Random(f"{scenario.seed} {name}") for name in ("machines", "churn", "faults")}
    machines = [_machine(scenario, index, 0.0, chance["machines"]) for index in range(scenario.workers)]
    num_killed = round(scenario.churn * scenario.workers)
    kills = {i: chance["churn"].uniform(0, about_s) for i in chance["churn"].sample(range(len(machines)), num_killed)}
    for i, dies_at in sorted(kills.items()):
        machines[i] = replace(machines[i], dies_at=dies_at)
        machines.append(_machine(scenario, len(machines), dies_at + REPLACE_S, chance["machines"]))
    restarts = sorted(chance["faults"].uniform(0, about_s) for _ in range(scenario.restarts))
    partitions = []
    for _ in range(scenario.partitions):
        starts_at, first = chance["faults"].uniform(0, about_s), chance["faults"].randrange(scenario.workers)
        stop = first + max(1, scenario.workers // 10)
        partitions.append(Partition(starts_at, starts_at + scenario.partition_s, first, stop))
    return Faults(tuple(machines), tuple(restarts), tuple(partitions))


def _machine(scenario: Scenario, index: int, joins_at: float, chance: random.Random) -> Machine:
    speed, up, down, latency = (chance.lognormvariate(0, scenario.spread) for _ in range(4))
    lies, is_slow, which = chance.random() < scenario.liars, chance.random() < scenario.slow, chance.randrange(3)
    drag = 10.0 if is_slow else 1.0
    return Machine(
        index, scenario.speed * speed / drag, scenario.up * up / drag, scenario.down * down,
        scenario.latency_s * latency, _LIES[which] if lies else "", joins_at,
    )  # fmt: skip


def lease_bound(scenario: Scenario, machines: Sequence[Machine]) -> dict[str, float]:
    """The seconds that each limit allows the use of all samples in, by its name; the largest is the bound.

    Samples are used at most at the speed of the machines that are alive and can have a slice: a machine once a whole
    slice came through its own link, the k-th machine once k slices were sent. The last sample cannot be used before the
    origin has sent every slice once. Lost work and waits for leases to expire are not included.
    """
    changes = []
    for machine in machines:
        starts_at = machine.joins_at + 4 * machine.latency_s + scenario.slice_bytes / machine.down
        if starts_at < machine.dies_at:
            changes += [(starts_at, machine.speed), (machine.dies_at, -machine.speed)]
    changes.sort()
    speeds = np.concatenate(([0.0], np.cumsum(sorted((machine.speed for machine in machines), reverse=True))))
    # The time before which no k machines can have a slice, for k from 1: only machines with a slice send.
    filled, sent_at, sending = list[float](), 2 * scenario.latency_s, scenario.origin_up
    for up in sorted((machine.up for machine in machines), reverse=True):
        sent_at += scenario.slice_bytes / sending
        filled.append(sent_at)
        sending += up
    supply, rate, num_applied = list[tuple[float, float]](), 0.0, 0
    for time in sorted({0.0, *(time for time, _ in changes if time < _NEVER), *filled}):
        while num_applied < len(changes) and changes[num_applied][0] <= time:
            rate += changes[num_applied][1]
            num_applied += 1
        k = int(np.searchsorted(filled, time, side="right"))
        supply.append((time, max(0.0, min(rate, float(speeds[k])))))
    work = float(scenario.num_samples)
    sending_s = scenario.slices * scenario.slice_bytes / scenario.origin_up
    return {"compute": work_done_s(work, supply), "origin": sending_s + 2 * scenario.latency_s}


def work_done_s(work: float, supply: Sequence[tuple[float, float]]) -> float:
    """When so much work can be done, of (time, work a second from then on); inf if never."""
    for (start, rate), (stop, _) in zip(supply, [*supply[1:], (_NEVER, 0.0)]):
        if rate > 0 and rate * (stop - start) >= work:
            return start + work / rate
        if rate > 0:
            work -= rate * (stop - start)
    return _NEVER


class UsedRange(NamedTuple):
    """Samples [start, stop) of a slice in an epoch, used by a worker at `time_s`."""

    epoch: int
    slice_index: int
    start: int
    stop: int
    time_s: float
    worker: int


@dataclass(frozen=True)
class UsageCheck:
    """Numbers of samples. `wasted`: used and not acknowledged."""

    samples: int
    missing: int
    repeated: int
    wasted: int
    examples: tuple[str, ...]  # of missing and repeated samples, at most five

    @property
    def ok(self) -> bool:
        """Whether every sample was used exactly once."""
        return self.missing == self.repeated == 0


@dataclass
class UsageRecord:
    """The ranges that were used, acknowledged and wasted. `samples`: int64 [S], of each slice."""

    samples: I64
    epochs: int
    trained: list[UsedRange] = field(default_factory=list)
    acknowledged: list[UsedRange] = field(default_factory=list)
    wasted: list[UsedRange] = field(default_factory=list)

    def check(self) -> UsageCheck:
        """Compare the ranges with the samples of the dataset."""
        missing = repeated = 0
        examples = []
        bases = np.concatenate(([0], np.cumsum(self.samples)))
        for epoch in range(self.epochs):
            acknowledged = self._counts(self.acknowledged, epoch)
            used = self._counts(self.trained, epoch) - self._counts(self.wasted, epoch)
            lost = np.minimum(acknowledged, used) < 1
            twice = np.maximum(acknowledged, used) > 1
            missing += int(lost.sum())
            repeated += int((np.maximum(acknowledged, used)[twice] - 1).sum())
            for sample in np.flatnonzero(lost | twice)[:3].tolist():
                index = int(np.searchsorted(bases, sample, side="right")) - 1
                position = f"epoch {epoch}, slice {index}, sample {sample - bases[index]}"
                examples.append(f"{position}: {used[sample]} uses, {acknowledged[sample]} acknowledged")
        wasted = sum(use.stop - use.start for use in self.wasted)
        return UsageCheck(int(self.samples.sum()) * self.epochs, missing, repeated, wasted, tuple(examples[:5]))

    def _counts(self, ranges: list[UsedRange], epoch: int) -> I64:
        """How many ranges contain each sample of an epoch: int64 [samples]."""
        bases = np.concatenate(([0], np.cumsum(self.samples)))
        changes = np.zeros(bases[-1] + 1, np.int64)
        if ranges:
            rows = np.array([use[:4] for use in ranges], np.int64)
            rows = rows[rows[:, 0] == epoch]
            if (rows[:, 2] < 0).any() or (rows[:, 3] > self.samples[rows[:, 1]]).any():
                raise UsageError("simulate: a use goes beyond its slice. This is an error of the simulated code.")
            np.add.at(changes, bases[rows[:, 1]] + rows[:, 2], 1)
            np.add.at(changes, bases[rows[:, 1]] + rows[:, 3], -1)
        return np.cumsum(changes)[:-1]


@dataclass(frozen=True)
class SimulationResult:
    """The figures of a simulation.

    Attributes:
        time_s: When the last sample was acknowledged, in virtual seconds.
        origin_bytes: Bytes sent by the origin.
        counts: Counts of waits, steals, bans and so on, by name.
        fault: What failed beside `usage`; "" if nothing.
    """

    scenario: Scenario
    usage: UsageCheck
    time_s: float
    bound: dict[str, float]
    origin_bytes: float
    counts: Mapping[str, float]
    fault: str

    @property
    def ok(self) -> bool:
        """Whether every sample was used exactly once, and the simulation ended."""
        return self.usage.ok and not self.fault

    @property
    def origin_ratio(self) -> float:
        """Bytes that the origin sent, in sizes of the dataset."""
        return self.origin_bytes / (self.scenario.slices * self.scenario.slice_bytes)

    @property
    def time_ratio(self) -> float:
        """Time taken, in lower bounds."""
        return self.time_s / max(self.bound.values())

    def to_json(self) -> dict[str, Any]:
        """The result as plain values: equal for equal scenarios and code."""
        return {
            "ok": self.ok, "missing": self.usage.missing, "repeated": self.usage.repeated, "wasted": self.usage.wasted,
            "origin_ratio": round(self.origin_ratio, 4), "time_ratio": round(self.time_ratio, 4),
            "samples": self.usage.samples, "time_s": round(self.time_s, 3),
            "bound_s": round(max(self.bound.values()), 3), "bound": max(self.bound, key=lambda name: self.bound[name]),
            **{name: round(value, 3) for name, value in self.counts.items()},
            "fault": self.fault, "examples": list(self.usage.examples), "scenario": self.scenario.model_dump(),
        }  # fmt: skip
