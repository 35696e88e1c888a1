"""Servers of slices, by hash, for members of their network: data nodes, and workers that share their cache.

A server announces its datasets, serves manifest and table, and is a tracker of the swarms. Workers that share do all of
this too, so a swarm goes on, and accepts new members, without its data node. A slice that is evicted while it is sent
is sent to the end, as its file is open.
"""

import asyncio
import logging
import math
import os
import secrets
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from prometheus_client.core import Metric

from forebay.arrays import BOOL
from forebay.base import Closing, Json
from forebay.dataset.chunks import CHUNKS_FILE, HASH_BYTES, hash_slice, num_chunks
from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, dataset_id
from forebay.dataset.reader import Dataset
from forebay.errors import DatasetError, ProtocolError
from forebay.fetch.cache import ChunkCache
from forebay.network.app import (
    BINARY,
    CHARGE_BYTES,
    ApiError,
    JsonResponse,
    Source,
    counter,
    describe_error,
    file_response,
    gauge,
    make_app,
    peer_of,
    source_of,
)
from forebay.network.client import Client
from forebay.network.discovery import Claim, Discovery, record_key
from forebay.network.limits import ServerLimits
from forebay.network.messages import ClaimsReply, SwarmReply, SwarmRequest
from forebay.network.peer import Peer, Provider, member_id
from forebay.network.pki.identity import Identity
from forebay.network.publications import SIGNATURE_NAME
from forebay.network.reachability import advertised_host
from forebay.network.server import Server
from forebay.storage.base import PermanentError, origin_of, read_small
from forebay.storage.hosts import parse_address
from forebay.storage.origins import fetch_object
from forebay.swarm.tracker import Tracker
from forebay.threads import SupervisedThread

log = logging.getLogger("forebay.share")
_MAX_SMALL_BYTES = 1 << 30
RANGED: dict[int | str, Json] = {
    200: {"content": {BINARY: {}}, "description": "All of it."},
    206: {"content": {BINARY: {}}, "description": "The range of the header Range: bytes=START-[END]."},
    416: describe_error("The range is malformed or not in the file."),
}
"""The responses of a route that sends a `FileRange`."""


@dataclass(frozen=True)
class SliceFile:
    """The file of slice `index` of one dataset; `num_bytes` and `chunk_bytes` are from the dataset's table."""

    path: Path
    num_bytes: int
    dataset: str
    chunk_bytes: int
    dataset_id: str = ""
    index: int = 0


ServedFile: TypeAlias = bytes | Path | int
"""A small file: its bytes, its path, which is no link, or its descriptor."""


@dataclass(frozen=True)
class SharedDataset:
    """A dataset that a server serves, completely or in part."""

    name: str
    dataset_id: str
    num_slices: int
    files: Mapping[str, ServedFile]  # small files by name: manifest and table at least
    own_flags: Callable[[], BOOL] | None = None  # [num_slices] slices it has; None: all, or those at `url`
    url: str = ""
    family: str = ""  # the first of the datasets that it extends
    is_earlier: bool = False  # a version that a dataset served here extends: it is claimed where its id is asked

    def num_cached(self) -> int | None:
        """Return how many slices the server itself has; None: all."""
        if self.own_flags is not None:
            return int(np.count_nonzero(self.own_flags()))
        return 0 if self.url else None


class SmallFiles(dict[str, ServedFile]):
    """The manifest and table of a dataset in memory, and the other files that it lists, verified.

    Those of a remote dataset are copies without names, which are read by ranges. A file that no source has as it is
    listed, or a copy that exceeds 1 GiB together with the others, is left out. Readers verify the hashes of chunks and
    the signature of a local dataset.

    Raises:
        DatasetError: If the manifest is of another dataset.
        NetworkError: If a source that has a file does not send it.
    """

    def __init__(self, dataset: Dataset) -> None:
        origin = origin_of(dataset)
        manifest = b""
        for name in (TABLE_FILE, MANIFEST_FILE):
            self[name] = manifest = read_small(origin, name, _MAX_SMALL_BYTES)
        if (id := dataset_id(manifest)) != dataset.id:
            raise DatasetError(f"{origin.url}: expected the dataset {dataset.id}, got {id}. Serve it again.")
        num_bytes = 0
        for name, sha256 in sorted(dataset.manifest.listed_files.items()):
            try:
                if dataset.is_local:
                    if state := dataset.file_state(name, None, sha256):
                        raise DatasetError(f"it is {state}. Fetch or prepare it again.")
                    self[name] = dataset.path / name
                    continue
                size = origin.size(name)
                if (num_bytes := num_bytes + size) > _MAX_SMALL_BYTES:
                    raise DatasetError(f"expected at most {_MAX_SMALL_BYTES} bytes, got {num_bytes}")
                with tempfile.TemporaryFile() as copy:
                    fetch_object(origin, name, size, sha256, copy, size + 1)
                    self[name] = descriptor = os.dup(copy.fileno())
                weakref.finalize(self, os.close, descriptor)
            except (DatasetError, PermanentError, OSError) as error:
                log.warning("%s/%s is not served here: %s", origin.url, name, error)
        if dataset.is_local:
            self |= {name: dataset.path / name for name in (CHUNKS_FILE, SIGNATURE_NAME)}


