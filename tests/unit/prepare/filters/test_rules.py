"""Every published threshold, from both sides."""

import math

import pytest

from forebay.prepare.documents import Stage
from forebay.prepare.filters.c4 import C4
from forebay.prepare.filters.quality import FineWeb, GopherQuality, GopherRepetition, Length
from support.batches import drop_reasons, stage_texts, to_batch

INF = math.inf


def reason(stage: Stage, text: str) -> str:
    return drop_reasons(stage, [text])[0]


STOPS = "the and "
QUALITY = [
    (STOPS + "word " * 48, ""),
    (STOPS + "word " * 47, "gopher_short"),
    (STOPS + "word " * 47 + "! " * 9, "gopher_short"),
    (STOPS + "word " * 99_998, ""),
    (STOPS + "word " * 99_999, "gopher_long"),
    ("the " * 49 + "and", ""),
    ("the " * 49 + "and of", "gopher_short_words"),
    (STOPS + "abcdefghij " * 60 + "abcdefghijklmnopqrstuvwx", ""),
    (STOPS + "abcdefghijk " * 60, "gopher_long_words"),
    (STOPS + "word " * 88 + "# " * 10, ""),
    (STOPS + "word " * 87 + "# " * 11, "gopher_hashes"),
    ("… " * 10 + STOPS + "word " * 88, ""),
    (STOPS + "word " * 87 + "… " * 5 + "... " * 6, "gopher_ellipses"),
    ("- the and word word word word word word\n" * 9 + "the", ""),
    (" • the and word word word word word word\n" * 10, "gopher_bullet_lines"),
    (f"{STOPS} word word word word word word word word ...\n" * 3 + (STOPS + "word " * 9 + "\n") * 7, ""),
    (
        f"{STOPS} word word word word word word word word… \n" * 4 + (STOPS + "word " * 9 + "\n") * 6,
        "gopher_ellipsis_lines",
    ),
    (STOPS + "word " * 78 + "1234 " * 20, ""),
    (STOPS + "word " * 77 + "1234 " * 21, "gopher_alpha_words"),
    ("the The AND the " + "word " * 60, "gopher_stop_words"),
]


@pytest.mark.parametrize("text, expected", QUALITY)
def test_gopher_quality(text, expected):
    assert reason(GopherQuality(), text) == expected


def test_gopher_quality_mean_at_ten():
    assert reason(GopherQuality(min_stop_words=0), "abcdefghij " * 60) == ""
    assert reason(GopherQuality(min_stop_words=0), "abcdefghij " * 59 + "abcdefghijk") == "gopher_long_words"


def only(**fields: object) -> GopherRepetition:
    off = {f"max_duplicate_{part}": INF for part in ("paragraphs", "paragraph_chars", "lines", "line_chars")}
    return GopherRepetition(**{**off, "top_ngrams": (), "duplicate_ngrams": (), **fields})


def unique(n: int) -> list[str]:
    return [f"part{i}" for i in range(n)]


@pytest.mark.parametrize(
    "gap, unit", [("\n\n", "paragraphs"), ("\n\n\n", "paragraphs"), ("\n", "lines"), ("\n\n", "lines")]
)
def test_duplicate_parts(gap, unit):
    stage = only(**{f"max_duplicate_{unit}": 0.30})
    assert reason(stage, gap.join([*unique(7), "part0", "part1", "part2"])) == ""
    assert reason(stage, gap.join([*unique(6), "part0", "part1", "part2", "part3"])) == f"gopher_duplicate_{unit}"


@pytest.mark.parametrize("unit", ["paragraph", "line"])
def test_duplicate_chars(unit):
    gap = "\n\n" if unit == "paragraph" else "\n"
    stage = only(**{f"max_duplicate_{unit}_chars": 0.20})
    text = gap.join(["a" * 20, "a" * 20, "b" * (60 - 2 * len(gap))])
    assert len(text) == 100
    assert reason(stage, text) == ""
    assert reason(stage, text[:-1]) == f"gopher_duplicate_{unit}_chars"


@pytest.mark.parametrize("n, share", GopherRepetition().top_ngrams)
def test_top_ngrams(n, share):
    """Two occurrences of n words cover `share` of 100 or 200 characters."""
    length = {2: 10, 3: 18, 4: 16}[n]  # each; of 100, 200, 200 characters
    total = round(2 * length / share)
    words = ["c" + "d" * (length - 2 * n + 1), *"efgh"[: n - 1]]
    phrase = " ".join(words)
    assert len(phrase) == length
    text = f"{phrase} xx {phrase} " + "z" * (total - 2 * length - 5)
    assert len(text) == total
    stage = only(top_ngrams=[(n, share)])
    assert reason(stage, text) == ""
    assert reason(stage, text[:-1]) == f"gopher_top_{n}_gram"


