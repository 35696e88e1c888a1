"""What of a plan cannot be, what will be slow, and what to do: its refusals, warnings and advice."""

from dataclasses import replace

from forebay.errors import UsageError
from forebay.load.needs import COMMON_DISK_BYTES, Job, check_traffic, fitting, worst_of
from forebay.observe.plan import Plan, figures_of
from forebay.sizes import words_of_bytes as told
from forebay.sizes import words_of_rate, words_of_seconds

COMMON_BYTES_PER_S = 125e6  # 1 Gb/s
COMMON_MEM_BYTES = 4 * 10**9
_STALL_PART = 0.01  # Of an epoch; less is not worth a line.


def make_plan(job: Job) -> Plan:
    """A job's figures, and what is to be said of them. Two seconds for 250 000 slices at the most.

    Raises:
        UsageError: If an argument is out of range.
    """
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
    opens = f"{disk.open_slices} slices, {told(disk.open_bytes)}, are open at once"
    where = f"lanes={plan.lanes}, window={plan.window}"
    for name, size in (("cache", job.cache_bytes), ("volume", job.volume_bytes)):
        if size is not None and size < disk.least_bytes:
            refused.append(
                f"{name}: expected at least {disk.least_bytes} bytes ({opens}: {where}), got {size} bytes. "
                "Slices would be fetched over and over, and training would wait for each."
            )
    if job.cache_bytes is not None and job.volume_bytes is not None and job.cache_bytes > job.volume_bytes:
        refused.append(
            f"volume: expected room for the cache of {job.cache_bytes} bytes, got {job.volume_bytes} bytes. "
            "Lower the cache's budget, or choose another disk."
        )
    whole = plan.total_bytes
    if job.keep == "all" and job.room is not None and job.room < whole:
        refused.append(
            f"keep='all': expected room for the whole dataset, {whole} bytes, got {job.room} bytes. "
            "Let the cache evict (keep='budget')."
        )
    memory = job.mem_bytes
    if job.whole_in_memory and memory is not None and plan.peak_disk_bytes + plan.memory_bytes > memory:
        refused.append(
            f"cache_dir='ram': expected memory for the cache of {plan.peak_disk_bytes} bytes and the loader's "
            f"{plan.memory_bytes}, got {memory} bytes. Keep the cache on a disk, or give it less."
        )
    if any(text.startswith(("cache:", "volume: expected at least")) for text in refused):
        advice += _narrower(plan)
    return refused, advice


def _narrower(plan: Plan) -> list[str]:
    """Lanes and a window that fit the room, if any do."""
    job = plan.job
    order, nodes = fitting(replace(job, lanes=None, window=None))
    disk = worst_of(nodes)[0]
    if job.room is not None and disk.least_bytes <= job.room:
        return [
            f"lanes={order.num_lanes}, window={order.window_samples} keep {told(disk.open_bytes)} open, "
            f"{told(disk.next_bytes)} with the next windows."
        ]
    return [f"Nothing needs less than {told(disk.least_bytes)}: prepare smaller slices (--slice-bytes)."]


def _warnings(plan: Plan) -> tuple[list[str], list[str]]:
    job, disk, times = plan.job, plan.disk, plan.times
    warnings, advice = [], []
    usual = job.order().num_lanes
    if job.lanes is None and job.window is None and usual != plan.lanes:
        warnings.append(
            f"the loader's own {usual} lanes would open more than fits: this plan is for lanes={plan.lanes}, "
            f"window={plan.window}. Give them to the Loader."
        )
    if plan.ok and plan.cache_bytes < min(disk.next_bytes, plan.total_bytes):
        warnings.append(
            f"cache: {told(plan.cache_bytes)} hold the open windows, but not the next ones: training waits at each "
            "swap."
        )
        advice.append(f"cache_bytes={disk.next_bytes} holds the next windows too.")
    if job.bandwidth is not None and job.bandwidth < COMMON_BYTES_PER_S:
        warnings.append(f"bandwidth: {job.bandwidth * 8 / 1e9:.3g} Gb/s; 1 Gb/s or more is what runs like this have.")
    if job.volume_bytes is not None and job.volume_bytes < min(COMMON_DISK_BYTES, disk.next_bytes):
        warnings.append(
            f"volume: {told(job.volume_bytes)} are less than the {told(min(COMMON_DISK_BYTES, disk.next_bytes))} that "
            "never waiting takes."
        )
    if job.mem_bytes is not None and job.mem_bytes < COMMON_MEM_BYTES:
        warnings.append(f"memory: {told(job.mem_bytes)}; 4 GB or more is what runs like this have.")
    if job.mem_bytes is not None and plan.memory_bytes > job.mem_bytes:
        warnings.append(f"memory: the loader takes {told(plan.memory_bytes)} of {told(job.mem_bytes)}.")
        advice.append(f"batch_size={plan.most_batch} (global {(plan.most_batch or 0) * job.world_size}) fits.")
    if times is not None and times.stall_s > _STALL_PART * times.total_s:
        warnings.append(
            f"bandwidth: training waits {times.stall_s / times.total_s:.0%} of the time for slices "
            f"({words_of_seconds(times.stall_s)} an epoch)."
        )
        if plan.needed_bandwidth is not None:
            advice.append(f"{words_of_rate(plan.needed_bandwidth)} would be enough for never waiting.")
    return warnings, advice