class SliceServer(ABC):
    """Serves slices. Subclasses define which slices, and to whom.

    Args:
        port: TCP; 0 takes a free one.
        discovery: Where datasets are announced; the caller closes it. None: nowhere.
        ttl_s: How long a claim is valid; it is announced again every third of that.
        advertised_host: The host for others, if it is not the one to listen at.
    """

    def __init__(
        self, title: str, identity: Identity, host: str, port: int, *, discovery: Discovery | None, ttl_s: float,
        limits: ServerLimits | None = None, advertised_host: str = "",
    ) -> None:  # fmt: skip
        self.identity = identity
        self.discovery = discovery
        self.ttl_s = ttl_s
        self._advertised_host = advertised_host
        self._shared: dict[str, SharedDataset] = {}  # by dataset id
        self._announcements = 0
        self._client = Client(identity)
        self.tracker = Tracker(self._client)
        self._stopping = threading.Event()
        self._changed = threading.Event()
        self._hashing = asyncio.Lock()  # others wait here, and not in the few threads
        with _app_lock:
            self._app = _make_app(title, self)
            self._app.add_api_route("/v1/status", self._read_status, summary="What it serves and has sent.")
        self._server = Server(
            self._app,
            identity,
            host,
            port,
            limits=limits,
            on_bytes=self._count,
            discovery=discovery,
            faults=self._find_faults,
        )
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}
        self._started_at = time.time()
        self._announcer = SupervisedThread(self._keep_announced, "announce", stopping=self._stopping)

    @property
    def port(self) -> int:
        """The TCP port."""
        return self._server.port

    @property
    def address(self) -> str:
        """`host:port` for others."""
        return f"{self._advertised_host}:{self.port}" if self._advertised_host else self._server.address

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Refuse new requests, wait for downloads, close; False if some did not end in time. May be called twice."""
        self._stopping.set()
        self._changed.set()
        is_drained = self._server.drain(timeout_s)
        self._server.close()
        self.tracker.close()
        self._client.close()
        self._announcer.join(1.0)
        return is_drained

    def claims(self, peer: Peer, name: str | None = None, dataset_id: str | None = None) -> list[Json]:
        """Return signed claims of the datasets, or those of one name or id, that a peer's certificate covers."""
        expires_at = time.time() + self.ttl_s
        return [
            Claim(
                shared.name, shared.dataset_id, shared.num_slices, self.identity.peer_id, self.address, expires_at,
                shared.num_cached(), shared.url,
            ).to_json(self.identity)
            for shared in list(self._shared.values())
            if (shared.dataset_id == dataset_id or (name in (None, shared.name) and not shared.is_earlier))
            and peer.scope.covers(shared.name)
        ]  # fmt: skip

    def find_dataset(self, peer: Peer, dataset_id: str) -> SharedDataset:
        """Return a dataset that a peer may read; ApiError if it may not, or it is not served here."""
        if (shared := self._shared.get(dataset_id)) is None:
            raise ApiError(404, "unknown_dataset", "this node serves no dataset of this id")
        self.check(peer, shared.name, dataset_id, 0)
        return shared

    @abstractmethod
    def find_slice(self, sha256: str) -> Sequence[SliceFile]:
        """Return the files of a slice, one of each dataset that has it."""

    async def verify_slice(self, files: Sequence[SliceFile], start: int, stop: int) -> Source:
        """Return one of these files that has the right bytes in [start, stop). ApiError if there is none."""
        return files[0].path

    async def read_leaves(self, file: SliceFile) -> bytes:
        """Return the hashes of the chunks of a slice. They are computed once, of one slice at a time."""
        async with self._hashing:
            return (await run_in_threadpool(hash_once, file.path, file.chunk_bytes))[1]

    def check(self, peer: Peer, dataset: str, dataset_id: str, num_bytes: int) -> None:
        """Raise ApiError if a peer may not get so many bytes of a dataset; else count them."""
        if not peer.scope.covers(dataset):
            raise ApiError(403, "not_covered", f"the certificate of {peer.peer_id} does not cover {dataset!r}")

    def charge(self, peer: Peer, file: SliceFile) -> Callable[[int], bool] | None:
        """Return what counts the bytes of a slice that are sent to a peer, as `FileRange.charge`."""
        return None

    def check_slice(self, peer: Peer, files: Sequence[SliceFile], num_bytes: int) -> SliceFile:
        """As `check`, of a slice: the rules of one of the datasets that have it must allow it. Return its file.

        ApiError if no dataset has it.
        """
        refusals = []
        for file in files:
            try:
                self.check(peer, file.dataset, file.dataset_id, num_bytes)
                return file
            except ApiError as error:
                refusals.append(error)
        raise next(iter(refusals), ApiError(404, "unknown_slice", "this node has no slice of this hash now"))

    def metrics(self) -> Iterable[Metric]:
        """Return metrics in addition to those of every server."""
        is_failing = self.discovery is not None and bool(self.discovery.fault)
        return [
            counter("forebay_announcements_total", "Announcements in the DHT.", self._announcements),
            gauge("forebay_announce_failing", "1 if no bootstrap node of the DHT answers, else 0.", float(is_failing)),
        ]

    @property
    def bytes_sent(self) -> int:
        """Bytes of slices and files sent."""
        with self._lock:
            return sum(self._sent.values())

    def _find_faults(self) -> list[str]:
        return []

    def status(self) -> Json:
        """Return what is served and was sent: the response of `GET /v1/status`."""
        with self._lock:
            sent = dict(sorted(self._sent.items()))
        shared = [item for item in list(self._shared.values()) if not item.is_earlier]
        return {
            "peer_id": self.identity.peer_id,
            "name": self.identity.name,
            "address": self.address,
            "datasets": [{"name": item.name, "id": item.dataset_id, "slices": item.num_slices} for item in shared],
            "bytes_sent": sum(sent.values()),
            "peers": sent,
            "connections": self._server.num_connections,
            "refused_connections": self._server.refused_connections,
            "announcements": self._announcements,
            "faults": self._server.find_faults(),
            "swarms": self.tracker.status(),
            "draining": self._server.draining,
            "up_s": round(time.time() - self._started_at, 3),
        }

    async def _read_status(self, request: Request) -> Response:
        status, scope = await run_in_threadpool(self.status), peer_of(request).scope
        datasets = [dataset for dataset in status["datasets"] if scope.includes(dataset["name"])]
        if len(datasets) < len(status["datasets"]):  # the details may name the others
            status["faults"] = [fault.partition(":")[0] for fault in status["faults"]]
        status["datasets"] = datasets
        if not scope.allows("viewer"):
            status["peers"] = {}
            ids = {dataset["id"] for dataset in datasets}
            status["swarms"] = {key: swarm for key, swarm in status["swarms"].items() if key in ids}
        return JsonResponse(status)

    def _count(self, peer: Peer, num_bytes: int) -> None:
        with self._lock:
            if peer.peer_id not in self._sent:
                log.info("first bytes: peer_id=%s name=%s", peer.peer_id, peer.name)
            self._sent[peer.peer_id] = self._sent.get(peer.peer_id, 0) + num_bytes

    def _keep_announced(self) -> None:
        while True:
            self._changed.wait(self.ttl_s / 3)
            self._changed.clear()
            if self._stopping.is_set():
                return
            self._announce()

    def _announce(self) -> None:
        if self.discovery is None:
            return
        shared = list(self._shared.values())
        names = {("dataset", item.name) for item in shared} | {
            ("family", item.family) for item in shared if item.family
        }
        for kind, name in sorted(names):
            self.discovery.announce(record_key(self.identity.network_id, kind, name), self.port)
        self._announcements += 1


