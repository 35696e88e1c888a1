"""Downloads one large object in many ranges; it gets its final name when it is complete.

A broken range is resumed where it broke; after a kill, complete pieces are kept (`transfers.FileTransfer`). The ETag is
pinned: ranges of two versions never meet in one file, and an object that changes meanwhile is an error.

Memory: 8 MiB, and 2 MiB per worker for a bucket or 0.5 MiB for a web server (measured: 60 MiB at 32 workers), plus 500
bytes per piece of 8 MiB (13 MB for 215 GB).
"""

import hashlib
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.dataset.manifest import SliceInfo
from forebay.errors import UsageError
from forebay.fetch.engine import RunFetcher
from forebay.fetch.transfers import RUN_BYTES, FileTransfer, map_path_of
from forebay.files import commit_files
from forebay.storage.base import Origin, PinnedOrigin, Timeouts, as_object_origin, head_object
from forebay.storage.locks import acquire_now
from forebay.storage.origins import open_origin

MAX_WORKERS = 32
_MIN_CHUNK_BYTES, _MAX_DEFAULT_CHUNK_BYTES = 1 << 16, 64 << 20
Workers = int | Literal["all"] | None
Progress = Callable[[int, int], object]  # Called with the bytes received and the size.


@dataclass(frozen=True)
class DownloadPlan:
    """`num_ranges` requests of `chunk_bytes`, `workers` at once; pieces of `piece_bytes` survive a kill."""

    num_bytes: int
    chunk_bytes: int
    piece_bytes: int
    num_ranges: int
    workers: int


@dataclass(frozen=True)
class DownloadResult:
    """The result of a download. `bytes_fetched` excludes the bytes of earlier runs."""

    path: Path
    num_bytes: int
    bytes_fetched: int
    seconds: float
    retries: int


def plan_download(num_bytes: int, chunk_size: int | None = None, max_workers: Workers = None) -> DownloadPlan:
    """Plan the ranges of an object. Example: 215 GB in chunks of 2 GiB are 101 ranges.

    Args:
        chunk_size: Bytes per request, at least 64 KiB, rounded down to whole pieces; by default 8 to 64 MiB.
        max_workers: Requests at once; `"all"`: one per range; by default 32.

    Raises:
        UsageError: If an argument is out of range.
    """
    if chunk_size is not None and chunk_size < _MIN_CHUNK_BYTES:
        raise UsageError(f"chunk_size: expected at least {_MIN_CHUNK_BYTES} bytes, got {chunk_size}.")
    if max_workers != "all" and max_workers is not None and max_workers < 1:
        raise UsageError(f"max_workers: expected 'all' or at least 1, got {max_workers}.")
    max_workers = MAX_WORKERS if max_workers is None else max_workers
    if chunk_size is None:
        quarter = num_bytes // (4 * (MAX_WORKERS if max_workers == "all" else max_workers))
        chunk_size = min(_MAX_DEFAULT_CHUNK_BYTES, max(RUN_BYTES if quarter >= RUN_BYTES else 1 << 20, quarter))
    piece = min(RUN_BYTES, 1 << (chunk_size.bit_length() - 1))
    chunk = chunk_size // piece * piece
    num_ranges = max(1, -(-num_bytes // chunk))
    workers = num_ranges if max_workers == "all" else min(max_workers, num_ranges)
    return DownloadPlan(num_bytes, chunk, piece, num_ranges, workers)


def download_large_file(
    source: str | Path | Origin, name: str, path: str | Path, *, chunk_size: int | None = None,
    max_workers: Workers = None, tmp_dir: str | Path | None = None, timeout_s: float = 300.0,
    stop: threading.Event | None = None, on_progress: Progress = lambda received, size: None,
) -> DownloadResult:  # fmt: skip
    """Download one object to a file, atomically. Call it again after a kill to resume.

    It verifies the size, and that all ranges have one ETag.

    Args:
        source: An origin or its URL.
        name: Name of the object below the origin.
        path: The file. An existing one is replaced.
        chunk_size, max_workers: See `plan_download`.
        tmp_dir: Directory of the partial file, by default that of `path`. On another volume, the file is copied.
        timeout_s: Fail after so long without a byte or response, retries included; the last request may take a quarter
            of that longer.
        stop: Setting this event cancels the download; the partial file is kept.
        on_progress: Called about ten times a second with the bytes received and the size.

    Raises:
        DatasetError: If the object does not exist or access is denied.
        NetworkError: If the download fails; names the endpoint, attempts and time.
        UsageError: If the disk is full (the partial file is kept), or an argument is wrong.
    """
    if isinstance(source, (str, Path)):
        source = open_origin(source, timeouts=Timeouts.within(timeout_s))
    origin, path, stop = as_object_origin(source), Path(path), stop or threading.Event()
    folder = Path(tmp_dir or path.parent)
    for directory in (folder, path.parent):
        directory.mkdir(parents=True, exist_ok=True)
    with acquire_now(folder / f".{path.name}.lock", str(path)) as lock:
        meta = head_object(origin, name, timeout_s=timeout_s, stop=stop)
        key = hashlib.blake2b(f"{meta.bytes} {meta.etag}".encode(), digest_size=6).hexdigest()
        part = folder / f".{path.name}.{key}.part"
        for other in folder.glob(f".{path.name}.*.part"):  # of other versions
            if other != part:
                other.unlink(missing_ok=True)
                map_path_of(other).unlink(missing_ok=True)
        began, fetched, retries = time.monotonic(), 0, 0
        if not meta.bytes:
            part.write_bytes(b"")
        else:
            plan = plan_download(meta.bytes, chunk_size, max_workers)
            info = SliceInfo(0, name, meta.bytes, "", 0, 0, plan.piece_bytes)
            with open_fetcher(plan, timeout_s) as fetcher:
                transfer = FileTransfer(
                    fetcher, info, part, PinnedOrigin(origin, meta.etag), run_bytes=plan.chunk_bytes
                )
                fetched = meta.bytes - transfer.received
                transfer.run(stop, lambda received: on_progress(received, meta.bytes))
                on_progress(meta.bytes, meta.bytes)
                retries = fetcher.retries
        _commit(part, path)
        lock.path.unlink(missing_ok=True)
    return DownloadResult(path, meta.bytes, fetched, time.monotonic() - began, retries)


def open_fetcher(plan: DownloadPlan, timeout_s: float) -> RunFetcher:
    """The connections of a plan, patient with one origin. Close it."""
    return RunFetcher(plan.workers, timeout_s=timeout_s, tries=1, max_backoff_s=min(15.0, timeout_s / 4))


def _commit(part: Path, path: Path) -> None:
    """Rename a complete, synced file; one of another volume is copied."""
    try:
        if part.stat().st_dev != path.parent.stat().st_dev:
            copy = path.with_name(f".{path.name}.copy.part")
            shutil.copyfile(part, copy)
            part.unlink()
            part = copy
        commit_files({part: path})
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be written: {error}. Free space there, or choose another directory."
        ) from error
