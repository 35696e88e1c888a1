"""Chance, drawn before the world begins: machines and their ends, who lies, when the scheduler dies, who is cut off.

Every draw comes from a generator named by the seed and its purpose, so that one more fault of a kind changes no other
kind's. Python's `random.Random` gives the same numbers for the same seed on every version and machine.
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
    """One worker's machine. Bytes/s up and down; samples/s; moments in seconds."""

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
    """Machines [first, stop), counted round, hear and are heard by nobody in [begins_at, ends_at)."""

    begins_at: float
    ends_at: float
    first: int
    stop: int

    def holds(self, index: int, now: float) -> bool:
        """Whether a machine is cut off at a moment."""
        return self.begins_at <= now < self.ends_at and self.first <= index < self.stop


@dataclass(frozen=True)
class Faults:
    """All that will go wrong."""

    machines: tuple[Machine, ...]
    restarts: tuple[float, ...]
    cuts: tuple[Partition, ...]

    def is_cut(self, index: int, now: float) -> bool:
        """Whether a machine is cut off at a moment."""
        return any(cut.holds(index, now) for cut in self.cuts)


def draw(settings: SimulationSettings, about_s: float) -> Faults:
    """The faults of a world that lasts about so long: kills, restarts and cuts fall into that time."""
    chance = {name: random.Random(f"{settings.seed} {name}") for name in ("machines", "churn", "faults")}
    machines = [_machine(settings, index, 0.0, chance["machines"]) for index in range(settings.workers)]
    num_killed = round(settings.churn * settings.workers)
    moments = {i: chance["churn"].uniform(0, about_s) for i in chance["churn"].sample(range(len(machines)), num_killed)}
    for i, at in sorted(moments.items()):
        machines[i] = replace(machines[i], dies_at=at)
        if chance["churn"].random() < settings.replace:
            machines.append(_machine(settings, len(machines), at + settings.replace_s, chance["machines"]))
    restarts = sorted(chance["faults"].uniform(0, about_s) for _ in range(settings.restarts))
    cuts = []
    for _ in range(settings.partitions):
        begins_at, first = chance["faults"].uniform(0, about_s), chance["faults"].randrange(settings.workers)
        size = max(1, settings.workers // 10)
        cuts.append(Partition(begins_at, begins_at + settings.partition_s, first, first + size))
    return Faults(tuple(machines), tuple(restarts), tuple(cuts))


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
