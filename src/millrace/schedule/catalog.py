"""The datasets of the jobs: found in the network by name, their tables checked down to the last byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.dataset.manifest import Manifest, SliceTable, dataset_id
from millrace.errors import DatasetError, IntegrityError, NetworkError
from millrace.network.client import Client
from millrace.network.discovery import Claim, Discovery, find_providers
from millrace.network.publish import published
from millrace.network.swarm import Holder
from millrace.order.plan import samples_per_slice

MAX_MANIFEST_BYTES = 16 << 20
MAX_TABLE_BYTES = 1 << 30
ASK_S = 5.0


@dataclass(frozen=True)
class Wanted:
    """A dataset of a job, as its user named it; `dataset_id` where the name stands for several."""

    name: str
    weight: float = 1.0
    dataset_id: str = ""


@dataclass(frozen=True, eq=False)
class Found:
    """A dataset that is there: `samples` int64 [S], `bases` int64 [S], the samples before each slice."""

    name: str
    dataset_id: str
    manifest: Manifest
    table: SliceTable
    samples: NDArray[np.int64]
    bases: NDArray[np.int64]

    def describe(self, index: int) -> dict[str, Any]:
        """What a lease says of a slice."""
        row = self.table.row(index)
        return {"dataset_id": self.dataset_id, "name": row.name, "sha256": row.sha256, "bytes": row.bytes}


class Finder:
    """Looks for data nodes, in the DHT and then at the nodes.

    Args:
        publishers: Peer ids; only datasets that one of them signed count. Without any all do.
    """

    def __init__(
        self,
        network_id: str,
        discovery: Discovery,
        client: Client,
        stopping: threading.Event,
        publishers: Collection[str] = (),
    ) -> None:
        self._network_id = network_id
        self._discovery = discovery
        self._client = client
        self._stopping = stopping
        self._publishers = publishers
        self._unsigned: list[str] = []

    def claims(self, wanted: Wanted, timeout_s: float = ASK_S) -> list[Claim]:
        """Who serves it now."""
        claims = find_providers(self._discovery, self._client, self._network_id, wanted.name, timeout_s=timeout_s)
        claims = [claim for claim in claims if claim.is_whole and wanted.dataset_id in ("", claim.dataset_id)]
        good, self._unsigned = published(self._client, claims, self._publishers)
        return good

    def find(self, wanted: Wanted, seq_len: int, wait_s: float) -> tuple[Found, list[Claim]]:
        """A dataset and who serves it; waits for a data node.

        Raises:
            DatasetError: If nobody serves it after `wait_s`, or its name stands for several.
            NetworkError: If nobody who says so gives its manifest.
        """
        deadline = time.monotonic() + wait_s
        claims: list[Claim] = []
        while not claims and not self._stopping.is_set():
            claims = self.claims(wanted, min(ASK_S, wait_s))
            if not claims and time.monotonic() >= deadline:
                raise DatasetError(
                    f"scheduler: nobody in network {self._network_id} serves dataset {wanted.name!r}"
                    + (f" with id {wanted.dataset_id}" if wanted.dataset_id else "")
                    + f" (asked for {wait_s:g} s). Start a data node with `millrace serve`, "
                    "or check the name with `millrace find`."
                    + "".join(f" Not counted: {why}" for why in self._unsigned)
                )
            if not claims:
                self._stopping.wait(0.2)
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
                continue
            samples = samples_per_slice(table.count, seq_len, manifest.layout)
            return Found(wanted.name, ids[0], manifest, table, samples, samples.cumsum() - samples), claims
        raise NetworkError(f"scheduler: no provider gave the manifest of {wanted.name!r}: " + "; ".join(failures))

    def _fetch(self, claim: Claim) -> tuple[Manifest, SliceTable]:
        """The manifest and table from one provider, checked against the dataset id."""
        base = f"/v1/datasets/{claim.dataset_id}"
        data = self._client.get_bytes(
            claim.address, f"{base}/manifest.json", MAX_MANIFEST_BYTES, expect_peer=claim.peer_id
        )
        if dataset_id(data) != claim.dataset_id:
            raise IntegrityError(
                f"manifest of {claim.dataset_id}: expected that hash, got {dataset_id(data)} (peer {claim.peer_id})."
            )
        manifest = Manifest.from_json(data)
        raw = self._client.get_bytes(
            claim.address, f"{base}/slices.parquet", MAX_TABLE_BYTES, expect_peer=claim.peer_id
        )
        if dataset_id(raw) != manifest.table_sha256:
            raise IntegrityError(
                f"slice table of {claim.dataset_id}: expected sha256 {manifest.table_sha256}, "
                f"got {dataset_id(raw)} (peer {claim.peer_id})."
            )
        return manifest, SliceTable.from_parquet(raw)


def holders(claims: Sequence[Claim]) -> list[Holder]:
    """Data nodes as origins of a swarm: by address, or by the URL that they stand for."""
    return [Holder(claim.peer_id, claim.url or claim.address, True) for claim in claims]
