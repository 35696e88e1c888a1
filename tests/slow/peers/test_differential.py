"""Generated corpora through Forebay and through the reference reader of their format: the same documents.

What the reference reads is a document of Forebay's or has a reject that names why; what Forebay reads, the reference
read too. Texts that are null or blank are no documents.
"""

import bz2
import csv
import gzip
import html
import io
import json
import lzma
import random
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mwparserfromhell
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import zstandard
from datasets import Dataset, load_from_disk
from warcio.archiveiterator import ArchiveIterator
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from forebay.formats.inputs import ReadOptions
from forebay.prepare.inputs import find_inputs, read_split, split_files
from support.archives import tar_bytes
from support.streams import tfrecord as tfrecord_bytes

CORPORA = 300
Texts = list[str | None]
PIECES = [
    "plain words", "naïve façade", "日本語の文章", "текст на русском", "नमस्ते", "שלום עולם", "👩‍👩‍👧 family",
    'quote " and \' more', "back\\slash \\N \\n", "comma, semicolon; pipe|", "line\nbreak", "carriage\r\nreturn",
    "tab\there", "NEL\x85and\u2028sep", "\ufeffBOM", "null\0byte", "<b>markup</b> & entities &amp;", "{json: [1, 2]}",
    "x" * 5000, "  spaces  ", "e\u0301 combining", "#hash", "=1+1",
]  # fmt: skip
PACK = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress,
}  # fmt: skip


def make_texts(chance: random.Random, pieces: list[str] = PIECES) -> Texts:
    def text():
        kind = chance.random()
        words = chance.choices(pieces, k=chance.randrange(1, 6))
        return None if kind < 0.1 else "" if kind < 0.15 else "\n \t" if kind < 0.18 else " ".join(words)

    return [text() for _ in range(chance.choice([0, 1, 2, 7, 30]))]


def write(path: Path, data: bytes, chance: random.Random, packs: Iterable[str] = PACK):
    """Write a file, compressed in one or in several members."""
    ending = chance.choice(list(packs))
    cut = chance.randrange(len(data) + 1) if chance.random() < 0.5 else len(data)
    parts = [data[:cut], data[cut:]] if cut < len(data) else [data]
    path.with_name(path.name + ending).write_bytes(b"".join(map(PACK[ending], parts)))


def jsonl(folder: Path, chance: random.Random) -> Texts:
    texts, end = make_texts(chance), chance.choice(["\n", "\r\n", "\n\n"])
    rows = [{"id": i, "text": text} | ({"score": float("nan")} if i % 5 == 4 else {}) for i, text in enumerate(texts)]
    lines = [json.dumps(row, ensure_ascii=chance.random() < 0.5) for row in rows]
    text = end.join(lines) + end * chance.randrange(2)
    encoding = chance.choice(["utf-8", "utf-8-sig", "utf-16", "utf-32"])
    write(folder / "a.jsonl", text.encode(encoding), chance)
    return [json.loads(line)["text"] for line in lines]


def json_array(folder: Path, chance: random.Random) -> Texts:
    rows = [{"text": text} for text in make_texts(chance)]
    text = json.dumps(rows, indent=chance.choice([None, 2]), ensure_ascii=chance.random() < 0.5)
    write(folder / "a.json", text.encode(chance.choice(["utf-8", "utf-8-sig"])), chance)
    return [row["text"] for row in json.loads(text)]


def csv_file(folder: Path, chance: random.Random) -> Texts:
    texts = [(text or "").replace("\0", " ") for text in make_texts(chance)]
    dialect = {
        "delimiter": chance.choice([",", "\t", ";"]), "quoting": chance.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
        "lineterminator": chance.choice(["\n", "\r\n"]),
    }  # fmt: skip
    file = io.StringIO(newline="")
    csv.writer(file, **dialect).writerows([["id", "text", "n"], *([i, text, 1] for i, text in enumerate(texts))])
    write(folder / "a.csv", file.getvalue().encode(chance.choice(["utf-8", "utf-8-sig", "utf-16"])), chance)
    file.seek(0)
    return [row["text"] for row in csv.DictReader(file, **dialect)]


