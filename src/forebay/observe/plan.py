"""Plan a run before it starts: bytes, disk, time and memory of a node, with refusals, warnings and advice.

Reads only the sizes of slices. Disk figures follow from the order (the slices that its windows have open,
`order/windows.py`); times come from a model (`timing.py`); memory is a sum of bounds.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from forebay.cache.eviction import part_bytes
from forebay.errors import UsageError
from forebay.load.resources import (
    COMMON_DISK_BYTES,
    CacheNeeds,
    NodeNeeds,
    RunSpec,
    check_traffic,
    fetch_ratio,
    fit_lanes,
    largest_needs,
    refetched_bytes,
)
from forebay.observe.timing import Times, bandwidth_needed, flow_of, times_of
from forebay.order.plan import Order, part_of
from forebay.order.windows import Spans, window_steps
from forebay.units import format_bytes, format_rate, format_seconds
from forebay.worker.config import SIZES

_BASE_BYTES = 96 << 20  # Of a Python process with the loader imported: 76 MiB measured.
_SLICE_BYTES = 100 + 2 * 16 + 250  # Of the table, of two epochs' order, of the prefetcher.
_CONNECTION_BYTES = 256 << 10
_HASHERS = 4
_BATCHES = 2  # The caller's, and the one being built.
_TOKEN_BYTES = 8


@dataclass(frozen=True)
class Plan:
    """The figures of a job; `refused` has the reasons why it cannot run as requested."""

    job: RunSpec
    nodes: list[NodeNeeds] = field(repr=False)
    lanes: int
    window: int
    head: int
    steps_per_epoch: int
    disk: CacheNeeds
    cache_bytes: int
    peak_disk_bytes: int
    fetched_bytes: int
    fetch_ratio: float
    samples_of_rank: tuple[int, int]
    first_batch_bytes: int
    swaps: int
    memory_bytes: int
    largest_batch: int | None
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
    def slices_of_run(self) -> int:
        return len(self.job.slice_bytes)

    @property
    def total_bytes(self) -> int:
        return int(self.job.slice_bytes.sum())

    def to_json(self) -> dict[str, Any]:
        """Plain values: `ok`, the figures by name, `loader` (arguments to use), `refused`, `warnings`, `advice`."""
        job, times = self.job, self.times
        return {
            "ok": self.ok,
            "name": job.name,
            "slices": self.slices_of_run,
            "bytes": self.total_bytes,
            "samples": int(job.slice_samples.sum()),
            "steps_per_epoch": self.steps_per_epoch,
            "nodes": job.num_nodes,
            "samples_of_rank": list(self.samples_of_rank),
            "loader": {"lanes": self.lanes, "window": self.window, "cache_bytes": self.cache_bytes},
            "head": self.head,
            **asdict(self.disk),
            "peak_disk_bytes": self.peak_disk_bytes,
            "fetched_bytes": self.fetched_bytes,
            "fetch_ratio": round(self.fetch_ratio, 3),
            "requests_per_slice": -(-int(job.slice_bytes.max()) // job.piece_bytes),
            "first_batch_bytes": self.first_batch_bytes,
            "first_batch_s": self.first_batch_s,
            "slice_fetch_s": self.slice_fetch_s,
            "slice_lasts_s": self.slice_lasts_s,
            "epoch_s": None if times is None else times.total_s,
            "stall_s": None if times is None else times.stall_s,
            "stall_per_step_s": None if times is None else times.stall_s / max(1, self.steps_per_epoch),
            "stall_per_swap_s": None if times is None else times.stall_s / max(1, self.swaps),
            "needed_bytes_per_s": self.needed_bandwidth,
            "memory_bytes": self.memory_bytes,
            "largest_batch_size": self.largest_batch,
            "fits_memory": None if job.mem_bytes is None else self.total_bytes + self.memory_bytes <= job.mem_bytes,
            "fits_all": None if job.cache_limit is None else self.total_bytes <= job.cache_limit,
            "refused": self.refused,
            "warnings": self.warnings,
            "advice": self.advice,
        }


def figures_of(job: RunSpec) -> Plan:
    """The figures of a job, without refusals and warnings. 0.1 s for 250 000 slices, 2 s if lanes are searched."""
    order, nodes = fit_lanes(job)
    disk, spans = largest_needs(nodes)
    overhead, total_bytes = job.part_bytes, int(job.slice_bytes.sum())
    proposed = min(max(disk.next_bytes, disk.once_bytes), total_bytes) + overhead
    cache = job.cache_bytes if job.cache_bytes is not None else min(proposed, job.volume_bytes or proposed)
    peak = min(cache, sum(map(part_bytes, job.slice_bytes.tolist())))
    per_epoch = disk.epoch_bytes + max(refetched_bytes(job, node, cache) for node in nodes)
    plan = Plan(
        job=job,
        nodes=nodes,
        lanes=order.num_lanes,
        window=order.window_samples,
        head=order.head_samples,
        steps_per_epoch=order.steps_per_epoch,
        disk=disk,
        cache_bytes=cache,
        peak_disk_bytes=peak,
        fetched_bytes=min(total_bytes, per_epoch * job.epochs) if cache >= total_bytes else per_epoch * job.epochs,
        fetch_ratio=fetch_ratio(job, nodes, cache),
        samples_of_rank=_samples_of_rank(job, order),
        first_batch_bytes=_first_bytes(job, order),
        swaps=max(1, order.steps_per_epoch // window_steps(order)),
        memory_bytes=job.ranks_per_node * (_fixed_bytes(job) + _batch_bytes(job) * rank_batch(job)),
        largest_batch=_largest_batch(job),
    )
    return _with_times(plan, spans)


def rank_batch(job: RunSpec) -> int:
    """The most samples of a rank's batch."""
    return -(-job.global_batch // job.world_size)


def _with_times(plan: Plan, spans: Spans) -> Plan:
    job = plan.job
    mean = float(job.slice_bytes.mean())
    times: dict[str, Any] = {}
    if job.bandwidth is not None:
        times["slice_fetch_s"] = mean / job.bandwidth
        times["first_batch_s"] = plan.first_batch_bytes / job.bandwidth
    if job.step_s is not None:
        times["slice_lasts_s"] = plan.steps_per_epoch * job.step_s / max(1, plan.disk.epoch_slices)
        if plan.cache_bytes >= plan.disk.open_bytes:
            fetches = _fetches(plan, spans)
            flow = flow_of(fetches, job.slice_bytes, plan.cache_bytes)
            times["needed_bandwidth"] = bandwidth_needed(flow, job.step_s)
            if job.bandwidth is not None:
                times["times"] = times_of(flow, job.bandwidth, job.step_s)
    return replace(plan, **times)


def _fetches(plan: Plan, spans: Spans) -> Spans:
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


def _fixed_bytes(job: RunSpec) -> int:
    """Memory of a rank's process without batches."""
    return _BASE_BYTES + _SLICE_BYTES * len(job.slice_bytes) + _CONNECTION_BYTES * (job.connections + _HASHERS)


def _batch_bytes(job: RunSpec) -> int:
    """Memory of one sample in all batches that exist at once."""
    if job.seq_len is not None:
        sample = (job.seq_len + 1) * _TOKEN_BYTES
    else:
        sample = -(-int(job.slice_bytes.sum()) // int(job.slice_samples.sum()))
    return sample * (_BATCHES + job.prefetch)


def _largest_batch(job: RunSpec) -> int | None:
    """The largest batch of a rank with which the loader fits the node's memory; 0 if none."""
    if job.mem_bytes is None:
        return None
    return max(0, (job.mem_bytes // job.ranks_per_node - _fixed_bytes(job)) // _batch_bytes(job))


def format_plan(plan: Plan) -> str:
    """The plan as text."""
    job, disk, times = plan.job, plan.disk, plan.times
    node = "node" if job.num_nodes == 1 else f"each of {job.num_nodes} nodes"
    at_most = "" if disk.exact else "at most "
    samples = int(job.slice_samples.sum())
    rows: list[tuple[str, str]] = [
        ("dataset", f"{plan.slices_of_run:,} slices, {format_bytes(plan.total_bytes)}, {samples:,} samples"),
        ("order", f"lanes={plan.lanes}, window={plan.window}"),
        ("steps", f"{plan.steps_per_epoch:,} of {job.global_batch} samples an epoch"),
        (f"{node} reads", f"{at_most}{disk.epoch_slices:,} slices, {format_bytes(disk.epoch_bytes)} an epoch"),
        ("all nodes fetch", f"about {plan.fetch_ratio:.2f} x the dataset an epoch"),
        ("open at once", f"{at_most}{disk.open_slices:,} slices, {format_bytes(disk.open_bytes)}"),
        ("with the next", f"{at_most}{disk.next_slices:,} slices, {format_bytes(disk.next_bytes)}"),
        (
            "smallest cache",
            f"{format_bytes(disk.least_bytes)}; none is fetched twice with {format_bytes(2 * disk.once_bytes)}",
        ),
        ("cache", f"cache_bytes={plan.cache_bytes}, peak disk {format_bytes(plan.peak_disk_bytes)}"),
        ("fetched", f"at most {format_bytes(plan.fetched_bytes)} in {job.epochs} epoch{'s' * (job.epochs > 1)}"),
        ("slice", f"{format_bytes(job.slice_bytes.mean())} on average, in {_requests(plan)}"),
        ("memory", f"{format_bytes(plan.memory_bytes)} for batches of {rank_batch(job)} a rank"),
        ("dataset in memory", _in_memory(plan)),
    ]
    if plan.largest_batch is not None:
        rows.append(("largest batch", f"{plan.largest_batch:,} a rank, {plan.largest_batch * job.world_size:,} in all"))
    if plan.first_batch_s is not None:
        rows.append(
            ("first batch after", f"{format_seconds(plan.first_batch_s)} ({format_bytes(plan.first_batch_bytes)})")
        )
    if plan.slice_fetch_s is not None:
        rows.append(("slice fetched in", format_seconds(plan.slice_fetch_s)))
    if plan.slice_lasts_s is not None:
        rows.append(("slice lasts", f"{format_seconds(plan.slice_lasts_s)} in training"))
    if job.step_s is not None:
        needed = plan.needed_bandwidth
        enough = "none: no space to prefetch" if needed is None else format_rate(needed)
        rows.append(("bandwidth enough", enough))
    if times is not None:
        parts = (times.stall_s, times.stall_s / max(1, plan.swaps), times.stall_s / max(1, plan.steps_per_epoch))
        stall, of_swap, of_step = map(format_seconds, parts)
        rows.append(("stall", f"{stall} an epoch, {of_swap} a swap, {of_step} a step"))
        rows.append(("epoch", format_seconds(times.total_s)))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    lines += [f"warning: {text}" for text in plan.warnings]
    lines += [f"refused: {text}" for text in plan.refused]
    lines += [f"advice: {text}" for text in plan.advice]
    return "\n".join([*lines, "ok" if plan.ok else "NOT ok: this run cannot work as requested"])


def _requests(plan: Plan) -> str:
    count = -(-int(plan.job.slice_bytes.max()) // plan.job.piece_bytes)
    return f"{count:,} request{'' if count == 1 else 's'}"


def _in_memory(plan: Plan) -> str:
    if plan.job.mem_bytes is None:
        return f"needs {format_bytes(plan.total_bytes + plan.memory_bytes)}"
    fits = plan.total_bytes + plan.memory_bytes <= plan.job.mem_bytes
    return (
        f"{'fits' if fits else 'does not fit'}: {format_bytes(plan.total_bytes)} of {format_bytes(plan.job.mem_bytes)}"
    )


@dataclass(frozen=True)
class ModelPlan:
    """The figures of a model."""

    model_size: str
    seq_len: int
    vocab_size: int
    device_bytes: int
    parameters: int
    state_bytes: int  # Weights, gradients and the optimizer's moments.
    sample_bytes: int  # For each sample of a batch.
    largest_batch: int  # The most samples that fit; 0 if none does.
    batch_size: int  # Proposed: the size's default, or as many as fit.

    @property
    def ok(self) -> bool:
        return self.largest_batch > 0

    def words(self) -> str:
        """As text."""
        state, sample, device = map(format_bytes, (self.state_bytes, self.sample_bytes, self.device_bytes))
        lines = [
            f"{'model':<18} {self.model_size}, {self.parameters / 1e6:,.1f} M weights, vocabulary {self.vocab_size:,}",
            f"{'its memory':<18} {state}, and {sample} a sample of {self.seq_len:,} tokens",
        ]
        if self.ok:
            lines.append(f"{'batch':<18} batch_size={self.batch_size}; at most {self.largest_batch:,} fit {device}")
        else:
            lines.append(
                f"refused: {self.model_size} does not fit {device} with one sample of {self.seq_len} tokens. Choose a "
                "smaller model or shorter samples."
            )
        return "\n".join(lines)


def plan_model(model_size: str, seq_len: int, vocab_size: int, device_bytes: int) -> ModelPlan:
    """The figures of a model of `SIZES` on a device."""
    size = SIZES[model_size]
    largest = size.largest_batch(vocab_size, seq_len, device_bytes)
    return ModelPlan(
        model_size,
        seq_len,
        vocab_size,
        device_bytes,
        size.num_parameters(vocab_size, seq_len),
        size.state_bytes(vocab_size, seq_len),
        size.sample_bytes(vocab_size, seq_len),
        largest,
        min(size.batch_size, largest),
    )


COMMON_BYTES_PER_S = 125e6  # 1 Gb/s
COMMON_MEM_BYTES = 4 * 10**9
_STALL_PART = 0.01  # Of an epoch; less is not reported.


def make_plan(job: RunSpec) -> Plan:
    """The plan of a job: figures, refusals, warnings and advice. At most 2 s for 250 000 slices."""
    plan = figures_of(job)
    refused, advice = _refusals(plan)
    traffic = None
    if not refused:
        chosen = replace(job, lanes=plan.lanes, window=plan.window, cache_bytes=plan.cache_bytes)
        try:
            traffic = check_traffic(chosen, chosen.order(), plan.nodes)
        except UsageError as error:
            refused = [str(error)]
    plan = replace(plan, refused=refused)
    warnings, more = _warnings(plan)
    return replace(plan, warnings=[*warnings, *([traffic] if traffic else [])], advice=[*advice, *more])


def _refusals(plan: Plan) -> tuple[list[str], list[str]]:
    job, disk = plan.job, plan.disk
    refused, advice = [], []
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
        advice += _narrower(plan)
    return refused, advice


def _narrower(plan: Plan) -> list[str]:
    """Lanes and a window that fit, if any."""
    job = plan.job
    order, nodes = fit_lanes(replace(job, lanes=None, window=None))
    disk = largest_needs(nodes)[0]
    if job.cache_limit is not None and disk.least_bytes <= job.cache_limit:
        return [
            f"lanes={order.num_lanes}, window={order.window_samples} keep {format_bytes(disk.open_bytes)} open, "
            f"{format_bytes(disk.next_bytes)} with the next windows."
        ]
    return [f"No lanes need less than {format_bytes(disk.least_bytes)}: prepare smaller slices (--slice-bytes)."]


def _warnings(plan: Plan) -> tuple[list[str], list[str]]:
    job, disk, times = plan.job, plan.disk, plan.times
    warnings, advice = [], []
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
    if job.volume_bytes is not None and job.volume_bytes < min(COMMON_DISK_BYTES, disk.next_bytes):
        needed = format_bytes(min(COMMON_DISK_BYTES, disk.next_bytes))
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
    return warnings, advice
