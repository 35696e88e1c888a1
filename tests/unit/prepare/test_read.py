"""Reading: what each format gives, how it is known, and how it is cut."""

import gzip
import hashlib
import json
import struct
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.convert import convert
from forebay.errors import PrepareError, UsageError
from forebay.formats.conversion import ConvertOptions
from forebay.formats.inputs import ReadOptions
from forebay.formats.records import PROMPT_MARK, RESPONSE_MARK
from forebay.prepare.inputs import find_inputs, split_files
from support.archives import tar_bytes
from support.foreign_datasets import made_table
from support.preparing import good_texts, problems, write_jsonl
from support.preparing import read_records as records


def test_text_and_html_files_are_documents(tmp_path):
    files = {
        "a.txt": b"\xef\xbb\xbfOne",
        "b.html": b"<!DOCTYPE html><p>Two",
        "binary.html": hashlib.shake_128(b"seed").digest(5000),
        "c": b"<html>Three",
        "damaged.txt": "schön müde ".encode() * 9 + b"\xff",
        "latin.html": "<p>Käse für Jürgen".encode("latin-1"),
        "latin.txt": "müde".encode("latin-1"),
        "main.rs": b"fn main() {}",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    pages = ["<!DOCTYPE html><p>Two", "<html>Three", "<p>Käse für Jürgen"]
    got = records(tmp_path)
    assert [r.text for r in got if r.html and not r.problem] == pages
    assert [r.text for r in got if not r.html and not r.problem] == ["One", "müde", "fn main() {}"]
    unreadable = "expected HTML, got bytes that are text in no encoding"
    assert problems(tmp_path) == [unreadable, "not UTF-8: invalid start byte at byte 117"]


def test_unknown_files_are_passed_over_unless_named(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / ".hidden.txt").write_text("b")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "b.txt").write_text("b")
    for index in range(20):  # Small files share a split.
        (tmp_path / f"a{index}.txt").write_text("a")
    result = find_inputs(tmp_path, ReadOptions(), leave_out=tmp_path / "out")
    assert len(result.files) == 21 and len(split_files(result.files, ReadOptions())) == 1
    assert [(Path(item.path).name, item.reason) for item in result.skipped] == [
        (".hidden.txt", "hidden"),
        ("image.png", "a file of the format images, which holds no text"),
    ]
    with pytest.raises(PrepareError, match=r"image\.png: expected one of"):
        find_inputs([tmp_path / "image.png"], ReadOptions())
    assert find_inputs([tmp_path / "image.png"], ReadOptions(format="text")).files[0].format == "text"
    with pytest.raises(UsageError, match="one of auto"):
        find_inputs(tmp_path, ReadOptions(format="docx"))
    with pytest.raises(PrepareError, match="does not exist"):
        find_inputs([tmp_path / "nothing"], ReadOptions())


@given(
    sizes=st.lists(st.integers(0, 60), max_size=40),
    piece=st.integers(1, 200),
    end=st.sampled_from([b"\n", b"\r\n"]),
    last=st.booleans(),
)
def test_pieces_cover_each_line_once(sizes, piece, end, last):
    """Any border may fall anywhere in a line, its newline, or a line that is too long."""
    lines = [json.dumps({"id": i, "text": "x" * size}).encode() for i, size in enumerate(sizes)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "a.jsonl"
        path.write_bytes(end.join(lines) + (end if last else b""))
        patch.setattr("forebay.formats.text.SPLIT_BYTES", piece)
        got = records(path, format="jsonl", max_document_bytes=60)
    ended = [last or i < len(lines) - 1 for i in range(len(lines))]
    short = [len(line) + len(end) * newline <= 60 + newline for line, newline in zip(lines, ended)]
    assert len(got) == len(sizes)
    assert [r.id for r in got if not r.problem] == [str(i) for i, fits in enumerate(short) if fits]


def test_bad_lines_cost_themselves_only(tmp_path):
    good = b'{"id": "g", "text": "good"}\n'
    invalid = {
        b'{"text": "\xff"}': "not UTF-8: invalid start byte at byte 10 of the line",
        b'{"text": "a\0b"}': "not JSON: Invalid control character",
        b'{"text": ': "not JSON",
        b"[" * 100_000: "not JSON: nested too deeply",
        b'{"text": 5}': "expected a string under 'text', got int",
        b"[1]": "expected an object, got list",
        b'{"text": "\\ud800"}': "half a surrogate pair",
        b'{"text": "' + b"x" * 200_000 + b'"}': "a line of 200013 bytes is longer than max_document_bytes",
    }
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + b"".join(line + b"\n" + good for line in invalid) + b"\n\n" + good)
    got = records(path, max_document_bytes=150_000 * 6)
    assert sum(not r.problem for r in got) == len(invalid) + 2 + 1  # the longest line is allowed here
    got = records(path, max_document_bytes=150_000)
    assert [r.text for r in got if not r.problem] == ["good"] * (len(invalid) + 2)
    for record, reported in zip([r for r in got if r.problem], invalid.values(), strict=True):
        assert reported in record.problem or "a line of" in record.problem
        assert record.location.startswith("byte ") and len(record.text) <= 200


