"""Lists of paths and results of CommonCrawl's index, from a web server that fails, changes and cuts connections."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forebay
from forebay.errors import PrepareError, UsageError
from forebay.formats.inputs import ReadOptions
from forebay.prepare import crawl_index, path_lists
from forebay.prepare.inputs import find_inputs, read_split, sampled, split_files
from forebay.prepare.path_lists import is_path_below, is_path_list, list_paths
from forebay.storage import remote_file
from support.crawl import CRAWL, index_lines, write_index, write_mirror
from support.origin_server import OriginServer
from support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server
from support.shared_data import shared_data
from support.wire import until

WET = f"commoncrawl:{CRAWL}?kind=wet"
LIST = f"crawl-data/{CRAWL}/wet.paths.gz"


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    write_mirror(tmp_path / "mirror")
    return tmp_path / "mirror"


@pytest.fixture
def server(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OriginServer]:
    monkeypatch.setattr("forebay.storage.base._FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(remote_file, "_PATIENT_WAIT_S", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with OriginServer(mirror) as origin:
        monkeypatch.setenv(path_lists.SERVER_VARIABLE, origin.url)
        yield origin


def prepare(out: Path, *inputs: str | Path, workers: int = 1, **options: Any) -> forebay.PrepareResult:
    return forebay.prepare_dataset(inputs, out, tokenizer="bytes", name="d", workers=workers, **options)


def test_any_way_to_the_same_files_gives_the_same_dataset(server: OriginServer, mirror: Path, tmp_path: Path) -> None:
    by_name = prepare(tmp_path / "a", WET)
    by_url = prepare(tmp_path / "b", f"{server.url}/{LIST}", workers=3)
    local = prepare(tmp_path / "c", mirror / LIST)
    copied = tmp_path / "wet.paths"
    copied.write_bytes(gzip.decompress((mirror / LIST).read_bytes()))
    from_copy = prepare(tmp_path / "d", copied)
    assert by_name.documents_out == 100
    assert len({result.id for result in (by_name, by_url, local, from_copy)}) == 1
    assert not (tmp_path / "a" / ".work").exists()
    server.reset()
    assert prepare(tmp_path / "a", WET).already_exists
    assert sum(server.bytes_sent.values()) < (mirror / LIST).stat().st_size + 100, "files were fetched again"


def test_a_part_of_a_crawl(server: OriginServer, mirror: Path, tmp_path: Path) -> None:
    names = [entry.name for entry in list_paths(f"{WET}&files=1:3") if not isinstance(entry, path_lists.Skipped)]
    assert [name[-17:] for name in names] == ["-00001.warc.wet.gz"[1:], "-00002.warc.wet.gz"[1:]]
    with pytest.raises(PrepareError, match="expected files in that range, got none"):
        list(list_paths(f"{WET}&files=100:"))
    for wrong in ("?kind=wat", "?files=1-2", "?other=1", "/../..", ""):
        crawl = CRAWL if wrong else ""
        with pytest.raises(UsageError, match="expected commoncrawl:CRAWL"):
            list(list_paths(f"commoncrawl:{crawl}{wrong}"))


def test_a_sample_asks_for_the_sampled_files_only(server: OriginServer, mirror: Path, tmp_path: Path) -> None:
    remote = prepare(tmp_path / "a", WET, settings={"sample": 0.3})
    asked = [name for name in server.requests if name.endswith(".wet.gz")]
    assert len(asked) == 2 and 15 < remote.documents_in < 45
    assert prepare(tmp_path / "b", mirror / LIST, settings={"sample": 0.3}).id == remote.id


def test_sizes_are_asked_for_over_few_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mirror(tmp_path / "mirror", num_files=100, num_records=1)
    begin = remote_file.RemoteFolder.__init__

    def begin_together(folder: remote_file.RemoteFolder, url: str) -> None:
        begin(folder, url)
        time.sleep(0.05)  # All threads find none yet.

    monkeypatch.setattr(remote_file.RemoteFolder, "__init__", begin_together)
    with OriginServer(tmp_path / "mirror") as server:
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert len(find_inputs(f"{server.url}/{LIST}", ReadOptions()).files) == 100
        assert server.most_at_once <= remote_file.MAX_CONNECTIONS
        assert server.connections <= remote_file.MAX_CONNECTIONS + 2


@given(st.integers(1, 3000), st.floats(0.0005, 1))
def test_a_sample_of_a_sample_is_the_sample(count: int, fraction: float) -> None:
    """Files are chosen before splits are, by the same rule."""
    chosen, share = sampled(list(range(count)), fraction)
    again, rest = sampled(chosen, share)
    assert set(again) <= set(chosen) and len(chosen) - len(again) <= 1
    assert abs(len(again) * rest - count * fraction) < 1e-6 * count + 1e-6 or len(again) == 1


def test_a_server_in_trouble_is_waited_for(
    server: OriginServer,
    mirror: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = prepare(tmp_path / "a", mirror / LIST)
    monkeypatch.setattr("forebay.network.retry.FIRST_S", 0.005)
    server.faults.drop = server.faults.truncate = 0.3
    turns, server.faults.retry_after = itertools.count(1), "0"

    def too_many() -> bool:
        """Each fourth request, however fast this machine asks, and refused once the client said that it waits."""
        if next(turns) % 4:
            return False
        until(lambda: "waiting for" in caplog.text)
        return True

    monkeypatch.setattr(server, "too_many", too_many)
    monkeypatch.setattr("forebay.storage.base._FIRST_WAIT_S", 0.02)
    monkeypatch.setattr(remote_file, "_PATIENT_TRIES", 1000)
    assert prepare(tmp_path / "b", WET).id == expected.id
    assert server.statuses[503] and "waiting for" in caplog.text


def test_403_is_tried_again_and_then_ends_the_run(server: OriginServer, tmp_path: Path) -> None:
    server.faults.forbidden.add(f"crawl-data/{CRAWL}/segments/1/wet/{CRAWL}-00002.warc.wet.gz")
    with pytest.raises(PrepareError, match=r"after 12 tries: HTTP status 403 .*too many requests, or access is denied"):
        prepare(tmp_path / "a", WET)
    assert server.statuses[403] == 12


def test_a_listed_file_that_is_missing_is_named(server: OriginServer, tmp_path: Path) -> None:
    server.faults.missing.add(f"crawl-data/{CRAWL}/segments/1/wet/{CRAWL}-00002.warc.wet.gz")
    result = prepare(tmp_path / "a", WET)
    assert result.documents_out == 80 and result.skipped == {"is listed, but not there": 1}
    with pytest.raises(PrepareError, match=r"--strict: .* got 1 that cannot be read: .*00002\.warc"):
        prepare(tmp_path / "b", WET, strict=True)


def test_a_file_that_changes_is_never_mixed(server: OriginServer, mirror: Path, tmp_path: Path) -> None:
    path = mirror / f"crawl-data/{CRAWL}/segments/1/wet/{CRAWL}-00000.warc.wet.gz"
    folder, target = remote_file.RemoteFolder(server.url), tmp_path / "part"
    listed = folder.find(path.relative_to(mirror).as_posix())
    assert listed is not None
    old = path.read_bytes()
    target.write_bytes(old[:1000])
    path.write_bytes(bytes(len(old) + 5))
    with pytest.raises(PrepareError, match=r"00000\.warc\.wet\.gz: the input changed while it was read"):
        folder.fetch(listed, target)
    assert target.read_bytes() == old[:1000]
    path.write_bytes(old)
    folder.fetch(listed, target)
    assert target.read_bytes() == old
    assert server.ranges[-1][1:] == (1000, len(old))


def test_a_file_without_a_version_is_fetched_from_its_start(server: OriginServer, mirror: Path, tmp_path: Path) -> None:
    name = f"crawl-data/{CRAWL}/segments/1/wet/{CRAWL}-00000.warc.wet.gz"
    size, target = (mirror / name).stat().st_size, tmp_path / "part"
    target.write_bytes(b"x" * 1000)
    server.faults.truncate = 0.5
    remote_file.RemoteFolder(server.url).fetch(remote_file.RemoteFile(f"{server.url}/{name}", size, ""), target)
    assert target.read_bytes() == (mirror / name).read_bytes()
    assert {start for _, start, _ in server.ranges} == {0}


def test_a_file_without_room_is_not_begun(
    server: OriginServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(PrepareError, match=r"\.warc\.wet\.gz: expected 0\.0 GB free in .*Make room"):
        prepare(tmp_path / "a", WET)
    assert all(stop - start == 1 for name, start, stop in server.ranges if name.endswith(".wet.gz"))


def test_a_truncated_file_is_reported(server: OriginServer, mirror: Path, tmp_path: Path) -> None:
    path = mirror / f"crawl-data/{CRAWL}/segments/1/wet/{CRAWL}-00003.warc.wet.gz"
    path.write_bytes(path.read_bytes()[:-50])
    result = prepare(tmp_path / "a", WET)
    assert result.documents_out == 99 and result.dropped == {"malformed": 1}
    reject = json.loads((tmp_path / "a/rejects.jsonl").read_text())
    assert "00003.warc.wet.gz (byte" in reject["where"] and "ends early" in reject["reason"]
    assert reject["where"].startswith(server.url), "the place is of the file, not of its copy"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"http://10.0.0.1/a.warc.gz\n", "line 1: expected a path below the list's root"),
        (b"crawl-data/a.warc.gz\n../../etc/passwd\n", "line 2: expected a path below"),
        (b"//10.0.0.1/a.warc.gz", "expected a path below"),
        (b"a/%2e%2e/b.warc.gz", "expected a path below"),
        (b"\xff\x00\x1b[31m", "expected a path below"),
        (b"a" * 2000, "expected a path below"),
        (b"\n\n", "expected a list of paths, got none"),
        (b"a.warc.gz\n" * 1_000_000, "at most 200,000 paths and 32 MiB, got more"),
        (gzip.compress(bytes(64 << 20), 1), "at most 200,000 paths and 32 MiB, got more"),
        (gzip.compress(random.Random(1).randbytes(1000))[:-30], "expected a complete list, got: damaged gz"),
    ],
)  # fmt: skip
def test_hostile_lists_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.paths.gz"
    path.write_bytes(data)
    with pytest.raises(PrepareError, match=message) as raised:
        list(list_paths(path))
    assert str(raised.value).isprintable() and len(str(raised.value)) < 600


@given(st.text(max_size=60) | st.from_regex(r"([.a-z/%?#\\:-]{0,4}){1,5}", fullmatch=True))
def test_a_path_that_is_accepted_stays_below_its_root(path: str) -> None:
    if is_path_below(path):
        root = Path("/root/of/list")
        assert (root / path).resolve().is_relative_to(root) and path.isascii() and not set(path) & set("%?#\\: \n")


def test_a_bucket_is_a_mirror(
    server: OriginServer, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    with S3Server(mirror.parent) as bucket:
        for name, value in (("ENDPOINT_URL", bucket.endpoint), ("REGION", "us-east-1")):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        by_list = prepare(tmp_path / "a", f"s3://mirror/{LIST}")
        monkeypatch.setenv(path_lists.SERVER_VARIABLE, "s3://mirror")
        by_name = prepare(tmp_path / "b", WET, workers=2)
    monkeypatch.setenv(path_lists.SERVER_VARIABLE, server.url)
    assert by_list.id == by_name.id == prepare(tmp_path / "c", WET).id


def test_which_inputs_are_lists() -> None:
    lists = ("a/warc.paths.gz", "x.paths", "https://h/x.paths.gz?signed=1", "s3://b/wet.paths.gz", WET)
    assert all(map(is_path_list, lists))
    assert not any(map(is_path_list, ("x.paths.gz.txt", "paths", "a.paths/b.txt", "https://h/a?x.paths.gz", ".")))


def test_real_archives_by_a_list_are_those_that_are_named(
    server: OriginServer, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages (`response`), WET and damaged archives; the slices are those of the files themselves, in that order."""
    folder, names = shared_data("warc"), []
    for path in sorted([*folder.rglob("*.warc.gz"), *folder.rglob("*.warc.wet.gz")]):
        names.append(f"crawl-data/{path.relative_to(folder).as_posix()}")
        (mirror / names[-1]).parent.mkdir(parents=True, exist_ok=True)
        (mirror / names[-1]).write_bytes(path.read_bytes())
    (mirror / "all.paths").write_text("\n".join(names))
    options: Any = {"dedup": ["exact"], "settings": {"extract": {}, "max_error_rate": 0.5}}
    options["settings"]["slice"] = {"shuffle": True}
    remote = prepare(tmp_path / "a", f"{server.url}/all.paths", workers=2, **options)
    assert remote.documents_out > 10
    assert prepare(tmp_path / "b", mirror / "all.paths", **options).id == remote.id
    named = prepare(tmp_path / "c", *(mirror / name for name in names), **options)
    assert named.documents_out == remote.documents_out
    slices = [sorted(path.read_bytes() for path in (tmp_path / out / "slices").iterdir()) for out in "ac"]
    assert slices[0] == slices[1]


