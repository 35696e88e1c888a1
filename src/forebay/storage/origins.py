"""Open an origin or a dataset by its URL: the one list of URL schemes.

The module of a scheme is imported when a URL needs it, as most need packages of an extra; a package may add a scheme by
an entry point of `forebay.origins`. Of a remote dataset, manifest and table are read and verified, slices are not
copied; `verify` hashes them with 256 KiB of memory per connection.
"""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from forebay.dataset.chunks import CHUNKS_FILE, HASH_BYTES, ChunkHasher, root_of
from forebay.dataset.manifest import LENGTHS_FILE, MANIFEST_FILE, MAX_MANIFEST_BYTES, TABLE_FILE, Manifest, SliceTable
from forebay.dataset.reader import LEAVES_AT_ONCE, Dataset, local_path
from forebay.dataset.slices import Slice, open_slice
from forebay.errors import (
    BUCKET_SCHEMES,
    DatasetError,
    NetworkError,
    ProtocolError,
    UsageError,
    full_url,
    printable_url,
)
from forebay.order.footprint import FREE_HASHES
from forebay.plugins import load_plugin, plugins
from forebay.storage.base import (
    Origin,
    PathOrigin,
    Patience,
    PermanentError,
    Timeouts,
    TransientError,
    read_range,
    read_small,
    read_whole,
)
from forebay.storage.locks import at_fork

ORIGINS = {"forebay": "forebay.network.peer_dataset:open_peers"}
"""The openers of schemes that are not of storage, called with the URL, `timeouts` and what `open_origin` was given."""
_SCHEMES = (
    "a directory, file://, http(s)://, s3://, r2://, gs://, az://, hf://datasets/OWNER/NAME, forebay://NETWORK/NAME"
)
_MAX_SMALL_BYTES = 1 << 30
_MAX_LEAVES = 1 << 19  # 16 MiB, about.
_PATIENCE = Patience(tries=5, max_wait_s=4.0)


def open_origin(url: str | Path, *, timeouts: Timeouts | None = None, **settings: Any) -> Origin:
    """Return the origin at a URL of the user, with the environment's credentials. It connects at the first request.

    Args:
        url: A path or `file://`; `http://`, `https://` (a directory; its query goes with every request); `s3://`
            (`AWS_*`, `AWS_ENDPOINT_URL`; options of obstore in the query), `r2://` (`R2_DATASET_*`), `gs://`, `az://`;
            `hf://datasets/OWNER/NAME[@REVISION][/PATH]` (`HF_ENDPOINT`, `HF_TOKEN`); `forebay://NETWORK/NAME`.
        settings: For `forebay://`, as of `forebay.network.peer_dataset.open_peers`; other schemes ignore them.

    Raises:
        UsageError: If the scheme is unknown, or a part of the URL is missing.
    """
    text = full_url(url)
    timeouts = timeouts or Timeouts()
    match text.partition("://")[0].lower() if "://" in text else "":
        case "" | "file":
            return PathOrigin(local_path(text).absolute())
        case "http" | "https" | "hf" as scheme:
            from forebay.storage.http import WebOrigin

            headers = dict[str, str]()
            if scheme == "hf":
                from forebay.storage.hub import hub_address

                text, headers = hub_address(text)
            return WebOrigin(text, headers=headers, timeouts=timeouts)
        case scheme if scheme in BUCKET_SCHEMES:
            from forebay.storage.buckets import BucketOrigin

            return BucketOrigin(text, timeouts=timeouts)
        case scheme if scheme in ORIGINS or scheme in plugins("forebay.origins"):
            opened: Origin = load_plugin("forebay.origins", scheme, ORIGINS)(text, timeouts=timeouts, **settings)
            return opened
    raise UsageError(f"open an origin: expected {_SCHEMES}, got {printable_url(text)!r}. Check the URL.")


def open_remote(url: str | Path, *, dataset_id: str | None = None, **settings: Any) -> RemoteDataset:
    """Open the dataset at a URL: reads manifest and table into memory.

    Args:
        url, settings: As of `open_origin`.
        dataset_id: Expected id; by default any.

    Raises:
        DatasetError: If there is no dataset, it is damaged, or has another id.
        NetworkError: If the origin is unreachable.
        UsageError: If the scheme is unknown.
    """
    origin = open_origin(url, dataset_id=dataset_id, **settings)
    return read_dataset(origin, dataset_id)