def test_noncharacters_of_ours_are_taken_out(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [f"a{PROMPT_MARK}b{RESPONSE_MARK}c"])
    (tmp_path / "b.txt").write_text(f"a{PROMPT_MARK}bc", encoding="utf-8")
    assert good_texts(tmp_path) == ["abc", "abc"]


def test_conversations(tmp_path):
    turns = [{"role": "user", "content": "Hi" + RESPONSE_MARK}, {"role": "assistant", "content": "Ho"}]
    write_jsonl(tmp_path / "a.jsonl", [{"m": turns}, {"m": [{"role": 1}]}])
    pq.write_table(pa.table({"m": [turns]}), tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_text("p,r\nHi,Ho\n")
    (tmp_path / "d.csv").write_text('m\n"' + json.dumps(turns).replace('"', '""') + '"\n')
    write_jsonl(tmp_path / "e.jsonl", [{"m": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}])
    for path in sorted(tmp_path.iterdir()):
        keys = {"prompt_key": "p", "response_key": "r"} if path.name == "c.csv" else {"messages_key": "m"}
        assert good_texts(path, **keys) == [f"{PROMPT_MARK}Hi{RESPONSE_MARK}Ho"], path
    shown = "expected a role and a content, two strings, in message 0 under 'm'"
    assert problems(tmp_path / "a.jsonl", messages_key="m") == [shown]


def test_csv_rows_that_are_wrong(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\r\n1,"a\r\n""b"""\r\n2\r\n3,c,d\r\n4,\xff\r\n5,"' + b"x" * 5000 + b'"\r\n6,good\r\n')
    got = records(path, max_document_bytes=1000)
    assert [(r.id, r.text) for r in got if not r.problem] == [("1", 'a\r\n"b"'), ("6", "good")]
    reported = [r.problem for r in got if r.problem]
    assert reported[:3] == ["expected 2 fields, got 1", "expected 2 fields, got 3", "not UTF-8"]
    assert "longer than max_document_bytes" in reported[3]
    (failed,) = records(path, text_key="body")
    assert failed.failed and "expected a column 'body', got columns id, text" in failed.problem
    (tmp_path / "b.csv").write_text("a;one\nb;two\n")
    assert good_texts(tmp_path / "b.csv", text_key="1") == ["one", "two"]
    # A quote that never ends.
    path.write_bytes(b'id,text\n1,"open\n' + b"2,x\n" * 5000)
    got = records(path, max_document_bytes=1000)
    assert "field larger than field limit" in got[0].problem
    assert len([r for r in got if not r.problem]) > 4000


def test_tables_say_which_columns_there_are(tmp_path):
    pq.write_table(pa.table({"title": ["x"], "n": [1]}), tmp_path / "a.parquet")
    (failed,) = records(tmp_path / "a.parquet", text_key="main")
    assert failed.failed and "expected a text column 'main', got columns title: string, n: int64" in failed.problem
    with pytest.raises(
        PrepareError, match=r"of text named text, content, .*, got title: string, n: int64\. .*text_key"
    ):
        records(tmp_path / "a.parquet")
    raw = pa.StringArray.from_buffers(2, pa.py_buffer(struct.pack("<3i", 0, 1, 3)), pa.py_buffer(b"\xffok"))
    pq.write_table(pa.table({"text": raw}), tmp_path / "c.parquet")
    assert good_texts(tmp_path / "c.parquet") == ["ok"]


def test_parquet_is_cut_by_row_groups(tmp_path, monkeypatch):
    table = pa.table({"text": [str(i) * 10 for i in range(100)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    monkeypatch.setattr("forebay.formats.parquet.SPLIT_BYTES", 300)
    pieces = split_files(find_inputs(tmp_path, ReadOptions()).files, ReadOptions())
    assert len(pieces) > 2 and good_texts(tmp_path) == table["text"].to_pylist()
    assert sum(piece.bytes for piece in pieces) <= (tmp_path / "a.parquet").stat().st_size


def test_tar_samples(tmp_path):
    path = tmp_path / "a.tar"
    long = "deep/" * 40 + "l.txt"
    members = {
        "a.txt": b"A",
        "a.json": b'{"id": 5, "url": "u"}',
        "b.cls": b"1",
        "c.html": b"<p>C",
        "d.tar": tar_bytes({"x.txt": b"hidden"}),
        "e.txt.gz": gzip.compress(b"E"),
        "f.txt": b"\xff",
        "g.txt.gz": gzip.compress(b"G" * 5000),
        "/abs/../h.txt": b"H",
        long: b"L",
        "i.txt": b"i" * 5000,
        "j.txt": b"J",
    }
    path.write_bytes(tar_bytes(members))
    got = records(path, max_document_bytes=1000)
    assert [(r.id, r.text, r.html) for r in got if not r.problem] == [
        ("5", "A", False),
        ("c", "<p>C", True),
        ("e", "E", False),
        ("/abs/../h", "H", False),
        (long[:-4], "L", False),
        ("j", "J", False),
    ]
    assert [r.problem.partition(":")[0] for r in got if r.problem] == [
        "no text member among b.cls",
        "no text member among d.tar",
        "not UTF-8",
        "g.txt.gz",
        "i.txt",
    ]
    assert [r.index for r in got] == list(range(len(got)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar"]


def test_several_fields_make_a_text_in_every_format_of_tables(tmp_path):
    rows = [
        {"id": "1", "title": "Head", "body": "Body", "url": "http://a.org"},
        {"id": "2", "title": "", "body": "Only", "url": ""},
    ]
    nested = [{**row, "n": 5, "choices": {"text": ["one", "two"], "label": [1, 2]}} for row in rows]
    write_jsonl(tmp_path / "a.jsonl", nested)
    table = pa.Table.from_pylist(nested)
    pq.write_table(table, tmp_path / "a.parquet")
    for path in (tmp_path / "a.jsonl", tmp_path / "a.parquet"):
        assert good_texts(path, text_key=("title", "body")) == ["Head\n\nBody", "Only"]
        first, second = records(path, text_key=("*",))
        assert (first.text, second.text) == ("Head\n\nBody\n\none\ntwo", "Only\n\none\ntwo")
        assert (first.fields, first.id, second.id) == (("Head", "Body", "one\ntwo"), "1", "2")
    (tmp_path / "a.csv").write_text("id,title,body,url\n1,Head,Body,http://a.org\n2,,Only,\n")
    assert good_texts(tmp_path / "a.csv", text_key=("*",)) == ["Head\n\nBody", "Only"]
    assert len(problems(tmp_path / "a.jsonl", text_key=("none",))) == 1
    assert "expected columns with text" in problems(tmp_path / "a.parquet", text_key=("none",))[0]


def test_a_record_that_is_too_large_costs_itself_alone(tmp_path):
    path = tmp_path / "a.tfrecord"
    convert(made_table({"text": ["a", "x" * 5000, "b"]}), path, "tfrecord", ConvertOptions())
    assert [r.problem[:8] for r in records(path, max_document_bytes=1000)] == ["", "a record", ""]