def test_the_list_of_a_real_crawl() -> None:
    entries = list(list_paths(shared_data("warc") / "whirlwind/CC-MAIN-2024-22.warc.paths.gz"))
    assert all(entry.path.startswith("https://data.commoncrawl.org/") for entry in entries)


# --- results of the index


def lines_of(mirror: Path) -> list[dict[str, Any]]:
    paths = sorted(path.relative_to(mirror).as_posix() for path in mirror.rglob("*.wet.gz"))
    return [line for path in paths for line in index_lines(mirror, path)]


def test_records_are_fetched_by_their_ranges(server: OriginServer, mirror: Path, tmp_path: Path) -> None:
    lines = lines_of(mirror)[::3]
    random.Random(2).shuffle(lines)
    index = write_index(tmp_path / "hits.jsonl", lines)
    options = ReadOptions(format="cdx")
    splits = split_files(find_inputs([index], options).files, options)
    records = [record for split in splits for record in read_split(split, options)]
    assert [record.url for record in records] == [line["url"] for line in lines]
    assert len(server.ranges) == 5, "one request a file, as gaps are small"
    read = {"read": {"format": "cdx"}}
    remote = prepare(tmp_path / "a", index, workers=2, settings=read)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(path_lists.SERVER_VARIABLE, str(mirror))
        assert prepare(tmp_path / "b", index, settings=read).id == remote.id


