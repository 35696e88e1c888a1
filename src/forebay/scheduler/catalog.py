"""The dataset of the scheduler's job: found in the network by name, its manifest and slice table verified.

Manifest and table are stored in the state directory and verified when read back: a restart needs no data node.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, Manifest, SliceTable
from forebay.errors import DatasetError, IntegrityError, LedgerError, NetworkError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.lease.messages import Lease, LeaseGrant, ProviderReport
from forebay.ledger.chain import read_entries
from forebay.ledger.index import Job, encode_runs
from forebay.load.samples import SampleIndex, plan_samples
from forebay.machine import own_directory
from forebay.network.client import Client
from forebay.network.discovery import Claim, Discovery, find_providers, read_claims
from forebay.network.peer import Provider
from forebay.network.peer_dataset import PeerOrigin
from forebay.network.peer_source import FromUrls, read_slice, verify_provider
from forebay.network.publications import select_published
from forebay.order.growth import ancestors
from forebay.scheduler.core import ProviderFault
from forebay.scheduler.leases import JobSpec
from forebay.scheduler.sessions import WorkerSession
from forebay.storage.origins import RemoteDataset
from forebay.storage.retry import log_while_waiting

DIRECTORY = "datasets"
MAX_MANIFEST_BYTES = 16 << 20
MAX_TABLE_BYTES = 1 << 30
ASK_S = 5.0
RETRY_S = 0.2
log = logging.getLogger("forebay.scheduler")


class ManifestStore:
    """The manifests and slice tables in a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.directory = state_dir / DIRECTORY

    def put(self, expected_id: str, manifest: bytes, table: bytes) -> None:
        """Store verified files; the manifest last, so that it is not there without its table."""
        own_directory(self.directory)
        remove_stale(self.directory)
        for name, data in ((TABLE_FILE, table), (MANIFEST_FILE, manifest)):
            atomic_write(self.path(expected_id, name), data, 0o600)

    def path(self, dataset_id: str, name: str) -> Path:
        """Where the manifest or the table of a dataset is."""
        return self.directory / f"{dataset_id}{Path(name).suffix}"

    def get(self, expected_id: str) -> tuple[Manifest, SliceTable] | None:
        """The stored files of a dataset; None if they are missing or corrupt."""
        manifest, table = (self.path(expected_id, name) for name in (MANIFEST_FILE, TABLE_FILE))
        try:
            return parse(expected_id, manifest.read_bytes(), table.read_bytes(), str(manifest))
        except (OSError, IntegrityError, DatasetError):
            return None


def parse(expected_id: str, manifest: bytes, table: bytes, source: str) -> tuple[Manifest, SliceTable]:
    """Verify and parse a manifest and its table.

    Raises:
        IntegrityError: If they are not those of this dataset.
        DatasetError: If they are, and are malformed.
    """
    parsed = Manifest.from_json(manifest)
    if parsed.id != expected_id:
        raise IntegrityError(f"manifest of {expected_id}: expected that id, got {parsed.id} ({source}).")
    if (sha256 := hashlib.sha256(table).hexdigest()) != parsed.table_sha256:
        raise IntegrityError(
            f"slice table of {expected_id}: expected sha256 {parsed.table_sha256}, got {sha256} ({source})."
        )
    return parsed, SliceTable.from_parquet(table, parsed.chunk_bytes)


def started_id(ledger: Path) -> str:
    """The dataset id in a ledger's first entry; "" without one."""
    try:
        return Job.of(next(read_entries(ledger))).dataset_id
    except (OSError, StopIteration, LedgerError):  # opening the ledger reports what is wrong with it
        return ""


