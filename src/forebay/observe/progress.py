"""Progress of long work on stderr: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tqdm import tqdm

LINE_S = 10.0  # So often a line, where stderr is no terminal.
_WINDOW_S = 10.0  # Speeds are of the last this many seconds: long enough to be calm, short enough to show a slow file.


class StageProgress(Protocol):
    """How far one stage has come; `total` may grow while the stage finds more to do.

    It may also have `documents`, `documents_kept` and `bytes` (of text), as counted up to now, which are shown.
    """

    @property
    def stage(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def unit(self) -> str: ...


@contextmanager
def bar(label: str, total: int | None, unit: str = "B", *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes or another unit (None: not known); yields a function that takes what is newly done."""
    with _bar(label, total, unit, enabled) as shown:
        yield shown.update


class Speed:
    """Documents and bytes a second over a moving window, and the part kept, as the words after a bar."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int, int]] = deque()

    def words(self, documents: int, kept: int, size: int) -> str:
        """`1,234 docs/s, 5.6 MB/s, kept 61.2 %`, of counts up to now; what is not known is left out.

        What was counted at the first call is work of an earlier run: no speed is made of it.
        """
        now = self._clock()
        self._seen.append((now, documents, size))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW_S:
            self._seen.popleft()
        then, documents_then, size_then = self._seen[0]
        words = []
        if now - then > 0.1:
            if documents > documents_then:
                words.append(f"{_rate((documents - documents_then) / (now - then))} docs/s")
            if size > size_then:
                words.append(f"{(size - size_then) / (now - then) / 1e6:,.1f} MB/s")
        if documents:
            words.append(f"kept {100 * kept / documents:.1f} %")
        return ", ".join(words)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


class PrepareBar:
    """One bar a stage of `prepare`, made when the stage first reports and left as it is when another begins."""

    def __init__(self, *, enabled: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._enabled = enabled
        self._clock = clock
        self._stage = ""
        self._bar: Any = None
        self._speed = Speed(clock)

    def __enter__(self) -> PrepareBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def update(self, progress: StageProgress) -> None:
        if self._bar is None or progress.stage != self._stage or progress.done < self._bar.n:
            self._close()
            self._stage, self._speed = progress.stage, Speed(self._clock)
            self._bar = _bar(progress.stage, progress.total, progress.unit, self._enabled)
        bar = self._bar
        bar.total = progress.total
        documents, kept, size = (getattr(progress, name, 0) for name in ("documents", "documents_kept", "bytes"))
        if documents or size:
            bar.set_postfix_str(self._speed.words(documents, kept, size), refresh=False)
        bar.update(progress.done - bar.n)


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
            total=total,
            desc=label,
            unit=unit,
            unit_scale=True,
            unit_divisor=1000,
            file=_Lines(),
            delay=LINE_S,  # short work says nothing
            mininterval=LINE_S,
            miniters=1,
            bar_format="{desc}: {n_fmt} of {total_fmt}{unit} after {elapsed}, {remaining} left, {rate_fmt}{postfix}",
        )
    return tqdm(
        total=total,
        desc=f"{label:<10}",
        unit=unit,
        unit_scale=unit == "B" or (total or 0) >= 100_000,
        unit_divisor=1000,
        file=sys.stderr,
        dynamic_ncols=True,
        disable=not enabled,
        leave=True,
    )