def table(chance: random.Random) -> pa.Table:
    texts = pa.array(make_texts(chance), pa.string())
    kind = chance.choice([pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
    column = texts.dictionary_encode() if pa.types.is_dictionary(kind) else texts.cast(kind)
    tags = pa.array([["a"]] * len(texts), pa.list_(pa.string()))
    return pa.table({"id": range(len(texts)), "text": column, "tags": tags})


def write_parts(writer: Any, rows: pa.Table):
    """Write the rows in groups, of which some are empty."""
    for start in range(0, len(rows) + 1, 5):
        writer.write_table(rows.slice(start, 5))
        writer.write_table(rows.slice(0, 0))


def parquet(folder: Path, chance: random.Random) -> Texts:
    rows = table(chance)
    codec = chance.choice(["none", "snappy", "gzip", "brotli", "lz4", "zstd"])
    with pq.ParquetWriter(
        folder / "a.parquet", rows.schema, compression=codec, data_page_version=chance.choice(["1.0", "2.0"])
    ) as writer:
        write_parts(writer, rows)
    return pq.read_table(folder / "a.parquet")["text"].to_pylist()


def arrow(folder: Path, chance: random.Random) -> Texts:
    rows = table(chance)
    options = pa.ipc.IpcWriteOptions(compression=chance.choice([None, "lz4", "zstd"]))
    create, suffix = chance.choice(
        [(pa.ipc.new_file, ".arrow"), (pa.ipc.new_stream, ".arrows"), (pa.ipc.new_file, ".feather")]
    )
    with create(str(folder / f"a{suffix}"), rows.schema, options=options) as writer:
        write_parts(writer, rows)
    return rows["text"].to_pylist()


def saved(folder: Path, chance: random.Random) -> Texts:
    texts = make_texts(chance) or ["one"]
    Dataset.from_dict({"text": texts, "n": list(range(len(texts)))}).save_to_disk(
        str(folder / "a"), num_shards=min(3, len(texts))
    )
    return load_from_disk(str(folder / "a"))["text"][:]


def tfrecord(folder: Path, chance: random.Random) -> Texts:
    texts = make_texts(chance)
    rows = [{"id": str(i), "text": text} for i, text in enumerate(texts)]
    (folder / "a.tfrecord").write_bytes(tfrecord_bytes(rows, ("id", "text")))
    return texts


def webdataset(folder: Path, chance: random.Random) -> Texts:
    texts, members, ending = make_texts(chance), {}, chance.choice(["", ".gz", ".xz"])
    kind = chance.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    for i, text in enumerate(texts):
        for suffix, data in (("json", json.dumps({"n": i}).encode()), ("txt", (text or "").encode())):
            members[f"{'long/' * chance.choice([0, 30])}{i:05d}.{suffix}"] = data
    (folder / f"a.tar{ending}").write_bytes(PACK[ending](tar_bytes(members, kind)))
    return texts


def plain(folder: Path, chance: random.Random) -> Texts:
    texts = [text for text in make_texts(chance) if text is None or "\0" not in text] or ["one"]
    for i, text in enumerate(texts):
        write(folder / f"{i:03d}.txt", (text or "").encode(), chance)
    return texts


def warc(folder: Path, chance: random.Random) -> Texts:
    import brotli

    codings = {
        "": bytes,
        "gzip": gzip.compress,
        "br": brotli.compress,
        "deflate": zlib.compress,
        "zstd": zstandard.compress,
    }
    texts, out = make_texts(chance), io.BytesIO()
    writer = WARCWriter(out, gzip=chance.random() < 0.5)
    writer.write_record(writer.create_warcinfo_record("a.warc", {"software": "test"}))
    for i, text in enumerate(texts):
        coding = chance.choice(list(codings))
        body = codings[coding]((text or "").encode())
        headers = [("Content-Type", "text/plain; charset=utf-8"), *([("Content-Encoding", coding)] if coding else [])]
        if chance.random() < 0.4:
            headers.append(("Transfer-Encoding", "chunked"))
            cut = len(body) // 2
            body = (
                b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:]) if part)
                + b"0\r\n\r\n"
            )
        head = StatusAndHeaders("200 OK", headers, protocol="HTTP/1.1")
        record = writer.create_warc_record(f"http://e.org/{i}", "response", payload=io.BytesIO(body), http_headers=head)
        writer.write_record(record)
    (folder / f"a.warc{'.gz' if writer.gzip else ''}").write_bytes(out.getvalue())
    records = ArchiveIterator(io.BytesIO(out.getvalue()))
    assert sum(record.rec_type == "response" for record in records) == len(texts)
    return texts


MARKUP = [
    "plain words",
    "'''bold''' and ''slanted''",
    "[[Page]] linked",
    "[[Page|a label]]",
    "&amp; and &lt;",
    "text with 日本語",
    "[http://e.org site]",
]


def wikipedia(folder: Path, chance: random.Random) -> Texts:
    texts = [text and text.strip() for text in make_texts(chance, MARKUP)]
    pages = "".join(
        f"<page><title>P{i}</title><ns>0</ns><id>{i}</id><revision><id>{i}</id><model>wikitext</model>"
        f'<text xml:space="preserve">{html.escape(text or "")}</text></revision></page>\n'
        for i, text in enumerate(texts)
    )
    dump = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="en">\n{pages}</mediawiki>\n'
    write(folder / "a.xml", dump.encode(), chance, ["", ".bz2", ".gz"])
    bodies = [mwparserfromhell.parse(text or "").strip_code() for text in texts]
    return [body and f"P{i} {body}" for i, body in enumerate(bodies)]


FORMATS = [jsonl, json_array, csv_file, parquet, arrow, saved, tfrecord, webdataset, plain, warc, wikipedia]


def read(folder: Path) -> tuple[list[str], list[str]]:
    """The texts of the documents in a folder, and why others were rejected."""
    texts, problems = [], []
    options = ReadOptions()
    listed = find_inputs([folder], options)
    problems += [item.reason for item in listed.skipped if item.status == "failed"]
    for split in split_files(listed.files, options):
        for record in read_split(split, options):
            if record.problem and record.problem not in ("blank", "empty"):
                problems.append(record.problem)
            elif record.text.strip():
                texts.append(record.text)
    return texts, problems


def normal(text: str) -> str:
    """Without the mark of UTF-8 at its start; of wiki markup the reference keeps other white space."""
    return " ".join(text.removeprefix("\ufeff").split())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # warcio leaves files open.
@pytest.mark.parametrize("seed", range(CORPORA))
def test_the_same_documents_as_the_reference(tmp_path, seed):
    make = FORMATS[seed % len(FORMATS)]
    folder = tmp_path / "in"
    folder.mkdir()
    expected = make(folder, random.Random(seed))
    texts, problems = read(folder)
    theirs, ours = Counter(normal(text) for text in expected if text and text.strip()), Counter(map(normal, texts))
    assert not ours - theirs and (theirs - ours).total() == len(problems), problems
