"""A line of progress of a Loader on stderr, of `Loader.stats()`."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tqdm import tqdm

from forebay.load.batch_source import BatchT
from forebay.load.stats import find_bottleneck, rates
from forebay.units import format_count

if TYPE_CHECKING:
    from forebay.load.loader import Loader

_INTERVAL_S = 0.5


def progress(loader: "Loader[BatchT]", *, enabled: bool = True) -> Iterator[BatchT]:
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
    unit, rate, shares = rates(before, after, elapsed_s)
    bottleneck = find_bottleneck(shares, 1.0, 0.01)
    waiting = f"waits {100 * sum(shares.values()):.0f} % ({bottleneck.cause})" if bottleneck else "never waits"
    return f"{format_count(rate)} {unit}/s, {waiting}"