class SliceIndex(Protocol):
    """Files of verified slices by hash: a ChunkCache, or a dict."""

    def get(self, sha256: str, /) -> Path | None:
        """Return the file of a slice; None if there is none."""


class SliceShare(SliceServer, Closing):
    """The server of a worker, from construction until `close`. In a forked child, `close` has no effect.

    Args:
        index: The verified slices.
        slices: Bytes, dataset's name and bytes of a chunk, by hash, of the slices that may be served; the caller may
            add to it. A peer whose certificate does not cover the name is refused.
        listen: `HOST:PORT`; port 0: any; no host: every address of this machine.
        towards: The `host:port` of another member, which reaches this host where it is named; "": at `host`.
        find_waits: Returns what its worker waits for, which is logged elsewhere; faults of its status.
    """

    def __init__(
        self, identity: Identity, index: SliceIndex, slices: dict[str, tuple[int, str, int]], listen: str,
        upload_bytes_per_s: float | None = None, *, discovery: Discovery | None = None, towards: str = "",
        find_waits: Callable[[], list[str]] = list,
    ) -> None:  # fmt: skip
        self._find_waits = find_waits
        host, _, port = listen.rpartition(":")
        if port != "0":
            parse_address(listen if host else f"0.0.0.0{listen}")
        super().__init__(
            "Forebay worker", identity, host or "0.0.0.0", int(port), discovery=discovery, ttl_s=60.0,
            limits=ServerLimits(upload_bytes_per_s=upload_bytes_per_s or math.inf),
            advertised_host=advertised_host(host, towards) if towards else host,
        )  # fmt: skip
        self.session = secrets.token_hex(8)  # which process of its node this is, in a swarm
        self.slices = slices
        self._index = index
        self._pid = os.getpid()
        self._server.start()
        self._announcer.start()

    def status(self) -> Json:
        status = super().status()
        return {**status, "faults": status["faults"] + self._find_waits()}

    def add(self, shared: SharedDataset) -> None:
        """Announce a dataset, track its swarm, and serve its small files; its slices must be in `slices`."""
        own = Provider(member_id(self.identity.peer_id, self.session), self.address, False)
        self.tracker.add(shared.dataset_id, shared.num_slices, own, shared.own_flags)
        self._shared[shared.dataset_id] = shared
        self._changed.set()

    def close(self, timeout_s: float = 0.0) -> None:
        """Like `stop`; no effect in a forked child."""
        if os.getpid() == self._pid:
            self.stop(timeout_s)

    def find_slice(self, sha256: str) -> Sequence[SliceFile]:
        described = self.slices.get(sha256)
        if described is None or (path := self._index.get(sha256)) is None or not path.is_file():
            return ()
        return (SliceFile(path, *described),)

    async def read_leaves(self, file: SliceFile) -> bytes:
        stored = self._index.stored_leaves(file.path.name) if isinstance(self._index, ChunkCache) else None
        return stored or await super().read_leaves(file)


