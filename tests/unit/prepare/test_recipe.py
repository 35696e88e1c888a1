"""Recipes: tables to settings and back, layers over each other, and wrong keys reported with their file."""

import pytest

from forebay.errors import UsageError
from forebay.prepare import load_recipe
from forebay.prepare.config import describe, recipe_names
from forebay.prepare.engines.sandbox import Limits
from forebay.toml import parse_settings
from forebay.units import parse_size


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_reads_back_from_its_settings(name):
    recipe = load_recipe(name)
    assert not recipe.name and recipe.tokenize.tokenizer


def test_stages_run_in_the_order_of_their_tables(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("[[length]]\nmin_chars = 3\n[unicode]\n[[length]]\nmax_chars = 9\n[fineweb]\n")
    recipe = load_recipe(config=path)
    assert [stage.name for stage in recipe.stages] == ["length", "length", "unicode", "fineweb"]


def test_later_layers_replace_earlier_ones_key_by_key(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('gopher_quality = false\n[language]\nkeep = ["de"]\n[slice]\nbytes = "1 MiB"\n')
    settings = parse_settings(["slice.seed=9"]) | {"language": {"min_score": 0.5}}
    recipe = load_recipe("fineweb", path, settings | {"limits": {"memory_bytes": "2GiB"}})
    assert recipe.limits == Limits(memory_bytes=2 << 30)
    stages = {stage.name: stage for stage in recipe.stages}
    assert "gopher_quality" not in stages and "gopher_repetition" in stages
    assert (stages["language"].keep, stages["language"].min_score) == (("de",), 0.5)
    assert (recipe.slice.bytes, recipe.slice.seed, recipe.slice.shuffle) == (1 << 20, 9, True)


@pytest.mark.parametrize(
    "toml, message",
    [
        ('[dedup]\nexact = "yes"', " dedup.exact: expected true or false, got 'yes'"),
        ("[gopher_quality]\nmin_word = 3", " gopher_quality.min_word: unknown key. Did you mean 'min_words'?"),
        ("\n[gofer_quality]", " gofer_quality: unknown key. Did you mean 'gopher_quality'?"),
        ('[length]\n# "min_chars" is below\nmin_chars = "x"', " length.min_chars: expected a number, got 'x'"),
        ("[[length]]\nmin_chars = 5\n\n[[length]]\nmin_chars = -1.5\n", " length.min_chars: expected"),
        ("slice.bytes = '64 KB of'", " slice.bytes: expected a size such as 64MiB, got '64 KB of'"),
        ("slice.bytes = 10", " slice.bytes: expected at least 4096, got 10"),
        ("\nread = { text_key = 5, id_key = 'i' }", " read.text_key: expected a string or a list, got 5"),
        ("[rows]\nmax_tokens = 1", " rows.max_tokens: expected at least 2, got 1"),
        ("unicode = 3", " unicode: expected a table of settings, true or false, got 3"),
        ("max_error_rate = 2", " max_error_rate: expected at most 1, got 2"),
        ('[[mine]]\nuse = "a:B"\n[[mine]]\nuse = 5', " mine.use: cannot import 'a:B'"),
        ("[mine]\n\nuse = 'json:Nothing'", " mine.use: expected module:Name, got 'json:Nothing'"),
        ("[mine]\nuse = 'os:getcwd'", " mine.use: expected the class of a stage, a dataclass"),
        ("[mine]\nuse = '..a:b'", " mine.use: expected module:Name"),
        ("a = 1\nb = [1,\n\n", "2: expected TOML: "),
        ("a = " + "[" * 100_000, "1: expected TOML: "),
    ],
)
def test_a_wrong_setting_is_reported_with_its_file(tmp_path, toml, message):
    path = tmp_path / "r.toml"
    path.write_text(toml)
    with pytest.raises(UsageError) as caught:
        load_recipe("gopher", path, allow_code=True)
    assert str(caught.value).startswith(f"{path}:{message}") and "\n" not in str(caught.value)


def test_a_wrong_setting_of_the_command_line_names_no_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[length]\nmin_chars = 3")
    with pytest.raises(UsageError, match=r"^length\.min_chars: expected a number, got 'x'"):
        load_recipe(None, path, {"length": {"min_chars": "x"}})
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(UsageError, match=r"expected TOML in UTF-8"):
        load_recipe(None, path)


def test_sizes():
    assert [parse_size(text) for text in ("4096", "1K", "1kB", "1.5 MiB")] == [4096, 1024, 1000, 3 << 19]


def test_a_table_explains_itself():
    text = describe("gopher_quality")
    assert "min_words = 50" in text and "Rae et al. 2021" in text
    assert "keys: dedup.minhash" in describe("minhash") and "id_key" in describe("read.text_key")
    assert "bands = 16" in describe("dedup") and "max_tokens = 2048" in describe("rows")
    with pytest.raises(UsageError, match="Did you mean 'fineweb'"):
        describe("finewebb")
