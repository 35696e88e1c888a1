"""The scheduler's status, as JSON and as a line."""

from collections.abc import Mapping
from typing import Any

from forebay.base import Json
from forebay.scheduler.activity import Activity, coverage
from forebay.scheduler.catalog import Catalog
from forebay.scheduler.core import SchedulerCore
from forebay.units import numbered

MAX_WORKERS_SHOWN = 1000


def job_status(core: SchedulerCore, now: float) -> Json:
    """The progress of the job; samples count over all epochs, slices in this one. `unserved`: that it stands still."""
    table, unserved = core.table, core.unserved(now)
    state = "paused" if core.paused else "waiting" if unserved and not table.leases else "running"
    spec = core.spec
    if table.done:
        state = "incomplete" if core.num_left_out else "done"
    return {
        "name": spec.name, "dataset_id": spec.dataset_id, "state": state, "epoch": table.epoch,
        "epochs": spec.epochs, "samples_used": table.used_before + table.used, "samples_leased": table.leased,
        "num_samples": spec.epochs * table.num_samples, "num_slices": len(table.samples),
        "slices_used": len(table.samples) if table.done else table.num_used_slices,
        "slices_leased": len(table.leases), "idle": len(table.waiting), "num_left_out": core.num_left_out,
        "set_aside": [{"slice": index, "reason": reason} for index, reason in sorted(core.reasons.items())],
        "done": table.done and not core.num_left_out, "unserved": unserved,
    }  # fmt: skip


def full_status(core: SchedulerCore, activity: Activity, catalog: Catalog, ledger_entries: int, now: float) -> Json:
    """The response to `GET /v1/status`; the workers are those seen last, at most MAX_WORKERS_SHOWN."""
    latest = sorted(activity.workers.items(), key=lambda item: item[1].seen_at, reverse=True)
    return {
        **job_status(core, now),
        "seq_len": catalog.seq_len,
        "lease_s": core.spec.lease_s,
        "num_bytes": int(catalog.table.bytes.sum()),
        "tokens_per_s": round(sum(usage.rate(now) for _, usage in latest), 1),
        "num_workers": len(latest),
        "workers": {
            peer_id: {
                **usage.describe(now), "leases": core.sessions.num_leases(peer_id),
                "revoked": peer_id in activity.revoked,
            }
            for peer_id, usage in latest[:MAX_WORKERS_SHOWN]
        },
        "coverage": coverage(core.table, core.reasons),
        "ledger_entries": ledger_entries,
        **activity.describe(),
        "providers": [{"peer_id": claim.peer_id, "address": claim.address} for claim in catalog.claims],
        "bad_providers": [
            {
                "peer_id": peer_id, "sha256": catalog.table.row(index).sha256, "reports": len(reporters),
                "reason": next(iter(reporters.values())),
            }
            for (peer_id, index), reporters in core.reports.items()
        ],
    }  # fmt: skip


def job_line(job: Mapping[str, Any]) -> str:
    """The progress of a job as a line."""
    line = (
        f"{job['name']}: {job['state']}, epoch {min(job['epoch'] + 1, job['epochs'])} of {job['epochs']}, "
        f"{job['samples_used'] / max(1, job['num_samples']):.1%} "
        f"({job['samples_used']:,} of {job['num_samples']:,} samples)"
    )
    if job["num_left_out"]:
        line += f"; {job['num_left_out']:,} samples of slices set aside were not used"
    if job["state"] not in ("done", "incomplete"):
        line += f"; {numbered(job['slices_leased'], 'lease')}, {numbered(job['idle'], 'worker')} idle"
    if job["unserved"]:
        line += f"; {job['unserved']}"
    return line
