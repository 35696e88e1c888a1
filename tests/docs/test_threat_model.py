"""Every test that the pages of the threat model name exists, and every threat has one."""

from __future__ import annotations

import ast
import re

from support.runner import ROOT

PAGE = "".join(path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("threat-model*.md")))


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`((?:unit|slow|contract|sim|docs|e2e)/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 50
    exists = {
        path: {node.name for node in ast.parse((ROOT / "tests" / path).read_text()).body if hasattr(node, "name")}
        for path in {path for path, _ in named}
    }
    assert [f"{path}::{name}" for path, name in named if name not in exists[path]] == []


def test_every_threat_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| threat |")]
    assert len(rows) > 30 and [row for row in rows if "::test_" not in row] == []
