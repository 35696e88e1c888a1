"""A dataset copied from any origin to a directory or a bucket: verified, resumable, whole or by a range of slices.

Slices come first, then the small files, the table, and the manifest last: what has a manifest is a dataset. Every
byte is verified before it gets its name. What is there already is hashed (in a bucket: compared by the hash kept with
it) and skipped; a slice that a kill cut off goes on with the pieces that came. A mirror may take part in the swarm:
what came is handed out while the rest comes.

Disk: slices on their way, at most four and 1 GiB unless one is larger, beside the target or in a temporary directory.
Memory: the transfers' (`connections` x 256 KiB), and 32 MiB an upload to a bucket.
"""

import functools
import hashlib
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.dataset.manifest import MANIFEST_FILE, TABLE_FILE, SliceInfo, dataset_id
from forebay.dataset.reader import listed_files
from forebay.errors import DatasetError, UsageError
from forebay.storage.base import read_small
from forebay.storage.remote_dataset import RemoteDataset
from forebay.storage.targets import Target
from forebay.storage.transfer_state import Transfer
from forebay.storage.transfers import Transfers

_MOST_SLICES = 4
_MOST_BYTES = 1 << 30
_MOST_WANTED = 1024  # slices that a swarm's trackers are told of
_LOOK_S, _MOST_LOOK_S = 0.1, 2.0  # whether all have all: often at first, as they mostly end together
_CHECKERS = 16
_MAX_FILE_BYTES = 1 << 30
Say = Callable[[int], object]
# What is absent, what is there, and whom to tell of bytes done.
Copy = Callable[[list[SliceInfo], list[SliceInfo], Say], None]


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


def mirror(
    dataset: RemoteDataset,
    target: Target,
    *,
    start: int = 0,
    stop: int | None = None,
    connections: int = 16,
    on_progress: Say | None = None,
) -> MirrorReport:
    """Copy slices [start, stop) and, once all are there, what makes them a dataset.

    Args:
        dataset: From `open_remote`, of any URL.
        target: Stays the caller's to close.
        on_progress: Told the bytes done since its last call, those that are skipped included; from one thread.

    Raises:
        UsageError: If the range is outside the dataset, or the target holds another dataset or has no room.
        NetworkError: If a slice cannot be had; what was copied stays, and the next run goes on.
    """

    def copy(absent: list[SliceInfo], there: list[SliceInfo], say: Say) -> None:
        def place(transfer: Transfer) -> None:
            target.place(transfer.info.name, transfer.part, transfer.info.sha256)

        with Transfers(connections) as transfers, ThreadPoolExecutor(_MOST_SLICES) as pool:
            fetch = functools.partial(transfers.start, origins=[dataset.origin])
            _copy(target, absent, fetch, place, pool.submit, _MOST_SLICES, _MOST_BYTES, say)

    return _mirror(dataset, target, start, stop, on_progress, copy, {})


def mirror_by_swarm(
    dataset: RemoteDataset,
    target: Target,
    *,
    share: bool | str = True,
    start: int = 0,
    stop: int | None = None,
    connections: int = 16,
    upload_bytes_per_s: float | None = None,
    linger_s: float = 60.0,
    on_progress: Say | None = None,
) -> tuple[MirrorReport, dict[str, Any]]:
    """As `mirror`, of `forebay://` to a directory; and the swarm's figures.

    `share` is as of SwarmMember. At the end it goes on sharing for `linger_s` at most, until all who share have all.
    """
    from forebay.network.limits import Throttle
    from forebay.swarm.reader import SwarmMember

    if "://" in target.url:
        raise UsageError(f"mirror: expected a directory to share from, got {target.url}. Leave out --share.")
    folder, held = dict[str, Path](), np.zeros(dataset.num_slices, np.bool_)
    throttle = Throttle(upload_bytes_per_s) if upload_bytes_per_s is not None else None
    with SwarmMember(dataset, folder, held.copy, share=share, throttle=throttle, connections=connections) as member:

        def show(row: SliceInfo) -> None:
            folder[row.sha256] = Path(target.url) / row.name
            held[row.index] = True

        def place(transfer: Transfer) -> None:
            target.place(transfer.info.name, transfer.part, transfer.info.sha256)
            show(transfer.info)

        def copy(absent: list[SliceInfo], there: list[SliceInfo], say: Say) -> None:
            for row in there:
                show(row)
            # Placed by the thread that ended the transfer: it is here before the tracker hears of it.
            _copy(
                target, absent, lambda row, part: member.reader.fetch(row.index, part), place, lambda do: do(),
                _MOST_WANTED, None, say,
            )  # fmt: skip

        report = _mirror(dataset, target, start, stop, on_progress, copy, member.files)
        until, look_s = time.monotonic() + (linger_s if share else 0.0), _LOOK_S
        while time.monotonic() < until and not member.reader.settled:
            member.reader.ask_soon()
            time.sleep(look_s)
            look_s = min(2 * look_s, _MOST_LOOK_S)
        shared = member.share.bytes_sent if member.share is not None else 0
        return report, {**member.reader.stats(), "bytes_shared": shared}


