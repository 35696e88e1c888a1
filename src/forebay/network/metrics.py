"""Figures of a server for Prometheus, in its text exposition format 0.0.4; read from the facts when asked.

Nothing is kept here: a service states its counters when `GET /metrics` comes. No package is needed for it.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from forebay.errors import UsageError
from forebay.network.exchange import Response

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


@dataclass(frozen=True)
class Metric:
    """One family: `samples` are pairs of labels and value."""

    name: str
    kind: Literal["counter", "gauge"]
    about: str
    samples: Sequence[tuple[Mapping[str, str], float]]


def counter(name: str, about: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    """A total since the start; its name ends in `_total`. With `label`, a value for each value of that label."""
    if not name.endswith("_total"):
        raise UsageError(f"metric {name}: expected a counter's name to end in _total")
    return Metric(name, "counter", about, _samples(value, label))


def gauge(name: str, about: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    """What goes up and down; `label` as of `counter`."""
    return Metric(name, "gauge", about, _samples(value, label))


def exposition(metrics: Iterable[Metric]) -> bytes:
    """The text that Prometheus reads.

    Raises:
        UsageError: If a name or a label's name is none that Prometheus takes, or a family comes twice.
    """
    lines, seen = [], set()
    for metric in metrics:
        if metric.name in seen or not _NAME.fullmatch(metric.name):
            raise UsageError(f"metric {metric.name!r}: expected a name of letters, digits and _, once")
        seen.add(metric.name)
        about = metric.about.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {metric.name} {about}", f"# TYPE {metric.name} {metric.kind}"]
        lines += [f"{metric.name}{_labels(labels)} {_number(value)}" for labels, value in metric.samples]
    return ("\n".join(lines) + "\n").encode()


def metrics_response(metrics: Iterable[Metric]) -> Response:
    """The answer to `GET /metrics`."""
    return Response(200, exposition(metrics), CONTENT_TYPE)


def _samples(value: float | Mapping[str, float], label: str) -> Sequence[tuple[Mapping[str, str], float]]:
    if isinstance(value, Mapping):
        return [({label: key}, each) for key, each in sorted(value.items())]
    return [({}, value)]


def _labels(labels: Mapping[str, str]) -> str:
    for name in labels:
        if not _NAME.fullmatch(name) or name.startswith("__"):
            raise UsageError(f"metric's label {name!r}: expected letters, digits and _")
    return (
        "{" + ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in labels.items()) + "}" if labels else ""
    )


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
