"""The machines and faults of a simulation, drawn before it starts: kills, liars, restarts, partitions.

Each purpose has a random generator of its own, named by the seed and the purpose, so that one more fault of a kind does
not change the others. Python's `random.Random` gives the same numbers for a seed on every version and machine.
"""

import random
from dataclasses import dataclass, replace
from typing import Literal

from forebay.simulate.settings import SimulationSettings

Lie = Literal["", "wrong", "silent", "refuse"]
_LIES: tuple[Lie, ...] = ("wrong", "silent", "refuse")
_NEVER = float("inf")


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

    def covers(self, index: int, now: float) -> bool:
        """Whether it cuts a machine off now."""
        return self.starts_at <= now < self.stops_at and self.first <= index < self.stop


@dataclass(frozen=True)
class Faults:
    """The machines and faults of a simulation."""

    machines: tuple[Machine, ...]
    restarts: tuple[float, ...]
    partitions: tuple[Partition, ...]

    def is_cut(self, index: int, now: float) -> bool:
        """Whether a machine is cut off now."""
        return any(partition.covers(index, now) for partition in self.partitions)


def draw(settings: SimulationSettings, about_s: float) -> Faults:
    """Draw the faults of a simulation that takes about so long: kills, restarts and partitions fall into that time."""
    chance = {name: random.Random(f"{settings.seed} {name}") for name in ("machines", "churn", "faults")}
    machines = [_machine(settings, index, 0.0, chance["machines"]) for index in range(settings.workers)]
    num_killed = round(settings.churn * settings.workers)
    kills = {i: chance["churn"].uniform(0, about_s) for i in chance["churn"].sample(range(len(machines)), num_killed)}
    for i, dies_at in sorted(kills.items()):
        machines[i] = replace(machines[i], dies_at=dies_at)
        if chance["churn"].random() < settings.replace:
            machines.append(_machine(settings, len(machines), dies_at + settings.replace_s, chance["machines"]))
    restarts = sorted(chance["faults"].uniform(0, about_s) for _ in range(settings.restarts))
    partitions = []
    for _ in range(settings.partitions):
        starts_at, first = chance["faults"].uniform(0, about_s), chance["faults"].randrange(settings.workers)
        size = max(1, settings.workers // 10)
        partitions.append(Partition(starts_at, starts_at + settings.partition_s, first, first + size))
    return Faults(tuple(machines), tuple(restarts), tuple(partitions))


def _machine(settings: SimulationSettings, index: int, joins_at: float, chance: random.Random) -> Machine:
    speed, up, down, latency = (chance.lognormvariate(0, settings.spread) for _ in range(4))
    lies, is_slow, which = chance.random() < settings.liars, chance.random() < settings.slow, chance.randrange(3)
    drag = 10.0 if is_slow else 1.0
    return Machine(
        index,
        settings.speed * speed / drag,
        settings.up * up / drag,
        settings.down * down,
        settings.latency_s * latency,
        _LIES[which] if lies else "",
        joins_at,
    )
