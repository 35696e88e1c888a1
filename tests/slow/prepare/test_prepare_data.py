"""Real files of archives, dumps and tables through the whole pipeline, counted by readers that are not ours.

Skipped where the files are not there. Lines and columns of text: `tests/slow/peers/test_differential.py`.
"""

import bz2
import gzip
import io
import json
import re
import tarfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from forebay import prepare_dataset
from forebay.dataset.reader import open_dataset
from forebay.errors import PrepareError
from forebay.prepare import load_recipe
from forebay.prepare.report import load_report
from support.shared_data import shared_data

PREPARED = {
    "warc": ("warc/*[!s].gz", "warc/*[!z]"),
    "webdataset": ("webdataset/*",),
    "tfrecord": ("tfrecord/*.tfrecord",),
    "wikipedia": ("wikipedia/*",),
    "stackexchange": ("stackexchange/*",),
    "parquet": ("parquet/*.parquet",),
}
DAMAGED_WARCS = {
    # Documents with text, malformed and empty records of the archives at which warcio stops, warns or guesses: by hand.
    "warc/aut/badexample.arc.gz": (0, 0, 1),  # a page without a body, and robots.txt
    "warc/cc_net/sample.warc.txt": (3, 0),
    "warc/fastwarc/block-sized-records.warc.lz4": (0, 1),
    "warc/fastwarc/clipped.warc.gz": (0, 1),
    "warc/fastwarc/warcfile.warc.lz4": (16, 0),
    "warc/pywb/bad.arc": (0, 2, 1),
    "warc/pywb/example-bad.warc.gz.bad": (1, 0),
    "warc/pywb/example-extra.warc": (1, 0),  # its second answer is of `HTTPX/1.1`, which warcio takes for HTTP
    "warc/pywb/example.warc": (1, 0),
    "warc/warcio/bad.arc": (0, 2, 1),
    "warc/warcio/example-bad-non-chunked.warc.gz": (1, 0),
    "warc/warcio/example-bad.warc.gz.bad": (1, 0),
    "warc/warcio/example-trunc.warc": (1, 0),
    "warc/warcio/example-wrong-chunks.warc.gz": (1, 0),
    "warc/webarchive-commons/IAH-20080430204825-00000-blackbook-truncated.arc": (2, 0),  # and robots.txt
    "warc/webarchive-commons/link-extraction-test.warc": (7, 0),
}


@dataclass
class Reported:
    """What an independent reader says of a file: the ids of its documents in order.

    None: it gives none, so that the pipeline says where in the file it was. "": there is one that was not looked at.
    """

    ids: list[str | None] = field(default_factory=list)
    malformed: int = 0
    empty: int = 0

    @property
    def documents_in(self) -> int:
        return len(self.ids) + self.malformed + self.empty


def all_files(root: Path) -> list[Path]:
    result = [path for path in root.rglob("*") if path.is_file()]
    return sorted(result, key=lambda path: path.relative_to(root).parts)


def files(kind: str) -> list[Path]:
    root = shared_data()
    names = PREPARED[kind]
    return [p for p in all_files(root) if any(fnmatch(p.relative_to(root).as_posix(), name) for name in names)]


def check(out: Path, reported: dict[Path, Reported], **settings: Any):
    """Prepare these files in one run; all that the run says of them is what the independent readers say."""
    recipe = load_recipe(settings={"max_error_rate": 1.0, "tokenize": {"tokenizer": "bytes"}, **settings})
    ids = out.parent / f"{out.name}.ids"
    summary = prepare_dataset(list(reported), out, recipe=recipe, write_ids=ids, workers=1)
    inputs = load_report(out / "report.html")["inputs"]
    assert [(i["name"], i["documents"], i["malformed"]) for i in inputs] == [
        (path.name, message.documents_in, message.malformed) for path, message in reported.items()
    ]
    assert summary.documents_in == sum(message.documents_in for message in reported.values())
    assert summary.documents_out == sum(len(message.ids) for message in reported.values())
    dropped = {
        "empty": sum(s.empty for s in reported.values()),
        "malformed": sum(s.malformed for s in reported.values()),
    }
    assert summary.dropped == {reason: count for reason, count in dropped.items() if count}
    retained = iter(ids.read_text("utf-8").splitlines())
    for path, message in reported.items():
        for index, expected in enumerate(message.ids):
            got = next(retained)
            assert got == expected or expected == "" or (expected is None and got.startswith(str(path))), (path, index)
    assert next(retained, None) is None
    rejects = out / "rejects.jsonl"
    assert (len(rejects.read_text("utf-8").splitlines()) if rejects.exists() else 0) == dropped["malformed"]
    dataset = open_dataset(out)
    assert dataset.verify().ok and dataset.manifest.documents == summary.documents_out


