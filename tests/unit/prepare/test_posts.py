"""StackExchange and Reddit dumps."""

import json
from pathlib import Path

from support.preparing import read_records


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


def test_posts_and_damage(tmp_path):
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
    result = read_records(path, max_document_bytes=2000)
    assert [(r.id, r.text) for r in result if not r.problem] == [
        ("1", "How &lt; why\n\nSome text & more"),
        ("3", "Some text & more"),
        ("6", "Some text & more"),
    ]
    size = len(row(5, body="x" * 3000))
    assert [r.problem for r in result if r.problem] == [
        "a row that does not end",
        "a row without Id",
        f"a line of {size} bytes is longer than max_document_bytes, 2000",
    ]
    path.write_bytes(path.read_bytes().replace(b"text", b"\xff\xfe", 1))
    assert "not UTF-8" in read_records(path)[0].problem


def comment(number: int, body: str = "words", **more: object) -> dict:
    return {"id": f"c{number}", "body": body, "subreddit": "s", "link_id": "t3_x", "score": number, **more}


def test_a_reddit_dump(tmp_path):
    things = [
        comment(1, "a &gt; b"),
        comment(2, "[deleted]"),
        comment(3, "[removed]"),
        comment(4, permalink="/r/s/comments/x/_/c4/", name="t1_c4"),
        {"id": "x", "title": "Title", "selftext": "Body", "subreddit": "s", "score": 5},
        {"id": "y", "title": "Link", "selftext": "", "subreddit": "s", "score": 5},
        {"id": "z", "title": "Gone", "selftext": "[removed]", "subreddit": "s"},
        {"id": "w", "subreddit": "s"},
        comment(9, body=7),
    ]
    lines = [json.dumps(thing).encode() for thing in things]
    lines.insert(3, b'{"id": "broken')
    path = tmp_path / "RC_2020-01"
    path.write_bytes(b"\n".join(lines))
    result = read_records(path)
    good = {r.id: (r.text, r.url) for r in result if not r.problem}
    assert [*good] == ["c1", "t1_c4", "x", "y"]
    assert good["c1"] == ("a > b", "https://www.reddit.com/r/s/comments/x/_/c1")
    assert good["t1_c4"] == ("words", "https://www.reddit.com/r/s/comments/x/_/c4/")
    assert (good["x"][0], good["y"][0]) == ("Title\n\nBody", "Link")
    assert [r.problem[:8] for r in result if r.problem] == ["not JSON", "expected", "expected"]
