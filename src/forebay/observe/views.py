"""What `forebay top` and the dashboard show, as one plain value: a view of a job, a run, a node, a loader or `prepare`.

A view is JSON. All of its texts may come from other members or from a corpus: the reader escapes them. Keys
that are missing or empty have nothing to show:

- `kind` (job, run, node, loader, preparation), `title`, `state`, `at` (Unix seconds), `message`; `faults`: why it
  cannot go on, which are in the message, too.
- `progress`: `done`, `total` in `unit`; `epoch` (from 1), `epochs`; `eta_s`.
- `figures`: label to (value, unit); units are B, B/s, tokens/s, samples/s, documents/s, share, s,
  id, and "" for a plain number.
- `waits`: cause to its share of the time of all workers; `advice`: what to do about the largest.
- `coverage`: see `scheduler.activity.coverage`.
- `workers`, `nodes`, `datasets`, `peers`, `stages`, `members`, `tasks`, `attempts`, `rules`, `dropped`: rows,
  each a dict, with the keys of COLUMNS.
- `settings`: of a loader, as it is called; what is its default is left out.
- `events` and `uses`: the last ones, latest first; `samples`: of dropped documents.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from forebay.base import Json
from forebay.load.stats import CAUSES, find_bottleneck, rates
from forebay.units import format_seconds, numbered

View: TypeAlias = Json
Row: TypeAlias = Mapping[str, Any]
Rows: TypeAlias = Sequence[Row]

MAX_ROWS = 1000
_SILENCE = {"silent": "has not reported", "lost": "is gone, silent"}
_MAX_AGE_S = 60.0  # Of a report of a preparation that runs.
_MIN_SHARE = 0.01  # Less waiting than this is none.


def _columns(text: str) -> dict[str, str]:
    """Names of columns, `NAME` or `NAME=UNIT`, with their units."""
    return {name: unit for name, _, unit in (word.partition("=") for word in text.split())}


COLUMNS = {
    "workers": _columns(
        """name state rank rate=tokens/s mfu=share wait_share=share waits_for leases last_seen_s=s cached_bytes=B
        cache_budget_bytes=B origin_bytes=B peer_bytes=B shared_bytes=B step"""
    ),
    "nodes": _columns("name state address bytes_per_s=B/s bytes_sent=B connections"),
    "datasets": _columns("name slices bytes=B tokens share=share members from_origins from_peers reported id"),
    "peers": _columns("peer bytes_sent=B"),
    "stages": _columns("stage state done_share=share documents_in documents_out cpu_s=s elapsed_s=s documents_per_s"),
    "members": _columns("member state tasks last_report_s=s host pid=id running cpu_s=s task error"),
    "tasks": _columns("state running_s=s host node pid=id member task step"),
    "attempts": _columns("kind attempt host node pid=id task reason step"),
    "rules": _columns("rule documents_in documents_out kept_share=share cpu_s=s"),
    "dropped": _columns("rule reason documents share=share"),
}
"""The columns of each table, with their units."""


def make_view(kind: str, title: str, state: str, **parts: Any) -> View:
    """A view of its parts, without those that are None or empty; a figure without a unit may be its number alone.

    `faults` are in its message, too.
    """
    parts["message"] = "; ".join([*parts.get("faults", ()), *filter(None, [parts.get("message")])])
    figures = parts.get("figures", {}).items()
    parts["figures"] = {
        label: figure if isinstance(figure, tuple) else (figure, "") for label, figure in figures if figure is not None
    }
    parts = {name: value for name, value in parts.items() if value not in (None, "", [], {}, ())}
    return {"kind": kind, "title": title, "state": state, "at": round(time.time(), 3), **parts}


def view_of(status: Row, nodes: Rows = (), per_s: float | None = None) -> View:
    """The view of a node's `/v1/status`: a scheduler, coordinator, data node or dashboard.

    Args:
        nodes: Rows of a scheduler's data nodes.
        per_s: Steps a second of a coordinator's run, or bytes a second of a data node.
    """
    if "kind" in status:
        return dict(status)
    if "samples_used" in status:
        return job_view(status, nodes)
    return run_view(status, per_s) if "members" in status else node_view(status, per_s)


def job_view(status: Row, nodes: Rows) -> View:
    """A scheduler's job, of its status and rows of its data nodes."""
    rate, seq_len = status["tokens_per_s"], max(1, status["seq_len"])
    workers = [_worker_row(peer_id, worker, status) for peer_id, worker in status["workers"].items()]
    active = [worker for worker in workers if worker["state"] not in ("silent", "ended", "revoked")]
    remaining, is_served = status["num_samples"] - status["samples_used"], not status["unserved"]
    origin_bytes, peer_bytes = (sum(worker[f"{of}_bytes"] for worker in workers) for of in ("origin", "peer"))
    waits = mean_waits(worker["wait_shares"] for worker in active if worker["processes"])
    aside, num_left_out, total_bytes = status["set_aside"], status["num_left_out"], origin_bytes + peer_bytes
    hidden = status["num_workers"] and not workers
    notes = ["its workers and events are shown to the roles viewer and admin"] if hidden else []
    notes += [f"{num_left_out:,} samples of slices set aside were not used"] if num_left_out else []
    notes += dict.fromkeys(f"slice {item['slice']} is set aside: {item['reason']}" for item in aside[:5])
    figures = {
        "throughput": (rate, "tokens/s"), "workers": len(active) if workers else status["num_workers"],
        "MFU": mean_mfu(active), "waiting": (sum(waits.values()), "share") if waits else None,
        "leases": status["slices_leased"], "asking for leases": status["idle"],
        "slices set aside": len(aside) if aside else None,
        "from data nodes": (origin_bytes, "B") if total_bytes else None,
        "from workers": (peer_bytes, "B") if total_bytes else None,
        "ledger entries": status["ledger_entries"],
    }  # fmt: skip
    return make_view(
        "job", status["name"], status["state"],
        message="; ".join(notes), faults=status["faults"],
        progress={
            "done": status["samples_used"], "total": status["num_samples"], "unit": "samples",
            "epoch": min(status["epoch"] + 1, status["epochs"]), "epochs": status["epochs"],
            "eta_s": remaining * seq_len / rate if rate and remaining and is_served else None,
        },
        figures=figures, waits=waits, advice=advice_of(waits) if is_served else "", coverage=status["coverage"],
        workers=workers, nodes=list(nodes),
        datasets=[{
            "name": status["name"], "id": status["dataset_id"], "slices": status["num_slices"],
            "bytes": status["num_bytes"],
        }],
        events=status["events"] + [
            {
                "at": None, "level": "error",
                "text": f"{p['reports']} workers report wrong bytes of {p['peer_id']}: {p['reason']}",
            }
            for p in status["bad_providers"]
        ],
        uses=status["uses"],
    )  # fmt: skip


