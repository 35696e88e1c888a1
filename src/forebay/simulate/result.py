"""What a simulated run came to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.simulate.bound import Bound
from forebay.simulate.settings import SimulationSettings
from forebay.simulate.usage_record import UsageCheck


@dataclass(frozen=True)
class SimulationResult:
    """A run's end.

    Attributes:
        time_s: When the last sample was acknowledged, in virtual seconds.
        origin_bytes: What origins sent, all together.
        counts: Of what happened: waits, steals, bans and so on, by name.
        fault: Why the run is not ok beside the verdict; "" if nothing.
    """

    settings: SimulationSettings
    verdict: UsageCheck
    time_s: float
    bound: Bound
    origin_bytes: float
    counts: Mapping[str, float] = field(default_factory=dict)
    fault: str = ""

    @property
    def ok(self) -> bool:
        """Whether every sample was used exactly once, and the run ended."""
        return self.verdict.ok and not self.fault

    @property
    def origin_ratio(self) -> float:
        """Bytes that origins sent, in sizes of the dataset."""
        return self.origin_bytes / (self.settings.slices * self.settings.slice_bytes)

    @property
    def time_ratio(self) -> float:
        """Time taken, in lower bounds."""
        return self.time_s / self.bound.seconds

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values: equal for equal settings and code."""
        return {
            "ok": self.ok,
            "missing": self.verdict.missing,
            "repeated": self.verdict.repeated,
            "late": self.verdict.late,
            "wasted": self.verdict.wasted,
            "origin_ratio": round(self.origin_ratio, 4),
            "time_ratio": round(self.time_ratio, 4),
            "workers": self.settings.workers,
            "slices": self.settings.slices,
            "samples": self.verdict.samples,
            "seed": self.settings.seed,
            "time_s": round(self.time_s, 3),
            "bound_s": round(self.bound.seconds, 3),
            "bound": self.bound.why,
            **{name: round(value, 3) for name, value in self.counts.items()},
            "fault": self.fault,
            "examples": list(self.verdict.examples),
            "command": self.settings.command(),
        }

    def words(self) -> str:
        """The same for people."""
        verdict, settings = self.verdict, self.settings
        coverage = 1 - verdict.missing / max(1, verdict.samples)
        others = [f"; by {name} {value:,.1f} s" for name, value in self.bound.parts.items() if name != self.bound.why]
        lines = [
            f"{settings.workers} workers, {settings.slices} slices, seed {settings.seed}",
            f"  coverage           {100 * coverage:.4g} % of {verdict.samples:,} samples; missing {verdict.missing}, "
            f"repeated {verdict.repeated}, late {verdict.late}, wasted by the killed {verdict.wasted}",
            f"  origin             {self.origin_ratio:.3f} times the dataset",
            f"  time               {self.time_s:,.1f} s, {self.time_ratio:.3f} times the bound of "
            f"{self.bound.seconds:,.1f} s, set by {self.bound.why}{''.join(others)}",
        ]
        lines += [
            f"  {name.replace('_', ' '):<18} {f'{value:.1%}' if name.endswith('share') else f'{value:,.6g}'}"
            for name, value in self.counts.items()
        ]
        if not self.ok:
            lines += [f"  wrong: {text}" for text in (*verdict.examples, self.fault) if text]
            lines.append(f"seed {settings.seed}; run it again with: {settings.command()}")
        return "\n".join(lines)
