"""`[read.columns]`: every format with fields passes those that it has, by kind; others are NaN or empty."""

from pathlib import Path

import pyarrow.parquet as pq

from forebay.formats.records import Record
from support.preparing import prepare, read_records, write_jsonl


def records(path: Path, columns: dict[str, str]) -> list[Record]:
    return read_records(path, columns=columns)


def test_fields_of_dumps_are_columns(tmp_path):
    posts = tmp_path / "Posts.xml"
    row = '<row Id="1" PostTypeId="1" Score="7" Tags="&lt;a&gt;" CreationDate="2020-01-02" Body="words" />'
    posts.write_text(f"<posts>\n{row}\n</posts>\n")
    assert records(posts, {"Score": "number", "Tags": "text"})[0].values == (7.0, "<a>")
    pages = tmp_path / "pages-articles.xml"
    revision = "<revision><id>9</id><timestamp>2020-01-02T03:04:05Z</timestamp><text>Words.</text></revision>"
    page = f"<page><title>A</title><ns>0</ns><id>3</id>{revision}</page>"
    pages.write_text(f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">\n{page}\n</mediawiki>\n')
    assert records(pages, {"title": "text", "timestamp": "text"})[0].values == ("A", "2020-01-02T03:04:05Z")
    comment = {"body": "words", "subreddit": "a", "link_id": "t3_1", "score": 5}
    reddit = write_jsonl(tmp_path / "comments", [comment])
    assert records(reddit, {"subreddit": "text", "score": "number"})[0].values == ("a", 5.0)


def test_columns_are_filtered_and_written(tmp_path):
    """From a tree of code to Parquet: documents of one licence, with their language."""
    (tmp_path / "a").mkdir()
    for name, text in (("x.py", "# SPDX-License-Identifier: MIT\n"), ("y.c", "int a;\n"), ("z.rs", "// words\n")):
        (tmp_path / "a" / name).write_text(text)
    settings = {
        "read": {"format": "code", "columns": {"language": "text", "licence": "text"}},
        "select": [{"column": "language", "one_of": ["python", "c"]}, {"column": "licence", "one_of": ["MIT"]}],
    }
    prepare(str(tmp_path / "a"), tmp_path / "out", to="parquet", settings=settings)
    (row,) = pq.read_table(tmp_path / "out/text").to_pylist()
    assert (row["id"], row["language"], row["licence"]) == ("a/x.py", "python", "MIT")
