"""Wikitext by hand-made cases, properties and real articles; dumps whole, cut, damaged and hostile."""

import bz2
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.formats import wikipedia
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
from forebay.formats.records import Record
from forebay.formats.wikitext import to_text
from support.paths import read_cases
from support.shared_data import shared_data

MARKUP = ("[[", "]]", "{{", "}}", "<ref", "{|", "|}", "'''")


def read(path: Path, start: int = 0, stop: int = 0, **options: Any) -> list[Record]:
    packed = "bz2" if path.suffix == ".bz2" else ""
    source = InputFile(str(path), path.name, "wikipedia", packed, path.stat().st_size, "")
    return list(wikipedia.Wikipedia().read_text(InputSplit((source,), start, stop), ReadOptions(**options)))


@pytest.mark.parametrize("source, text", read_cases("wikitext")["cases"])
def test_markup(source, text):
    assert to_text(source) == text


@given(
    st.lists(
        st.sampled_from([*MARKUP, "<!--", "-->", "</ref>", "|", "\n", "=", "word ", "<math>", "http://", "[", "]", "*"])
    )
)
def test_any_markup_ends_and_keeps_no_more_than_was_there(parts):
    source = "".join(parts)
    assert to_text(source).count("word") <= source.count("word")


def test_real_articles():
    """`tests/slow/prepare/test_prepare_data.py` compares their ids."""
    (path,) = shared_data("wikipedia").glob("enwiki-latest*.bz2")
    result = read(path)
    assert len(result) == 106 and not any(mark in record.text for mark in MARKUP for record in result)
    assert result[0].url == "https://en.wikipedia.org/wiki/Anarchism" and result[0].text.startswith("Anarchism\n\n")


def page(number: int, text: str, extra: str = "", ns: int = 0) -> str:
    return (
        f"  <page>\n    <title>Page {number}</title>\n    <ns>{ns}</ns>\n    <id>{number}</id>\n{extra}"
        f"    <revision><id>9</id><model>wikitext</model><text>{text}</text></revision>\n  </page>\n"
    )


HEAD = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">\n  <siteinfo><base>https://x.org/wiki/Main</base>'
    '<namespaces><namespace key="6">Dosye</namespace></namespaces></siteinfo>\n'
)


def test_what_is_no_document(tmp_path):
    path = tmp_path / "a.xml"
    pages = [
        page(1, "one [[Dosye:x.jpg|thumb]]"),
        page(2, "#REDIRECT [[Page 1]]"),
        page(3, "#WEITERLEITUNG [[Page 1]]"),
        page(4, "x", '<redirect title="y" />'),
        page(5, "talk", ns=1),
        page(6, "{{only|template}}"),
        page(7, "two"),
        page(8, "code").replace("wikitext", "javascript"),
        page(9, "gone").replace("<text>gone", '<text deleted="deleted">'),
    ]
    path.write_text(HEAD + "".join(pages) + "</mediawiki>")
    assert [(r.index, r.text) for r in read(path) if not r.problem] == [
        (0, "Page 1\n\none"),
        (5, ""),
        (6, "Page 7\n\ntwo"),
    ]
    everything = read(path, options={"namespaces": []})
    assert [r.id for r in everything] == ["1", "5", "6", "7", "8"]
    assert read(path)[0].url == "https://x.org/wiki/Page_1"
    with pytest.raises(UsageError, match="namespaces: expected a list of numbers, got 'x'"):
        read(path, options={"namespaces": "x"})


@pytest.mark.parametrize("size", [1000, 100_000])
def test_pieces_give_each_page_once(tmp_path, size):
    path = tmp_path / "a.xml"
    path.write_text(HEAD + "".join(page(i, f"text {i} " * (i % 50)) for i in range(1, 200)) + "</mediawiki>")
    full, total = read(path), path.stat().st_size
    cut = [r for start in range(0, total, size) for r in read(path, start, min(start + size, total))]
    assert [(r.id, r.text, r.url) for r in cut] == [(r.id, r.text, r.url) for r in full]


def test_damage_costs_a_page(tmp_path):
    good = [page(i, f"text {i}") for i in range(6)]
    for damage in ("<text>\x01</text>", "</revision></oops>", "&undefined;", "<page>", "\x00", "<![CDATA["):
        pages = list(good)
        pages[2] = pages[2].replace("text 2", f"text 2 {damage}")
        path = tmp_path / "a.xml"
        path.write_text(HEAD + "".join(pages) + "</mediawiki>")
        result = read(path)
        ids = [r.id for r in result if not r.problem]
        assert [i for i in ids if i != "2"] == ["0", "1", "3", "4", "5"], damage
        assert any("damaged XML" in r.problem for r in result), damage


def test_hostile_xml(tmp_path):
    path = tmp_path / "a.xml"
    laughs = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10 if i else "lol"}">' for i in range(12))
    path.write_text(f"<!DOCTYPE x [{laughs}]>" + HEAD + page(1, "&l11;") + page(2, "fine") + "</mediawiki>")
    result = read(path)
    assert [r.id for r in result if not r.problem] == ["2"]
    assert "entity declaration" in result[0].problem
    path.write_text(HEAD + page(1, "x" * 300_000) + page(2, "after") + "</mediawiki>")
    result = read(path, max_document_bytes=100_000)
    assert [(r.id, "max_document_bytes" in r.problem) for r in result] == [("1", True), ("2", False)]


@pytest.mark.parametrize("size", [0, 1500])
def test_of_many_revisions_the_last_is_read(tmp_path, size):
    """Earlier ones are let go of as they come, however many they are; so is a text that is too large."""
    revision = "<revision><id>9</id><text>{}</text></revision>"
    many = "".join(revision.format(f"old {i} " * 1000) for i in range(300))
    path = tmp_path / "a.xml"
    last = revision.format("new " + "x" * size)
    full = page(1, "a").replace("<revision>", many + "<revision>", 1).replace("</page>", last + "</page>")
    path.write_text(HEAD + full + page(2, "b") + "</mediawiki>")
    first, second = read(path, max_document_bytes=1000)
    assert second.text == "Page 2\n\nb"
    assert first.id == "1" and "max_document_bytes" in first.problem if size else first.text == "Page 1\n\nnew"


@pytest.mark.parametrize("end", ["</mediawik", "<page><title>x</title>", "<page><revision>", ""])
def test_a_dump_that_ends_early_is_told_once(tmp_path, end):
    path = tmp_path / "a.xml"
    path.write_text(HEAD + page(1, "a") + end)
    assert [(r.id, r.problem[:11]) for r in read(path)] == [("1", ""), ("", "damaged XML")]
    packed = tmp_path / "a.xml.bz2"
    packed.write_bytes(bz2.compress(path.read_bytes())[:-20] + b"garbage")
    assert read(packed)[-1].problem
    path.write_text(HEAD + page(1, "a") + " " * ((256 << 10) - len(HEAD + page(1, "a")) - 11) + "</mediawiki>\n")
    assert [r.problem for r in read(path)] == [""]
