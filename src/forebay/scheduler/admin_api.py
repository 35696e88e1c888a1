"""What a scheduler says of itself: as JSON, as figures for Prometheus, as lines for a person."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.network.app import Metric, counter, gauge
from forebay.scheduler.core import SchedulerCore
from forebay.scheduler.jobs import SchedulerJob

# The span over which a worker's rate is stated.
RATE_SPAN_S = 30.0
MAX_WORKERS_SHOWN = 1000


@dataclass(slots=True)
class WorkerUsage:
    """What is told of a worker since this scheduler began."""

    name: str
    seen_at: float
    samples: int = 0
    tokens: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))

    def used(self, samples: int, tokens: int, now: float) -> None:
        self.samples += samples
        self.tokens += tokens
        self.recent.append((now, tokens))

    def rate(self, now: float) -> float:
        """Tokens a second over the last RATE_SPAN_S."""
        recent = [(at, tokens) for at, tokens in self.recent if at > now - RATE_SPAN_S]
        if len(recent) < 2:
            return 0.0
        return sum(tokens for _, tokens in recent[1:]) / max(0.1, now - recent[0][0])


def job_status(job: SchedulerJob) -> dict[str, Any]:
    """How far a job is; samples count over all epochs, slices in the epoch of each dataset."""
    return {
        "name": job.name,
        "state": _state(job),
        "epoch": min(table.epoch for table in job.tables),
        "epochs": job.spec.epochs,
        "priority": job.spec.priority,
        "samples_used": job.used,
        "samples_leased": sum(table.leased for table in job.tables),
        "num_samples": job.num_samples,
        "slices_used": sum(len(t.samples) if t.done else t.num_used_slices for t in job.tables),
        "num_slices": job.bases[-1],
        "slices_leased": sum(len(table.leases) for table in job.tables),
        "idle": sum(len(table.waiting) for table in job.tables),
        "num_left_out": job.num_left_out,
        "set_aside": [{"slice": index, "reason": reason} for index, reason in sorted(job.reasons.items())],
        "datasets": [
            {
                "name": source.name,
                "dataset_id": source.dataset_id,
                "weight": weight,
                "epoch": table.epoch,
                "samples_used": table.total_used,
            }
            for source, table, weight in zip(job.spec.sources, job.tables, job.weights)
        ],
        "changes": [{"at": at, "weights": list(weights)} for at, weights in job.changes],
        "done": job.done and not job.num_left_out,
    }


def _state(job: SchedulerJob) -> str:
    if job.done:
        return "incomplete" if job.num_left_out else "done"
    return "paused" if job.paused else "running"


def left_out_line(job: Mapping[str, Any]) -> str:
    """Why a job is not done, for a person: its slices that were set aside."""
    asides = job["set_aside"]
    slices = ", ".join(str(aside["slice"]) for aside in asides[:20]) + (", …" if len(asides) > 20 else "")
    reasons = "; ".join(dict.fromkeys(aside["reason"] for aside in asides[:20]))
    return f"job {job['name']!r}: expected every sample to be used, got {job['num_left_out']:,} that nobody used" + (
        f", of slices set aside: {slices} ({reasons})" if asides else ""
    )


def workers_status(workers: Mapping[str, WorkerUsage], core: SchedulerCore, now: float) -> dict[str, Any]:
    """Those heard of last first, at most MAX_WORKERS_SHOWN."""
    latest = sorted(workers.items(), key=lambda item: item[1].seen_at, reverse=True)[:MAX_WORKERS_SHOWN]
    return {
        peer_id: {
            "name": seen.name,
            "samples": seen.samples,
            "last_seen_s": round(now - seen.seen_at, 3),
            "tokens_per_s": round(seen.rate(now), 1),
            "leases": core.sessions.num_leases(peer_id),
        }
        for peer_id, seen in latest
    }


def whole(
    jobs: list[dict[str, Any]], workers: dict[str, Any], claims: list[dict[str, Any]], reports: list[dict[str, Any]]
) -> dict[str, Any]:
    """The answer to `GET /v1/status`: the first job's figures stand at the top, too."""
    first = jobs[0]
    keys = ("name", "epoch", "epochs", "num_slices", "slices_used", "slices_leased", "samples_used", "num_samples")
    return {
        **{key: first[key] for key in keys},
        "dataset_id": first["datasets"][0]["dataset_id"],
        "jobs": jobs,
        "workers": workers,
        "providers": claims,
        "bad_providers": reports,
        "done": all(job["done"] for job in jobs),
    }


