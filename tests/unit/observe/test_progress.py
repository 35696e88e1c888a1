"""Bars: their words, on a terminal and without one; they never step back."""

import io
import sys
from types import SimpleNamespace

import pytest

from forebay.cli.arguments import plain
from forebay.observe import progress
from forebay.observe.progress import PrepareBar
from forebay.prepare.forecast import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """The clock of bars: `clock.now`."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    return clock


def test_a_bar_of_a_terminal_never_starts_again_in_a_stage(monkeypatch, clock):
    monkeypatch.setenv("COLUMNS", "160")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with PrepareBar() as bar:
        for done, remaining_s in ((0, None), (50, 90.0), (20, 80.0)):  # the last one steps back
            clock.now += 31
            bar.update(Progress("filter", done, 100, "B", 20 * done, 612 * done // 50, remaining_s, 1000.0, 2e6))
        bar.above(lambda text: terminal.write(f"{text}\n"))("a message")
        for done in (0, 1):
            clock.now += 1
            bar.update(Progress("slice", done, 2, "slice"))
    shown = terminal.getvalue().replace("\r", "\n")
    assert "50%|#####     | 50 B of 100 B after 31 s, about 90 s left in all, 1 k docs/s, 2 MB/s, kept 61" in shown
    assert "\n50%|#####     | 50 B of 100 B after 62 s, about 80 s left in all" in shown.replace("filter:  ", "")
    assert " 20 B" not in shown and "\na message\n" in shown and "1 of 2 slices" in shown


def test_lines_without_a_terminal_have_units_and_the_time_left(monkeypatch, clock):
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    for unit, total, remaining_s in (("B", 7_310_000, None), ("slice", 1, 31.0)):
        with PrepareBar() as shown, PrepareBar(enabled=False) as quiet:
            for done in (0, 0, total):
                for each in (shown, quiet):
                    each.update(Progress("text", done, total, unit, remaining_s=0.0 if done else remaining_s))
                clock.now += 10
    with PrepareBar() as shown:
        shown.update(Progress("kernels", 0, 6, "group", remaining_s=12.0))
        for _ in range(4):  # The first line of a stage comes after three seconds.
            shown.update(Progress("encode", 2, 9, "B", documents_per_s=0.25))
            clock.now += 1.5
    with progress.bar("train", 29_000, "sample") as advance:
        for count in (14_500, -100):
            clock.now += 10
            advance(count)
    assert plain.getvalue().splitlines() == [
        "text: 0 B of 7.31 MB after 10 s, time left not known yet",
        "text: 7.31 MB of 7.31 MB after 20 s",
        "text: 7.31 MB of 7.31 MB after 30 s",
        "text: 0 of 1 slice after 10 s, about 31 s left in all",
        "text: 1 of 1 slice after 20 s",
        "text: 1 of 1 slice after 30 s",
        "kernels: 0 of 6 groups after 0 s, compiled once on this machine, about 12 s left",
        "encode: 2 B of 9 B after 3 s, time left not known yet, 0.25 docs/s",
        "encode: 2 B of 9 B after 6 s, time left not known yet, 0.25 docs/s",
        "train: 14,500 of 29,000 samples after 10 s, 10 s left, 1,450 samples/s",
        "train: 14,500 of 29,000 samples after 20 s, 20 s left, 725 samples/s",
    ]


def test_values_as_a_person_reads_them():
    assert [plain(value) for value in ({}, [], None, {"a": 1}, 12345, True, 0.5)] == [
        "none", "none", "none", "a 1", "12,345", "yes", "0.5",
    ]  # fmt: skip
