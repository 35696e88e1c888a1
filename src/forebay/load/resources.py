"""What a run needs of a node's disk and fetches in an epoch, computed from its order; and lanes that need less.

The Loader uses it to refuse a run that fetches the dataset several times an epoch, `forebay plan` to print figures.
Computed for each kind of node (set of lanes) and two epochs: the first, which has a head, and another. Cost: 0.3 s for
250 000 slices on one node.
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

COMMON_DISK_BYTES = 750 * 10**9  # The disk that lanes are made to fit if none is given.
WARN_RATIO = 1.1  # Bytes fetched in an epoch, as a multiple of the dataset's, from which on there is a warning.
MAX_RATIO = 1.5  # The default limit of the Loader.
_READAHEAD = 2  # Up to half of a cache is used for slices fetched ahead, for which the last read ones are evicted.
FREE_BYTES = 1 << 30  # Slices that several nodes read cause a warning only, below this many bytes in all.
_EPOCHS = 2


@dataclass(frozen=True)
class RunSpec:
    """A run and its nodes. Bytes, seconds, bytes per second; None: not known."""

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
    cache_bytes: int | None = None  # Of a node's cache; None: what the plan proposes.
    volume_bytes: int | None = None  # Of the cache's disk.
    mem_bytes: int | None = None  # Of a node.
    bandwidth: float | None = None
    step_s: float | None = None  # A step of training, without waiting.
    connections: int = 16
    prefetch: int = 0
    piece_bytes: int = 8 << 20
    whole_in_memory: bool = False  # The cache is in memory (`cache="ram"`).
    max_fetch_ratio: float | None = MAX_RATIO  # Limit of bytes fetched by all nodes in an epoch / the dataset's; or 0.
    swarm: bool = False  # Nodes fetch from each other: slices that several nodes read are fetched once.

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
    def cache_limit(self) -> int | None:
        limits = [size for size in (self.cache_bytes, self.volume_bytes) if size is not None]
        return min(limits) if limits else None

    @property
    def num_bytes(self) -> int:
        return int(self.slice_bytes[self.slice_samples > 0].sum())

    @property
    def part_bytes(self) -> int:
        largest = int(self.slice_bytes.max())
        return part_bytes(largest) - largest

    def order(self, lanes: int | None = None, window: int | None = None, head: int | None = None) -> Order:
        """The order with these lanes, window and head; by default the run's own."""
        return Order(
            self.slice_samples, self.seed, self.global_batch, lanes or self.lanes, window or self.window,
            self.shuffle, self.drop_last, self.head if head is None else head,
        )  # fmt: skip


@dataclass(frozen=True)
class CacheNeeds:
    """What one node needs, in slices and bytes."""

    open_slices: int  # Of the windows open at once.
    open_bytes: int
    next_slices: int  # With those of the next windows: enough for never waiting.
    next_bytes: int
    once_bytes: int  # A smaller cache must fetch slices twice in an epoch; with twice as much none is.
    least_bytes: int  # The smallest cache: the open windows, and what a slice in transfer occupies besides.
    epoch_slices: int  # Different slices read in an epoch.
    epoch_bytes: int
    least_epoch_slices: int  # Of the node that reads fewest.
    again_slices: int  # Read at distant steps of an epoch, as they are in several lanes.
    again_bytes: int  # A cache below twice `once_bytes` may fetch these again.
    origin_bytes: int  # Fetched in an epoch by all nodes of the kind.
    exact: bool  # Nodes share no lanes; else these are upper bounds.


@dataclass(frozen=True)
class NodeNeeds:
    """The needs of `count` nodes of one kind."""

    count: int
    cache: CacheNeeds
    spans: Spans  # Of the epochs computed.


def needs_of_nodes(spec: RunSpec, order: Order) -> list[NodeNeeds]:
    """The needs of each kind of node."""
    sizes, ones = spec.slice_bytes, np.ones(len(spec.slice_bytes), np.int64)
    nodes = []
    for ranks, count in _node_kinds(spec, order):
        epochs = [node_spans(order, ranks, spec.world_size, first_epoch=i) for i in range(min(spec.epochs, _EPOCHS))]
        spans = epochs[0] if len(epochs) == 1 else node_spans(order, ranks, spec.world_size, epochs=len(epochs))
        prefetched = spans.prefetched(window_steps(order))
        once = [epoch.once() for epoch in epochs]
        num_slices = [len(epoch.slices) for epoch in once]
        num_bytes = [int(sizes[epoch.slices].sum()) for epoch in once]
        again = max(
            (len(epoch.slices) - slices, int(sizes[epoch.slices].sum()) - size)
            for epoch, slices, size in zip(epochs, num_slices, num_bytes)
        )
        open_bytes = spans.peak(sizes)[0]
        cache = CacheNeeds(
            spans.peak(ones)[0], open_bytes, prefetched.peak(ones)[0], prefetched.peak(sizes)[0],
            max(epoch.peak(sizes)[0] for epoch in once), open_bytes + spec.part_bytes, max(num_slices), max(num_bytes),
            min(num_slices), *again, max(num_bytes) * count, spans.exact,
        )  # fmt: skip
        nodes.append(NodeNeeds(count, cache, spans))
    return nodes


