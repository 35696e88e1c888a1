"""Bars of prepare: what they say, and that they are silent without a terminal."""

import io
import sys

from forebay.cli.arguments import plain
from forebay.observe import progress
from forebay.observe.progress import PrepareBar
from forebay.prepare.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_them(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with PrepareBar() as bar:
        bar.update(Progress("filter", 0, 100, "B"))
        bar.update(Progress("filter", 10, 100, "B", 10, 6))
        assert "left" not in terminal.getvalue()  # not known yet
        bar.update(Progress("filter", 50, 100, "B", 1000, 612, 90.0, 1000.0, 2e6))
        bar._bar.refresh()
        bar.update(Progress("slice", 1, 2, " slices"))
    shown = terminal.getvalue()
    assert "90 s left, 1,000 docs/s, 2.0 MB/s, kept 61.2 %" in shown
    assert "filter" in shown and "slice" in shown


def test_lines_without_a_terminal(monkeypatch):
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    with PrepareBar() as bar:
        bar.update(Progress("filter", 10, 100, "B", 10, 5))
        bar.update(Progress("filter", 60, 100, "B", 60, 5))
    assert "filter: 60.0 of 100B after 0" in plain.getvalue().splitlines()[-1]
    assert "\r" not in plain.getvalue()


def test_values_as_a_person_reads_them():
    assert [plain(value) for value in ({}, [], None, {"a": 1}, 12345, True, 0.5)] == [
        "none", "none", "none", "a 1", "12,345", "yes", "0.5",
    ]  # fmt: skip
