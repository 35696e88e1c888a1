"""Text of other languages than English: words without spaces, stop words, settings by language."""

import re
import zipfile
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.formats.records import Record
from forebay.prepare.config import load_recipe
from forebay.prepare.documents import Stage
from forebay.prepare.filters.c4 import C4
from forebay.prepare.filters.languages import all_stop_words, stop_words
from forebay.prepare.filters.quality import FineWeb, GopherQuality, GopherRepetition, Length
from forebay.prepare.filters.words import split_words
from support.batches import to_batches
from support.shared_data import shared_data

UNSPACED = {  # words that ICU 78 counts in the declaration, with its dictionaries
    "cmn_hans": ("zh", 1607), "cmn_hant": ("zh", 1486), "jpn": ("ja", 2143), "tha": ("th", 2301),
    "lao": ("lo", 2375), "khm": ("km", 2077), "mya": ("my", 3711),
}  # fmt: skip
SCRIPTS = "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u3400-\u9fff]"


def reasons(stage: Stage, texts: Sequence[str], languages: Sequence[str | None] | None = None) -> list[str]:
    (batch,) = to_batches([Record(i, text=text) for i, text in enumerate(texts)])
    if languages is not None:
        batch = batch.append_column("language", pa.array(languages, pa.string()))
    return [stage.reasons[index] if index >= 0 else "" for index in stage.apply(batch).drop]


def declaration(name: str) -> str:
    with zipfile.ZipFile(shared_data("lang/udhr2.zip")) as files:
        lines = files.read(f"udhr2/{name}.txt").decode().splitlines()
    return "\n".join(line.strip() for line in lines if line.strip())


@pytest.mark.parametrize("name", UNSPACED)
def test_text_without_spaces_has_words(name: str) -> None:
    code, expected = UNSPACED[name]
    text = declaration(name)
    words = [word for word in split_words(text) if re.match(SCRIPTS, word)]
    assert 0.85 < len(words) / expected < 1.2
    for languages in (None, [code]):  # known by its script, or by the column
        assert reasons(GopherQuality(), [text], languages) == [""]
        assert reasons(Length(min_words=1000, max_words=5000), [text], languages) == [""]


@pytest.mark.parametrize(
    "cut",
    [
        "我 在 学校 学习 中文 。",
        "これ は ペン と ノート で す 。",
        "Python 是 语言 ， 2024 年",
        "ประ เทศ ไทย",
    ],
)
def test_unspaced_words(cut: str) -> None:
    assert split_words(cut.replace(" ", "")) == cut.split()


def test_chinese_goes_through_every_rule() -> None:
    line = "我们在学校学习中文，老师对我们说：世界上的语言很多，每一种语言都有自己的历史和文化。"
    others = [line.replace("学校", place).replace("历史", topic) for place, topic in ZH]
    text = "\n".join([line, *others])
    for stage in (GopherQuality(), FineWeb(max_duplicate_chars=1), C4(), Length(min_words=100)):
        assert reasons(stage, [text, text], ["zh", ""]) == ["", ""], stage.name


ZH = [("家里", "音乐"), ("大学", "文学"), ("图书馆", "诗歌"), ("公园", "故事"), ("城市", "传统")]


def test_c4_keeps_lines_that_end_as_their_script_has_it() -> None:
    stage = C4(min_sentences=0)
    (batch,) = to_batches([Record(0, text="这是一个很好的句子。\n没有句号的一行\nयह एक वाक्य है।\n他说：“我来了。”")])
    assert stage.apply(batch).batch["text"][0].as_py() == "这是一个很好的句子。\nयह एक वाक्य है।\n他说：“我来了。”"