def largest_needs(nodes: list[NodeNeeds]) -> tuple[CacheNeeds, Spans]:
    """The maximum of each figure, and the spans of the node that has most open."""
    caches = [node.cache for node in nodes]
    largest = max(nodes, key=lambda node: (node.cache.open_bytes, node.cache.next_bytes))
    maxima = ("next_slices", "next_bytes", "once_bytes", "epoch_slices", "epoch_bytes", "again_slices", "again_bytes")
    cache = replace(
        largest.cache,
        **{name: max(getattr(cache, name) for cache in caches) for name in maxima},
        least_epoch_slices=min(cache.least_epoch_slices for cache in caches),
        origin_bytes=sum(cache.origin_bytes for cache in caches),
        exact=all(cache.exact for cache in caches),
    )
    return cache, largest.spans


def refetched_bytes(spec: RunSpec, node: NodeNeeds, cache_bytes: int) -> int:
    """An estimate of what a node with this cache fetches again in an epoch.

    Below twice `once_bytes`: slices that are in several lanes. Below the open windows, also at each step the part of
    the slices it reads that does not fit the cache.
    """
    cache = node.cache
    if cache_bytes >= spec.num_bytes + spec.part_bytes:
        return 0
    again = 0
    if cache.again_bytes and cache_bytes < _READAHEAD * cache.once_bytes:
        # Slices of other sizes than the plan's may be the ones that are fetched again.
        again = cache.again_bytes + int(spec.slice_bytes.max())
    capacity = max(0, cache_bytes - spec.part_bytes)
    return again + (_thrashed_bytes(spec, node.spans, capacity) if capacity < cache.open_bytes else 0)