def metrics(jobs: Iterable[Mapping[str, Any]], num_workers: int, exchanges: int, cpu_s: float) -> list[Metric]:
    """Figures for `GET /metrics`, from the status of each job."""
    by_name = {job["name"]: job for job in jobs}

    def of(key: str) -> dict[str, float]:
        return {name: float(job[key]) for name, job in by_name.items()}

    return [
        gauge("forebay_job_samples_used", "Samples used, over all epochs.", of("samples_used"), "job"),
        gauge("forebay_job_samples", "Samples of all epochs.", of("num_samples"), "job"),
        gauge("forebay_job_leases", "Live leases.", of("slices_leased"), "job"),
        gauge("forebay_job_idle", "Workers that wait for a lease.", of("idle"), "job"),
        gauge(
            "forebay_job_set_aside", "Slices set aside.", {n: len(j["set_aside"]) for n, j in by_name.items()}, "job"
        ),
        gauge("forebay_workers", "Workers heard of since the start.", float(num_workers)),
        counter("forebay_exchanges_total", "Exchanges answered.", float(exchanges)),
        counter("forebay_desk_seconds_total", "Seconds spent under the desk's lock.", cpu_s),
    ]


def job_line(job: Mapping[str, Any]) -> str:
    """How far a job is, for a person."""
    share = job["samples_used"] / max(1, job["num_samples"])
    return (
        f"{job['name']}: {job['state']}, epoch {min(job['epoch'] + 1, job['epochs'])} of {job['epochs']}, "
        f"{share:.1%} ({job['samples_used']:,} of {job['num_samples']:,} samples)"
        + (f"; {job['num_left_out']:,} samples of slices set aside were not used" if job["num_left_out"] else "")
        + (
            ""
            if job["state"] in ("done", "incomplete")
            else f"; {_count(job['slices_leased'], 'lease')}, {_count(job['idle'], 'worker')} idle"
        )
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def lines(status: Mapping[str, Any]) -> Iterator[str]:
    """The status for a person."""
    for job in status.get("jobs", ()):
        yield job_line(job)
        for dataset in job["datasets"] if len(job["datasets"]) > 1 else ():
            used = dataset["samples_used"]
            epoch = min(dataset["epoch"] + 1, job["epochs"])
            yield f"  {dataset['name']}: weight {dataset['weight']:g}, epoch {epoch}, {used:,} samples"
        for change in job["changes"]:
            yield f"  from sample {change['at']:,} on: weights {', '.join(f'{w:g}' for w in change['weights'])}"
        for aside in job["set_aside"]:
            yield f"  slice {aside['slice']} is set aside: {aside['reason']}"
    workers = status.get("workers", {})
    if workers:
        yield f"{_count(len(workers), 'worker')}, with what they used since this scheduler began:"
        width = max(8, *(len(worker["name"] or peer_id) for peer_id, worker in workers.items()))
        yield f"  {'name':<{width}}  {'tokens/s':>12}  {'samples':>14}  leases  last heard of"
    for peer_id, worker in workers.items():
        yield (
            f"  {worker['name'] or peer_id:<{width}}  {worker['tokens_per_s']:>12,.0f}  {worker['samples']:>14,}  "
            f"{worker['leases']:>6}  {worker['last_seen_s']:,.0f} s ago"
        )
    for bad in status.get("bad_providers", ()):
        yield f"provider {bad['peer_id']} gave wrong bytes ({_count(bad['reports'], 'report')}): {bad['reason']}"
