"""Text of other languages than English: words without spaces, stop words, settings by language."""

import pytest

from forebay.errors import UsageError
from forebay.prepare.config import load_recipe
from forebay.prepare.filters.c4 import C4
from forebay.prepare.filters.quality import GopherQuality, GopherRepetition
from support.batches import drop_reasons, stage_texts
from support.words import split_words


@pytest.mark.parametrize(
    "cut",
    [
        "我 在 学校 学习 中文 。",
        "これ は ペン と ノート で す 。",
        "Python 是 语言 ， 2024 年",
        "ประ เทศ ไทย",
    ],
)
def test_unspaced_words(cut):
    assert split_words(cut.replace(" ", "")) == cut.split()


def test_c4_keeps_lines_that_end_as_their_script_has_it():
    text = "这是一个很好的句子。\n没有句号的一行\nयह एक वाक्य है।\n他说：“我来了。”"
    assert stage_texts(C4(min_sentences=0), [text]) == ["这是一个很好的句子。\nयह एक वाक्य है।\n他说：“我来了。”"]


def test_stop_words_follow_the_column():
    german = "der und die zu auf das Wort " * 10
    english = "the and word of be text " * 10
    other = "foo bar baz qux quux corge " * 10
    texts = [german, german, german, english, english, other, other, german]
    languages = ["de", "deu_Latn", "en", "en", "de", "xx", "en", None]
    expected = ["", "", "gopher_stop_words", "", "gopher_stop_words", "", "gopher_stop_words", "gopher_stop_words"]
    assert drop_reasons(GopherQuality(), texts, languages) == expected


TABLES = """
[gopher_quality]
min_words = 5
[gopher_quality.language.de]
min_words = 2
[gopher_repetition.language.zh]
top_ngrams = [[2, 0.256], [3, 0.201], [4, 0.171]]
[tokenize]
tokenizer = "bytes"
"""


def test_settings_by_language_in_a_recipe(tmp_path):
    (tmp_path / "mine.toml").write_text(TABLES)
    recipe = load_recipe(None, tmp_path / "mine.toml")
    quality, repetition = recipe.stages
    texts = ["der die Das", "the and Das", "the and one", "the and one two three"]
    expected = ["", "gopher_stop_words", "gopher_short", ""]
    assert drop_reasons(quality, texts, ["de", "deu", "en", "en"]) == expected
    assert hash(repetition) == hash(repetition) and recipe.to_json()["stages"][1][1]["language"][0][0] == "zh"


@pytest.mark.parametrize(
    "table, message",
    [
        ("min_wrds = 2", "gopher_quality.*min_wrds"),
        ('min_words = "many"', "de: min_words: expected a number"),
        ("language = 2", "language"),
    ],
)
def test_wrong_tables(table, message, tmp_path):
    (tmp_path / "mine.toml").write_text(f"[gopher_quality.language.de]\n{table}\n")
    with pytest.raises(UsageError, match=message):
        load_recipe(None, tmp_path / "mine.toml")
    with pytest.raises(UsageError, match="one table for each"):
        GopherQuality(language=(("de", ()), ("deu", ())))
    with pytest.raises(UsageError, match="n-grams of the same n"):
        GopherRepetition(language=(("de", (("top_ngrams", ((9, 0.1),)),)),))
