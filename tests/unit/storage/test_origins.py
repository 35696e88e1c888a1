"""Every kind of origin answers alike; a dataset at a URL is verified; peers are origins too."""

import os
import random
import shutil
from collections.abc import Callable, Iterator

import pytest

from forebay.data_node import DataNode
from forebay.dataset.reader import Dataset
from forebay.errors import DatasetError, NetworkError, ProtocolError, UsageError
from forebay.network.peer_dataset import PeerOrigin
from forebay.network.pki.identity import Identity
from forebay.storage import http
from forebay.storage.base import Origin, PermanentError, Timeouts, TransientError, read_small
from forebay.storage.origins import open_origin, open_remote
from support.local_discovery import LocalDiscovery
from support.origin_server import OriginServer
from support.token_slices import write_tokens

NAME = "slices/a b+ü.bin"
CONTENT = random.Random(3).randbytes(700_001)
PATIENT = Timeouts(connect_s=60.0, stall_s=60.0)  # Also on a busy machine.


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[OriginServer]:
    folder = tmp_path / "served" / "data"
    (folder / "slices").mkdir(parents=True)
    (folder / NAME).write_bytes(CONTENT)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with OriginServer(tmp_path / "served") as created:
        for key, value in created.s3_environment.items():
            monkeypatch.setenv(key, value)
        yield created


@pytest.fixture(params=["path", "file", "http", "s3", "r2", "hf"])
def origin(request, server, monkeypatch) -> Origin:
    folder = server.directory / "data"
    match request.param:
        case "path":
            return open_origin(folder)
        case "file":
            return open_origin(f"file://{folder}")
        case "http":
            return open_origin(f"{server.url}/data", timeouts=PATIENT)
        case "s3":
            return open_origin(f"{server.s3_url}/data/", timeouts=PATIENT)
        case "r2":
            set_r2(monkeypatch, server)
            return open_origin("r2://", timeouts=PATIENT)
    shutil.copytree(folder, server.directory / "datasets/me/corpus/resolve/main/v1")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return open_origin("hf://datasets/me/corpus/v1", timeouts=PATIENT)


def set_r2(monkeypatch: pytest.MonkeyPatch, server: OriginServer):
    monkeypatch.setenv("R2_DATASET_ACCOUNT_ID", "account")
    monkeypatch.setenv("R2_DATASET_BUCKET_NAME", "bucket")
    monkeypatch.setenv("R2_DATASET_READ_ACCESS_KEY_ID", server.s3_environment["AWS_ACCESS_KEY_ID"])
    monkeypatch.setenv("R2_DATASET_READ_SECRET_ACCESS_KEY", server.s3_environment["AWS_SECRET_ACCESS_KEY"])
    monkeypatch.setenv("DATASET_BINS_PATH", "data/")


def read(origin: Origin, name: str, start: int, stop: int) -> bytes:
    return b"".join(bytes(piece) for piece in origin.read(name, start, stop))


def test_every_kind_answers_alike(origin):
    size = len(CONTENT)
    for start, stop in [(0, size), (0, 1), (size - 1, size), (1000, 600_000)]:
        assert read(origin, NAME, start, stop) == CONTENT[start:stop]
        assert read_small(origin, NAME, stop - start, start=start) == CONTENT[start:stop]
    assert [each.url for each in origin.sources()] == [origin.url]
    assert origin.get(NAME, size) == CONTENT
    with pytest.raises(PermanentError, match="larger"):
        origin.get(NAME, size - 1)
    for name, start, stop in (("none", 0, 5), (NAME, size - 5, size + 5)):
        with pytest.raises(PermanentError):
            read(origin, name, start, stop)
    with pytest.raises(PermanentError):
        origin.get("none", 5)
    with pytest.raises(DatasetError, match="Check the URL"):
        read_small(origin, "none", 5)


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_an_overload_is_told(server, scheme):
    origin = open_origin(f"{server.url if scheme == 'http' else server.s3_url}/data", timeouts=PATIENT)
    server.faults.requests_per_s, server.faults.retry_after = 1e-9, "7"
    with pytest.raises(TransientError) as caught:
        read(origin, NAME, 0, 5)
    assert caught.value.throttled
    assert caught.value.wait_s == (7 if scheme == "http" else 0)


