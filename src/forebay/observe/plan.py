"""Plan a run before it starts: bytes, disk, time and memory of a node, with refusals, warnings and advice.

Reads only the sizes of slices. Disk figures follow from the order (the slices that its windows have open,
`order/windows.py`); memory is a sum of bounds. Times come from a model of one node, one link and one cache: slices are
fetched one after another at full bandwidth, in order of first use, as soon as slices of as many bytes were used for the
last time; training waits at a step whose slice has not arrived. Latency and other traffic are not modelled.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.cache.eviction import part_bytes
from forebay.errors import UsageError
from forebay.load import resources
from forebay.load.resources import RunSpec
from forebay.order.plan import Order, part_of
from forebay.order.windows import Spans
from forebay.units import format_bytes, format_rate, format_seconds
from forebay.worker.config import SIZES

_BASE_BYTES = 96 << 20  # Of a Python process with the loader imported: 76 MiB measured.
_SLICE_BYTES = 100 + 2 * 16 + 250  # Of the table, of two epochs' order, of the prefetcher.
_CONNECTION_BYTES = 256 << 10
_HASHERS = 4
_BATCHES = 2  # The caller's, and the one being built.
_TOKEN_BYTES = 8
COMMON_BYTES_PER_S = 125e6  # 1 Gb/s
COMMON_MEM_BYTES = 4 * 10**9
_STALL_PART = 0.01  # Of an epoch; less is not reported.
_HALVINGS = 60
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Fetches:
    """The fetches of a node, in their order."""

    sizes: I64  # int64 [K], bytes.
    needed: I64  # int64 [K], the step that waits for each; rising.
    # [K], steps that must end before there is space for it; rising, and at most `needed` if the cache holds all open
    # slices.
    free: I64
    num_steps: int  # Of training.


@dataclass(frozen=True)
class Times:
    """Seconds."""

    first_s: float  # Until the slices of the first step have arrived.
    stall_s: float  # Total time that training waits after that.
    total_s: float  # From the start of fetching to the end of training.


def fetches_of(spans: Spans, sizes: I64, budget_bytes: int) -> Fetches:
    """The fetches of a node, one per span; `sizes` [S] of the slices; the budget is at least the spans' peak."""
    of_span = sizes[spans.slices]
    by_last = np.argsort(spans.last, kind="stable")
    ended = np.cumsum(of_span[by_last])
    over = np.cumsum(of_span) - budget_bytes
    last_use = np.minimum(np.searchsorted(ended, over, side="left"), max(0, len(ended) - 1))
    free = np.where(over > 0, spans.last[by_last][last_use] + 1, 0)
    # Fetches for the same step are merged.
    starts = np.flatnonzero(np.diff(spans.first, prepend=-1))
    if not len(starts):
        return Fetches(of_span, spans.first, free, spans.num_steps)
    grouped = np.add.reduceat(of_span, starts)
    return Fetches(grouped, spans.first[starts], np.maximum.reduceat(free, starts), spans.num_steps)


def times_of(fetches: Fetches, bytes_per_s: float, step_s: float) -> Times:
    """The times at a bandwidth, if a step of training takes `step_s`."""
    arrived = stall = first = 0.0
    history: list[tuple[int, float]] = [(-1, 0.0)]  # (step, the stall up to it)
    index = 0
    for size, needed, free in zip(fetches.sizes.tolist(), fetches.needed.tolist(), fetches.free.tolist()):
        while index + 1 < len(history) and history[index + 1][0] < free:
            index += 1
        free_at = free * step_s + history[index][1] if free else 0.0
        arrived = max(arrived, free_at) + size / bytes_per_s
        late = arrived - (needed * step_s + stall)
        if late > 0:
            stall += late
            history.append((needed, stall))
        if needed == 0:
            first = stall
    return Times(first, stall - first, stall + fetches.num_steps * step_s)


def bandwidth_needed(fetches: Fetches, step_s: float) -> float | None:
    """The lowest bandwidth in bytes per second at which training never waits after its first step.

    None if no bandwidth suffices: the cache has no space to prefetch, so each fetch starts when its slice is needed.
    """
    later = fetches.needed > 0
    if not later.any():
        return 0.0
    # Time is counted from the start of the first step.
    sizes, needed = fetches.sizes[later].astype(float), fetches.needed[later] * step_s
    free = np.minimum(fetches.free[later], fetches.needed[later]) * step_s
    if bool((free >= needed).any()):
        return None
    stops = np.cumsum(sizes)
    starts = stops - sizes

    def suffices(rate: float) -> bool:
        return bool((np.maximum.accumulate(free - starts / rate) + stops / rate <= needed * (1 + 1e-12)).all())

    low = high = float(stops[-1] / needed[-1])
    while not suffices(high):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


