"""The documentation is a tree of four kinds of short pages, all listed in docs/README.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from runner import ROOT

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
