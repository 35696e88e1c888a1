"""One large object, in many ranges over many connections, under its name only when it is whole.

Hides: how ranges, connections and memory follow from the size. What breaks is gone on with where it broke; what a
kill left is resumed piece by piece, though pieces come out of order (`pieces.PartFile`). The ETag is pinned: ranges of
two versions of an object never meet in one file.

Memory: 8 MiB and `max_workers` x 2 MiB from a bucket, x 0.5 MiB from the web, whatever the size of the object and of a
range (measured 60 MiB at 32 workers); and 500 bytes a piece of 8 MiB, 13 MB for 215 GB.
"""

import hashlib
import logging
import shutil
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from forebay.dataset.manifest import SliceInfo
from forebay.errors import DatasetError, NetworkError, UsageError
from forebay.files import commit_files
from forebay.network.retry import backoff_s
from forebay.storage.base import (
    ChangedError,
    ObjectMeta,
    ObjectOrigin,
    Origin,
    PermanentError,
    Timeouts,
    TransientError,
)
from forebay.storage.locks import try_acquire
from forebay.storage.origins import open_origin
from forebay.storage.part_file import Check, SizeOnly
from forebay.storage.transfers import PIECE_BYTES, Transfers

MAX_WORKERS = 32
_LEAST_PIECE, _MOST_CHUNK = 1 << 16, 64 << 20
_RESTARTS = 3
_LOOK_S = 0.1
Workers = int | Literal["all"] | None
log = logging.getLogger("forebay.storage")


@dataclass(frozen=True)
class DownloadPlan:
    """How an object is fetched: `num_ranges` requests of `chunk_bytes`, `workers` at once.

    After a kill, pieces of `piece_bytes` are there or are fetched again; a chunk is a whole number of them.
    """

    num_bytes: int
    chunk_bytes: int
    piece_bytes: int
    num_ranges: int
    workers: int


@dataclass(frozen=True)
class DownloadResult:
    """What a download did. `bytes_fetched` leaves out what an earlier run had fetched."""

    path: Path
    num_bytes: int
    bytes_fetched: int
    etag: str
    seconds: float
    retries: int


