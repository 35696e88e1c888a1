"""Progress of long work on stderr: a bar on a terminal, else lines after 3 s, then every 10. They never step back."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from forebay.base import Closing
from forebay.units import format_bytes, format_count, format_seconds, numbered

if TYPE_CHECKING:
    from forebay.prepare.forecast import Progress

LINE_S = 10.0  # Interval of lines where stderr is not a terminal.
FIRST_LINE_S = 3.0  # When the first one comes: shorter work prints none.
tqdm.monitor_interval = 0  # Its thread would keep `prepare` from forking.


@contextmanager
def bar(label: str, total: int | None, unit: str = "B", *, enabled: bool = True) -> Iterator[Callable[[float], None]]:
    """Show a bar over `total` bytes or another unit, a noun in the singular (None: not known).

    Yields a function that adds to what is done.
    """
    with _Bar(label, total, unit, enabled) as shown:
        yield lambda done: shown.show(shown.n + done)


class PrepareBar(Closing):
    """A bar for each stage of `prepare`, created at the stage's first report, with the time that is left of all."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._bar: _Bar | None = None
        self._stage = ""

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def above(self, write: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that calls `write` with a message, which does not continue the line of a bar."""

        def write_above(text: str) -> None:
            if self._bar is not None:
                self._bar.clear()
            write(text)

        return write_above

    def update(self, progress: "Progress") -> None:
        """Show how far a stage is."""
        if is_new := self._bar is None or progress.stage != self._stage:
            self.close()
            self._stage = progress.stage
            self._bar = _Bar(progress.stage, progress.total, progress.unit, self._enabled)
        is_text = progress.stage != "kernels"
        words = [] if is_text else ["compiled once on this machine"]
        if progress.remaining_s:
            words.append(f"about {_time_left(progress.remaining_s)}{' in all' * is_text}")
        elif progress.done < progress.total and not words:
            words.append("time left not known yet")
        if progress.documents_per_s:
            words.append(f"{format_count(progress.documents_per_s)} docs/s")
        if progress.bytes_per_s:
            words.append(f"{format_bytes(progress.bytes_per_s)}/s")
        if progress.documents:
            words.append(f"kept {100 * progress.documents_kept / progress.documents:.1f} %")
        self._bar.total, self._bar.words = progress.total, words
        if is_new and not is_text:  # whose first group may take long
            self._bar.refresh()
        self._bar.show(progress.done)


class _Lines:
    """Stderr for a bar without a terminal: each state of it is a line of its own."""

    last = ""

    def write(self, text: str) -> None:
        if (line := text.strip()) and line != self.last:
            self.last = line
            sys.stderr.write(f"{line}\n")

    def flush(self) -> None:
        sys.stderr.flush()


class _Bar(tqdm):  # type: ignore[misc]
    """A bar, or lines, with units and words for people; without `words` the time left and the rate so far."""

    words: list[str] | None = None

    def __init__(self, label: str, total: int | None, unit: str, enabled: bool) -> None:
        interval_s, file, frame = 0.1, sys.stderr, "{l_bar}{bar:10}| {text}"  # type: float, Any, str
        if not sys.stderr.isatty():
            interval_s, file = LINE_S, _Lines()
        if total is None or interval_s == LINE_S:
            frame = "{desc}: {text}"
        super().__init__(
            total=total, desc=label, unit=unit, file=file, dynamic_ncols=interval_s < LINE_S, miniters=0,
            mininterval=interval_s, delay=min(interval_s, FIRST_LINE_S), bar_format=frame, disable=not enabled,
        )  # fmt: skip
        if enabled:  # as if a line had been printed so long ago that the next one comes after the delay
            self.last_print_t += self.delay - interval_s

    def show(self, done: float) -> None:
        """Show that so much is done; less than before is not shown."""
        self.update(max(0, done - self.n))

    @property
    def format_dict(self) -> dict[str, Any]:
        figures = super().format_dict
        done, total, unit, elapsed_s = (figures[name] for name in ("n", "total", "unit", "elapsed"))
        of = "" if total is None else f" of {_amount(total, unit)}"
        words, per_s = self.words, done / max(elapsed_s, 1.0)
        if words is None:
            words = [f"{_amount(per_s, unit)}/s"] if per_s else []
            words[:0] = [_time_left((total - done) / per_s)] if per_s and total and done < total else []
        amount = _amount(done, "" if of and unit != "B" else unit)
        return {**figures, "text": ", ".join([f"{amount}{of} after {format_seconds(round(elapsed_s))}", *words])}


def _time_left(seconds: float) -> str:
    return f"{format_seconds(max(1, round(seconds)))} left"


def _amount(value: float, unit: str) -> str:
    """Return a number of a unit: `12.3 MB`, `1 slice`, `14,500 samples`."""
    return format_bytes(value) if unit == "B" else numbered(round(value), unit) if unit else f"{value:,.0f}"
