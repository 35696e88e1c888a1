"""Words as they are cut, and what holds for any text."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.prepare.filters import words as module
from forebay.prepare.filters.perplexity import spaced
from forebay.prepare.filters.quality import GopherQuality
from forebay.prepare.filters.word_tables import SPACE, character_table, hash_word
from forebay.prepare.filters.words import hash_points
from support.batches import drop_reasons
from support.words import split_words


@pytest.mark.parametrize(
    "cut",
    [
        "Hello , world !",
        "( Mr. Smith ) said : “ No … ”",
        "I do n't know ; she 's John 's",
        "we 'll go - there at 5 pm",
        "U.S.A. e.g. 3.14 1,000 10 % a.b",
        "http://www.foo-bar.com/A-b?x=1 me@example.org .",
        "3 km 5 kg $ 5 8 + word -word",
        "end . Next and/or this / that",
        "wait ... what .. :) ;-)",
        "naïve テキスト 。 שלום ، 🎉 🎉",
    ],
)
def test_words_are_cut_as_written(cut):
    """The examples have a space where spaCy cuts; glued together where it would cut anyway."""
    assert split_words(cut) == cut.split()


@pytest.mark.parametrize(
    "glued, cut",
    [
        ("(Hello,world!)", "( Hello , world ! )"),
        ("don't won’t cannot I'm John's dogs'", "do n't wo n’t can not I 'm John 's dogs '"),
        ("well-known mother-in-law 10-12 a--b", "well - known mother - in - law 10 - 12 a -- b"),
        ("end.Next e.g., $5.00 50% 3km.", "end . Next e.g. , $ 5.00 50 % 3 km ."),
        ("yes/no a:b x=y 1:30", "yes / no a : b x = y 1:30"),
        ("«Oui»—non “quoted.”", "« Oui»—non “ quoted . ”"),
        ("hi🎉there foo:)", "hi 🎉 there foo :)"),
        ("end....", "end ...."),
    ],
)
def test_glued_words_are_cut(glued, cut):
    assert split_words(glued) == cut.split()


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=200))
def test_words_hold_all_but_white_space(text):
    assert "".join(split_words(text)) == "".join(text.split())


def test_hash_in_both_languages():
    for word in ("the", "é", "🎉🎉", "don't"):
        assert int(hash_points(np.array([ord(c) for c in word], np.uint32), 0, len(word))) == hash_word(word)


def test_table_knows_pythons_white_space():
    table = character_table()
    assert [c for c in range(len(table) - 1) if (table[c] & SPACE != 0) != chr(c).isspace()] == []


def test_long_documents_are_judged_by_their_beginning(monkeypatch):
    clip = module.clip
    monkeypatch.setattr(module, "clip", lambda offsets, data: clip(offsets, data, 1001))
    assert drop_reasons(GopherQuality(), ["é" * 600 + " the and" * 60]) == ["gopher_short"]


def test_spaced_lines():
    texts = pa.array(["Hello, WORLD!\n\n\tIt's é🎉.\x00x", "", "<s> </s>\rß"], pa.large_string())
    stops, data = spaced(texts, 1 << 20)
    rows = [data[a:b].tobytes().decode() for a, b in itertools.pairwise(stops)]
    assert rows == ["hello , world !\nit 's é 🎉 . x\n", "", "< s > < /s >\nß\n"]
