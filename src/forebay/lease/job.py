"""A scheduler's job, as a worker sees it: the connection to the scheduler, the job's settings, and its dataset.

The dataset's manifest and table come from data nodes that the scheduler names, so a worker needs no DHT.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from pathlib import Path

from forebay.closing import Closing
from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.lease.scheduler_client import SchedulerClient
from forebay.network.addresses import HostPort, parse_peer_address
from forebay.network.discovery import Discovery
from forebay.network.pki.identity import Identity
from forebay.network.retry import log_while_waiting
from forebay.storage.base import Timeouts
from forebay.storage.origins import RemoteDataset, read_dataset
from forebay.storage.peer_dataset import PeerOrigin, join_dht, open_peers
from forebay.storage.peer_source import FromUrls

_RETRY_S = 0.2
log = logging.getLogger("forebay.worker")


class LeaseJob(Closing):
    """The job of a `forebay://NETWORK/NAME` URL. Reads the job's settings, and opens its dataset, when it is made.

    Args:
        identity: This node's, or its directory.
        address: The scheduler's `host:port`; None: it is found in the DHT.
        discovery: The DHT; by default it is joined if it is needed.
        patience_s: How long to wait for a scheduler, or for providers, that do not answer.
        stop: Ends the waits.

    Raises:
        NetworkError: If the scheduler, or all of the dataset's data nodes, do not answer.
        DatasetError: If the dataset is damaged.
    """

    def __init__(
        self, url: str, identity: str | Path | Identity | None, address: str | None, *,
        discovery: Discovery | None = None, patience_s: float = 60.0, from_urls: FromUrls = "",
        stop: threading.Event | None = None,
    ) -> None:  # fmt: skip
        origin = open_peers(url, identity, None, None, Timeouts(), from_urls)
        self.identity, self.name, self.from_urls, self.client = origin.identity, origin.name, from_urls, origin.client
        if discovery is None and address is None:
            discovery = join_dht(self.identity)
            weakref.finalize(self, discovery.close)
        self.discovery = discovery
        self.scheduler = SchedulerClient(
            self.identity, self.client, self.name, discovery, address, patience_s, stop or threading.Event()
        )
        self.info = self.scheduler.read_job()
        dataset_id = str(self.info.get("dataset_id"))
        if origin.id not in (None, dataset_id):
            raise UsageError(f"{url}: expected a job of this dataset, got one of {dataset_id}. Leave out ?id=.")
        origin.id, origin.discovery = dataset_id, _DataNodes(self.scheduler)
        self.dataset = self._open(origin, patience_s)

    def _open(self, origin: PeerOrigin, patience_s: float) -> RemoteDataset:
        deadline, reason = time.monotonic() + patience_s, ""
        with log_while_waiting(log, lambda: f"data nodes of {self.name!r}: {reason}"):
            while True:
                try:
                    return read_dataset(origin, origin.id)
                except NetworkError as error:
                    reason = str(error)
                    if time.monotonic() > deadline or self.scheduler.stop.wait(_RETRY_S):
                        raise

    @property
    def job_id(self) -> str:
        return str(self.info.get("job_id"))

    def close(self) -> None:
        """Close the connections that are idle; the job stays usable."""
        self.client.close()


class _DataNodes:
    """The data nodes that a scheduler names, as a Discovery."""

    def __init__(self, scheduler: SchedulerClient) -> None:
        self._scheduler = scheduler

    def announce(self, key: bytes, port: int) -> None:
        """See Discovery. The scheduler finds data nodes by itself."""

    def find(self, key: bytes, timeout_s: float) -> list[HostPort]:
        """See Discovery."""
        found = []
        for address in list(self._scheduler.read_job().get("data_nodes", ()))[:64]:
            with contextlib.suppress(ProtocolError):
                found.append(parse_peer_address(str(address)))
        return found

    def close(self) -> None:
        """See Discovery. There is nothing to close."""
