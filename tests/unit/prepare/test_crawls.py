"""WARC, WET and ARC by hand, damaged on purpose; `tests/slow/prepare/test_prepare_data.py` has real ones."""

import gzip
import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.formats.http_message import body_text
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
from forebay.formats.records import Record
from forebay.formats.warc import Warc
from support.shared_data import shared_data


def source(path: Path) -> InputFile:
    packed = {".gz": "gz", ".bad": "gz", ".lz4": "lz4"}.get(path.suffix, "")
    return InputFile(str(path), path.name, "warc", packed, path.stat().st_size, "")


def documents(path: Path, **options: Any) -> list[Record]:
    return list(Warc().read_text(InputSplit((source(path),)), ReadOptions(**options)))


def warc_record(
    body: bytes, kind: str = "conversion", mime: str = "text/plain", length: int | None = None, url: str = "http://a/"
) -> bytes:
    size = len(body) if length is None else length
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:1>\r\nWARC-Target-URI: {url}\r\n"
    return f"{head}Content-Type: {mime}\r\nContent-Length: {size}\r\n\r\n".encode() + body + b"\r\n\r\n"


def texts(records: list[Record]) -> list[str]:
    return [record.text for record in records if not record.problem]


def test_a_damaged_member_costs_itself_alone(tmp_path):
    members = [gzip.compress(warc_record(f"text {i} ".encode() * 500), mtime=0) for i in range(5)]
    for index in (0, 2, 4):
        for position in (12, len(members[index]) // 2, len(members[index]) - 6):  # deflate data, and the checksum
            broken = list(members)
            broken[index] = members[index][:position] + b"\xff\xfe" + members[index][position + 2 :]
            path = tmp_path / "a.warc.gz"
            path.write_bytes(b"".join(broken))
            result = documents(path)
            assert texts(result) == [f"text {i} " * 500 for i in range(5) if i != index], (index, position)
            assert [r.location[:5] for r in result if r.problem] == ["byte "]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [0, 5, 40, 10_000, None])
def test_wrong_lengths(tmp_path, length, packed):
    data = warc_record(b"the first text", length=length) + warc_record(b"the second")
    path = tmp_path / ("a.warc.gz" if packed else "a.warc")
    path.write_bytes(gzip.compress(data) if packed else data)
    assert texts(documents(path)) == ["the first text", "the second"]


def test_caps(tmp_path):
    bomb = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\n\r\n"
    bomb += gzip.compress(b"<html>" + b"a" * 3_000_000)
    path = tmp_path / "a.warc"
    path.write_bytes(
        warc_record(b"x" * 200_000) + warc_record(bomb, "response", "application/http") + warc_record(b"after")
    )
    result = documents(path, max_document_bytes=100_000)
    assert [("max_document_bytes" in r.problem) for r in result] == [True, True, False]
    assert texts(result) == ["after"]


def test_character_sets():
    text = "naïve café – Ελληνικά"
    assert body_text(text.encode(), "iso-8859-1", True) == text  # valid UTF-8 is believed before a header
    assert body_text("café".encode("latin-1"), "iso-8859-1", True) == "café"
    assert body_text(b"\x93quoted\x94", "iso-8859-1", True) == "“quoted”"  # as browsers read it
    assert body_text("日本語".encode("iso-2022-jp"), "iso-2022-jp", False) == "日本語"


def test_arc_versions(tmp_path):
    head = b"filedesc://a.arc 0.0.0.0 20080430204825 text/plain 3\nabc\n"
    body = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>hello"
    item = b"http://a.b/with a blank 1.2.3.4 20080430204825 text/html %d\n%s\n" % (len(body), body)
    two = b"http://a.b/2 1.2.3.4 20080430204825 text/html 200 - - 99 a.arc %d\n%s\n" % (len(body), body)
    path = tmp_path / "a.arc"
    with_length = body.replace(b"\r\n\r\n", b"\r\nContent-Length: 11\r\n\r\n")
    last = b"http://a.b/3 1.2.3.4 20080430204825 text/html 9999\n" + with_length  # as much as HTTP says
    without = b"http://a.b/4 1.2.3.4 20080430204825 text/html -1\n" + body + b"\n"
    path.write_bytes(head + item + without + two + last)
    result = documents(path)
    assert [(r.url, r.text) for r in result if not r.problem] == [
        ("http://a.b/with a blank", "<html>hello"),
        ("http://a.b/2", "<html>hello"),
        ("http://a.b/3", "<html>hello"),
    ]
    assert [r.problem for r in result if r.problem] == ["an ARC record without a length"]


