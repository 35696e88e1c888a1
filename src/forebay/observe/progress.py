"""Progress of long work on stderr: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from forebay.prepare.run import Progress

LINE_S = 10.0  # Interval of lines where stderr is no terminal.
_WINDOW_S = 10.0  # Speeds are of the last ten seconds: long enough to be steady, short enough to show a slow file.


@contextmanager
def bar(label: str, total: int | None, unit: str = "B", *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes or another unit (None: not known); yields a function that adds to what is done."""
    with _bar(label, total, unit, enabled) as shown:
        yield shown.update


class Speed:
    """Documents and bytes per second over a moving window, and the share of documents retained."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._history: deque[tuple[float, int, int]] = deque()

    def words(self, documents: int, retained: int, size: int) -> str:
        """`1,234 docs/s, 5.6 MB/s, kept 61.2 %` of the counts up to now; unknown figures are left out.

        The counts of the first call are the work of an earlier run, which does not count as speed.
        """
        now = self._clock()
        self._history.append((now, documents, size))
        while len(self._history) > 2 and self._history[1][0] <= now - _WINDOW_S:
            self._history.popleft()
        then, documents_then, size_then = self._history[0]
        words = []
        if now - then > 0.1:
            rate = (documents - documents_then) / (now - then)
            if rate:
                words.append(f"{rate:,.0f} docs/s" if rate >= 10 else f"{rate:.1f} docs/s")
            if size > size_then:
                words.append(f"{(size - size_then) / (now - then) / 1e6:,.1f} MB/s")
        if documents:
            words.append(f"kept {100 * retained / documents:.1f} %")
        return ", ".join(words)


class PrepareBar:
    """A bar for each stage of `prepare`, created at the stage's first report."""

    def __init__(self, *, enabled: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._enabled, self._clock = enabled, clock
        self._stage = ""
        self._bar: Any = None
        self._speed = Speed(clock)

    def __enter__(self) -> PrepareBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def update(self, progress: Progress) -> None:
        """Show how far a stage is."""
        if self._bar is None or progress.stage != self._stage or progress.done < self._bar.n:
            self.__exit__()
            self._stage, self._speed = progress.stage, Speed(self._clock)
            self._bar = _bar(progress.stage, progress.total, progress.unit, self._enabled)
        self._bar.total = progress.total
        if progress.documents or progress.bytes:
            words = self._speed.words(progress.documents, progress.documents_kept, progress.bytes)
            self._bar.set_postfix_str(words, refresh=False)
        self._bar.update(progress.done - self._bar.n)


class _Lines:
    """Stderr for a bar without a terminal: each state of it is a line of its own."""

    def write(self, text: str) -> None:
        if line := text.strip():
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def _bar(label: str, total: int | None, unit: str, enabled: bool) -> Any:
    if enabled and not sys.stderr.isatty():
        return tqdm(
            total=total, desc=label, unit=unit, unit_scale=True, unit_divisor=1000, file=_Lines(),
            delay=LINE_S,  # Short work prints nothing.
            mininterval=LINE_S, miniters=1,
            bar_format="{desc}: {n_fmt} of {total_fmt}{unit} after {elapsed}, {remaining} left, {rate_fmt}{postfix}",
        )  # fmt: skip
    is_large = unit == "B" or (total or 0) >= 100_000
    return tqdm(
        total=total, desc=f"{label:<10}", unit=unit, unit_scale=is_large, unit_divisor=1000, file=sys.stderr,
        dynamic_ncols=True, disable=not enabled,
    )  # fmt: skip
