"""What the tests of transfers share: content, settings, and a transfer that is waited for and compared."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from forebay.dataset.manifest import SliceInfo
from forebay.storage.base import Timeouts
from forebay.storage.origins import open_origin
from forebay.storage.transfer_state import (
    PoolTransfer,
)
from forebay.storage.transfers import Transfers

MIB = 1 << 20
CONTENT = random.Random(7).randbytes(3_500_001)
PATIENT = Timeouts(60.0, 60.0)  # A request given up on a machine that stands still is one more request.
QUICK = {"piece_bytes": 1 << 18, "max_backoff_s": 0.05}


def info_of(data: bytes, name: str = "slice") -> SliceInfo:
    return SliceInfo(0, name, len(data), hashlib.sha256(data).hexdigest(), 1, 1)


INFO = info_of(CONTENT)


def fetch(
    transfers: Transfers,
    part: Path,
    *urls: str,
    info: SliceInfo = INFO,
    bad: list[str] | None = None,
    timeouts: Timeouts = PATIENT,
) -> PoolTransfer:
    moved = transfers.start(
        info,
        part,
        [open_origin(url, timeouts=timeouts) for url in urls],
        None if bad is None else lambda origin, reason: bad.append(origin.url),
        range_bytes=1 << 18,
    )
    assert moved.wait(60)
    if moved.error is None:
        assert part.stat().st_size == info.bytes
        assert hashlib.sha256(part.read_bytes()).hexdigest() == info.sha256
        assert moved.received == info.bytes
    return moved
