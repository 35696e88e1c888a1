"""Every registered format through the same cases: detection, damage, empty and hostile files, and the round trips.

What comes back after writing is proved here for every format and on every path (text, rows, tokens), and nowhere else.
"""

import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.convert import convert
from forebay.errors import DatasetError, ForebayError, UsageError
from forebay.formats.base import format_names, formats, get_format, names_with
from forebay.formats.conversion import ConvertOptions
from forebay.formats.detect import detect
from forebay.formats.inputs import InputFile, ReadOptions
from forebay.formats.report import Report
from forebay.formats.tfrecord import masked
from forebay.prepare.inputs import find_inputs, read_split, split_files
from support.foreign_datasets import (
    COLUMNS,
    DOCUMENTS,
    FOREIGN,
    NUM_ROWS,
    STREAM,
    made_table,
    made_tokens,
    read_table,
    read_tokens,
    write_mds,
    write_saved,
)
from support.paths import GOLDEN
from support.peak_memory import peak_growth_mib

OPERATIONS = ("read_text", "open_rows", "open_tokens", "check")
TEXTS = [f"document number {i}, with some words" for i in range(6)]
TOKENS = (np.arange(600, dtype=np.uint32) * 37 % 50_000).astype(np.uint16)
MAX_MIB = 200
NUM_DAMAGED = 20  # Places in each file; tests/slow/fuzz tries many more.


@dataclass(frozen=True)
class Sample:
    """A small sound file or directory of a format.

    `texts`: its documents. `is_exact`: a record without a problem is one of them, whatever was cut off. `is_hashed`:
    checksums cover its data, so that a flipped byte never gives other data without an error.
    """

    files: dict[str, bytes]
    texts: list[str] | None = None
    is_exact: bool = True
    is_hashed: bool = False
    step: int = 1
    dtype: str | None = None
    hostile: dict[str, bytes] = field(default_factory=dict)

    def write(self, folder: Path, changed: dict[str, bytes] | None = None) -> Path:
        """Write it below a new folder; return the file, or the folder if it is a directory of several."""
        shutil.rmtree(folder, ignore_errors=True)
        for name, data in {**self.files, **(changed or {})}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return folder if len(self.files) > 1 else folder / next(iter(self.files))


def buffered(write: Callable[[io.BytesIO], Any]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def warc(kind: str, length: int | None = None) -> bytes:
    records = []
    for text in TEXTS:
        body = text.encode()
        if kind == "response":
            body = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n" + body
        mime = "text/plain" if kind == "conversion" else "application/http"
        head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://a/b\r\nContent-Type: {mime}\r\n"
        records.append(f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body + b"\r\n\r\n")
    return b"".join(records)


def wikipedia() -> bytes:
    pages = "".join(
        f"<page><title>T{i}</title><ns>0</ns><id>{i}</id><revision><id>1</id><text>{text}</text></revision></page>\n"
        for i, text in enumerate(TEXTS)
    )
    return f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">\n{pages}</mediawiki>\n'.encode()


def mail() -> bytes:
    return b"".join(b"From a@b Sat Jan  3 01:05:34 2004\nSubject: a\n\n" + text.encode() + b"\n\n" for text in TEXTS)


def epub() -> bytes:
    opf = "http://www.idpf.org/2007/opf"
    spine = (
        '<manifest><item id="a" href="a.xhtml" media-type="text/html"/></manifest><spine><itemref idref="a"/></spine>'
    )
    members = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": '<container><rootfile full-path="content.opf"/></container>',
        "content.opf": f'<package xmlns="{opf}">{spine}</package>',
        "a.xhtml": f"<html><p>{TEXTS[0]}</p></html>",
    }

    def write(file):
        with zipfile.ZipFile(file, "w") as archive:
            for name, text in members.items():
                archive.writestr(zipfile.ZipInfo(name), text)

    return buffered(write)


def posts() -> bytes:
    rows = "".join(f'<row Id="{i}" PostTypeId="1" Body="{text}" />\n' for i, text in enumerate(TEXTS))
    return f'<?xml version="1.0"?>\n<posts>\n{rows}</posts>\n'.encode()


def npy(shape: str | None = None) -> bytes:
    data = buffered(lambda file: np.save(file, TOKENS))
    return data if shape is None else data.replace(b"(600,), }" + b" " * (len(shape) - 6), f"({shape}, }}".encode())


