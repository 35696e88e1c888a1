"""A plan as a person reads it."""

from __future__ import annotations

from forebay.observe.plan import Plan, rank_batch
from forebay.sizes import words_of_bytes as told
from forebay.sizes import words_of_rate, words_of_seconds


def words(plan: Plan) -> str:
    """The plan as a person reads it."""
    job, disk, times = plan.job, plan.disk, plan.times
    node = "node" if job.num_nodes == 1 else f"each of {job.num_nodes} nodes"
    most = "" if disk.exact else "at most "
    samples = int(job.slice_samples.sum())
    rows: list[tuple[str, str]] = [
        ("dataset", f"{plan.slices_of_run:,} slices, {told(plan.total_bytes)}, {samples:,} samples"),
        ("order", f"lanes={plan.lanes}, window={plan.window}"),
        ("steps", f"{plan.steps_per_epoch:,} of {job.global_batch} samples an epoch"),
        (f"{node} reads", f"{most}{disk.epoch_slices:,} slices, {told(disk.epoch_bytes)} an epoch"),
        ("all nodes fetch", f"about {plan.fetch_ratio:.2f} x the dataset an epoch"),
        ("open at once", f"{most}{disk.open_slices:,} slices, {told(disk.open_bytes)}"),
        ("with the next", f"{most}{disk.next_slices:,} slices, {told(disk.next_bytes)}"),
        (
            "least cache",
            f"{told(disk.least_bytes)}; with {told(2 * disk.once_bytes)} nothing is fetched twice in an epoch",
        ),
        ("cache", f"cache_bytes={plan.cache_bytes}, peak disk {told(plan.peak_disk_bytes)}"),
        ("fetched", f"at most {told(plan.fetched_bytes)} in {job.epochs} epoch{'s' * (job.epochs > 1)}"),
        ("slice", f"{told(job.slice_bytes.mean())} on average, in {_requests(plan)}"),
        ("memory", f"{told(plan.memory_bytes)} for batches of {rank_batch(job)} a rank"),
        ("in memory whole", _in_memory(plan)),
    ]
    if plan.most_batch is not None:
        rows.append(("largest batch", f"{plan.most_batch:,} a rank, {plan.most_batch * job.world_size:,} in all"))
    if plan.first_batch_s is not None:
        rows.append(("first batch after", f"{words_of_seconds(plan.first_batch_s)} ({told(plan.first_batch_bytes)})"))
    if plan.slice_fetch_s is not None:
        rows.append(("slice comes in", words_of_seconds(plan.slice_fetch_s)))
    if plan.slice_lasts_s is not None:
        rows.append(("slice lasts", f"{words_of_seconds(plan.slice_lasts_s)} in training"))
    if job.step_s is not None:
        needed = plan.needed_bandwidth
        enough = "none is: no room to fetch ahead" if needed is None else words_of_rate(needed)
        rows.append(("bandwidth enough", enough))
    if times is not None:
        parts = (times.stall_s, times.stall_s / max(1, plan.swaps), times.stall_s / max(1, plan.steps_per_epoch))
        stall, of_swap, of_step = map(words_of_seconds, parts)
        rows.append(("stall", f"{stall} an epoch, {of_swap} a swap, {of_step} a step"))
        rows.append(("epoch", words_of_seconds(times.total_s)))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    lines += [f"warning: {text}" for text in plan.warnings]
    lines += [f"refused: {text}" for text in plan.refused]
    lines += [f"advice: {text}" for text in plan.advice]
    return "\n".join([*lines, "ok" if plan.ok else "NOT ok: this run would not do what was asked"])


def _requests(plan: Plan) -> str:
    count = -(-int(plan.job.slice_bytes.max()) // plan.job.piece_bytes)
    return f"{count:,} request{'' if count == 1 else 's'}"


def _in_memory(plan: Plan) -> str:
    if plan.job.mem_bytes is None:
        return f"needs {told(plan.total_bytes + plan.memory_bytes)}"
    fits = plan.total_bytes + plan.memory_bytes <= plan.job.mem_bytes
    return f"{'fits' if fits else 'does not fit'}: {told(plan.total_bytes)} of {told(plan.job.mem_bytes)}"
