"""Small files that ask for much: what comes out is bounded, whatever the format, and what is left out is said."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.formats import arrow_ipc as ipc
from forebay.formats import inputs as compression
from forebay.formats.inputs import ReadOptions
from forebay.formats.records import Record
from forebay.prepare.inputs import find_inputs, read_split, split_files

MIB = 1 << 20


def records(path: Path, name: str = "auto", **options: object) -> list[Record]:
    chosen = ReadOptions(format=name, **options)  # type: ignore[arg-type]
    return [r for p in split_files(find_inputs([path], chosen).files, chosen) for r in read_split(p, chosen)]


def problems(result: list[Record]) -> list[str]:
    return [r.problem for r in result if r.problem]


def write_ipc(path: Path, batch: pa.RecordBatch, stream: bool = False, count: int = 1) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    opened = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opened(path, batch.schema, options=options) as writer:
        for _ in range(count):
            writer.write_batch(batch)


def http(body: bytes, *headers: bytes) -> bytes:
    answer = b"\r\n".join([b"HTTP/1.1 200 OK", b"Content-Type: text/html", *headers, b"", body])
    head = b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a/\r\nContent-Length: %d\r\n\r\n" % len(answer)
    return head + answer + b"\r\n\r\n"


PAGE = b"<html><body><p>words</p></body></html>"


@pytest.mark.parametrize("kind", ["parquet", "arrow", "warc", "jsonl.gz"])
def test_text_beyond_the_limit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """One text of 1 MiB, 40 times, in a file of a few KB; the limit is 8 MiB here."""
    monkeypatch.setattr(compression, "MIN_UNPACKED_BYTES", 8 * MIB)
    path, text = tmp_path / f"a.{kind}", "a b " * (MIB // 4)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 40, pa.int32()), pa.array([text], pa.large_string()))
    batch = pa.record_batch([column], ["text"])
    if kind == "parquet":
        pq.write_table(pa.Table.from_batches([batch]), path, compression="zstd")
    elif kind == "arrow":
        write_ipc(path, batch)
    elif kind == "warc":
        path.write_bytes(http(gzip.compress(gzip.compress(text.encode())), b"Content-Encoding: gzip, gzip") * 40)
    else:
        path.write_bytes(gzip.compress((json.dumps({"text": text}) + "\n").encode()) * 40)
    result = records(path, max_unpacked_ratio=20)
    assert 6 <= sum(not r.problem for r in result) <= 10
    assert "a bomb" in problems(result)[-1] and len(problems(result)) == 1
    if kind != "jsonl.gz":  # whose own limit counts the bytes that were read
        assert len(records(path, max_unpacked_ratio=40 * MIB)) == 40


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "file"])
@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_a_batch_larger_than_memory_should_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, packed: bool
) -> None:
    monkeypatch.setattr(ipc, "MAX_BUFFERED_BYTES", 16 * MIB)
    path = tmp_path / "a.arrow"
    small = pa.record_batch([pa.array(["x" * 100] * 30, pa.large_string())], ["text"])
    write_ipc(path, small, stream, 3)
    assert len(records(path)) == 90
    large = pa.record_batch([pa.array(["x" * MIB] * 20, pa.large_string())], ["text"])
    write_ipc(path, large, stream)
    if packed:
        data, path = path.read_bytes(), tmp_path / "a.arrow.gz"
        path.write_bytes(gzip.compress(data))
    assert ("larger than can be held" if stream or not packed else "compressed as a whole") in problems(records(path))[
        0
    ]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_categories_cost_what_is_used_of_them(tmp_path: Path, kind: str) -> None:
    words = pa.array([f"w{i:020}" for i in range(400_000)])

    def seconds(column: pa.Array) -> float:
        path, batch = tmp_path / f"a.{kind}", pa.record_batch([column], ["text"])
        if kind == "parquet":
            pq.write_table(pa.Table.from_batches([batch]), path)
        else:
            write_ipc(path, batch, count=50)
        began = time.process_time()
        assert [r.text for r in records(path)][:2000] == words.slice(0, 2000).to_pylist()
        return time.process_time() - began

    plain = seconds(words.slice(0, 2000))
    categories = pa.DictionaryArray.from_arrays(pa.array(range(2000), pa.int32()), words)
    # A conversion of all categories takes some 0.06 s; one for every 256 rows of Arrow, as it was, are 390.
    assert seconds(categories) < 2 * plain + 1


def test_heads_that_do_not_end_cost_little_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(http(PAGE) + b"WARC/1.0\nA:\n" * 300 + http(PAGE) * 400)
    result = records(path)
    assert sum(not r.problem for r in result) == 401
    assert problems(result) == ["a WARC header that does not end"] * 300


def test_a_piece_of_malformed_records_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 900 + "x\n" * 5000)
    result = records(path)
    assert len(result) == 900 + 1001 + 1 and "1001 of 1901 records are malformed" in result[-1].problem
    assert len(records(path, max_malformed=1)) == 5900
    monkeypatch.setattr("forebay.prepare.inputs.MAX_EMPTY", 1000)
    path.write_text('{"text": "a"}\n' + "\n" * 2000)
    assert "1001 records in a row hold no document" in records(path)[-1].problem


def test_encodings_in_encodings_are_refused(tmp_path: Path) -> None:
    path, body = tmp_path / "a.warc", PAGE
    for _ in range(3):
        body = gzip.compress(body)
    path.write_bytes(http(gzip.compress(gzip.compress(PAGE)), b"Content-Encoding: gzip, gzip"))
    assert [(r.text, r.problem) for r in records(path)] == [(PAGE.decode(), "")]
    path.write_bytes(http(body, b"Content-Encoding: gzip, gzip, gzip"))
    assert problems(records(path)) == ["a body with more than 2 content encodings"]


def test_a_sample_of_a_tar_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name in [*(f"a.{i}.bin" for i in range(1001)), "b.txt"]:
            archive.addfile(tarfile.TarInfo(name))
    assert problems(records(path)) == ["a sample of more than 1000 members, or twice max_document_bytes"]


MEASURE = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from unit.prepare.test_hostile_files import records
records(Path(sys.argv[1]).with_name("honest.jsonl"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = records(Path(sys.argv[1]), sys.argv[3])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10, repr(found[0].problem))
"""


@pytest.mark.parametrize(("value", "name"), [("{}", "jsonl"), ('{"":0}', "jsonl"), ('"ab"', "jsonl"), ("{}", "json")])
def test_values_that_nobody_asked_for_take_little_memory(tmp_path: Path, value: str, name: str) -> None:
    path = tmp_path / f"a.{name}"
    many = ",".join([value] * (30 * MIB // (len(value) + 1)))
    path.write_text(f'{{"text": "a", "x": [{many}]}}\n')
    (tmp_path / "honest.jsonl").write_text('{"text": "a"}\n')
    argv = [sys.executable, "-c", MEASURE, str(path), str(Path(__file__).parent), name]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    mib, problem = done.stdout.split(maxsplit=1)
    assert int(mib) < 600 and "values in one object" in problem


def test_text_full_of_commas_is_no_such_thing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": '1,[2],{"3"},' * 500_000}) + "\n")
    (result,) = records(path)
    assert not result.problem and len(result.text) == 6_000_000
