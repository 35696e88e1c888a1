"""What a node reads, fetches and keeps of a dataset in an epoch, from the shape of its order: arithmetic, no slices.

A lane goes through its part of the epoch's sequence once, window by window. So a node fetches the bytes of its lanes,
and at each edge of neighbouring lanes the chunk there once more. The Loader refuses a run that fetches a dataset
several times in an epoch; `forebay plan` prints the figures.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from forebay.arrays import BOOL, F64
from forebay.errors import UsageError
from forebay.order.plan import Order
from forebay.order.run import Run
from forebay.units import format_bytes

WARN_RATIO = 1.1  # Bytes fetched in an epoch, as a multiple of the dataset's, from which on there is a warning.
MAX_RATIO = 1.5  # The default limit of the Loader.
FREE_BYTES = 1 << 30  # What several nodes fetch twice causes a warning only, below this many bytes in all.
TINY_PART = 0.01  # A part of all bytes; fetching less than this twice is not worth a warning.
_EDGE_CHUNKS = 2  # At the edges of neighbouring lanes: a chunk of samples, and one with the header of the slice.
_COUNTED_DEMAND, _COUNTED_STEPS = 1 << 17, 4096  # Samples and steps, at most, whose chunks are counted.
_OPEN_CHUNKS = 2  # Beside its window, a lane has parts of so many chunks open.
FIRST_REQUEST_BYTES = 64 << 10  # A request for the first steps; for each plan after them four times as many,
MAX_REQUEST_BYTES = 4 << 20  # at most so many,
_BROKEN = 0.85  # Requests of a part of a slice beside those that its bytes need: it comes into reach by and by.
_HASHES_OF_PARTS, _HASHES_OF_ALL = 1.0, 0.25  # Requests for hashes of chunks, by slice: of several nodes, of one.
REQUESTS_OF_CACHE = 16  # and such a part of the cache.
FREE_HASHES = 1 << 13
"""The number of hashes of chunks (256 KiB) that come with the first one that a reader asks for."""


@dataclass(frozen=True)
class NodeNeeds:
    """What each of `count` nodes with as many lanes needs, in bytes."""

    count: int
    num_lanes: int
    open_bytes: int  # The windows that are open at once.
    next_bytes: int  # With the next window of each lane: enough for never waiting.
    epoch_bytes: int  # Fetched in an epoch.
    again_bytes: int  # Fetched twice in an epoch if the cache is smaller than `epoch_bytes`.


@dataclass(frozen=True)
class Footprint:
    """What the nodes of a run read of one dataset. `streams`: of a mixture (`Run.streams`)."""

    order: Order
    world_size: int
    ranks_per_node: int
    streams: int | None
    swarm: bool = False  # Nodes fetch from each other: what several nodes read is fetched once.
    name: str = ""
    part: float = 1.0  # The part of all datasets' bytes that a step reads.
    has_heads: bool = False  # The ends of documents are requested before the samples of a slice.

    def __post_init__(self) -> None:
        if self.world_size % self.ranks_per_node:
            raise UsageError(
                f"ranks_per_node: expected a divisor of the world size {self.world_size}, got {self.ranks_per_node}."
            )

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    @property
    def num_bytes(self) -> int:
        """Of the slices that have samples."""
        return round(self.order.num_samples * self.order.size.sample_bytes)

    @cached_property
    def nodes(self) -> list[NodeNeeds]:
        """The needs of each kind of node, the one with most lanes first."""
        order, size, total = self.order, self.order.size, self.num_bytes
        chunk = min(size.chunk_bytes, total)
        if not order.shuffle:
            return [self._in_order(chunk)]
        window_bytes = min(int(order.window_samples * size.sample_bytes), -(-total // order.num_lanes))
        nodes = []
        for lanes, num_runs, count in self._kinds():
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

    def fetched_bytes(self, node: NodeNeeds, cache_bytes: int) -> int:
        """What a node with this cache fetches in an epoch; below its open windows, most samples fetch their chunk."""
        size, fetched = self.order.size, node.epoch_bytes
        if cache_bytes < node.epoch_bytes:
            fetched += node.again_bytes
        if cache_bytes < min(node.open_bytes, node.epoch_bytes):
            chunks = size.chunk_bytes / max(1.0, size.sample_bytes)  # Samples of a chunk, each of which fetches it.
            fetched += int(fetched * max(0.0, chunks - 1) * (1 - cache_bytes / node.open_bytes))
        return fetched

    def fetch_ratio(self, cache_bytes: int) -> float:
        """Bytes that all nodes fetch in an epoch / bytes of the slices that have samples."""
        total = sum(node.count * self.fetched_bytes(node, cache_bytes) for node in self.nodes)
        again = sum(node.count * (self.fetched_bytes(node, cache_bytes) - node.epoch_bytes) for node in self.nodes)
        return (min(total, self.num_bytes + again) if self.swarm else total) / self.num_bytes

    def requests(self, cache_bytes: int, ahead_bytes: int) -> int:
        """About how many requests all nodes make in an epoch: for slices, and for the hashes of their chunks.

        `ahead_bytes`: how far a node fetches what follows in the lanes of all datasets with what it needs now. A lane's
        parts of slices are requested one by one, as far ahead as that; those of neighbouring lanes together, where a
        lane is read ahead to its end.
        """
        order, size, node = self.order, self.order.size, self.nodes[0]
        if not order.shuffle:
            return self._requests_in_order()
        reach = ahead_bytes * self.part / node.num_lanes + order.window_samples * size.sample_bytes / 2
        limit = max(size.chunk_bytes, min(MAX_REQUEST_BYTES, cache_bytes // REQUESTS_OF_CACHE, reach))
        lanes = sum(of.count * of.num_lanes for of in self.nodes)
        is_long = reach < self.num_bytes / order.num_lanes  # A lane is longer than what is fetched of it at once.
        pieces = lanes if is_long else int(lanes * self.part) if self.num_nodes > 1 else 0
        epoch, num_samples = order.epoch_at(0), order.num_samples
        stops = np.cumsum(order.samples_per_slice[epoch.slices])
        parts = np.diff(np.union1d(stops, np.arange(pieces + 1) * num_samples // max(1, pieces))) * size.sample_bytes
        again = self.fetch_ratio(cache_bytes) / max(1.0, self.fetch_ratio(self.num_bytes))
        first = min(limit, self.num_bytes / order.num_lanes, float(parts.mean())) / FIRST_REQUEST_BYTES
        requests = (parts / limit).astype(np.float64)
        requests = np.maximum(1, requests + _BROKEN) if pieces else np.ceil(requests)
        slices = again * requests.sum() + lanes * max(float(first > 1), (np.log2(max(1.0, first)) - 1) / 3)
        hashed = len(parts) if size.chunk_bytes < self.num_bytes / len(stops) else 0  # Those of neighbours come, too.
        slices += len(parts) * (self.has_heads and parts.mean() > FIRST_REQUEST_BYTES)
        if self._has_few_chunks:
            return int(slices + min(hashed, self.num_nodes))
        return int(slices + hashed * (_HASHES_OF_PARTS if self.num_nodes > 1 else _HASHES_OF_ALL))

    @property
    def _has_few_chunks(self) -> bool:
        return self.num_bytes <= FREE_HASHES * self.order.size.chunk_bytes

    def _requests_in_order(self) -> int:
        """A node reads each slice at once, in pieces where whole chunks lie between its parts of two steps."""
        order, nodes, chunk_bytes = self.order, self.num_nodes, self.order.size.chunk_bytes
        slices, between = np.count_nonzero(order.samples_per_slice), order.global_batch * order.size.sample_bytes
        pieces = order.steps_per_epoch * min(1.0, max(0.0, between * (nodes - 1) / nodes / chunk_bytes - 1))
        return nodes * int(slices + pieces + (1 if self._has_few_chunks else np.log2(slices + 1)))

    def cause(self, cache_bytes: int) -> str:
        """Why more than the dataset is fetched."""
        disk, shape = self.nodes[0], str(self.order)
        if cache_bytes < min(disk.open_bytes, disk.epoch_bytes):
            return (
                f"the cache's {cache_bytes:,} bytes are less than the {format_bytes(disk.open_bytes)} that {shape} open"
            )
        if not self.swarm and sum(of.count * of.epoch_bytes for of in self.nodes) > WARN_RATIO * self.num_bytes:
            ranks = f"{self.ranks_per_node} rank{'s' * (self.ranks_per_node > 1)}"
            return f"{self.num_nodes} nodes with caches of their own, {ranks} each (LOCAL_WORLD_SIZE); {shape}"
        return f"the edges of lanes are read twice: {shape}, {cache_bytes:,} bytes of the cache"

    def _in_order(self, chunk: int) -> NodeNeeds:
        """Without shuffling: a batch is consecutive, and each node reads the chunks of its part."""
        total, parts = self.num_bytes, self.num_nodes
        part_bytes = max(1, int(self.order.global_batch * self.order.size.sample_bytes) // parts)
        epoch_bytes = total // parts if parts == 1 else min(total, total // parts * (part_bytes + chunk) // part_bytes)
        open_bytes = min(total, part_bytes + 2 * chunk)
        return NodeNeeds(parts, 1, open_bytes, min(total, 2 * open_bytes), epoch_bytes, 0)

    def _kinds(self) -> Iterable[tuple[int, int, int]]:
        """(lanes of a node, runs of neighbouring lanes, number of such nodes)."""
        lanes, size = self.order.num_lanes, self.order.global_batch
        if self.num_nodes == 1:
            return [(lanes, 1, 1)]
        # A batch is in the order of this residue of its positions; each block of residues has lanes of its own.
        cycle = self.streams or (size if lanes % size == 0 else lanes)
        blocks = int(np.gcd(cycle, lanes))
        edges = np.arange(self.num_nodes + 1) * self.ranks_per_node * size // self.world_size
        if size % cycle == 0:
            first, last = (part * cycle // size * blocks // cycle for part in (edges[:-1], edges[1:] - 1))
            num_blocks = last - first + 1
            num_runs = np.ones_like(num_blocks)
        else:
            touched = [self._touched(cycle, *part).reshape(blocks, -1).any(axis=1) for part in pairwise(edges.tolist())]
            num_blocks = np.sum(touched, axis=1)
            num_runs = (np.diff(np.array(touched, np.int8), axis=1, prepend=0) == 1).sum(axis=1)
        kinds, counts = np.unique(np.stack([num_blocks, num_runs]) * (lanes // blocks), axis=1, return_counts=True)
        return zip(*kinds.tolist(), counts.tolist())

    def _touched(self, cycle: int, low: int, high: int) -> BOOL:
        """The residues modulo `cycle` of what [low, high) of full batches, in their order, has: bool [cycle]."""
        size, touched = self.order.global_batch, np.zeros(cycle, bool)
        turns, more = divmod(size, cycle)
        for step in range(min(max(1, self.order.num_samples // size), cycle // int(np.gcd(size, cycle)))):
            of_residue = np.full(cycle, turns, np.int64)
            of_residue[(step * size + np.arange(more)) % cycle] += 1
            stops = np.cumsum(of_residue)
            touched |= np.minimum(stops, high) > np.maximum(stops - of_residue, low)
        return touched


def footprints(
    run: Run, names: Sequence[str], world_size: int, ranks_per_node: int, swarm: bool = False, has_heads: bool = False
) -> list[Footprint]:
    """What the nodes of a run read of each dataset."""
    weights = np.ones(1) if run.weights is None else run.weights.quotas[0]
    read = weights * [order.size.sample_bytes for order in run.orders]
    return [
        Footprint(order, world_size, ranks_per_node, run.streams, swarm, name, part, has_heads)
        for order, name, part in zip(run.orders, names, (read / read.sum()).tolist())
    ]


def cache_shares(parts: Sequence[Footprint], cache_bytes: int) -> list[int]:
    """What each dataset has of a cache for all: as much as its windows need of what those of all do."""
    opened = [part.nodes[0].open_bytes for part in parts]
    return [cache_bytes * of_part // max(1, sum(opened)) for of_part in opened]


def fetch_ratios(parts: Sequence[Footprint], cache_bytes: int) -> list[float]:
    return [part.fetch_ratio(share) for part, share in zip(parts, cache_shares(parts, cache_bytes))]


def num_requests(parts: Sequence[Footprint], cache_bytes: int, ahead_bytes: int) -> list[int]:
    """About how many requests all nodes make for each dataset in an epoch of it."""
    return [part.requests(share, ahead_bytes) for part, share in zip(parts, cache_shares(parts, cache_bytes))]


def check_traffic(parts: Sequence[Footprint], cache_bytes: int, limit: float) -> list[str]:
    """Warnings about the datasets of a run that are fetched more than 1.1 times in an epoch, but for tiny ones.

    Args:
        cache_bytes: Of the cache of a node, for all of them.
        limit: 0 for none.

    Raises:
        UsageError: If one is fetched more than `limit` times; unless the reason is that several nodes read the same
            chunks, of less than 1 GiB in all.
    """
    warnings = []
    for part, ratio, share in zip(parts, fetch_ratios(parts, cache_bytes), cache_shares(parts, cache_bytes)):
        if ratio <= WARN_RATIO:
            continue
        more_bytes = (ratio - 1) * part.num_bytes
        is_small = more_bytes < FREE_BYTES
        refused = 0 < limit < ratio and not (is_small and replace(part, swarm=True).fetch_ratio(share) <= limit)
        text = (
            f"{part.name}{': ' if part.name else ''}fetched bytes: expected at most "
            f"{limit if refused else WARN_RATIO} times the dataset's {format_bytes(part.num_bytes)} in an epoch, got "
            f"about {ratio:.3g} times ({part.cause(share)}). {_advice(parts, cache_bytes, limit)}"
        )
        if refused:
            raise UsageError(text)
        if more_bytes > TINY_PART * sum(other.num_bytes for other in parts):
            warnings.append(text)
    return warnings


def _advice(parts: Sequence[Footprint], cache_bytes: int, limit: float) -> str:
    """What helps, each tried for all datasets together."""
    first, ratio, choices = parts[0], max(fetch_ratios(parts, cache_bytes)), list[str]()
    batch = first.order.global_batch
    divisors = [number for number in range(batch, first.num_nodes - 1, -1) if batch % number == 0]
    for lanes in [None, *divisors]:
        others = [replace(part, order=part.order.reshaped(lanes, None)) for part in parts]
        fewer = max(fetch_ratios(others, cache_bytes))
        if fewer <= max(WARN_RATIO, min(limit or MAX_RATIO, 0.9 * ratio)):
            choices.append(f"{'the default lanes' if lanes is None else f'lanes={lanes}'} ({fewer:.3g} times)")
            break
    for sizes in ([part.nodes[0].next_bytes for part in parts], [part.nodes[0].epoch_bytes for part in parts]):
        if (fewer := max(fetch_ratios(parts, sum(sizes)))) <= WARN_RATIO:
            choices.append(f"cache_bytes={sum(sizes)} ({fewer:.3g} times)")
            break
    choices = choices or ["smaller slices (--slice-bytes), a larger batch or fewer nodes: no lanes fetch less"]
    return f"Use {', or '.join(choices)}; or allow it with max_fetch_ratio={np.ceil(10 * ratio) / 10:g}."


def first_demand(run: Run, ranks: int, world_size: int) -> F64:
    """Bytes of the chunks that the first `ranks` need before each of the first steps, float64 [K], of the real order.

    The first steps need more than later ones: each of their samples lies in a chunk of its own.
    """
    size = run.batches.largest
    num_steps = min(sum(order.num_samples for order in run.orders), _COUNTED_DEMAND * world_size // ranks) // size
    num_steps = min(max(1, num_steps), _COUNTED_STEPS)
    sample_bytes = np.array([order.size.sample_bytes for order in run.orders])
    per_chunk = np.array([max(1.0, order.size.chunk_bytes / order.size.sample_bytes) for order in run.orders])
    chunk_bytes = sample_bytes * np.minimum(per_chunk, [order.num_samples for order in run.orders])
    keys, steps = [], []
    for rank in range(ranks):
        read = run.steps(0, num_steps, rank, world_size)
        chunks = (read.samples / per_chunk[read.sources]).astype(np.int64)
        keys.append(read.sources << 52 | read.slices << 32 | chunks)
        steps.append(np.repeat(np.arange(num_steps), np.diff(read.bounds)))
    by_step = np.argsort(np.concatenate(steps), kind="stable")
    all_keys, all_steps = np.concatenate(keys)[by_step], np.concatenate(steps)[by_step]
    first = np.unique(all_keys, return_index=True)[1]
    new = np.bincount(all_steps[first], weights=chunk_bytes[all_keys[first] >> 52], minlength=num_steps)
    return np.cumsum(new)
