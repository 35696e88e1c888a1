"""`forebay top`: a view in a terminal, live or from a record.

Keys: q ends; in a replay space pauses, left and right go back and on. Without a terminal the view is printed once.
"""

import contextlib
import io
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from forebay.errors import ForebayError, printable
from forebay.observe.sources import Source
from forebay.observe.views import COLUMNS, Row, View
from forebay.units import format_bytes, format_count, format_seconds

POLL_S = 2.0
FRAME_S = 0.5  # Between the moments of a replay.
_MAX_ROWS = 30
_PLAIN_WIDTH = 100
_CAUSE_STYLES = {
    "scheduler": "magenta", "network": "blue", "disk": "yellow", "tokenize": "cyan", "decode": "green",
    "device": "red", "queue": "white",
}  # fmt: skip
_STATE_STYLES = dict.fromkeys(("running", "working", "up", "done", "ended"), "green") | dict.fromkeys(
    ("silent", "lost", "revoked", "failed", "incomplete", "does not answer"), "bold red"
)
_LEVEL_STYLES = {"warning": "yellow", "error": "bold red"}


def format_figure(value: Any, unit: str) -> str:
    """A figure with its unit, short."""
    if value is None or value == "":
        return "–"
    if isinstance(value, str):
        return value
    match unit:
        case "B" | "B/s":
            return format_bytes(int(value)) + unit[1:]
        case "share":
            return f"{100 * value:.1f} %"
        case "s":
            return format_seconds(value)
        case "id":
            return str(value)
        case "":
            return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return f"{format_count(value)} {unit}"


