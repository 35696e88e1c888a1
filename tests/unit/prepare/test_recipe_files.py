"""Where settings stand in their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.errors import UsageError
from forebay.prepare.config import key_lines, load_recipe, merge, parse_layer

TOML = '''
name = "a # b"          # "c" = 5
read.text_key = """
fake = 1
[fake]
\\""" """
"quoted.key" = [
  ["en"],               # [no]
  ["de"]
]
[dedup]
exact = true

[[length]]
min_chars = 1
[ length.more ]
x = { y = 1, z = [2] }
[["length"]]
min_chars = 2
'last' = \'\'\'
[[length]]\'\'\'
'''


def test_every_key_is_found_where_it_stands() -> None:
    assert list(key_lines(TOML)) == [
        (("name",), 2),
        (("read",), 3),
        (("read", "text_key"), 3),
        (("quoted.key",), 7),
        (("dedup",), 11),
        (("dedup", "exact"), 12),
        (("length", 0), 14),
        (("length", 0, "min_chars"), 15),
        (("length", 0, "more"), 16),
        (("length", 0, "more", "x"), 17),
        (("length", 1), 18),
        (("length", 1, "min_chars"), 19),
        (("length", 1, "last"), 20),
    ]
    assert list(key_lines(TOML.replace("\n", "\r\n"))) == list(key_lines(TOML))
    assert parse_layer(TOML.encode("utf-8-sig"), "f").tables["length"][1]["min_chars"] == 2


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('name = "x"\n[gopher_quality]\nmin_wordz = 3\n', "3: gopher_quality.min_wordz: unknown key; did you mean"),
        ("\nnonsense = 1", "2: nonsense: unknown key; there are"),
        ('[length]\n# "min_chars" is below\nmin_chars = "x"', "3: length.min_chars: expected a number, got 'x'"),
        ("[[length]]\nmin_chars = 5\n\n[[length]]\nmin_chars = -1.5\n", "5: length.min_chars: expected"),
        ("[[length]]\nmin_chars = 'x'\n\n[[length]]\nmin_chars = 5\n", "2: length.min_chars: expected"),
        ('slice.shuffle = true\nslice.bytes = "much"', "2: slice.bytes: expected a size such as 64MiB, got 'much'"),
        ("slice.bytes = 10", "1: slice.bytes: expected at least 4096, got 10"),
        ("\nread = { text_key = 5, id_key = 'i' }", "2: read.text_key: expected a string, got 5"),
        ("[rows]\nlabels = 'I8'", "2: rows.labels: expected 'I32' or 'I64', got 'I8'"),
        ("rows = 3", "1: rows: expected a table of settings, got 3"),
        ("max_error_rate = 2", "1: max_error_rate: expected at most 1, got 2"),
        ("dedup = 5", "1: dedup: expected a table of settings, got 5"),
        ("[dedup]\nminhash = false\nexact = false\nagainst = ['a']", "4: dedup.against: expected one of exact"),
        ("length = 3", "1: length: expected a table of settings, true or false, got 3"),
        ("[subsets]\nvalidation = 0.1\ntest = 1.5", "3: subsets.test: expected a share between 0 and 1, got 1.5"),
        ("[subsets]\nvalidation = 0.6\ntest = 0.6", "1: subsets: "),
        ('[[mine]]\nuse = "a:B"\n[[mine]]\nuse = 5', "2: mine.use: cannot import 'a:B'"),
        ("[mine]\n\nuse = 'json:Nothing'", "3: mine.use: expected module:Name, got 'json:Nothing'"),
        ("[length\n", "1: expected TOML: "),
        ("a = 1\nb = [1,\n\n", "2: expected TOML: "),
        ("a = " + "[" * 100_000, "1: expected TOML: "),
        ("a = 1\na = 2", "2: expected TOML: Cannot overwrite a value"),
    ],
)
def test_what_is_wrong_is_told_with_file_line_and_key(tmp_path: Path, toml: str, said: str) -> None:
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
