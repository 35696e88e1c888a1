"""A data node: announces datasets in the DHT and hands out their slices, by hash, to members of its network.

Only what it announces can be asked for, and only by a hash that a slice table lists: no path comes from a
request. What it says it has is signed and short-lived, so that a node which died is soon believed by nobody.

It is the tracker of its datasets' swarms too: readers who share ask it what to fetch from whom (`store/tracker.py`),
so that each slice leaves the node about once. A dataset that lies on a web server or in a bucket is announced and
steered as well, and its slices come from there.

What the choice costs: the table of hashes, some 300 bytes a slice (75 MB for 250,000 slices).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.dataset.manifest import DOCUMENTS_FILE, MANIFEST_FILE, MAX_MANIFEST_BYTES, TABLE_FILE
from forebay.dataset.reader import Dataset, listed_files
from forebay.errors import DatasetError, NetworkError, UsageError
from forebay.network.access import Access
from forebay.network.client import Client
from forebay.network.discovery import Claim, Discovery, record_key
from forebay.network.exchange import BINARY, FileRange, Request, Response, error_response, file_response, json_response
from forebay.network.https import Server
from forebay.network.identity import Identity, Peer
from forebay.network.limits import Throttle
from forebay.network.metrics import Metric, counter, gauge, metrics_response
from forebay.network.openapi import (
    COUNT,
    DESCRIPTION_DOOR,
    FLAG,
    METRICS_DOOR,
    OBJECT,
    PEER_ID,
    SHA256,
    TEXT,
    Door,
    array,
    choice,
    openapi_response,
    record,
)
from forebay.network.publish import SIGNATURE_NAME
from forebay.network.swarm import Holder
from forebay.network.trust import TrustWatch, answer_trust
from forebay.store.origins import Origin, read_small
from forebay.store.remote import RemoteDataset
from forebay.store.tracker import Tracker

_MAX_SMALL_BYTES = 1 << 30
FILES = (MANIFEST_FILE, TABLE_FILE, "tokenizer.json", DOCUMENTS_FILE, SIGNATURE_NAME)
log = logging.getLogger("forebay.serve")


class DataNode:
    """Serves datasets from `start` to `stop`.

    Attributes:
        tracker: Of its datasets' swarms.

    Args:
        port: TCP; 0 takes a free one, `.port` and `.address` then say which.
        discovery: Where to announce; stays the caller's to close. None: nobody finds it by name.
        ttl_s: How long a claim holds; it is announced anew every third of that.
        throttle: Of uploads and requests.
        access: Who may read what; None: every member all that its certificate covers.
        origin_slots: Slices that a swarm's members fetch from here, or from the server behind, at once.

    Raises:
        UsageError: If a dataset is given twice; two versions of a name are two. Or if the node's certificate does not
            make it a data node for one of them: nobody would believe it.
    """

    def __init__(
        self,
        identity: Identity,
        datasets: Sequence[Dataset],
        host: str,
        port: int,
        discovery: Discovery | None,
        ttl_s: float = 60.0,
        *,
        throttle: Throttle | None = None,
        access: Access | None = None,
        origin_slots: int = 8,
    ) -> None:
        if len({dataset.id for dataset in datasets}) != len(datasets):
            names = sorted(dataset.name for dataset in datasets)
            raise UsageError(f"serve: expected each dataset once, got one twice among {names}. Serve it once.")
        if not ttl_s > 0:
            raise UsageError(f"serve: expected ttl_s > 0, got {ttl_s}")
        _check_scope(identity, datasets)
        self.identity = identity
        self.datasets = list(datasets)
        self.discovery = discovery
        self.ttl_s = ttl_s
        self._by_id = {dataset.id: dataset for dataset in datasets}
        self._access = access or Access()
        self._origin_slots = origin_slots
        self._slices: dict[str, tuple[Dataset, Path, int]] = {}
        self._small: dict[tuple[str, str], bytes] = {}  # of remote datasets, by id and name
        self._client = Client(identity)
        self.tracker = Tracker(self._client)
        self._server = Server(identity, host, port, self._handle, on_bytes=self._count, throttle=throttle)
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}
        self._num_announcements = 0
        self._failure = ""
        self._stopping = threading.Event()
        self._announcer: threading.Thread | None = None
        self._trust: TrustWatch | None = None
        self._started_at = time.time()

    @property
    def port(self) -> int:
        """The TCP port."""
        return self._server.port

    @property
    def address(self) -> str:
        """`host:port`."""
        return self._server.address

    def start(self) -> None:
        """Serve and announce, in background threads.

        Raises:
            NetworkError: If it cannot listen, or reach the server behind a dataset.
        """
        for dataset in self.datasets:
            if (origin := _origin_of(dataset)) is not None:
                self._take_small(dataset, origin)
                continue
            for index in range(dataset.num_slices):
                row = dataset.table.row(index)
                self._slices[row.sha256] = (dataset, dataset.slice_path(index), row.bytes)
        self._server.start()
        for dataset in self.datasets:
            origin = _origin_of(dataset)
            own = Holder(self.identity.peer_id, self.address, True) if origin is None else _seed(origin)
            self.tracker.add(dataset.id, dataset.num_slices, [own], origin_slots=self._origin_slots)
        self._announce()
        self._announcer = threading.Thread(target=self._keep_announced, name="announce", daemon=True)
        self._announcer.start()
        names = ",".join(dataset.name for dataset in self.datasets)
        log.info("data node started: address=%s peer_id=%s datasets=%s", self.address, self.identity.peer_id, names)
        self._trust = TrustWatch(self.identity, self._client, discovery=self.discovery, address=self.address).start()

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Take no more requests, let downloads in flight finish for up to `timeout_s`, then cut. May be repeated.

        Returns:
            Whether every download finished.
        """
        self._stopping.set()
        if self._announcer is not None:
            self._announcer.join()
        if self._trust is not None:
            self._trust.close()
        drained = self._server.drain(timeout_s)
        self._server.close()
        self.tracker.close()
        self._client.close()
        return drained

    def __enter__(self) -> DataNode:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def status(self) -> dict[str, Any]:
        """What the node serves and has sent, as it stands in `GET /v1/status`."""
        with self._lock:
            sent = dict(sorted(self._sent.items()))
            announcements, failure = self._num_announcements, self._failure
        return {
            "peer_id": self.identity.peer_id,
            "name": self.identity.name,
            "address": self.address,
            "datasets": [{"name": d.name, "id": d.id, "slices": d.num_slices} for d in self.datasets],
            "bytes_sent": sum(sent.values()),
            "peers": sent,
            "connections": self._server.num_connections,
            "refused_connections": self._server.refused_connections,
            "announcements": announcements,
            "announce_error": failure,
            "swarms": self.tracker.facts(),
            "draining": self._server.draining,
            "up_s": round(time.time() - self._started_at, 3),
        }

    def _metrics(self) -> list[Metric]:
        with self._lock:
            sent = {peer_id: float(num_bytes) for peer_id, num_bytes in self._sent.items()}
        return [
            *self._server.metrics(),
            counter("forebay_peer_sent_bytes_total", "Bytes of bodies sent, by peer.", sent, "peer"),
            gauge("forebay_datasets", "Datasets announced.", len(self.datasets)),
            gauge("forebay_slices", "Slices served.", len(self._slices)),
        ]

    def claims(self) -> list[dict[str, Any]]:
        """The node's signed claims, good for `ttl_s` from now."""
        expires_at = time.time() + self.ttl_s
        made = []
        for d in self.datasets:
            claim = Claim(d.name, d.id, d.num_slices, self.identity.peer_id, self.address, expires_at)
            origin = _origin_of(d)
            made.append(claim if origin is None else replace(claim, held=0, url=origin.url))
        return [claim.to_json(self.identity) for claim in made]

    def _keep_announced(self) -> None:
        while not self._stopping.wait(self.ttl_s / 3):
            self._announce()

    def _announce(self) -> None:
        if self.discovery is None:
            return
        failure = ""
        for dataset in self.datasets:
            try:
                self.discovery.announce(record_key(self.identity.network_id, "dataset", dataset.name), self.port)
            except (NetworkError, OSError) as error:
                failure = f"{dataset.name}: {error}"
                log.warning("announcing %s failed, trying again in %g s: %s", dataset.name, self.ttl_s / 3, error)
        with self._lock:
            self._num_announcements += 1
            self._failure = failure

    def _count(self, peer: Peer, num_bytes: int) -> None:
        with self._lock:
            if peer.peer_id not in self._sent:
                log.info("first bytes: peer_id=%s name=%s", peer.peer_id, peer.name)
            self._sent[peer.peer_id] = self._sent.get(peer.peer_id, 0) + num_bytes

    def _take_small(self, dataset: Dataset, origin: Origin) -> None:
        """Keep the small files of a remote dataset: members take its slices there, and the rest here."""
        self._small[dataset.id, MANIFEST_FILE] = data = read_small(origin, MANIFEST_FILE, MAX_MANIFEST_BYTES)
        self._small[dataset.id, TABLE_FILE] = read_small(origin, TABLE_FILE, _MAX_SMALL_BYTES)
        if hashlib.sha256(data).hexdigest() != dataset.id:
            raise DatasetError(f"{origin.url}: expected the dataset {dataset.id}, which it was. Serve it again.")
        for name in sorted(set(listed_files(dataset.manifest)) & set(FILES)):
            self._small[dataset.id, name] = read_small(origin, name, _MAX_SMALL_BYTES)

    def _handle(self, request: Request) -> Response:
        if (answer := answer_trust(self.identity, request)) is not None:
            return answer
        match request.method, request.path.split("/")[1:]:
            case "GET", ["v1", "claims"]:
                return json_response({"claims": self.claims()})
            case "GET", ["v1", "status"]:
                return json_response(self.status())
            case "GET", ["openapi.json"]:
                return openapi_response("Forebay data node", DOORS)
            case "GET", ["metrics"]:
                return metrics_response(self._metrics())
            case "GET", ["v1", "slices", sha256]:
                return self._slice(request, sha256)
            case "GET", ["v1", "datasets", dataset_id, name] if name in FILES:
                return self._file(request, dataset_id, name)
            case "POST", ["v1", "swarm", dataset_id]:
                return self._steer(request, dataset_id)
        if request.method != "GET":
            return error_response(405, "read_only", f"a data node answers no {request.method} here")
        return error_response(404, "unknown_path", "nothing is served at this path")

    def _refusal(self, request: Request, dataset: Dataset, num_bytes: int) -> Response | None:
        """The answer to a peer that may not have so many bytes of a dataset."""
        reason = self._access.check(request.peer, dataset.name, dataset.id, num_bytes, time.time())
        if reason is None:
            return None
        if not reason.startswith("quota"):
            return error_response(403, "no_access", reason)
        self.identity.note("quota", peer=request.peer.peer_id, reason=reason)
        return error_response(429, "quota", reason)

    def _steer(self, request: Request, dataset_id: str) -> Response:
        dataset = self._by_id.get(dataset_id)
        if dataset is None:
            return error_response(404, "unknown_dataset", "this node announces no dataset of this id")
        if (refused := self._refusal(request, dataset, 0)) is not None:
            return refused
        return json_response(self.tracker.answer(request.peer, dataset_id, request.json()))

    def _slice(self, request: Request, sha256: str) -> Response:
        held = self._slices.get(sha256)
        if held is None:
            return error_response(404, "unknown_slice", "this node announces no slice of this hash")
        dataset, path, size = held
        try:
            found = path.stat().st_size
        except OSError as error:
            log.error("slice %s: %s is announced and cannot be read: %s", sha256, path, error)
            return error_response(404, "slice_lost", "this node announced the slice and no longer has it")
        if found != size:
            log.error("slice %s: %s has %d bytes, the table says %d", sha256, path, found, size)
            return error_response(404, "slice_changed", "this node's file of the slice has changed")
        response = file_response(request, path, size)
        sends = response.body.stop - response.body.start if isinstance(response.body, FileRange) else 0
        return self._refusal(request, dataset, sends) or response

    def _file(self, request: Request, dataset_id: str, name: str) -> Response:
        dataset = self._by_id.get(dataset_id)
        if dataset is None:
            return error_response(404, "unknown_dataset", "this node announces no dataset of this id")
        if (refused := self._refusal(request, dataset, 0)) is not None:
            return refused
        if (data := self._small.get((dataset_id, name))) is not None:
            return Response(200, data, BINARY)
        path = dataset.path / name
        if _origin_of(dataset) is not None or not path.is_file():
            return error_response(404, "unknown_file", f"dataset {dataset_id} has no {name}")
        return file_response(request, path, path.stat().st_size)