def render(view: View, width: int, height: int) -> RenderableType:
    """A view for a terminal of `width` x `height` characters. All texts are literal, without control characters."""
    parts: list[RenderableType] = [_headline(view)]
    if text := view.get("error") or view.get("message"):
        parts.append(_text(text, "bold red" if view.get("error") else "yellow"))
    if progress := view.get("progress"):
        parts += _progress(progress, width)
    if figures := view.get("figures"):
        parts.append(Columns([_text(f"{label} {format_figure(*figure)}") for label, figure in figures.items()], (0, 3)))
    if view.get("waits") and width > 20:
        parts += [Text(), *_waits(view["waits"], width)]
        parts.append(_text(view.get("advice", ""), "yellow"))
    if coverage := view.get("coverage"):
        parts += [Text(), *_coverage(coverage, width)]
    for name, columns in COLUMNS.items():
        if rows := view.get(name):
            parts += [Text(), _table(name, rows, columns, max(3, min(_MAX_ROWS, height // 2)), width)]
    for event in view.get("events", [])[:8]:
        moment = time.strftime("%H:%M:%S", time.localtime(event["at"])) if event.get("at") else "now"
        parts.append(_text(f"{moment}  {event['text']}", _LEVEL_STYLES.get(event["level"], "dim")))
    return Group(*parts)


def format_view(view: View) -> str:
    """A view as plain text."""
    console = Console(file=io.StringIO(), width=_PLAIN_WIDTH, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(render(view, _PLAIN_WIDTH, 60))
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=False)


def _headline(view: View) -> Text:
    line = Text()
    line.append_text(_text(view["title"] or "forebay", "bold"))
    line.append("  ")
    line.append_text(_text(view["state"], _STATE_STYLES.get(view["state"], "yellow")))
    line.append(f"  {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(view['at']))}", "dim")
    return line


def _progress(progress: Row, width: int) -> Iterator[RenderableType]:
    done, total, unit = progress["done"], max(1, progress["total"]), progress["unit"]
    words = [f"{100 * done / total:.1f} %"]
    of_unit = (format_bytes(done), format_bytes(total)) if unit == "B" else (f"{done:,}", f"{total:,} {unit}")
    words.append(" of ".join(of_unit))
    if progress.get("epochs"):
        words.append(f"epoch {progress['epoch']} of {progress['epochs']}")
    if progress.get("stage"):
        words.append(f"stage {progress['stage']}")
    if progress.get("eta_s"):
        words.append(f"about {format_seconds(progress['eta_s'])} to go")
    filled = round(min(1.0, done / total) * (width - 1))
    yield Text("━" * filled, "blue") + Text("╌" * (width - 1 - filled), "dim")
    yield _text(" · ".join(words))


def _waits(waits: Mapping[str, float], width: int) -> Iterator[Text]:
    bar, legend = Text(), Text("time of the workers: ")
    shares = {**waits, "training": max(0.0, 1.0 - sum(waits.values()))}
    for cause, share in shares.items():
        style = _CAUSE_STYLES.get(cause, "cyan")
        bar.append(("░" if cause == "training" else "█") * round(share * (width - 1)), style)
        legend.append(f"{'waiting: ' if cause != 'training' else ''}{cause} {100 * share:.1f} %   ", style)
    yield bar
    yield legend


def _coverage(coverage: Row, width: int) -> Iterator[Text]:
    """A character a cell; with more cells than fit in four lines, of several cells their mean."""
    used, state = coverage["used"], coverage["state"]
    per = -(-len(used) // (4 * width))
    line = Text()
    for start in range(0, len(used), per):
        levels = [int(digit, 16) for digit in used[start : start + per]]
        letters, level = state[start : start + per], sum(levels) / len(levels) / 15
        style = "bold red" if "A" in letters else "yellow" if "L" in letters else "blue"
        line.append("·▁▂▃▄▅▆▇█"[round(8 * level)] if level or "L" not in letters else "▁", style)
    yield Text(f"slices of the epoch, {per * coverage['slices_per_cell']} a character (yellow: leased, red: set aside)")
    yield line


def _table(name: str, rows: Sequence[Row], columns: Mapping[str, str], max_rows: int, width: int) -> Table:
    shown = rows[:max_rows]
    title = f"{name} ({len(rows):,}, the first {max_rows})" if len(rows) > max_rows else f"{name} ({len(rows):,})"
    cells = {}
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    free = width
    for key, unit in columns.items():
        values = [row.get(key) for row in shown]
        if all(value in (None, "") or (unit == "B" and not value) for value in values):
            continue
        heading = key.removesuffix("_bytes").replace("bytes_per_s", "rate").removesuffix("_s").replace("_", " ")
        cells[heading] = [_text(format_figure(value, unit)) for value in values]
        free -= max(len(heading), *map(len, cells[heading])) + 2
        if free < 0 and len(cells) > 1:  # Columns are in the order of their importance.
            del cells[heading]
            break
        is_text = any(isinstance(value, str) for value in values)
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis")
    for state in cells.get("state", []):
        state.stylize(_STATE_STYLES.get(state.plain, ""))
    for row in zip(*cells.values()):
        table.add_row(*row)
    return table


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Yields a function that waits for a key, up to some seconds: the key, or "" if none was pressed."""

    def wait(wait_s: float) -> str:
        time.sleep(wait_s)
        return ""

    if not sys.stdin.isatty():
        yield wait
        return
    saved = termios.tcgetattr(sys.stdin)

    def read(wait_s: float) -> str:
        if not select.select([sys.stdin], [], [], wait_s)[0]:
            return ""
        pressed = os.read(sys.stdin.fileno(), 8)
        return {b"\x1b[D": "left", b"\x1b[C": "right"}.get(pressed, pressed[:1].decode("ascii", "replace"))

    try:
        tty.setcbreak(sys.stdin)
        yield read
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)


def show_top(source: Source, *, replay: bool) -> None:
    """Show a source until `q` or an interrupt; without a terminal, or for one view, print once.

    Raises:
        ForebayError: If there is nothing to show at the start.
    """
    console = Console(file=sys.__stdout__, highlight=False)  # The command's own stdout has no control characters.
    view = source.view_at(source.times()[0]) if replay else source.poll()
    if not console.is_terminal:
        print(format_view(source.poll()), end="")
        return
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        index, paused = 0, False
        while True:
            live.update(render(view, console.width, console.height), refresh=True)
            match key(FRAME_S if replay else POLL_S):
                case "q":
                    return
                case " ":
                    paused = not paused
                case "left":
                    index, paused = index - 1, True
                case "right":
                    index, paused = index + 1, True
                case _:
                    index += not paused
            try:
                if replay:
                    times = source.times()
                    index = min(max(0, index), len(times) - 1)
                    view = source.view_at(times[index])
                else:
                    view = source.poll()
            except ForebayError as error:
                view = {**view, "state": "no answer", "error": str(error)}
