"""A dataset copied from any origin to a directory or a bucket: verified, resumable, whole or by a range of slices.

Slices come first, then the small files, the table, and the manifest last: what has a manifest is a dataset. Every
byte is verified before it gets its name. What is there already is hashed (in a bucket: compared by the hash kept with
it) and skipped; a slice that a kill cut off goes on with the pieces that came.

Disk: slices on their way, at most four and 1 GiB unless one is larger, beside the target or in a temporary directory.
Memory: the transfers' (`connections` x 256 KiB), and 32 MiB an upload to a bucket.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, SliceInfo, dataset_id
from forebay.dataset.reader import listed_files
from forebay.errors import DatasetError, UsageError
from forebay.store.origins import Origin, read_small
from forebay.store.remote import RemoteDataset
from forebay.store.targets import Target
from forebay.store.transfer import Transfers

_MOST_SLICES = 4
_MOST_BYTES = 1 << 30
_LOOK_S = 0.1
_CHECKERS = 16
_MAX_FILE_BYTES = 1 << 30
# What is absent, what is there, and whom to tell of bytes done.
Copy = Callable[[list[SliceInfo], list[SliceInfo], Callable[[int], object]], None]


@dataclass(frozen=True)
class MirrorReport:
    """What a mirror did.

    Attributes:
        id: Of the dataset.
        copied, skipped: Slices of the range that were fetched, and that were there.
        copied_bytes, skipped_bytes: Of them.
        missing: Slices outside the range that are not there.
        complete: The target is the whole dataset, manifest included.
    """

    id: str
    source: str
    target: str
    slices: int
    copied: int
    skipped: int
    copied_bytes: int
    skipped_bytes: int
    missing: int
    complete: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values, by name."""
        return asdict(self)


def mirror(
    dataset: RemoteDataset,
    target: Target,
    *,
    start: int = 0,
    stop: int | None = None,
    connections: int = 16,
    on_progress: Callable[[int], object] | None = None,
    copy: Copy | None = None,
) -> MirrorReport:
    """Copy slices [start, stop) and, once all are there, what makes them a dataset.

    Args:
        dataset: From `open_remote`, of any URL.
        target: Stays the caller's to close.
        on_progress: Told the bytes done since its last call, those that are skipped included; from one thread.
        copy: Fetches and places slices in another way than from the origin (`swarm_mirror`).

    Raises:
        UsageError: If the range is outside the dataset, or the target holds another dataset or has no room.
        NetworkError: If a slice cannot be had; what was copied stays, and the next run goes on.
    """
    stop = dataset.num_slices if stop is None else stop
    if not 0 <= start <= stop <= dataset.num_slices:
        raise UsageError(f"slices: expected a range in 0:{dataset.num_slices}, got {start}:{stop}.")
    _check_target(dataset, target)
    say = on_progress or (lambda _: None)
    absent: list[SliceInfo] = []
    skipped: list[SliceInfo] = []
    for row, there in _look(target, map(dataset.table.row, range(start, stop)), verify=True):
        (skipped if there else absent).append(row)
        say(row.bytes if there else 0)
    _check_room(target, absent)
    if copy is not None:
        copy(absent, skipped, say)
    else:
        _copy(dataset.origin, target, absent, connections, say)
    outside = [*range(start), *range(stop, dataset.num_slices)]
    missing = sum(not there for _, there in _look(target, map(dataset.table.row, outside), verify=False))
    if not missing:
        _finish(dataset, target)
    return MirrorReport(
        dataset.id, dataset.origin.url, target.url, dataset.num_slices, len(absent), len(skipped),
        sum(row.bytes for row in absent), sum(row.bytes for row in skipped), missing, not missing,
    )  # fmt: skip


def _check_target(dataset: RemoteDataset, target: Target) -> None:
    found = target.read_whole(MANIFEST_FILE)
    if found is not None and dataset_id(found) != dataset.id:
        raise UsageError(
            f"{target.url}: expected nothing there, or the dataset {dataset.id}, got {dataset_id(found)}. "
            "Choose another place."
        )


def _check_room(target: Target, rows: list[SliceInfo]) -> None:
    free, needed = target.free_bytes(), sum(row.bytes for row in rows)
    if free is not None:
        held = sum(_blocks(target.part_of(row.name)) for row in rows) if rows else 0
        if needed > free + held:
            raise UsageError(
                f"{target.url}: expected room for {needed} bytes, got {free + held}. "
                f"Free {needed - free - held} bytes, copy fewer slices (--slices A:B), or choose another disk."
            )


def _blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def _look(target: Target, rows: Iterator[SliceInfo], *, verify: bool) -> Iterator[tuple[SliceInfo, bool]]:
    """Each slice, in order, and whether it is there."""
    with ThreadPoolExecutor(_CHECKERS) as pool:
        yield from pool.map(
            lambda row: (row, target.has(row.name, row.bytes, row.sha256 if verify else None)), list(rows)
        )


def _copy(
    origin: Origin, target: Target, rows: list[SliceInfo], connections: int, say: Callable[[int], object]
) -> None:
    """Fetch and place slices, some at a time, in order of start."""
    lock, told = threading.Lock(), [0]

    def advance(num_bytes: int) -> None:
        with lock:
            told[0] += num_bytes

    def flush() -> None:
        with lock:
            done, told[0] = told[0], 0
        say(done)

    waiting = list(reversed(rows))
    under_way: dict[Future[None], int] = {}
    with Transfers(connections) as transfers, ThreadPoolExecutor(_MOST_SLICES) as pool:
        try:
            while waiting or under_way:
                while waiting and len(under_way) < _MOST_SLICES and (
                    not under_way or sum(under_way.values()) + waiting[-1].bytes <= _MOST_BYTES
                ):  # fmt: skip
                    row = waiting.pop()
                    under_way[pool.submit(_copy_one, origin, target, row, transfers, advance)] = row.bytes
                done, _ = wait(under_way, _LOOK_S, FIRST_COMPLETED)
                flush()
                for future in done:
                    del under_way[future]
                    future.result()
        except BaseException:
            transfers.close()  # So that those which wait for it end.
            raise


def _copy_one(
    origin: Origin, target: Target, row: SliceInfo, transfers: Transfers, advance: Callable[[int], object]
) -> None:
    part = target.part_of(row.name)
    transfer = transfers.start(row, part, [origin])
    seen = 0
    while True:
        over = transfer.wait(_LOOK_S)
        received = row.bytes if over and transfer.error is None else transfer.received
        advance(received - seen)
        seen = received
        if over:
            break
    if transfer.error is not None:
        raise transfer.error
    target.place(row.name, part, row.sha256)


def _finish(dataset: RemoteDataset, target: Target) -> None:
    """The small files, the table, and the manifest last."""
    for name, sha256 in sorted(listed_files(dataset.manifest).items()):
        _copy_small(dataset.origin, target, name, sha256)
    _copy_small(dataset.origin, target, TABLE_FILE, dataset.manifest.table_sha256)
    _copy_small(dataset.origin, target, MANIFEST_FILE, dataset.id)


def _copy_small(origin: Origin, target: Target, name: str, sha256: str) -> None:
    data = read_small(origin, name, _MAX_FILE_BYTES)
    got = hashlib.sha256(data).hexdigest()
    if got != sha256:
        raise DatasetError(f"{origin.url}/{name}: expected sha256 {sha256}, got {got}. Publish it again.")
    target.write(name, data, got)
