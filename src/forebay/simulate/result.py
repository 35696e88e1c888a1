"""The result of a simulation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.simulate.bound import Bound
from forebay.simulate.settings import SimulationSettings
from forebay.simulate.usage_record import UsageCheck


@dataclass(frozen=True)
class SimulationResult:
    """The figures of a simulation.

    Attributes:
        time_s: When the last sample was acknowledged, in virtual seconds.
        origin_bytes: Bytes sent by all origins.
        counts: Counts of waits, steals, bans and so on, by name.
        fault: What failed beside `usage`; "" if nothing.
    """

    settings: SimulationSettings
    usage: UsageCheck
    time_s: float
    bound: Bound
    origin_bytes: float
    counts: Mapping[str, float] = field(default_factory=dict)
    fault: str = ""

    @property
    def ok(self) -> bool:
        """Whether every sample was used exactly once, and the simulation ended."""
        return self.usage.ok and not self.fault

    @property
    def origin_ratio(self) -> float:
        """Bytes that origins sent, in sizes of the dataset."""
        return self.origin_bytes / (self.settings.slices * self.settings.slice_bytes)

    @property
    def time_ratio(self) -> float:
        """Time taken, in lower bounds."""
        return self.time_s / self.bound.seconds

    def to_json(self) -> dict[str, Any]:
        """The result as plain values: equal for equal settings and code."""
        return {
            "ok": self.ok,
            "missing": self.usage.missing,
            "repeated": self.usage.repeated,
            "late": self.usage.late,
            "wasted": self.usage.wasted,
            "origin_ratio": round(self.origin_ratio, 4),
            "time_ratio": round(self.time_ratio, 4),
            "workers": self.settings.workers,
            "slices": self.settings.slices,
            "samples": self.usage.samples,
            "seed": self.settings.seed,
            "time_s": round(self.time_s, 3),
            "bound_s": round(self.bound.seconds, 3),
            "bound": self.bound.limit,
            **{name: round(value, 3) for name, value in self.counts.items()},
            "fault": self.fault,
            "examples": list(self.usage.examples),
            "command": self.settings.command(),
        }

    def to_text(self) -> str:
        """The result as lines for a terminal."""
        usage, settings = self.usage, self.settings
        coverage = 1 - usage.missing / max(1, usage.samples)
        others = [f"; by {name} {value:,.1f} s" for name, value in self.bound.parts.items() if name != self.bound.limit]
        lines = [
            f"{settings.workers} workers, {settings.slices} slices, seed {settings.seed}",
            f"  coverage           {100 * coverage:.4g} % of {usage.samples:,} samples; missing {usage.missing}, "
            f"repeated {usage.repeated}, late {usage.late}, wasted by the killed {usage.wasted}",
            f"  origin             {self.origin_ratio:.3f} times the dataset",
            f"  time               {self.time_s:,.1f} s, {self.time_ratio:.3f} times the bound of "
            f"{self.bound.seconds:,.1f} s, set by {self.bound.limit}{''.join(others)}",
        ]
        lines += [
            f"  {name.replace('_', ' '):<18} {f'{value:.1%}' if name.endswith('share') else f'{value:,.6g}'}"
            for name, value in self.counts.items()
        ]
        if not self.ok:
            lines += [f"  wrong: {text}" for text in (*usage.examples, self.fault) if text]
            lines.append(f"seed {settings.seed}; run it again with: {settings.command()}")
        return "\n".join(lines)
