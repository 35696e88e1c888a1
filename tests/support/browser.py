"""Headless Chromium for pages that Forebay makes or serves: width, theme, screenshots, axe-core, what a page loads.

Tests skip, saying why, where one of Chromium, playwright and axe-playwright-python (which brings axe-core) is missing.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

Theme = Literal["light", "dark"]
WIDTHS = {"desktop": 1280, "phone": 390}
SERIOUS = ("serious", "critical")
THEMES = ("light", "dark")
_SWITCHES = (
    "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip


class Browser:
    """One page of a headless Chromium. `page` is playwright's, for what this class does not have.

    Attributes:
        errors: What the page's console and scripts reported as errors since it was opened.
        requests: URLs that the page requested besides its own.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors = []
        self.requests = []
        page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: request.is_navigation_request() or self.requests.append(request.url))

    def open(self, target: str | Path, *, width: int = WIDTHS["desktop"], theme: Theme = "light") -> None:
        """Open a URL or a file in a window and theme (`prefers-color-scheme`), and wait until it is loaded."""
        self.errors.clear()
        self.requests.clear()
        self.page.set_viewport_size({"width": width, "height": 844 if width < 600 else 900})
        self.page.emulate_media(color_scheme=theme)
        self.page.goto(target.resolve().as_uri() if isinstance(target, Path) else target)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(path), full_page=True)

    def violations(self) -> list[str]:
        """Return the serious and critical findings of axe-core: rule, impact, help and the elements."""
        from axe_playwright_python.sync_playwright import Axe

        rules = [rule for rule in Axe().run(self.page).response["violations"] if rule["impact"] in SERIOUS]
        elements = ["; ".join(node["html"][:120] for node in rule["nodes"][:3]) for rule in rules]
        return [f"{rule['id']} ({rule['impact']}): {rule['help']}: {e}" for rule, e in zip(rules, elements)]

    def overflow(self) -> int:
        """Return by how many pixels the page, on a phone also a table in it, is too wide for its window."""
        script = """() => Math.max(document.documentElement.scrollWidth - window.innerWidth,
            ...[...document.querySelectorAll(window.innerWidth < 600 ? '.scroll' : 'none')]
            .map(e => e.scrollWidth - e.clientWidth))"""
        return int(self.page.evaluate(script))

    def focusable(self) -> list[str]:
        """The elements that Tab reaches, in order, by their text or label."""
        script = """() => { const e = document.activeElement; return e === document.body ? null
            : `${e.tagName} ${(e.getAttribute('aria-label') || e.textContent).trim().slice(0, 80)}` }"""
        self.page.evaluate("document.activeElement.blur(); window.getSelection().removeAllRanges()")
        names = []
        while len(names) < 500:
            self.page.keyboard.press("Tab")
            if (name := self.page.evaluate(script)) is None:
                break
            names.append(name)
        return names


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with an empty profile. Its page may do what a person's may, and has no way to the internet."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
    program = os.environ.get("FOREBAY_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=[*_SWITCHES, "--no-sandbox"])
        try:
            page = browser.new_page()
            page.set_default_timeout(0.0)  # only the test's own
            yield Browser(page)
        finally:
            browser.close()