@given(st.binary(max_size=400), st.integers(0, 3), st.booleans())
def test_no_garbage_hides_what_follows(garbage, index, packed):
    if b"WARC/" in garbage or b"\x1f\x8b" in garbage:
        return
    parts = [gzip.compress(warc_record(b"text %d" % i)) if packed else warc_record(b"text %d" % i) for i in range(3)]
    parts.insert(index, garbage if packed else garbage + b"\n")
    given_source = InputFile("memory", "memory", "warc", "gz" if packed else "", 0, "")
    data = io.BytesIO(b"".join(parts))
    with mock.patch("forebay.formats.warc.open_input", lambda *_: data), mock.patch("forebay.formats.warc._TRIM", 100):
        result = list(Warc().read_text(InputSplit((given_source,)), ReadOptions()))
    assert [text[:6] for text in texts(result)] == ["text 0", "text 1", "text 2"]


def test_hostile_archives_are_read(tmp_path):
    path = tmp_path / "a.warc"
    for part in (
        b"WARC/1.0\r\n",
        b"WARC/1.0\nA:\n\n",
        b"http://a 1.1.1.1 20080101 a 5\n",
        b"\n\n",
        b"a:b 1 2 3\n",
        b"\r",
    ):
        path.write_bytes(part * (100_000 // len(part)) + b"\n" + warc_record(b"text"))
        assert texts(documents(path))[-1:] == ["text"], part
    path = tmp_path / "b.warc.gz"
    path.write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\0" * 20_000)
    assert [r.problem[:11] for r in documents(path)] == ["gzip member"]


def response(body: str, mime: str, url: str, status: int = 200) -> bytes:
    block = f"HTTP/1.1 {status} X\r\nContent-Type: {mime}\r\n\r\n{body}".encode()
    return warc_record(block, "response", "application/http; msgtype=response", url=url)


def test_files_for_programs_are_no_documents(tmp_path):
    page = "<html><body><p>A page.</p></body></html>"
    retained = [("http://a/page", "text/html"), ("http://a/notes.txt", "text/plain"), ("http://a/x.xml", "text/html"),
            ("http://a/about/robots", "text/plain"), ("http://a/p?f=x.htc", "text/html")]  # fmt: skip
    remaining = [("http://a/robots.txt", "text/plain"), ("http://a/robots.txt?v=1", "text/html"),
            ("http://a/pie.htc", "text/plain"), ("http://a/list.xspf", "text/plain"),
            ("http://a/feed.xml", "text/plain"), ("http://a/app.js", "text/plain"),
            ("dns:a", "text/plain")]  # fmt: skip
    path = tmp_path / "a.warc"
    path.write_bytes(b"".join(response(page, mime, url) for url, mime in retained + remaining))
    assert [record.url for record in documents(path)] == [url for url, _ in retained]


def test_an_archive_without_documents_says_what_it_has(tmp_path):
    parts = [response("x", "image/png", "http://a/"), response("x", "text/html", "http://b/", 404)] * 2
    (tmp_path / "a.warc").write_bytes(b"".join([*parts, warc_record(b"GET / HTTP/1.1", "request", "application/http")]))
    (record,) = documents(tmp_path / "a.warc")
    others = record.problem.partition("expected responses of HTML or plain text, got none: ")[2].split("; ")
    assert record.failed and sorted(others) == ["1 × request record", "2 × HTTP status 404", "2 × image/png"]


def test_metadata_of_a_crawl_says_what_to_name_in_its_place():
    """A WAT file of CommonCrawl, which holds links and headers of pages, and no text."""
    (record,) = documents(shared_data("warc/whirlwind/whirlwind.warc.wat.gz"))
    assert record.failed and "A WAT file has no text of its pages: name the crawl's WARC or WET file" in record.problem
