"""Reading by URL from a real server on this machine: ranges, dropped connections, servers that fail for a while."""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from forebay.errors import PrepareError
from forebay.formats.inputs import ReadOptions
from forebay.prepare.inputs import find_inputs, read_split, split_files
from forebay.storage.base import PermanentError
from forebay.storage.http import WebOrigin
from support.answers import Answer, serve
from support.preparing import read_records

LINES = b"".join(json.dumps({"id": i, "text": f"document {i} " * 20}).encode() + b"\n" for i in range(3000))


@dataclass
class Origin:
    """Serves `files`; behaves as its fields say."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=lambda: {"/a.jsonl": LINES, "/b.jsonl.gz": gzip.compress(LINES)})
    ranges: bool = True
    drop_after: int | None = None  # bytes of a body, then the connection is cut
    failures: int = 0  # requests still to be answered with 503
    version: str = "1"
    modified: str = ""  # in place of an ETag
    head: dict[str, str] = field(default_factory=dict)  # headers that lie
    requested: list[str] = field(default_factory=list)

    def answer(self, path: str, headers: Mapping[str, str]) -> Answer:
        requested = headers.get("Range", "")
        self.requested.append(requested)
        data = self.files.get(path.partition("?")[0])
        if self.failures or data is None:
            self.failures -= bool(self.failures)
            return 503 if data is not None else 404, {}, b"", None
        is_part = bool(requested) and self.ranges
        first, _, last = requested.removeprefix("bytes=").partition("-")
        start, stop = (int(first), int(last) + 1) if is_part else (0, len(data))
        response = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        response |= {"Last-Modified": self.modified} if self.modified else {"ETag": self.version}
        status = 302 if "Location" in self.head else 206 if is_part else 200
        return status, response | self.head, data[start:stop], self.drop_after


@pytest.fixture
def origin(monkeypatch) -> Iterator[Origin]:
    monkeypatch.setattr("forebay.storage.base._FIRST_WAIT_S", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = Origin()
    with serve(state.answer) as state.url:
        yield state


def ids(url: str) -> list[str]:
    return [record.id for record in read_records(url) if not record.problem]


EXPECTED = [str(i) for i in range(3000)]


def test_urls_are_read_like_files(origin, monkeypatch):
    assert ids(origin.url + "/a.jsonl") == EXPECTED
    assert ids(origin.url + "/b.jsonl.gz?signed=x/y.z") == EXPECTED
    source = find_inputs([origin.url + "/b.jsonl.gz?signed=x"], ReadOptions()).files[0]
    assert (source.name, source.format, source.compression) == ("b.jsonl.gz", "jsonl", "gz")
    assert (source.bytes, source.sha256) == (len(origin.files["/b.jsonl.gz"]), "etag:1")
    monkeypatch.setattr("forebay.formats.text.SPLIT_BYTES", 100_000)
    assert ids(origin.url + "/a.jsonl") == EXPECTED
    assert any(origin.requested)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_dropped_connection_is_resumed(origin, ranges):
    origin.ranges = ranges
    origin.drop_after = 300_000 if ranges else None
    if not ranges:
        origin.failures = 2
    assert ids(origin.url + "/a.jsonl") == EXPECTED
    assert len(origin.requested) > 3


def test_a_server_that_stays_down_is_told(origin):
    origin.failures = 1000
    with pytest.raises(PrepareError, match="cannot read input after 6 tries: HTTP status 503"):
        ids(origin.url + "/a.jsonl")
    origin.failures = 0
    with pytest.raises(PrepareError, match="got HTTP status 404"):
        ids(origin.url + "/missing.jsonl")
    with pytest.raises(PrepareError, match="cannot read input: expected a path or a URL of http"):
        ids("ftp://127.0.0.1/a")


@pytest.mark.parametrize(
    "by, when",
    [("etag", "before"), ("etag", "between"), ("etag", "within"), ("weak", "within"), ("time", "between")],
)
def test_a_file_is_read_as_it_was_listed(origin, monkeypatch, by, when):
    """The file changes before its first byte is read, between two splits, or within one."""
    monkeypatch.setattr("forebay.formats.text.SPLIT_BYTES", len(LINES) // 2)

    def replace(day):
        if by == "time":
            origin.modified = f"Mon, {day:02} Jan 2023 00:00:00 GMT"
        else:
            origin.version = f'{"W/" * (by == "weak")}"{day}"'

    origin.drop_after = 300_000
    replace(2)
    options = ReadOptions()
    first, second = split_files(find_inputs(origin.url + "/a.jsonl", options).files, options)
    got = 0
    if when == "before":
        replace(3)
    with pytest.raises(PrepareError, match=r"a\.jsonl: the input changed while it was read\. Start again\."):
        for _ in read_split(first, options):
            got += 1
            if when == "within":
                replace(3)
        replace(3)
        for _ in read_split(second, options):
            got += 1
    assert (got == 0) == (when == "before") and got < 3000


@pytest.mark.parametrize(
    "head, message",
    [
        ({"Content-Range": "bytes 0-0/abc"}, r"/a\.jsonl: cannot read input: the server sends no size"),
        ({"Content-Range": ""}, r"/a\.jsonl: cannot read input: the server sends no size"),
        ({"Content-Range": "bytes 0-0/2000000000000000"}, "expected at most 64 TiB, got 2000000000000000 bytes"),
        ({"Location": "file:///etc/hostname"}, "expected a redirect to http or https, got one to 'file'"),
        ({"Location": "ftp://127.0.0.1:1/x"}, "expected a redirect to http or https, got one to 'ftp'"),
    ],
)
def test_a_head_that_lies_is_refused(origin, head, message):
    origin.head = head
    with pytest.raises(PrepareError, match=message):
        ids(origin.url + "/a.jsonl")


@pytest.mark.parametrize(
    "inside", ["http://127.0.0.1:1/", "http://169.254.169.254/latest", "http://10.0.0.1/", "http://[::1]/"]
)
def test_a_public_server_redirects_to_nothing_inside(origin, monkeypatch, inside):
    """A proxy answers for the public address."""
    monkeypatch.setenv("http_proxy", origin.url)
    monkeypatch.setenv("no_proxy", "")
    origin.files["http://93.184.215.14/a.jsonl"] = LINES
    origin.head = {"Location": inside}
    with pytest.raises(PrepareError, match="expected a redirect to a public address"):
        ids("http://93.184.215.14/a.jsonl")
    assert len(origin.requested) == 1
    with pytest.raises(PermanentError, match="expected a redirect to a public address"):
        WebOrigin("http://93.184.215.14").get("a.jsonl", 1000)
    assert len(origin.requested) == 2
