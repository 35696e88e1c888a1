"""The datasets of the jobs: found in the network by name, their tables checked down to the last byte.

Manifests and tables are kept in the state directory, and checked when read back: a restart needs no data node for them.
"""

import hmac
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
from forebay.network.publications import published
from forebay.network.retry import waiting
from forebay.order.plan import samples_per_slice
from forebay.scheduler.core import ProviderFault
from forebay.scheduler.jobs import JobSource, JobSpec
from forebay.scheduler.messages import Lease, LeaseGrant, ProviderReport, proof_of, range_of
from forebay.scheduler.sessions import WorkerSession
from forebay.storage.peer_source import gives_right_bytes, read_from
from forebay.storage.url_policy import FromUrls

DIRECTORY = "datasets"


def check(wanted_id: str, manifest: bytes, table: bytes, source: str) -> tuple[Manifest, SliceTable]:
    """A manifest and a table from their bytes.

    Raises:
        IntegrityError: If they are not those of this dataset.
        DatasetError: If they are, and make no sense.
    """
    if dataset_id(manifest) != wanted_id:
        raise IntegrityError(f"manifest of {wanted_id}: expected that hash, got {dataset_id(manifest)} ({source}).")
    found = Manifest.from_json(manifest)
    if dataset_id(table) != found.table_sha256:
        raise IntegrityError(
            f"slice table of {wanted_id}: expected sha256 {found.table_sha256}, got {dataset_id(table)} ({source})."
        )
    return found, SliceTable.from_parquet(table)


def begun(ledgers: Mapping[str, Path]) -> dict[str, tuple[str, ...]]:
    """The dataset ids of the jobs, by name, that these ledgers began with; those without a ledger are left out."""
    found = {}
    for name, path in ledgers.items():
        try:
            found[name] = Job.of(next(read_entries(path))).dataset_ids
        except (OSError, StopIteration, LedgerError):  # what is wrong with a ledger, its opening says
            continue
    return found


class ManifestStore:
    """The files of one state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / DIRECTORY

    def put(self, wanted_id: str, manifest: bytes, table: bytes) -> None:
        """Keeps what was checked, the manifest last: where it is, the table is."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_stale(self._directory)
        for suffix, data in ((".parquet", table), (".json", manifest)):
            atomic_write(self._directory / f"{wanted_id}{suffix}", data, 0o600)

    def get(self, wanted_id: str) -> tuple[Manifest, SliceTable] | None:
        """What was kept of a dataset; None if it is not here, or not as it was."""
        path = self._directory / f"{wanted_id}.json"
        try:
            return check(wanted_id, path.read_bytes(), path.with_suffix(".parquet").read_bytes(), str(path))
        except (OSError, IntegrityError, DatasetError):
            return None


MAX_MANIFEST_BYTES = 16 << 20
MAX_TABLE_BYTES = 1 << 30
ASK_S = 5.0
log = logging.getLogger("forebay.scheduler")


@dataclass(frozen=True)
class DatasetRef:
    """A dataset of a job, as its user named it; `dataset_id` where the name stands for several."""

    name: str
    weight: float = 1.0
    dataset_id: str = ""


@dataclass(frozen=True, eq=False)
class JobDataset:
    """A dataset that is there: `samples` int64 [S], `bases` int64 [S], the samples before each slice."""

    name: str
    dataset_id: str
    manifest: Manifest
    table: SliceTable
    samples: NDArray[np.int64]
    bases: NDArray[np.int64]