def warc_told(path: Path) -> Reported:
    """Of an archive that warcio reads: its pages and plain texts, answered with 200."""
    from warcio.archiveiterator import ArchiveIterator

    name = path.relative_to(shared_data()).as_posix()
    if name in DAMAGED_WARCS:
        documents, *others = DAMAGED_WARCS[name]
        return Reported([""] * documents, *others)
    reported = Reported()
    with path.open("rb") as file:
        for record in ArchiveIterator(file):
            headers, http = record.rec_headers, record.http_headers
            kind = (headers.get_header("WARC-Type") or record.rec_type).lower()
            mime = (http if http is not None else headers).get_header("Content-Type") or ""
            status = http.get_statuscode() if http is not None and kind == "response" else "200"
            document = kind == "conversion" or (
                kind in ("response", "resource")
                and status == "200"
                and mime.partition(";")[0].strip().lower() in ("text/html", "application/xhtml+xml", "text/plain")
                and not (headers.get_header("WARC-Target-URI") or "").strip("<>").startswith(("dns:", "metadata:"))
                and not (headers.get_header("WARC-Target-URI") or "").endswith("/robots.txt")
            )
            if document and record.content_stream().read().strip():
                reported.ids.append((headers.get_header("WARC-Record-ID") or "").strip("<>") or None)
            elif document:
                reported.empty += 1
            elif kind not in ("warcinfo", "revisit") and status == "200":
                reported.malformed = 1  # A file with other records alone is one malformed record.
    reported.malformed *= not reported.ids and not reported.empty
    return reported


def unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(content)
    if path.suffix == ".bz2":
        return bz2.decompress(content)
    return zstandard.ZstdDecompressor().decompressobj().decompress(content) if path.suffix == ".zst" else content


def wikipedia_told(path: Path) -> Reported:
    reported = Reported()
    for _, element in ElementTree.iterparse(io.BytesIO(unpacked(path))):
        if element.tag.rpartition("}")[2] != "page":
            continue
        parts = {child.tag.rpartition("}")[2]: child for child in element}
        text = next(element.iterfind(".//{*}text")).text or ""
        if parts["ns"].text == "0" and "redirect" not in parts and not text.startswith("#REDIRECT"):
            reported.ids.append(parts["id"].text)
        element.clear()
    return reported


def stackexchange_told(path: Path) -> Reported:
    rows = ElementTree.parse(path).getroot()
    return Reported([row.get("Id") for row in rows if row.get("PostTypeId") in ("1", "2") and row.get("Body")])