def _thrashed_bytes(spec: RunSpec, spans: Spans, capacity: int) -> int:
    weights = spec.slice_bytes[spans.slices]
    edges = np.concatenate([spans.first, spans.last + 1])
    order = np.argsort(edges, kind="stable")
    opened = np.cumsum(np.concatenate([weights, -weights])[order]).astype(np.float64)
    slices = np.cumsum(np.concatenate([np.ones_like(weights), -np.ones_like(weights)])[order])
    steps = np.diff(edges[order], append=edges[order[-1]])
    over = (opened > capacity) & (steps > 0)
    per_step = -(-spec.global_batch * spec.ranks_per_node // spec.world_size)
    read = np.minimum(per_step, slices[over]) / slices[over] * opened[over]
    return int((steps[over] * read * (1 - capacity / opened[over])).sum() / min(spec.epochs, _EPOCHS))


def fetch_ratio(spec: RunSpec, nodes: list[NodeNeeds], cache_bytes: int) -> float:
    """Bytes that all nodes fetch in an epoch / bytes of the slices that have samples."""
    again = sum(node.count * refetched_bytes(spec, node, cache_bytes) for node in nodes)
    first = sum(node.cache.origin_bytes for node in nodes)
    return ((min(first, spec.num_bytes) if spec.swarm else first) + again) / spec.num_bytes


def check_traffic(spec: RunSpec, order: Order, nodes: list[NodeNeeds]) -> str | None:
    """A warning if a run fetches more than 1.1 times its dataset in an epoch, else None.

    Raises:
        UsageError: If it fetches more than `max_fetch_ratio` times the dataset; unless the reason is that several nodes
            read the same slices, of less than 1 GiB in all.
    """
    cache_bytes, limit = spec.cache_bytes, spec.max_fetch_ratio or 0
    assert cache_bytes is not None
    ratio = fetch_ratio(spec, nodes, cache_bytes)
    if ratio <= WARN_RATIO:
        return None
    is_small = (ratio - 1) * spec.num_bytes < FREE_BYTES
    refused = 0 < limit < ratio and not (
        is_small and fetch_ratio(replace(spec, swarm=True), nodes, cache_bytes) <= limit
    )
    text = (
        f"fetched bytes: expected at most {limit if refused else WARN_RATIO} times the dataset's "
        f"{format_bytes(spec.num_bytes)} in an epoch, got about {ratio:.3g} times "
        f"({_cause(spec, order, nodes, cache_bytes)}). {_advice(spec, nodes, ratio)}"
    )
    if refused:
        raise UsageError(text)
    return text


def _cause(spec: RunSpec, order: Order, nodes: list[NodeNeeds], cache_bytes: int) -> str:
    needs, lanes = largest_needs(nodes)[0], f"lanes={order.num_lanes}, window={order.window_samples}"
    if cache_bytes < needs.least_bytes:
        opened = f"{needs.open_slices} slices, {format_bytes(needs.open_bytes)}"
        return f"cache_bytes={cache_bytes:,} is less than the {opened}, that {lanes} keep open"
    if sum(node.cache.origin_bytes for node in nodes) > WARN_RATIO * spec.num_bytes and not spec.swarm:
        return f"{spec.num_nodes} nodes without a common cache, {lanes}"
    return f"{needs.again_slices} slices are read at distant steps: {lanes}, cache_bytes={cache_bytes:,}"


def _advice(spec: RunSpec, nodes: list[NodeNeeds], ratio: float) -> str:
    assert spec.cache_bytes is not None
    choices = []
    if spec.num_nodes <= spec.global_batch:  # With a lane for each node no two nodes read the same slice.
        fewest = fetch_ratio(spec, needs_of_nodes(spec, spec.order(spec.num_nodes, head=0)), spec.cache_bytes)
        if fewest <= max(WARN_RATIO, min(spec.max_fetch_ratio or MAX_RATIO, ratio - WARN_RATIO + 1)):
            choices.append(f"lanes={spec.num_nodes}, head=0 ({fewest:.3g} times)")
    needs, all_bytes = largest_needs(nodes)[0], spec.num_bytes + spec.part_bytes
    for size in (needs.least_bytes, needs.next_bytes + spec.part_bytes, min(_READAHEAD * needs.once_bytes, all_bytes)):
        if (new_ratio := fetch_ratio(spec, nodes, size)) <= WARN_RATIO:
            choices.append(f"cache_bytes={size} ({new_ratio:.3g} times)")
            break
    choices = choices or ["assignment='owned', smaller slices (--slice-bytes) or fewer nodes: no lanes fetch less"]
    return f"Use {', or '.join(choices)}; or allow it with max_fetch_ratio={np.ceil(10 * ratio) / 10:g}."


def _node_kinds(spec: RunSpec, order: Order) -> Iterator[tuple[tuple[int, int], int]]:
    """(ranks of one node, number of nodes like it): nodes that read the same lanes are alike."""
    per_node = spec.ranks_per_node
    kinds: dict[bytes, list[int]] = {}
    if not order.shuffle:  # All nodes read every slice that is longer than a batch.
        last = spec.num_nodes - 1
        kinds = {b"first": list(range(max(1, last))), **({b"last": [last]} if last else {})}
    else:
        for node in range(spec.num_nodes):
            touched, at_end, _ = lanes_of(order, (node * per_node, (node + 1) * per_node), spec.world_size)
            kinds.setdefault(touched.tobytes() + at_end.tobytes(), []).append(node)
    for nodes in kinds.values():
        yield (nodes[0] * per_node, (nodes[0] + 1) * per_node), len(nodes)


def fit_lanes(spec: RunSpec) -> tuple[Order, list[NodeNeeds]]:
    """The run's order; if it leaves lanes and window open, with the most lanes whose windows fit the disk."""
    order = spec.order()
    nodes = needs_of_nodes(spec, order)
    limit = COMMON_DISK_BYTES if spec.cache_limit is None else spec.cache_limit
    is_fixed = spec.lanes is not None or spec.window is not None or not spec.shuffle
    if is_fixed or largest_needs(nodes)[0].next_bytes <= limit:
        return order, nodes
    tried = [(order, nodes)]
    for lanes, window in _narrower(spec, order):
        narrower = spec.order(lanes, window)
        tried.append((narrower, needs_of_nodes(spec, narrower)))
        if largest_needs(tried[-1][1])[0].next_bytes <= limit:
            return tried[-1]
    minima = [largest_needs(nodes)[0].least_bytes for _, nodes in tried]
    return next((pair for pair, size in zip(tried, minima) if size <= limit), tried[minima.index(min(minima))])


def _narrower(spec: RunSpec, order: Order) -> Iterator[tuple[int, int]]:
    lanes = order.num_lanes
    slice_samples = int(spec.slice_samples.max())
    while lanes > spec.num_nodes:
        lanes = max(spec.num_nodes, lanes // 2)
        yield lanes, order.window_samples
    yield lanes, slice_samples
    if lanes > 1:
        yield 1, order.window_samples
        yield 1, slice_samples