def plan_download(num_bytes: int, chunk_size: int | None = None, max_workers: Workers = None) -> DownloadPlan:
    """The ranges of an object. 2 GiB of 215 GB are 101 ranges.

    Args:
        chunk_size: Bytes of one request, at least 64 KiB, rounded down to whole pieces; by default 8 to 64 MiB.
        max_workers: Requests under way at once; `"all"`: one a range; by default 32.

    Raises:
        UsageError: If an argument is out of range.
    """
    if chunk_size is not None and chunk_size < _LEAST_PIECE:
        raise UsageError(f"chunk_size: expected at least {_LEAST_PIECE} bytes, got {chunk_size}.")
    if max_workers != "all" and max_workers is not None and max_workers < 1:
        raise UsageError(f"max_workers: expected 'all' or at least 1, got {max_workers}.")
    most = MAX_WORKERS if max_workers is None else max_workers
    if chunk_size is None:
        part = num_bytes // (4 * (MAX_WORKERS if most == "all" else most))
        chunk_size = min(_MOST_CHUNK, max(PIECE_BYTES if part >= PIECE_BYTES else 1 << 20, part))
    piece = min(PIECE_BYTES, 1 << (chunk_size.bit_length() - 1))
    chunk = chunk_size // piece * piece
    ranges = max(1, -(-num_bytes // chunk))
    return DownloadPlan(num_bytes, chunk, piece, ranges, ranges if most == "all" else min(most, ranges))


def download_large_file(
    source: str | Path | Origin,
    name: str | None = None,
    path: str | Path | None = None,
    *,
    chunk_size: int | None = None,
    max_workers: Workers = None,
    tmp_dir: str | Path | None = None,
    sha256: str = "",
    timeout_s: float = 300.0,
    timeouts: Timeouts | None = None,
    stop: threading.Event | None = None,
    on_progress: Callable[[int, int], object] | None = None,
) -> DownloadResult:
    """Fetch one object to a file, whole or not at all; after a kill, call it again and it goes on.

    Without a hash, what is checked is the size, and that all ranges are of one ETag.

    Args:
        source: An origin, its URL, or the object's own URL where `name` is None.
        name: Of the object below the origin.
        path: Of the file; by default the object's name, here. A file that is there already is replaced.
        chunk_size, max_workers: See `plan_download`.
        tmp_dir: Where the partial file lies; by default beside `path`. On another volume, one more copy is made.
        sha256: Of the object in hex, if it is known; checked as the bytes come.
        timeout_s: Fail when no byte, or no answer, came for so long, retries included. The last request may take a
            quarter of that longer.
        timeouts: Of one request; by default at most a quarter of `timeout_s`.
        stop: Set from another thread, gives the download up; what was fetched stays.
        on_progress: Called some ten times a second with the bytes that are there and the size.

    Raises:
        DatasetError: If the object is not there, or not for us.
        NetworkError: If it cannot be had: names the endpoint, attempts and time.
        UsageError: If the disk is full (what was fetched stays), or an argument is wrong.
    """
    if name is None:
        source, name = _split(source)
    if isinstance(source, (str, Path)):
        source = open_origin(source, timeouts=timeouts or Timeouts.within(timeout_s))
    origin = as_object_origin(source)
    path = Path(path if path is not None else Path(name).name)
    folder = Path(tmp_dir) if tmp_dir is not None else path.parent
    for made in {folder, path.parent}:
        made.mkdir(parents=True, exist_ok=True)
    lock = try_acquire(folder / f".{path.name}.lock")
    if lock is None:
        raise UsageError(f"{path}: is being fetched by another process. Wait for it to end.")
    with lock:
        for left in range(_RESTARTS, -1, -1):
            head = head_object(origin, name, timeout_s=timeout_s, stop=stop)
            part, plan = part_path(folder, path.name, head), plan_download(head.bytes, chunk_size, max_workers)
            try:
                got = download_part(
                    origin, name, head, part, plan,
                    sha256=sha256, timeout_s=timeout_s, stop=stop, on_progress=on_progress,
                )  # fmt: skip
                break
            except ChangedError as error:
                if not left:
                    raise
                log.warning("%s; fetching the new one from its start", error)
        commit_part(got.path, path)
        lock.path.unlink(missing_ok=True)
    return DownloadResult(path, got.num_bytes, got.bytes_fetched, got.etag, got.seconds, got.retries)


def part_path(folder: Path, name: str, head: ObjectMeta) -> Path:
    """The partial file of one version of an object. Those of other versions, which are of no use now, are removed."""
    key = hashlib.blake2b(f"{head.bytes} {head.etag}".encode(), digest_size=6).hexdigest()
    part = folder / f".{name}.{key}.part"
    for other in folder.glob(f".{name}.*.part"):
        if other != part:
            other.unlink(missing_ok=True)
    return part


def download_part(
    origin: ObjectOrigin,
    name: str,
    head: ObjectMeta,
    part: Path,
    plan: DownloadPlan,
    *,
    sha256: str = "",
    check: Check | None = None,
    timeout_s: float = 300.0,
    stop: threading.Event | None = None,
    on_progress: Callable[[int, int], object] | None = None,
) -> DownloadResult:
    """Fetch an object of this head into its partial file, checked and synced; ChangedError if it is another now."""
    if head.bytes == 0:
        part.write_bytes(b"")
        return DownloadResult(part, 0, 0, head.etag, 0.0, 0)
    began = time.monotonic()
    info = SliceInfo(0, name, head.bytes, sha256, 0, 0)
    judge = None if sha256 else check or SizeOnly()
    most_s = min(15.0, timeout_s / 4)
    settings: dict[str, Any] = {"timeout_s": timeout_s, "tries": 1, "max_backoff_s": most_s}
    with Transfers(plan.workers, plan.piece_bytes, **settings) as transfers:
        transfer = transfers.start(info, part, [_Pinned(origin, head.etag)], span_bytes=plan.chunk_bytes, check=judge)
        had = transfer.received
        while not transfer.wait(_LOOK_S):
            if on_progress is not None:
                on_progress(transfer.received, head.bytes)
            if stop is not None and stop.is_set():
                transfers.cancel(transfer)
        if transfer.error is not None:
            raise _changed(origin, name, head, transfer.error) or transfer.error
        if on_progress is not None:
            on_progress(head.bytes, head.bytes)
        retries = int(transfers.stats()["retries"])
    return DownloadResult(part, head.bytes, head.bytes - had, head.etag, time.monotonic() - began, retries)


def _changed(origin: ObjectOrigin, name: str, head: ObjectMeta, error: Exception) -> ChangedError | None:
    """What a refusal was, if the object is another one by now; it may be shorter, so that a range is beyond it."""
    if isinstance(error.__cause__, ChangedError):
        return error.__cause__
    if isinstance(error.__cause__, PermanentError):
        try:
            now = origin.head(name)
        except NetworkError:
            return None
        if now != head:
            return ChangedError(f"{origin.url}/{name} changed while it was read: expected {head}, got {now}")
    return None


def head_object(
    origin: ObjectOrigin, name: str, *, timeout_s: float = 300.0, stop: threading.Event | None = None
) -> ObjectMeta:
    """What an origin says of an object, asked again while faults may pass and `timeout_s` is not over. DatasetError,
    caused by the PermanentError, if it is not there or not for us."""
    began, tries = time.monotonic(), 0
    stop = stop or threading.Event()
    while True:
        try:
            return origin.head(name)
        except PermanentError as error:
            raise DatasetError(f"{error}. Check the address, the name and the credentials.") from error
        except TransientError as error:
            tries += 1
            waited = time.monotonic() - began
            pause_s = backoff_s(tries, 0.2, min(15.0, timeout_s / 4), error.wait_s)
            if stop.is_set() or waited + pause_s >= timeout_s:
                raise NetworkError(
                    f"{name} from {origin.url}: no answer after {tries} attempts in {waited:.1f} s; the last: {error}. "
                    "Check the network and the endpoint."
                ) from error
            stop.wait(pause_s)


def commit_part(part: Path, path: Path, check_copy: Callable[[Path], object] | None = None) -> None:
    """Give a whole, synced file its name; from another volume, by a copy beside it, which is then checked."""
    try:
        if part.stat().st_dev != path.parent.stat().st_dev:
            copy = path.with_name(f".{path.name}.copy.part")
            shutil.copyfile(part, copy)
            if check_copy is not None:
                check_copy(copy)
            part.unlink()
            part = copy
        commit_files({part: path})
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error}. Free space there, or choose another directory."
        ) from error


