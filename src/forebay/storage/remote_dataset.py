"""A dataset known by its URL alone: manifest and table are read and verified, slices stay where they are.

`verify_files` hashes every slice as it comes, and keeps nothing: 256 KiB of memory a connection.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

from forebay.dataset.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, TABLE_FILE, Manifest, SliceTable, dataset_id
from forebay.dataset.reader import Dataset, VerifyReport, check_totals, listed_files
from forebay.errors import DatasetError, NetworkError, ProtocolViolation, UsageError
from forebay.network.retry import backoff_s
from forebay.storage.base import Origin, PermanentError, TransientError, read_small

MAX_TABLE_BYTES = 1 << 30


class RemoteDataset(Dataset):
    """A dataset behind an origin. Its slices are fetched by a Loader or a mirror, not opened here."""

    def __init__(self, origin: Origin, manifest: Manifest, table: SliceTable, id: str) -> None:
        super().__init__(Path(origin.url), manifest, table, id)
        self.origin = origin

    def __repr__(self) -> str:
        return f"RemoteDataset({self.name!r}, id={self.id[:12]}…, slices={self.num_slices}, url={self.origin.url!r})"

    def slice_path(self, index: int) -> NoReturn:
        """UsageError: there is no such file here; a slice is fetched first."""
        raise UsageError(
            f"slice {index} of {self.origin.url}: expected a dataset in a local directory, got a remote one. "
            "Open it with a Loader, which fetches and verifies slices, or copy it here first."
        )

    open_slice = slice_path

    def verify(self, on_progress: Callable[[int], None] | None = None, workers: int | None = None) -> VerifyReport:
        """Read and hash every slice and listed file where it lies; keeps nothing. As `Dataset.verify` besides."""
        table = self.table
        files: list[File] = [(name, None, sha256) for name, sha256 in sorted(listed_files(self.manifest).items())]
        hashes = [row.tobytes().hex() for row in table.sha256]
        files += zip(table.names.to_pylist(), table.bytes.tolist(), hashes)
        return verify_files(self.origin, files, workers=workers or 8, on_progress=on_progress)


def read_remote(origin: Origin, expected_id: str | None = None) -> RemoteDataset:
    """The dataset behind an open origin; errors as of `storage.origins.open_remote`."""
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


_TRIES = 5
_WAIT_S, _MAX_WAIT_S = 0.25, 4.0
State: TypeAlias = Literal["", "changed", "missing"]
File: TypeAlias = "tuple[str, int | None, str]"  # Name, bytes (None: not known, and small), sha256 in hex.
_SMALL_BYTES = 1 << 30


def verify_files(
    origin: Origin,
    files: Iterable[File],
    *,
    workers: int = 8,
    on_progress: Callable[[int], object] | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> VerifyReport:
    """Hash every file behind an origin and compare. Files that nobody listed cannot be seen there. `on_progress` is
    called with the bytes of each slice, from one thread."""
    changed: list[str] = []
    missing: list[str] = []
    with ThreadPoolExecutor(workers) as pool:
        for (name, size, _), state in pool.map(lambda file: (file, _state_of(origin, file, sleep)), list(files)):
            if state:
                (missing if state == "missing" else changed).append(name)
            if on_progress is not None:
                on_progress(size or 0)
    return VerifyReport(not changed and not missing, sorted([*changed, *missing]), changed, missing)


def _state_of(origin: Origin, file: File, sleep: Callable[[float], object]) -> State:
    """The best that any source has."""
    states: list[State] = []
    for source in origin.sources():
        state = _state_at(source, file, sleep)
        if not state:
            return ""
        states.append(state)
    return "changed" if "changed" in states else "missing"


def _state_at(source: Origin, file: File, sleep: Callable[[float], object]) -> State:
    name, size, sha256 = file
    digest, at, tries = hashlib.sha256(), 0, 0
    while True:
        before = at
        try:
            if size is None:
                digest.update(source.get(name, _SMALL_BYTES))
            else:
                for data in source.read(name, at, size) if size else ():
                    digest.update(data)
                    at += len(data)
                if at < size:
                    raise TransientError(f"the body ended at byte {at} of {size}")
            return "" if digest.hexdigest() == sha256 else "changed"
        except PermanentError:
            # Some of it came, or it is there and shorter than it should be.
            return "changed" if at or _is_there(source, name) else "missing"
        except ProtocolViolation:
            return "changed"
        except TransientError as error:
            tries = 1 if at > before else tries + 1
            if tries > _TRIES:
                raise NetworkError(
                    f"{name} from {source.url}: broke off {_TRIES} times at byte {at}; the last: {error}. "
                    "Check the network and the endpoint."
                ) from error
            sleep(backoff_s(tries, _WAIT_S, _MAX_WAIT_S, error.wait_s))


def _is_there(source: Origin, name: str) -> bool:
    try:
        return any(True for _ in source.read(name, 0, 1))
    except NetworkError:
        return False
