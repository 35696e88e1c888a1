"""What a run needs of a node's disk and fetches in an epoch, from the shape of its order: arithmetic, without slices.

A lane goes through its part of the epoch's sequence once, window by window. So a node fetches the bytes of its lanes,
and at each edge of neighbouring lanes the chunk there once more. The Loader refuses a run that fetches its dataset
several times in an epoch; `forebay plan` prints the figures.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from forebay.arrays import BOOL, F64, I64
from forebay.dataset.chunks import chunk_size
from forebay.errors import UsageError
from forebay.order.plan import Order, SampleSize, part_of
from forebay.order.run import Run
from forebay.units import format_bytes

WARN_RATIO = 1.1  # Bytes fetched in an epoch, as a multiple of the dataset's, from which on there is a warning.
MAX_RATIO = 1.5  # The default limit of the Loader.
FREE_BYTES = 1 << 30  # What several nodes fetch twice causes a warning only, below this many bytes in all.
_EDGE_CHUNKS = 2  # At the edges of neighbouring lanes: a chunk of samples, and one with the header of the slice.
_COUNTED_AT = 0, 1_013, 5_003, 12_007  # The lanes of a mixture are counted from these steps on,
_COUNTED_SAMPLES = 1 << 15  # for as many steps as these samples take.
_COUNTED_DEMAND, _COUNTED_STEPS = 1 << 17, 4096  # Samples and steps, at most, whose chunks are counted.
_OPEN_CHUNKS = 2  # Beside its window, a lane has parts of so many chunks open.


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
    lanes: int | None = None  # None: the loader's default.
    window: int | None = None  # In samples; as `lanes`.
    shuffle: bool = True
    drop_last: bool = False
    chunk_bytes: int | None = None  # None: that of new datasets; 0: whole slices, as in format 1.
    cache_bytes: int | None = None  # Of a node's cache; None: what the plan proposes.
    volume_bytes: int | None = None  # Of the cache's disk.
    mem_bytes: int | None = None  # Of a node.
    bandwidth: float | None = None
    step_s: float | None = None  # A step of training, without waiting.
    connections: int = 16
    prefetch: int = 0
    whole_in_memory: bool = False  # The cache is in memory (`cache="ram"`).
    max_fetch_ratio: float | None = MAX_RATIO  # Limit of bytes fetched by all nodes in an epoch / the dataset's; or 0.
    swarm: bool = False  # Nodes fetch from each other: what several nodes read is fetched once.
    lanes_of_node: float | None = None  # In a mixture: the part of the lanes that a node reads, `lanes_of_nodes`.

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
    def num_bytes(self) -> int:
        """Of the slices that have samples."""
        return int(self.slice_bytes[self.slice_samples > 0].sum())

    @property
    def size(self) -> SampleSize:
        return sample_size(self.slice_bytes, self.slice_samples, self.chunk_bytes)

    def order(self) -> Order:
        return Order(
            self.slice_samples, self.seed, self.global_batch, self.lanes, self.window, self.shuffle, self.drop_last,
            self.size,
        )  # fmt: skip


def sample_size(slice_bytes: I64, slice_samples: I64, chunk_bytes: int | None) -> SampleSize:
    """The sizes that decide lanes and window by default, of a dataset's slices that have samples."""
    used = slice_samples > 0
    largest = int(slice_bytes.max(initial=1))
    chunk = chunk_size(largest) if chunk_bytes is None else chunk_bytes or largest
    return SampleSize(float(slice_bytes[used].sum()) / max(1, int(slice_samples.sum())), chunk)


@dataclass(frozen=True)
class NodeNeeds:
    """What each of `count` nodes with as many lanes needs, in bytes."""

    count: int
    num_lanes: int
    open_bytes: int  # The windows that are open at once.
    next_bytes: int  # With the next window of each lane: enough for never waiting.
    epoch_bytes: int  # Fetched in an epoch.
    again_bytes: int  # Fetched twice in an epoch if the cache is smaller than `epoch_bytes`.


