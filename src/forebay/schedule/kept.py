"""The manifests and slice tables of the jobs' datasets, in the state directory: a restart needs no data node for them.

What is read back is checked as if it came from the network: the manifest against the dataset id, the table against the
manifest. The ledger says which dataset a job is of; here is what its name stood for when the job began.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forebay.dataset.manifest import Manifest, SliceTable, dataset_id
from forebay.errors import DatasetError, IntegrityError, LedgerError
from forebay.ledger import Job, read_entries
from forebay.storage.atomic import atomic_write, remove_stale

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


class Kept:
    """The files of one state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / DIRECTORY

    def put(self, wanted_id: str, manifest: bytes, table: bytes) -> None:
        """Keeps what was checked, the manifest last: where it is, the table is."""
        self._directory.mkdir(parents=True, exist_ok=True)
        remove_stale(self._directory)
        for suffix, data in ((".parquet", table), (".json", manifest)):
            atomic_write(self._directory / f"{wanted_id}{suffix}", data)

    def get(self, wanted_id: str) -> tuple[Manifest, SliceTable] | None:
        """What was kept of a dataset; None if it is not here, or not as it was."""
        path = self._directory / f"{wanted_id}.json"
        try:
            return check(wanted_id, path.read_bytes(), path.with_suffix(".parquet").read_bytes(), str(path))
        except (OSError, IntegrityError, DatasetError):
            return None
