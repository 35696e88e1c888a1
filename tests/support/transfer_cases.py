"""What the tests of transfers share: content, settings, and a transfer that is waited for and compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forebay.dataset.chunks import hash_slice
from forebay.dataset.manifest import SliceInfo
from forebay.storage.base import Origin, Timeouts
from forebay.storage.fetch import RunFetcher
from forebay.storage.origins import open_origin
from forebay.storage.transfers import FileTransfer
from support import cached

MIB = 1 << 20
CHUNK = 1 << 16
CONTENT = random.Random(7).randbytes(3_500_001)
LEAVES = cached.leaves_of(CONTENT, CHUNK)
PATIENT = Timeouts(60.0, 60.0)  # A request given up on a machine that stands still is one more request.
QUICK = {"max_backoff_s": 0.05}


def info_of(data: bytes, name: str = "slice") -> SliceInfo:
    known = cached.info_of(data, CHUNK)
    return SliceInfo(0, name, len(data), known.sha256, 1, 1, CHUNK)


INFO = info_of(CONTENT)


def start(
    fetcher: RunFetcher, info: SliceInfo, part: Path, origins: Sequence[Origin],
    on_wrong: Callable[[Origin, str], object] | None = None, *, leaves: bytes = LEAVES, run_bytes: int = 0,
) -> FileTransfer:  # fmt: skip
    """`leaves`: of the slice; none: nobody knows them."""
    return FileTransfer(
        fetcher, info, part, origins, read_leaves=lambda: leaves, on_wrong=on_wrong, run_bytes=run_bytes
    ).start()


def fetch(
    fetcher: RunFetcher,
    part: Path,
    *urls: str,
    info: SliceInfo = INFO,
    bad: list[str] | None = None,
    timeouts: Timeouts = PATIENT,
    **more: Any,
) -> FileTransfer:
    moved = start(
        fetcher,
        info,
        part,
        [open_origin(url, timeouts=timeouts) for url in urls],
        None if bad is None else lambda origin, reason: bad.append(origin.url),
        run_bytes=1 << 18,
        **more,
    )
    assert moved.wait()
    if moved.error is None:
        assert part.stat().st_size == info.bytes
        assert hash_slice(part, info.chunk_bytes)[0] == info.sha256
        assert moved.received == info.bytes
    return moved
