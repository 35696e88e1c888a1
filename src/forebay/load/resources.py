"""What a job needs of a node's disk and fetches in an epoch, by its order alone; and lanes that need less.

Used by the Loader, which refuses a run that would fetch the dataset several times an epoch, and by `forebay plan`.
Looks at each kind of node, that is at each set of lanes, and at two epochs: the first, which has a head, and another.
Cost: 0.3 s for 250 000 slices on one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from forebay.cache.eviction import part_bytes
from forebay.errors import UsageError
from forebay.order.plan import Order
from forebay.order.windows import Spans, lanes_of, node_spans, window_steps
from forebay.units import format_bytes

I64 = NDArray[np.int64]

COMMON_DISK_BYTES = 750 * 10**9  # What runs of this kind have; what lanes are made to fit where no room is named.
WARN_RATIO = 1.1  # Bytes fetched in an epoch, as a multiple of the dataset's, that are worth a warning.
MAX_RATIO = 1.5  # The loader refuses more than that, unless asked otherwise.
_AHEAD = 2  # Half of a cache may be what is fetched ahead, for which the loader evicts what is read last.
FREE_BYTES = 1 << 30  # What several nodes read of a small dataset, below that in all, is warned of but not refused.
_EPOCHS = 2


@dataclass(frozen=True)
class Job:
    """What is to be run, on what. Bytes, seconds, bytes per second; None: not known."""

    slice_bytes: I64  # int64 [S].
    slice_samples: I64  # int64 [S].
    global_batch: int
    seq_len: int | None = None  # None for rows.
    name: str = ""
    world_size: int = 1
    ranks_per_node: int = 1
    seed: int = 0
    epochs: int = 1
    lanes: int | None = None  # None: the loader's default, or less where that does not fit.
    window: int | None = None  # As `lanes`.
    head: int | None = None
    shuffle: bool = True
    drop_last: bool = False
    keep: str = "budget"
    cache_bytes: int | None = None  # Of a node's cache; None: what the plan proposes.
    volume_bytes: int | None = None  # What the disk of the cache has for it.
    mem_bytes: int | None = None  # Of a node.
    bandwidth: float | None = None
    step_s: float | None = None  # A step of training, without waiting.
    connections: int = 16
    prefetch: int = 0
    piece_bytes: int = 8 << 20
    whole_in_memory: bool = False  # The cache lies in memory (`cache_dir="ram"`).
    # The most bytes that all nodes fetch in an epoch, as a multiple of the dataset's; None or 0: any.
    max_fetch_ratio: float | None = MAX_RATIO
    swarm: bool = False  # Nodes fetch from each other: what several nodes read does not count as fetched several times.

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

    @property
    def num_bytes(self) -> int:
        """Of the slices that have samples."""
        return int(self.slice_bytes[self.slice_samples > 0].sum())

    @property
    def part_bytes(self) -> int:
        """What a slice that is being fetched takes beside its bytes."""
        largest = int(self.slice_bytes.max())
        return part_bytes(largest) - largest

    def order(self, lanes: int | None = None, window: int | None = None, head: int | None = None) -> Order:
        """Its order, with the lanes, window and head given, or its own."""
        return Order(
            self.slice_samples, self.seed, self.global_batch, lanes or self.lanes, window or self.window,
            self.shuffle, self.drop_last, self.head if head is None else head,
        )  # fmt: skip


@dataclass(frozen=True)
class Disk:
    """Of the node that needs most, in slices and bytes."""

    open_slices: int  # Of the windows open at once.
    open_bytes: int
    next_slices: int  # With those of the next windows: what to have for never waiting.
    next_bytes: int
    once_bytes: int  # Less than this must fetch slices twice in an epoch; the loader fetches none twice with double.
    least_bytes: int  # The least cache: the open windows, and what a slice under way takes besides.
    epoch_slices: int  # Different slices read in an epoch.
    epoch_bytes: int
    least_epoch_slices: int  # Of the node that reads fewest.
    again_slices: int  # Read at times far apart, as they lie in several lanes, in an epoch.
    again_bytes: int  # Of these: what a cache below twice `once_bytes` may fetch again.
    origin_bytes: int  # What all nodes fetch in an epoch.
    exact: bool  # Lanes are not shared between nodes; else these are upper bounds.


@dataclass(frozen=True)
class Node:
    """A kind of node."""

    count: int  # Nodes of the kind.
    disk: Disk  # What each needs.
    spans: Spans  # Of the epochs looked at.


def nodes_of(job: Job, order: Order) -> list[Node]:
    """What an order needs on each kind of node; looks at up to two epochs."""
    sizes, ones = job.slice_bytes, np.ones(len(job.slice_bytes), np.int64)
    lead = window_steps(order)
    nodes = []
    for ranks, count in _kinds_of_node(job, order):
        epochs = [node_spans(order, ranks, job.world_size, first_epoch=at) for at in range(min(job.epochs, _EPOCHS))]
        spans = epochs[0] if len(epochs) == 1 else node_spans(order, ranks, job.world_size, epochs=len(epochs))
        ahead = spans.prefetched(lead)
        of_epoch, once_bytes, again = [], 0, (0, 0)
        for one in epochs:
            once = one.once()
            of_epoch.append((int(sizes[once.slices].sum()), len(once.slices)))
            once_bytes = max(once_bytes, once.peak(sizes)[0])
            again = max(again, (len(one.slices) - len(once.slices), int(sizes[one.slices].sum()) - of_epoch[-1][0]))
        open_bytes = spans.peak(sizes)[0]
        disk = Disk(
            spans.peak(ones)[0], open_bytes, ahead.peak(ones)[0], ahead.peak(sizes)[0], once_bytes,
            open_bytes + job.part_bytes, max(n for _, n in of_epoch), max(b for b, _ in of_epoch),
            min(n for _, n in of_epoch), *again, max(b for b, _ in of_epoch) * count, spans.exact,
        )  # fmt: skip
        nodes.append(Node(count, disk, spans))
    return nodes


def worst_of(nodes: list[Node]) -> tuple[Disk, Spans]:
    """The most of each figure, and the spans of the node that has most open."""
    disks = [node.disk for node in nodes]
    worst = max(nodes, key=lambda node: (node.disk.open_bytes, node.disk.next_bytes))
    largest = ("next_slices", "next_bytes", "once_bytes", "epoch_slices", "epoch_bytes", "again_slices", "again_bytes")
    disk = replace(
        worst.disk,
        **{name: max(getattr(one, name) for one in disks) for name in largest},
        least_epoch_slices=min(one.least_epoch_slices for one in disks),
        origin_bytes=sum(one.origin_bytes for one in disks),
        exact=all(one.exact for one in disks),
    )
    return disk, worst.spans


def refetched_bytes(job: Job, node: Node, cache_bytes: int) -> int:
    """About how much a node fetches again in an epoch with a cache of so many bytes.

    With less than twice `once_bytes`: slices that lie in several lanes. With less than the open windows, also at each
    step the part of the slices it reads for which the cache has no room.
    """
    disk = node.disk
    if cache_bytes >= job.num_bytes + job.part_bytes:
        return 0
    again = 0
    if disk.again_bytes and cache_bytes < _AHEAD * disk.once_bytes:
        # Slices of other sizes than those that the plan chose may be the ones to come again.
        again = disk.again_bytes + int(job.slice_bytes.max())
    room = max(0, cache_bytes - job.part_bytes)
    return again + (_thrashed(job, node.spans, room) if room < disk.open_bytes else 0)


def _thrashed(job: Job, spans: Spans, room: int) -> int:
    weights = job.slice_bytes[spans.slices]
    at = np.concatenate([spans.first, spans.last + 1])
    turn = np.argsort(at, kind="stable")
    opened = np.cumsum(np.concatenate([weights, -weights])[turn]).astype(np.float64)
    slices = np.cumsum(np.concatenate([np.ones_like(weights), -np.ones_like(weights)])[turn])
    steps = np.diff(at[turn], append=at[turn[-1]])
    over = (opened > room) & (steps > 0)
    per_step = -(-job.global_batch * job.ranks_per_node // job.world_size)
    read = np.minimum(per_step, slices[over]) / slices[over] * opened[over]
    return int((steps[over] * read * (1 - room / opened[over])).sum() / min(job.epochs, _EPOCHS))


def fetch_ratio(job: Job, nodes: list[Node], cache_bytes: int) -> float:
    """Bytes that all nodes fetch in an epoch, as a multiple of those of the slices that have samples."""
    again = sum(node.count * refetched_bytes(job, node, cache_bytes) for node in nodes)
    first = sum(node.disk.origin_bytes for node in nodes)
    return ((min(first, job.num_bytes) if job.swarm else first) + again) / job.num_bytes


def check_traffic(job: Job, order: Order, nodes: list[Node] | None = None) -> str | None:
    """A warning if a job fetches more than 1.1 times its dataset in an epoch; None if it does not.

    More than `max_fetch_ratio` times is refused, unless that is since several nodes read the same slices and they fetch
    less than 1 GiB again.
    """
    cache = job.cache_bytes
    assert cache is not None
    nodes = nodes_of(job, order) if nodes is None else nodes
    ratio = fetch_ratio(job, nodes, cache)
    if ratio <= WARN_RATIO:
        return None
    most = job.max_fetch_ratio
    of_node = replace(job, swarm=True)
    small = (ratio - 1) * job.num_bytes < FREE_BYTES and fetch_ratio(of_node, nodes, cache) <= (most or 0)
    refused = bool(most) and ratio > (most or 0) and not small
    text = (
        f"fetched bytes: expected at most {most if refused else WARN_RATIO} times the dataset's "
        f"{format_bytes(job.num_bytes)} in an epoch, got about {ratio:.3g} times "
        f"({_cause(job, order, nodes, cache)}). {_advice(job, nodes, ratio)}"
    )
    if refused:
        raise UsageError(text)
    return text


def _cause(job: Job, order: Order, nodes: list[Node], cache: int) -> str:
    disk, where = worst_of(nodes)[0], f"lanes={order.num_lanes}, window={order.window_samples}"
    if cache < disk.least_bytes:
        opened = f"{disk.open_slices} slices, {format_bytes(disk.open_bytes)}"
        return f"cache_bytes={cache:,} is less than the {opened}, that {where} keep open"
    if sum(node.disk.origin_bytes for node in nodes) > WARN_RATIO * job.num_bytes and not job.swarm:
        return f"{job.num_nodes} nodes without a common cache, {where}"
    return f"{disk.again_slices} slices are read at times far apart: {where}, cache_bytes={cache:,}"


def _advice(job: Job, nodes: list[Node], ratio: float) -> str:
    """Lanes or a cache that fetch less, tried by the same figures."""
    found = []
    enough = max(WARN_RATIO, min(job.max_fetch_ratio or MAX_RATIO, ratio - WARN_RATIO + 1))
    best = min(_tried(job), default=None, key=lambda one: (one[0] > WARN_RATIO and one[0], one[1]))
    if best is not None and best[0] <= enough:
        found.append(f"{best[2]} ({best[0]:.3g} times)")
    disk = worst_of(nodes)[0]
    whole = job.num_bytes + job.part_bytes
    for cache in (disk.least_bytes, disk.next_bytes + job.part_bytes, min(_AHEAD * disk.once_bytes, whole)):
        of_cache = fetch_ratio(job, nodes, cache)
        if of_cache <= WARN_RATIO:
            found.append(f"cache_bytes={cache} ({of_cache:.3g} times)")
            break
    found = found or ["sharding='hash', smaller slices (--slice-bytes) or fewer nodes: no lanes fetch less"]
    return f"Use {', or '.join(found)}; or allow it with max_fetch_ratio={np.ceil(10 * ratio) / 10:g}."


def _tried(job: Job) -> Iterator[tuple[float, int, str]]:
    """(ratio, how much it differs from the default, arguments) of orders with other lanes, windows and heads."""
    assert job.cache_bytes is not None
    usual = job.order()
    choices = [*_narrower(job, usual), *((job.num_nodes * k, usual.window_samples) for k in (1, 2, 4))]
    lanes_given = [(lanes, window) for lanes, window in choices if lanes <= max(1, job.global_batch)]
    for cost, (lanes, window) in enumerate(dict.fromkeys(lanes_given)):
        for head in (None, 0):
            order = job.order(lanes, window, head)
            ratio = fetch_ratio(job, nodes_of(job, order), job.cache_bytes)
            text = f"lanes={lanes}" + f", window={window}" * (window != usual.window_samples) + ", head=0" * (head == 0)
            yield ratio, 2 * cost + (head == 0), text
            if ratio <= WARN_RATIO:
                return


def _kinds_of_node(job: Job, order: Order) -> Iterator[tuple[tuple[int, int], int]]:
    """(ranks, how many nodes are like it): nodes that read the same lanes are alike."""
    per_node = job.ranks_per_node
    if not order.shuffle:
        chosen = sorted({0, job.num_nodes - 1})  # All nodes read every slice that is longer than a batch.
        for at, node in enumerate(chosen):
            yield (node * per_node, (node + 1) * per_node), (job.num_nodes - len(chosen) + 1 if at == 0 else 1)
        return
    kinds: dict[bytes, list[int]] = {}
    for node in range(job.num_nodes):
        touched, at_end, _ = lanes_of(order, (node * per_node, (node + 1) * per_node), job.world_size)
        kinds.setdefault(touched.tobytes() + at_end.tobytes(), []).append(node)
    for alike in kinds.values():
        yield (alike[0] * per_node, (alike[0] + 1) * per_node), len(alike)


def fitting(job: Job) -> tuple[Order, list[Node]]:
    """The order asked for; where lanes and window are the plan's to choose, the most lanes that fit the room."""
    order = job.order()
    nodes = nodes_of(job, order)
    room = COMMON_DISK_BYTES if job.room is None else job.room
    if job.lanes is not None or job.window is not None or not job.shuffle or worst_of(nodes)[0].next_bytes <= room:
        return order, nodes
    tried = [(order, nodes)]
    for lanes, window in _narrower(job, order):
        one = job.order(lanes, window)
        tried.append((one, nodes_of(job, one)))
        if worst_of(tried[-1][1])[0].next_bytes <= room:
            return tried[-1]
    least = [worst_of(nodes)[0].least_bytes for _, nodes in tried]
    return next((one for one, size in zip(tried, least) if size <= room), tried[least.index(min(least))])


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
