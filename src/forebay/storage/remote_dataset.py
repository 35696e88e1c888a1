"""A dataset behind an origin: manifest and table are read and verified, slices are not copied.

`RemoteDataset.verify` hashes every slice while it reads it: 256 KiB of memory per connection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

from forebay.dataset.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, TABLE_FILE, Manifest, SliceTable, dataset_id
from forebay.dataset.reader import Dataset, VerifyReport, check_totals, listed_files
from forebay.errors import DatasetError, NetworkError, ProtocolError, UsageError
from forebay.storage.base import Origin, PermanentError, TransientError, read_range, read_small, retry_transient

MAX_TABLE_BYTES = 1 << 30
_MAX_SMALL_BYTES = 1 << 30
_MAX_TRIES = 5  # without a byte
_MAX_WAIT_S = 4.0
FileState: TypeAlias = Literal["", "changed", "missing"]
ListedFile: TypeAlias = "tuple[str, int | None, str]"  # name, bytes (None: unknown, and small), sha256 in hex


class RemoteDataset(Dataset):
    """A dataset behind an origin. A Loader or a mirror downloads its slices; they cannot be opened here."""

    def __init__(self, origin: Origin, manifest: Manifest, table: SliceTable, id: str) -> None:
        super().__init__(Path(origin.url), manifest, table, id)
        self.origin = origin

    def __repr__(self) -> str:
        return f"RemoteDataset({self.name!r}, id={self.id[:12]}…, slices={self.num_slices}, url={self.origin.url!r})"

    def slice_path(self, index: int) -> NoReturn:
        """Raise UsageError: a slice of a remote dataset has no local file."""
        raise UsageError(
            f"slice {index} of {self.origin.url}: expected a dataset in a local directory, got a remote one. "
            "Open it with a Loader, which fetches and verifies slices, or copy it here first."
        )

    open_slice = slice_path

    def verify(self, on_progress: Callable[[int], None] | None = None, workers: int | None = None) -> VerifyReport:
        """Read and hash every slice and listed file without storing them. See `Dataset.verify`."""
        table = self.table
        files: list[ListedFile] = [(name, None, sha) for name, sha in sorted(listed_files(self.manifest).items())]
        hashes = [row.tobytes().hex() for row in table.sha256]
        files += zip(table.names.to_pylist(), table.bytes.tolist(), hashes)
        return verify_files(self.origin, files, workers=workers or 8, on_progress=on_progress)


def read_remote(origin: Origin, expected_id: str | None = None) -> RemoteDataset:
    """Open the dataset behind an origin; errors as of `storage.origins.open_remote`."""
    data = read_small(origin, MANIFEST_FILE, MAX_MANIFEST_BYTES)
    id = dataset_id(data)
    if expected_id is not None and id != expected_id:
        raise DatasetError(
            f"{origin.url}: expected the dataset {expected_id}, got {id}. Its data differ. "
            "Check the URL, or ask for the id that is there."
        )
    manifest = Manifest.from_json(data)
    table_data = read_small(origin, TABLE_FILE, MAX_TABLE_BYTES)
    table_sha256 = hashlib.sha256(table_data).hexdigest()
    if table_sha256 != manifest.table_sha256:
        raise DatasetError(
            f"{origin.url}: expected a {TABLE_FILE} with sha256 {manifest.table_sha256}, got {table_sha256}. "
            "Publish it again."
        )
    table = SliceTable.from_parquet(table_data)
    check_totals(manifest, table)
    return RemoteDataset(origin, manifest, table, id)


def verify_files(
    origin: Origin, files: Iterable[ListedFile], *, workers: int = 8, on_progress: Callable[[int], object] | None = None
) -> VerifyReport:
    """Hash every listed file behind an origin. `on_progress` is called with the bytes of each, from one thread."""
    names: dict[FileState, list[str]] = {"": [], "changed": [], "missing": []}
    with ThreadPoolExecutor(workers) as pool:
        for (name, size, _), state in pool.map(lambda file: (file, _best_state(origin, file)), list(files)):
            names[state].append(name)
            if on_progress is not None:
                on_progress(size or 0)
    changed, missing = names["changed"], names["missing"]
    return VerifyReport(not changed and not missing, sorted([*changed, *missing]), changed, missing)


def _best_state(origin: Origin, file: ListedFile) -> FileState:
    states = set[FileState]()
    for source in origin.sources():
        states.add(_state_at(source, file))
        if "" in states:
            return ""
    return "changed" if "changed" in states else "missing"


def _state_at(source: Origin, file: ListedFile) -> FileState:
    name, size, sha256 = file
    digest, received = hashlib.sha256(), 0

    def receive(chunk: memoryview | bytes) -> None:
        nonlocal received
        digest.update(chunk)
        received += len(chunk)

    try:
        if size is None:
            receive(retry_transient(lambda: source.get(name, _MAX_SMALL_BYTES), _MAX_TRIES, _MAX_WAIT_S))
        else:
            read_range(source, name, 0, size, receive, _MAX_TRIES, _MAX_WAIT_S)
        return "" if digest.hexdigest() == sha256 else "changed"
    except PermanentError:
        # It exists, but is shorter, if some bytes can be read.
        return "changed" if received or _exists(source, name) else "missing"
    except ProtocolError:
        return "changed"
    except TransientError as error:
        raise NetworkError(
            f"{name} from {source.url}: broke off {_MAX_TRIES} times at byte {received}; the last: {error}. "
            "Check the network and the endpoint."
        ) from error


def _exists(source: Origin, name: str) -> bool:
    try:
        return any(True for _ in source.read(name, 0, 1))
    except NetworkError:
        return False