TABLE = pa.table({"text": TEXTS, "n": pa.array(range(6), pa.int64())})
LINES = b"".join(json.dumps({"text": text, "n": i}).encode() + b"\n" for i, text in enumerate(TEXTS))
SAFETENSORS = json.dumps({"x": {"dtype": "U8", "shape": [4, 3], "data_offsets": [0, 12]}}).encode()
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360000002000001"
    "e221bc330000000049454e44ae426082"
)
PARQUET = buffered(lambda file: pq.write_table(TABLE, file, write_page_checksum=True))


def arrow(file: io.BytesIO):
    with pa.ipc.new_file(file, TABLE.schema) as writer:
        writer.write_table(TABLE)


BIG = 1 << 44
PDF = GOLDEN / "books" / "sample.pdf"
PLAIN = {
    "jsonl": Sample({"a.jsonl": LINES}, TEXTS),
    "json": Sample({"a.json": json.dumps([{"text": text} for text in TEXTS], indent=1).encode()}, TEXTS),
    "csv": Sample({"a.csv": b"text,n\n" + b"".join(f'"{t}",1\n'.encode() for t in TEXTS)}, TEXTS, is_exact=False),
    "text": Sample({"a.txt": TEXTS[0].encode()}, TEXTS[:1], is_exact=False),
    "lines": Sample({"a": "\n".join(TEXTS).encode()}, TEXTS, is_exact=False),
    "html": Sample({"a.html": b"<!DOCTYPE html><html>a page</html>"}, None),
    "parquet": Sample(
        {"a.parquet": PARQUET}, TEXTS, step=7, hostile={"a.parquet": PARQUET[:-8] + b"\xff\xff\xff\x7fPAR1"}
    ),
    "arrow": Sample({"a.arrow": buffered(arrow)}, TEXTS, step=7, is_exact=False),
    "warc": Sample({"a.warc": warc("response")}, TEXTS, is_exact=False, hostile={"a.warc": warc("response", BIG)}),
    "wet": Sample({"a.wet": warc("conversion")}, TEXTS, is_exact=False, hostile={"a.wet": warc("conversion", BIG)}),
    "wikipedia": Sample({"a-articles.xml": wikipedia()}, [f"T{i}\n\n{text}" for i, text in enumerate(TEXTS)]),
    "mbox": Sample({"a.mbox": mail()}, TEXTS, is_exact=False),
    "pdf": Sample({"a.pdf": PDF.read_bytes()}, is_exact=False, step=17),
    "epub": Sample({"a.epub": epub()}, TEXTS[:1], is_exact=False),
    "code": Sample({"a.py": TEXTS[0].encode()}, TEXTS[:1], is_exact=False),
    "stackexchange": Sample({"posts.xml": posts()}, TEXTS),
    "reddit": Sample(
        {
            "a": b"".join(
                json.dumps({"body": text, "subreddit": "a", "link_id": "t3_1"}).encode() + b"\n" for text in TEXTS
            )
        },
        TEXTS,
    ),
    "api": Sample({"a.api.toml": b'url = "http://a/"\nitems = "b"\n'}),
    "npy": Sample({"a.npy": npy()}, step=17, hostile={"a.npy": npy("99999999999,)")}),
    "npz": Sample({"a.npz": buffered(lambda file: np.savez(file, x=TOKENS))}, step=17),
    "llm.c": Sample(
        {"a.bin": struct.pack("<256i", 20240520, 1, 600, *[0] * 253) + TOKENS.tobytes()},
        step=31,
        hostile={"a.bin": struct.pack("<256i", 20240520, 1, (1 << 31) - 1, *[0] * 253) + TOKENS.tobytes()},
    ),
    "raw tokens": Sample({"a.u16": TOKENS.tobytes()}, step=31, dtype="uint16"),
    "images": Sample({"a.png": PNG}),
    "safetensors": Sample(
        {"a.safetensors": len(SAFETENSORS).to_bytes(8, "little") + SAFETENSORS + bytes(12)},
        hostile={"a.safetensors": (1 << 40).to_bytes(8, "little") + SAFETENSORS + bytes(12)},
    ),
}


def hostile_tar(data: bytes) -> bytes:
    """Return an archive whose first member says that it has 8 GiB."""
    head = data[:124] + b"%011o\0" % (8**11 - 1) + data[136:148] + b" " * 8 + data[156:512]
    return head[:148] + b"%06o\0 " % sum(head) + head[156:] + data[512:]


