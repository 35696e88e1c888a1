"""Reading by URL from a real server on this machine: ranges, dropped connections, servers that fail for a while."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from forebay.errors import PrepareError
from forebay.prepare.documents import Record
from forebay.prepare.read import ReadOptions, cut, find_sources, read
from forebay.prepare.read.hub import hub_source, parse_url

LINES = b"".join(json.dumps({"id": i, "text": f"document {i} " * 20}).encode() + b"\n" for i in range(3000))


class Origin(ThreadingHTTPServer):
    """Serves `files`; behaves as its fields say."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {"/a.jsonl": LINES, "/b.jsonl.gz": gzip.compress(LINES)}
        self.ranges = True
        self.drop_after = 0  # bytes of a body, then the connection is cut
        self.failures = 0  # requests still to be answered with 503
        self.version = "1"
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Origin

    def do_GET(self) -> None:
        origin = self.server
        asked = self.headers.get("Range", "")
        origin.asked.append(asked)
        data = origin.files.get(self.path.partition("?")[0])
        if origin.failures:
            origin.failures -= 1
            self.send_error(503)
            return
        if data is None:
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and origin.ranges else 0
        self.send_response(206 if asked and origin.ranges else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", origin.version)
        if origin.ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        body = data[start:]
        with suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(body[: origin.drop_after] if origin.drop_after else body)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def origin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Origin]:
    monkeypatch.setattr("forebay.prepare.read.remote._FIRST_WAIT_S", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Origin()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def records(*urls: str) -> list[Record]:
    options = ReadOptions()
    return [r for p in cut(find_sources(urls, options).sources, options) for r in read(p, options)]


def ids(*urls: str) -> list[str]:
    return [r.id for r in records(*urls) if not r.problem]


WANTED = [str(i) for i in range(3000)]


def test_urls_are_read_like_files(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ids(origin.url + "/a.jsonl") == WANTED
    assert ids(origin.url + "/b.jsonl.gz?signed=x/y.z") == WANTED
    source = find_sources([origin.url + "/b.jsonl.gz?signed=x"], ReadOptions()).sources[0]
    assert (source.name, source.format, source.compression) == ("b.jsonl.gz", "jsonl", "gz")
    assert (source.bytes, source.sha256) == (len(origin.files["/b.jsonl.gz"]), "etag:1")
    monkeypatch.setattr("forebay.prepare.read.lines.PIECE_BYTES", 100_000)
    assert ids(origin.url + "/a.jsonl") == WANTED
    assert any(asked for asked in origin.asked)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_dropped_connection_is_resumed(origin: Origin, ranges: bool) -> None:
    origin.ranges = ranges
    origin.drop_after = 300_000 if ranges else 0
    if not ranges:
        origin.failures = 2
    assert ids(origin.url + "/a.jsonl") == WANTED
    assert any(asked for asked in origin.asked) == ranges


def test_a_server_that_stays_down_is_told(origin: Origin) -> None:
    origin.failures = 1000
    with pytest.raises(PrepareError, match="cannot read input after 6 tries: HTTP status 503"):
        ids(origin.url + "/a.jsonl")
    origin.failures = 0
    with pytest.raises(PrepareError, match="got HTTP status 404"):
        ids(origin.url + "/missing.jsonl")
    with pytest.raises(PrepareError, match="expected a URL of http"):
        ids("ftp://127.0.0.1/a")


def test_a_file_that_changes_is_no_mixture(origin: Origin) -> None:
    origin.drop_after = 300_000
    options = ReadOptions()
    source = find_sources([origin.url + "/a.jsonl"], options).sources[0]
    rows = read(cut([source], options)[0], options)
    next(rows)
    origin.version = "2"
    with pytest.raises(PrepareError, match="the input changed while it was read"):
        list(rows)


def test_parquet_by_url(origin: Origin, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": [f"t{i}" * 100 for i in range(5000)]}), tmp_path / "a.parquet", row_group_size=500)
    origin.files["/a.parquet"] = (tmp_path / "a.parquet").read_bytes()
    origin.drop_after = 400_000
    assert [r.text for r in records(origin.url + "/a.parquet")] == [f"t{i}" * 100 for i in range(5000)]


def test_names_on_the_hub() -> None:
    assert parse_url("hf://datasets/owner/name") == ("owner/name", None, "train", "main")
    assert parse_url("hf://datasets/owner/name/en:validation") == ("owner/name", "en", "validation", "main")
    assert parse_url("hf://datasets//tmp/folder:test") == ("/tmp/folder", None, "test", "main")
    with pytest.raises(PrepareError, match="expected hf://datasets/NAME"):
        hub_source("hf://datasets/")


def test_a_dataset_in_a_directory_is_streamed(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_bytes(LINES)
    assert ids(f"hf://datasets/{tmp_path}") == WANTED
