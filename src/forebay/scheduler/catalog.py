"""The datasets of the scheduler's jobs: found in the network by name, their manifests and slice tables verified.

Manifests and tables are stored in the state directory and verified when read back: a restart needs no data node.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.manifest import Manifest, SliceInfo, SliceTable, dataset_id
from forebay.errors import DatasetError, IntegrityError, LedgerError, NetworkError, UsageError
from forebay.files import atomic_write, remove_stale
from forebay.ledger.chain import read_entries
from forebay.ledger.job import Job
from forebay.network.client import Client
from forebay.network.discovery import Claim, Discovery, find_providers, read_claims
from forebay.network.peer import Provider
from forebay.network.publications import select_published
from forebay.network.retry import log_while_waiting
from forebay.order.plan import samples_per_slice
from forebay.scheduler.checks import ProviderFault
from forebay.scheduler.jobs import JobSettings, JobSpec
from forebay.scheduler.messages import Lease, LeaseGrant, ProviderReport
from forebay.scheduler.sessions import WorkerSession
from forebay.storage.peer_source import FromUrls, read_slice, verify_provider

DIRECTORY = "datasets"
MAX_MANIFEST_BYTES = 16 << 20
MAX_TABLE_BYTES = 1 << 30
ASK_S = 5.0
RETRY_S = 0.2
log = logging.getLogger("forebay.scheduler")


@dataclass(frozen=True)
class JobPlan(JobSettings):
    """A job as its user describes it.

    Args:
        dataset: The dataset's name; "" is the job's.
        dataset_id: Its id, where the name stands for several.
        seq_len: Tokens of a sample; not used for rows.
        max_tokens_per_s: Of one lease; uses that claim more are refused until so much time has passed.
    """

    dataset: str = ""
    dataset_id: str = ""
    seq_len: int = 1024
    max_tokens_per_s: float = 1e8

    @property
    def dataset_name(self) -> str:
        return self.dataset or self.name


@dataclass(frozen=True, eq=False)
class JobDataset:
    """A dataset that was found: `samples` int64 [S], `bases` int64 [S], the samples before each slice."""

    name: str
    dataset_id: str
    manifest: Manifest
    table: SliceTable
    samples: NDArray[np.int64]
    bases: NDArray[np.int64]

    @classmethod
    def of(cls, name: str, dataset_id: str, seq_len: int, manifest: Manifest, table: SliceTable) -> "JobDataset":
        """A dataset in samples of a sequence length."""
        samples = samples_per_slice(table.count, seq_len, manifest.layout)
        return cls(name, dataset_id, manifest, table, samples, samples.cumsum() - samples)


class ManifestStore:
    """The manifests and slice tables in a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / DIRECTORY

    def put(self, expected_id: str, manifest: bytes, table: bytes) -> None:
        """Store verified files; the manifest last, so that it is not there without its table."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_stale(self._directory)
        for suffix, data in ((".parquet", table), (".json", manifest)):
            atomic_write(self._directory / f"{expected_id}{suffix}", data, 0o600)

    def get(self, expected_id: str) -> tuple[Manifest, SliceTable] | None:
        """The stored files of a dataset; None if they are missing or corrupt."""
        path = self._directory / f"{expected_id}.json"
        try:
            return parse(expected_id, path.read_bytes(), path.with_suffix(".parquet").read_bytes(), str(path))
        except (OSError, IntegrityError, DatasetError):
            return None


def parse(expected_id: str, manifest: bytes, table: bytes, source: str) -> tuple[Manifest, SliceTable]:
    """Verify and parse a manifest and its table.

    Raises:
        IntegrityError: If they are not those of this dataset.
        DatasetError: If they are, and are malformed.
    """
    if dataset_id(manifest) != expected_id:
        raise IntegrityError(f"manifest of {expected_id}: expected that hash, got {dataset_id(manifest)} ({source}).")
    parsed = Manifest.from_json(manifest)
    if dataset_id(table) != parsed.table_sha256:
        raise IntegrityError(
            f"slice table of {expected_id}: expected sha256 {parsed.table_sha256}, got {dataset_id(table)} ({source})."
        )
    return parsed, SliceTable.from_parquet(table)


def started_jobs(ledgers: Mapping[str, Path]) -> dict[str, str]:
    """The dataset id in the first entry of each job's ledger, by job name; jobs without a ledger are left out."""
    ids = {}
    for name, path in ledgers.items():
        try:
            ids[name] = Job.of(next(read_entries(path))).dataset_ids[0]
        except (OSError, StopIteration, LedgerError):  # opening the ledger reports what is wrong with it
            continue
    return ids


