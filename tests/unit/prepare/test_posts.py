"""StackExchange and Reddit dumps."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import zstandard

from forebay.formats.base import Format
from forebay.formats.detect import detect
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
from forebay.formats.records import Record
from forebay.formats.reddit import Reddit
from forebay.formats.stackexchange import StackExchange
from support.shared_data import shared_data


def read(format: Format, path: Path, compression: str = "", **options: Any) -> list[Record]:
    source = InputFile(str(path), path.name, format.name, compression, path.stat().st_size, "")
    return list(format.read_text(InputSplit((source,)), ReadOptions(**options)))


def row(
    number: int,
    body: str = "&lt;p&gt;Some &lt;b&gt;text&lt;/b&gt; &amp;amp; more&lt;/p&gt;",
    kind: int = 1,
    more: str = "",
) -> str:
    return f'  <row Id="{number}" PostTypeId="{kind}" Score="{number}" Body="{body}" {more}/>\n'


def posts(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "Posts.xml"
    path.write_text('\ufeff<?xml version="1.0"?>\n<posts>\n' + "".join(rows) + "</posts>")
    return path


def test_real_posts() -> None:
    path = shared_data("stackexchange") / "coffee/Posts.xml"
    result = read(StackExchange(), path)
    rows = [r.attrib for r in ElementTree.parse(path).getroot() if r.get("PostTypeId") in ("1", "2")]
    assert [r.id for r in result] == [r["Id"] for r in rows]
    assert len(result) == 552
    assert not any(r.problem for r in result)
    assert [r.text.startswith(r2["Title"]) for r, r2 in zip(result, rows) if "Title" in r2].count(False) == 0
    assert rows[0]["PostTypeId"] == "1"
    assert not any("<p>" in r.text for r in result)


def test_posts_and_damage(tmp_path: Path) -> None:
    path = posts(
        tmp_path,
        row(1, more='Title="How &amp;lt; why"'),
        '  <row Id="2" PostTypeId="1" Body="cut off\n',
        row(3, kind=2),
        '  <row PostTypeId="1" Body="x" />\n',
        row(4, kind=5),
        row(5, body="x" * 3000),
        row(6),
    )
    result = read(StackExchange(), path, max_document_bytes=2000)
    assert [(r.id, r.text) for r in result if not r.problem] == [
        ("1", "How &lt; why\n\nSome text & more"),
        ("3", "Some text & more"),
        ("6", "Some text & more"),
    ]
    size = len(row(5, body="x" * 3000))
    assert [r.problem for r in result if r.problem] == [
        "a row that does not end",
        "a row without Id or Body",
        f"a line of {size} bytes is longer than max_document_bytes, 2000",
    ]
    path.write_bytes(path.read_bytes().replace(b"text", b"\xff\xfe", 1))
    assert "not UTF-8" in read(StackExchange(), path)[0].problem


def comment(number: int, body: str = "words", **more: object) -> dict[str, object]:
    return {"id": f"c{number}", "body": body, "subreddit": "s", "link_id": "t3_x", "score": number, **more}


def test_reddit_dump_with_a_long_window(tmp_path: Path) -> None:
    things = [
        comment(1, "a &gt; b"),
        comment(2, "[deleted]"),
        comment(3, "[removed]"),
        comment(4, permalink="/r/s/comments/x/_/c4/", name="t1_c4"),
        {"id": "x", "title": "Title", "selftext": "Body", "subreddit": "s", "score": 5},
        {"id": "y", "title": "Link", "selftext": "", "subreddit": "s", "score": 5},
        {"id": "z", "title": "Gone", "selftext": "[removed]", "subreddit": "s"},
        {"id": "w", "subreddit": "s"},
        comment(9, body=7),  # type: ignore[arg-type]
    ]
    lines = [json.dumps(thing).encode() for thing in things]
    lines.insert(3, b'{"id": "broken')
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "RC_2020-01.zst"
    data = b"\n".join(lines)
    path.write_bytes(compressor.compress(data) + compressor.flush())
    assert zstandard.get_frame_parameters(path.read_bytes()).window_size == 1 << 31
    result = read(Reddit(), path, "zst", max_window_bytes=1 << 31)
    assert [(r.id, r.text) for r in result if not r.problem] == [
        ("c1", "a > b"),
        ("t1_c4", "words"),
        ("x", "Title\n\nBody"),
        ("y", "Link"),
    ]
    assert [r.url for r in result if not r.problem][:2] == [
        "https://www.reddit.com/r/s/comments/x/_/c1",
        "https://www.reddit.com/r/s/comments/x/_/c4/",
    ]
    problems = [r.problem for r in result if r.problem]
    assert [p[:8] for p in problems] == ["not JSON", "expected", "expected"]


def test_they_are_detected() -> None:
    def format_of(head: bytes) -> str:
        return detect(io.BytesIO(head)).format

    assert format_of(json.dumps(comment(1)).encode()) == "reddit"
    assert format_of(b'{"text": "x", "subreddit": "s", "body": "y"}') == "jsonl"
    assert format_of('\ufeff<?xml version="1.0"?>\n<posts>\n'.encode()) == "stackexchange"