def _mirror(
    dataset: RemoteDataset,
    target: Target,
    start: int,
    stop: int | None,
    on_progress: Say | None,
    copy: Copy,
    files: Mapping[str, bytes],
) -> MirrorReport:
    """What all mirrors do around the copying of slices; `files` are small ones that are here already."""
    stop = dataset.num_slices if stop is None else stop
    if not 0 <= start <= stop <= dataset.num_slices:
        raise UsageError(f"slices: expected a range in 0:{dataset.num_slices}, got {start}:{stop}.")
    found = target.read_whole(MANIFEST_FILE)
    if found is not None and dataset_id(found) != dataset.id:
        raise UsageError(
            f"{target.url}: expected nothing there, or the dataset {dataset.id}, got {dataset_id(found)}. "
            "Choose another place."
        )
    say = on_progress or (lambda _: None)
    absent: list[SliceInfo] = []
    skipped: list[SliceInfo] = []
    for row, there in _look(target, map(dataset.table.row, range(start, stop)), verify=True):
        (skipped if there else absent).append(row)
        say(row.bytes if there else 0)
    _check_room(target, absent)
    copy(absent, skipped, say)
    outside = [*range(start), *range(stop, dataset.num_slices)]
    missing = sum(not there for _, there in _look(target, map(dataset.table.row, outside), verify=False))
    if not missing:
        # The small files, the table, and the manifest last.
        names = sorted(listed_files(dataset.manifest).items())
        for name, sha256 in [*names, (TABLE_FILE, dataset.manifest.table_sha256), (MANIFEST_FILE, dataset.id)]:
            data = files[name] if name in files else read_small(dataset.origin, name, _MAX_FILE_BYTES)
            got = hashlib.sha256(data).hexdigest()
            if got != sha256:
                raise DatasetError(
                    f"{dataset.origin.url}/{name}: expected sha256 {sha256}, got {got}. Publish it again."
                )
            target.write(name, data, got)
    return MirrorReport(
        dataset.id, dataset.origin.url, target.url, dataset.num_slices, len(absent), len(skipped),
        sum(row.bytes for row in absent), sum(row.bytes for row in skipped), missing, not missing,
    )  # fmt: skip


def _check_room(target: Target, rows: list[SliceInfo]) -> None:
    free, needed = target.free_bytes(), sum(row.bytes for row in rows)
    if free is not None:
        parts = [target.part_of(row.name) for row in rows]
        held = sum(part.stat().st_blocks * 512 for part in parts if part.exists())
        if needed > free + held:
            raise UsageError(
                f"{target.url}: expected room for {needed} bytes, got {free + held}. "
                f"Free {needed - free - held} bytes, copy fewer slices (--slices A:B), or choose another disk."
            )


def _look(target: Target, rows: Iterator[SliceInfo], *, verify: bool) -> Iterator[tuple[SliceInfo, bool]]:
    """Each slice, in order, and whether it is there."""
    with ThreadPoolExecutor(_CHECKERS) as pool:
        yield from pool.map(
            lambda row: (row, target.has(row.name, row.bytes, row.sha256 if verify else None)), list(rows)
        )


def _copy(
    target: Target,
    rows: list[SliceInfo],
    fetch: Callable[[SliceInfo, Path], Transfer],
    place: Callable[[Transfer], object],
    submit: Callable[[Callable[[], object]], object],
    most: int,
    most_bytes: int | None,
    say: Say,
) -> None:
    """Fetch and place slices, some at a time, begun in order; `submit` runs what places one."""
    ended: queue.SimpleQueue[tuple[Transfer, Exception | None]] = queue.SimpleQueue()

    def finish(transfer: Transfer) -> None:
        error = transfer.error
        try:
            if error is None:
                place(transfer)
        except OSError as fault:
            error = UsageError(
                f"{target.url}: cannot write {transfer.info.name}: {fault}. Check the directory and its disk."
            )
        except Exception as fault:  # noqa: BLE001 - raised below
            error = fault
        ended.put((transfer, error))

    def hand_over(transfer: Transfer) -> None:
        try:
            submit(functools.partial(finish, transfer))
        except RuntimeError as error:  # no thread for it; or the pool was closed, as another slice failed
            ended.put((transfer, error))

    waiting = list(reversed(rows))
    under_way: dict[Transfer, int] = {}  # bytes told of
    num_bytes = 0
    while waiting or under_way:
        while waiting and len(under_way) < most and (
            not under_way or most_bytes is None or num_bytes + waiting[-1].bytes <= most_bytes
        ):  # fmt: skip
            row = waiting.pop()
            transfer = fetch(row, target.part_of(row.name))
            under_way[transfer], num_bytes = 0, num_bytes + row.bytes
            transfer.on_done(hand_over)
        try:
            transfer, error = ended.get(timeout=_LOOK_S)
        except queue.Empty:
            for transfer, told in under_way.items():
                if (received := transfer.received) != told:
                    under_way[transfer] = received
                    say(received - told)
            continue
        if error is not None:
            raise error
        num_bytes -= transfer.info.bytes
        say(transfer.info.bytes - under_way.pop(transfer))
