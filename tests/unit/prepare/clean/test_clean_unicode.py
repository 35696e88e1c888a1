import unicodedata

import pytest

from forebay.formats.records import PROMPT_MARK, RESPONSE_MARK
from forebay.prepare.clean.unicode import MAX_MARKS, Unicode
from support.batches import stage_texts, to_batch


@pytest.mark.parametrize(
    "dirty, expected",
    [
        ("plain\ttext\nof two lines", "plain\ttext\nof two lines"),
        ("schÃ¶n, voilÃ\xa0 le travail", "schön, voilà le travail"),
        ("it\xe2\x80\x99s read as Latin-1", "it’s read as Latin-1"),
        ("РџСЂРёРІРµС‚ РјРёСЂ", "Привет мир"),
        ("one good Ärger\nand one bad cafÃ©", "one good Ärger\nand one bad café"),
        ("e\u0301 and \u1100\u1161", "é and 가"),
        ("a\x00b\x07c\x7fd", "abcd"),
        ("x\r\ny\rz", "x\ny\nz"),
        ("\ufeffzero\u200b width\u2060, soft\u00adhyphen", "zero width, softhyphen"),
        ("نمی\u200cخواهم 👨\u200d👩\u200d👧", "نمی\u200cخواهم 👨\u200d👩\u200d👧"),
        ("trail  \t\nends ", "trail\nends"),
        ("a\n\n\n\n\n\nb", "a\n\n\nb"),
        ("a\n \n\t\n \x00\n\r\nb", "a\n\n\nb"),
        (f"{PROMPT_MARK}ask\r\n{RESPONSE_MARK}say\x01", f"{PROMPT_MARK}ask\n{RESPONSE_MARK}say"),
        ("one page\x0cthe next\x0bline\x1crecord\x1funit", "one page\nthe next\nline\nrecord\nunit"),
        ("", ""),
    ],
)
def test_repairs(dirty, expected):
    assert stage_texts(Unicode(), [dirty, "between", dirty]) == [expected, "between", expected]


@pytest.mark.parametrize(
    "text",
    [
        "x² + y³ = z⁴, H₂O, ½ cup, Ⅳ, ﬁne ﬂow, Ｗide, ①②, №5, 10\u00a0000\u202f€",
        "👩\u200d👩\u200d👧 👍🏽 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f ❤\ufe0f 1\ufe0f⃣ 🇩🇪",
        "क्\u200dष क्\u200cष می\u200cخواهم ශ්\u200dරී שָׁלוֹם \u200fעברית\u200e العَرَبِيَّة",
        "iPhone eBay LaTeX pH; naïve, NÃO, Ã and Â are letters, ß ẞ, ɹ ʃ, «Bonjour\u00a0!» “quotes” ‘single’ —dash– …",
        "def f(x):\n    if x[1] == {}:\n\treturn  x  # two spaces\n\n\n    return 0xFF",
        "https://a.b/c?d=e&f=%20g#h user@example.com 2024-01-15T12:30:45Z v1.2.3.4 a\u2028b\u3000c",
        "O refrain, refrain!\nO refrain, refrain!\nO refrain, refrain!",
    ],
)
def test_what_a_text_means_stays(text):
    assert stage_texts(Unicode(), [text]) == [text]


def test_counts_by_kind():
    verdict = Unicode().apply(to_batch(["schÃ¶n \r\n\n\n\n\u200ba\x00e\u0301", "fine"]))
    assert verdict.counts == {
        "mojibake": 1,
        "normalised": 1,
        "controls": 1,
        "zero_width": 1,
        "newlines": 1,
        "trailing_spaces": 1,
        "blank_lines": 1,
    }
    assert verdict.drop.tolist() == [-1, -1]


def test_options():
    text = "ﬁne  \n\n\n\nschÃ¶n\u200b\u00ad\x01\u202e e\u0301"
    off = Unicode(mojibake=False, form="none")
    assert stage_texts(off, [text]) == ["ﬁne\n\n\nschÃ¶n\u202e e\u0301"]
    assert stage_texts(Unicode(form="NFKC"), [text]) == ["fine\n\n\nschön\u202e é"]


def test_long_runs_of_marks_are_cut():
    text = "x" + "\u0316\u0301" * 50 + "algo"
    (cut,) = stage_texts(Unicode(), [text])
    assert sum(unicodedata.combining(c) > 0 for c in cut) == MAX_MARKS
    assert cut.endswith("algo") and unicodedata.is_normalized("NFC", cut)
