"""Real files of other projects, counted by an independent reader. Skipped where they are not there."""

from __future__ import annotations

import csv
import gzip
import json
import tarfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from forebay.formats.inputs import ReadOptions
from forebay.formats.records import Record
from forebay.prepare.inputs import find_inputs, read_split, split_files
from support.shared_data import shared_data


def records(path: Path, **options: object) -> list[Record]:
    chosen = ReadOptions(**options)  # type: ignore[arg-type]
    return [
        r
        for p in split_files(find_inputs(path, chosen).files, chosen)
        for r in read_split(p, chosen)
        if r.problem != "blank"
    ]


def unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix in (".gz", ".tgz"):
        return gzip.decompress(data)
    return zstandard.ZstdDecompressor().decompressobj().decompress(data) if path.suffix == ".zst" else data


def test_jsonl() -> None:
    counted = 0
    for path in sorted(shared_data("jsonl").iterdir()):
        key = "message" if path.name.startswith("test.") else "text"
        rows = [json.loads(line) for line in unpacked(path).decode().splitlines()]
        got = records(path, text_key=key)
        assert [(r.id, r.text) for r in got] == [(row.get("id", ""), row[key]) for row in rows]
        assert not any(r.problem for r in got)
        counted += len(got)
    assert counted == 73


def test_json_lists() -> None:
    for path in sorted(shared_data("pii").glob("*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))
        assert [r.text for r in records(path, text_key="full_text")] == [row["full_text"] for row in rows]


@pytest.mark.parametrize("name", ["books", "shakespeare"])
def test_plain_text(name: str) -> None:
    folder = shared_data(name)
    got = records(folder)
    files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.relative_to(folder).parts)
    assert len(got) == len(files)
    latin = []
    for path, record in zip(files, got, strict=True):
        try:
            assert record.text == path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            assert "not UTF-8" in record.problem or record.text == path.read_bytes().decode("cp1252")
            latin.append(path.name)
    assert latin == (["chesterton-ball.txt", "shakespeare-caesar.txt"] if name == "books" else [])


def test_lines_and_tsv() -> None:
    path = shared_data("neardup") / "articles_1000.train"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [r.text for r in records(path, format="lines")] == lines
    tokens = shared_data("tokenizers") / "sentencepiece" / "tokens.tsv"
    with tokens.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t"))
    assert len(records(tokens, format="csv", text_key="0", id_key="")) == len(rows)


def test_webdataset() -> None:
    for path in sorted(shared_data("webdataset").iterdir()):
        got = records(path, text_key="b")
        with tarfile.open(path) as archive:
            members = [m for m in archive.getmembers() if m.isfile()]
            contents = {m.name: archive.extractfile(m).read() for m in members}  # type: ignore[union-attr]
        samples = Counter(name.rpartition("/")[2].partition(".")[0] for name in contents)
        assert len(got) == len(samples)
        texts = [r.text for r in got if not r.problem]
        if "txt" in path.name or "compressed" in path.name:
            expected = [gzip.decompress(d) if name.endswith(".gz") else d for name, d in contents.items()]
            assert texts == [data.decode() for data in expected]
        elif "json" in path.name:
            wanted_values = [json.loads(data) for data in contents.values()]
            assert texts == [row["b"] for row in wanted_values if isinstance(row.get("b"), str)]
        else:
            assert all(r.problem.startswith("no text member") for r in got)


def frames(path: Path) -> list[bytes]:
    """The records by their lengths alone."""
    data, index, result = path.read_bytes(), 0, []
    while index < len(data):
        size = int.from_bytes(data[index : index + 8], "little")
        result.append(data[index + 12 : index + 12 + size])
        index += 16 + size
    return result


def test_tfrecord() -> None:
    """TensorFlow is not here: counts are by the framing, texts by their bytes in it."""
    folder = shared_data("tfrecord")
    raw = frames(folder / "example.tfrecord")
    got = records(folder / "example.tfrecord", text_key="x_byte")
    assert len(got) == len(raw) == 4
    assert all(not r.problem and r.text.encode() in data for r, data in zip(got, raw))
    assert all(r.text.startswith("test str") for r in got)
    raw = frames(folder / "sequence_example.tfrecord")
    got = records(folder / "sequence_example.tfrecord", text_key="x_byte_seq")
    assert [r.text.count("test str") + 1 for r in got] == [data.count(b"test str") for data in raw]  # 1 is x_byte's
    raw = frames(folder / "morris_sequence_first_5.tfrecord")
    plain = records(folder / "morris_sequence_first_5.tfrecord")
    assert ["not a tf.train.Example" in r.problem for r in plain] == [True] * 5
    assert [r.text.encode() for r in plain] == raw
    skipped = find_inputs(folder, ReadOptions()).skipped
    assert [item.reason for item in skipped] == ["binary data of no known format"] * 2


def text_columns(schema: pa.Schema) -> list[str]:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return [f.name for f in schema if any(test(f.type) for test in tests) and schema.names.count(f.name) == 1]


def test_parquet() -> None:
    counted = 0
    for path in sorted(shared_data("parquet").glob("data/**/*.parquet")):
        try:
            keys = text_columns(pq.read_schema(path))
        except pa.ArrowException:
            assert ["damaged Parquet" in r.problem for r in records(path)] == [True]
            continue
        if not keys:
            (result,) = records(path)
            assert result.failed and "expected a text column 'text', got columns" in result.problem
            continue
        got = records(path, text_key=keys[0], id_key="", max_document_bytes=1 << 20)
        table = None
        try:
            table = pq.read_table(path, columns=keys[:1], page_checksum_verification=True)
        except (OSError, pa.ArrowException):
            assert any("damaged Parquet" in r.problem for r in got)
        if table is not None:
            assert len(got) == table.num_rows, path.name
            values = [v.encode() if isinstance(v, str) else v for v in table[keys[0]].to_pylist()]
            texts = [r.text.encode() for r in got if not r.problem]
            assert texts == [v for v in values if v is not None and is_utf8(v)], path.name
            counted += len(got)
    assert counted > 1000


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_bad_parquet_is_refused_cleanly() -> None:
    for path in sorted(shared_data("parquet").glob("bad_data/*.parquet")):
        (problem,) = (r.problem for r in records(path, text_key="name") if r.problem)
        assert "damaged Parquet" in problem or "expected a text column 'name'" in problem, path.name
