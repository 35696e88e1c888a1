"""Small files that ask for much: what comes out is bounded, whatever the format, and what is left out is said."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.formats import arrow_ipc as ipc
from forebay.formats import inputs as compression
from support.archives import tar_bytes
from support.preparing import good_texts, problems, write_jsonl
from support.preparing import read_records as records

MIB = 1 << 20


def write_ipc(path: Path, batch: pa.RecordBatch, stream: bool = False, count: int = 1):
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
def test_text_beyond_the_limit_is_left_out(tmp_path, monkeypatch, kind):
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
    (problem,) = [r.problem for r in result if r.problem]
    assert "a bomb" in problem
    if kind != "jsonl.gz":  # whose own limit counts the bytes that were read
        assert len(records(path, max_unpacked_ratio=40 * MIB)) == 40


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "file"])
@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_a_batch_larger_than_memory_should_hold_is_refused(tmp_path, monkeypatch, stream, packed):
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
    expected = "larger than can be held" if stream or not packed else "compressed as a whole"
    assert expected in problems(path)[0]


def test_heads_that_do_not_end_cost_little_and_lose_nothing(tmp_path):
    path = tmp_path / "a.warc"
    path.write_bytes(http(PAGE) + b"WARC/1.0\nA:\n" * 300 + http(PAGE) * 400)
    assert len(good_texts(path)) == 401 and problems(path) == ["a WARC header that does not end"] * 300


def test_a_piece_of_malformed_records_is_left(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 900 + "x\n" * 5000)
    result = records(path)
    assert len(result) == 900 + 1001 + 1 and "1001 of 1901 records are malformed" in result[-1].problem
    assert len(records(path, max_malformed=1)) == 5900
    monkeypatch.setattr("forebay.prepare.inputs.MAX_EMPTY", 1000)
    path.write_text('{"text": "a"}\n' + "\n" * 2000)
    assert "1001 records in a row hold no document" in records(path)[-1].problem


def test_a_sample_of_a_tar_is_bounded(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes(dict.fromkeys([*(f"a.{i}.bin" for i in range(1001)), "b.txt"], b"")))
    assert problems(path) == ["a sample of more than 1000 members, or twice max_document_bytes"]


def test_an_object_of_millions_of_values_is_refused_and_text_full_of_commas_is_not(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, ['1,[2],{"3"},' * 500_000])
    assert [len(text) for text in good_texts(path)] == [6_000_000]
    path.write_text(f'{{"text": "a", "x": [{",".join(["{}"] * 2_100_000)}]}}\n')
    assert "values in one object" in problems(path)[0]
