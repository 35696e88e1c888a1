"""Lists of paths and results of CommonCrawl's index, from a web server that fails, changes and cuts connections."""

import gzip
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import PrepareError, UsageError
from forebay.prepare import path_lists
from forebay.prepare.path_lists import is_path_below, is_path_list, list_paths
from forebay.storage import remote_file
from forebay.storage.base import Patience
from support.crawl import CRAWL, write_mirror
from support.origin_server import OriginServer
from support.preparing import prepare, read_lines
from support.shared_data import shared_data

WET = f"commoncrawl:{CRAWL}?kind=wet"
LIST = f"crawl-data/{CRAWL}/wet.paths.gz"
FILES = [f"crawl-data/{CRAWL}/segments/1/wet/{CRAWL}-{index:05}.warc.wet.gz" for index in range(5)]


@pytest.fixture
def mirror(tmp_path) -> Path:
    write_mirror(tmp_path / "mirror")
    return tmp_path / "mirror"


@pytest.fixture
def server(mirror, monkeypatch) -> Iterator[OriginServer]:
    monkeypatch.setattr("forebay.storage.base._FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(remote_file, "_OF_LISTED", Patience(tries=12, max_wait_s=0.01))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with OriginServer(mirror) as origin:
        monkeypatch.setenv(path_lists.SERVER_VARIABLE, origin.url)
        yield origin


def test_any_way_to_the_same_files_gives_the_same_dataset(server, mirror, tmp_path):
    copied = tmp_path / "wet.paths"
    copied.write_bytes(gzip.decompress((mirror / LIST).read_bytes()))
    ways = {"name": WET, "url": f"{server.url}/{LIST}", "local": mirror / LIST, "copy": copied}
    results = {way: prepare(source, tmp_path / way, name="d") for way, source in ways.items()}
    assert results["name"].documents_out == 100 and len({result.id for result in results.values()}) == 1
    assert not (tmp_path / "name" / ".work").exists()
    prepare([mirror / name for name in FILES], tmp_path / "files")
    slices = [[p.read_bytes() for p in sorted((tmp_path / d / "slices").iterdir())] for d in ("name", "files")]
    assert slices[0] == slices[1]
    server.reset()
    assert prepare(WET, tmp_path / "name", name="d").already_exists
    assert sum(server.bytes_sent.values()) < (mirror / LIST).stat().st_size + 100, "files were fetched again"


def test_a_part_of_a_crawl(server):
    names = [entry.name for entry in list_paths(f"{WET}&files=1:3") if not isinstance(entry, path_lists.Skipped)]
    assert [name[-17:] for name in names] == ["-00001.warc.wet.gz"[1:], "-00002.warc.wet.gz"[1:]]
    with pytest.raises(PrepareError, match="expected files in that range, got none"):
        list(list_paths(f"{WET}&files=100:"))
    for wrong in ("?kind=wat", "?files=1-2", "?other=1", "/../..", ""):
        with pytest.raises(UsageError, match="expected commoncrawl:CRAWL"):
            list(list_paths(f"commoncrawl:{CRAWL if wrong else ''}{wrong}"))


def test_a_sample_requests_the_sampled_files_only(server, mirror, tmp_path):
    settings = {"sample": 0.3}
    remote = prepare(WET, tmp_path / "a", name="d", settings=settings)
    assert sum(name.endswith(".wet.gz") for name in server.requests) == 2 and 15 < remote.documents_in < 45
    assert prepare(mirror / LIST, tmp_path / "b", name="d", settings=settings).id == remote.id


def test_a_server_in_trouble_is_waited_for(server, mirror, tmp_path, monkeypatch):
    expected = prepare(mirror / LIST, tmp_path / "a", name="d")
    server.faults.drop = server.faults.truncate = 0.3
    turns, server.faults.retry_after = itertools.count(1), "0"
    monkeypatch.setattr(server, "too_many", lambda: not next(turns) % 4)
    for name in ("_OF_LISTED", "_OF_HTTP"):
        monkeypatch.setattr(remote_file, name, Patience(tries=1000, max_wait_s=0.02))
    assert prepare(WET, tmp_path / "b", name="d").id == expected.id and server.statuses[503]


def test_files_that_are_refused_missing_or_without_room(server, tmp_path, monkeypatch):
    server.faults.forbidden.add(FILES[2])
    with pytest.raises(PrepareError, match=r"after 12 tries: HTTP status 403 .*too many requests, or access is denied"):
        prepare(WET, tmp_path / "forbidden")
    assert server.statuses[403] == 12
    server.faults.forbidden.clear()
    server.faults.missing.add(FILES[2])
    result = prepare(WET, tmp_path / "missing", settings={"max_error_rate": 0.3})
    assert result.documents_out == 80 and result.skipped == {"is listed, but not there": 1}
    with pytest.raises(PrepareError, match=r"--strict: .* got 1 that cannot be read: .*00002\.warc"):
        prepare(WET, tmp_path / "strict", strict=True)
    server.faults.missing.clear()
    server.reset()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(PrepareError, match=r"\.warc\.wet\.gz: expected 0\.0 GB free in .*Make room"):
        prepare(WET, tmp_path / "full")
    assert all(stop - start == 1 for name, start, stop in server.ranges if name.endswith(".wet.gz"))


def test_a_file_that_changes_is_never_mixed(server, mirror, tmp_path, monkeypatch):
    path, target, folder = mirror / FILES[0], tmp_path / "part", remote_file.RemoteFolder(server.url)
    listed, old = folder.find(FILES[0]), path.read_bytes()
    assert listed is not None
    target.write_bytes(old[:1000])
    path.write_bytes(bytes(len(old) + 5))
    with pytest.raises(PrepareError, match=r"00000\.warc\.wet\.gz: the input changed while it was read"):
        folder.fetch(FILES[0], listed, target)
    assert target.read_bytes() == old[:1000]
    path.write_bytes(old)
    folder.fetch(FILES[0], listed, target)
    assert target.read_bytes() == old and server.ranges[-1][1:] == (1000, len(old))
    # A file without a version is fetched from its start.
    server.reset()
    server.faults.truncate = 0.5
    monkeypatch.setattr(remote_file, "_OF_LISTED", Patience(tries=1000, max_wait_s=0.01))
    target.write_bytes(b"x" * 1000)
    folder.fetch(FILES[0], remote_file.RemoteFile(f"{server.url}/{FILES[0]}", len(old), ""), target)
    assert target.read_bytes() == old and {start for _, start, _ in server.ranges} == {0}


def test_a_truncated_file_is_reported(server, mirror, tmp_path):
    path = mirror / FILES[3]
    path.write_bytes(path.read_bytes()[:-50])
    result = prepare(WET, tmp_path / "a")
    assert result.documents_out == 99 and result.dropped == {"malformed": 1}
    (reject,) = read_lines(tmp_path / "a/rejects.jsonl")
    assert "00003.warc.wet.gz (byte" in reject["where"] and "ends early" in reject["reason"]
    assert reject["where"].startswith(server.url), "the place is of the file, not of its copy"


@pytest.mark.parametrize(
    "data, message",
    [
        (b"http://10.0.0.1/a.warc.gz\n", "line 1: expected a path below the list's root"),
        (b"crawl-data/a.warc.gz\n../../etc/passwd\n", "line 2: expected a path below"),
        (b"a/./b.warc.gz", "expected a path below"),
        (b"\xff\x00\x1b[31m", "expected a path below"),
        (b"\n\n", "expected a list of paths, got none"),
        (b"a.warc.gz\n" * 1_000_000, "at most 200,000 paths and 32 MiB, got more"),
        (gzip.compress(bytes(64 << 20), 1), "at most 200,000 paths and 32 MiB, got more"),
        (gzip.compress(random.Random(1).randbytes(1000))[:-30], "expected a complete list, got: damaged gz"),
    ],
    ids=range(8),
)
def test_hostile_lists_are_refused(tmp_path, data, message):
    path = tmp_path / "x.paths.gz"
    path.write_bytes(data)
    with pytest.raises(PrepareError, match=message) as raised:
        list(list_paths(path))
    assert str(raised.value).isprintable() and len(str(raised.value)) < 600


@given(st.text(max_size=60) | st.from_regex(r"([.a-z/%?#\\:-]{0,4}){1,5}", fullmatch=True))
def test_a_path_that_is_accepted_stays_below_its_root(path):
    if is_path_below(path):
        root = Path("/root/of/list")
        assert (root / path).resolve().is_relative_to(root) and path.isprintable()


def test_which_inputs_are_lists():
    lists = ("a/warc.paths.gz", "x.paths", "https://h/x.paths.gz?signed=1", "s3://b/wet.paths.gz", WET)
    assert all(map(is_path_list, lists))
    assert not any(map(is_path_list, ("x.paths.gz.txt", "paths", "a.paths/b.txt", "https://h/a?x.paths.gz", ".")))
    entries = list_paths(shared_data("warc") / "whirlwind/CC-MAIN-2024-22.warc.paths.gz")
    assert all(entry.path.startswith("https://data.commoncrawl.org/") for entry in entries)


def test_headers_of_a_record_are_columns(mirror, tmp_path):
    columns = {"date": "text", "language": "text", "Content-Length": "number", "none": "text"}
    prepare(mirror / LIST, tmp_path / "a", to="parquet", settings={"read": {"columns": columns}})
    row = pq.read_table(tmp_path / "a/text").to_pylist()[0]
    assert (row["url"], row["date"]) == ("http://site0.example/", "2026-07-01T00:00:00Z")
    assert (row["language"], row["Content-Length"], row["none"]) == ("eng,deu", 300.0, "")
