"""The pages of reports in a browser: both themes, desktop and phone, by keyboard, and what axe-core finds."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import prepare_dataset
from forebay.files import atomic_write
from forebay.prepare.compare import compare_reports, render_comparison
from forebay.prepare.report import load_report
from support.browser import THEMES, WIDTHS, Browser, Theme, open_browser

PAGES = ("whole/report.html", "sample/report.html", "comparison.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory, browser: Browser) -> Path:
    """Reports of two recipes and of a sample, with all sections; the browser comes first, as it may be missing."""
    folder = tmp_path_factory.mktemp("reports")
    (folder / "in").mkdir()
    sentence = "It is a truth that the mill by the race has ground corn, and its wheel turns in wet years. "
    for name in "abc":
        texts = [f"{sentence * (i % 9)}Number {name} {i}." for i in range(60)] + ["<b>\x1b[31m\u202e" + sentence * 20]
        lines = [json.dumps({"text": text, "url": f"https://example.org/{i}"}) for i, text in enumerate(texts * 2)]
        (folder / "in" / f"{name}.jsonl").write_text("\n".join([*lines, "broken"]) + "\n")
    (folder / "in" / "other.xyz").write_bytes(bytes(range(256)))
    settings = {"gopher_quality": {"min_words": 20}, "dedup": {"exact": True}, "max_error_rate": 0.5}
    for name, changes in (("whole", {}), ("other", {"gopher_quality": {"min_words": 60}})):
        prepare_dataset([folder / "in"], folder / name, tokenizer="bytes", settings=settings | changes, workers=1)
    sample = settings | {"sample": 0.5}
    prepare_dataset([folder / "in"], folder / "sample", tokenizer="bytes", settings=sample, to="report", workers=1)
    comparison = compare_reports(load_report(folder / "whole"), load_report(folder / "other"))
    atomic_write(folder / "comparison.html", render_comparison(comparison).encode())
    return folder


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_accessible_and_fits(folder: Path, browser: Browser, page: str, width: int, theme: Theme):
    browser.open(folder / page, width=width, theme=theme)
    for _ in range(2):  # folded, then open
        assert browser.violations() == [] and browser.overflow() == 0
        browser.page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert browser.errors == [] and browser.requests == []


def test_a_rule_is_described_and_leads_to_what_it_dropped(folder: Path, browser: Browser):
    browser.open(folder / "whole" / "report.html")
    link = browser.page.get_by_role("link", name="gopher_short")
    tip = link.locator(".tip")
    assert tip.evaluate("e => getComputedStyle(e).opacity") == "0"
    browser.page.keyboard.press("Tab")
    while not link.evaluate("e => e === document.activeElement"):
        browser.page.keyboard.press("Tab")
    assert tip.evaluate("e => getComputedStyle(e).opacity") == "1" and "Drops < 20" in tip.inner_text()
    assert not browser.page.get_by_text("Drops < 20").last.is_visible()
    browser.page.keyboard.press("Enter")
    browser.page.get_by_text("Drops < 20").last.wait_for(state="visible")  # The fold that it is in opens.
    assert "dropped" in browser.page.locator(":target").inner_text()


def test_charts_have_words_for_bars_and_a_table(folder: Path, browser: Browser):
    browser.open(folder / "whole" / "report.html")
    chart = browser.page.get_by_role("img", name="Histogram").first
    assert "threshold 20" in str(chart.get_attribute("aria-label"))
    assert chart.locator("rect title").first.text_content().endswith(("kept", "dropped"))
    assert any(name.startswith("SUMMARY Figures of the chart") for name in browser.focusable())


def test_what_was_not_read_leads_to_its_lists(folder: Path, browser: Browser):
    browser.open(folder / "whole" / "report.html")
    for name in ("rejects.jsonl", "skipped.jsonl"):
        target = browser.page.get_by_role("link", name=name).get_attribute("href")
        assert (folder / "whole" / target).is_file()
