"""Observe a Loader: a line of progress on stderr, metrics for Prometheus.

Both only read `Loader.stats()`, so the training loop is as fast as without them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from forebay.load.batch_source import BatchT
from forebay.load.stats import CAUSES, find_bottleneck

if TYPE_CHECKING:
    from forebay.load.loader import Loader
    from forebay.stream.text_stream import TextStream

_INTERVAL_S = 0.5

_COUNTERS = {
    name: name
    for name in (
        "batches", "samples", "tokens", "slices_opened", "fetched_chunks", "fetched_bytes", "refetched_chunks",
        "refetched_bytes", "evicted_bytes",
    )
} | {"busy_s": "busy_seconds", "late": "late_chunks"}  # fmt: skip
"""Counts of `Loader.stats()` and the names of their metrics."""


def progress(loader: Loader[BatchT], *, enabled: bool = True) -> Iterator[BatchT]:
    """The loader's batches, with a line on stderr: steps, tokens per second, and what it waits for.

        12%|███▋      | 1.20k/10.0k [02:10<15:52, 9.2step/s] 151 k tokens/s, waits 3 % (network)

    Silent where stderr is no terminal.
    """
    start, stop = loader.pass_of(loader.step)
    bar = tqdm(
        total=None if stop is None else stop - start, initial=loader.step - start, unit="step", unit_scale=True,
        file=sys.stderr, dynamic_ncols=True, disable=not enabled or not sys.stderr.isatty(),
    )  # fmt: skip
    read_at, before = time.monotonic(), loader.stats()
    with bar:
        for batch in loader:
            yield batch
            bar.update()
            now = time.monotonic()
            if not bar.disable and now - read_at >= _INTERVAL_S:
                after = loader.stats()
                bar.set_postfix_str(words(before, after, now - read_at), refresh=False)
                read_at, before = now, after


def words(before: dict[str, float], after: dict[str, float], elapsed_s: float) -> str:
    """`151 k tokens/s, waits 3 % (network)`, of two results of `Loader.stats()`, `elapsed_s` apart."""
    count, unit = ("tokens", "tokens") if after["tokens"] else ("samples", "samples")
    rate = (after[count] - before[count]) / max(elapsed_s, 1e-9)
    waits = {cause: after[f"{cause}_s"] - before[f"{cause}_s"] for cause in CAUSES}
    share = 100 * sum(waits.values()) / max(elapsed_s, 1e-9)
    bottleneck = find_bottleneck(waits, elapsed_s, 0.01)
    waiting = f"waits {share:.0f} % ({bottleneck.cause})" if bottleneck else "never waits"
    return f"{_short(rate)} {unit}/s, {waiting}"


def _short(rate: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate:.3g}"


class LoaderCollector:
    """A collector for `prometheus_client`: `REGISTRY.register(LoaderCollector(loader))`; `serve_dashboard` has it.

    Metrics: `forebay_loader_wait_seconds_total{cause=…}`, `forebay_loader_epoch`, `…_step`,
    `…_cache_bytes`, and a counter for each count of `Loader.stats()`.

    Each has the loader's rank as label. `stats` are read at each scrape.
    """

    def __init__(self, loader: Loader[Any] | TextStream) -> None:
        self._loader = loader

    def collect(self) -> Iterable[Any]:
        """The metric families, for `prometheus_client`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self._loader.stats()
        names, values = ["rank"], [str(self._loader.rank)]
        about = "Time that the trainer waited for batches, by cause."
        waits = CounterMetricFamily("forebay_loader_wait_seconds", about, labels=[*names, "cause"])
        for cause in CAUSES:
            waits.add_metric([*values, cause], stats[f"{cause}_s"])
        yield waits
        for key, name in _COUNTERS.items():
            if key in stats:
                counter = CounterMetricFamily(f"forebay_loader_{name}", f"Loader.stats()[{key!r}].", labels=names)
                counter.add_metric(values, stats[key])
                yield counter
        gauges: dict[str, float] = {"epoch": self._loader.epoch, "step": self._loader.step}
        if "cached_bytes" in stats:
            gauges["cache_bytes"] = stats["cached_bytes"]
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(f"forebay_loader_{name}", f"The loader's {name.replace('_', ' ')}.", labels=names)
            gauge.add_metric(values, value)
            yield gauge
