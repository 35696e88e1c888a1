"""Every input is read, or named with the reason why not: links, side files, encodings, files that cannot be read."""

import os
import tempfile
from pathlib import Path

import pytest

from forebay.errors import PrepareError
from forebay.formats.detect import find_encoding
from forebay.formats.inputs import ReadOptions
from forebay.prepare.inputs import find_inputs, read_split, split_files
from forebay.storage.listing import LINK
from forebay.stream.text_stream import TextStream
from support.preparing import read_records

LINE = '{"text": "hello"}\n'


def listed(folder: Path, **how: bool) -> tuple[list[str], dict[str, str]]:
    """Names that are read, and names that are left out with the reason."""
    result = find_inputs(folder, ReadOptions(), **how)
    skipped = {str(Path(item.path).relative_to(folder)): item.reason for item in result.skipped}
    return [str(Path(source.path).relative_to(folder)) for source in result.files], skipped


def test_links_stay_inside_unless_asked(tmp_path):
    folder, other = tmp_path / "in", tmp_path / "other"
    (folder / "sub").mkdir(parents=True)
    (other / "deep").mkdir(parents=True)
    for path in (folder / "sub/a.jsonl", other / "b.jsonl", other / "deep/c.jsonl"):
        path.write_text(LINE)
    links = {"file": other / "b.jsonl", "folder": other, "again": other, "loop": folder, "inner": folder / "sub",
             "own": folder / "sub/a.jsonl", "gone": tmp_path / "gone", "env": Path("/proc/self/environ"),
             "zero": Path("/dev/zero")}  # fmt: skip
    for name, target in links.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe")
    (other / "back").symlink_to(folder)
    read_already, system = "a link to a folder that is read already", "a file of the operating system"
    outside = {"file": LINK, "folder": LINK, "again": LINK, "env": system, "zero": system}
    always = {"loop": read_already, "inner": read_already, "gone": "a link that leads nowhere",
              "pipe": "no regular file (a device, socket or pipe)", "env": system, "zero": system}  # fmt: skip
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        Path(shared, "a.jsonl").write_text(LINE)
        assert listed(Path(shared)) == (["a.jsonl"], {})
    assert listed(folder) == (["own", "sub/a.jsonl"], outside | always)
    files = ["again/b.jsonl", "again/deep/c.jsonl", "file", "own", "sub/a.jsonl"]
    assert listed(folder, follow_links=True) == (files, always | {"again/back": read_already, "folder": read_already})


def test_side_files_are_inputs_where_they_describe_nothing(tmp_path):
    for name in ("a.jsonl", "state.json", "cursor.json", "dataset_info.json", "_b.jsonl"):
        (tmp_path / name).write_text(LINE)
    assert len(listed(tmp_path)[0]) == 5
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/x.toml").write_text('url = "https://a.invalid"\nitems = "data"\n')
    api = {"deep/x.toml": "a request to a JSON API, which is fetched where the command names it"}
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    side = dict.fromkeys(("dataset_info.json", "state.json"), "describes a dataset that lies beside it")
    assert listed(tmp_path) == (["_b.jsonl", "a.jsonl", "cursor.json"], side | api)


def test_what_is_left_out_is_said_once_a_reason(tmp_path):
    for name in ("a.xls", "b.docx", "c", "d\x1b[2J"):
        (tmp_path / name).write_bytes(b"\x01\x02\x03\x04\0\0\1\2")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/x.txt").write_text("x")
    (tmp_path / "empty").touch()
    for name in ("title", "name"):  # of one cause
        (tmp_path / f"{name}.csv").write_text(f"{name}\nhello\n")
    with pytest.raises(PrepareError, match="expected input files, got none") as error:
        find_inputs(tmp_path, ReadOptions())
    assert "left out 1: hidden" in str(error.value) and "left out 4: binary data of no known format" in str(error.value)
    assert "\x1b" not in str(error.value)
    assert "left out 2 that failed, the first because: expected a column of text named text, " in str(error.value)


def test_a_stream_logs_what_it_leaves_out(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text(LINE * 20)
    (tmp_path / "b.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    TextStream(tmp_path, tokenizer="bytes", batch_size=1, seq_len=8)
    assert "left out 1: a file of the format images, which holds no text" in caplog.text
    (tmp_path / "a.csv").write_text("title\nhello\n")
    with pytest.raises(PrepareError, match="expected a column of text"):
        list(TextStream(tmp_path, tokenizer="bytes", batch_size=1, seq_len=8, shuffle=False))


def test_damaged_utf_8_is_not_taken_for_another_encoding():
    words = "schön für Mädchen und Größe ".encode()
    for damaged in (words + b"\xff" + words, b"plain ascii \xff here", b"ends \xe2\x82", words[:-2] + b"\xc3"):
        assert find_encoding(damaged) == ""
    assert find_encoding(bytes(range(256)) * 10) == "" and find_encoding(os.urandom(4096).replace(b"\0", b"\1")) == ""


def test_a_file_that_changes_here_is_no_mixture(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(LINE * 100)
    options = ReadOptions()
    (piece,) = split_files(find_inputs(tmp_path, options).files, options)
    rows = read_split(piece, options)
    next(rows)
    path.write_text(LINE * 101)
    with pytest.raises(PrepareError, match="the input changed while it was read"):
        list(rows)
    with pytest.raises(PrepareError, match="the input changed while it was read"):
        list(read_split(piece, options))


def test_pages_and_texts_beyond_the_first_bytes(tmp_path):
    page = '<html><head><meta charset="iso-8859-2"></head><body>zażółć gęślą jaźń</body></html>'
    (tmp_path / "a.html").write_bytes(page.encode("iso-8859-2"))
    (tmp_path / "b.txt").write_bytes(b"plain " * 20_000 + "Schöne Grüße".encode("latin-1"))
    first, second = read_records(tmp_path)
    assert (first.text, first.html, second.text) == (page, True, "plain " * 20_000 + "Schöne Grüße")
