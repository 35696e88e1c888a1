"""URLs that peers name: which are opened, with what, and that a wrong one is that peer's fault alone."""

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.data_node import DataNode
from forebay.dataset.manifest import LENGTHS_FILE, MANIFEST_FILE, TABLE_FILE
from forebay.dataset.reader import Dataset
from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.mirror import mirror, mirror_by_swarm
from forebay.network.client import Client
from forebay.network.discovery import Claim, read_claims, record_key
from forebay.network.peer import Scope
from forebay.network.peer_dataset import PeerOrigin
from forebay.network.peer_source import UnusableOrigin, open_untrusted_origin
from forebay.network.pki.identity import Identity, join
from forebay.storage.base import PermanentError, Timeouts, TransientError
from forebay.storage.hosts import check_url, is_public
from forebay.storage.http import check_redirect
from forebay.storage.origins import open_remote
from support.leases_by_hand import FetchingWorker, table_of
from support.local_discovery import LocalDiscovery
from support.origin_server import OriginServer
from support.rude_peer import RudePeer, http
from support.token_slices import write_tokens
from support.waiting import until

Make = Callable[[str], Identity]
PATIENT = Timeouts(connect_s=60.0, stall_s=60.0)
BAD_URLS = (
    "bogus://x/y", "file:///etc/passwd", "hf://datasets/a/b", "r2://bucket/x", "forebay://net/d", "https://",
    "https:///p",
    "https://u:p@host/p", "https://host/p?x=1", "https://host/p#x", "s3://b/d?endpoint=http://127.0.0.1:1",
    "s3://b:80/d",
    "https://a..b/p", "https://host:port/p", "https://ho st/p", "https://host/\x1b[31m", "https://hößt/p",
    "/etc/passwd",
    "host/p", "https:\\\\host\\p", "HTTPS://[::1/p", "https://host/" + "a" * 2048,
)  # fmt: skip


def test_a_url_that_is_none_of_a_web_server_or_bucket_is_a_violation():
    for url in BAD_URLS:
        with pytest.raises(ProtocolError, match="URL of a peer"):
            check_url(url)
        with pytest.raises(ProtocolError):
            open_untrusted_origin(url, "any")


@example("s3://bucket/d")
@example("http://data.example/d")
@example("az://container/d")
@given(st.one_of(st.text(max_size=60), st.from_regex(r"(https?|s3|gs|az|file)://[ -~]{0,30}", fullmatch=True)))
def test_whatever_a_url_is_the_error_is_the_peers(url):
    try:
        origin = open_untrusted_origin(url, "public")
    except NetworkError:
        return
    parts = check_url(url)
    assert origin.url == parts.geturl()
    assert parts.scheme in ("https", "s3", "gs") and not parts.query and not parts.username


PUBLIC = {"8.8.8.8": True, "2606:4700::1111": True, "::ffff:8.8.8.8": True, "64:ff9b::808:808": True} | dict.fromkeys(
    ("127.0.0.1", "::1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "fe80::1", "fd00::1", "100.64.0.1",
     "0.0.0.0", "::", "224.0.0.1", "ff02::1", "240.0.0.1", "192.0.2.1", "::ffff:127.0.0.1", "64:ff9b::7f00:1",
     "2002:7f00:1::", "fe80::1%eth0"),
    False,
)  # fmt: skip


def test_addresses_of_the_public_internet():
    assert {ip: is_public(ip) for ip in PUBLIC} == PUBLIC


@pytest.fixture
def sink(tmp_path, monkeypatch) -> Iterator[OriginServer]:
    """A server of this host, which is also every endpoint and proxy that the environment names."""
    (tmp_path / "sink").mkdir()
    with OriginServer(tmp_path / "sink") as server:
        secrets = {
            **server.s3_environment, "http_proxy": server.url, "https_proxy": server.url, "no_proxy": "",
            "AZURE_CLIENT_ID": "id", "AZURE_CLIENT_SECRET": "secret", "AZURE_TENANT_ID": "tenant",
            "AZURE_STORAGE_ACCOUNT_NAME": "account", "HF_TOKEN": "token", "HF_ENDPOINT": server.url,
        }  # fmt: skip
        for name, value in secrets.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.mark.parametrize("url", ["https://evil.example/d", "s3://bucket/d", "gs://bucket/d", "https://127.0.0.1/d"])