class DatasetFinder:
    """Looks for data nodes, in the DHT and then at the nodes.

    Args:
        kept: Where manifests and tables are kept that were found.
        publishers: Peer ids; only datasets that one of them signed count. Without any all do.
    """

    def __init__(
        self,
        network_id: str,
        discovery: Discovery,
        client: Client,
        stopping: threading.Event,
        kept: ManifestStore,
        publishers: Collection[str] = (),
    ) -> None:
        self._network_id = network_id
        self._discovery = discovery
        self.client = client
        self._stopping = stopping
        self.kept = kept
        self._publishers = publishers
        self._unsigned: list[str] = []
        self._state = ""

    def claims(self, wanted: DatasetRef, timeout_s: float = ASK_S) -> list[Claim]:
        """Who serves it now."""
        claims = find_providers(self._discovery, self.client, self._network_id, wanted.name, timeout_s=timeout_s)
        claims = [claim for claim in claims if claim.is_whole and wanted.dataset_id in ("", claim.dataset_id)]
        good, _, self._unsigned = published(self.client, claims, self._publishers, wanted.dataset_id)
        return good

    def still_there(self, claims: Sequence[Claim]) -> list[Claim]:
        """Of claims of before, those whose nodes say so still."""
        found = []
        for claim in claims:
            try:
                again = read_claims(self.client, claim.address, claim.name)
            except (NetworkError, UsageError):
                continue
            found += [one for one in again if (one.peer_id, one.dataset_id) == (claim.peer_id, claim.dataset_id)]
        return found

    def find(self, wanted: DatasetRef, seq_len: int, wait_s: float) -> tuple[JobDataset, list[Claim]]:
        """A dataset and who serves it; waits for a data node that gives its manifest.

        Raises:
            DatasetError: If nobody serves it after `wait_s`, or its name stands for several.
            NetworkError: If nobody who says so gave its manifest until then.
        """
        self._state = "the DHT was asked and names none that answers"
        with waiting(log, lambda: f"data nodes of {wanted.name!r}: {self._state}"):
            return self._find(wanted, seq_len, wait_s)

    def _find(self, wanted: DatasetRef, seq_len: int, wait_s: float) -> tuple[JobDataset, list[Claim]]:
        deadline = time.monotonic() + wait_s
        while True:
            claims = self._wait_for_claims(wanted, wait_s, deadline)
            ids = sorted({claim.dataset_id for claim in claims})
            if len(ids) != 1:
                raise DatasetError(
                    f"scheduler: dataset {wanted.name!r} stands for {len(ids)} datasets: {', '.join(ids)}. "
                    "Mixing them would train on either; say which by its id (--id)."
                )
            failures = []
            for claim in claims:
                try:
                    manifest, table = self._fetch(claim)
                except (NetworkError, DatasetError) as error:
                    failures.append(f"{claim.address}: {error}")
                    self._state = f"the manifest was asked for: {'; '.join(failures)}"
                    continue
                return found_of(wanted.name, ids[0], seq_len, manifest, table), claims
            # Who made the claim may have died since; others may come.
            if time.monotonic() >= deadline or self._stopping.wait(0.2):
                told = "; ".join(failures)
                raise NetworkError(f"scheduler: no provider gave the manifest of {wanted.name!r}: {told}")

    def _wait_for_claims(self, wanted: DatasetRef, wait_s: float, deadline: float) -> list[Claim]:
        claims: list[Claim] = []
        while not claims:
            claims = self.claims(wanted, min(ASK_S, wait_s))
            if not claims and (time.monotonic() >= deadline or self._stopping.wait(0.2)):
                raise DatasetError(
                    f"scheduler: expected a data node of {wanted.name!r}"
                    + (f" with id {wanted.dataset_id}" if wanted.dataset_id else "")
                    + f" in network {self._network_id} within {wait_s:g} s, got none: the DHT answers and names nobody "
                    "that serves it. Start one with `forebay serve`, or check the name with `forebay find`."
                    + "".join(f" Not counted: {why}" for why in self._unsigned)
                )
        return claims

    def _fetch(self, claim: Claim) -> tuple[Manifest, SliceTable]:
        """The manifest and table from one provider, checked against the dataset id."""
        base = f"/v1/datasets/{claim.dataset_id}"
        data = self.client.get_bytes(
            claim.address, f"{base}/manifest.json", MAX_MANIFEST_BYTES, expect_peer=claim.peer_id
        )
        raw = self.client.get_bytes(claim.address, f"{base}/slices.parquet", MAX_TABLE_BYTES, expect_peer=claim.peer_id)
        found = check(claim.dataset_id, data, raw, f"peer {claim.peer_id}")
        self.kept.put(claim.dataset_id, data, raw)
        return found


def found_of(name: str, dataset_id: str, seq_len: int, manifest: Manifest, table: SliceTable) -> JobDataset:
    """A dataset as a job of this sequence length sees it."""
    samples = samples_per_slice(table.count, seq_len, manifest.layout)
    return JobDataset(name, dataset_id, manifest, table, samples, samples.cumsum() - samples)