@dataclass(eq=False)
class Catalog:
    """The dataset of the job; `find` opens it.

    Args:
        name, dataset_id: Of the dataset; the id is "" where the name stands for one.
        seq_len: Tokens of a sample; not used for rows.
        settings: Further fields of `JobSpec`.
        samples: Packing, documents, split and validation fraction, as `load.samples.plan_samples` has them.
        store: Where the manifest and table are stored.
        publishers: Peer ids; only datasets that one of them signed count. Without any all do.
    """

    name: str
    dataset_id: str
    seq_len: int
    settings: Mapping[str, Any]
    network_id: str
    discovery: Discovery
    client: Client
    stopping: threading.Event
    store: ManifestStore
    publishers: Collection[str]
    from_urls: FromUrls
    samples: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.claims = list[Claim]()
        self._unsigned: list[str] = []
        self._state = "the DHT names none that answers"
        self._family, self._accepted = "", set[str]()

    def find(self, wait_s: float, started: str) -> None:
        """Find the dataset; waits for a node that sends its manifest.

        Args:
            started: The dataset id of the job, if it was started before: from the store it needs no data node now.

        Raises:
            DatasetError: If no node serves it within `wait_s`, or its name stands for several datasets.
            NetworkError: If no node that claims it sent its manifest within that time.
        """
        files = self.store.get(started) if started and self.dataset_id in ("", started) else None
        if files is None or files[0].name != self.name:
            with log_while_waiting(log, lambda: f"data nodes of {self.name!r}: {self._state}"):
                started, files = self._search(wait_s)
        self.manifest, self.table = files
        self._family = next(iter(ancestors(self.manifest.lineage)), "")
        index = self._index_samples(started)
        self.identity = index.describe()  # of the job's samples
        self._first_ids = index.bases + index.offsets
        skipped = np.diff(np.append(0, self._first_ids - (index.counts.cumsum() - index.counts)))
        # How many ids a split skips before each slice, as runs.
        self.skipped_samples = encode_runs(skipped) if index.split is not None else None
        self.spec = JobSpec(self.name, started, index.counts, **self.settings)

    def _index_samples(self, dataset_id: str) -> SampleIndex:
        """The samples of each slice. Packing `best_fit` reads the documents' lengths from data nodes, once."""
        assert self.client.identity is not None
        origin = PeerOrigin(
            self.client.identity, self.name, expected_id=dataset_id, discovery=self.discovery,
            publishers=self.publishers, from_urls=self.from_urls,
        )  # fmt: skip
        dataset = RemoteDataset(origin, self.manifest, self.table, dataset_id)
        seq_len = self.seq_len if self.manifest.layout == "tokens" else None
        return plan_samples(dataset, seq_len, **self.samples, cache_dir=self.store.directory)

    def _search(self, wait_s: float) -> tuple[str, tuple[Manifest, SliceTable]]:
        deadline = time.monotonic() + wait_s
        while True:
            claims = self._find_claims(self.dataset_id, min(ASK_S, wait_s))
            ids = sorted({claim.dataset_id for claim in claims})
            if len(ids) > 1:
                raise DatasetError(
                    f"scheduler: dataset {self.name!r} stands for {len(ids)} datasets: {', '.join(ids)}. "
                    "Choose one by its id (--id)."
                )
            failures = []
            for claim in claims:
                try:
                    files = self._fetch(claim)
                except (NetworkError, DatasetError) as error:
                    failures.append(f"{claim.address}: {error}")
                    self._state = f"requests for the manifest failed: {'; '.join(failures)}"
                else:
                    self.claims = claims
                    return ids[0], files
            # The nodes may have died since; others may come.
            if time.monotonic() < deadline and not self.stopping.wait(RETRY_S):
                continue
            if claims:
                raise NetworkError(f"scheduler: no provider sent the manifest of {self.name!r}: {'; '.join(failures)}")
            raise DatasetError(
                f"scheduler: expected a data node of {self.name!r}"
                + (f" with id {self.dataset_id}" if self.dataset_id else "")
                + f" in network {self.network_id} within {wait_s:g} s, got none: the DHT names no node that "
                "serves it. Start one with `forebay serve`, or check the name with `forebay find`."
                + "".join(f" Not counted: {reason}" for reason in self._unsigned)
            )

    def _find_claims(self, dataset_id: str, timeout_s: float = ASK_S) -> list[Claim]:
        """The data nodes that serve the dataset now."""
        claims = find_providers(
            self.discovery, self.client, self.network_id, self.name, timeout_s, dataset_id, self._family or dataset_id
        )
        claims = [claim for claim in claims if claim.is_whole and dataset_id in ("", claim.dataset_id)]
        publishers = () if dataset_id in self._accepted else self.publishers
        signed, self._unsigned = select_published(self.client, claims, publishers, dataset_id)
        self._accepted.update(claim.dataset_id for claim in signed)
        return signed

    def _fetch(self, claim: Claim) -> tuple[Manifest, SliceTable]:
        base, peer = f"/v1/datasets/{claim.dataset_id}", claim.peer_id
        get = partial(self.client.get_bytes, claim.address, expect_peer=peer)
        manifest = get(f"{base}/{MANIFEST_FILE}", MAX_MANIFEST_BYTES)
        table = get(f"{base}/{TABLE_FILE}", MAX_TABLE_BYTES)
        parsed = parse(claim.dataset_id, manifest, table, f"peer {peer}")
        self.store.put(claim.dataset_id, manifest, table)
        return parsed

    def refresh(self) -> None:
        """Find the data nodes again; where the DHT names none, known ones that answer still count."""
        self.claims = self._find_claims(self.spec.dataset_id) or [c for c in self.claims if self._is_confirmed(c)]

    def _is_confirmed(self, claim: Claim) -> bool:
        try:
            current = read_claims(self.client, claim.address, claim.name, dataset_id=claim.dataset_id)
        except (NetworkError, UsageError):
            return False
        return any((c.peer_id, c.dataset_id) == (claim.peer_id, claim.dataset_id) for c in current)

    def origins(self) -> list[Provider]:
        """The data nodes as origins of a swarm: by address, or by the URL that they stand for."""
        return [Provider(claim.peer_id, claim.url or claim.address, True) for claim in self.claims]

    def describe_job(self, job_id: str) -> dict[str, Any]:
        """The response to `GET /v1/job`."""
        spec, manifest = self.spec, self.manifest
        return {
            "job_id": job_id, "name": self.name, "dataset_id": spec.dataset_id, "layout": manifest.layout,
            "seq_len": self.seq_len, "seed": spec.seed, "epochs": spec.epochs, "num_slices": len(self.table),
            "num_samples": int(spec.samples.sum()), "dtype": manifest.dtype, "vocab_size": manifest.vocab_size,
            "lease_s": spec.lease_s,
            **self.identity, "data_nodes": [claim.address for claim in self.claims],
        }  # fmt: skip

    def describe(self, grant: LeaseGrant, job_id: str) -> Lease:
        """A lease as it is sent to a worker."""
        row = self.table.row(grant.slice)
        return Lease(
            **vars(grant), job_id=job_id, sha256=row.sha256, bytes=row.bytes,
            sample_base=int(self._first_ids[grant.slice]), seed=self.spec.seed,
        )  # fmt: skip

    def check_slice(self, index: int, provider: Provider | None) -> bool | None:
        """Whether a provider, or any origin, sends right bytes of a slice; None: none answers now.

        For a dataset behind URLs that may not be read here the workers are believed: False.
        """
        row, origins = self.table.row(index), self.origins()
        if provider is None and origins and not self.from_urls and all(origin.is_url for origin in origins):
            return False
        asked = origins if provider is None else [provider]
        answers = [verify_provider(self.client, other, row, self.from_urls) for other in asked]
        if True in answers:
            return True
        return None if None in answers or not answers else False

    def read_range(self, index: int, start: int, stop: int) -> Iterator[tuple[Provider, bytes]]:
        """Bytes [start, stop) of a slice, as each origin sends them; those that do not answer are left out."""
        row = self.table.row(index)
        for origin in self.origins():
            try:
                pieces = read_slice(self.client, origin, row, start, stop, self.from_urls)
                yield origin, b"".join(bytes(piece) for piece in pieces)
            except NetworkError as error:
                log.info("cannot read slice for a check: slice=%s origin=%s: %s", row.name, origin.address, error)

    def faults_of(self, session: WorkerSession | None, reports: Sequence[ProviderReport]) -> list[ProviderFault]:
        """Reports by slice; those of slices that were not leased to the session lately are ignored."""
        if session is None or not reports:
            return []
        leased = {self.table.row(index).sha256: index for index in session.leased()}
        return [ProviderFault(r.peer_id, leased[r.sha256], r.reason, r.wrong) for r in reports if r.sha256 in leased]
