"""A line of progress of a Loader on stderr, of `Loader.stats()`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tqdm import tqdm

from forebay.load.batch_source import BatchT
from forebay.load.stats import CAUSES, find_bottleneck, unit_of

if TYPE_CHECKING:
    from forebay.load.loader import Loader

_INTERVAL_S = 0.5


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
    unit = unit_of(after)
    rate = (after[unit] - before[unit]) / max(elapsed_s, 1e-9)
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