_LOST = {404: "Not announced here, or lost."}
_DATASET = {"dataset_id": SHA256}
_NO_QUOTA = {403: "This peer may not read the dataset."}
DOORS = [
    Door("GET", "/v1/claims", "What this node says it has, signed.", answer=record(claims=array(OBJECT))),
    Door("GET", "/v1/status", "What it serves and has sent.",
         answer=record((), peer_id=PEER_ID, address=TEXT, datasets=array(OBJECT), bytes_sent=COUNT, draining=FLAG)),
    Door("GET", "/v1/slices/{sha256}", "A slice.", parts={"sha256": SHA256}, answer=None, ranges=True,
         refusals=_LOST | _NO_QUOTA),
    Door("GET", "/v1/datasets/{dataset_id}/{file}", "A small file of a dataset.", answer=None, ranges=True,
         parts={**_DATASET, "file": choice(*FILES)}, refusals=_LOST | _NO_QUOTA),
    Door("POST", "/v1/swarm/{dataset_id}", "What a reader has and wants; whom it should ask for what.", body=OBJECT,
         parts=_DATASET, refusals=_LOST | _NO_QUOTA),
    DESCRIPTION_DOOR,
    METRICS_DOOR,
]  # fmt: skip


def _check_scope(identity: Identity, datasets: Sequence[Dataset]) -> None:
    names = [dataset.name for dataset in datasets if not identity.scope.covers(dataset.name)]
    if names or not identity.scope.allows("data"):
        lacks = f"does not cover {', '.join(names)}" if names else "lacks the role data"
        raise UsageError(f"serve: the certificate of {identity.name} {lacks}. Ask its issuer for one that does.")


def _origin_of(dataset: Dataset) -> Origin | None:
    """Where the slices of a remote dataset lie; None for a local one."""
    return dataset.origin if isinstance(dataset, RemoteDataset) else None


def _seed(origin: Origin) -> Holder:
    """A web server or bucket as a holder, known by its URL."""
    return Holder(origin.url, origin.url, True)