def test_a_drip_is_a_stall(server, monkeypatch):
    pace = http.StreamedResponse.pace
    monkeypatch.setattr(http.StreamedResponse, "pace", lambda answer, stall_s, rate: pace(answer, 0.1, rate))
    server.faults.connection_bytes_per_s = 1e-3
    with pytest.raises(TransientError, match=r"no byte for|stalled"):
        read(open_origin(f"{server.url}/data", timeouts=PATIENT), NAME, 0, 500_000)


def test_other_bytes_than_were_requested(server):
    web, bucket = (open_origin(f"{url}/data", timeouts=PATIENT) for url in (server.url, server.s3_url))
    for _ in range(3):
        assert read(web, NAME, 5, 10) == CONTENT[5:10]
    assert server.connections == 1, "connections are kept"
    server.faults.truncate = 1
    got = read(web, NAME, 0, len(CONTENT))
    assert 0 < len(got) < len(CONTENT) and CONTENT.startswith(got)
    server.faults.truncate, server.faults.ignore_ranges = 0, True
    assert read(web, NAME, 300_000, 300_010) == CONTENT[300_000:300_010]
    assert read(bucket, NAME, 1, 5) == CONTENT[1:5]
    server.faults.ignore_ranges, server.shift_ranges = False, 1
    with pytest.raises(ProtocolError, match="Content-Range"):
        read(web, NAME, 10, 20)


def test_a_proxy(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "")
    assert read(open_origin("http://origin.invalid/data"), NAME, 4, 8) == CONTENT[4:8]
    assert server.paths == ["http://origin.invalid/data/slices/a%20b%2B%C3%BC.bin"]


def test_the_hub(server, tmp_path, monkeypatch):
    """A token goes to the hub and not to the store it redirects to; where an object lies is remembered."""
    monkeypatch.setenv("HF_ENDPOINT", f"{server.url}/")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    index = "datasets/me/corpus/resolve/refs%2Fpr%2F1/v1"
    with OriginServer(tmp_path / "store") as store:
        (tmp_path / "store" / "datasets/me/corpus/resolve/refs/pr/1/v1/slices").mkdir(parents=True)
        shutil.copy(server.directory / "data" / NAME, tmp_path / "store" / index.replace("%2F", "/") / NAME)
        server.redirect, server.auth = store.url, None
        origin = open_origin("hf://datasets/me/corpus@refs%2Fpr%2F1/v1")
        for _ in range(3):
            assert read(origin, NAME, 9, 99) == CONTENT[9:99]
        assert server.paths[0].startswith(f"/{index}/")
        assert len(server.paths) == 1
        assert server.authorizations == ["Bearer hf_secret"]
        assert store.authorizations == ["", "", ""]
        store.faults.forbidden.add(f"{index.replace('%2F', '/')}/{NAME}")
        with pytest.raises(PermanentError, match="403"):
            read(origin, NAME, 9, 99)
        assert len(server.paths) == 2, "an address that is refused is asked for again"
    with pytest.raises(UsageError, match="hf://datasets/OWNER/NAME"):
        open_origin("hf://datasets/me")


def test_r2_names_what_is_missing(monkeypatch, server):
    set_r2(monkeypatch, server)
    names = [name for name in os.environ if name.startswith("R2_DATASET_")] + ["DATASET_BINS_PATH"]
    assert len(names) == 5
    for name in names:
        with monkeypatch.context() as patched:
            patched.delenv(name)
            with pytest.raises(UsageError, match=name) as caught:
                open_origin("r2://")
            assert server.s3_environment["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert "account.r2.cloudflarestorage.com" in str(vars(open_origin("r2://bucket/prefix")))


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "http:///x", "s3:///x", "file://host/x", "forebay://net", "s3://b/x?secret_access_key=k"]
)
def test_bad_urls(url):
    with pytest.raises(UsageError, match="expected"):
        open_origin(url)


