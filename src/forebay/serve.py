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
from forebay.network.app import ApiError, JsonResponse, Metric, Request, Response, counter, gauge, peer_of
from forebay.network.client import Client
from forebay.network.discovery import Claim, Discovery, record_key
from forebay.network.identity import Identity, Peer
from forebay.network.limits import Limits, Throttle
from forebay.network.publish import SIGNATURE_NAME
from forebay.network.server import Server
from forebay.network.swarm import Holder
from forebay.store.origins import Origin, read_small
from forebay.store.remote import RemoteDataset
from forebay.store.slice_app import SliceFile, make_slice_app
from forebay.store.tracker import Tracker
from forebay.threads import Supervised

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
        throttle: Of uploads. `limits`: of connections and requests.
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
        limits: Limits | None = None,
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
        self._slices: dict[str, SliceFile] = {}
        self._small: dict[tuple[str, str], bytes] = {}  # of remote datasets, by id and name
        self._client = Client(identity)
        self.tracker = Tracker(self._client)
        app = make_slice_app("Forebay data node", self, self._metrics)
        app.add_api_route("/v1/status", self._read_status, summary="What it serves and has sent.")
        self._server = Server(
            app, identity, host, port, limits=limits, throttle=throttle, on_bytes=self._count, discovery=discovery
        )
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}
        self._num_announcements = 0
        self._failure = ""
        self._stopping = threading.Event()
        self._announcer: Supervised | None = None
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
                path = dataset.slice_path(index)
                self._slices[row.sha256] = SliceFile(path, row.bytes, dataset.name, dataset.id)
        self._server.start()
        for dataset in self.datasets:
            origin = _origin_of(dataset)
            own = Holder(self.identity.peer_id, self.address, True) if origin is None else _seed(origin)
            self.tracker.add(
                dataset.id, dataset.num_slices, [own], slice_of=dataset.table.row, origin_slots=self._origin_slots
            )
        self._announce()
        self._announcer = Supervised(self._keep_announced, "announce", stopping=self._stopping)
        self._announcer.start()
        names = ",".join(dataset.name for dataset in self.datasets)
        log.info("data node started: address=%s peer_id=%s datasets=%s", self.address, self.identity.peer_id, names)

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Take no more requests, let downloads in flight finish for up to `timeout_s`, then cut. May be repeated.

        Returns:
            Whether every download finished.
        """
        self._stopping.set()
        if self._announcer is not None:
            self._announcer.join()
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
            counter("forebay_peer_sent_bytes_total", "Bytes of bodies sent, by peer.", sent, "peer"),
            gauge("forebay_datasets", "Datasets announced.", len(self.datasets)),
            gauge("forebay_slices", "Slices served.", len(self._slices)),
        ]

    def claims(self, peer: Peer) -> list[dict[str, Any]]:
        """The node's signed claims of what a peer's certificate covers, good for `ttl_s` from now."""
        expires_at = time.time() + self.ttl_s
        made = []
        for d in self.datasets:
            if not peer.scope.covers(d.name):
                continue
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

    def find_slice(self, sha256: str) -> SliceFile | None:
        """See SliceSource."""
        found = self._slices.get(sha256)
        if found is None:
            return None
        try:
            size = found.path.stat().st_size
        except OSError as error:
            log.error("slice %s: %s is announced and cannot be read: %s", sha256, found.path, error)
            raise ApiError(404, "slice_lost", "this node announced the slice and no longer has it") from error
        if size != found.num_bytes:
            log.error("slice %s: %s has %d bytes, the table says %d", sha256, found.path, size, found.num_bytes)
            raise ApiError(404, "slice_changed", "this node's file of the slice has changed")
        return found

    def dataset_name(self, dataset_id: str) -> str | None:
        """See SliceSource."""
        dataset = self._by_id.get(dataset_id)
        return None if dataset is None else dataset.name

    def find_file(self, dataset_id: str, name: str) -> bytes | Path | None:
        """See SliceSource."""
        if (data := self._small.get((dataset_id, name))) is not None:
            return data
        dataset = self._by_id[dataset_id]
        path = dataset.path / name
        return path if name in FILES and _origin_of(dataset) is None and path.is_file() else None

    def check(self, peer: Peer, dataset: str, dataset_id: str, num_bytes: int) -> None:
        """See SliceSource."""
        reason = self._access.check(peer, dataset, dataset_id, num_bytes, time.time())
        if reason is None:
            return
        if not reason.startswith("quota"):
            raise ApiError(403, "no_access", reason)
        self.identity.note("quota", peer=peer.peer_id, reason=reason)
        raise ApiError(429, "quota", reason)

    async def _read_status(self, request: Request) -> Response:
        status, scope = self.status(), peer_of(request).scope
        status["datasets"] = [dataset for dataset in status["datasets"] if scope.covers(dataset["name"])]
        if not scope.allows("admin"):
            status["peers"] = {}
            ids = {dataset["id"] for dataset in status["datasets"]}
            status["swarms"] = {key: facts for key, facts in status["swarms"].items() if key in ids}
        return JsonResponse(status)


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