@pytest.mark.parametrize("n, share", GopherRepetition().duplicate_ngrams)
def test_duplicate_ngrams(n, share):
    chars = round(100 * share)
    words = ["c" + "d" * (chars - n), *"efghijklmn"[: n - 1]]
    phrase = " ".join(words)
    text = f"{phrase} {'z' * (98 - 2 * len(phrase))} {phrase}"
    assert len(text) == 100
    stage = only(duplicate_ngrams=[[n, share]])
    assert reason(stage, text) == ""
    assert reason(stage, text.replace("zz", "z", 1)) == f"gopher_duplicate_{n}_grams"


def test_repetition_of_nothing():
    assert reason(GopherRepetition(), "") == "gopher_empty"
    assert reason(GopherRepetition(), "word") == ""


def lines(ended: int, others: int) -> str:
    return "\n".join(f"line {i} of forty characters or of some more{'.' * (i < ended)}" for i in range(ended + others))


FINEWEB = [
    (lines(3, 22), ""),
    (lines(2, 23), "fineweb_few_ended_lines"),
    ("\n".join(f"{i:030}." if i < 33 else f"{i:029}." for i in range(100)), "fineweb_newlines"),
    ("\n".join(f"{i:030}." if i < 32 else f"{i:029}." for i in range(100)), "fineweb_short_lines"),
    ("\n".join(["w w w w w.", "a " * 244 + "a.", "b " * 244 + "b.", "w w w w w."]), ""),
    ("\n".join(["w w w w w.", "a " * 244 + "a.", "b " * 243 + "bc.", "w w w w w."]), "fineweb_duplicate_chars"),
    ("\n \n\t", "fineweb_empty"),
    ("one two three\nfour five six\nseven eight\nnine.", ""),
    ("one two three\nfour five six\nseven eight\n\nnine.", "fineweb_newlines"),
]


@pytest.mark.parametrize("text, expected", FINEWEB)
def test_fineweb(text, expected):
    if "one" in text:
        assert reason(FineWeb(max_short_lines=INF), text) == expected
    else:
        assert reason(FineWeb(), text) == expected


SENTENCES = "It is one. It is two. It is three. It is four. It is five."
C4_LINES = [
    (SENTENCES, SENTENCES),
    (f"{SENTENCES}\nwithout an end", SENTENCES),
    (f"{SENTENCES}\nto be continued ...", SENTENCES),
    (f"{SENTENCES}\nTwo words.", SENTENCES),
    (f"{SENTENCES}\nNow three words.", f"{SENTENCES}\nNow three words."),
    (f"{SENTENCES}\nPlease enable JavaScript now.", SENTENCES),
    (f"{SENTENCES}\nWe respect our Privacy Policy.", SENTENCES),
    (f"{SENTENCES}\nThis site uses cookies.", SENTENCES),
    (f"{SENTENCES}\nIt is long {'x' * 1001}.", SENTENCES),
    (f"{SENTENCES}\nIt is long {'x' * 999}.", f"{SENTENCES}\nIt is long {'x' * 999}."),
    (f"  {SENTENCES} \r\n\r\nIt is[1] so[citation needed] é🎉[edit][].", f"{SENTENCES}\nIt is so é🎉."),
    (f"{SENTENCES}\nIt is [12 so [12x].", f"{SENTENCES}\nIt is [12 so [12x]."),
]


@pytest.mark.parametrize("text, expected", C4_LINES)
def test_c4_lines(text, expected):
    assert reason(C4(), text) == ""
    assert stage_texts(C4(), [text]) == [expected]


def test_c4_pages():
    assert reason(C4(), SENTENCES.replace(" It is five.", "")) == "c4_few_sentences"
    assert reason(C4(), f"{SENTENCES}\nSome Lorem Ipsum dolor.") == "c4_lorem_ipsum"
    assert reason(C4(), f"{SENTENCES}\nIt has a {{ in it.") == "c4_curly_bracket"
    assert reason(C4(), "") == "c4_few_sentences"
    page = "dropped pages\nstay as they are"
    assert stage_texts(C4(), [page]) == [page]


def test_c4_counts_lines_of_kept_pages():
    assert C4().apply(to_batch([f"{SENTENCES}\nno end\nno.", "dropped"])).counts == {
        "lines_unended": 1,
        "lines_few_words": 1,
    }


def test_c4_rules_can_be_off():
    off = C4(terminal_punctuation=False, min_words_per_line=0, min_sentences=0)
    assert stage_texts(off, ["a\n  b [1]"]) == ["a\nb "]


@pytest.mark.parametrize(
    "fields, text, expected",
    [
        ({"min_chars": 3}, "äöü", ""),
        ({"min_chars": 4}, "äöü", "few_chars"),
        ({"max_chars": 3}, "äöü", ""),
        ({"max_chars": 2}, "äöü", "many_chars"),
        ({"min_words": 2}, " a\u2003b ", ""),
        ({"min_words": 3}, "a b", "few_words"),
        ({"max_words": 2}, "a b", ""),
        ({"max_words": 1}, "a b", "many_words"),
        ({}, "", "few_chars"),
    ],
)
def test_length(fields, text, expected):
    assert reason(Length(**fields), text) == expected
