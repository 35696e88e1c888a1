"""Wrong settings are reported with their file."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.prepare.config import load_recipe, merge


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('name = "x"\n[gopher_quality]\nmin_wordz = 3\n', " gopher_quality.min_wordz: unknown key; did you mean"),
        ("\nnonsense = 1", " nonsense: unknown key; there are"),
        ('[length]\n# "min_chars" is below\nmin_chars = "x"', " length.min_chars: expected a number, got 'x'"),
        ("[[length]]\nmin_chars = 5\n\n[[length]]\nmin_chars = -1.5\n", " length.min_chars: expected"),
        ("[[length]]\nmin_chars = 'x'\n\n[[length]]\nmin_chars = 5\n", " length.min_chars: expected"),
        ('slice.shuffle = true\nslice.bytes = "much"', " slice.bytes: expected a size such as 64MiB, got 'much'"),
        ("slice.bytes = 10", " slice.bytes: expected at least 4096, got 10"),
        ("\nread = { text_key = 5, id_key = 'i' }", " read.text_key: expected a string, got 5"),
        ("[rows]\nlabels = 'I8'", " rows.labels: expected 'I32' or 'I64', got 'I8'"),
        ("rows = 3", " rows: expected a table of settings, got 3"),
        ("max_error_rate = 2", " max_error_rate: expected at most 1, got 2"),
        ("dedup = 5", " dedup: expected a table of settings, got 5"),
        ("length = 3", " length: expected a table of settings, true or false, got 3"),
        ('[[mine]]\nuse = "a:B"\n[[mine]]\nuse = 5', " mine.use: cannot import 'a:B'"),
        ("[mine]\n\nuse = 'json:Nothing'", " mine.use: expected module:Name, got 'json:Nothing'"),
        ("[length\n", "1: expected TOML: "),
        ("a = 1\nb = [1,\n\n", "2: expected TOML: "),
        ("a = " + "[" * 100_000, "1: expected TOML: "),
        ("a = 1\na = 2", "2: expected TOML: Cannot overwrite a value"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_key(tmp_path: Path, toml: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(toml)
    with pytest.raises(UsageError) as raised:
        load_recipe("gopher", path, allow_code=True)
    assert str(raised.value).startswith(f"{path}:{said}")
    assert "\n" not in str(raised.value)


def test_a_wrong_setting_of_the_command_line_names_no_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[length]\nmin_chars = 3")
    with pytest.raises(UsageError, match=r"^length\.min_chars: expected a number, got 'x'"):
        load_recipe(None, path, {"length": {"min_chars": "x"}})
    path.write_bytes(b'name = "\xff"')
    with pytest.raises(UsageError, match=r"expected TOML in UTF-8"):
        load_recipe(None, path)


def test_tables_are_laid_over_each_other_key_by_key() -> None:
    assert merge({"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"c": [2]}, "e": 3}) == {
        "a": {"b": 1, "c": [2]}, "d": 2, "e": 3,
    }  # fmt: skip