def holders(claims: Sequence[Claim]) -> list[Provider]:
    """Data nodes as origins of a swarm: by address, or by the URL that they stand for."""
    return [Provider(claim.peer_id, claim.url or claim.address, True) for claim in claims]


@dataclass(frozen=True)
class JobPlan:
    """A job as its user wants it; see JobSpec. `changes`: (samples used, weights of the datasets from there on).

    `max_tokens_per_s`: of one lease; uses that say more are refused until so much time has passed.
    """

    name: str
    datasets: tuple[DatasetRef, ...]
    seq_len: int
    epochs: int = 1
    seed: int = 0
    lease_s: float = 30.0
    stall_s: float = 600.0
    steal_s: float = 2.0
    max_failures: int = 3
    max_tokens_per_s: float = 1e8
    priority: int = 0
    weight: float = 1.0
    changes: tuple[tuple[int, tuple[float, ...]], ...] = ()


class Catalog:
    """The jobs as planned, with the datasets found for them; what leases and doors say of them."""

    def __init__(self, plans: Sequence[JobPlan], finder: DatasetFinder, from_urls: FromUrls = "") -> None:
        self._from_urls = from_urls
        self.plans = {plan.name: plan for plan in plans}
        self.specs: dict[str, JobSpec] = {}
        self.claims: dict[str, list[Claim]] = {}
        self._finder = finder
        self._found: dict[tuple[str, str], JobDataset] = {}  # by job and dataset id

    def find(self, wait_s: float, begun: Mapping[str, Sequence[str]] | None = None) -> None:
        """Finds every dataset; raises as Finder.find, or UsageError if those of a job do not go together.

        Args:
            begun: The dataset ids of jobs that were begun before: what of them is kept needs no data node now.
        """
        for plan in self.plans.values():
            found = []
            ids = [*(begun or {}).get(plan.name, ()), *[""] * len(plan.datasets)]
            for wanted, before in zip(plan.datasets, ids):
                kept = self._kept(wanted, before, plan.seq_len)
                dataset, claims = kept or self._finder.find(wanted, plan.seq_len, wait_s)
                self.claims[dataset.dataset_id] = claims or self.claims.get(dataset.dataset_id, [])
                self._found[plan.name, dataset.dataset_id] = dataset
                found.append(dataset)
            layouts = {dataset.manifest.layout for dataset in found}
            if len(layouts) != 1:
                raise UsageError(f"job {plan.name}: expected datasets of one layout, got {', '.join(sorted(layouts))}.")
            sources = tuple(JobSource(d.name, d.dataset_id, d.samples, w.weight) for d, w in zip(found, plan.datasets))
            self.specs[plan.name] = JobSpec(
                plan.name, sources, plan.seed, plan.epochs, plan.lease_s, plan.stall_s, plan.max_failures,
                plan.steal_s, plan.priority, plan.weight, plan.changes,
            )  # fmt: skip

    def _kept(self, wanted: DatasetRef, dataset_id: str, seq_len: int) -> tuple[JobDataset, list[Claim]] | None:
        """A dataset as this job began with it, without a look at who serves it."""
        kept = self._finder.kept.get(dataset_id) if dataset_id and wanted.dataset_id in ("", dataset_id) else None
        if kept is None or kept[0].name != wanted.name:
            return None
        return found_of(wanted.name, dataset_id, seq_len, *kept), []

    def look_again(self) -> None:
        """Asks who serves the datasets now; where nobody is found, those of before who answer still count."""
        for name, spec in self.specs.items():
            for wanted, source in zip(self.plans[name].datasets, spec.sources):
                claims = self._finder.claims(replace(wanted, dataset_id=source.dataset_id))
                self.claims[source.dataset_id] = claims or self._finder.still_there(self.claims[source.dataset_id])

    def all_claims(self) -> list[Claim]:
        """Who serves any of them."""
        return [claim for claims in list(self.claims.values()) for claim in claims]

    def of(self, job: str) -> list[JobDataset]:
        """The datasets of a job."""
        return [self._found[job, source.dataset_id] for source in self.specs[job].sources]

    def facts(self, job: str) -> dict[str, Any]:
        """What the ledger says of a job beside its datasets."""
        return {"seq_len": self.plans[job].seq_len, "layout": self.of(job)[0].manifest.layout}

    def sha256(self, dataset_id: str, index: int) -> str:
        """The hash of a slice; "" if the dataset is not here."""
        found = next((found for found in self._found.values() if found.dataset_id == dataset_id), None)
        return found.table.row(index).sha256 if found is not None else ""

    def describe_job(self, job: str, job_id: str) -> dict[str, Any]:
        """The answer to `GET /v1/job`."""
        plan, found = self.plans[job], self.of(job)
        first = found[0].manifest
        return {
            "job_id": job_id,
            "name": job,
            "dataset_id": found[0].dataset_id,
            "datasets": [
                {"name": f.name, "dataset_id": f.dataset_id, "num_slices": len(f.table), "weight": w.weight}
                for f, w in zip(found, plan.datasets)
            ],
            "layout": first.layout,
            "seq_len": plan.seq_len,
            "seed": plan.seed,
            "epochs": plan.epochs,
            "num_slices": sum(len(f.table) for f in found),
            "vocab_size": max(f.manifest.vocab_size for f in found),
            "dtype": first.dtype,
            "num_samples": sum(int(f.samples.sum()) for f in found),
            "lease_s": plan.lease_s,
            "jobs": list(self.plans),
        }

    def describe(self, grant: LeaseGrant, job_id: str) -> Lease:
        """A lease as a worker hears of it."""
        plan, found = self.plans[grant.job], self._found[grant.job, grant.dataset_id]
        ids = [source.dataset_id for source in self.specs[grant.job].sources]
        before = sum(int(one.samples.sum()) for one in self.of(grant.job)[: ids.index(grant.dataset_id)])
        row, manifest = found.table.row(grant.index), found.manifest
        return Lease(
            **vars(grant), job_id=job_id, dataset="" if found.name == grant.job else found.name, name=row.name,
            sha256=row.sha256, bytes=row.bytes, sample_base=before + int(found.bases[grant.index]), seed=plan.seed,
            seq_len=plan.seq_len, layout=manifest.layout, dtype=manifest.dtype, vocab_size=manifest.vocab_size,
        )  # fmt: skip

    def check_slice(self, dataset_id: str, index: int, holder: Provider | None) -> bool | None:
        """Whether right bytes of a slice come from a holder, or from any origin; None: nobody answers now.

        Of a dataset behind URLs that may not be read here the workers are believed: False.
        """
        row, origins = self._row(dataset_id, index), holders(self.claims.get(dataset_id, ()))
        if holder is None and origins and not self._from_urls and all(origin.is_url for origin in origins):
            return False
        asked = origins if holder is None else [holder]
        answers = [gives_right_bytes(self._finder.client, one, row, self._from_urls) for one in asked]
        if True in answers:
            return True
        return None if None in answers or not answers else False

    def check_proof(self, dataset_id: str, index: int, lease_id: str, peer_id: str, proof: str) -> bool | None:
        """Whether a proof (`exchange.proof_of`) is of a slice's bytes, as an origin gives them; None: none does now."""
        row = self._row(dataset_id, index)
        start, stop = range_of(lease_id, peer_id, row.bytes)
        is_any = None
        for origin in holders(self.claims.get(dataset_id, ())):  # one of them may be damaged, or lie
            try:
                pieces = read_from(self._finder.client, origin, row, start, stop, self._from_urls)
                data = b"".join(bytes(piece) for piece in pieces)
            except NetworkError as error:
                log.info("slice %s of %s for a check: %s", row.name, origin.address, error)
                continue
            is_any = hmac.compare_digest(proof, proof_of(lease_id, peer_id, data))
            if is_any:
                break
        return is_any

    def _row(self, dataset_id: str, index: int) -> SliceInfo:
        return next(found for found in self._found.values() if found.dataset_id == dataset_id).table.row(index)

    def place_reports(
        self, session: WorkerSession | None, reports: Sequence[ProviderReport]
    ) -> tuple[ProviderFault, ...]:
        """Reports by slice; only who is, or lately was, leased a slice of that hash is heard."""
        if session is None or not reports:
            return ()
        leased = {}
        for job, dataset, index in session.leased():
            found = self.of(job)[dataset]
            leased[found.table.row(index).sha256] = (found.dataset_id, index)
        return tuple(
            ProviderFault(r.peer_id, *leased[r.sha256], r.reason, r.wrong) for r in reports if r.sha256 in leased
        )
