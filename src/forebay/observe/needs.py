"""What a job needs of a node's disk, by its order alone; and lanes that need less.

Looks at each kind of node, that is at each set of lanes, and at two epochs: the first, which has a head, and another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from forebay.errors import UsageError
from forebay.order.plan import Order
from forebay.order.windows import Spans, lanes_of, node_spans, window_steps
from forebay.store.room import part_bytes

I64 = NDArray[np.int64]

COMMON_DISK_BYTES = 750 * 10**9  # What runs of this kind have; what lanes are made to fit where no room is named.
_EPOCHS = 2
_NODES_IN_ORDER = 2  # Looked at where nothing is shuffled: all read every slice that is longer than a batch.


@dataclass(frozen=True)
class Job:
    """What is to be run, on what. Bytes, seconds, bytes per second; None: not known.

    Args:
        slice_bytes, slice_samples: int64 [S].
        seq_len: None for rows.
        lanes, window: None: the loader's default, or less where that does not fit.
        cache_bytes: Of a node's cache; None: what the plan proposes.
        volume_bytes: What the disk of the cache has for it.
        mem_bytes: Of a node.
        step_s: A step of training, without waiting.
        whole_in_memory: The cache lies in memory (`cache_dir="ram"`).
    """

    slice_bytes: I64
    slice_samples: I64
    global_batch: int
    seq_len: int | None = None
    name: str = ""
    world_size: int = 1
    ranks_per_node: int = 1
    seed: int = 0
    epochs: int = 1
    lanes: int | None = None
    window: int | None = None
    head: int | None = None
    shuffle: bool = True
    drop_last: bool = False
    keep: str = "budget"
    cache_bytes: int | None = None
    volume_bytes: int | None = None
    mem_bytes: int | None = None
    bandwidth: float | None = None
    step_s: float | None = None
    connections: int = 16
    prefetch: int = 0
    piece_bytes: int = 8 << 20
    whole_in_memory: bool = False

    def __post_init__(self) -> None:
        if self.world_size % self.ranks_per_node:
            raise UsageError(
                f"ranks_per_node: expected a divisor of the world size {self.world_size}, got {self.ranks_per_node}."
            )
        if not len(self.slice_samples) or not int(self.slice_samples.sum()):
            raise UsageError("plan: expected samples, got none. Ask for shorter samples (seq_len), or check the sizes.")

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def room(self) -> int | None:
        """What a cache may take: its budget or its volume, whichever is less."""
        known = [size for size in (self.cache_bytes, self.volume_bytes) if size is not None]
        return min(known) if known else None

    def order(self, lanes: int | None = None, window: int | None = None) -> Order:
        """Its order, with the lanes and window given, or its own."""
        return Order(
            self.slice_samples, self.seed, self.global_batch, lanes or self.lanes, window or self.window,
            self.shuffle, self.drop_last, self.head,
        )  # fmt: skip


@dataclass(frozen=True)
class Disk:
    """Of the node that needs most, in slices and bytes.

    Attributes:
        open_slices, open_bytes: Of the windows open at once.
        next_slices, next_bytes: With those of the next windows: what to have for never waiting.
        once_bytes: Less than this must fetch slices twice in an epoch; the loader fetches none twice with double.
        least_bytes: The least cache: the open windows, and what a slice under way takes besides.
        epoch_slices, epoch_bytes: Different slices read in an epoch.
        least_epoch_slices: Of the node that reads fewest.
        again_slices, again_bytes: Of slices that an epoch reads at times far apart, as they lie in several lanes: what
            a cache below twice `once_bytes` may fetch again.
        origin_bytes: What all nodes fetch in an epoch.
        exact: Lanes are not shared between nodes; else these are upper bounds.
    """

    open_slices: int
    open_bytes: int
    next_slices: int
    next_bytes: int
    once_bytes: int
    least_bytes: int
    epoch_slices: int
    epoch_bytes: int
    least_epoch_slices: int
    again_slices: int
    again_bytes: int
    origin_bytes: int
    exact: bool


def measure(job: Job, order: Order) -> tuple[Disk, Spans]:
    """What an order needs on each node, and the spans of the node that has most open; of up to two epochs."""
    sizes, ones = job.slice_bytes, np.ones(len(job.slice_bytes), np.int64)
    lead = window_steps(order)
    disks: list[tuple[int, Disk, Spans]] = []
    for ranks, count in _kinds_of_node(job, order):
        spans = node_spans(order, ranks, job.world_size, epochs=min(job.epochs, _EPOCHS))
        ahead = spans.ahead(lead)
        of_epoch, once_bytes, again = [], 0, (0, 0)
        for epoch in range(min(job.epochs, _EPOCHS)):
            one = node_spans(order, ranks, job.world_size, first_epoch=epoch)
            once = one.once()
            of_epoch.append((int(sizes[once.slices].sum()), len(once.slices)))
            once_bytes = max(once_bytes, once.peak(sizes)[0])
            again = max(again, (len(one.slices) - len(once.slices), int(sizes[one.slices].sum()) - of_epoch[-1][0]))
        open_bytes = spans.peak(sizes)[0]
        overhead = part_bytes(int(sizes.max())) - int(sizes.max())
        disk = Disk(
            spans.peak(ones)[0], open_bytes, ahead.peak(ones)[0], ahead.peak(sizes)[0], once_bytes,
            open_bytes + overhead, max(n for _, n in of_epoch), max(b for b, _ in of_epoch),
            min(n for _, n in of_epoch), *again, max(b for b, _ in of_epoch) * count, spans.exact,
        )  # fmt: skip
        disks.append((count, disk, spans))
    worst = max(disks, key=lambda one: (one[1].open_bytes, one[1].next_bytes))
    disk = replace(
        worst[1],
        next_slices=max(one.next_slices for _, one, _ in disks),
        next_bytes=max(one.next_bytes for _, one, _ in disks),
        once_bytes=max(one.once_bytes for _, one, _ in disks),
        epoch_slices=max(one.epoch_slices for _, one, _ in disks),
        epoch_bytes=max(one.epoch_bytes for _, one, _ in disks),
        least_epoch_slices=min(one.least_epoch_slices for _, one, _ in disks),
        again_slices=max(one.again_slices for _, one, _ in disks),
        again_bytes=max(one.again_bytes for _, one, _ in disks),
        origin_bytes=sum(one.origin_bytes for _, one, _ in disks),
        exact=all(one.exact for _, one, _ in disks),
    )
    return disk, worst[2]


def _kinds_of_node(job: Job, order: Order) -> Iterator[tuple[tuple[int, int], int]]:
    """(ranks, how many nodes are like it): nodes that read the same lanes are alike."""
    per_node = job.ranks_per_node
    nodes = range(job.num_nodes)
    if not order.shuffle:
        chosen = sorted({0, job.num_nodes - 1})[:_NODES_IN_ORDER]
        for at, node in enumerate(chosen):
            yield (node * per_node, (node + 1) * per_node), (job.num_nodes - len(chosen) + 1 if at == 0 else 1)
        return
    kinds: dict[bytes, list[int]] = {}
    for node in nodes:
        touched, at_end, _ = lanes_of(order, (node * per_node, (node + 1) * per_node), job.world_size)
        kinds.setdefault(touched.tobytes() + at_end.tobytes(), []).append(node)
    for alike in kinds.values():
        yield (alike[0] * per_node, (alike[0] + 1) * per_node), len(alike)


def fitting(job: Job) -> tuple[Order, Disk, Spans]:
    """The order asked for; where lanes and window are the plan's to choose, the most lanes that fit the room."""
    order = job.order()
    disk, spans = measure(job, order)
    room = COMMON_DISK_BYTES if job.room is None else job.room
    if job.lanes is not None or job.window is not None or not job.shuffle or disk.next_bytes <= room:
        return order, disk, spans
    tried = [(order, disk, spans)]
    for lanes, window in _narrower(job, order):
        one = job.order(lanes, window)
        tried.append((one, *measure(job, one)))
        if tried[-1][1].next_bytes <= room:
            return tried[-1]
    fits = [one for one in tried if one[1].least_bytes <= room]
    return fits[0] if fits else min(tried, key=lambda one: one[1].least_bytes)


def _narrower(job: Job, order: Order) -> Iterator[tuple[int, int]]:
    """(lanes, window) that open less and less: fewer lanes, down to one a node; windows of a slice; one lane."""
    lanes = order.num_lanes
    slice_samples = int(job.slice_samples.max())
    while lanes > job.num_nodes:
        lanes = max(job.num_nodes, lanes // 2)
        yield lanes, order.window_samples
    yield lanes, slice_samples
    if lanes > 1:
        yield 1, order.window_samples
        yield 1, slice_samples
