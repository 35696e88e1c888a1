"""A dataset known by its URL alone: manifest and table are read and verified, slices stay where they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.dataset.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, TABLE_FILE, Manifest, SliceTable, dataset_id
from forebay.dataset.reader import Dataset, VerifyReport, check_totals, listed_files
from forebay.dataset.slices import Slice
from forebay.errors import DatasetError, UsageError
from forebay.store.origins import Origin, Patience, open_origin, read_small
from forebay.store.verify import File, verify_files

if TYPE_CHECKING:
    from forebay.network.discovery import Discovery
    from forebay.network.identity import Identity

MAX_TABLE_BYTES = 1 << 30


class RemoteDataset(Dataset):
    """A dataset behind an origin. Its slices are fetched by a Loader or a mirror, not opened here."""

    def __init__(self, origin: Origin, manifest: Manifest, table: SliceTable, id: str) -> None:
        super().__init__(Path(origin.url), manifest, table, id)
        self.origin = origin

    def __repr__(self) -> str:
        return f"RemoteDataset({self.name!r}, id={self.id[:12]}…, slices={self.num_slices}, url={self.origin.url!r})"

    def slice_path(self, index: int) -> Path:
        """Raises UsageError: there is no such file here."""
        raise self._elsewhere(f"slice {index}")

    def open_slice(self, index: int) -> Slice:
        """Raises UsageError: a slice is fetched first."""
        raise self._elsewhere(f"slice {index}")

    def verify(self, on_progress: Callable[[int], None] | None = None, workers: int | None = None) -> VerifyReport:
        """Read and hash every slice and listed file where it lies; keeps nothing. As `Dataset.verify` besides.

        Raises:
            NetworkError: If the origin cannot be reached.
        """
        table = self.table
        files: list[File] = [(name, None, sha256) for name, sha256 in sorted(listed_files(self.manifest).items())]
        hashes = [row.tobytes().hex() for row in table.sha256]
        files += zip(table.names.to_pylist(), table.bytes.tolist(), hashes)
        return verify_files(self.origin, files, workers=workers or 8, on_progress=on_progress)

    def _elsewhere(self, what: str) -> UsageError:
        return UsageError(
            f"{what} of {self.origin.url}: expected a dataset in a local directory, got a remote one. "
            "Open it with a Loader, which fetches and verifies slices, or copy it here first."
        )


def open_remote(
    url: str,
    *,
    dataset_id: str | None = None,
    identity: str | Path | Identity | None = None,
    discovery: Discovery | None = None,
    patience: Patience | None = None,
) -> RemoteDataset:
    """Open the dataset at a URL: two small reads, kept in memory.

    Args:
        url, identity, discovery, patience: As of `open_origin`.
        dataset_id: What it must be; without it the first answer is believed.

    Raises:
        DatasetError: If there is none, it is damaged, or has another id.
        NetworkError: If it cannot be reached.
        UsageError: If the URL is of no known kind.
    """
    origin = open_origin(url, identity=identity, dataset_id=dataset_id, discovery=discovery, patience=patience)
    return read_remote(origin, dataset_id)


def read_remote(origin: Origin, expected_id: str | None = None) -> RemoteDataset:
    """As `open_remote`, from an open origin."""
    data = read_small(origin, MANIFEST_FILE, MAX_MANIFEST_BYTES)
    found = dataset_id(data)
    if expected_id is not None and found != expected_id:
        raise DatasetError(
            f"{origin.url}: expected the dataset {expected_id}, got {found}. It would be other data. "
            "Check the URL, or ask for the id that is there."
        )
    manifest = Manifest.from_json(data)
    table_data = read_small(origin, TABLE_FILE, MAX_TABLE_BYTES)
    got = hashlib.sha256(table_data).hexdigest()
    if got != manifest.table_sha256:
        raise DatasetError(
            f"{origin.url}: expected a {TABLE_FILE} with sha256 {manifest.table_sha256}, got {got}. Publish it again."
        )
    table = SliceTable.from_parquet(table_data)
    check_totals(manifest, table)
    return RemoteDataset(origin, manifest, table, found)
