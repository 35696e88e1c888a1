"""The pages of seed documents and of the threat model: no item is missing, and its evidence exists."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from forebay.cli import make_parser
from support.paths import ROOT

DOCS = ROOT / "docs" / "reference"
PAGE = "".join((DOCS / f"seeds-{part}.md").read_text() for part in ("data", "training"))
ITEMS = {"S0": [*range(1, 26)], "S1": [*range(1, 38)], "S2": [*range(1, 36)], "S3": [*range(1, 20)]}
ITEMS["S4"] = [*range(1, 31)]


@pytest.mark.parametrize("seed", ITEMS)
def test_every_item_has_a_line_and_something_that_shows_it(seed: str) -> None:
    lines = re.findall(rf"^\| {seed}\.(\d+) \| (.+?) \| (.+) \|$", PAGE, re.M)
    assert [int(number) for number, _, _ in lines] == ITEMS[seed]
    for number, _, shown in lines:
        assert re.search(r"`|as S\d|the same|\]\(", shown), f"{seed}.{number} shows nothing"


@pytest.mark.parametrize(
    ("page", "least"),
    [("seeds-data.md", 50), ("seeds-training.md", 50), ("threat-model.md", 15), ("threat-model-network.md", 15)],
)
def test_every_test_that_is_named_exists(page: str, least: int) -> None:
    text = (DOCS / page).read_text()
    named = set(re.findall(r"`((?:unit|slow|contract|sim|docs|e2e)/[\w/]+\.py|test_\w+\.py)(?:::(\w+))?`", text))
    assert len(named) > least
    for file, name in named:
        text = (ROOT / "tests" / file).read_text()
        assert not name or re.search(rf"^\s*(async )?def {name}\(", text, re.M), f"{file}::{name}"


def test_every_link_of_the_page_resolves() -> None:
    for target in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (DOCS / target).exists(), target


def test_every_command_that_is_named_exists() -> None:
    """Verbs, their flags, and modules; what stands in capitals or as `…` is the reader's."""
    shown = [line for line in re.findall(r"`([^`]+)`", PAGE) if not line.startswith("unshare")]
    commands = [line.split() for line in shown if line.startswith("forebay ")]
    modules = [line.split()[2] for line in shown if line.startswith("python -m ")]
    assert len(commands) > 5 and len(modules) > 5
    for _, *words in commands:
        parser, verbs = make_parser(), []
        while parser._subparsers is not None and words:
            verbs.append(words.pop(0))
            parser = parser._subparsers._group_actions[0].choices[verbs[-1]]
        flags = {flag for action in parser._actions for flag in action.option_strings}
        assert {word for word in words if word.startswith("--")} <= flags, (verbs, words)
    for module in modules:
        assert module.startswith("worker.") or find_spec(module), module