@dataclass
class RunPlan:
    """The figures of a run; `refused` has the reasons why it cannot run as requested. None: not known."""

    job: RunSpec
    nodes: list[resources.NodeNeeds] = field(repr=False)
    lanes: int
    window: int
    head: int
    steps_per_epoch: int
    disk: resources.CacheNeeds
    cache_bytes: int
    peak_disk_bytes: int
    fetched_bytes: int
    fetch_ratio: float
    samples_of_rank: tuple[int, int]  # Of the rank with fewest and of that with most, in an epoch.
    first_batch_bytes: int
    memory_bytes: int
    largest_batch: int | None  # Of a rank, with which the loader fits the memory; 0 if none.
    first_batch_s: float | None = None
    slice_fetch_s: float | None = None
    slice_lasts_s: float | None = None
    times: Times | None = None
    needed_bandwidth: float | None = None
    refused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.refused

    @property
    def total_bytes(self) -> int:
        return int(self.job.slice_bytes.sum())

    @property
    def fits_memory(self) -> bool | None:
        """Whether the whole dataset fits the memory of a node."""
        memory = self.job.mem_bytes
        return None if memory is None else self.total_bytes + self.memory_bytes <= memory

    def to_json(self) -> dict[str, Any]:
        """Plain values: `ok`, the figures by name, `loader` (arguments to use), `refused`, `warnings`, `advice`."""
        job, times = self.job, self.times
        plain = {name: value for name, value in vars(self).items() if name not in ("job", "nodes", "disk", "times")}
        return {
            "ok": self.ok,
            "name": job.name,
            "slices": len(job.slice_bytes),
            "bytes": self.total_bytes,
            "samples": int(job.slice_samples.sum()),
            "nodes": job.num_nodes,
            **plain,
            **asdict(self.disk),
            "loader": {"lanes": self.lanes, "window": self.window, "cache_bytes": self.cache_bytes},
            "requests_per_slice": -(-int(job.slice_bytes.max()) // job.piece_bytes),
            "epoch_s": None if times is None else times.total_s,
            "stall_s": None if times is None else times.stall_s,
            "fits_memory": self.fits_memory,
        }


def make_plan(job: RunSpec) -> RunPlan:
    """The plan of a run: figures, refusals, warnings and advice. At most 2 s for 250 000 slices."""
    plan = _figures(job)
    _refuse(plan)
    traffic = None
    if plan.ok:
        chosen = replace(job, lanes=plan.lanes, window=plan.window, cache_bytes=plan.cache_bytes)
        try:
            traffic = resources.check_traffic(chosen, chosen.order(), plan.nodes)
        except UsageError as error:
            plan.refused.append(str(error))
    _warn(plan)
    plan.warnings.extend([traffic] if traffic else [])
    return plan


def _figures(job: RunSpec) -> RunPlan:
    order, nodes = resources.fit_lanes(job)
    disk, spans = resources.largest_needs(nodes)
    overhead, total_bytes = job.part_bytes, int(job.slice_bytes.sum())
    proposed = min(max(disk.next_bytes, disk.once_bytes), total_bytes) + overhead
    cache = job.cache_bytes if job.cache_bytes is not None else min(proposed, job.volume_bytes or proposed)
    per_epoch = disk.epoch_bytes + max(resources.refetched_bytes(job, node, cache) for node in nodes)
    batch_size = -(-job.global_batch // job.world_size)
    fixed_bytes, sample_bytes = _memory_bytes(job)
    plan = RunPlan(
        job, nodes, order.num_lanes, order.window_samples, order.head_samples, order.steps_per_epoch, disk,
        cache_bytes=cache,
        peak_disk_bytes=min(cache, sum(map(part_bytes, job.slice_bytes.tolist()))),
        fetched_bytes=min(total_bytes, per_epoch * job.epochs) if cache >= total_bytes else per_epoch * job.epochs,
        fetch_ratio=resources.fetch_ratio(job, nodes, cache),
        samples_of_rank=_samples_of_rank(job, order),
        first_batch_bytes=_first_bytes(job, order),
        memory_bytes=job.ranks_per_node * (fixed_bytes + sample_bytes * batch_size),
        largest_batch=None if job.mem_bytes is None
        else max(0, (job.mem_bytes // job.ranks_per_node - fixed_bytes) // sample_bytes),
    )  # fmt: skip
    if job.bandwidth is not None:
        plan.slice_fetch_s = float(job.slice_bytes.mean()) / job.bandwidth
        plan.first_batch_s = plan.first_batch_bytes / job.bandwidth
    if job.step_s is not None:
        plan.slice_lasts_s = plan.steps_per_epoch * job.step_s / max(1, disk.epoch_slices)
        if cache >= disk.open_bytes:
            fetches = fetches_of(_spans_of_epoch(plan, spans), job.slice_bytes, cache)
            plan.needed_bandwidth = bandwidth_needed(fetches, job.step_s)
            if job.bandwidth is not None:
                plan.times = times_of(fetches, job.bandwidth, job.step_s)
    return plan


def _memory_bytes(job: RunSpec) -> tuple[int, int]:
    """Memory of a rank's process without batches, and of one sample in all batches that exist at once."""
    fixed = _BASE_BYTES + _SLICE_BYTES * len(job.slice_bytes) + _CONNECTION_BYTES * (job.connections + _HASHERS)
    if job.seq_len is not None:
        sample = (job.seq_len + 1) * _TOKEN_BYTES
    else:
        sample = -(-int(job.slice_bytes.sum()) // int(job.slice_samples.sum()))
    return fixed, sample * (_BATCHES + job.prefetch)


def _spans_of_epoch(plan: RunPlan, spans: Spans) -> Spans:
    """The spans of the first epoch, one per fetch."""
    inside = spans.first < plan.steps_per_epoch
    last = np.minimum(spans.last[inside], plan.steps_per_epoch - 1)
    spans_of_epoch = Spans(spans.slices[inside], spans.first[inside], last, plan.steps_per_epoch, spans.exact)
    return spans_of_epoch.once() if plan.cache_bytes >= plan.disk.once_bytes else spans_of_epoch


def _first_bytes(job: RunSpec, order: Order) -> int:
    """Bytes of the slices that the first step of the first node reads."""
    if not order.steps_per_epoch:
        return 0
    parts = [order.positions(0, rank, job.world_size) for rank in range(job.ranks_per_node)]
    slices, _ = order.samples_at(0, np.concatenate(parts))
    return int(job.slice_bytes[np.unique(slices)].sum())


def _samples_of_rank(job: RunSpec, order: Order) -> tuple[int, int]:
    """The fewest and the most samples of a rank in an epoch."""
    full, rest = divmod(order.num_samples, order.global_batch)
    shares = []
    for rank in range(job.world_size):
        (low, high), (first, last) = (part_of(size, rank, job.world_size) for size in (order.global_batch, rest))
        shares.append(full * (high - low) + (0 if order.drop_last else last - first))
    return min(shares), max(shares)


def format_plan(plan: RunPlan) -> str:
    """The plan as text."""
    job, disk, times = plan.job, plan.disk, plan.times
    node = "node" if job.num_nodes == 1 else f"each of {job.num_nodes} nodes"
    at_most = "" if disk.exact else "at most "
    total, memory = map(format_bytes, (plan.total_bytes, plan.memory_bytes))
    rows: list[tuple[str, str]] = [
        ("dataset", f"{len(job.slice_bytes):,} slices, {total}, {int(job.slice_samples.sum()):,} samples"),
        ("order", f"lanes={plan.lanes}, window={plan.window}"),
        ("steps", f"{plan.steps_per_epoch:,} of {job.global_batch} samples an epoch"),
        (f"{node} reads", f"{at_most}{disk.epoch_slices:,} slices, {format_bytes(disk.epoch_bytes)} an epoch"),
        ("all nodes fetch", f"about {plan.fetch_ratio:.2f} x the dataset an epoch"),
        ("open at once", f"{at_most}{disk.open_slices:,} slices, {format_bytes(disk.open_bytes)}"),
        ("with the next", f"{at_most}{disk.next_slices:,} slices, {format_bytes(disk.next_bytes)}"),
        ("smallest cache", format_bytes(disk.least_bytes)),
        ("no second fetches", format_bytes(2 * disk.once_bytes)),
        ("cache", f"cache_bytes={plan.cache_bytes}, peak disk {format_bytes(plan.peak_disk_bytes)}"),
        ("fetched", f"at most {format_bytes(plan.fetched_bytes)} in {job.epochs} epoch{'s' * (job.epochs > 1)}"),
        ("memory", f"{memory} for batches of {-(-job.global_batch // job.world_size)} a rank"),
    ]
    if plan.largest_batch is not None:
        rows.append(("largest batch", f"{plan.largest_batch:,} a rank, {plan.largest_batch * job.world_size:,} in all"))
        rows.append(("dataset in memory", f"{'fits' if plan.fits_memory else 'does not fit'}: {total}"))
    if plan.first_batch_s is not None and plan.slice_fetch_s is not None:
        rows.append(
            ("first batch after", f"{format_seconds(plan.first_batch_s)} ({format_bytes(plan.first_batch_bytes)})")
        )
        rows.append(("slice fetched in", format_seconds(plan.slice_fetch_s)))
    if plan.slice_lasts_s is not None:
        needed = plan.needed_bandwidth
        rows.append(("slice lasts", f"{format_seconds(plan.slice_lasts_s)} in training"))
        rows.append(("bandwidth enough", "none: no space to prefetch" if needed is None else format_rate(needed)))
    if times is not None:
        stall, of_step = map(format_seconds, (times.stall_s, times.stall_s / max(1, plan.steps_per_epoch)))
        rows += [("stall", f"{stall} an epoch, {of_step} a step"), ("epoch", format_seconds(times.total_s))]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    for kind in ("warnings", "refused", "advice"):
        lines += [f"{kind.removesuffix('s')}: {text}" for text in getattr(plan, kind)]
    return "\n".join([*lines, "ok" if plan.ok else "NOT ok: this run cannot work as requested"])


def plan_model(model_size: str, seq_len: int, vocab_size: int, device_bytes: int) -> dict[str, Any]:
    """The figures of a model of `SIZES` on a device: bytes of its state and of a sample, the batch sizes that fit."""
    size = SIZES[model_size]
    largest = size.largest_batch(vocab_size, seq_len, device_bytes)
    return {
        "model_size": model_size,
        "seq_len": seq_len,
        "vocab_size": vocab_size,
        "device_bytes": device_bytes,
        "parameters": size.num_parameters(vocab_size, seq_len),
        "state_bytes": size.state_bytes(vocab_size, seq_len),
        "sample_bytes": size.sample_bytes(vocab_size, seq_len),
        "largest_batch": largest,  # 0 if none fits.
        "batch_size": min(size.batch_size, largest),
    }


def format_model(model: dict[str, Any]) -> str:
    """The result of `plan_model` as text."""
    state, sample, device = (format_bytes(model[f"{name}_bytes"]) for name in ("state", "sample", "device"))
    text = (
        "{:<18} {model_size}, {parameters_m:,.1f} M weights, vocabulary {vocab_size:,}\n"
        "{:<18} {state}, and {sample} a sample of {seq_len:,} tokens\n"
    ).format("model", "its memory", **model, parameters_m=model["parameters"] / 1e6, state=state, sample=sample)
    if model["largest_batch"]:
        return f"{text}{'batch':<18} batch_size={model['batch_size']}; at most {model['largest_batch']:,} fit {device}"
    return (
        f"{text}refused: {model['model_size']} does not fit {device} with one sample of {model['seq_len']} tokens. "
        "Choose a smaller model or shorter samples."
    )


def _refuse(plan: RunPlan) -> None:
    job, disk, refused = plan.job, plan.disk, plan.refused
    opens = f"{disk.open_slices} slices, {format_bytes(disk.open_bytes)}, are open at once"
    location = f"lanes={plan.lanes}, window={plan.window}"
    for name, size in (("cache", job.cache_bytes), ("disk", job.volume_bytes)):
        if size is not None and size < disk.least_bytes:
            refused.append(
                f"{name}: expected at least {disk.least_bytes} bytes ({opens}: {location}), got {size} bytes. "
                "Slices would be fetched repeatedly, and training would wait for each."
            )
    if job.cache_bytes is not None and job.volume_bytes is not None and job.cache_bytes > job.volume_bytes:
        refused.append(
            f"disk: expected space for the cache of {job.cache_bytes} bytes, got {job.volume_bytes} bytes. "
            "Lower the cache's budget, or choose another disk."
        )
    memory = job.mem_bytes
    if job.whole_in_memory and memory is not None and plan.peak_disk_bytes + plan.memory_bytes > memory:
        refused.append(
            f"cache_dir='ram': expected memory for the cache of {plan.peak_disk_bytes} bytes and the loader's "
            f"{plan.memory_bytes}, got {memory} bytes. Keep the cache on a disk, or give it less."
        )
    if memory is not None and plan.largest_batch == 0:
        refused.append(
            f"memory: expected at least {plan.memory_bytes} bytes for {job.ranks_per_node} ranks of a node, got "
            f"{memory}: not even a batch of one sample fits. Use fewer ranks a node, or shorter samples (--seq-len)."
        )
    if job.world_size > job.global_batch:
        refused.append(
            f"global_batch: expected a sample for each of {job.world_size} ranks, got {job.global_batch}. Use "
            "larger batches (--global-batch-size), or fewer ranks."
        )
    if any(text.startswith(("cache:", "disk: expected at least")) for text in refused):
        plan.advice.append(_narrower(plan))


def _narrower(plan: RunPlan) -> str:
    """Lanes and a window that fit, if any."""
    job = plan.job
    order, nodes = resources.fit_lanes(replace(job, lanes=None, window=None))
    disk = resources.largest_needs(nodes)[0]
    if job.cache_limit is not None and disk.least_bytes <= job.cache_limit:
        return (
            f"lanes={order.num_lanes}, window={order.window_samples} keep {format_bytes(disk.open_bytes)} open, "
            f"{format_bytes(disk.next_bytes)} with the next windows."
        )
    return f"No lanes need less than {format_bytes(disk.least_bytes)}: prepare smaller slices (--slice-bytes)."


def _warn(plan: RunPlan) -> None:
    job, disk, times, warnings, advice = plan.job, plan.disk, plan.times, plan.warnings, plan.advice
    usual = job.order().num_lanes
    if job.lanes is None and job.window is None and usual != plan.lanes:
        warnings.append(
            f"the Loader's default of {usual} lanes opens more than fits: this plan is for lanes={plan.lanes}, "
            f"window={plan.window}. Pass these to the Loader."
        )
    if plan.ok and plan.cache_bytes < min(disk.next_bytes, plan.total_bytes):
        warnings.append(
            f"cache: {format_bytes(plan.cache_bytes)} hold the open windows without the next ones: training waits at "
            "each swap."
        )
        advice.append(f"cache_bytes={disk.next_bytes} holds the next windows too.")
    if job.bandwidth is not None and job.bandwidth < COMMON_BYTES_PER_S:
        warnings.append(f"bandwidth: {job.bandwidth * 8 / 1e9:.3g} Gb/s; runs like this have 1 Gb/s or more.")
    if job.volume_bytes is not None and job.volume_bytes < min(resources.COMMON_DISK_BYTES, disk.next_bytes):
        needed = format_bytes(min(resources.COMMON_DISK_BYTES, disk.next_bytes))
        warnings.append(f"disk: {format_bytes(job.volume_bytes)} are less than the {needed} needed to never wait.")
    if job.mem_bytes is not None and job.mem_bytes < COMMON_MEM_BYTES:
        warnings.append(f"memory: {format_bytes(job.mem_bytes)}; runs like this have 4 GB or more.")
    if job.mem_bytes is not None and plan.memory_bytes > job.mem_bytes and plan.largest_batch:
        warnings.append(f"memory: the loader takes {format_bytes(plan.memory_bytes)} of {format_bytes(job.mem_bytes)}.")
        advice.append(f"batch_size={plan.largest_batch} (global {plan.largest_batch * job.world_size}) fits.")
    if times is not None and times.stall_s > _STALL_PART * times.total_s:
        warnings.append(
            f"bandwidth: training waits {times.stall_s / times.total_s:.0%} of the time for slices "
            f"({format_seconds(times.stall_s)} an epoch)."
        )
        if plan.needed_bandwidth is not None:
            advice.append(f"{format_rate(plan.needed_bandwidth)} would suffice to never wait.")
