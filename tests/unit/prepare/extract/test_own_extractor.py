"""An extractor of the user's own, in a file outside the package, named by a recipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from forebay.errors import UsageError
from forebay.prepare import load_recipe
from support.paths import ROOT

EXAMPLES = ROOT / "examples"
BODY = "These words stand in the data of the page alone. " * 10
PAGE = f'<html><script type="application/ld+json">{{"articleBody": "{BODY}"}}</script><body><p>Shown.</p></body></html>'
RECIPE = '[extract]\nextractor = "json_ld_extractor:JsonLd"\noptions = {min_words = %d}\n'


def _prepare(folder: Path, min_words: int, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "pages").mkdir(exist_ok=True)
    (folder / "pages/page.html").write_text(PAGE)
    (folder / "recipe.toml").write_text(RECIPE % min_words)
    arguments = ["prepare", "pages", "--config", "recipe.toml", "--to", "parquet", "--workers", "1", *options]
    return subprocess.run(
        [sys.executable, "-m", "forebay", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def _texts(out: Path) -> list[str]:
    return [
        text for path in sorted((out / "text").glob("*.parquet")) for text in pq.read_table(path)["text"].to_pylist()
    ]


def test_a_recipe_names_it_and_passes_settings(tmp_path: Path) -> None:
    for min_words, text in ((20, BODY.strip()), (1000, "Shown.")):
        out = tmp_path / str(min_words)
        result = _prepare(tmp_path, min_words, "--allow-code", "--out", str(out))
        assert result.returncode == 0, result.stderr
        assert _texts(out) == [text]


def test_code_runs_only_where_it_is_allowed(tmp_path: Path) -> None:
    result = _prepare(tmp_path, 20, "--out", "out")
    assert result.returncode != 0
    assert "recipe.toml: extract.extractor: names code, 'json_ld_extractor:JsonLd'" in result.stderr


def test_settings_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    settings = {"extract": {"extractor": "json_ld_extractor:JsonLd", "options": {"max_words": 3}}}
    stage = load_recipe(settings=settings, allow_code=True).stages[0]
    with pytest.raises(UsageError, match="expected settings of the extractor json_ld_extractor:JsonLd"):
        _ = stage.version