def test_ranges_of_a_file_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(start: int, stop: int, name: str = "a") -> crawl_index._Entry:
        return crawl_index._Entry(0, "", b"", "", name, start, stop)

    near, far = entry(10, 20), entry(20 + crawl_index.MAX_GAP_BYTES + 1, 1 << 20)
    assert list(crawl_index.merged([far, near, entry(0, 10), entry(0, 5, "b")])) == [
        [entry(0, 10), near], [far], [entry(0, 5, "b")]
    ]  # fmt: skip


def test_hostile_lines_of_an_index_are_malformed(server: OriginServer, mirror: Path, tmp_path: Path) -> None:
    good = lines_of(mirror)[:20]
    wrong = [
        {**good[0], "filename": "http://10.0.0.1/x"},
        {**good[0], "filename": "../../x"},
        {**good[0], "offset": "-5"},
        {**good[0], "length": str(1 << 40)},
        {**good[0], "offset": str(1 << 40)},
        {**good[0], "offset": "7"},
        {**good[0], "filename": "crawl-data/none.warc.gz"},
        {"url": "x"},
    ]
    index = write_index(tmp_path / "hits.jsonl", good + wrong)
    result = prepare(tmp_path / "a", index, settings={"read": {"format": "cdx"}, "max_error_rate": 0.5})
    assert (result.documents_out, result.dropped["malformed"]) == (20, len(wrong))
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "a/rejects.jsonl").read_text().splitlines()]
    assert "more than max_document_bytes" in reasons[3] and "416" in reasons[4] and "404" in reasons[6]
    assert "expected a WARC record" in reasons[5]


def test_headers_of_a_record_are_columns(mirror: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    columns = {"date": "text", "language": "text", "Content-Length": "number", "none": "text"}
    prepare(tmp_path / "a", mirror / LIST, to="parquet", settings={"read": {"columns": columns}})
    rows = pq.read_table(tmp_path / "a/text").to_pylist()
    assert rows[0]["url"] == "http://site0.example/" and rows[0]["date"] == "2026-07-01T00:00:00Z"
    assert (rows[0]["language"], rows[0]["Content-Length"], rows[0]["none"]) == ("eng,deu", 300.0, "")


def test_the_wet_file_of_a_real_crawl(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = shared_data("warc") / "whirlwind/whirlwind.warc.wet.gz"
    prepare(tmp_path / "a", path, to="parquet", settings={"read": {"columns": {"date": "text", "language": "text"}}})
    (row,) = pq.read_table(tmp_path / "a/text").to_pylist()
    assert (row["url"], row["date"]) == ("https://an.wikipedia.org/wiki/Escopete", "2024-05-18T01:58:10Z")
    assert row["language"] == "spa" and row["text"].startswith("Escopete - Biquipedia")
