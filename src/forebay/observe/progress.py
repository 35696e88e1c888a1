"""Progress of long work on stderr: a bar on a terminal, elsewhere a line every ten seconds."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from forebay.closing import Closing
from forebay.units import format_seconds

if TYPE_CHECKING:
    from forebay.prepare.progress import Progress

LINE_S = 10.0  # Interval of lines where stderr is no terminal.
tqdm.monitor_interval = 0  # Its thread would keep `prepare` from forking.


@contextmanager
def bar(label: str, total: int | None, unit: str = "B", *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes or another unit (None: not known); yields a function that adds to what is done."""
    with _bar(label, total, unit, enabled) as shown:
        yield shown.update


class PrepareBar(Closing):
    """A bar for each stage of `prepare`, created at the stage's first report, with the rates that a report has."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._bar: Any = None
        self._stage = ""

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def update(self, progress: "Progress") -> None:
        """Show how far a stage is."""
        if self._bar is None or progress.stage != self._stage:
            self.close()
            self._stage = progress.stage
            self._bar = _bar(progress.stage, progress.total, progress.unit, self._enabled, rates=False)
        self._bar.total = progress.total
        words = []
        if progress.remaining_s is not None and progress.done < progress.total:
            words.append(f"{format_seconds(progress.remaining_s)} left")
        if progress.documents_per_s:
            words.append(f"{progress.documents_per_s:,.0f} docs/s")
        if progress.bytes_per_s:
            words.append(f"{progress.bytes_per_s / 1e6:,.1f} MB/s")
        if progress.documents:
            words.append(f"kept {100 * progress.documents_kept / progress.documents:.1f} %")
        self._bar.set_postfix_str(", ".join(words), refresh=False)
        self._bar.update(max(0, progress.done - self._bar.n))


class _Lines:
    """Stderr for a bar without a terminal: each state of it is a line of its own."""

    last = ""

    def write(self, text: str) -> None:
        if (line := text.strip()) and line != self.last:
            self.last = line
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def _bar(label: str, total: int | None, unit: str, enabled: bool, *, rates: bool = True) -> Any:
    """A bar of tqdm; without `rates` it shows those of its postfix alone."""
    is_large = unit == "B" or (total or 0) >= 100_000
    if enabled and not sys.stderr.isatty():
        figures = ", {remaining} left, {rate_fmt}" if rates else ""
        return tqdm(
            total=total, desc=label, unit=unit, unit_scale=is_large, unit_divisor=1000, file=_Lines(),
            delay=LINE_S,  # Short work prints nothing.
            mininterval=LINE_S, miniters=0,
            bar_format="{desc}: {n_fmt} of {total_fmt}{unit} after {elapsed}" + figures + "{postfix}",
        )  # fmt: skip
    return tqdm(
        total=total, desc=f"{label:<10}", unit=unit, unit_scale=is_large, unit_divisor=1000, file=sys.stderr,
        dynamic_ncols=True, miniters=0, disable=not enabled,
        bar_format=None if rates else "{l_bar}{bar}| {n_fmt}/{total_fmt}{unit} [{elapsed}{postfix}]",
    )  # fmt: skip
