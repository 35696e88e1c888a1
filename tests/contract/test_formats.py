"""Every registered format through the same cases: detection, round trip, truncation, flipped bytes, empty, hostile."""

from __future__ import annotations

import io
import json
import resource
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.convert import convert, written_formats
from forebay.errors import ForebayError, UsageError
from forebay.formats.base import Format, format_names, formats, get_format
from forebay.formats.conversion import ConvertOptions, TableSource, TokenPart, TokenSource
from forebay.formats.detect import detect
from forebay.formats.inputs import InputFile, ReadOptions
from forebay.formats.report import Report
from forebay.formats.sources import open_table, open_tokens
from forebay.formats.tfrecord import masked
from forebay.formats.token_stream import TokenDigest
from forebay.prepare.inputs import read_split, split_files
from support.foreign_datasets import write_mds, write_saved
from support.paths import GOLDEN

OPERATIONS = ("read_text", "open_rows", "open_tokens", "check")
TEXTS = [f"document number {i}, with some words" for i in range(6)]
TOKENS = (np.arange(600, dtype=np.uint32) * 37 % 50_000).astype(np.uint16)
MAX_MIB = 200


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


def tar(size: int | None = None) -> bytes:
    def write(file: io.BytesIO) -> None:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for i, text in enumerate(TEXTS):
                member = tarfile.TarInfo(f"{i}.txt")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))

    data = bytearray(buffered(write))
    if size is not None:
        data[124:136] = b"%011o\0" % size
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
    return bytes(data)


def tfrecord(length: int | None = None) -> bytes:
    def frame(data: bytes, size: int) -> bytes:
        head = size.to_bytes(8, "little")
        crcs = [masked(google_crc32c.value(part)).to_bytes(4, "little") for part in (head, data)]
        return head + crcs[0] + data + crcs[1]

    def example(text: bytes) -> bytes:
        values = b"\x0a" + bytes([len(text)]) + text
        feature = b"\x0a" + bytes([len(values)]) + values
        entry = b"\x0a\x04text\x12" + bytes([len(feature)]) + feature
        features = b"\x0a" + bytes([len(entry)]) + entry
        return b"\x0a" + bytes([len(features)]) + features

    return b"".join(frame(item, length or len(item)) for item in (example(text.encode()) for text in TEXTS))


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

    def write(file: io.BytesIO) -> None:
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


def arrow(write: Callable[..., Any]) -> bytes:
    def to(file: io.BytesIO) -> None:
        with write(file, TABLE.schema) as writer:
            writer.write_table(TABLE)

    return buffered(to)


PARQUET = buffered(lambda file: pq.write_table(TABLE, file, write_page_checksum=True))


def written(name: str, folder: Path) -> dict[str, bytes]:
    """The files that a format writes of the tokens."""
    out = folder / f"sample.{name}" if name in ("bin", "ds") else folder / "out"
    convert(tokens(), out, name, ConvertOptions(seq_len=60, eos_id=0, name="sample"))
    if out.is_file():
        return {out.name: out.read_bytes()}
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def tokens() -> TokenSource:
    stops = np.array([200, 350, 600], np.uint64)
    return TokenSource("memory", "U16", 600, 3, lambda: iter([TokenPart(TOKENS, stops)]))


def rows() -> TableSource:
    return TableSource("memory", TABLE.schema, 6, lambda: iter(TABLE.to_batches(2)))