# A whole dataset.


@pytest.fixture
def dataset(server) -> Dataset:
    return write_tokens(server.directory / "corpus", [5000] * 3)


def test_open_remote(server, dataset):
    for url in (f"{server.url}/corpus", f"{server.s3_url}/corpus", str(dataset.path)):
        result = open_remote(url, dataset_id=dataset.id)
        assert (result.id, result.manifest, result.num_slices) == (dataset.id, dataset.manifest, 3)
        assert result.table.names.equals(dataset.table.names)
        assert (result.url, result.is_local, result.has_peers) == (url, False, False)
    assert server.requests.keys() == {"corpus/manifest.json", "corpus/slices.parquet"}
    with pytest.raises(UsageError, match="Loader"):
        result.open_slice(0)
    with pytest.raises(DatasetError, match=f"expected the dataset {'0' * 64}, got {dataset.id}"):
        open_remote(f"{server.url}/corpus", dataset_id="0" * 64)
    with pytest.raises(DatasetError, match=r"manifest\.json.*404"):
        open_remote(f"{server.url}/nothing")
    for name in ("manifest.json", "slices.parquet"):
        server.faults.corrupt = {f"corpus/{name}": (dataset.path / name).stat().st_size // 2}
        with pytest.raises(DatasetError):
            open_remote(f"{server.url}/corpus")
    server.faults.corrupt, server.faults.drop, server.faults.truncate = {}, 0.2, 0.2
    assert open_remote(f"{server.url}/corpus").id == dataset.id


Make = Callable[[str], Identity]


def test_peers_by_home(make_identity, monkeypatch):
    created = make_identity("reader")
    created.node_dir.rename(created.node_dir.with_name("net%2F1"))
    monkeypatch.setenv("FOREBAY_HOME", str(created.node_dir.parent))
    origin = open_origin("forebay://net%2F1/corpus", discovery=LocalDiscovery())
    assert isinstance(origin, PeerOrigin) and origin.identity.peer_id == created.peer_id
    with pytest.raises(TransientError, match="no peer serves a dataset of this name"):
        origin.sources()
    with pytest.raises(UsageError):
        open_origin("forebay://absent/corpus", discovery=LocalDiscovery())


def test_one_name_and_two_ids(dataset, make_identity, tmp_path):
    other_folder = tmp_path / "other"
    other, discovery, reader = write_tokens(other_folder, [5000] * 2), LocalDiscovery(), make_identity("reader")
    with (
        DataNode(make_identity("a"), [dataset], "127.0.0.1", 0, discovery),
        DataNode(make_identity("b"), [other], "127.0.0.1", 0, discovery),
    ):
        url = "forebay://test-network/corpus"
        with pytest.raises(UsageError, match="expected one dataset of this name, got 2"):
            open_remote(url, identity=reader, discovery=discovery)
        for expected in (dataset, other):
            opened = open_remote(url, identity=reader, discovery=discovery, dataset_id=expected.id)
            assert opened.id == expected.id and opened.has_peers
        with pytest.raises(NetworkError, match="no peer serves"):
            open_origin(url, identity=reader, discovery=discovery, dataset_id="0" * 64).sources()


def test_a_redirect_to_no_address_is_a_refusal(server):
    for location in ("http://[::1", "http://h:port/", "http://h:99999999/", "//[x]/", "gopher://h/"):
        server.redirect = location
        with pytest.raises(PermanentError):
            read(open_origin(f"{server.url}/data", timeouts=PATIENT), NAME, 0, 5)


def test_a_redirect_that_leads_nowhere_any_more_is_asked_for_again(server):
    origin = open_origin(f"{server.url}/data", timeouts=PATIENT)
    with OriginServer(server.directory) as first:
        server.redirect = first.url
        assert read(origin, NAME, 0, 5) == CONTENT[:5]
    with OriginServer(server.directory) as second:
        server.redirect = second.url
        with pytest.raises(TransientError, match="cannot be reached"):
            read(origin, NAME, 0, 5)
        assert read(origin, NAME, 0, 5) == CONTENT[:5] and second.requests.total() == 1
