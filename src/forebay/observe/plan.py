"""Plan a run before it starts: bytes, disk, time and memory of a node, with refusals, warnings and advice.

Reads only the sizes of slices. Disk figures follow from the shape of the order (`order/footprint.py`); memory is a sum
of bounds. Times come from a model of one node and one link: chunks arrive at full bandwidth in the order of their use,
which is even over an epoch. Latency and other traffic are not modelled.
"""

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field

import numpy as np

from forebay.arrays import I64
from forebay.base import Json
from forebay.dataset.chunks import chunk_size
from forebay.errors import UsageError
from forebay.fetch.cache import CacheSettings
from forebay.order.footprint import (
    MAX_RATIO,
    Footprint,
    NodeNeeds,
    cache_shares,
    check_traffic,
    fetch_ratios,
    first_demand,
    footprints,
    num_requests,
)
from forebay.order.mixture import Weights
from forebay.order.plan import Order, SampleSize, part_of
from forebay.order.run import Run
from forebay.order.step_index import BatchSizes
from forebay.units import format_bytes, format_rate, format_seconds, numbered
from forebay.worker.config import SIZES

_BASE_BYTES = 96 << 20  # Of a Python process with the loader imported: 76 MiB measured.
_SLICE_BYTES = 100 + 2 * 16  # Of the table and of two epochs' order.
_CONNECTIONS = 16
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


@dataclass(frozen=True)
class DatasetSpec:
    """The sizes of a dataset, which need not exist yet."""

    slice_bytes: I64  # int64 [S].
    slice_samples: I64  # int64 [S].
    chunk_bytes: int | None = None  # None: that of new datasets.
    name: str = ""

    @property
    def num_bytes(self) -> int:
        return int(self.slice_bytes.sum())


@dataclass(frozen=True)
class RunSpec:
    """A run and its nodes. Bytes, seconds, bytes per second; None: not known."""

    datasets: Sequence[DatasetSpec]
    global_batch: int
    seq_len: int | None = None  # None for rows.
    weights: Weights | None = None  # Of a mixture. Figures are by the first of them.
    world_size: int = 1
    ranks_per_node: int = 1
    epochs: int = 1
    lanes: int | None = None  # None: the loader's default.
    window: int | None = None  # In samples; as `lanes`.
    cache_bytes: int | None = None  # Of a node's cache; None: what the plan proposes.
    volume_bytes: int | None = None  # Of the cache's disk.
    mem_bytes: int | None = None  # Of a node.
    bandwidth: float | None = None
    step_s: float | None = None  # A step of training, without waiting.
    whole_in_memory: bool = False  # The cache is in memory (`cache="ram"`).
    max_fetch_ratio: float = MAX_RATIO  # Limit of bytes fetched by all nodes in an epoch / the dataset's; or 0.
    swarm: bool = False  # Nodes fetch from each other: what several nodes read is fetched once.

    def run(self) -> Run:
        """The run, by the loader's defaults."""
        if not all(spec.slice_samples.any() for spec in self.datasets):
            raise UsageError("plan: expected samples, got none. Ask for shorter samples (seq_len), or check the sizes.")
        orders = []
        for number, spec in enumerate(self.datasets):
            chunk = chunk_size(int(spec.slice_bytes.max())) if spec.chunk_bytes is None else spec.chunk_bytes
            size = SampleSize.of(spec.slice_bytes, spec.slice_samples, chunk)
            orders.append(Order(spec.slice_samples, number, self.global_batch, self.lanes, self.window, size=size))
        return Run(orders, BatchSizes.of(self.global_batch), weights=self.weights)

    def footprints(self, run: Run) -> list[Footprint]:
        names = [spec.name for spec in self.datasets]
        return footprints(run, names, self.world_size, self.ranks_per_node, self.swarm)