def hostile_tfrecord(data: bytes) -> bytes:
    """Return a file whose first record says that it has 16 TiB."""
    length = BIG.to_bytes(8, "little")
    return length + masked(google_crc32c.value(length)).to_bytes(4, "little") + data[12:]


OF_ROWS = {"webdataset": ("a.tar", hostile_tar), "tfrecord": ("a.tfrecord", hostile_tfrecord)}
HOSTILE = [*(name for name, sample in PLAIN.items() if sample.hostile), *OF_ROWS]
WRITTEN = ("forebay", "bin", "ds", "megatron", "litdata", "shards")
COPIED = {"mds": write_mds, "saved arrow": write_saved}


def files_below(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> dict[str, Sample]:
    created, folder = dict(PLAIN), tmp_path_factory.mktemp("samples")
    for name in WRITTEN:
        out = folder / (f"sample.{name}" if name in ("bin", "ds") else name)
        source = made_tokens(TOKENS, [200, 350, 600])
        convert(source, out, name, ConvertOptions(seq_len=60, eos_id=0, name="sample"))
        dtype = "uint16" if name in ("bin", "ds") else None
        created[name] = Sample(files_below(out), is_hashed=name == "forebay", step=23, dtype=dtype)
    for name, (file, hostile) in OF_ROWS.items():
        convert(made_table({"text": TEXTS}), folder / file, name, ConvertOptions())
        data = (folder / file).read_bytes()
        is_hashed, step = (True, 1) if name == "tfrecord" else (False, 97)
        created[name] = Sample({file: data}, TEXTS, is_hashed=is_hashed, step=step, hostile={file: hostile(data)})
    for name, write in COPIED.items():
        created[name] = Sample(files_below(write(folder / name, np.split(TOKENS, [200, 350]))), step=23)
    return created


@pytest.mark.parametrize("name", format_names())
def test_an_unsupported_operation_is_a_usage_error(name):
    entry = get_format(name)
    assert entry.name == name
    for operation in (*OPERATIONS, "write_tokens", "write_rows"):
        if not entry.supports(operation):
            num_arguments = 3 if operation.startswith("write") else 1 if operation == "open_tokens" else 2
            with pytest.raises(UsageError, match=f"format {name}: expected one that can be"):
                getattr(entry, operation)(*[None] * num_arguments)


@pytest.mark.parametrize("name", format_names())
def test_it_is_detected_by_content_or_suffix(name, samples, tmp_path):
    path = samples[name].write(tmp_path / "a")
    if path.is_dir():
        expected = [] if name in ("megatron", "shards") else [name]
        assert [entry.name for entry in formats() if entry.is_dataset(path)] == expected
        return
    head = path.read_bytes()[:4096]
    if get_format(name).sniff(head):
        nameless = path.rename(tmp_path / "nameless")
        assert detect(nameless).format == name
    else:
        assert name in ("lines", "code", "bin", "ds", "wet") or detect(path).format == name
    for suffix in get_format(name).suffixes:
        empty = tmp_path / f"empty{suffix}"
        empty.touch()
        assert detect(empty).format == name


def read_texts(files: list[InputFile], options: ReadOptions) -> list[str]:
    """Return the documents without a problem; every text can be encoded."""
    records = [record for split in split_files(files, options) for record in read_split(split, options)]
    for record in records:
        record.text.encode()
    return [record.text for record in records if not record.problem]


def read_all(path: Path, name: str, sample: Sample) -> Iterator[tuple[str, Any]]:
    """Yield the result of each operation of a format; None for a ForebayError. Any other error fails the test."""
    entry = get_format(name)
    files = [path] if path.is_file() or name in ("forebay", "saved arrow", "mds", "litdata") else sorted(path.iterdir())
    target = next(file for file in files if file.suffix == ".idx") if name == "megatron" else path
    for operation in OPERATIONS:
        if not entry.supports(operation) or (operation == "read_text" and name == "api"):
            continue
        try:
            match operation:
                case "read_text":
                    file = InputFile(str(path), path.name, name, "", path.stat().st_size, "")
                    yield operation, read_texts([file], ReadOptions(max_document_bytes=100_000))
                case "open_rows":
                    table = entry.open_rows(files, ConvertOptions())
                    got = pa.Table.from_batches(list(table.batches()), table.schema)
                    got.validate()
                    yield operation, got.to_pydict() if name != "images" else None
                case "open_tokens":
                    dataset = entry.open_tokens(target, sample.dtype)
                    yield operation, [dataset.open_slice(i).tokens.tolist() for i in range(dataset.num_slices)]
                case "check":
                    report = Report(target)
                    entry.check(target, report)
                    yield operation, not report.findings
        except ForebayError:
            yield operation, None


@pytest.mark.parametrize("name", format_names())
def test_a_sound_file_is_read_and_an_empty_one_has_no_content(name, samples, tmp_path):
    sample = samples[name]
    got = dict(read_all(sample.write(tmp_path / "a"), name, sample))
    rows_of_tokens = ("open_rows",) if name == "forebay" else ()
    assert all(value is not None for key, value in got.items() if key not in rows_of_tokens) or name == "images"
    if sample.texts is not None:
        assert got["read_text"] == sample.texts
    assert got.get("check", True)
    if "open_tokens" in got and name != "forebay":
        assert [token for part in got["open_tokens"] for token in part] == TOKENS.tolist()
    for emptied in sample.files:
        for operation, value in read_all(sample.write(tmp_path / "a", {emptied: b""}), name, sample):
            if operation == "read_text" and name not in ("text", "code", "html", "pdf", "epub"):
                assert not value
            if operation == "check" and len(sample.files) == 1:
                assert not value


def damaged(data: bytes, step: int, is_cut: bool) -> Iterator[bytes]:
    """Yield the data cut, or with a bit flipped, at places over all of it, and more at its head and end."""
    size = len(data)
    places = {*range(0, size, max(step, size // NUM_DAMAGED)), *range(0, min(size, 96), 8)}
    for index in sorted(places | {*range(max(0, size - 24), size, 6)}):
        if is_cut:
            yield data[:index]
        else:
            yield data[:index] + bytes([data[index] ^ (1 << index % 8)]) + data[index + 1 :]


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "flipped"])
@pytest.mark.parametrize("name", format_names())
def test_damage_never_crashes(name, is_cut, samples, tmp_path):
    """A file that ends anywhere, or has one bit flipped: a ForebayError, a problem, or (where nothing tells) data."""
    sample = samples[name]
    sound = dict(read_all(sample.write(tmp_path / "a"), name, sample))
    for changed, original in sample.files.items():
        for data in damaged(original, sample.step, is_cut):
            path = sample.write(tmp_path / "a", {changed: data})
            for operation, got in read_all(path, name, sample):
                if operation == "read_text" and got is not None and (sample.is_hashed or (is_cut and sample.is_exact)):
                    assert set(got) <= set(sample.texts or got), (changed, len(data))
                elif operation in ("open_rows", "open_tokens") and sample.is_hashed and got is not None:
                    assert got == sound[operation] or is_cut, (changed, len(data))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_may_claim_anything(name, samples, tmp_path):
    """Sizes of terabytes in the header take no memory."""
    sample = samples[name]
    path, got = sample.write(tmp_path / "a", sample.hostile), {}
    assert peak_growth_mib(lambda: got.update(read_all(path, name, sample))) < MAX_MIB
    assert got.get("open_rows") is None and got.get("open_tokens") is None
    assert not got.get("check", False)


# Round trips.

NOT_NUMBERS = dict.fromkeys(
    ("text", "digits", "category", "url", "blob", "words", "nested", "time"),
    "expected columns of numbers, got.*--to parquet.*forebay prepare",
)
REFUSED = {  # Of each format: columns that it cannot hold, and the error.
    "parquet": {},
    "arrow": {},
    "jsonl": {"blob": "JSONL: expected columns that it can hold, got blob: binary", "time": "got time: timestamp"},
    "webdataset": {"some": "expected no gaps in 'some'", "time": "expected columns that it can hold, got time"},
    "tfrecord": {
        "category": "expected columns that it can hold, got category",
        "some": "expected no gaps in lists of 'some'",
        "nested": "expected columns that it can hold, got nested",
        "float64": r"expected floats that fit F32, got 0.14285714285714285 \(float64, value 1",
        "time": "got time: timestamp",
    },
    "mds": {"time": "expected columns that it can hold, got time: timestamp"},
    "litdata": {"time": "expected columns that it can hold, got time: timestamp"},
    "forebay": {
        **NOT_NUMBERS,
        "ids": r"column 'ids': expected rows of one shape.*--seq-len N",
        "some": "column 'some': expected a value in every row, got none",
        "gaps": r"column 'gaps': expected a value in every row, got none \(row 0\).*--to parquet",
    },
}
CODECS = {"parquet": ["snappy"], "arrow": ["zstd"], "jsonl": ["gzip", "zstd"], "webdataset": ["gzip", "zstd"]}
CODECS |= {"mds": ["zstd"], "litdata": ["zstd"]}


def flat(values: list) -> list:
    """Return the values; a tensor as a list of its numbers."""
    return [np.asarray(value).ravel().tolist() for value in values]


@pytest.mark.parametrize(
    "name, compress", [(name, codec) for name in names_with("write_rows") for codec in ("", *CODECS.get(name, ()))]
)
def test_every_column_comes_back_from_every_format(name, compress, tmp_path):
    """By value, with the same bytes each time; some columns packed; `prepare` reads the same texts."""
    chosen = ("text", "int64", "words") if compress else COLUMNS.keys() - REFUSED[name].keys()
    columns = {key: values for key, values in COLUMNS.items() if key in chosen}
    out = [tmp_path / str(i) for i in range(1 if compress else 2)]
    for path in out:
        options = ConvertOptions(slice_bytes=3000 if name == "parquet" else 6000, compress=compress, name="sample")
        report = convert(made_table(columns, 25), path, name, options)
    assert report.written.num_rows == NUM_ROWS
    assert len(report.written.files) > 1 or compress or name == "webdataset"  # A tar is written by the MiB.
    assert report.num_bytes == sum((out[0] / file).stat().st_size for file in report.written.files)
    assert files_below(out[0]) == files_below(out[-1])
    back = read_table(out[0]).to_pydict()
    for key, values in pa.table(columns).to_pydict().items():
        assert flat(back[key]) == flat(values) if key == "pixels" else back[key] == values, key
    if get_format(name).supports("read_text"):
        options = ReadOptions()
        assert read_texts(find_inputs(out[0], options).files, options) == COLUMNS["text"]
    if name in CODECS:
        with pytest.raises(UsageError, match="compress: expected"):
            convert(made_table(columns), tmp_path / "other", name, ConvertOptions(compress="lz5"))


@pytest.mark.parametrize("name", names_with("write_rows"))
def test_a_column_that_a_format_cannot_hold_is_refused(name, tmp_path):
    for refused, message in REFUSED[name].items():
        with pytest.raises((UsageError, DatasetError), match=message):
            convert(made_table({refused: COLUMNS[refused]}), tmp_path / "out", name, ConvertOptions())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("source", ["megatron_u16", "mds_raw", "arrow"])
@pytest.mark.parametrize("name", sorted({*names_with("write_tokens")} - {"shards"}))
def test_tokens_come_back_with_their_documents(name, source, tmp_path):
    """From three datasets of other libraries; `bin` and `ds` have no documents."""
    has_documents = name not in ("bin", "ds")
    expected = DOCUMENTS if has_documents else [STREAM.tolist()]
    options = ConvertOptions(slice_bytes=4096, name="sample")
    for compress in ("", *get_format(name).token_codecs):
        out = [tmp_path / f"{i}{compress}" for i in (0, 1)]
        for path in out:
            report = convert(FOREIGN / source, path, name, replace(options, compress=compress))
        assert read_tokens(out[0], input_dtype="uint16") == expected
        counts = (report.written.num_tokens, report.written.num_documents)
        assert counts == (len(STREAM), len(DOCUMENTS) if has_documents else 0)
        assert bool(report.written.notes) is not has_documents
        files = files_below(out[1])
        assert report.num_bytes == sum(map(len, files.values())) and files_below(out[0]) == files
        if has_documents:
            assert convert(out[0], tmp_path / f"{compress}.jsonl", "jsonl", ConvertOptions()).written.num_rows == len(
                DOCUMENTS
            )
            assert read_tokens(tmp_path / f"{compress}.jsonl") == DOCUMENTS
    with pytest.raises(UsageError, match="--set compress: expected "):
        convert(FOREIGN / source, tmp_path / "other", name, ConvertOptions(compress="lz5"))
