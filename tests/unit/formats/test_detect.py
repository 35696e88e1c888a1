"""A file is the same to `prepare`, `stream`, `convert` and `doctor`."""

import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.doctor import examine, kind_of
from forebay.errors import DatasetError, PrepareError, UsageError
from forebay.formats.base import format_names
from forebay.formats.conversion import ConvertOptions
from forebay.formats.detect import detect
from forebay.formats.inputs import ReadOptions
from forebay.formats.report import CheckOptions
from forebay.formats.sources import open_source
from forebay.prepare.inputs import find_inputs, text_formats
from forebay.stream.records import find_records
from support.archives import tar_bytes

ROW = {"text": "hello world, some text"}
LINE = (json.dumps(ROW) + "\n").encode()
HTML = b"<!DOCTYPE html><html><body>404: not found</body></html>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def buffered(write: Callable[[io.BytesIO], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def torch_file() -> bytes:
    def write(file):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", b"x")

    return buffered(write)


def safetensors(blank: str = "") -> bytes:
    header = blank + json.dumps({"t": {"dtype": "U16", "shape": [4], "data_offsets": [0, 8]}})
    return len(header).to_bytes(8, "little") + header.encode() + bytes(8)


PARQUET = buffered(lambda file: pq.write_table(pa.table({"text": ["a", "b"]}), file))
TOKENS = np.arange(300, dtype=np.uint16)
CASES = {
    "lines.jsonl": (LINE * 3, "jsonl"),
    "mark.jsonl": (b"\xef\xbb\xbf" + LINE * 3, "jsonl"),
    "blank_first.jsonl": (b"\n" + LINE * 3, "jsonl"),
    "lists.jsonl": (b'["a","b"]\n["c","d"]\n', "jsonl"),
    "empty.jsonl": (b"", "jsonl"),
    "lines": (LINE * 2, "jsonl"),
    "lines.gz": (gzip.compress(b"") + gzip.compress(LINE * 3), "jsonl"),
    "lines.xz": (lzma.compress(LINE * 3), "jsonl"),
    "lines.bz2": (bz2.compress(LINE * 5000), "jsonl"),
    "pretty.json": (json.dumps(ROW, indent=1).encode(), "json"),
    "list": (json.dumps([ROW] * 3).encode(), "json"),
    "rows.tsv.gz": (gzip.compress(b"text\tn\nhello\t1\n"), "csv"),
    "latin": ("café crème ".encode("latin-1") * 5, "text"),
    "wide.jsonl": (('{"text": "hello"}\n' * 3).encode("utf-16"), "jsonl"),
    "p5.md": (b"P5\nis a format and this a text\n" * 3, "text"),
    "image.bin": (b"P5\n# made by hand\n2 2 255\n\1\2\3\4", "images"),
    "picture": (b"BM" + (70).to_bytes(4, "little") + bytes(64), "images"),
    "cut.parquet": (PARQUET[:-20], "parquet"),
    "samples.tar": (tar_bytes({"0.txt": b"hello"}), "webdataset"),
    "safetensors.bin": (safetensors(), "safetensors"),
    "blank.safetensors": (safetensors("  "), "safetensors"),
    "arrays": (buffered(lambda file: np.savez(file, a=np.ones(3))), "npz"),
    "tokens.npy": (buffered(lambda file: np.save(file, TOKENS)), "npy"),
    "no_header.npy": (TOKENS.tobytes(), "raw tokens"),
    "idx_like.bin": (np.array([0, 0x0108, 7, 9, 11, 13], np.uint16).tobytes(), "raw tokens"),
    "torch.bin": (torch_file(), ""),
    "noise": (bytes(range(256)) * 20, ""),
}
LAX = ConvertOptions(input_dtype="uint16")


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_same_to_all(name, tmp_path):
    data, expected = CASES[name]
    path = tmp_path / name
    path.write_bytes(data)
    result = detect(path)
    assert (result.format, result.problem) == (expected, "")
    assert expected == "" or expected in format_names()
    assert kind_of(path, CheckOptions()) == (expected or "unknown")
    # prepare and stream: from a directory, what is no text is skipped with its reason; named by the user, refused.
    (tmp_path / "beside.md").write_text("a text")
    sources = {Path(item.path).name: item for item in find_inputs(tmp_path, ReadOptions()).files}
    if expected in text_formats():
        assert sources[name].format == expected and sources[name].compression == result.compression
        assert find_records([path], ReadOptions()).identity
    else:
        assert name not in sources
        for opens in (find_inputs, lambda path, options: find_records([path], options)):
            with pytest.raises(PrepareError, match=expected or "expected one of"):
                opens(path, ReadOptions())
    # convert: a table or tokens, or an error that names the file.
    try:
        source = open_source(path, ConvertOptions())
    except (DatasetError, UsageError) as error:
        refused = ("json", "html", "text", "", "raw tokens")  # What no table holds, and tokens without a type.
        assert expected in refused or name in ("cut.parquet", "blank.safetensors", "lists.jsonl") or not data, error
        assert name in str(error)
    else:
        assert source.format == ("vector" if expected == "npy" else expected)
        assert name != "mark.jsonl" or source.schema.names == ["text"]


@pytest.mark.parametrize("suffix", [".parquet", ".csv.gz", ".safetensors", ".bin"])
@pytest.mark.parametrize("data, says", [(HTML, "server sent an error page"), (POINTER, "git lfs pull")])
def test_a_failed_download_is_an_error_that_says_so(suffix, data, says, tmp_path):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(data)
    (tmp_path / "beside.jsonl").write_bytes(LINE)
    for opens in (find_inputs, lambda path, options: find_records([path], options)):
        with pytest.raises(PrepareError, match=says):
            opens(path, ReadOptions())
    (skipped,) = find_inputs(tmp_path, ReadOptions()).skipped
    read = suffix in (".parquet", ".csv.gz")  # Formats that prepare reads.
    assert (skipped.path, skipped.status) == (str(path), "failed" if read else "skipped")
    assert (says if read else "as its name says") in skipped.reason
    for options in (ConvertOptions(), LAX):
        with pytest.raises(DatasetError, match=says):
            open_source(path, options)
    with pytest.raises(DatasetError, match=says):
        open_source(tmp_path, ConvertOptions())
    for value in (path, tmp_path):
        report = next(item for item in examine([value], CheckOptions()) if item.path == path)
        assert [(item.fault, says in f"{item.evidence} {item.advice}") for item in report.findings] == [
            ("not-the-data", True)
        ]


@pytest.mark.parametrize(
    "magic, kind", [(b"PK\x03\x04", "ZIP"), (b"7z\xbc\xaf\x27\x1c", "7-Zip"), (b"Rar!\x1a\x07", "RAR")]
)
def test_an_archive_is_named_and_is_to_be_unpacked(magic, kind, tmp_path):
    path = tmp_path / "stackoverflow.com"
    path.write_bytes(magic + bytes(64))
    with pytest.raises(PrepareError, match=rf"got a {kind} archive .*Unpack or convert it first\.$"):
        find_inputs(path, ReadOptions())
    (tmp_path / "beside.jsonl").write_bytes(LINE)
    (skipped,) = find_inputs(tmp_path, ReadOptions()).skipped
    assert skipped.reason == f"a {kind} archive"
