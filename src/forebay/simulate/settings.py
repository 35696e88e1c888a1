"""The settings of a simulation: sizes, machines, faults. Together with the code they determine the result."""

from dataclasses import dataclass, fields
from typing import Any

from forebay.errors import UsageError
from forebay.worker.lease_state import MAX_FETCHES


@dataclass(frozen=True)
class SimulationSettings:
    """A simulated network.

    Args:
        samples: Of each slice.
        batch: Samples of a step of one worker.
        speed: Samples a second of the median worker; `spread` is sigma of their logarithms.
        up, down: Bytes/s of the median worker, with the same kind of spread as speeds.
        origin_up: Bytes/s of each of `origins` data nodes.
        latency_s: One way, of the median worker.
        churn: Share of the workers that are killed, at moments drawn evenly over the run.
        replace: Share of the killed that a new machine replaces, `replace_s` later.
        liars: Share of the workers that send others wrong bytes, nothing, or a refusal.
        slow: Share that is ten times as slow at computing and sending.
        restarts: How often the scheduler is killed; it restarts `outage_s` later.
        partitions: How often a tenth of the workers is cut off from all others for `partition_s`.
        lost: Share of the requests whose connection closes before the reply, that get no reply, or that come late.
        cache: Slices in the cache of a worker.
        fetches: Slices that a worker fetches at once.
        lease_s, exchange_s: How long a lease lives without contact; the interval of a worker's requests.
        stall_s, steal_s: See `scheduler.jobs.JobSettings`.
        deadline_s: A sample used later than this is late.
    """

    workers: int = 1000
    slices: int = 10_000
    seed: int = 0
    epochs: int = 1
    samples: int = 512
    batch: int = 8
    slice_bytes: int = 64 << 20
    speed: float = 4.0
    spread: float = 0.4
    up: float = 12.5e6
    down: float = 25e6
    origins: int = 1
    origin_up: float = 1.25e9
    latency_s: float = 0.03
    churn: float = 0.0
    replace: float = 1.0
    replace_s: float = 30.0
    liars: float = 0.0
    slow: float = 0.0
    restarts: int = 0
    outage_s: float = 10.0
    partitions: int = 0
    partition_s: float = 60.0
    lost: float = 0.0
    cache: int = 64
    fetches: int = MAX_FETCHES
    lease_s: float = 30.0
    exchange_s: float = 5.0
    stall_s: float = 600.0
    steal_s: float = 2.0
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "slices", "epochs", "samples", "batch", "slice_bytes", "origins", "cache", "fetches"):
            if getattr(self, name) < 1:
                raise UsageError(f"simulate: expected {name} of at least 1, got {getattr(self, name)}.")
        for name in ("churn", "replace", "liars", "slow", "lost"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"simulate: expected {name} in [0, 1], got {getattr(self, name)}.")
        for name in ("speed", "up", "down", "origin_up", "lease_s", "exchange_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"simulate: expected {name} above 0, got {getattr(self, name)}.")
        if self.liars == 1 or self.lost == 1:
            raise UsageError("simulate: expected liars and lost below 1: else no sample could be used.")

    def command(self) -> str:
        """The command that repeats this simulation: the settings that differ from the defaults, and the seed."""
        words = ["forebay simulate"]
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if value != field.default or field.name in ("workers", "slices", "seed"):
                words.append(f"--{field.name.replace('_', '-')} {_plain(value)}")
        return " ".join(words)


def _plain(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) and value == int(value) else str(value)
