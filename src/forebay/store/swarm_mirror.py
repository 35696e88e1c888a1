"""A mirror that takes part in the swarm: what came is handed out while the rest comes."""

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.dataset.manifest import SliceInfo
from forebay.errors import UsageError
from forebay.network.limits import Throttle
from forebay.store.joining import SwarmMember
from forebay.store.mirror import MirrorReport, mirror
from forebay.store.origins import Origin, at_most
from forebay.store.remote import RemoteDataset
from forebay.store.share import Folder
from forebay.store.swarm import SteeredTransfer
from forebay.store.targets import Target

_AT_ONCE = 1024  # slices that the trackers are told of
_LOOK_S, _MOST_LOOK_S = 0.1, 2.0  # whether all have all: often at first, as they mostly end together


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
    on_progress: Callable[[int], object] | None = None,
) -> tuple[MirrorReport, dict[str, Any]]:
    """As `mirror`, of `forebay://` to a directory; and the swarm's figures.

    Args:
        share: See SwarmMember.
        linger_s: How long to go on sharing at the end, at most; until all who share have all.

    Raises:
        UsageError: If the target is no directory, or the dataset is of no network. Others as of `mirror`.
    """
    if "://" in target.url:
        raise UsageError(f"mirror: expected a directory to share from, got {target.url}. Leave out --share.")
    folder, held = Folder(), np.zeros(dataset.num_slices, np.bool_)
    throttle = Throttle(upload_bytes_per_s) if upload_bytes_per_s is not None else None
    with SwarmMember(dataset, folder, held.copy, share=share, throttle=throttle, connections=connections) as member:

        def copy(absent: list[SliceInfo], there: list[SliceInfo], say: Callable[[int], object]) -> None:
            for row in there:
                folder.put(row.sha256, Path(target.url) / row.name)
                held[row.index] = True
            _copy(member, target, folder, held, absent, say)

        kept = RemoteDataset(_Kept(dataset.origin, member.files), dataset.manifest, dataset.table, dataset.id)
        report = mirror(kept, target, start=start, stop=stop, on_progress=on_progress, copy=copy)
        until, look_s = time.monotonic() + (linger_s if share else 0.0), _LOOK_S
        while time.monotonic() < until and not member.reader.settled:
            member.reader.ask_soon()
            time.sleep(look_s)
            look_s = min(2 * look_s, _MOST_LOOK_S)
        shared = member.share.bytes_sent if member.share is not None else 0
        return report, {**member.reader.stats(), "bytes_shared": shared}


class _Kept:
    """An origin whose small files are here already: it may be gone when they are written."""

    def __init__(self, origin: Origin, files: Mapping[str, bytes]) -> None:
        self.url = origin.url
        self._origin = origin
        self._files = files

    def read(self, name: str, start: int, stop: int) -> Iterator[memoryview]:
        """See Origin."""
        return self._origin.read(name, start, stop)

    def get(self, name: str, max_bytes: int) -> bytes:
        """See Origin."""
        data = self._files.get(name)
        return self._origin.get(name, max_bytes) if data is None else at_most(data, max_bytes, name)

    def sources(self) -> Sequence[Origin]:
        """See Origin."""
        return self._origin.sources()


def _copy(
    member: SwarmMember,
    target: Target,
    folder: Folder,
    held: NDArray[np.bool_],
    rows: list[SliceInfo],
    say: Callable[[int], object],
) -> None:
    """Fetch slices in whatever order the swarm gives them, and place each."""
    ended: queue.SimpleQueue[tuple[SliceInfo, Exception | None]] = queue.SimpleQueue()

    def place(transfer: SteeredTransfer) -> None:
        row, error = transfer.info, transfer.error
        if error is None:
            try:
                target.place(row.name, transfer.part, row.sha256)
                folder.put(row.sha256, Path(target.url) / row.name)
                held[row.index] = True
            except OSError as fault:
                error = UsageError(f"{target.url}: cannot write {row.name}: {fault}. Check the directory and its disk.")
        ended.put((row, error))

    waiting, under_way = list(reversed(rows)), 0
    while waiting or under_way:
        while waiting and under_way < _AT_ONCE:
            row = waiting.pop()
            member.reader.fetch(row.index, target.part_of(row.name)).on_done(place)
            under_way += 1
        row, error = ended.get()
        under_way -= 1
        if error is not None:
            raise error
        say(row.bytes)
