"""Progress of long work on stderr: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from forebay.prepare.run import Progress

LINE_S = 10.0  # Interval of lines where stderr is no terminal.


@contextmanager
def bar(label: str, total: int | None, unit: str = "B", *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes or another unit (None: not known); yields a function that adds to what is done."""
    with _bar(label, total, unit, enabled) as shown:
        yield shown.update


class PrepareBar:
    """A bar for each stage of `prepare`, created at the stage's first report."""

    def __init__(self, *, enabled: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._enabled, self._clock = enabled, clock
        self._bar: Any = None
        self._first: Any = None
        self._started_at = 0.0

    def __enter__(self) -> PrepareBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def update(self, progress: Progress) -> None:
        """Show how far a stage is."""
        if self._bar is None or progress.stage != self._first.stage or progress.done < self._bar.n:
            self.__exit__()
            self._first, self._started_at = progress, self._clock()
            self._bar = _bar(progress.stage, progress.total, progress.unit, self._enabled)
        self._bar.total = progress.total
        words, elapsed_s = [], self._clock() - self._started_at
        if elapsed_s > 0.1:  # the counts of the first report are of an earlier run
            if num := progress.documents - self._first.documents:
                words.append(f"{num / elapsed_s:,.0f} docs/s")
            if num := progress.bytes - self._first.bytes:
                words.append(f"{num / elapsed_s / 1e6:,.1f} MB/s")
        if progress.documents:
            words.append(f"kept {100 * progress.documents_kept / progress.documents:.1f} %")
        self._bar.set_postfix_str(", ".join(words), refresh=False)
        self._bar.update(progress.done - self._bar.n)


class _Lines:
    """Stderr for a bar without a terminal: each state of it is a line of its own."""

    def write(self, text: str) -> None:
        if line := text.strip():
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


class _Bar(tqdm):  # type: ignore[misc]
    monitor_interval = 0  # Its thread would keep `prepare` from forking.


def _bar(label: str, total: int | None, unit: str, enabled: bool) -> Any:
    if enabled and not sys.stderr.isatty():
        return _Bar(
            total=total, desc=label, unit=unit, unit_scale=True, unit_divisor=1000, file=_Lines(),
            delay=LINE_S,  # Short work prints nothing.
            mininterval=LINE_S, miniters=1,
            bar_format="{desc}: {n_fmt} of {total_fmt}{unit} after {elapsed}, {remaining} left, {rate_fmt}{postfix}",
        )  # fmt: skip
    is_large = unit == "B" or (total or 0) >= 100_000
    return _Bar(
        total=total, desc=f"{label:<10}", unit=unit, unit_scale=is_large, unit_divisor=1000, file=sys.stderr,
        dynamic_ncols=True, miniters=1, disable=not enabled,
    )  # fmt: skip