def test_stop_words_follow_the_column() -> None:
    german = "der und die zu auf das Wort " * 10
    english = "the and word of be text " * 10
    other = "foo bar baz qux quux corge " * 10
    texts = [german, german, german, english, english, other, other, german]
    languages = ["de", "deu_Latn", "en", "en", "de", "xx", "en", None]
    expected = ["", "", "gopher_stop_words", "", "gopher_stop_words", "", "gopher_stop_words", "gopher_stop_words"]
    assert reasons(GopherQuality(), texts, languages) == expected
    own = GopherQuality(stop_words=("foo", "bar"))
    assert reasons(own, [other, german], ["de", "de"]) == ["", "gopher_stop_words"]


def test_stop_words_of_many_languages() -> None:
    assert len(all_stop_words()) > 300 and {"der", "und"} <= set(stop_words("de")) == set(stop_words("deu_Latn"))
    assert stop_words("tlh") == ()


def test_declarations_pass_with_their_own_stop_words() -> None:
    names = ("deu", "fra", "spa", "rus", "pol", "ell_monotonic", "hin", "arb", "kor", "fin", "tur", "vie", "swh")
    codes = ["de", "fr", "es", "ru", "pl", "el", "hi", "ar", "ko", "fi", "tr", "vi", "sw"]
    stage = GopherQuality(max_word_chars=15, min_alpha_words=0)
    assert reasons(stage, [declaration(name) for name in names], codes) == [""] * len(names)


TABLES = """
[gopher_quality]
min_words = 5
[gopher_quality.language.de]
min_words = 2
stop_words = ["der", "die"]
[gopher_repetition.language.zh]
top_ngrams = [[2, 0.256], [3, 0.201], [4, 0.171]]
[tokenize]
tokenizer = "bytes"
"""


def test_settings_by_language_in_a_recipe(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mine.toml").write_text(TABLES)
    recipe = load_recipe(None, tmp_path / "mine.toml")
    quality, repetition = recipe.stages
    texts = ["der die Das", "the and Das", "the and one", "the and one two three"]
    expected = ["", "gopher_stop_words", "gopher_short", ""]
    assert reasons(quality, texts, ["de", "deu", "en", "en"]) == expected
    assert hash(repetition) == hash(repetition) and recipe.to_json()["stages"][1][1]["language"][0][0] == "zh"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("min_wrds = 2", "gopher_quality.*min_wrds"),
        ('min_words = "many"', "de: min_words: expected a number"),
        ("language = 2", "language"),
    ],
)
def test_wrong_tables(table: str, message: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "mine.toml").write_text(f"[gopher_quality.language.de]\n{table}\n")
    with pytest.raises(UsageError, match=message):
        load_recipe(None, tmp_path / "mine.toml")
    with pytest.raises(UsageError, match="one table for each"):
        GopherQuality(language=(("de", ()), ("deu", ())))
    with pytest.raises(UsageError, match="n-grams of the same n"):
        GopherRepetition(language=(("de", (("top_ngrams", ((9, 0.1),)),)),))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["der die das Wort. Noch ein Satz.", "the and of. To be.", "你好世界，再见。", ""]),
            st.sampled_from(["de", "en", "zh", "", None]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.data(),
)
def test_batches_may_be_cut_anywhere(rows: list[tuple[str, str | None]], data: st.DataObject) -> None:
    table = (("de", (("min_sentences", 2),)), ("zh", (("min_words_per_line", 1),)))
    stage = C4(min_sentences=1, terminal_punctuation=False, language=table)
    (batch,) = to_batches([Record(i, text=text) for i, (text, _) in enumerate(rows)])
    batch = batch.append_column("language", pa.array([code for _, code in rows], pa.string()))
    cut = data.draw(st.integers(0, len(rows)))
    whole, *parts = (stage.apply(part) for part in (batch, batch.slice(0, cut), batch.slice(cut)))
    assert whole.drop.tolist() == [drop for part in parts for drop in part.drop.tolist()]
    texts = [text for part in parts for text in part.batch["text"].to_pylist()]
    assert whole.batch["text"].to_pylist() == texts
    assert whole.batch.drop_columns("text").equals(batch.drop_columns("text"))