def read_dataset(origin: Origin, expected_id: str | None) -> RemoteDataset:
    """Read the manifest and table at an origin; errors as of `open_remote`."""
    manifest = Manifest.from_json(read_small(origin, MANIFEST_FILE, MAX_MANIFEST_BYTES))
    id = manifest.id
    if expected_id is not None and id != expected_id:
        raise DatasetError(
            f"{origin.url}: expected the dataset {expected_id}, got {id}. Its data differ. "
            "Check the URL, or ask for the id that is there."
        )
    data = read_small(origin, TABLE_FILE, _MAX_SMALL_BYTES)
    return RemoteDataset(origin, manifest, manifest.read_table(data, f"{origin.url}/{TABLE_FILE}"), id)


class RemoteDataset(Dataset):
    """A dataset behind an origin. Loaders and mirrors download its slices; `read_slice` stores one while it is used."""

    is_local = False
    _num_hashers = 8

    def __init__(self, origin: Origin, manifest: Manifest, table: SliceTable, id: str) -> None:
        super().__init__(Path(origin.url), manifest, table, id)
        self.origin, self.url, origin.table = origin, origin.url, table
        self.has_peers = origin.url.startswith("forebay://")
        self._leaves = OrderedDict[int, bytes]()  # Those of slices that were not asked for yet.
        self._have_leaves = np.zeros(len(table), bool)
        self._more_leaves = FREE_HASHES
        self.after_fork()
        at_fork(self)

    def after_fork(self) -> None:
        """In a forked child: a request of the parent had the lock, maybe."""
        self._leaves_lock = threading.Lock()

    def slice_path(self, index: int) -> NoReturn:
        """Raise UsageError: a slice of a remote dataset has no local file."""
        raise UsageError(
            f"slice {index} of {self.origin.url}: expected a dataset in a local directory, got a remote one. "
            "Open it with a Loader, which fetches and verifies slices, or copy it here first (`forebay mirror`)."
        )

    open_slice = slice_path

    @contextmanager
    def open_lengths(self) -> Iterator[BinaryIO]:
        """As of a local dataset: a temporary copy, of the first source that has the right bytes."""
        name, size, sha256 = LENGTHS_FILE, self.manifest.lengths_bytes, self.manifest.lengths_sha256
        error: DatasetError | NetworkError = NetworkError(
            f"{self.url}/{name}: expected a source that has it, got none."
        )
        for source in self.origin.sources():
            with tempfile.TemporaryFile() as file:
                try:
                    fetch_object(source, name, size, sha256, file, size + 1)
                except (DatasetError, NetworkError) as fault:
                    error = fault
                    continue
                except OSError as fault:
                    raise UsageError(
                        f"{tempfile.gettempdir()}: expected room for {size} bytes of {name}, got {fault.strerror}. "
                        "Free some, or set TMPDIR."
                    ) from fault
                finally:
                    self.fetched_bytes, self.requests = self.fetched_bytes + file.tell(), self.requests + 1
                file.seek(0)
                yield file
                return
        raise error

    def read_slice(self, index: int) -> Slice:
        """Download a slice to a temporary file without a name, verify and map it."""
        row = self.table.row(index)
        with tempfile.TemporaryDirectory() as folder, Path(folder, "slice.safetensors").open("wb") as file:
            fetch_object(self.origin, row.name, row.bytes, row.sha256, file, row.chunk_bytes)
            opened = open_slice(file.name)
        self.check_slice(row, opened)
        return opened

    def leaves(self, index: int) -> bytes:
        """As of a local dataset. With them come those of neighbours that were not read yet. Errors as of `Origin.read`.

        What comes in vain is at most `FREE_HASHES`, and twice what was asked for.
        """
        edges = self.first_chunks
        size = int(edges[index + 1] - edges[index])
        if size == 1:
            return super().leaves(index)
        with self._leaves_lock:
            more = self._more_leaves + 2 * size
            if index in self._leaves:
                self._more_leaves = more
                return self._leaves.pop(index)
            limit, (start, stop) = min(size + more, LEAVES_AT_ONCE), (index, index + 1)
            while stop < self.num_slices and not self._have_leaves[stop] and edges[stop + 1] - edges[start] <= limit:
                stop += 1
            while start and not self._have_leaves[start - 1] and edges[stop] - edges[start - 1] <= limit:
                start -= 1
            try:
                leaves = super()._leaves_of(start, stop)
            except (DatasetError, PermanentError):  # Another of the slices may be wrong, or absent.
                start, stop, leaves = index, index + 1, super()._leaves_of(index, index + 1)
            self._more_leaves = more - (int(edges[stop] - edges[start]) - size)
            self._have_leaves[start:stop] = True
            self._leaves |= dict(zip(range(start, stop), leaves))
            while len(self._leaves) > max(1, _MAX_LEAVES // size):
                self._leaves.popitem(last=False)
            return self._leaves.pop(index, leaves[index - start])

    def _leaves_of(self, start: int, stop: int) -> list[bytes]:
        """As of a local dataset; asks again, for all slices. `leaves` does not: the fetch of the chunks does."""
        return _PATIENCE.ask(lambda: super(RemoteDataset, self)._leaves_of(start, stop), f"{self.url}/{CHUNKS_FILE}")

    def _read_leaves(self, first: int, count: int) -> Iterator[bytes]:
        start, num_bytes = first * HASH_BYTES, count * HASH_BYTES
        self.fetched_bytes, self.requests = self.fetched_bytes + num_bytes, self.requests + 1
        yield read_whole(self.origin, CHUNKS_FILE, start, start + num_bytes)
        sources = self.origin.sources()
        for source in sources if len(sources) > 1 else ():
            with suppress(NetworkError):
                yield read_whole(source, CHUNKS_FILE, start, start + num_bytes)

    def file_state(self, name: str, size: int | None, sha256: str) -> str:
        """The best state of a file at any source, read and not stored: "", "changed", "cut" or "missing"."""
        states = set[str]()
        for source in self.origin.sources():
            states.add(object_state(source, name, size, sha256, self.table.chunk_bytes))
            if "" in states:
                return ""
        return min(states, key=("changed", "cut", "missing").index, default="missing")

    def _state_of_chunks(self) -> str:
        if self._has_all_leaves():
            return ""
        return "changed" if any(_has_bytes(source, CHUNKS_FILE) for source in self.origin.sources()) else "missing"

    def _extra(self) -> list[str]:
        return []


def fetch_object(source: Origin, name: str, size: int, sha256: str, file: BinaryIO, chunk_bytes: int) -> None:
    """Write an object to a file. DatasetError if its hash, of a slice its id, is another; others as of Origin.read."""
    hasher = ChunkHasher(chunk_bytes)
    for chunk in read_range(source, name, 0, size, _PATIENCE):
        file.write(chunk)
        hasher.update(chunk)
    file.flush()
    if (got := root_of(hasher.leaves())) != sha256:
        raise DatasetError(f"{source.url}/{name}: expected sha256 {sha256}, got {got}. Publish the dataset again.")


def _has_bytes(source: Origin, name: str) -> bool:
    try:
        return any(True for _ in source.read(name, 0, 1))
    except NetworkError:
        return False


def object_state(source: Origin, name: str, size: int | None, sha256: str, chunk_bytes: int) -> str:
    """Read an object, and return how it compares with its hash: "", "changed", "cut" or "missing"."""
    hasher = ChunkHasher(_MAX_SMALL_BYTES if size is None else chunk_bytes)
    try:
        if size is None:
            hasher.update(_PATIENCE.retry(lambda: source.get(name, _MAX_SMALL_BYTES), f"{name} from {source.url}"))
        for chunk in read_range(source, name, 0, size or 0, _PATIENCE):
            hasher.update(chunk)
        return "" if root_of(hasher.leaves()) == sha256 else "changed"
    except PermanentError:
        return "cut" if _has_bytes(source, name) else "missing"
    except ProtocolError:
        return "changed"
    except TransientError as error:
        raise NetworkError(
            f"{name} from {source.url}: broke off {error.tries} times; the last: {error}. "
            "Check the network and the endpoint."
        ) from error