@dataclass
class RunPlan:
    """The figures of a run; `refused` has the reasons why it cannot run as requested. None: not known.

    An epoch of a mixture lasts until the dataset of the largest weight is read once.
    """

    job: RunSpec
    parts: list[Footprint] = field(repr=False)  # Of each dataset.
    passes: list[float]  # How often an epoch reads each dataset.
    steps_per_epoch: int
    disk: NodeNeeds  # Of the node that reads most.
    cache_bytes: int
    fetched_bytes: int  # By a node, in all epochs.
    fetch_ratio: float
    fetch_ratios: list[float]  # Of each dataset.
    requests: int  # Of all nodes, in an epoch.
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
        return sum(spec.num_bytes for spec in self.job.datasets)

    @property
    def least_bytes(self) -> int:
        """The smallest cache with which nothing but the edges of lanes is fetched twice."""
        return min(self.disk.open_bytes, self.disk.epoch_bytes)

    @property
    def peak_disk_bytes(self) -> int:
        return min(self.cache_bytes, self.total_bytes)

    @property
    def fits_memory(self) -> bool | None:
        """Whether all data fit the memory of a node."""
        memory = self.job.mem_bytes
        return None if memory is None else self.total_bytes + self.memory_bytes <= memory

    def datasets(self) -> list[Json]:
        """The figures of each dataset by name: plain values."""
        return [
            {
                "name": spec.name,
                "slices": len(spec.slice_bytes),
                "bytes": spec.num_bytes,
                "samples": part.order.num_samples,
                **part.order.shape,
                "passes": passes,
                "fetch_ratio": ratio,
                **asdict(part.nodes[0]),
            }
            for spec, part, passes, ratio in zip(self.job.datasets, self.parts, self.passes, self.fetch_ratios)
        ]

    def to_json(self) -> Json:
        """Plain values: `ok`, the figures by name, `loader` (arguments to use), `refused`, `warnings`, `advice`."""
        hidden, datasets = ("job", "parts", "disk"), self.datasets()
        shape = self.parts[0].order.shape if len(datasets) == 1 else {}
        return {
            "ok": self.ok,
            "name": ", ".join(of["name"] for of in datasets),
            **{name: sum(of[name] for of in datasets) for name in ("slices", "bytes", "samples")},
            "nodes": self.parts[0].num_nodes,
            **{name: value for name, value in vars(self).items() if name not in hidden},
            **{name: getattr(self, name) for name in ("least_bytes", "peak_disk_bytes", "fits_memory")},
            **asdict(self.disk),
            "datasets": datasets,
            "loader": {**shape, "cache_bytes": self.cache_bytes},
        }


def make_plan(job: RunSpec) -> RunPlan:
    """The plan of a run: figures, refusals, warnings and advice. At most 2 s for 250 000 slices."""
    plan = _figures(job)
    _refuse(plan)
    traffic = []
    if plan.ok:
        try:
            traffic = check_traffic(plan.parts, plan.cache_bytes, job.max_fetch_ratio)
        except UsageError as error:
            plan.refused.append(str(error))
    _warn(plan)
    plan.warnings.extend(traffic)
    return plan