class DatasetFinder:
    """Finds data nodes in the DHT, and what they serve.

    Args:
        store: Where the manifests and tables of found datasets are stored.
        publishers: Peer ids; only datasets that one of them signed count. Without any all do.
    """

    def __init__(
        self, network_id: str, discovery: Discovery, client: Client, stopping: threading.Event, store: ManifestStore,
        publishers: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._network_id = network_id
        self._discovery = discovery
        self.client = client
        self._stopping = stopping
        self.store = store
        self._publishers = publishers
        self._unsigned: list[str] = []
        self._state = ""

    def claims(self, name: str, dataset_id: str, timeout_s: float = ASK_S) -> list[Claim]:
        """The data nodes that serve a dataset now; of any id if that is ""."""
        claims = find_providers(self._discovery, self.client, self._network_id, name, timeout_s=timeout_s)
        claims = [claim for claim in claims if claim.is_whole and dataset_id in ("", claim.dataset_id)]
        signed, _, self._unsigned = select_published(self.client, claims, self._publishers, dataset_id)
        return signed

    def confirm(self, claims: Sequence[Claim]) -> list[Claim]:
        """Of earlier claims, those that their nodes still make."""
        confirmed = []
        for claim in claims:
            try:
                current = read_claims(self.client, claim.address, claim.name)
            except (NetworkError, UsageError):
                continue
            confirmed += [c for c in current if (c.peer_id, c.dataset_id) == (claim.peer_id, claim.dataset_id)]
        return confirmed

    def find(self, plan: JobPlan, wait_s: float) -> tuple[JobDataset, list[Claim]]:
        """A job's dataset and its data nodes; waits for a node that sends its manifest.

        Raises:
            DatasetError: If no node serves it within `wait_s`, or its name stands for several datasets.
            NetworkError: If no node that claims it sent its manifest within that time.
        """
        name, self._state = plan.dataset_name, "the DHT names none that answers"
        with log_while_waiting(log, lambda: f"data nodes of {name!r}: {self._state}"):
            deadline = time.monotonic() + wait_s
            while True:
                claims = self._wait_for_claims(plan, wait_s, deadline)
                ids = sorted({claim.dataset_id for claim in claims})
                if len(ids) != 1:
                    raise DatasetError(
                        f"scheduler: dataset {name!r} stands for {len(ids)} datasets: {', '.join(ids)}. "
                        "Choose one by its id (--id)."
                    )
                failures = []
                for claim in claims:
                    try:
                        manifest, table = self._fetch(claim)
                    except (NetworkError, DatasetError) as error:
                        failures.append(f"{claim.address}: {error}")
                        self._state = f"requests for the manifest failed: {'; '.join(failures)}"
                        continue
                    return JobDataset.of(name, ids[0], plan.seq_len, manifest, table), claims
                # The nodes may have died since; others may come.
                if time.monotonic() >= deadline or self._stopping.wait(RETRY_S):
                    raise NetworkError(f"scheduler: no provider sent the manifest of {name!r}: {'; '.join(failures)}")

    def _wait_for_claims(self, plan: JobPlan, wait_s: float, deadline: float) -> list[Claim]:
        while not (claims := self.claims(plan.dataset_name, plan.dataset_id, min(ASK_S, wait_s))):
            if time.monotonic() >= deadline or self._stopping.wait(RETRY_S):
                raise DatasetError(
                    f"scheduler: expected a data node of {plan.dataset_name!r}"
                    + (f" with id {plan.dataset_id}" if plan.dataset_id else "")
                    + f" in network {self._network_id} within {wait_s:g} s, got none: the DHT names no node that "
                    "serves it. Start one with `forebay serve`, or check the name with `forebay find`."
                    + "".join(f" Not counted: {reason}" for reason in self._unsigned)
                )
        return claims

    def _fetch(self, claim: Claim) -> tuple[Manifest, SliceTable]:
        base, peer = f"/v1/datasets/{claim.dataset_id}", claim.peer_id
        manifest = self.client.get_bytes(claim.address, f"{base}/manifest.json", MAX_MANIFEST_BYTES, expect_peer=peer)
        table = self.client.get_bytes(claim.address, f"{base}/slices.parquet", MAX_TABLE_BYTES, expect_peer=peer)
        parsed = parse(claim.dataset_id, manifest, table, f"peer {peer}")
        self.store.put(claim.dataset_id, manifest, table)
        return parsed


def origins_of(claims: Sequence[Claim]) -> list[Provider]:
    """Data nodes as origins of a swarm: by address, or by the URL that they stand for."""
    return [Provider(claim.peer_id, claim.url or claim.address, True) for claim in claims]


class Catalog:
    """The planned jobs and the datasets that were found for them."""

    def __init__(self, plans: Sequence[JobPlan], finder: DatasetFinder, from_urls: FromUrls = "") -> None:
        self._from_urls = from_urls
        self.plans = {plan.name: plan for plan in plans}
        self.specs: dict[str, JobSpec] = {}
        self.claims: dict[str, list[Claim]] = {}
        self._finder = finder
        self.datasets: dict[str, JobDataset] = {}  # by job

    def find(self, wait_s: float, started: Mapping[str, str]) -> None:
        """Find every dataset; raises as DatasetFinder.find.

        Args:
            started: The dataset ids of jobs that were started before: those in the store need no data node now.
        """
        for name, plan in self.plans.items():
            dataset, claims = self._stored(plan, started.get(name, "")), list[Claim]()
            if dataset is None:
                dataset, claims = self._finder.find(plan, wait_s)
            self.claims[dataset.dataset_id] = claims or self.claims.get(dataset.dataset_id, [])
            self.datasets[name] = dataset
            settings = {field.name: getattr(plan, field.name) for field in fields(JobSettings)}
            self.specs[name] = JobSpec(dataset_id=dataset.dataset_id, samples=dataset.samples, **settings)

    def _stored(self, plan: JobPlan, started_id: str) -> JobDataset | None:
        files = self._finder.store.get(started_id) if started_id and plan.dataset_id in ("", started_id) else None
        if files is None or files[0].name != plan.dataset_name:
            return None
        return JobDataset.of(plan.dataset_name, started_id, plan.seq_len, *files)

    def refresh(self) -> None:
        """Find the data nodes again; where the DHT names none, known ones that answer still count."""
        for dataset in self.datasets.values():
            claims = self._finder.claims(dataset.name, dataset.dataset_id)
            self.claims[dataset.dataset_id] = claims or self._finder.confirm(self.claims[dataset.dataset_id])

    def all_claims(self) -> list[Claim]:
        """The data nodes of all datasets."""
        return [claim for claims in list(self.claims.values()) for claim in claims]

    def ledger_fields(self, job: str) -> dict[str, Any]:
        """The fields of a job in its ledger beside those of its spec."""
        return {"seq_len": self.plans[job].seq_len, "layout": self.datasets[job].manifest.layout}

    def slice_info(self, dataset_id: str, index: int) -> SliceInfo | None:
        """A row of a dataset's slice table; None if no job uses the dataset."""
        tables = (dataset.table for dataset in self.datasets.values() if dataset.dataset_id == dataset_id)
        table = next(tables, None)
        return table.row(index) if table is not None else None

    def sha256(self, dataset_id: str, index: int) -> str:
        """The hash of a slice; "" if no job uses the dataset."""
        info = self.slice_info(dataset_id, index)
        return info.sha256 if info is not None else ""

    def describe_job(self, job: str, job_id: str) -> dict[str, Any]:
        """The response to `GET /v1/job`."""
        plan, dataset = self.plans[job], self.datasets[job]
        manifest = dataset.manifest
        return {
            "job_id": job_id, "name": job, "dataset_id": dataset.dataset_id, "dataset": dataset.name,
            "layout": manifest.layout, "seq_len": plan.seq_len, "seed": plan.seed, "epochs": plan.epochs,
            "num_slices": len(dataset.table), "num_samples": int(dataset.samples.sum()), "dtype": manifest.dtype,
            "vocab_size": manifest.vocab_size, "lease_s": plan.lease_s, "jobs": list(self.plans),
        }  # fmt: skip

    def describe(self, grant: LeaseGrant, job_id: str) -> Lease:
        """A lease as it is sent to a worker."""
        plan, dataset = self.plans[grant.job], self.datasets[grant.job]
        row, manifest = dataset.table.row(grant.slice), dataset.manifest
        return Lease(
            **vars(grant), job_id=job_id, dataset="" if dataset.name == grant.job else dataset.name, name=row.name,
            sha256=row.sha256, bytes=row.bytes, sample_base=int(dataset.bases[grant.slice]), seed=plan.seed,
            seq_len=plan.seq_len, layout=manifest.layout, dtype=manifest.dtype, vocab_size=manifest.vocab_size,
        )  # fmt: skip

    def check_slice(self, dataset_id: str, index: int, provider: Provider | None) -> bool | None:
        """Whether a provider, or any origin, sends right bytes of a slice; None: none answers now.

        For a dataset behind URLs that may not be read here the workers are believed: False.
        """
        row, origins = self.slice_info(dataset_id, index), origins_of(self.claims.get(dataset_id, ()))
        assert row is not None
        if provider is None and origins and not self._from_urls and all(origin.is_url for origin in origins):
            return False
        asked = origins if provider is None else [provider]
        answers = [verify_provider(self._finder.client, other, row, self._from_urls) for other in asked]
        if True in answers:
            return True
        return None if None in answers or not answers else False

    def read_range(self, dataset_id: str, index: int, start: int, stop: int) -> Iterator[bytes]:
        """Bytes [start, stop) of a slice, from one origin after the other; those that do not answer are left out."""
        row = self.slice_info(dataset_id, index)
        assert row is not None
        for origin in origins_of(self.claims.get(dataset_id, ())):
            try:
                pieces = read_slice(self._finder.client, origin, row, start, stop, self._from_urls)
                yield b"".join(bytes(piece) for piece in pieces)
            except NetworkError as error:
                log.info("cannot read slice for a check: slice=%s origin=%s: %s", row.name, origin.address, error)

    def faults_of(self, session: WorkerSession | None, reports: Sequence[ProviderReport]) -> list[ProviderFault]:
        """Reports by slice of a dataset; those of slices that were not leased to the session lately are ignored."""
        if session is None or not reports:
            return []
        leased = {}
        for job, index in session.leased():
            dataset = self.datasets[job]
            leased[dataset.table.row(index).sha256] = (dataset.dataset_id, index)
        return [ProviderFault(r.peer_id, *leased[r.sha256], r.reason, r.wrong) for r in reports if r.sha256 in leased]