def test_an_address_inside_is_not_connected_to_whatever_name_leads_there(url, sink, monkeypatch):
    """Each look-up of the name has another answer: the address that is connected to is the one that counts."""
    result = [socket.getaddrinfo("127.0.0.1", sink.port, type=socket.SOCK_STREAM)]
    resolve, here = socket.getaddrinfo, threading.get_ident()  # Threads that other tests left resolve names, too.
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *a, **k: result[0] if threading.get_ident() == here else resolve(*a, **k)
    )
    origin = open_untrusted_origin(url, "public", timeouts=PATIENT)
    with pytest.raises(PermanentError, match=r"expected a public address, got 127\.0\.0\.1"):
        origin.get("manifest.json", 100)
    assert sink.connections == 0


def test_a_redirect_of_a_foreign_origin_stays_on_https():
    check_redirect("https://8.8.8.8/a", "https://8.8.4.4/b", https_only=True)
    for target in ("http://8.8.4.4/b", "ftp://8.8.4.4/b", "https://127.0.0.1/b"):
        with pytest.raises(PermanentError):
            check_redirect("https://8.8.8.8/a", target, https_only=True)


def test_any_opens_an_address_inside_and_shows_it_nothing(sink):
    (sink.directory / "x").write_bytes(b"12345")
    assert open_untrusted_origin(sink.url, "any", timeouts=PATIENT).get("x", 10) == b"12345"
    assert sink.paths == ["/x"] and sink.authorizations == [""]


# Claims.


def signed_claims(peer: Identity, *more: Mapping[str, Any], port: int = 1) -> bytes:
    now = time.time()
    base = Claim("corpus", "ab" * 32, 3, peer.peer_id, f"127.0.0.1:{port}", now + 600)
    return http(200, {"claims": [Claim(**{**vars(base), **item}).to_json(peer) for item in more]})


def test_a_bad_claim_is_left_out_and_the_others_stand(make_identity):
    peer = make_identity("data")
    claims = json.loads(signed_claims(peer, {}, *({"url": url} for url in BAD_URLS[:3]), {"url": "https://h.example/d"})
                        .partition(b"\r\n\r\n")[2])["claims"]  # fmt: skip
    claims += [5, None, {}, {**claims[0], "signature": "00" * 64}, {**claims[0], "expires_at": "soon"}]
    with RudePeer(peer, lambda asked: http(200, {"claims": claims})) as rude, Client(make_identity("r")) as client:
        result = read_claims(client, rude.address, "corpus")
    assert [(claim.url, claim.address) for claim in result] == [
        ("", rude.address),
        ("https://h.example/d", rude.address),
    ]


def test_claims_are_asked_of_data_nodes_alone_and_are_few(make_identity, tmp_path):
    bomb = http(200, b'{"claims":[' + b"{}," * 40_000 + b"{}]}")
    make_identity("data")
    other = join(tmp_path / "network", tmp_path / "other", "other", scope=Scope(frozenset({"worker"})))
    with Client(make_identity("r")) as client:
        with RudePeer(other, lambda asked: bomb) as rude, pytest.raises(NetworkError, match="role data"):
            read_claims(client, rude.address, "corpus")
        assert rude.asked == []
        with RudePeer(make_identity("d2"), lambda asked: bomb) as rude, pytest.raises(ProtocolError, match="65536"):
            read_claims(client, rude.address, "corpus")


# Readers of a dataset.


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return write_tokens(tmp_path / "web" / "corpus", [5000] * 3)


@pytest.fixture
def web(dataset) -> Iterator[OriginServer]:
    with OriginServer(dataset.path.parent) as server:
        yield server


