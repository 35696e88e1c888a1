"""A scheduler's job, as a worker sees it: the connection to the scheduler, the job's settings, and its dataset.

The dataset's manifest and table come from data nodes that the scheduler names, so a worker needs no DHT; or from the
scheduler itself, if none has them now.
"""

import contextlib
import logging
import time
import weakref
from pathlib import Path

from forebay.base import Closing
from forebay.errors import DatasetError, ForebayError, NetworkError, ProtocolError, UsageError
from forebay.lease.scheduler_client import SchedulerClient
from forebay.network.client import Client
from forebay.network.discovery import MAX_CLAIMS, Discovery
from forebay.network.peer_dataset import PeerOrigin, join_dht, open_peers
from forebay.network.peer_source import FromUrls, PeerSource
from forebay.network.pki.identity import Identity
from forebay.storage.hosts import HostPort, parse_peer_address
from forebay.storage.origins import RemoteDataset, read_dataset
from forebay.storage.retry import log_while_waiting

_RETRY_S = 0.2
log = logging.getLogger("forebay.worker")


class LeaseJob(Closing):
    """A job. Reads its settings, and opens its dataset, when it is made.

    Args:
        url: The dataset, `forebay://NETWORK/NAME`; its name is the job's.
        address: The scheduler's `host:port`; None: it is found in the DHT.
        discovery: The DHT; by default it is joined if it is needed.
        patience_s: How long to wait for a scheduler, or for providers, that do not answer.

    Raises:
        NetworkError: If the scheduler, or all of the dataset's data nodes, do not answer.
        DatasetError: If the dataset is damaged.
        UsageError: If the job is of another dataset.
    """

    def __init__(
        self, url: str, identity: str | Path | Identity | None, address: str | None, *,
        discovery: Discovery | None, patience_s: float, from_urls: FromUrls,
    ) -> None:  # fmt: skip
        asked = open_peers(url, identity=identity, from_urls=from_urls)
        self.identity = asked.identity
        self.from_urls = from_urls
        self.client = Client(asked.identity)
        self.patience_s = patience_s
        if discovery is None and address is None:
            discovery = join_dht(self.identity)
            weakref.finalize(self, discovery.close)
        self.discovery = discovery
        self.scheduler = SchedulerClient(self.identity, self.client, asked.name, discovery, address, patience_s)
        self.info = self.scheduler.read_job()
        self.name, expected_id = asked.name, str(self.info.get("dataset_id"))
        if asked.id not in (None, expected_id):
            raise UsageError(f"job {self.name}: expected dataset {asked.id}, got {expected_id}. Leave out ?id=.")
        origin = PeerOrigin(
            self.identity, self.name, self.client, expected_id, discovery=_DataNodes(self.scheduler),
            publishers=asked.publishers, from_urls=from_urls,
        )  # fmt: skip
        self.dataset = self._open(origin)

    def _open(self, origin: PeerOrigin) -> RemoteDataset:
        deadline = time.monotonic() + self.patience_s
        id = str(origin.id)
        faults = list[ForebayError]()
        with log_while_waiting(
            log, lambda: f"data nodes of {self.name!r}: {faults[-1] if faults else 'no answer yet'}"
        ):
            while True:
                try:
                    origin.claims(0.0)  # fails at once where nobody serves it
                    return read_dataset(origin, id)
                except (NetworkError, DatasetError) as error:
                    faults.append(error)
                with contextlib.suppress(NetworkError, DatasetError):
                    if not origin.publishers:
                        source = PeerSource(self.client, None, self.scheduler.addresses()[0], str, dataset_id=id)
                        files = read_dataset(source, id)
                        return RemoteDataset(origin, files.manifest, files.table, id)
                if time.monotonic() > deadline or self.scheduler.stop.wait(_RETRY_S):
                    raise faults[-1]

    @property
    def job_id(self) -> str:
        return str(self.info.get("job_id"))

    def close(self) -> None:
        """Close the connections that are idle; the job stays usable."""
        self.client.close()


class _DataNodes(Discovery):
    """The data nodes that a scheduler names; it finds them by itself."""

    fault = ""

    def __init__(self, scheduler: SchedulerClient) -> None:
        self._scheduler = scheduler
        self._is_first = True

    def find(self, key: bytes, timeout_s: float) -> list[HostPort]:
        """See Discovery."""
        info = self._scheduler.job if self._is_first else self._scheduler.read_job()
        self._is_first = False  # the addresses that came with the job's settings are new
        addresses = []
        for address in list(info.get("data_nodes", ()))[:MAX_CLAIMS]:
            with contextlib.suppress(ProtocolError):
                addresses.append(parse_peer_address(str(address)))
        return addresses