hash_once = lru_cache(maxsize=2048)(hash_slice)  # some 64 MB

# FastAPI uses `warnings.catch_warnings` while it adds a route, which is not thread-safe.
_app_lock = threading.Lock()


def _make_app(title: str, server: SliceServer) -> FastAPI:
    app = make_app(title, server.metrics, {ProtocolError: (400, "bad_request")})

    @app.get("/v1/claims", response_model=ClaimsReply, summary="Signed claims of what this node has.")
    async def read_claims(request: Request, name: str | None = None, id: str | None = None) -> Response:
        return JsonResponse({"claims": server.claims(peer_of(request), name, id)})

    @app.get("/v1/slices/{sha256}", response_class=Response, responses=RANGED, summary="A slice, or a range of it.")
    async def read_slice(request: Request, sha256: str) -> Response:
        peer = peer_of(request)
        files = server.find_slice(sha256)
        file = server.check_slice(peer, files, 0)
        response = file_response(request, file.path, file.num_bytes)
        response.source = await server.verify_slice(files, response.start, response.stop)
        response.num_charged = min(CHARGE_BYTES, response.stop - response.start)
        response.charge = server.charge(peer, server.check_slice(peer, files, response.num_charged))
        return response

    @app.get(
        "/v1/slices/{sha256}/chunks", response_class=Response, responses={200: RANGED[200]},
        summary="The SHA-256 of each chunk of a slice, 32 bytes each.",
    )  # fmt: skip
    async def read_chunks(request: Request, sha256: str, chunk_bytes: int) -> Response:
        files = server.find_slice(sha256)
        file = server.check_slice(peer_of(request), files, 0)
        if chunk_bytes != file.chunk_bytes:
            raise ApiError(404, "unknown_slice", "this node has no slice of this hash in chunks of this size")
        server.check_slice(peer_of(request), files, num_chunks(file.num_bytes, chunk_bytes) * HASH_BYTES)
        return Response(await server.read_leaves(file), media_type=BINARY)

    @app.get(
        "/v1/datasets/{dataset_id}/{name}", response_class=Response, responses=RANGED,
        summary="A small file of a dataset: manifest.json, slices.parquet, tokenizer.json …",
    )  # fmt: skip
    async def read_file(request: Request, dataset_id: str, name: str) -> Response:
        file = server.find_dataset(peer_of(request), dataset_id).files.get(name)
        if file is None or (isinstance(file, Path) and (file.is_symlink() or not file.is_file())):
            raise ApiError(404, "unknown_file", f"dataset {dataset_id} has no {name[:80]!r} here")
        return file_response(request, file, len(file) if isinstance(file, bytes) else os.stat(file).st_size)  # noqa: PTH116

    @app.post(
        "/v1/swarm/{dataset_id}", response_model=SwarmReply,
        summary="Report what a member has and wants; get what to download from which provider.",
    )  # fmt: skip
    async def steer(request: Request, dataset_id: str, message: SwarmRequest) -> Response:
        peer = peer_of(request)
        server.find_dataset(peer, dataset_id)
        if not server.tracker.tracks(dataset_id):
            raise ApiError(404, "unknown_swarm", "this node tracks no swarm of this dataset")
        return JsonResponse(server.tracker.handle(peer, dataset_id, message, source_of(request)))

    return app
