"""The documentation is a tree of four kinds of short pages, all listed in docs/README.md."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from support.runner import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path != DOCS / "README.md")
MAX_WORDS = 1500
KINDS = {"Tutorial": "tutorial", "How-to": "how-to", "Reference": "reference", "Explanation": "explanation"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_is_short(page: Path) -> None:
    words = [word for word in page.read_text("utf-8").split() if re.search(r"\w", word)]
    assert len(words) <= MAX_WORDS, f"{page.relative_to(ROOT)}: expected at most {MAX_WORDS} words, got {len(words)}"


def test_the_index_lists_every_page_once_under_its_kind() -> None:
    index = (DOCS / "README.md").read_text("utf-8")
    listed = []
    for heading, section in re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", index, re.MULTILINE):
        links = re.findall(r"^- \[[^]]+\]\(([^)]+)\): .+\.$", section, re.MULTILINE)
        assert len(links) == section.count("]("), f"{heading}: expected one line per page"
        assert {link.partition("/")[0] for link in links} == {KINDS[heading]}
        listed += links
    assert sorted(listed) == [page.relative_to(DOCS).as_posix() for page in PAGES]


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    }
    names = {re.split(r"[<>=\[;]", name)[0].strip() for name in needed} - {"forebay"}
    rows = re.findall(r"^\| (.+) \|$", (DOCS / "reference" / "dependencies.md").read_text("utf-8"), re.MULTILINE)
    listed = {name for row in rows for cell in row.split(" | ")[:2] for name in cell.split(", ")}
    assert names - listed == set()


@pytest.mark.parametrize("page", ["explanation/architecture.md", "reference/dependencies.md"])
def test_every_file_that_is_named_exists(page: str) -> None:
    named = set(re.findall(r"`([\w-]+/[\w/-]+\.\w+)`", (DOCS / page).read_text("utf-8")))
    assert len(named) > 10
    assert [
        file for file in named if not (ROOT / file).exists() and not (ROOT / "src" / "forebay" / file).exists()
    ] == []


def test_every_benchmark_that_is_named_exists() -> None:
    text = "".join(page.read_text("utf-8") for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
    modules = set(re.findall(r"\bbenchmarks(?:\.\w+)+(?=[ `;:,\]])", text)) - {"benchmarks.md"}
    targets = set(re.findall(r"`make (bench[\w-]*)", text))
    files = {module: ROOT / module.replace(".", "/") for module in modules}
    assert len(modules) > 20
    assert [m for m, file in files.items() if not (file.with_suffix(".py").exists() or file.is_dir())] == []
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
