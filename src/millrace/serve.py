"""A data node: announces datasets in the DHT and hands out their slices, by hash, to members of its network.

Only what it announces can be asked for, and only by a hash that a slice table lists: no path comes from a
request. What it says it has is signed and short-lived, so that a node which died is soon believed by nobody.

What the choice costs: the table of hashes, some 300 bytes a slice (75 MB for 250,000 slices).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.dataset.reader import Dataset
from millrace.errors import NetworkError, UsageError
from millrace.network.discovery import Claim, Discovery, record_key
from millrace.network.https import Request, Response, Server, error_response, file_response, json_response
from millrace.network.identity import Identity, Peer

FILES = ("manifest.json", "slices.parquet", "tokenizer.json")
log = logging.getLogger("millrace.serve")


class DataNode:
    """Serves datasets from `start` to `stop`.

    Args:
        port: TCP; 0 takes a free one, `.port` and `.address` then say which.
        discovery: Where to announce; stays the caller's to close. None: nobody finds it by name.
        ttl_s: How long a claim holds; it is announced anew every third of that.
        max_connections: Each costs a thread and, while it sends, 1 MiB.

    Raises:
        UsageError: If two datasets have one name: a name would lead to two ids.
    """

    def __init__(
        self,
        identity: Identity,
        datasets: Sequence[Dataset],
        host: str,
        port: int,
        discovery: Discovery | None,
        ttl_s: float = 60.0,
        max_connections: int = 256,
    ) -> None:
        if len({dataset.name for dataset in datasets}) != len(datasets):
            names = sorted(dataset.name for dataset in datasets)
            raise UsageError(f"serve: expected datasets of different names, got {names}. Serve each name once.")
        if not ttl_s > 0:
            raise UsageError(f"serve: expected ttl_s > 0, got {ttl_s}")
        self.identity = identity
        self.datasets = list(datasets)
        self.discovery = discovery
        self.ttl_s = ttl_s
        self._by_id = {dataset.id: dataset for dataset in datasets}
        self._slices: dict[str, tuple[Path, int]] = {}
        self._server = Server(identity, host, port, self._handle, max_connections, self._count)
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}
        self._num_announcements = 0
        self._failure = ""
        self._stopping = threading.Event()
        self._announcer: threading.Thread | None = None
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
            NetworkError: If it cannot listen.
        """
        for dataset in self.datasets:
            for index in range(dataset.num_slices):
                row = dataset.table.row(index)
                self._slices[row.sha256] = (dataset.slice_path(index), row.bytes)
        self._server.start()
        self._announce()
        self._announcer = threading.Thread(target=self._keep_announced, name="announce", daemon=True)
        self._announcer.start()

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
            "draining": self._server.draining,
            "up_s": round(time.time() - self._started_at, 3),
        }

    def claims(self) -> list[dict[str, Any]]:
        """The node's signed claims, good for `ttl_s` from now."""
        expires_at = time.time() + self.ttl_s
        made = [
            Claim(d.name, d.id, d.num_slices, self.identity.peer_id, self.address, expires_at) for d in self.datasets
        ]
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
            self._sent[peer.peer_id] = self._sent.get(peer.peer_id, 0) + num_bytes

    def _handle(self, request: Request) -> Response:
        if request.method != "GET":
            return error_response(405, "read_only", f"a data node only answers GET, not {request.method}")
        match request.path.split("/")[1:]:
            case ["v1", "claims"]:
                return json_response({"claims": self.claims()})
            case ["v1", "status"]:
                return json_response(self.status())
            case ["v1", "slices", sha256]:
                return self._slice(request, sha256)
            case ["v1", "datasets", dataset_id, name] if name in FILES:
                return self._file(request, dataset_id, name)
        return error_response(404, "unknown_path", "nothing is served at this path")

    def _slice(self, request: Request, sha256: str) -> Response:
        held = self._slices.get(sha256)
        if held is None:
            return error_response(404, "unknown_slice", "this node announces no slice of this hash")
        path, size = held
        try:
            found = path.stat().st_size
        except OSError as error:
            log.error("slice %s: %s is announced and cannot be read: %s", sha256, path, error)
            return error_response(404, "slice_lost", "this node announced the slice and no longer has it")
        if found != size:
            log.error("slice %s: %s has %d bytes, the table says %d", sha256, path, found, size)
            return error_response(404, "slice_changed", "this node's file of the slice has changed")
        return file_response(request, path, size)

    def _file(self, request: Request, dataset_id: str, name: str) -> Response:
        dataset = self._by_id.get(dataset_id)
        if dataset is None:
            return error_response(404, "unknown_dataset", "this node announces no dataset of this id")
        path = dataset.path / name
        if not path.is_file():
            return error_response(404, "unknown_file", f"dataset {dataset_id} has no {name}")
        return file_response(request, path, path.stat().st_size)
