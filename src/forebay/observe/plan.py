"""Plan a run before it starts: bytes, disk, time and memory of a node, with refusals, warnings and advice.

Reads only the sizes of slices. Disk figures follow from the shape of the order (`load/resources.py`); memory is a sum
of bounds. Times come from a model of one node and one link: chunks arrive at full bandwidth in the order of their use,
which is even over an epoch. Latency and other traffic are not modelled.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from forebay.errors import UsageError
from forebay.fetch.feed import CacheSettings
from forebay.load import resources
from forebay.load.resources import RunSpec
from forebay.order.plan import Order, part_of
from forebay.units import format_bytes, format_rate, format_seconds
from forebay.worker.config import SIZES

_BASE_BYTES = 96 << 20  # Of a Python process with the loader imported: 76 MiB measured.
_SLICE_BYTES = 100 + 2 * 16  # Of the table and of two epochs' order.
_CONNECTION_BYTES = 256 << 10
_BATCHES = 2  # The caller's, and the one being built.
_TOKEN_BYTES = 8
COMMON_BYTES_PER_S = 125e6  # 1 Gb/s
COMMON_MEM_BYTES = 4 * 10**9
_HIT_SHARE = 0.87  # Of a cache that has room for a part of an epoch: chunks that the next epoch finds, measured.
_AHEAD_SHARE = 0.6  # Of what is planned ahead: how much is trained on after the last chunk came, measured.
_START_S = 0.1  # Of a loader: opening the dataset, threads, connections, the first requests; measured.
_STALL_PART = 0.01  # Of an epoch; less is not reported.
MIN_CACHE_PART = 50  # Of the dataset; what is proposed is no smaller part.


@dataclass
class RunPlan:
    """The figures of a run; `refused` has the reasons why it cannot run as requested. None: not known."""

    job: RunSpec
    nodes: list[resources.NodeNeeds] = field(repr=False)
    lanes: int
    window: int  # In samples of a lane.
    steps_per_epoch: int
    disk: resources.NodeNeeds  # Of the node that reads most.
    least_bytes: int  # The smallest cache with which nothing but the edges of lanes is fetched twice.
    cache_bytes: int
    peak_disk_bytes: int
    fetched_bytes: int  # By a node, in all epochs.
    fetch_ratio: float
    samples_of_rank: tuple[int, int]  # Of the rank with fewest and of that with most, in an epoch.
    rank_bytes: int  # That the latter reads in an epoch.
    first_batch_bytes: int
    memory_bytes: int
    largest_batch: int | None  # Of a rank, with which the loader fits the memory; 0 if none.
    first_batch_s: float | None = None
    slice_fetch_s: float | None = None
    stall_s: float | None = None  # Of the first epoch, after the first batch.
    epoch_s: float | None = None  # The first, from the start of fetching to the end of training.
    finish_s: float | None = None  # All epochs.
    wait_share: float | None = None  # Of the time of all epochs.
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
        job, hidden = self.job, ("job", "nodes", "disk")
        plain = {name: value for name, value in vars(self).items() if name not in hidden}
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
            "fits_memory": self.fits_memory,
        }


def make_plan(job: RunSpec) -> RunPlan:
    """The plan of a run: figures, refusals, warnings and advice. At most 2 s for 250 000 slices."""
    plan = _figures(job)
    _refuse(plan)
    traffic = None
    if plan.ok:
        chosen = replace(job, cache_bytes=plan.cache_bytes)
        try:
            traffic = resources.check_traffic(chosen, chosen.order(), plan.nodes)
        except UsageError as error:
            plan.refused.append(str(error))
    _warn(plan)
    plan.warnings.extend([traffic] if traffic else [])
    return plan


def _figures(job: RunSpec) -> RunPlan:
    order = job.order()
    nodes = resources.needs_of_nodes(job, order)
    disk, total_bytes = nodes[0], int(job.slice_bytes.sum())
    proposed = min(max(disk.next_bytes, total_bytes // MIN_CACHE_PART), disk.epoch_bytes)
    cache = job.cache_bytes
    if cache is None:
        cache = proposed if job.volume_bytes is None else min(proposed, job.volume_bytes)
    per_epoch = max(resources.fetched_bytes(job, node, cache) for node in nodes)
    batch_size = -(-job.global_batch // job.world_size)
    fixed_bytes, sample_bytes = _memory_bytes(job)
    demand = np.minimum(resources.first_demand(job, order), total_bytes)
    samples_of_rank = _samples_of_rank(job, order)
    plan = RunPlan(
        job, nodes, order.num_lanes, order.window_samples, order.steps_per_epoch, disk,
        least_bytes=min(disk.open_bytes, disk.epoch_bytes),
        cache_bytes=cache,
        peak_disk_bytes=min(cache, total_bytes),
        fetched_bytes=min(total_bytes, per_epoch * job.epochs) if cache >= total_bytes else per_epoch * job.epochs,
        fetch_ratio=resources.fetch_ratio(job, nodes, cache),
        samples_of_rank=samples_of_rank,
        rank_bytes=min(total_bytes, int(samples_of_rank[1] * job.size.sample_bytes)),
        first_batch_bytes=int(demand[0]),
        memory_bytes=job.ranks_per_node * (fixed_bytes + sample_bytes * batch_size),
        largest_batch=None if job.mem_bytes is None
        else max(0, (job.mem_bytes // job.ranks_per_node - fixed_bytes) // sample_bytes),
    )  # fmt: skip
    if job.bandwidth is not None:
        plan.slice_fetch_s = float(job.slice_bytes.mean()) / job.bandwidth
        plan.first_batch_s = _START_S + plan.first_batch_bytes / job.bandwidth
    if job.step_s is not None and plan.steps_per_epoch:
        train_s = plan.steps_per_epoch * job.step_s
        plan.needed_bandwidth = per_epoch / train_s
        if job.bandwidth is not None and plan.first_batch_s is not None:
            # By the bytes of the epoch, or of the first steps, each of whose samples has a chunk of its own.
            late_s = (demand - demand[0]) / job.bandwidth - job.step_s * np.arange(len(demand))
            settings = CacheSettings("", cache, job.connections, None, False, open_bytes=disk.open_bytes)
            last_s = _AHEAD_SHARE * min(1.0, settings.ahead_bytes(1) / max(1, disk.epoch_bytes)) * train_s
            plan.stall_s = max(0.0, per_epoch / job.bandwidth + last_s - train_s, float(late_s.max()))
            plan.epoch_s = plan.first_batch_s + plan.stall_s + train_s
            # In later epochs a part is in the cache, from which what is used last is evicted first.
            later_bytes = per_epoch * (1 - _HIT_SHARE * min(1.0, cache / max(1, disk.epoch_bytes)))
            later_bytes = 0 if cache >= min(total_bytes, disk.epoch_bytes + disk.again_bytes) else later_bytes
            later_stall_s = max(0.0, later_bytes / job.bandwidth - train_s)
            plan.finish_s = plan.epoch_s + (job.epochs - 1) * (train_s + later_stall_s)
            plan.wait_share = 1 - job.epochs * train_s / plan.finish_s
    return plan


def _memory_bytes(job: RunSpec) -> tuple[int, int]:
    """Memory of a rank's process without batches, and of one sample in all batches that exist at once."""
    fixed = _BASE_BYTES + _SLICE_BYTES * len(job.slice_bytes) + _CONNECTION_BYTES * job.connections
    if job.seq_len is not None:
        sample = (job.seq_len + 1) * _TOKEN_BYTES
    else:
        sample = -(-int(job.slice_bytes.sum()) // int(job.slice_samples.sum()))
    return fixed, sample * (_BATCHES + job.prefetch)


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
    job, disk = plan.job, plan.disk
    node = "node" if job.num_nodes == 1 else f"each of {job.num_nodes} nodes"
    total, memory = map(format_bytes, (plan.total_bytes, plan.memory_bytes))
    rows: list[tuple[str, str]] = [
        ("dataset", f"{len(job.slice_bytes):,} slices, {total}, {int(job.slice_samples.sum()):,} samples"),
        ("order", f"lanes={plan.lanes}, window={plan.window} samples"),
        ("steps", f"{plan.steps_per_epoch:,} of {job.global_batch} samples an epoch"),
        (f"{node} reads", f"{disk.num_lanes:,} lanes, {format_bytes(disk.epoch_bytes)} an epoch"),
        ("a rank reads", f"{format_bytes(plan.rank_bytes)} an epoch, {plan.samples_of_rank[1]:,} samples"),
        ("all nodes fetch", f"about {plan.fetch_ratio:.2f} x the dataset an epoch"),
        ("open at once", f"{format_bytes(disk.open_bytes)}; with the next windows {format_bytes(disk.next_bytes)}"),
        ("smallest cache", format_bytes(plan.least_bytes)),
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
    if plan.needed_bandwidth is not None:
        rows.append(("bandwidth enough", format_rate(plan.needed_bandwidth)))
    if plan.stall_s is not None and plan.epoch_s is not None:
        stall, of_step = map(format_seconds, (plan.stall_s, plan.stall_s / max(1, plan.steps_per_epoch)))
        rows += [("stall", f"{stall} an epoch, {of_step} a step"), ("epoch", format_seconds(plan.epoch_s))]
    if plan.finish_s is not None and plan.wait_share is not None:
        rows += [("waits", f"{plan.wait_share:.1%} of the time"), ("finishes after", format_seconds(plan.finish_s))]
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
    job, refused = plan.job, plan.refused
    opens = f"{format_bytes(plan.disk.open_bytes)} are open at once: lanes={plan.lanes}, window={plan.window} samples"
    for name, size in (("cache", job.cache_bytes), ("disk", job.volume_bytes)):
        if size is not None and size < plan.least_bytes:
            refused.append(
                f"{name}: expected at least {plan.least_bytes} bytes ({opens}), got {size} bytes. Chunks would be "
                "fetched repeatedly, and training would wait for each."
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


def _warn(plan: RunPlan) -> None:
    job, disk, warnings, advice = plan.job, plan.disk, plan.warnings, plan.advice
    if plan.ok and plan.cache_bytes < min(disk.next_bytes, disk.epoch_bytes):
        warnings.append(
            f"cache: {format_bytes(plan.cache_bytes)} have room for the open windows and not for the next ones: "
            "training waits at each new window."
        )
        advice.append(f"cache_bytes={disk.next_bytes} has room for the next windows too.")
    if job.bandwidth is not None and job.bandwidth < COMMON_BYTES_PER_S:
        warnings.append(f"bandwidth: {job.bandwidth * 8 / 1e9:.3g} Gb/s; runs like this have 1 Gb/s or more.")
    if job.volume_bytes is not None and job.volume_bytes < min(disk.next_bytes, disk.epoch_bytes):
        warnings.append(
            f"disk: {format_bytes(job.volume_bytes)} are less than the {format_bytes(disk.next_bytes)} "
            "needed to never wait."
        )
    if job.mem_bytes is not None and job.mem_bytes < COMMON_MEM_BYTES:
        warnings.append(f"memory: {format_bytes(job.mem_bytes)}; runs like this have 4 GB or more.")
    if job.mem_bytes is not None and plan.memory_bytes > job.mem_bytes and plan.largest_batch:
        warnings.append(f"memory: the loader takes {format_bytes(plan.memory_bytes)} of {format_bytes(job.mem_bytes)}.")
        advice.append(f"batch_size={plan.largest_batch} (global {plan.largest_batch * job.world_size}) fits.")
    if plan.stall_s is not None and plan.epoch_s is not None and plan.stall_s > _STALL_PART * plan.epoch_s:
        warnings.append(
            f"bandwidth: training waits {plan.stall_s / plan.epoch_s:.0%} of the time for data "
            f"({format_seconds(plan.stall_s)} an epoch)."
        )
        if plan.needed_bandwidth is not None:
            advice.append(f"{format_rate(plan.needed_bandwidth)} would suffice to never wait.")
