"""A data node: announces datasets in the DHT and serves their slices, by hash, to members of its network.

Only announced datasets are served, and only hashes in their slice tables: no path comes from a request. Claims are
signed and expire soon, so that those of a dead node are not used.

It is also the tracker of its datasets' swarms (`swarm/tracker.py`), so that each slice leaves the node about once. A
dataset on a web server or in a bucket is announced and tracked too; its slices come from there.

Cost: 350 bytes per slice for the table of hashes (90 MB for 250,000 slices).
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Self

from fastapi.concurrency import run_in_threadpool

from forebay.dataset.manifest import MANIFEST_FILE, SliceInfo
from forebay.dataset.reader import Dataset
from forebay.dataset.verified import VerifiedChunks
from forebay.errors import DatasetError, ForebayError, UsageError
from forebay.files import open_below
from forebay.network.access import AccessPolicy
from forebay.network.app import (
    ApiError,
    Metric,
    Source,
    counter,
    gauge,
)
from forebay.network.discovery import Discovery
from forebay.network.limits import ServerLimits
from forebay.network.peer import Peer, Provider
from forebay.network.peer_source import SLICE_CHANGED
from forebay.network.pki.identity import Identity
from forebay.network.publications import sign_again
from forebay.order.growth import ancestors
from forebay.swarm.share import SharedDataset, SliceFile, SliceServer, SmallFiles, hash_once

log = logging.getLogger("forebay.data_node")


class DataNode(SliceServer):
    """Serves datasets from `start` to `stop`.

    UsageError if a dataset is given twice (two versions of a name are two datasets), or if the certificate of the node
    does not cover one of them.

    Args:
        discovery: Where to announce; the caller closes it. None: it cannot be found by name.
        limits: Of connections, requests and uploads.
        access: Who may read what; None: each member what its certificate covers.
        Others: See SliceServer.
    """

    def __init__(
        self, identity: Identity, datasets: Sequence[Dataset], host: str, port: int, discovery: Discovery | None,
        ttl_s: float = 60.0, *, limits: ServerLimits | None = None, access: AccessPolicy | None = None,
    ) -> None:  # fmt: skip
        ids = [dataset.id for dataset in datasets]
        if twice := [dataset for dataset in datasets if ids.count(dataset.id) > 1]:
            names = " and ".join(dataset.name for dataset in twice if dataset.id == twice[0].id)
            raise UsageError(f"serve: expected each dataset once, got {names} of one id, {twice[0].id}. Serve one.")
        identity.check_role("serve", "data", *(dataset.name for dataset in datasets))
        super().__init__("Forebay data node", identity, host, port, discovery=discovery, ttl_s=ttl_s, limits=limits)
        self.datasets = list(datasets)
        self._access = access or AccessPolicy()
        self._slices: dict[str, tuple[SliceFile, ...]] = {}
        self._local: dict[str, tuple[Dataset, VerifiedChunks]] = {}  # by dataset id

    def start(self) -> None:
        """Serve and announce, in background threads.

        NetworkError if it cannot listen, or reach the server behind a dataset.
        """
        for dataset in self.datasets:
            url = "" if dataset.is_local else dataset.url
            if dataset.is_local:
                self._local[dataset.id] = dataset, VerifiedChunks(dataset.path, dataset.id, dataset.table)
                for index in range(dataset.num_slices):
                    row = dataset.table.row(index)
                    path, id = dataset.slice_path(index), dataset.id
                    file = SliceFile(path, row.bytes, dataset.name, row.chunk_bytes, id, index)
                    self._slices[row.sha256] = (*self._slices.get(row.sha256, ()), file)
            earlier = ancestors(dataset.manifest.lineage)
            family = next(iter(earlier), "")
            shared = SharedDataset(
                dataset.name, dataset.id, dataset.num_slices, SmallFiles(dataset), url=url, family=family
            )
            self._shared[dataset.id] = shared
            for id, num_slices in earlier.items():
                if 0 < num_slices <= dataset.num_slices and id not in self._shared:
                    self._shared[id] = replace(shared, dataset_id=id, num_slices=num_slices, files={}, is_earlier=True)
        self._server.start()
        for id, shared in self._shared.items():
            # A web server or bucket is a provider with its URL as id.
            own = Provider(shared.url or self.identity.peer_id, shared.url or self.address, True)
            self.tracker.add(id, shared.num_slices, own)
        self._announce()
        self._announcer.start()
        names = ",".join(dataset.name for dataset in self.datasets)
        log.info("data node started: address=%s peer_id=%s datasets=%s", self.address, self.identity.peer_id, names)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _find_faults(self) -> list[str]:
        lost = [d.name for d in self.datasets if d.is_local and not (d.path / MANIFEST_FILE).is_file()]
        text = f"files of datasets: those of {', '.join(lost)} are gone; restore them, or restart without them"
        return [text] if lost else []

    def metrics(self) -> Iterable[Metric]:
        with self._lock:
            sent = dict(self._sent)
        return [
            *super().metrics(),
            counter(
                "forebay_peer_sent_bytes_total",
                "Bytes of slices and files sent, by peer id; to the role viewer only.",
                sent,
                "peer",
            ),
            gauge("forebay_datasets", "Datasets announced.", len(self.datasets)),
            gauge("forebay_slices", "Slices served.", len(self._slices)),
        ]

    def find_slice(self, sha256: str) -> Sequence[SliceFile]:
        return [file for file in self._slices.get(sha256, ()) if file.path.is_file()]

    async def verify_slice(self, files: Sequence[SliceFile], start: int, stop: int) -> Source:
        """What opens the first file that has its dataset's bytes; a chunk is hashed once, while its file stays."""
        for file in files:
            dataset, verified = self._local[file.dataset_id]
            row = dataset.table.row(file.index)
            first, last = start // row.chunk_bytes, -(-stop // row.chunk_bytes)
            try:
                leaves = partial(_leaves, dataset, row)
                await run_in_threadpool(verified.verify, file.index, row, leaves, first, last)
                return partial(open_below, dataset.path, row.name)  # A link may have replaced it.
            except (OSError, DatasetError) as error:
                log.error("slice %s is not served: %s", row.sha256, error)
        raise ApiError(404, SLICE_CHANGED, "this node's file of the slice has changed")

    async def read_leaves(self, file: SliceFile) -> bytes:
        try:
            return await run_in_threadpool(self._local[file.dataset_id][0].leaves, file.index)
        except DatasetError:  # the dataset has no chunks.sha256
            return await super().read_leaves(file)

    def charge(self, peer: Peer, file: SliceFile) -> Callable[[int], bool] | None:
        if self._access.path is None:
            return None

        charged_at = time.time()

        def count(num_bytes: int) -> bool:
            nonlocal charged_at  # What is given back is of the day on which it was charged.
            charged_at = time.time() if num_bytes > 0 else charged_at
            return self._access.check(peer, file.dataset, file.dataset_id, num_bytes, charged_at) is None

        return count

    def check(self, peer: Peer, dataset: str, dataset_id: str, num_bytes: int) -> None:
        reason = self._access.check(peer, dataset, dataset_id, num_bytes, time.time())
        if reason is None:
            return
        if not reason.startswith("quota"):
            raise ApiError(403, "no_access", reason)
        self.identity.record_event("quota", peer=peer.peer_id, reason=reason)
        raise ApiError(429, "quota", reason)

    def _announce(self) -> None:
        for dataset in self.datasets:
            with suppress(OSError, ForebayError):  # as it has none, or not a valid one
                if dataset.is_local:
                    sign_again(self.identity, dataset.path)
        super()._announce()


def _leaves(dataset: Dataset, row: SliceInfo) -> bytes:
    """Return the hashes of the chunks of a slice; of its file where the dataset has none."""
    try:
        return dataset.leaves(row.index)
    except DatasetError:
        root, leaves = hash_once(dataset.file(row.name), row.chunk_bytes)
        if root != row.sha256:
            raise
        return leaves
