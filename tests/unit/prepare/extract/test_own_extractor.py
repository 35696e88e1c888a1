"""An extractor of the user's own, in a file outside the package, named by a recipe."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from forebay.cli import main
from forebay.errors import UsageError
from forebay.prepare import load_recipe
from support.paths import ROOT

EXAMPLES = ROOT / "examples"
BODY = "These words stand in the data of the page alone. " * 10
PAGE = f'<html><script type="application/ld+json">{{"articleBody": "{BODY}"}}</script><body><p>Shown.</p></body></html>'
RECIPE = '[extract]\nextractor = "json_ld_extractor:JsonLd"\noptions = {min_words = %d}\n'


def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch, min_words: int, *options: str) -> int:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (folder / "pages").mkdir(exist_ok=True)
    (folder / "pages/page.html").write_text(PAGE)
    (folder / "recipe.toml").write_text(RECIPE % min_words)
    command = ["prepare", str(folder / "pages"), "--config", str(folder / "recipe.toml"), "--to", "parquet"]
    return main([*command, "--workers", "1", "--out", str(folder / "out"), *options])


@pytest.mark.parametrize("min_words, text", [(20, BODY.strip()), (1000, "Shown.")])
def test_a_recipe_names_it_and_passes_settings(min_words, text, tmp_path, monkeypatch):
    assert prepare(tmp_path, monkeypatch, min_words, "--allow-code") == 0
    (path,) = (tmp_path / "out/text").glob("*.parquet")
    assert pq.read_table(path)["text"].to_pylist() == [text]


def test_code_runs_only_where_it_is_allowed_with_settings_that_it_has(tmp_path, monkeypatch, capsys):
    assert prepare(tmp_path, monkeypatch, 20) != 0
    assert "recipe.toml: extract.extractor: names code, 'json_ld_extractor:JsonLd'" in capsys.readouterr().err
    settings = {"extract": {"extractor": "json_ld_extractor:JsonLd", "options": {"max_words": 3}}}
    stage = load_recipe(settings=settings, allow_code=True).stages[0]
    with pytest.raises(UsageError, match="expected settings of the extractor json_ld_extractor:JsonLd"):
        _ = stage.version