def as_object_origin(origin: Origin) -> ObjectOrigin:
    """An origin that can describe its objects; UsageError if it cannot, as peers do not."""
    if not hasattr(origin, "head"):
        raise UsageError(f"{origin.url}: expected a directory, http(s)://, s3://, r2://, gs:// or az://. Give one.")
    return cast(ObjectOrigin, origin)


class _Pinned(Origin):
    """An origin of one version of an object."""

    def __init__(self, origin: ObjectOrigin, etag: str) -> None:
        self._origin = origin
        self._etag = etag
        self.url = origin.url

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        return self._origin.read(name, start, stop, self._etag)


def _split(source: str | Path | Origin) -> tuple[str, str]:
    """An object's URL as its directory's and its name."""
    if not isinstance(source, (str, Path)):
        raise UsageError("download_large_file: expected the name of an object below the origin, got none. Give it.")
    text = str(source)
    if "://" not in text:
        return str(Path(text).absolute().parent), Path(text).name
    parts = urllib.parse.urlsplit(text)
    folder, _, name = parts.path.rpartition("/")
    if not name:
        raise UsageError(f"download_large_file: expected the URL of an object, got {text!r}. Name the object.")
    return urllib.parse.urlunsplit(parts._replace(path=folder)), urllib.parse.unquote(name)