@pytest.mark.parametrize("share", [False, True])
def test_a_dataset_behind_a_url_is_read_where_the_reader_allows_it(
    share,
    dataset,
    web,
    make_identity,
    tmp_path,
    monkeypatch,
):
    """The data node gives the small files; the slices lie on a web server of this host."""
    monkeypatch.setattr("forebay.swarm.reader._REFUSED_S", 0.01)
    table, url = LocalDiscovery(), "forebay://test-network/corpus"
    served = open_remote(f"{web.url}/corpus")
    with DataNode(make_identity("data"), [served], "127.0.0.1", 0, table) as node:
        files = node._shared[dataset.id].files
        assert [name for name in files if isinstance(files[name], bytes)] == [TABLE_FILE, MANIFEST_FILE]
        assert Path(f"/dev/fd/{files[LENGTHS_FILE]}").read_bytes() == (dataset.path / LENGTHS_FILE).read_bytes()
        web.reset()
        for leave in ("",) if share else ("", "public"):
            target = tmp_path / f"copy-{leave}"
            remote = open_remote(url, identity=make_identity(f"r{leave}"), discovery=table, from_urls=leave)
            assert remote.id == dataset.id
            with pytest.raises(NetworkError, match=r"--from-urls"):
                if share:
                    mirror_by_swarm(remote, target, share=False, linger_s=0)
                else:
                    mirror(remote, target)
            assert web.requests.total() == 0
        remote = open_remote(url, identity=make_identity("willing"), discovery=table, from_urls="any")
        target = tmp_path / "copy"
        report = mirror_by_swarm(remote, target, share=False, linger_s=0)[0] if share else mirror(remote, target)
        assert report.complete and report.copied == 3
    with pytest.raises(UsageError, match="from_urls"):
        open_remote(url, identity=make_identity("x"), discovery=table, from_urls="yes")


@pytest.mark.parametrize("leave", ["", "public"])
def test_a_strangers_url_is_not_asked_and_the_honest_node_is(leave, dataset, make_identity, sink, tmp_path):
    """A claim that stands for a URL of its own comes before the honest node's; it has the files and no slice."""
    table, stranger = LocalDiscovery(), make_identity("stranger")
    urls = (f"{sink.url}/d", f"s3://bucket/d?endpoint={sink.url}", "bogus://x", "s3://bucket/d")

    def answer(asked):
        if asked.path.startswith("/v1/claims?"):
            return signed_claims(stranger, *({"dataset_id": dataset.id, "num_stored": 0, "url": url} for url in urls))
        name = asked.path.rpartition("/")[2]
        file = dataset.path / name
        return http(200, file.read_bytes()) if "/v1/datasets/" in asked.path and file.is_file() else http(404, {})

    with RudePeer(stranger, answer) as rude, DataNode(make_identity("data"), [dataset], "127.0.0.1", 0, table):
        table.announce(record_key(stranger.network_id, "dataset", "corpus"), rude.port)
        reader = make_identity("reader")
        remote = open_remote("forebay://test-network/corpus", identity=reader, discovery=table, from_urls=leave)
        report = mirror(remote, tmp_path / "copy")
    assert report.complete
    assert sink.connections == 0


def test_a_url_that_is_not_opened_does_not_make_a_passing_fault_last(make_identity):
    reader = make_identity("r")
    origin = PeerOrigin(reader, "corpus", Client(reader), discovery=LocalDiscovery())
    busy = UnusableOrigin("peer://a", NetworkError("busy"))
    busy.get = Mock(side_effect=TransientError("busy"))
    origin.sources = lambda: [busy, UnusableOrigin("https://data.example/d", NetworkError("not allowed"))]
    with pytest.raises(TransientError, match="busy"):
        origin.get("manifest.json", 100)


# Workers.


def test_a_worker_without_leave_ends_with_the_flags_name(make_identity, tmp_path):
    with Client(make_identity("worker")) as client:
        worker, numbers = (
            FetchingWorker(client, tmp_path / "cache", from_urls="", table=table_of("ab" * 32, 100)),
            itertools.count(),
        )

        def has_failed():
            lease = worker.lease([{"address": "https://data.example/d"}], str(next(numbers)))
            worker.until(lambda: lease.ended or worker.fetcher.failure is not None)
            return worker.fetcher.failure is not None

        try:
            until(has_failed)
            assert isinstance(worker.fetcher.failure, NetworkError)
            assert "--from-urls" in str(worker.fetcher.failure)
        finally:
            worker.close()


def test_sources_of_an_origin_are_bounded_by_its_claims(make_identity, dataset):
    """A URL that none of the claims names is not opened, whichever peer names it."""
    table = LocalDiscovery()
    with DataNode(make_identity("data"), [dataset], "127.0.0.1", 0, table):
        remote = open_remote(
            "forebay://test-network/corpus", identity=make_identity("r"), discovery=table, from_urls="any"
        )
        origin = remote.origin
        with pytest.raises(ProtocolError, match="a URL that a data node claims"):
            origin.open_url("https://data.example/d")
        result = list(origin.sources())
        assert len(result) == 1