def _worker_row(peer_id: str, worker: Row, job: Row) -> Json:
    is_silent = worker["last_seen_s"] > (
        job["lease_s"] / 2 if worker["leases"] else min(job["lease_s"], 5.0)
    )  # it sends in a third of it
    waits = worker["wait_shares"]
    silent = "ended" if job["state"] in ("done", "incomplete") else "silent"
    state = silent if is_silent else "working" if worker["tokens_per_s"] else "idle"
    state = "revoked" if worker["revoked"] else state
    return {
        **worker, "id": peer_id, "name": worker["name"] or peer_id, "state": state, "rate": worker["tokens_per_s"],
        "wait_share": sum(waits.values()), "waits_for": cause_of(waits), "step": worker["batches"],
        "cache_budget_bytes": worker["cache_bytes"],
    }  # fmt: skip


def mean_waits(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean share of each cause over workers."""
    rows = list(shares)
    means = {cause: sum(row.get(cause, 0.0) for row in rows) / max(1, len(rows)) for cause in CAUSES}
    return {cause: round(share, 4) for cause, share in means.items() if share > 0}


def mean_mfu(workers: Rows) -> tuple[float, str] | None:
    """The figure of the mean MFU of the workers that measure it."""
    measured = [worker["mfu"] for worker in workers if worker.get("mfu")]
    return (sum(measured) / len(measured), "share") if measured else None


def cause_of(waits: Mapping[str, float]) -> str:
    """The largest cause of waiting; "" if there is hardly any."""
    if sum(waits.values()) < _MIN_SHARE:
        return ""
    return max(waits, key=lambda cause: waits[cause])


def advice_of(waits: Mapping[str, float]) -> str:
    """A sentence on what training waits for, and what to do."""
    bottleneck = find_bottleneck({cause: waits.get(cause, 0.0) for cause in CAUSES}, 1.0, _MIN_SHARE)
    return str(bottleneck) if bottleneck is not None else ""


def node_row(status: Row, bytes_per_s: float | None) -> Json:
    """A data node's row, of its status."""
    return {
        "name": status["name"] or status["peer_id"], "address": status["address"], "id": status["peer_id"],
        "state": "draining" if status["draining"] else "up", "bytes_sent": status["bytes_sent"],
        "connections": status["connections"], "bytes_per_s": bytes_per_s,
    }  # fmt: skip


def node_view(status: Row, bytes_per_s: float | None) -> View:
    """A data node by itself."""
    row, swarms = node_row(status, bytes_per_s), status["swarms"]
    return make_view(
        "node", row["name"], row["state"], faults=status["faults"],
        figures={
            "sent": (row["bytes_sent"], "B"), "connections": row["connections"], "up": (status["up_s"], "s"),
            "throughput": None if bytes_per_s is None else (bytes_per_s, "B/s"),
        },
        nodes=[row],
        datasets=[
            {**item, **swarms[item["id"]], "reported": ", ".join(swarms[item["id"]]["reported"])}
            if swarms.get(item["id"], {}).get("members") else item
            for item in status["datasets"]
        ],
        peers=[
            {"peer": peer_id, "bytes_sent": sent}
            for peer_id, sent in sorted(status["peers"].items(), key=lambda item: (-item[1], item[0]))[:MAX_ROWS]
        ],
    )  # fmt: skip


def run_view(status: Row, steps_per_s: float | None) -> View:
    """A coordinator's run, of its status."""
    last, generation = status["config"].get("num_steps"), status["generation"]["number"]
    waiting_for = status["min_workers"] - len(status["members"])
    state = "done" if status["done"] else "changing" if status["changing"] else "running" if generation else "waiting"
    workers = [
        {
            "name": member["worker_id"], "rank": member["rank"], "step": member["step"],
            "last_seen_s": member["seen_s"],
            "state": "lost" if member["lost"] else "at a boundary" if member["ready"] else "working",
        }
        for member in status["members"]
    ]  # fmt: skip
    return make_view(
        "run", f"run {status['run_id']}", state,
        faults=status["faults"],
        message=f"waiting for {numbered(waiting_for, 'more worker')}" if not generation and waiting_for > 0 else "",
        progress=last and {
            "done": status["step"], "total": last, "unit": "steps",
            "eta_s": (last - status["step"]) / steps_per_s if steps_per_s else None,
        },
        figures={
            "step": status["step"], "workers": len(workers),
            "generation": generation,
        },
        workers=workers,
    )  # fmt: skip


def loader_view(
    title: str, rank: int, world_size: int, before: Mapping[str, float], after: Mapping[str, float], elapsed_s: float,
    state: Row, total_steps: int | None, cache_bytes: int, cause_in_progress: str,
) -> View:  # fmt: skip
    """A loader of a training process, of two of its `stats()`, `elapsed_s` apart, and its state.

    Args:
        total_steps: Of the run, or of the pass.
        cause_in_progress: What a wait in progress counts as.
    """
    elapsed_s = max(elapsed_s, 1e-9)
    unit, rate, waits, mfu = rates(before, after, elapsed_s)
    waits[cause_in_progress] += max(0.0, min(after["waiting_s"] / elapsed_s, 1.0 - sum(waits.values())))
    waits = {cause: round(share, 4) for cause, share in waits.items() if share > 0}
    steps_per_s = (after["batches"] - before["batches"]) / elapsed_s
    remaining = None if total_steps is None else total_steps - state["step"]
    is_done = remaining is not None and remaining <= 0
    row = {
        "id": f"rank {rank}", "name": f"rank {rank}", "rank": rank, "rate": rate, "mfu": mfu, "step": state["step"],
        "state": "done" if is_done else "working" if steps_per_s else "idle", "last_seen_s": 0.0, "wait_shares": waits,
        "wait_share": sum(waits.values()), "waits_for": cause_of(waits),
        "cached_bytes": int(after.get("cached_bytes", 0)), "cache_budget_bytes": cache_bytes,
        "origin_bytes": int(after.get("fetched_bytes", 0)), "peer_bytes": 0, "shared_bytes": 0,
    }  # fmt: skip
    counts = {key.partition(".")[2]: int(n) for key, n in after.items() if key.startswith(f"{unit}.")}
    return make_view(
        "loader", title, row["state"],
        progress=total_steps and {
            "done": state["step"], "total": total_steps, "unit": "steps",
            "eta_s": remaining / steps_per_s if remaining and steps_per_s else None,
        },
        figures={
            "throughput": (rate, f"{unit}/s"), "MFU": mean_mfu([row]), "waiting": (row["wait_share"], "share"),
            "ranks": world_size, "epoch": state.get("epoch", 0), unit: after[unit],
        },
        waits=waits, advice=advice_of(waits), workers=[row],
        datasets=_dataset_rows(counts),
    )  # fmt: skip


def _dataset_rows(counts: Mapping[str, int]) -> list[Row]:
    total = max(1, sum(counts.values()))
    return [{"name": name, "tokens": n, "share": n / total} for name, n in counts.items()]


def merge_views(views: Sequence[View]) -> View:
    """The views of the ranks of one run as one."""
    if len(views) == 1:
        return views[0]
    latest = max(views, key=lambda view: view["at"])
    workers = [worker for view in views for worker in view.get("workers", [])]
    waits = mean_waits(worker.get("wait_shares", {}) for worker in workers)
    figures = dict(latest.get("figures", {}))
    for label in ("throughput", "tokens", "samples"):
        values = [view["figures"][label] for view in views if label in view.get("figures", {})]
        if values:
            figures[label] = (sum(value for value, _ in values), values[0][1])
    figures["waiting"] = (sum(waits.values()), "share")
    if mfu := mean_mfu(workers):
        figures["MFU"] = mfu
    counts = Counter[str]()
    for view in views:
        counts.update({row["name"]: row.get("tokens", 0) for row in view.get("datasets", [])})
    merged = {**latest, "workers": workers, "waits": waits, "advice": advice_of(waits), "figures": figures}
    return {**merged, "datasets": _dataset_rows(counts)} if counts else merged


def preparation_view(record: Row) -> View:
    """A preparation, of the record of its progress (`prepare.progress`)."""
    stages, read = record["stages"], max(1, record["documents_in"])
    current = next((stage for stage in reversed(stages) if stage["stopped_at"] is None), None)
    rate = current and current["documents_per_s"]
    skipped, events = record["skipped"], [{**item, "level": "warning"} for item in reversed(record["messages"])]
    events += [{"at": None, "level": "warning", "text": f"{n:,} inputs: {reason}"} for reason, n in skipped.items()]
    events += [{"at": None, "level": "warning", "text": f"{r['where']}: {r['reason']}"} for r in record["rejects"]]
    figures = {
        "documents read": record["documents_in"], "kept": record["documents_out"],
        "kept share": (record["documents_out"] / read, "share"), "malformed": record["malformed"],
        "throughput": (rate, "documents/s") if rate else None,
        "processes": len(record["workers"]) or record["num_workers"],
        "CPU time": (sum(record["cpu_s"].values()), "s"), "time": (record["wall_s"], "s"),
        "tasks": record["tasks"], "retries": record["num_retries"],
        "largest process": (record["peak_bytes"], "B") if record["peak_bytes"] else None,
    }  # fmt: skip
    events[:0] = [
        {"at": None, "level": "error", "text": f"job {m['member']} on {m['host']} {_SILENCE[m['state']]} for "
         f"{format_seconds(m['last_report_s'])}: its tasks are taken over"}
        for m in record["members"] if m["state"] in _SILENCE
    ]  # fmt: skip
    age_s = time.time() - record["updated_at"]
    advice = "the same command resumes it" if record["state"] == "interrupted" else ""
    if record["state"] == "running" and age_s >= _MAX_AGE_S:
        advice = f"the last report is {format_seconds(age_s)} old: the process may be gone, or its clock differs"
    return make_view(
        "preparation", record["name"] or record["output"], record["state"],
        faults=[record["error"]] if record["error"] else [], message="" if record["error"] else advice,
        progress=current and {
            "done": current["done"], "total": current["total"], "unit": current["unit"],
            "stage": current["stage"], "eta_s": record["remaining_s"],
        },
        figures=figures,
        stages=[
            {
                **stage, "state": "running" if stage["stopped_at"] is None else "done",
                "done_share": stage["done"] / max(1, stage["total"]),
                **{name: stage[name] or None for name in ("documents_in", "documents_out")},
                "elapsed_s": (stage["stopped_at"] or record["updated_at"]) - stage["started_at"],
            }
            for stage in stages
        ],
        members=record["members"],
        tasks=sorted(
            (
                {**task, "state": "running", "running_s": max(0.0, time.time() - task["started_at"])}
                for task in record["workers"]
            ),
            key=lambda task: -task["running_s"],
        )[:MAX_ROWS],
        attempts=record["retries"][::-1],
        rules=[
            {
                "rule": entry["stage"], "documents_in": entry["documents_in"], "documents_out": entry["documents_out"],
                "kept_share": entry["documents_out"] / max(1, entry["documents_in"]),
                "cpu_s": record["cpu_s"].get(entry["stage"]),
            }
            for entry in record["funnel"]
        ],
        dropped=sorted(
            (
                {"rule": entry["stage"], "reason": reason, "documents": n, "share": n / read}
                for entry in record["funnel"] for reason, n in entry["dropped"].items()
            ),
            key=lambda row: -row["documents"],
        ),
        samples=[
            {"title": f"{s['stage']}: {s['reason']}", "where": s["where"], "text": s["text"]} for s in record["samples"]
        ],
        events=events,
    )  # fmt: skip