def samples(path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """The samples of a tar: their key, and the contents by suffix."""
    with tarfile.open(path) as archive:
        current = {}
        for member in archive.getmembers():
            if member.isfile():
                folder, _, last = member.name.rpartition("/")
                key, _, suffix = last.partition(".")
                content = archive.extractfile(member)
                current.setdefault(f"{folder}/{key}" if folder else key, {})[suffix] = content.read()
        yield from current.items()


def webdataset_told(path: Path) -> Reported:
    reported = Reported()
    for key, members in samples(path):
        if members.keys() & {"txt", "txt.gz"} or ("json" in members and "text" in json.loads(members["json"])):
            reported.ids.append(key)
        elif "json" in members:
            reported.empty += 1
        else:
            reported.malformed += 1
    return reported


def tfrecord_told(path: Path, key: str) -> Reported:
    """TensorFlow is not here: records are counted by their framing, texts found by their bytes."""
    reported, content, index = Reported(), path.read_bytes(), 0
    while index < len(content):
        size = int.from_bytes(content[index : index + 8], "little")
        record = content[index + 12 : index + 12 + size]
        result = re.search(rb"(?s)\n." + key.encode() + rb"\x12", record)  # field 1 of this length, then field 2
        reported.ids += [f"{path} (byte {index})"] if result else []
        is_example = record.startswith(b"\n")
        reported.malformed += not is_example
        reported.empty += is_example and not result
        index += 16 + size
    return reported


@pytest.mark.parametrize(
    "kind, read_alone, key, documents",
    [
        ("warc", warc_told, "", None),
        ("wikipedia", wikipedia_told, "", 119),
        ("stackexchange", stackexchange_told, "", 552),
        ("webdataset", webdataset_told, "", 9),
        ("tfrecord", tfrecord_told, "x_byte", 8),
        ("tfrecord", tfrecord_told, "x_byte_seq", 4),
    ],
)
def test_a_format(tmp_path, kind: str, read_alone: Callable, key: str, documents: int | None):
    if kind == "warc":
        pytest.importorskip("warcio")
    reported = {path: read_alone(path, *([key] if key else [])) for path in files(kind)}
    counts = [len(message.ids) for message in reported.values()]
    assert documents in (None, sum(counts))
    if kind == "webdataset":
        retained = {path.name: count for path, count in zip(reported, counts) if count}
        assert retained == {"compressed.tar": 3, "txt.tar": 3, "txt.tar.gz": 3}
        assert sum(message.malformed for message in reported.values()) > 30
    check(tmp_path / "d", reported, read={"text_key": key} if key else {})


def text_columns(schema: pa.Schema) -> list[str]:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return [f.name for f in schema if any(test(f.type) for test in tests) and schema.names.count(f.name) == 1]


def parquet_told(path: Path, key: str) -> Reported:
    """By pyarrow's whole-table reader. What it cannot read is one malformed group; what is no UTF-8 a malformed row."""
    try:
        table = pq.read_table(path, columns=[key], page_checksum_verification=True, use_threads=False)
        values = [v if isinstance(v, bytes | None) else v.encode() for v in table[key].to_pylist()]
    except (OSError, pa.ArrowException):
        return Reported(malformed=1)
    reported = Reported()
    for value in values:
        try:
            if value and value.decode().strip():
                reported.ids.append(None)
            else:
                reported.empty += 1
        except UnicodeDecodeError:
            reported.malformed += 1
    return reported


def test_parquet(tmp_path):
    groups = {}
    refused, invalid = [], {}
    for path in files("parquet"):
        try:
            keys = text_columns(pq.read_schema(path))
        except (OSError, pa.ArrowException):
            invalid[path] = Reported(malformed=1)
            continue
        if keys:
            groups.setdefault(keys[0], {})[path] = parquet_told(path, keys[0])
        else:
            refused.append(path)
    groups.setdefault(next(iter(groups)), {}).update(invalid)
    for number, (key, reported) in enumerate(sorted(groups.items())):
        if any(message.ids for message in reported.values()):
            check(tmp_path / str(number), reported, read={"text_key": key, "id_key": ""})
        else:
            with pytest.raises(PrepareError, match="got none"):
                check(tmp_path / str(number), reported, read={"text_key": key, "id_key": ""})
    for path in refused:
        with pytest.raises(PrepareError, match="expected a column of text named text"):
            prepare_dataset([path], tmp_path / "refused", tokenizer="bytes", workers=1)
    messages = [message for reported in groups.values() for message in reported.values()]
    assert (len(groups), len(refused)) == (17, 42) and sum(len(s.ids) for s in messages) > 4000
