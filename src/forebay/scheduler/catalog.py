"""The dataset of the scheduler's job: found in the network by name, its manifest and slice table verified.

Manifest and table are stored in the state directory and verified when read back: a restart needs no data node.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.dataset.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, TABLE_FILE, Manifest, SliceTable
from forebay.errors import DatasetError, IntegrityError, LedgerError, NetworkError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.lease.messages import Lease, LeaseGrant, ProviderReport
from forebay.ledger.chain import read_entries
from forebay.ledger.index import Job, encode_runs
from forebay.load.samples import plan_samples
from forebay.machine import own_directory
from forebay.network.discovery import Claim, read_claims
from forebay.network.peer import Provider
from forebay.network.peer_dataset import NoPeersError, PeerOrigin
from forebay.network.peer_source import read_slice, verify_provider
from forebay.order.growth import ancestors
from forebay.scheduler.core import ProviderFault
from forebay.scheduler.leases import JobSpec
from forebay.scheduler.sessions import WorkerSession
from forebay.storage.base import PermanentError
from forebay.storage.origins import RemoteDataset
from forebay.storage.retry import log_while_waiting

DIRECTORY = "datasets"
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
        IntegrityError: If the manifest is not that of this dataset.
        DatasetError: If the table is not, or one of them is malformed.
    """
    parsed = Manifest.from_json(manifest)
    if parsed.id != expected_id:
        raise IntegrityError(f"manifest of {expected_id}: expected that id, got {parsed.id} ({source}).")
    return parsed, parsed.read_table(table, source)


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
        origin: The peers that serve it.
        seq_len: Tokens of a sample; not used for rows.
        settings: Further fields of `JobSpec`.
        store: Where the manifest and table are stored.
        samples: Packing, documents, split and validation fraction, as `load.samples.plan_samples` has them.
    """

    origin: PeerOrigin
    seq_len: int
    settings: Mapping[str, Any]
    stopping: threading.Event
    store: ManifestStore
    samples: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.claims = list[Claim]()
        self._state = "the DHT names none that answers"

    def find(self, wait_s: float, started: str) -> None:
        """Find the dataset; waits for a node that sends its manifest.

        Args:
            started: The dataset id of the job, if it was started before: from the store it needs no data node now.

        Raises:
            DatasetError: If no node serves it within `wait_s`.
            UsageError: If its name stands for several datasets.
            NetworkError: If no node that claims it sent its manifest within that time.
        """
        origin = self.origin
        files = self.store.get(started) if started and origin.id in (None, started) else None
        if files is None or files[0].name != origin.name:
            with log_while_waiting(log, lambda: f"data nodes of {origin.name!r}: {self._state}"):
                files = self._search(wait_s)
        self.manifest, self.table = files
        origin.id, origin.family = self.manifest.id, next(iter(ancestors(self.manifest.lineage)), "")
        # Packing `best_fit` reads the documents' lengths from data nodes, once.
        dataset = RemoteDataset(origin, *files, origin.id)
        seq_len = self.seq_len if self.manifest.layout == "tokens" else None
        index = plan_samples(dataset, seq_len, **self.samples, cache_dir=self.store.directory)
        self.identity = index.describe()  # of the job's samples
        self._first_ids = index.bases + index.offsets
        skipped = np.diff(np.append(0, self._first_ids - (index.counts.cumsum() - index.counts)))
        # How many ids a split skips before each slice, as runs.
        self.skipped_samples = encode_runs(skipped) if index.split is not None else None
        self.spec = JobSpec(origin.name, origin.id, index.counts, **self.settings)

    def _search(self, wait_s: float) -> tuple[Manifest, SliceTable]:
        origin = self.origin
        deadline = time.monotonic() + wait_s
        fault = ""
        while True:
            try:
                self.claims = self._find_claims(min(ASK_S, wait_s))
                if self.claims:
                    return self._fetch()
            except (NetworkError, DatasetError) as error:
                if isinstance(error, PermanentError) and not self.claims:  # no node will answer this one
                    raise
                fault = f" ({error})"
                if self.claims:
                    self._state = f"requests for the manifest failed: {error}"
            # The nodes may have died since; others may come.
            if time.monotonic() >= deadline or self.stopping.wait(RETRY_S):
                raise (NetworkError if self.claims else DatasetError)(
                    f"scheduler: expected a data node of {origin.name!r} that sends its manifest within {wait_s:g} s, "
                    f"got none{fault}. Start one with `forebay serve`, or check the name with `forebay find`."
                )

    def _find_claims(self, timeout_s: float = ASK_S) -> list[Claim]:
        """The data nodes that serve all of the dataset now."""
        return [claim for claim in self.origin.claims(0.0, timeout_s) if claim.is_whole]

    def _fetch(self) -> tuple[Manifest, SliceTable]:
        origin = self.origin
        id = str(origin.id)
        manifest = origin.get(MANIFEST_FILE, MAX_MANIFEST_BYTES)
        table = origin.get(TABLE_FILE, MAX_TABLE_BYTES)
        parsed = parse(id, manifest, table, origin.url)
        self.store.put(id, manifest, table)
        return parsed

    def refresh(self) -> None:
        """Find the data nodes again; where the DHT names none, known ones that answer still count."""
        claims = list[Claim]()
        with contextlib.suppress(NoPeersError):
            claims = self._find_claims()
        self.claims = claims or [claim for claim in self.claims if self._is_confirmed(claim)]

    def _is_confirmed(self, claim: Claim) -> bool:
        try:
            current = read_claims(self.origin.client, claim.address, claim.name, dataset_id=claim.dataset_id)
        except (NetworkError, UsageError):
            return False
        return any((c.peer_id, c.dataset_id) == (claim.peer_id, claim.dataset_id) for c in current)

    def origins(self) -> list[Provider]:
        """The data nodes as origins of a swarm: by address, or by the URL that they stand for."""
        return [Provider(claim.peer_id, claim.url or claim.address, True) for claim in self.claims]

    def describe_job(self, job_id: str) -> dict[str, Any]:
        """The response to `GET /v1/job`."""
        spec = self.spec
        manifest = self.manifest
        return {
            "job_id": job_id, "name": spec.name, "dataset_id": spec.dataset_id, "layout": manifest.layout,
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
        row = self.table.row(index)
        origins = self.origins()
        from_urls = self.origin.from_urls
        if provider is None and origins and not from_urls and all(origin.is_url for origin in origins):
            return False
        asked = origins if provider is None else [provider]
        answers = [verify_provider(self.origin.client, other, row, from_urls) for other in asked]
        if True in answers:
            return True
        return None if None in answers or not answers else False

    def read_range(self, index: int, start: int, stop: int) -> Iterator[tuple[Provider, bytes]]:
        """Bytes [start, stop) of a slice, as each origin sends them; those that do not answer are left out."""
        row = self.table.row(index)
        for origin in self.origins():
            try:
                pieces = read_slice(self.origin.client, origin, row, start, stop, self.origin.from_urls)
                yield origin, b"".join(bytes(piece) for piece in pieces)
            except NetworkError as error:
                log.info("cannot read slice for a check: slice=%s origin=%s: %s", row.name, origin.address, error)

    def faults_of(self, session: WorkerSession | None, reports: Sequence[ProviderReport]) -> list[ProviderFault]:
        """Reports by slice; those of slices that were not leased to the session lately are ignored."""
        if session is None or not reports:
            return []
        leased = {self.table.row(index).sha256: index for index in session.leased()}
        return [ProviderFault(r.peer_id, leased[r.sha256], r.reason, r.wrong) for r in reports if r.sha256 in leased]