BIG = 1 << 44
PDF = GOLDEN / "books" / "sample.pdf"
PLAIN: dict[str, Sample] = {
    "jsonl": Sample({"a.jsonl": LINES}, TEXTS),
    "json": Sample({"a.json": json.dumps([{"text": text} for text in TEXTS], indent=1).encode()}, TEXTS),
    "csv": Sample({"a.csv": b"text,n\n" + b"".join(f'"{t}",1\n'.encode() for t in TEXTS)}, TEXTS, is_exact=False),
    "text": Sample({"a.txt": TEXTS[0].encode()}, TEXTS[:1], is_exact=False),
    "lines": Sample({"a": "\n".join(TEXTS).encode()}, TEXTS, is_exact=False),
    "html": Sample({"a.html": b"<!DOCTYPE html><html>a page</html>"}, None),
    "parquet": Sample(
        {"a.parquet": PARQUET}, TEXTS, step=7, hostile={"a.parquet": PARQUET[:-8] + b"\xff\xff\xff\x7fPAR1"}
    ),
    "arrow": Sample({"a.arrow": arrow(pa.ipc.new_file)}, TEXTS, step=7, is_exact=False),
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
    "webdataset": Sample({"a.tar": tar()}, TEXTS, step=97, hostile={"a.tar": tar(8**11 - 1)}),
    "tfrecord": Sample({"a.tfrecord": tfrecord()}, TEXTS, is_hashed=True, hostile={"a.tfrecord": tfrecord(BIG)}),
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
WRITTEN = ("forebay", "bin", "ds", "megatron", "litdata")
FOREIGN = {"mds": write_mds, "saved arrow": write_saved}
HASHED = ("forebay",)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    created = dict(PLAIN)
    for name in WRITTEN:
        files = written(name, tmp_path_factory.mktemp("written"))
        dtype = "uint16" if name in ("bin", "ds") else None
        created[name] = Sample(files, is_hashed=name in HASHED, step=23, dtype=dtype)
    for name, write in FOREIGN.items():
        folder = write(tmp_path_factory.mktemp("foreign") / name, np.split(TOKENS, [200, 350]))
        created[name] = Sample({path.name: path.read_bytes() for path in folder.iterdir()}, step=23)
    return created


NAMES = list(format_names())


def test_every_format_has_a_sample() -> None:
    assert set(format_names()) == {*PLAIN, *WRITTEN, *FOREIGN}


@pytest.mark.parametrize("name", format_names())
def test_what_a_format_leaves_out_is_a_usage_error(name: str, tmp_path: Path) -> None:
    entry = get_format(name)
    assert entry.name == name
    for operation in (*OPERATIONS, "write_tokens", "write_rows"):
        if not entry.supports(operation):
            arguments = (None,) if operation == "open_tokens" else (None, None)
            arguments = (None, None, None) if operation.startswith("write") else arguments
            with pytest.raises(UsageError, match=f"format {name}: expected one that can be"):
                getattr(entry, operation)(*arguments)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_detected_by_content_or_suffix(name: str, samples: dict[str, Sample], tmp_path: Path) -> None:
    path = samples[name].write(tmp_path / "a")
    if path.is_dir():
        is_pair = name == "megatron"
        assert is_pair or get_format(name).is_dataset(path)
        assert [entry.name for entry in formats() if entry.is_dataset(path)] == ([] if is_pair else [name])
        return
    head = path.read_bytes()[:4096]
    if get_format(name).sniff(head):
        nameless = tmp_path / "nameless"
        nameless.write_bytes(path.read_bytes())
        assert detect(nameless).format == name
    else:
        assert name in ("lines", "code", "bin", "ds", "wet") or detect(path).format == name
    for suffix in get_format(name).suffixes:
        empty = tmp_path / f"empty{suffix}"
        empty.touch()
        assert detect(empty).format == name


def texts_of(path: Path, name: str) -> list[str]:
    """The documents without a problem of a file, read as a format."""
    options = ReadOptions(max_document_bytes=100_000)
    file = InputFile(str(path), path.name, name, "", path.stat().st_size, "")
    records = [record for split in split_files([file], options) for record in read_split(split, options)]
    for record in records:
        record.text.encode()
    return [record.text for record in records if not record.problem]


def contents(path: Path, name: str, sample: Sample) -> Iterator[tuple[str, Any]]:
    """What each operation of a format gives; a ForebayError gives None, any other error fails the test."""
    entry: Format = get_format(name)
    files = [path] if path.is_file() or name in ("forebay", "saved arrow", "mds", "litdata") else sorted(path.iterdir())
    for operation in OPERATIONS:
        if not entry.supports(operation) or (operation == "read_text" and name == "api"):
            continue
        try:
            match operation:
                case "read_text":
                    yield operation, texts_of(path, name)
                case "open_rows":
                    table = entry.open_rows(files, ConvertOptions())
                    got = pa.Table.from_batches(list(table.batches()), table.schema)
                    got.validate()
                    yield operation, got.to_pydict() if name != "images" else None
                case "open_tokens":
                    target = next(file for file in files if file.suffix == ".idx") if name == "megatron" else path
                    dataset = entry.open_tokens(target, sample.dtype)
                    yield operation, [dataset.open_slice(i).tokens.tolist() for i in range(dataset.num_slices)]
                case "check":
                    target = next(file for file in files if file.suffix == ".idx") if name == "megatron" else path
                    report = Report(target)
                    entry.check(target, report)
                    yield operation, not report.findings
        except ForebayError:
            yield operation, None


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_file_is_read_and_found_sound(name: str, samples: dict[str, Sample], tmp_path: Path) -> None:
    sample = samples[name]
    got = dict(contents(sample.write(tmp_path / "a"), name, sample))
    rows_of_tokens = ("open_rows",) if name == "forebay" else ()
    assert all(value is not None for key, value in got.items() if key not in rows_of_tokens) or name == "images"
    if sample.texts is not None:
        assert got["read_text"] == sample.texts
    assert got.get("check", True)
    if "open_tokens" in got and name != "forebay":
        assert [token for part in got["open_tokens"] for token in part] == TOKENS.tolist()


def changes(data: bytes, step: int, cut: bool) -> Iterator[bytes]:
    for index in range(0, len(data), max(step, len(data) // 120)):
        if cut:
            yield data[:index]
        else:
            yield data[:index] + bytes([data[index] ^ (1 << index % 8)]) + data[index + 1 :]


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "flipped"])
@pytest.mark.parametrize("name", NAMES)
def test_damage_never_crashes(name: str, cut: bool, samples: dict[str, Sample], tmp_path: Path) -> None:
    """A file that ends anywhere, or has one bit flipped: a ForebayError, a problem, or (where nothing tells) data."""
    sample = samples[name]
    sound = dict(contents(sample.write(tmp_path / "a"), name, sample))
    for changed, original in sample.files.items():
        for data in changes(original, sample.step, cut):
            path = sample.write(tmp_path / "a", {changed: data})
            for operation, got in contents(path, name, sample):
                if operation == "read_text" and got is not None and (sample.is_hashed or (cut and sample.is_exact)):
                    assert set(got) <= set(sample.texts or got), (changed, len(data))
                elif operation in ("open_rows", "open_tokens") and sample.is_hashed and got is not None:
                    assert got == sound[operation] or cut, (changed, len(data))


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_file_holds_nothing(name: str, samples: dict[str, Sample], tmp_path: Path) -> None:
    sample = samples[name]
    for changed in sample.files:
        path = sample.write(tmp_path / "a", {changed: b""})
        for operation, got in contents(path, name, sample):
            if operation == "read_text" and name not in ("text", "code", "html"):
                assert not got
            if operation == "check" and len(sample.files) == 1:
                assert not got


@pytest.mark.parametrize("name", [name for name, sample in PLAIN.items() if sample.hostile])
def test_a_header_may_claim_anything(name: str, tmp_path: Path) -> None:
    """Sizes of terabytes in the header take no memory."""
    sample = PLAIN[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    got = dict(contents(sample.write(tmp_path / "a", sample.hostile), name, sample))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_MIB << 10
    assert got.get("open_rows") is None and got.get("open_tokens") is None
    assert not got.get("check", False)


@pytest.mark.parametrize("name", written_formats())
def test_what_is_written_reads_the_same(name: str, tmp_path: Path) -> None:
    """Tokens and rows come back by value, and the same input gives the same bytes."""
    entry = get_format(name)
    if entry.supports("write_tokens"):
        out = [tmp_path / f"{i}.{name}" if name in ("bin", "ds") else tmp_path / f"tokens{i}" for i in (0, 1)]
        options = ConvertOptions(seq_len=60, eos_id=0, name="sample", input_dtype="uint16")
        for path in out:
            convert(tokens(), path, name, options)
        source = open_tokens(out[0], options)
        assert source is not None
        digest = TokenDigest()
        for part in source.parts():
            digest.add(part)
        expected = TokenDigest()
        expected.add(TokenPart(TOKENS, np.empty(0, np.uint64)))
        assert digest.tokens == expected.tokens
        assert files_below(out[0]) == files_below(out[1])
    if entry.supports("write_rows") and name != "forebay":
        out = [tmp_path / f"rows{i}" for i in (0, 1)]
        for path in out:
            convert(rows(), path, name, ConvertOptions())
        table = open_table(out[0])
        assert table is not None
        got = pa.Table.from_batches(list(table.batches()), table.schema).to_pydict()
        assert {key: value for key, value in got.items() if key != "__key__"} == TABLE.to_pydict()
        assert files_below(out[0]) == files_below(out[1]) or name == "webdataset"  # Members have times.


def files_below(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