def _figures(job: RunSpec) -> RunPlan:
    run = job.run()
    parts, num_samples = job.footprints(run), np.array([order.num_samples for order in run.orders])
    quotas = np.array([1]) if job.weights is None else job.weights.quotas[0]
    steps = run.steps_per_epoch
    if job.weights is not None:
        steps = -(-int(num_samples[quotas.argmax()] / (quotas.max() / quotas.sum())) // job.global_batch)
    passes = [1.0] if job.weights is None else (steps * job.global_batch * quotas / quotas.sum() / num_samples).tolist()
    nodes = [part.nodes[0] for part in parts]
    disk = NodeNeeds(nodes[0].count, *(sum(of) for of in zip(*(astuple(node)[1:] for node in nodes))))
    total_bytes = sum(spec.num_bytes for spec in job.datasets)
    batch_size = -(-job.global_batch // job.world_size)
    fixed_bytes, sample_bytes = _memory_bytes(job)
    memory_bytes = job.ranks_per_node * (fixed_bytes + sample_bytes * batch_size)
    cache = job.cache_bytes
    if cache is None:
        limits = [min(max(disk.next_bytes, total_bytes // MIN_CACHE_PART), disk.epoch_bytes), job.volume_bytes]
        if job.whole_in_memory and job.mem_bytes is not None:
            limits.append(max(0, job.mem_bytes - memory_bytes))
        cache = min(limit for limit in limits if limit is not None)
    fetched = [
        max(part.fetched_bytes(node, share) for node in part.nodes)
        for part, share in zip(parts, cache_shares(parts, cache))
    ]
    per_epoch, ratios = int(np.dot(passes, fetched)), fetch_ratios(parts, cache)
    settings = CacheSettings("", cache, _CONNECTIONS, None, False)
    read_bytes = np.array(passes) * [part.num_bytes for part in parts]
    demand = np.minimum(first_demand(run, job.ranks_per_node, job.world_size), total_bytes)
    samples_of_rank = _samples_of_rank(
        job, steps * job.global_batch if job.weights is not None else int(num_samples[0])
    )
    plan = RunPlan(
        job, parts, passes, steps, disk,
        cache_bytes=cache,
        fetched_bytes=min(total_bytes, per_epoch * job.epochs) if cache >= total_bytes else per_epoch * job.epochs,
        fetch_ratio=float(np.dot(ratios, read_bytes) / read_bytes.sum()),
        fetch_ratios=ratios,
        requests=int(np.dot(passes, num_requests(parts, cache, settings.neighbour_bytes()))),
        samples_of_rank=samples_of_rank,
        rank_bytes=int(samples_of_rank[1] * read_bytes.sum() / np.dot(passes, num_samples)),
        first_batch_bytes=int(demand[0]),
        memory_bytes=memory_bytes,
        largest_batch=None if job.mem_bytes is None
        else max(0, (job.mem_bytes // job.ranks_per_node - fixed_bytes) // sample_bytes),
    )  # fmt: skip
    if job.bandwidth is not None:
        plan.slice_fetch_s = float(np.concatenate([spec.slice_bytes for spec in job.datasets]).mean()) / job.bandwidth
        plan.first_batch_s = _START_S + plan.first_batch_bytes / job.bandwidth
    if job.step_s is not None and plan.steps_per_epoch:
        train_s = plan.steps_per_epoch * job.step_s
        plan.needed_bandwidth = per_epoch / train_s
        if job.bandwidth is not None and plan.first_batch_s is not None:
            # By the bytes of the epoch, or of the first steps, each of whose samples has a chunk of its own.
            late_s = (demand - demand[0]) / job.bandwidth - job.step_s * np.arange(len(demand))
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
    num_slices = sum(len(spec.slice_bytes) for spec in job.datasets)
    fixed = _BASE_BYTES + _SLICE_BYTES * num_slices + _CONNECTION_BYTES * _CONNECTIONS
    if job.seq_len is not None:
        sample = (job.seq_len + 1) * _TOKEN_BYTES
    else:
        sample = max(-(-spec.num_bytes // int(spec.slice_samples.sum())) for spec in job.datasets)
    return fixed, sample * _BATCHES


def _samples_of_rank(job: RunSpec, num_samples: int) -> tuple[int, int]:
    """The fewest and the most samples of a rank in an epoch."""
    full, rest = divmod(num_samples, job.global_batch)
    shares = []
    for rank in range(job.world_size):
        (low, high), (first, last) = (part_of(size, rank, job.world_size) for size in (job.global_batch, rest))
        shares.append(full * (high - low) + last - first)
    return min(shares), max(shares)


def format_plan(plan: RunPlan) -> str:
    """The plan as text."""
    job, disk = plan.job, plan.disk
    num_nodes, total, memory = plan.parts[0].num_nodes, *map(format_bytes, (plan.total_bytes, plan.memory_bytes))
    node = "node" if num_nodes == 1 else f"each of {num_nodes} nodes"
    rows = []
    for of, part in zip(plan.datasets(), plan.parts):
        text = f"{numbered(of['slices'], 'slice')}, {format_bytes(of['bytes'])}, {of['samples']:,} samples"
        if job.weights is not None:
            text += f", {of['passes']:.3g} times an epoch; fetched {of['fetch_ratio']:.2f} x"
        rows += [(f"dataset {of['name']}" if job.weights else "dataset", text), ("order", str(part.order))]
    rows += [
        ("steps", f"{plan.steps_per_epoch:,} of {job.global_batch} samples an epoch"),
        (f"{node} reads", f"{format_bytes(disk.epoch_bytes)} an epoch"),
        ("a rank reads", f"{format_bytes(plan.rank_bytes)} an epoch, {plan.samples_of_rank[1]:,} samples"),
        ("all nodes fetch", f"about {plan.fetch_ratio:.2f} x the dataset an epoch, by {plan.requests:,} requests"),
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


def plan_model(model_size: str, seq_len: int, vocab_size: int, device_bytes: int) -> Json:
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


def format_model(model: Json) -> str:
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
    shapes = "; ".join(str(part.order) for part in plan.parts)
    opens = f"{format_bytes(plan.disk.open_bytes)} are open at once: {shapes}"
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
            f"cache='ram': expected memory for the cache of {plan.peak_disk_bytes} bytes and the loader's "
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