def needs_of_nodes(spec: RunSpec, order: Order) -> list[NodeNeeds]:
    """The needs of each kind of node, the one with most lanes first."""
    size, total = spec.size, spec.num_bytes
    chunk = min(size.chunk_bytes, total)
    if not order.shuffle:
        return [_in_order(spec, order, chunk)]
    window_bytes = min(int(order.window_samples * size.sample_bytes), -(-total // order.num_lanes))
    nodes = []
    for lanes, num_runs, count in _kinds(spec, order):
        open_bytes = min(total, lanes * (window_bytes + _OPEN_CHUNKS * chunk))
        own_bytes = total * lanes // order.num_lanes
        nodes.append(
            NodeNeeds(
                count,
                lanes,
                open_bytes,
                min(total, open_bytes + lanes * window_bytes),
                min(total, own_bytes + num_runs * _EDGE_CHUNKS * chunk),
                max(0, lanes - num_runs) * chunk,
            )
        )
    return sorted(nodes, key=lambda node: -node.num_lanes)


def _in_order(spec: RunSpec, order: Order, chunk: int) -> NodeNeeds:
    """Without shuffling: a batch is consecutive, and each node reads the chunks of its part."""
    total, parts = spec.num_bytes, spec.num_nodes
    part_bytes = max(1, int(order.global_batch * spec.size.sample_bytes) // parts)
    epoch_bytes = total // parts if parts == 1 else min(total, total // parts * (part_bytes + chunk) // part_bytes)
    open_bytes = min(total, part_bytes + 2 * chunk)
    return NodeNeeds(parts, 1, open_bytes, min(total, 2 * open_bytes), epoch_bytes, 0)


def _kinds(spec: RunSpec, order: Order) -> Iterator[tuple[int, int, int]]:
    """(lanes of a node, runs of neighbouring lanes, number of such nodes)."""
    lanes, batch, kinds = order.num_lanes, order.global_batch, dict[tuple[int, int], int]()
    if spec.lanes_of_node is not None and spec.num_nodes > 1:  # None of its lanes are neighbours.
        read = max(1, round(lanes * spec.lanes_of_node))
        yield read, read, spec.num_nodes
        return
    for node in range(spec.num_nodes):
        ranks = node * spec.ranks_per_node, (node + 1) * spec.ranks_per_node
        if spec.num_nodes == 1:
            kind = lanes, 1
        elif lanes % batch == 0:
            low, high = part_of(batch, ranks[0], spec.world_size)[0], part_of(batch, ranks[1] - 1, spec.world_size)[1]
            kind = (high - low) * lanes // batch, lanes // batch
        else:
            touched = _lanes_of(order, ranks, spec.world_size)
            kind = int(touched.sum()), int((np.diff(touched.astype(np.int8), prepend=0) == 1).sum())
        kinds[kind] = kinds.get(kind, 0) + 1
    for (num_lanes, num_runs), count in kinds.items():
        yield num_lanes, num_runs, count


def _lanes_of(order: Order, ranks: tuple[int, int], world_size: int) -> BOOL:
    """The lanes that ranks [start, stop) read in full batches, bool [C]; for a C that the batch does not divide."""
    num_lanes, size = order.num_lanes, order.global_batch
    touched = np.zeros(num_lanes, bool)
    low, high = part_of(size, ranks[0], world_size)[0], part_of(size, ranks[1] - 1, world_size)[1]
    for step in range(min(max(1, order.num_samples // size), num_lanes // int(np.gcd(size, num_lanes)))):
        turns, more = divmod(size, num_lanes)
        of_lane = np.full(num_lanes, turns, np.int64)
        of_lane[(step * size + np.arange(more)) % num_lanes] += 1
        stops = np.cumsum(of_lane)
        touched |= np.minimum(stops, high) > np.maximum(stops - of_lane, low)
    return touched


def lanes_of_nodes(run: Run, world_size: int, ranks_per_node: int) -> list[float]:
    """The part of the lanes of each dataset of a mixture that a node reads, on average: counted over some steps."""
    assert run.mixture is not None
    size, num_nodes = run.batches.largest, world_size // ranks_per_node
    nodes = ((np.arange(size) + 1) * world_size - 1) // size // ranks_per_node
    seen = [np.empty(0, np.int64) for _ in run.orders]
    num_steps = -(-max(_COUNTED_SAMPLES, 4 * max(order.num_lanes for order in run.orders)) // size)
    for first in _COUNTED_AT:
        sources, positions = run.mixture.locate(first * size, (first + num_steps) * size)
        turn = np.argsort(run.keys_in_batch(sources, positions).reshape(num_steps, size), axis=1, kind="stable")
        node_of = np.empty((num_steps, size), np.int64)
        np.put_along_axis(node_of, turn, np.broadcast_to(nodes, turn.shape), axis=1)
        for source, order in enumerate(run.orders):
            mine = np.flatnonzero(sources == source)
            lanes = order.passes(positions[mine])[1] % order.num_lanes
            seen[source] = np.union1d(seen[source], node_of.reshape(-1)[mine] * order.num_lanes + lanes)
    return [max(1, len(pairs) / order.num_lanes) / num_nodes for order, pairs in zip(run.orders, seen)]


def fetched_bytes(spec: RunSpec, node: NodeNeeds, cache_bytes: int) -> int:
    """What a node with this cache fetches in an epoch; below its open windows, most samples fetch their chunk."""
    fetched = node.epoch_bytes
    if cache_bytes < node.epoch_bytes:
        fetched += node.again_bytes
    if cache_bytes < min(node.open_bytes, node.epoch_bytes):
        chunks = spec.size.chunk_bytes / max(
            1.0, spec.size.sample_bytes
        )  # Samples of a chunk, each of which fetches it.
        fetched += int(fetched * max(0.0, chunks - 1) * (1 - cache_bytes / node.open_bytes))
    return fetched


def first_demand(spec: RunSpec, order: Order) -> F64:
    """Bytes of the chunks that the first node needs before each of the first steps, float64 [K], of its real order.

    The first steps need more than later ones: each of their samples lies in a chunk of its own.
    """
    num_steps = min(order.num_samples, _COUNTED_DEMAND * spec.num_nodes) // order.global_batch
    num_steps = min(max(1, num_steps), _COUNTED_STEPS)
    size = min(order.global_batch, order.num_samples)
    samples_per_chunk = max(1.0, spec.size.chunk_bytes / spec.size.sample_bytes)
    chunks, steps = [], []
    for rank in range(spec.ranks_per_node):
        positions = order.shares_of(0, size, num_steps, rank, spec.world_size)
        slices, samples = order.samples_at(0, positions.reshape(-1))
        chunks.append(slices << 32 | (samples / samples_per_chunk).astype(np.int64))
        steps.append(np.repeat(np.arange(num_steps), positions.shape[1]))
    by_step = np.argsort(np.concatenate(steps), kind="stable")
    _, first = np.unique(np.concatenate(chunks)[by_step], return_index=True)
    new = np.bincount(np.concatenate(steps)[by_step][first], minlength=num_steps)
    chunk_bytes = max(float(min(spec.size.chunk_bytes, spec.num_bytes)), spec.size.sample_bytes)
    return np.asarray(np.cumsum(new) * chunk_bytes, np.float64)


def fetch_ratio(spec: RunSpec, nodes: list[NodeNeeds], cache_bytes: int) -> float:
    """Bytes that all nodes fetch in an epoch / bytes of the slices that have samples."""
    total = sum(node.count * fetched_bytes(spec, node, cache_bytes) for node in nodes)
    again = sum(node.count * (fetched_bytes(spec, node, cache_bytes) - node.epoch_bytes) for node in nodes)
    return (min(total, spec.num_bytes + again) if spec.swarm else total) / spec.num_bytes


def check_traffic(spec: RunSpec, order: Order, nodes: list[NodeNeeds]) -> str | None:
    """A warning if a run fetches more than 1.1 times its dataset in an epoch, else None.

    Raises:
        UsageError: If it fetches more than `max_fetch_ratio` times the dataset; unless the reason is that several nodes
            read the same chunks, of less than 1 GiB in all.
    """
    cache_bytes, limit = spec.cache_bytes, spec.max_fetch_ratio or 0
    assert cache_bytes is not None
    ratio = fetch_ratio(spec, nodes, cache_bytes)
    if ratio <= WARN_RATIO:
        return None
    is_small = (ratio - 1) * spec.num_bytes < FREE_BYTES
    alone = replace(spec, swarm=True)
    refused = 0 < limit < ratio and not (is_small and fetch_ratio(alone, nodes, cache_bytes) <= limit)
    text = (
        f"fetched bytes: expected at most {limit if refused else WARN_RATIO} times the dataset's "
        f"{format_bytes(spec.num_bytes)} in an epoch, got about {ratio:.3g} times "
        f"({_cause(spec, order, nodes, cache_bytes)}). {_advice(spec, nodes, ratio)}"
    )
    if refused:
        raise UsageError(text)
    return text


def _cause(spec: RunSpec, order: Order, nodes: list[NodeNeeds], cache_bytes: int) -> str:
    shape = f"lanes={order.num_lanes}, window={order.window_samples} samples"
    if cache_bytes < min(nodes[0].open_bytes, nodes[0].epoch_bytes):
        return f"cache_bytes={cache_bytes:,} is less than the {format_bytes(nodes[0].open_bytes)} that {shape} open"
    if sum(node.count * node.epoch_bytes for node in nodes) > WARN_RATIO * spec.num_bytes and not spec.swarm:
        return f"{spec.num_nodes} nodes without a common cache, {shape}"
    return f"the edges of lanes are read twice: {shape}, cache_bytes={cache_bytes:,}"


def _advice(spec: RunSpec, nodes: list[NodeNeeds], ratio: float) -> str:
    choices = []
    for lanes in (None, spec.num_nodes if spec.num_nodes <= spec.global_batch else None):
        other = replace(spec, lanes=lanes, window=None)
        fewer = fetch_ratio(other, needs_of_nodes(other, other.order()), spec.cache_bytes or 0)
        if fewer <= max(WARN_RATIO, min(spec.max_fetch_ratio or MAX_RATIO, 0.9 * ratio)):
            choices.append(f"{'the default lanes' if lanes is None else f'lanes={lanes}'} ({fewer:.3g} times)")
            break
    for size in (nodes[0].next_bytes, nodes[0].epoch_bytes):
        if (new_ratio := fetch_ratio(spec, nodes, size)) <= WARN_RATIO:
            choices.append(f"cache_bytes={size} ({new_ratio:.3g} times)")
            break
    choices = choices or ["smaller slices (--slice-bytes), a larger batch or fewer nodes: no lanes fetch less"]
    return f"Use {', or '.join(choices)}; or allow it with max_fetch_ratio={np.ceil(10 * ratio) / 10:g}."
