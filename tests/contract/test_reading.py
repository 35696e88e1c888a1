"""What comes out of the readers of text is what is in the file: nothing lost, falsified or misread."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.preparing import prepare, read_records, write_jsonl

MAIL = "From a@b Sat Jan  3 01:05:34 2004\n"
WIKI = "<mediawiki><siteinfo/>%s</mediawiki>"
PAGE = "<page><title>T</title><ns>0</ns><id>1</id><revision>%s<text>%s</text></revision></page>"


def table(*groups: list[Any], kind: Any = None) -> bytes:
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, pa.schema([("text", kind or pa.string())])) as writer:
        for group in groups:
            writer.write_table(pa.table({"text": pa.array(group, kind or pa.string())}))
    return sink.getvalue()


def warc(*blocks: str | bytes, head: str = "WARC-Type: response") -> bytes:
    packed = [block.encode() if isinstance(block, str) else block for block in blocks]
    records = (b"WARC/1.0\r\n%s\r\nContent-Length: %d\r\n\r\n%s\r\n\r\n" % (head.encode(), len(b), b) for b in packed)
    return b"".join(records)


CASES: dict[str, tuple[str | bytes, str]] = {
    # Ordinary absences.
    "a.parquet": (table([], ["a"], [], ["b", None], []), "a|b|~"),
    "no-groups.parquet": (table(), ""),
    "null.parquet": (table([None, None], kind=pa.null()), "~|~"),
    "zero.parquet": ("", ""),
    "zero.arrow": ("", ""),
    "zero.jsonl": ("", ""),
    "zero.warc": ("", ""),
    "zero.mbox": ("", ""),
    "zero.tar": (bytes(10240), ""),
    "zero-articles.xml": ("", ""),
    "null.jsonl": ('{"text":null}\n{"id":1}\n{"text":"a"}\n{"text":" \\n"}\n{}\n', "~|~|a|~|~"),
    "dots.jsonl text_key=page.text": ('{"page":null}\n{"page":{"text":"a"}}\n{"page":{}}\n', "~|a|~"),
    "no-key.jsonl": ('{"body":"a"}\n{"id":1}\n', "~|~|!'text', got nothing among body"),
    "pairs.jsonl prompt_key=p response_key=r": (
        '{"p":"a","r":null}\n{"r":"b"}\n{"p":"a","r":""}\n{"p":"a","r":"b"}\n', "~|~|~|ab"),
    "turns.jsonl messages_key=m": (
        '{"m":[]}\n{"m":null}\n{"m":[{"role":"user","content":null}]}\n{"m":[{"role":"user","content":'
        '[{"type":"text","text":null},{"type":"text","text":"a"}]}]}\n', "~|~|~|a"),
    "turns.csv messages_key=m": ('m\n""\n"[]"\n"[{""role"":""user"",""content"":""a""}]"\n', "~|~|a"),
    "list.json": ("[]", ""),
    "blank.json": (" \n", ""),
    "head.csv": ("id,text\n", ""),
    "cells.csv": ("id,text\n1,\n2,a\n", "~|a"),
    "info.warc": (warc("", head="WARC-Type: warcinfo"), ""),
    "status.warc": (warc("HTTP/1.1 204 N\r\n\r\n", "HTTP/1.1 304 N\r\n\r\n"), ""),
    "length.warc": (warc("", head="WARC-Type: conversion"), "~"),
    "head.warc": (warc("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 99\r\n\r\n"), "~"),
    "a.mbox": (f"{MAIL}\n\n{MAIL}Subject: x\n\n\n{MAIL}Subject: y\n\na\n", "~|~|a"),
    "a-articles.xml": (WIKI % (PAGE % ("", "") + PAGE % ("", "a")), "~|T\n\na"),
    "Posts.xml": ('<posts>\n<row Id="1" PostTypeId="1" />\n<row Id="2" PostTypeId="2" Body="a" />\n</posts>', "~|a"),
    "reddit.jsonl format=reddit": ('{"subreddit":"s","body":null}\n{"subreddit":"s","body":"a"}\n', "a"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_documents_absences_and_rejects(tmp_path: Path, case: str) -> None:
    """`~` is an absence, `!…` a reject whose reason has these words, anything else the text of a document."""
    (name, *settings), (data, words) = case.split(" "), CASES[case]
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    options = dict(setting.split("=") for setting in settings)
    got = [
        f"!{r.problem}" if r.problem else re.sub("[\ufdd0-\ufddf]", "", r.text) for r in read_records(path, **options)
    ]
    expected = words.split("|") if words else []
    assert len(got) == len(expected), got
    for text, wanted in zip(got, expected):
        assert wanted == (text if text.strip() else "~") or (wanted[0] == text[:1] == "!" and wanted[1:] in text), got


def test_an_absence_is_counted_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part whose records lack the key that others of the file have is no fault; a file of none is."""
    monkeypatch.setattr("forebay.formats.text.SPLIT_BYTES", 5000)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": None}, {"id": 1}] * 1000 + [{"text": "a"}])
    result = prepare(path, tmp_path / "d")
    assert (result.documents_in, result.documents_out, result.dropped) == (2001, 1, {"empty": 2000})
    assert any(r.failed for r in read_records(path, text_key="body"))
    path.write_text("broken\n" * 1500)
    assert all(r.failed == ("the rest is left out" in r.problem) for r in read_records(path, max_malformed=0.1))
