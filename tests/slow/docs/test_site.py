"""The documentation site: it builds without warnings, loads nothing from other hosts, and has what the code has."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import forebay
from forebay.cli import make_parser
from forebay.cli.parser import walk
from forebay.prepare.recipe import STAGES
from support.browser import THEMES, WIDTHS, open_browser
from support.paths import ROOT

TOOLS = "import material, mkdocs, mkdocstrings_handlers.python"


def interpreter() -> str:
    """An interpreter that has the extra `docs`: this one, or that of `make docs`."""
    for python in (sys.executable, str(ROOT / ".venv-docs" / "bin" / "python")):
        if Path(python).exists() and subprocess.run([python, "-c", TOOLS], capture_output=True).returncode == 0:
            return python
    pytest.skip("the tools of the site are not installed: make docs, or pip install '.[docs]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "site"
    command = [interpreter(), str(ROOT / "scripts" / "docs_site.py"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return out


def test_every_page_of_the_index_is_built(site):
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    pages = re.findall(r"^- \[[^]]+\]\(([^)]+)\.md\)", index, re.MULTILINE)
    assert len(pages) > 50 and [page for page in pages if not (site / f"{page}.html").exists()] == []


def test_nothing_is_loaded_from_other_hosts(site):
    loaded = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(\w+:|//)|<link\b[^>]*\bhref=\"?(https?:|//)")
    assert [page.name for page in site.rglob("*.html") if loaded.search(page.read_text("utf-8"))] == []
    assert [page.name for page in site.rglob("*.css") if re.search(r"url\(\W?https?:", page.read_text("utf-8"))] == []


def test_the_reference_has_what_the_code_has(site):
    commands = (site / "reference" / "cli.html").read_text("utf-8")
    for path, parser in walk(make_parser()):
        assert f'id="{"-".join(["forebay", *path])}"' in commands or not path, path
        for option in parser._option_string_actions:
            assert option == "--help" or f"<code>{option}</code>" in commands or option == "-h", (path, option)
    settings = (site / "reference" / "configuration.html").read_text("utf-8")
    assert [stage for stage in STAGES if f'id="{stage}"' not in settings] == []
    api = (site / "reference" / "api.html").read_text("utf-8")
    names = set(forebay.__all__) - {"__version__", "callbacks", "ForebayError"}
    assert [name for name in names if f'id="forebay.{name}"' not in api] == []
    assert "forebay.errors.ForebayError" in api and "forebay.callbacks.wandb" in api


@pytest.mark.parametrize("theme", THEMES)
def test_pages_are_readable_by_all(site, theme):
    pages = [
        "index",
        "reference/plugins",
        "how-to/migrate",
        "explanation/loader",
        "repository/CHANGELOG",
        "explanation/comparison",
    ]
    with open_browser() as browser:
        for page in pages:
            for width in WIDTHS.values():
                browser.open(site / f"{page}.html", width=width, theme=theme)
                assert browser.overflow() <= 0, (page, width)
            assert (page, browser.errors) == (page, [])
            assert [url for url in browser.requests if not url.startswith("file:")] == []
            browser.page.wait_for_timeout(300)  # The theme wraps tables after loading.
            assert (page, browser.violations()) == (page, [])


def test_the_search_works_without_a_server(site):
    with open_browser() as browser:
        browser.open(site / "how-to" / "load.html")
        browser.page.click(".md-search__input")
        browser.page.keyboard.type("minhash bands", delay=20)
        results = browser.page.locator(".md-search-result__item a")
        results.first.wait_for()
        assert "Deduplication" in " ".join(results.all_inner_texts())


def test_figures_are_those_of_the_code(tmp_path):
    """The order's picture is drawn again; of a recording the commands differ in their times alone, so one is made."""
    drawn, recorded = tmp_path / "order.svg", tmp_path / "recording.svg"
    scripts, images = ROOT / "scripts", ROOT / "docs" / "images"
    subprocess.run([sys.executable, str(scripts / "draw_order.py"), str(drawn)], check=True)
    assert drawn.read_bytes() == (images / "order.svg").read_bytes()
    subprocess.run([sys.executable, str(scripts / "record_demo.py"), str(recorded), "echo '<a>'; ls docs"], check=True)
    for path in [recorded, *images.glob("*.svg")]:
        assert ElementTree.parse(path).getroot().tag.endswith("svg"), path
    lines = [element.text for element in ElementTree.parse(recorded).getroot().iter() if element.tag.endswith("text")]
    assert "<a>" in lines and any("tutorial" in str(line) for line in lines)
